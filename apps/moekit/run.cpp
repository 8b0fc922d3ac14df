// moekit run: MoE layers of a checkpoint on rows of yours.
#include "console.hpp"
#include "files.hpp"
#include "io/npy.hpp"
#include "json.hpp"
#include "route.hpp"
#include "session.hpp"
#include "stats.hpp"
#include "subject.hpp"
#include "svg.hpp"
#include "verbs.hpp"

namespace moekit::cli {
namespace {

/// The rows as given or generated, in the layer's type.
Buffer input_rows(const RunArgs& args, const LayerConfig& config) {
  if (args.x.empty()) return generated_rows(args.tokens, config.hidden, config.dtype, args.seed);
  require_input(args.x, "run", kLargestArray);
  const io::NpyArray array = io::read_npy(args.x, io::NpyU16::as_bf16);
  const Tensor& x = array.tensor;
  if (x.rank != 2 || x.shape[1] != config.hidden)
    throw Error(StatusCode::bad_file,
                format("[run] %s must be [M, %lld], got %s", args.x.c_str(), static_cast<long long>(config.hidden),
                       shape_string(x).c_str()),
                "rows of the layer's hidden size");
  if (!is_float(x.dtype))
    throw Error(StatusCode::bad_file, format("[run] %s holds %s", args.x.c_str(), name(x.dtype)), "give f32 or f16");
  return converted(x, config.dtype);
}

struct LayerRun {
  SubjectLayer layer;
  std::int64_t tokens = 0;
  std::string experts, router;
  double median_us = 0;
  RoutingStats stats;
};

/// Median of a few calls, the first of which is the result.
double timed_calls(Session& session, const LayerInput& in, const Tensor& y) {
  std::vector<double> samples;
  const double until = now_s() + 0.2;
  do {
    const double start = now_s();
    session.forward(in, y);
    samples.push_back((now_s() - start) * 1e6);
  } while (samples.size() < 5 && now_s() < until);
  return median(samples);
}

/// Runs one layer; y (f32 [M, K]) and the CSV's lines are appended.
LayerRun run_layer(const RunArgs& args, const Subject& subject, const SubjectLayer& layer, std::vector<float>& all,
                   std::string& csv) {
  const LayerConfig& config = layer.config;
  const Buffer x = input_rows(args, config);
  LayerRun out{layer, x.tensor.shape[0], "", "", 0, {}};
  PlanOptions options;
  options.max_tokens = std::max<std::int64_t>(out.tokens, 1);
  options.determinism = determinism_from_name(args.determinism);
  options.experts = args.impl;
  options.executor = &executor_for(args.threads);
  const WeightsSource source = subject.source(layer, config, args.seed);
  Session session(config, options, source);
  const BucketPlan& bucket = session.plan().bucket(out.tokens);
  out.experts = bucket.experts;
  out.router = bucket.router;

  Buffer y(config.dtype, {out.tokens, config.hidden});
  LayerInput in;
  in.hidden = x.tensor;
  out.median_us = timed_calls(session, in, y.tensor);
  const Buffer logits = router_logits(x.tensor, source.router, config.num_experts);
  const RoutingRows routing = route_with(out.router, logits.tensor, config, source.router);
  out.stats = routing_stats(routing.ids.tensor, config.num_experts);
  csv += routing_csv(layer.index, routing.ids.tensor, routing.weights.tensor);
  const Buffer wide = converted(y.tensor, DType::f32);
  all.insert(all.end(), wide.tensor.as<float>(), wide.tensor.as<float>() + wide.tensor.numel());
  return out;
}

void write_output(const RunArgs& args, const std::vector<float>& all, std::size_t layers, std::int64_t tokens,
                  std::int64_t hidden) {
  const auto n = static_cast<std::int64_t>(layers);
  const Tensor y = args.layer ? Tensor(all.data(), DType::f32, {tokens, hidden})
                              : Tensor(all.data(), DType::f32, {n, tokens, hidden});
  io::write_npy(args.out, y);
  talk(format("wrote %s: %s f32", args.out.c_str(), shape_string(y).c_str()));
}

Json record(const LayerRun& run) {
  return Json::object()
      .set("schema", "moekit.run/1")
      .set("layer", run.layer.index)
      .set("module", run.layer.module)
      .set("shape", shape_string(run.layer.config))
      .set("tokens", run.tokens)
      .set("experts", run.experts)
      .set("router", run.router)
      .set("median_us", run.median_us)
      .set("experts_hit", run.stats.active)
      .set("busiest_over_mean", run.stats.busiest_over_mean)
      .set("load_entropy", run.stats.entropy)
      .set("expert_tokens", Json(run.stats.tokens));
}

}  // namespace

Exit run_run(const RunArgs& args) {
  require_distinct({{"--x", args.x}, {"--out", args.out}, {"--routing-out", args.routing_out}});
  for (const std::string* path : {&args.out, &args.routing_out})
    if (!path->empty()) require_output(*path);
  if (device_from_name(args.device.value_or("cpu")).type != DeviceType::cpu)
    throw Error(StatusCode::unsupported, "[run] no CUDA module is loaded", "run on the CPU: --device cpu");
  const Subject subject = Subject::open_checkpoint(args.directory);
  const std::vector<SubjectLayer> layers = subject.layers(args.layer);
  std::vector<float> all;
  std::string csv = routing_csv_header();
  std::vector<LayerRun> runs;
  {
    Progress progress("run", static_cast<std::int64_t>(layers.size()));
    for (const SubjectLayer& layer : layers) {
      if (layer.config.hidden != layers.front().config.hidden)
        throw Error(StatusCode::unsupported, "[run] layers of different hidden sizes", "give --layer N");
      runs.push_back(run_layer(args, subject, layer, all, csv));
      progress.step(layer.module);
    }
  }
  if (!args.out.empty()) write_output(args, all, layers.size(), runs.front().tokens, layers.front().config.hidden);
  if (!args.routing_out.empty()) {
    write_file(args.routing_out, csv);
    talk("wrote " + args.routing_out);
  }
  Table table({"layer", "module", "tokens", "experts", "router", "time", "experts hit", "busiest/mean", "evenness"});
  for (const LayerRun& run : runs) {
    if (args.json) print(record(run).dump());
    table.row({std::to_string(run.layer.index), run.layer.module, std::to_string(run.tokens), run.experts, run.router,
               format_us(run.median_us),
               std::to_string(run.stats.active) + "/" + std::to_string(run.layer.config.num_experts),
               format("%.2f", run.stats.busiest_over_mean), format("%.2f", run.stats.entropy)});
  }
  if (!args.json) print(table.text());
  return Exit::ok;
}

}  // namespace moekit::cli
