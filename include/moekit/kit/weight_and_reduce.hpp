// Who multiplies expert outputs by the router weights and sums over k.
#pragma once
#include <moekit/kit/routing.hpp>

namespace moekit::inline v0 {

/// Handed by experts to finalize. Equal by kind and, for naive_batched, rank. Sums are f32, in ascending slot order,
/// rounded once; no input is modified.
///
///   no_op          expert_output is [M, K] already: weighted and reduced
///   contiguous     [M*k, K] or [M, k, K]: row t*k + j is token t, slot j
///   naive_batched  [L, T*D, K] of rank `rank`, experts [rank*L, (rank+1)*L): the r-th route of an expert in (token,
///                  slot) order is its row r
///   delegate       finalize chooses; applying it is an error
struct WeightAndReduce {
  enum class Kind : std::uint8_t { no_op, contiguous, naive_batched, delegate };
  Kind kind = Kind::no_op;
  std::int64_t rank = 0;

  static WeightAndReduce no_op() { return {Kind::no_op, 0}; }
  static WeightAndReduce contiguous() { return {Kind::contiguous, 0}; }
  static WeightAndReduce naive_batched(std::int64_t rank = 0) { return {Kind::naive_batched, rank}; }
  static WeightAndReduce delegate() { return {Kind::delegate, 0}; }
  bool operator==(const WeightAndReduce& other) const {
    return kind == other.kind && (kind != Kind::naive_batched || rank == other.rank);
  }

  /// @param output         [M, K] f32, bf16 or f16, every element is written; may be absent for no_op only, which then
  ///                       returns expert_output itself, as it does when both are the same memory
  /// @param expert_output  as the kind says; read
  /// @param routing        ids i32 and weights f32 [M, k]; slots with -1 (and, naive_batched, ids of other ranks) add
  ///                       nothing and their rows are not read
  /// @param weight_on_input  true: the weights have been applied already, every present slot counts once
  /// @param result         the tensor that holds the reduced rows
  MOEKIT_API Status apply(const Tensor& output, const Tensor& expert_output, const Routing& routing,
                          bool weight_on_input, Tensor& result) const;
};
MOEKIT_API std::string to_string(
    const WeightAndReduce& reduce);  ///< "NoOp", "Contiguous", "NaiveBatched(0)", "Delegate"

}  // namespace moekit::inline v0
