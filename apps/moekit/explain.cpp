// moekit explain: the plan's own words, or the same as JSON.
#include <moekit/plan.hpp>

#include <algorithm>

#include "console.hpp"
#include "json.hpp"
#include "session.hpp"
#include "subject.hpp"
#include "verbs.hpp"

namespace moekit::cli {
namespace {

Json record(const LayerConfig& config, const Plan& plan, const SubjectLayer& layer, std::int64_t tokens) {
  const BucketPlan& bucket = plan.bucket(tokens);
  Json candidates = Json::array();
  for (const Candidate& c : bucket.candidates)
    candidates.push(Json::object()
                        .set("stage", c.stage)
                        .set("name", c.name)
                        .set("chosen", c.chosen)
                        .set("reason", c.reason)
                        .set("estimate_us", c.estimate_us)
                        .set("detail", c.detail));
  return Json::object()
      .set("schema", "moekit.explain/1")
      .set("shape", shape_string(config))
      .set("layer", layer.index)
      .set("module", layer.module)
      .set("weights", weights_scheme(config.quant))
      .set("activations", activations_scheme(config.quant))
      .set("device", to_string(plan.device()))
      .set("determinism", name(plan.features().determinism))
      .set("tokens", tokens)
      .set("bucket", bucket.max_tokens)
      .set("router", bucket.router)
      .set("prepare_finalize", bucket.prepare_finalize)
      .set("experts", bucket.experts)
      .set("format", bucket.format)
      .set("estimate_us", bucket.estimate_us)
      .set("floor_us", bucket.floor_us)
      .set("workspace_bytes", plan.workspace_bytes(tokens))
      .set("candidates", candidates);
}

}  // namespace

Exit run_explain(const ExplainArgs& given) {
  ExplainArgs args = given;
  const Subject subject = Subject::open(args.subject);
  subject.settle("explain", {{"tokens", &args.tokens},
                             {"impl", &args.impl},
                             {"device", &args.device},
                             {"determinism", &args.determinism},
                             {"threads", &args.threads}});
  const Device device = device_from_name(args.device.value_or("cpu"));
  const std::vector<std::int64_t> all_tokens = args.tokens.value_or(std::vector<std::int64_t>{1, 16, 512});
  const SubjectLayer layer = subject.layer(args.layer);
  const LayerConfig config = with_schemes(layer.config, args.weights, args.activations);
  PlanOptions options;
  options.max_tokens = *std::max_element(all_tokens.begin(), all_tokens.end());
  options.determinism = determinism_from_name(args.determinism.value_or("fast"));
  options.experts = args.impl.value_or("");
  options.executor = &executor_for(args.threads.value_or(0));
  const Plan plan = Plan::create(device, config, options);
  bool first = true;
  for (const std::int64_t tokens : all_tokens) {
    if (args.json) {
      print(record(config, plan, layer, tokens).dump());
      continue;
    }
    std::string text = plan.explain(tokens);
    while (!text.empty() && text.back() == '\n') text.pop_back();
    print((first ? "" : "\n") + text);
    first = false;
  }
  return Exit::ok;
}

}  // namespace moekit::cli
