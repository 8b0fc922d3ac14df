// The verbs and what their flags say. args.cpp fills these records, one file per verb reads them.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <moekit/kit/implementations.hpp>

#include "exit_code.hpp"

namespace moekit::cli {

struct DoctorArgs {
  bool json = false;
};

struct InspectArgs {
  std::string directory;
  bool json = false;
};

struct ExplainArgs {
  std::string subject;                              ///< SHAPE or DIR
  std::optional<std::int64_t> layer;                ///< decoder layer of DIR
  std::optional<std::vector<std::int64_t>> tokens;  ///< absent: 1, 16, 512
  std::optional<std::string> device;                ///< absent: cpu
  std::optional<std::string> impl;                  ///< force by glob
  std::optional<std::string> weights, activations;
  std::optional<std::string> determinism;
  std::optional<int> threads;
  bool json = false;
};

struct RunArgs {
  std::string directory;
  std::optional<std::int64_t> layer;
  std::string x, out, routing_out;  ///< file names; empty = none
  std::int64_t tokens = 16;         ///< generated rows when there is no --x
  std::uint64_t seed = 1;
  std::optional<std::string> device;
  std::string impl;
  std::string determinism = "fast";
  int threads = 0;
  bool json = false;
};

struct VerifyArgs {
  std::string subject;  ///< SHAPE, DIR, or a file of shapes
  std::optional<std::int64_t> layer;
  std::optional<std::vector<std::int64_t>> tokens;  ///< generated rows; absent: 1, 37
  std::optional<std::string> impl;                  ///< glob; absent: all
  std::optional<std::string> device;
  std::optional<int> threads;
  std::optional<std::string> routing;           ///< not a flag: the setting of a shape string
  std::optional<std::uint64_t> seed;            ///< likewise
  std::span<const ExpertsEntry> extra_experts;  ///< not a flag: implementations beside the built-in ones
  bool bits = false;  ///< only the bits of batch_invariant layers; absent tokens: 1, 33, 512; absent impl: the plan's
  bool json = false;
};

struct BenchArgs {
  std::string subject;
  std::optional<std::int64_t> layer;
  std::optional<std::vector<std::int64_t>> tokens;
  std::optional<std::string> weights, activations;
  std::optional<std::string> impl;  ///< glob; absent = the plan's choice
  std::optional<std::string> vs;    ///< glob; paired A/B
  std::optional<std::string> peer;
  std::optional<std::string> device;
  std::optional<std::string> routing;      ///< absent: uniform
  std::optional<std::string> determinism;  ///< absent: fast
  std::optional<int> threads;
  bool batched = false;               ///< the experts alone, batched against standard
  double gap_ms = -1;                 ///< ≥ 0: sleep between calls, report the tail and the wake-up cost
  double seconds = 1.0;               ///< measuring time per row
  std::optional<std::uint64_t> seed;  ///< absent: 1
  std::string svg;                    ///< latency picture
  bool json = false;
  std::span<const ExpertsEntry> extra_experts;  ///< not a flag: implementations beside the built-in ones
};

struct DemoArgs {
  std::string data;           ///< checkpoint; empty = the one in the source tree
  std::string out_directory;  ///< pictures; empty = build/demo of the source tree
  bool json = false;
};

Exit run_doctor(const DoctorArgs& args);
Exit run_inspect(const InspectArgs& args);
Exit run_explain(const ExplainArgs& args);
Exit run_run(const RunArgs& args);
Exit run_verify(const VerifyArgs& args);
Exit run_bench(const BenchArgs& args);
Exit run_demo(const DemoArgs& args);

/// Parses and calls the verb; prints help, version and usage errors (with the nearest spelling).
Exit run_command_line(int argc, char** argv);

}  // namespace moekit::cli
