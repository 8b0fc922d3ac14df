// One guarded, poisoned call of one implementation, and the same call as the oracle sees it.
#pragma once
#include <moekit/testing/experts_suite.hpp>

#include "experts/oracle.hpp"
#include "testing/suite_data.hpp"

namespace moekit::suite {
using conformance::CheckResult;
using conformance::SuiteOptions;

/// The inputs of a call as tensors, quantised and arranged as an implementation wants them. Owns its memory.
class PreparedCall {
 public:
  /// @param quantised  as the scheme says (what the oracle always sees); false = rows as they are, for implementations
  ///                   that quantise themselves
  PreparedCall(const SuiteCase& c, ActivationFormat format, bool quantised);
  PreparedCall(const PreparedCall&) = delete;
  PreparedCall& operator=(const PreparedCall&) = delete;
  /// Arguments without weights, output and workspaces.
  const ExpertsArgs& args() const { return args_; }
  std::int64_t capacity() const { return capacity_; }  ///< batched: T·D
  const QuantConfig& quant() const { return quant_; }
  /// Nothing that apply() may only read was changed since construction.
  bool intact() const;

 private:
  void arrange_standard(const SuiteCase& c, bool quantised);
  void arrange_batched(const SuiteCase& c, bool quantised);
  void make_activations(const SuiteCase& c, bool quantised, std::int64_t num_rows, std::int64_t stride);
  void write_row(const SuiteCase& c, bool quantised, std::int64_t from, float factor, std::int64_t to);
  void add_routing(const SuiteCase& c);
  Guarded& keep(std::size_t bytes);
  std::vector<Guarded> memory_;
  std::vector<std::vector<std::byte>> copies_;
  QuantConfig quant_;
  ExpertTokens tokens_;
  Tensor map_;
  ExpertsArgs args_;
  std::int64_t capacity_ = 0;
};

struct RunOptions {
  Executor* executor = nullptr;  ///< null = cpu_executor()
  std::byte poison{0xff};        ///< of workspaces and output before the call
  bool output_over_w13 = false;  ///< where it fits
  bool give_counts = true;       ///< standard: pass ExpertTokens, too
};

/// What a call left.
struct RunResult {
  std::string problem;  ///< empty = the call went well
  Guarded memory;       ///< holds `output`
  Tensor output;        ///< as the implementation's reduce left it: [M, K], or [L, T·D, K] for batched experts
};

/// An implementation, made for the format and capacity of a case.
class Subject {
 public:
  Subject(const ExpertsEntry& entry, const SuiteCase& c, std::int64_t capacity);
  const Experts& experts() const { return *experts_; }
  Verdict verdict() const { return experts_->supports(problem_); }
  const Problem& problem() const { return problem_; }
  oracle::Rounded rounded() const;  ///< after its reduce
  bool wants_quantised_rows() const { return !experts_->input_spec(problem_).deferred; }
  RunResult run(const SuiteCase& c, const PreparedCall& call, const RunOptions& options) const;

 private:
  std::string check_input_spec() const;
  RunResult finish(const SuiteCase& c, const ExpertsArgs& args, RunResult result) const;
  std::unique_ptr<Experts> experts_;
  Problem problem_;
};

ActivationFormat format_of(const ExpertsEntry& entry);

}  // namespace moekit::suite
