// The parts of the conformance suite: what each file adds to the report.
#pragma once
#include <functional>

#include "testing/suite_run.hpp"

namespace moekit::suite {

/// What all checks share: who is tested, how closely, and the results so far.
class Suite {
 public:
  Suite(std::span<const ExpertsEntry> entries, const SuiteOptions& options);

  /// Runs a case on every entry and compares with the oracle.
  void check_values(const SuiteCase& c);
  /// The same, and the oracle itself against a closed form: exact(t, column).
  void check_values(const SuiteCase& c, const std::function<double(std::int64_t, std::int64_t)>& exact);
  /// Calls `check` for every entry that takes the case; what it returns is what is wrong, empty = ok.
  void for_each(const SuiteCase& c, const char* check,
                const std::function<std::string(const ExpertsEntry&, const SuiteCase&)>& body);

  const SuiteOptions& options() const { return options_; }
  std::vector<CheckResult> take() { return std::move(results_); }

 private:
  struct Candidate;
  CheckResult result(const ExpertsEntry& entry, const SuiteCase& c, const char* check) const;
  void check_format(const SuiteCase& c, ActivationFormat format,
                    const std::function<double(std::int64_t, std::int64_t)>& exact);
  std::vector<ExpertsEntry> entries_;
  SuiteOptions options_;
  std::vector<CheckResult> results_;
};

/// Refusal that the suite itself makes for an entry: nothing to test ("takes no expert_map").
std::string not_applicable(const Experts& experts, const SuiteCase& c);

/// suite_cases.cpp: routing variants, strides, maps, biases, activations, types, static scales, odd rows.
void check_variants(Suite& suite, const SuiteCase& base);
/// suite_bits.cpp: equal bits where they are promised, isolation of tokens and calls.
void check_bits(Suite& suite, const SuiteCase& base);
/// suite_refusals.cpp: questions and calls that must be refused, workspace sizes.
void check_refusals(Suite& suite, const SuiteCase& base);

/// Same bytes in every element of two results of one shape.
bool same_bits(const Tensor& a, const Tensor& b);
/// Same bytes in row `a_row` of a and `b_row` of b, standard results.
bool same_row(const Tensor& a, std::int64_t a_row, const Tensor& b, std::int64_t b_row);

}  // namespace moekit::suite
