// moekit demo: half a minute through everything, on a small model that was really trained.
#include <filesystem>

#include "console.hpp"
#include "files.hpp"
#include "golden.hpp"
#include "route.hpp"
#include "svg.hpp"
#include "verbs.hpp"

#ifndef MOEKIT_SOURCE_DIR
#define MOEKIT_SOURCE_DIR "."
#endif

namespace moekit::cli {
namespace {
namespace fs = std::filesystem;

constexpr const char* kModel = "tests/data/models/tiny-qwen3-moe";

std::string find_model(const DemoArgs& args) {
  if (!args.data.empty()) return args.data;
  for (const fs::path& root : {fs::path(MOEKIT_SOURCE_DIR), fs::current_path()}) {
    std::error_code ignored;
    if (fs::exists(root / kModel, ignored)) return (root / kModel).string();
  }
  throw Error(StatusCode::bad_file, std::string("[demo] the sample model ") + kModel + " is not here",
              "run in the source tree, or give a checkpoint: --data DIR");
}

fs::path picture_folder(const DemoArgs& args) {
  fs::path out = args.out_directory;
  if (out.empty()) {
    std::error_code ignored;
    const bool in_tree = fs::exists(fs::path(MOEKIT_SOURCE_DIR) / "CMakeLists.txt", ignored);
    out = (in_tree ? fs::path(MOEKIT_SOURCE_DIR) : fs::current_path()) / "build" / "demo";
  }
  std::error_code problem;
  fs::create_directories(out, problem);
  if (problem)
    throw Error(StatusCode::bad_file, "[demo] cannot make " + out.string() + ": " + problem.message(),
                "give a folder that can be written: --out DIR");
  return out;
}

/// Words between the records: on stderr where stdout is for machines.
void say(const DemoArgs& args, const std::string& text) {
  if (args.json)
    talk(text);
  else
    print(text);
}

void heading(const DemoArgs& args, int number, const std::string& title, const std::string& what) {
  say(args, format("\n%d. %s\n   %s\n", number, title.c_str(), what.c_str()));
}

/// Where each layer sends real text (or generated rows, if the folder has no recorded inputs).
void draw_experts(const DemoArgs& args, const Subject& subject, const std::string& path) {
  const std::optional<io::Golden> golden = open_golden(subject);
  std::vector<LayerLoad> loads;
  std::int64_t rows = 0;
  double busiest = 0;
  for (const SubjectLayer& layer : subject.layers()) {
    const WeightsSource source = subject.source(layer, layer.config, 1);
    const std::vector<io::GoldenCase> cases = golden ? golden_cases(*golden, layer) : std::vector<io::GoldenCase>{};
    const Buffer made = generated_rows(cases.empty() ? 2048 : 0, layer.config.hidden, DType::f32, 1);
    const Tensor in = cases.empty() ? made.tensor : cases.back().in;
    const Buffer logits = router_logits(in, source.router, layer.config.num_experts);
    const RoutingRows routing = route_with("reference", logits.tensor, layer.config, source.router);
    const RoutingStats stats = routing_stats(routing.ids.tensor, layer.config.num_experts);
    loads.push_back({layer.index, stats.tokens});
    rows = in.shape[0];
    busiest = std::max(busiest, stats.busiest_over_mean);
  }
  write_file(path, expert_load_svg(
                       "Which experts do the work",
                       format("%s · %s tokens of %s", fs::path(subject.text()).filename().c_str(),
                              format_count(static_cast<double>(rows)).c_str(), golden ? "real text" : "generated rows"),
                       loads));
  say(args, format("   The busiest expert gets %.1f times its share. That skew is why a layer must be fast for uneven "
                   "loads too.",
                   busiest));
}

}  // namespace

Exit run_demo(const DemoArgs& args) {
  const double start = now_s();
  const std::string model = find_model(args);
  const fs::path folder = picture_folder(args);
  const std::string latency = (folder / "latency.svg").string(), experts = (folder / "experts.svg").string();
  require_output(latency);
  require_output(experts);
  say(args,
      "moekit runs the Mixture-of-Experts layers of a model. This is a tour on a byte-level language model that was\n"
      "trained for the purpose; your own checkpoint goes where " +
          model + " stands.");

  heading(args, 1, "inspect", "What is in the checkpoint, and what will run it on this machine.");
  if (const Exit exit = run_inspect({.directory = model, .json = args.json}); exit != Exit::ok) return exit;

  heading(args, 2, "run", "Each MoE layer on 64 generated rows: where the router sends them, and how long it takes.");
  RunArgs run;
  run.directory = model;
  run.tokens = 64;
  run.json = args.json;
  if (const Exit exit = run_run(run); exit != Exit::ok) return exit;
  draw_experts(args, Subject::open_checkpoint(model), experts);

  heading(
      args, 3, "verify",
      "Every implementation against results that another library recorded, then the bits each one promises to keep.");
  VerifyArgs verify;
  verify.subject = model;
  verify.json = args.json;
  if (const Exit exit = run_verify(verify); exit != Exit::ok) return exit;

  heading(args, 4, "bench",
          "One layer, from logits to output, beside the floor: the time this machine needs just to read the weights\n"
          "   or to do the arithmetic, measured between the samples. No row is printed before its result is verified.");
  BenchArgs bench;
  bench.subject = model;
  bench.tokens = {1, 4, 16, 64, 256, 1024};
  bench.seconds = 0.6;
  bench.svg = latency;
  bench.json = args.json;
  if (const Exit exit = run_bench(bench); exit != Exit::ok) return exit;

  say(args, format("\nDone in %.0f s. Two pictures, to open in a browser:\n  %s  time against tokens, with the floor\n "
                   " %s  which "
                   "experts do the work\n\nNext: moekit inspect YOUR-MODEL/, or moekit bench e128k8h2048i768:bf16",
                   now_s() - start, latency.c_str(), experts.c_str()));
  return Exit::ok;
}

}  // namespace moekit::cli
