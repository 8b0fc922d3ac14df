// The command line: flags into records, help with examples first, the nearest spelling for what does not exist.
// The only file that includes CLI11.
#include <CLI/CLI.hpp>
#include <moekit/version.hpp>

#include <algorithm>
#include <cstdlib>
#include <map>

#include "console.hpp"
#include "spelling.hpp"
#include "values.hpp"
#include "verbs.hpp"

namespace moekit::cli {
namespace {

constexpr const char* kSubjectHelp = "a shape such as e128k8h2048i768:bf16, or a folder with a checkpoint";

/// What a verb is for, then its examples, then everything else: people read the first screen.
class ExamplesFirst : public CLI::Formatter {
 public:
  void add(const CLI::App* app, std::initializer_list<const char*> examples) {
    std::string& text = examples_[app];
    for (const char* example : examples) text += std::string("  ") + example + "\n";
  }
  std::string make_description(const CLI::App* app) const override {
    const auto found = examples_.find(app);
    std::string out = app->get_description() + "\n";
    if (found != examples_.end()) out += "\nExamples:\n" + found->second;
    return out + "\n";
  }

 private:
  std::map<const CLI::App*, std::string> examples_;
};

/// A whole number in a range, with a complaint that people can read.
CLI::Validator whole(std::int64_t least, std::int64_t most = INT64_MAX) {
  return CLI::Validator([least, most](const std::string& text) { return whole_complaint(text, least, most); }, "");
}
CLI::Validator not_empty() {
  return CLI::Validator([](const std::string& text) { return std::string(text.empty() ? "needs a value" : ""); }, "");
}
CLI::Validator between(double least, double most) {
  return CLI::Validator(
      [least, most](const std::string& text) {
        char* end = nullptr;
        const double value = std::strtod(text.c_str(), &end);
        if (*end == '\0' && !text.empty() && value >= least && value <= most) return std::string();
        return text + format(" is no number from %g to %g", least, most);
      },
      "");
}
CLI::Validator one_of(const std::vector<std::string>& words) {
  return CLI::Validator(
      [words](const std::string& text) {
        std::string list;
        for (const std::string& word : words) {
          if (word == text) return std::string();
          list += " " + word;
        }
        return text + " is none of" + list;
      },
      "");
}

void add_device(CLI::App& verb, std::optional<std::string>& device) {
  verb.add_option("--device", device, "cpu or cuda")->type_name("cpu|cuda")->check(one_of({"cpu", "cuda"}));
}
void add_json(CLI::App& verb, bool& json, const char* what) { verb.add_flag("--json", json, what); }
template <class Level>
void add_determinism(CLI::App& verb, Level& level) {
  verb.add_option("--determinism", level, "fast, repeatable or batch_invariant")
      ->type_name("LEVEL")
      ->check(one_of({"fast", "repeatable", "batch_invariant"}));
}
template <class Threads>
void add_threads(CLI::App& verb, Threads& threads) {
  verb.add_option("--threads", threads, "0 = as many as CPU set and quota allow")
      ->type_name("N")
      ->check(whole(0, kMostThreads));
}
void add_tokens(CLI::App& verb, std::optional<std::vector<std::int64_t>>& tokens, const char* what) {
  verb.add_option("--tokens", tokens, what)->delimiter(',')->type_name("N")->check(whole(1, kMostTokens));
}
void add_layer(CLI::App& verb, std::optional<std::int64_t>& layer) {
  verb.add_option("--layer", layer, "decoder layer of a checkpoint, from 0")->type_name("N")->check(whole(0));
}
void add_schemes(CLI::App& verb, std::optional<std::string>& weights, std::optional<std::string>& activations) {
  verb.add_option("--weights", weights, "f32 bf16 f16 int8 fp8_block128")->type_name("SCHEME");
  verb.add_option("--activations", activations, "f32 bf16 f16 int8_token (int8) fp8_group128 (fp8)")
      ->type_name("SCHEME");
}

/// Part of the interface, not of this version: giving it is answered by name.
void add_later(CLI::App& verb, const char* flag, std::vector<std::string>& later) {
  const auto remember = [&later, flag](const CLI::results_t&) {
    later.emplace_back(flag);
    return true;
  };
  verb.add_option(flag, remember, "comes in a later version")->expected(1)->type_name("…")->group("Later");
}

/// Records of all verbs; parse fills one of them.
struct All {
  DoctorArgs doctor;
  InspectArgs inspect;
  ExplainArgs explain;
  RunArgs run;
  VerifyArgs verify;
  BenchArgs bench;
  DemoArgs demo;
  std::vector<std::string> later;  ///< flags of later versions that were given
};

void add_doctor(CLI::App& app, All& all, ExamplesFirst& help) {
  auto* verb = app.add_subcommand("doctor", "What this machine is, what moekit can use of it, and what not and why");
  help.add(verb, {"moekit doctor", "moekit doctor --json"});
  add_json(*verb, all.doctor.json, "one JSON object");
}

void add_inspect(CLI::App& app, All& all, ExamplesFirst& help) {
  auto* verb = app.add_subcommand("inspect", "The MoE layers of a checkpoint, and what runs them here");
  help.add(verb, {"moekit inspect model/", "moekit inspect model/ --json"});
  verb->add_option("DIR", all.inspect.directory, "folder with config.json and model.safetensors")
      ->required()
      ->type_name("");
  add_json(*verb, all.inspect.json, "one JSON object");
}

void add_explain(CLI::App& app, All& all, ExamplesFirst& help) {
  auto* verb = app.add_subcommand("explain", "Which implementations are chosen, which are refused, and why");
  help.add(verb, {"moekit explain e128k8h2048i768:bf16", "moekit explain model/ --layer 1 --tokens 16",
                  "moekit explain e8k2h4096i14336:int8 --json"});
  ExplainArgs& args = all.explain;
  verb->add_option("SHAPE|DIR", args.subject, kSubjectHelp)->required()->type_name("");
  add_layer(*verb, args.layer);
  add_tokens(*verb, args.tokens, "numbers of tokens, separated by commas (1,16,512)");
  verb->add_option("--impl", args.impl, "force experts by name")->type_name("GLOB");
  add_later(*verb, "--ep", all.later);
  add_schemes(*verb, args.weights, args.activations);
  add_threads(*verb, args.threads);
  add_device(*verb, args.device);
  add_determinism(*verb, args.determinism);
  add_json(*verb, args.json, "one JSON object per number of tokens");
}

void add_run(CLI::App& app, All& all, ExamplesFirst& help) {
  auto* verb = app.add_subcommand("run", "Run one MoE layer of a checkpoint, or each of them on the same rows");
  help.add(verb, {"moekit run model/", "moekit run model/ --layer 1 --x x.npy --out y.npy",
                  "moekit run model/ --tokens 256 --routing-out routing.csv"});
  RunArgs& args = all.run;
  verb->add_option("DIR", args.directory, "folder with config.json and model.safetensors")->required()->type_name("");
  add_layer(*verb, args.layer);
  CLI::Option* x = verb->add_option("--x", args.x, "rows [M, K] as .npy: f32, f16, or bf16 as uint16; absent: N(0,1)");
  x->type_name("PATH");
  verb->add_option("--out", args.out, "write y as .npy, f32: [M, K], or [layers, M, K] for all layers")
      ->type_name("PATH");
  verb->add_option("--routing-out", args.routing_out, "write layer,token,slot,expert,weight as CSV")->type_name("PATH");
  verb->add_option("--tokens", args.tokens, "generated rows (16)")
      ->type_name("N")
      ->check(whole(0, kMostTokens))
      ->excludes(x);
  verb->add_option("--seed", args.seed, "of the generated rows")->type_name("N")->check(whole(0))->excludes(x);
  verb->add_option("--impl", args.impl, "force experts by name")->type_name("GLOB");
  for (const char* flag : {"--trace", "--ep"}) add_later(*verb, flag, all.later);
  add_threads(*verb, args.threads);
  add_device(*verb, args.device);
  add_determinism(*verb, args.determinism);
  add_json(*verb, args.json, "one JSON object per layer");
}

void add_verify(CLI::App& app, All& all, ExamplesFirst& help) {
  auto* verb = app.add_subcommand(
      "verify", "Check every implementation against known results, or against float64 where there are none");
  help.add(verb, {"moekit verify model/", "moekit verify e16k4h256i128:bf16",
                  "moekit verify model/ --layer 0 --impl 'cpu.*' --json", "moekit verify shapes/models.txt --bits"});
  VerifyArgs& args = all.verify;
  verb->add_option("SHAPE|DIR", args.subject, std::string(kSubjectHelp) + ", or a file that lists shapes")
      ->required()
      ->type_name("");
  add_layer(*verb, args.layer);
  verb->add_option("--impl", args.impl, "experts implementations (*; with --bits: the plan's choice)")
      ->type_name("GLOB");
  add_tokens(*verb, args.tokens, "generated rows (1,37; with --bits 1,33,512)");
  verb->add_flag("--bits", args.bits,
                 "only whether batch_invariant layers keep their bits on 1, 2, 3 and 8 threads; prints hashes");
  add_threads(*verb, args.threads);
  add_device(*verb, args.device);
  add_json(*verb, args.json, "one JSON object per check");
}

void add_bench(CLI::App& app, All& all, ExamplesFirst& help) {
  auto* verb =
      app.add_subcommand("bench", "Time a layer beside the floor of this machine; results are verified before printed");
  help.add(verb,
           {"moekit bench e128k8h2048i768:bf16 --tokens 1,16,512", "moekit bench model/ --layer 1 --routing zipf:1.1",
            "moekit bench e8k2h4096i1024:bf16 --impl cpu.avx2 --vs cpu.portable",
            "moekit bench e16k4h1024i512:bf16 --tokens 1 --gap-ms 10 --json"});
  BenchArgs& args = all.bench;
  verb->add_option("SHAPE|DIR", args.subject, kSubjectHelp)->required()->type_name("");
  add_layer(*verb, args.layer);
  add_tokens(*verb, args.tokens, "numbers of tokens, separated by commas (1,16,512)");
  add_schemes(*verb, args.weights, args.activations);
  verb->add_option("--impl", args.impl, "experts implementations; absent: the plan's choice")->type_name("GLOB");
  verb->add_option("--vs", args.vs, "paired comparison A, B, A, B with another implementation")->type_name("GLOB");
  verb->add_option("--peer", args.peer, "another library to compare with (none is built in)")->type_name("NAME");
  verb->add_option("--routing", args.routing, "uniform, balanced, zipf:a, hot:n,f, single, trace:FILE")
      ->type_name("KIND");
  add_threads(*verb, args.threads);
  add_device(*verb, args.device);
  add_determinism(*verb, args.determinism);
  verb->add_flag("--batched", args.batched, "the experts alone: batched rows against standard ones, equally many");
  verb->add_option("--gap-ms", args.gap_ms, "sleep between calls; reports the tail and the wake-up cost")
      ->type_name("MS")
      ->check(between(0, 1e6));
  verb->add_option("--seconds", args.seconds, "measuring time per row (1)")->type_name("S")->check(between(0.01, 600));
  verb->add_option("--seed", args.seed, "of rows, weights and routing")->type_name("N")->check(whole(0));
  verb->add_option("--svg", args.svg, "write latency against tokens as a picture")->type_name("FILE");
  add_json(*verb, args.json, "one JSON object per row");
}

void add_demo(CLI::App& app, All& all, ExamplesFirst& help) {
  auto* verb = app.add_subcommand(
      "demo",
      "Half a minute through everything: inspect, run, verify, bench and two pictures of a small trained model");
  help.add(verb, {"moekit demo", "moekit demo --data model/ --out pictures/"});
  verb->add_option("--data", all.demo.data, "checkpoint; absent: the one that comes with the sources");
  verb->add_option("--out", all.demo.out_directory, "folder for the pictures; absent: build/demo of the source tree");
  add_json(*verb, all.demo.json, "one JSON object per line; talk on stderr");
}

std::vector<std::string> names_of_verbs(const CLI::App& app) {
  std::vector<std::string> out;
  for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; }))
    out.push_back(verb->get_name());
  return out;
}

std::vector<std::string> names_of_flags(const CLI::App& app) {
  std::vector<std::string> out;
  for (const CLI::Option* option : app.get_options())  // those of later versions are known, too
    for (const std::string& name : option->get_lnames()) out.push_back("--" + name);
  return out;
}

std::string trimmed(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

Exit usage(const std::string& message, const std::string& verb) {
  talk("moekit: " + message);
  talk("try: moekit " + (verb.empty() ? std::string() : verb + " ") + "--help");
  return Exit::usage;
}

std::string did_you_mean(const std::string& word, const std::vector<std::string>& known) {
  const std::string best = nearest(word, known);
  return best.empty() ? std::string() : "; did you mean " + best + "?";
}

/// Words the parser's complaint: which flag, and what is nearest to it.
Exit explain_failure(const CLI::App& app, const CLI::ParseError& error, int argc, char** argv) {
  const auto chosen = app.get_subcommands();
  const CLI::App& scope = chosen.empty() ? app : *chosen.front();
  const std::string verb = chosen.empty() ? "" : scope.get_name();
  if (chosen.empty() || dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr) {
    const std::vector<std::string> known = names_of_flags(scope);
    for (int i = 1; i < argc; ++i) {
      const std::string word = std::string(argv[i]).substr(0, std::string(argv[i]).find('='));
      if (word.rfind("--", 0) == 0 && std::find(known.begin(), known.end(), word) == known.end())
        return usage("unknown flag " + word + did_you_mean(word, known), verb);
    }
  }
  return usage(error.what(), verb);
}

/// Verbs of later versions.
constexpr const char* kLaterVerbs[] = {"synth", "quantize", "tune",  "plan",   "trace",
                                       "plot",  "pack",     "cache", "config", "report"};

Exit later(const std::string& what) {
  talk("moekit: [later] " + what + " comes in a later version");
  return Exit::unsupported;
}

/// Text that was given must say something.
void refuse_empty_values(CLI::App& app) {
  for (CLI::App* verb : app.get_subcommands([](CLI::App*) { return true; }))
    for (CLI::Option* option : verb->get_options())
      if (option->get_items_expected_max() > 0) option->check(not_empty());
}

Exit dispatch(const CLI::App& app, const All& all) {
  const std::string verb = app.get_subcommands().front()->get_name();
  if (!all.later.empty()) return later(verb + " " + all.later.front());
  if (verb == "doctor") return run_doctor(all.doctor);
  if (verb == "inspect") return run_inspect(all.inspect);
  if (verb == "explain") return run_explain(all.explain);
  if (verb == "run") return run_run(all.run);
  if (verb == "verify") return run_verify(all.verify);
  if (verb == "bench") return run_bench(all.bench);
  return run_demo(all.demo);
}

}  // namespace

Exit run_command_line(int argc, char** argv) {
  CLI::App app{"moekit: a Mixture-of-Experts layer that you can link, and what it takes to trust and time it",
               "moekit"};
  const auto help = std::make_shared<ExamplesFirst>();
  help->add(&app, {"moekit demo                                      half a minute through everything",
                   "moekit doctor                                    this machine",
                   "moekit inspect model/                            what a checkpoint holds",
                   "moekit verify model/                             is every implementation right?",
                   "moekit bench e128k8h2048i768:bf16 --tokens 1,16  how fast, beside the machine's floor",
                   "moekit VERB --help                               the flags of a verb"});
  app.formatter(help);
  All all;
  app.set_version_flag("--version", std::string("moekit ") + version());
  app.require_subcommand(1);
  add_doctor(app, all, *help);
  add_inspect(app, all, *help);
  add_explain(app, all, *help);
  add_run(app, all, *help);
  add_verify(app, all, *help);
  add_bench(app, all, *help);
  add_demo(app, all, *help);
  refuse_empty_values(app);

  if (argc < 2) {
    talk(trimmed(app.help()));
    return Exit::usage;
  }
  const std::string first = argv[1];
  const std::vector<std::string> verbs = names_of_verbs(app);
  if (std::find(std::begin(kLaterVerbs), std::end(kLaterVerbs), first) != std::end(kLaterVerbs)) return later(first);
  if (first.rfind('-', 0) != 0 && std::find(verbs.begin(), verbs.end(), first) == verbs.end()) {
    std::string list;
    for (const std::string& verb : verbs) list += " " + verb;
    return usage("unknown verb " + first + did_you_mean(first, verbs) + " Verbs:" + list, "");
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success&) {  // --help, --version: to stdout
    const auto chosen = app.get_subcommands();
    if (app.count("--version") > 0)
      print(std::string("moekit ") + version());
    else
      print(trimmed(chosen.empty() ? app.help() : chosen.front()->help("moekit")));
    return Exit::ok;
  } catch (const CLI::ParseError& error) {
    return explain_failure(app, error, argc, argv);
  }
  return dispatch(app, all);
}

}  // namespace moekit::cli
