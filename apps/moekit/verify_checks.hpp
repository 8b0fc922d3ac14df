// The kinds of checks that moekit verify makes of one layer.
#pragma once
#include <string>
#include <vector>

#include <moekit/kit/implementations.hpp>

#include "golden.hpp"
#include "verify_report.hpp"

namespace moekit::cli {

/// One layer under test, and the implementations that --impl names.
struct Subjected {
  const SubjectLayer& layer;
  const WeightsSource& source;
  std::string label;  ///< module path or shape string
  std::vector<const ExpertsEntry*> experts;
  VerifyReport& report;
  int threads = 0;  ///< 0 = as many as CPU set and quota allow
  std::span<const ExpertsEntry> extra_experts = {};
};

/// Expected routing of some rows.
struct CaseRows {
  std::string name;
  Tensor in;  ///< f32 [M, K]
  Routing routing;
};

/// Router matrix, then every router of the list, on `in`: ids as sets, weights by id. `logits` may be absent.
void check_routers(Subjected& s, const CaseRows& rows, const Tensor& logits);
/// Every implementation, with the ids given, in every form of the layer that the file has a result for.
void check_golden_experts(Subjected& s, const io::Golden& golden, const io::GoldenCase& of, const CaseRows& rows);
/// Dequantised weights against dequant_hash.json, quantised activations against the file's codes.
void check_golden_codes(Subjected& s, const std::string& directory, const io::Golden& golden,
                        const std::vector<io::GoldenCase>& cases);
/// Every implementation against float64, on rows without a published result.
void check_against_oracle(Subjected& s, const CaseRows& rows);
/// Repeat, permute, pad, split, other thread counts: the bits that each implementation's declared level promises.
void check_determinism(Subjected& s, const CaseRows& rows);
/// batch_invariant, from hidden rows to output, on 1, 2, 3 and 8 threads: equal bits, and the same for rows that are
/// computed alone. `impls`: forced names; an empty one is the plan's choice.
void check_bits(Subjected& s, const std::vector<std::string>& impls, const std::vector<std::int64_t>& tokens);

}  // namespace moekit::cli
