// Conformance of experts implementations: built-in ones and yours. Every value is compared with an f64 oracle within a
// derived bound (docs/numerics.md); memory around outputs and workspaces is guarded and poisoned; declared determinism
// is proven bit for bit.
//
//   constexpr moekit::ExpertsEntry mine{"mine", &make_mine, &available};
//   for (const auto& result : moekit::conformance::run_experts_suite({&mine, 1}, {}))
//     if (!result.ok) puts(moekit::conformance::to_string(result).c_str());
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <moekit/kit/implementations.hpp>

namespace moekit::inline v0::conformance {

struct SuiteOptions {
  /// Lines as in shapes/*.txt ("e8k2h64i96 M=33", a scheme behind the sizes is ignored); empty = a small built-in set.
  std::vector<std::string> shapes;
  /// Weight schemes, each with the activations that it is published with.
  std::vector<std::string> schemes = {"f32", "bf16", "f16", "int8", "fp8_block128"};
  /// Everything (routing variants, biases, activations, determinism, …), or the values check alone.
  bool values_only = false;
  /// Rows compared of each result, beside the first and the last; 0 = all rows. All columns in any case.
  std::int64_t sampled_rows = 32;
  /// Rows computed by the implementation at most: larger M are cut. 0 = no limit.
  std::int64_t max_tokens = 0;
  std::uint64_t seed = 1;
};

struct CheckResult {
  std::string implementation;
  std::string check;  ///< "values", "strided_rows", "threads_do_not_change_bits", …
  std::string shape;  ///< accepted by the command-line tools, followed by M
  bool ok = false;
  bool refused = false;       ///< the implementation said no, with the reason in `note`; ok only if there is one
  std::int64_t t = 0, c = 0;  ///< the worst element …
  double value = 0, reference = 0, bound = 0;  ///< … what it is, should be, and may be away
  std::string note;                            ///< what else is wrong, in words
};
/// "cpu.avx2 strided_rows e8k2h64i96:bf16 M=33: [4, 17] is 0.5, should be 0.25 ± 1e-05"
MOEKIT_API std::string to_string(const CheckResult& result);

/// Runs every check on every entry whose available() says yes. Results in order of shape, scheme, check, entry. The
/// oracle is computed once for all entries, so give several at a time. Throws Error for shapes that do not parse, and
/// for entries whose make() gives nothing at all.
MOEKIT_API std::vector<CheckResult> run_experts_suite(std::span<const ExpertsEntry> entries,
                                                      const SuiteOptions& options = {});

}  // namespace moekit::inline v0::conformance
