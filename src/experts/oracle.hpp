// What experts should return, in f64, and how far a correct implementation may be from it: docs/numerics.md derives the
// bound. Independent of every implementation in the list (it shares the definitions of activation and quantisation).
// Allocates; for tests, the conformance suite and verification tools.
#pragma once
#include <span>
#include <string>
#include <vector>

#include <moekit/kit/experts.hpp>

namespace moekit::oracle {

/// Roundings of one implementation, the type of its output among them: one bound is computed for each.
struct Rounded {
  Roundings at;
  DType output = DType::f32;
  bool operator==(const Rounded&) const = default;
};

/// Rows of the result. Standard: the weighted sum of the asked tokens. Batched: row r of expert e as 'row' e · T·D + r.
struct Expected {
  std::int64_t columns = 0;
  std::vector<std::int64_t> rows;          ///< which rows of the whole result these are
  std::vector<double> value;               ///< [rows.size(), columns]
  std::vector<std::vector<double>> bound;  ///< one [rows.size(), columns] for each Rounded that was asked about
};

/// The first, the last and `count` seeded ones of `num_rows`, ascending; all of them if there are no more than that.
std::vector<std::int64_t> sample_rows(std::int64_t num_rows, std::int64_t count, std::uint64_t seed);

/// @param call     as apply() would get it, without workspaces and output; weights in the canonical pack, so that
///                 nothing depends on the pack of the implementation under test. Batched activations: tokens->counts
///                 says which rows there are, routing is not looked at.
/// @param rows     standard: tokens to compute; batched: ignored, every row that is there
/// Throws Error if the call does not fit together.
Expected ask(const ExpertsArgs& call, std::span<const Rounded> rounded, std::span<const std::int64_t> rows,
             Executor& executor);

/// The element of a result that is furthest over (or nearest to) its bound.
struct Worst {
  bool ok = true;
  std::int64_t t = 0, c = 0;
  double value = 0, reference = 0, bound = 0;
  double ratio = 0;  ///< |value - reference| / bound
};
/// `output` [rows, K], standard, or [L, T·D, K] as the rows of Expected. Where the reference is not finite or does not
/// fit the output's type, the result must not be finite.
Worst compare(const Tensor& output, const Expected& expected, std::size_t which);

}  // namespace moekit::oracle
