// Who goes where: expert ids and weights per token, and how many rows each expert got.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include <moekit/stream.hpp>
#include <moekit/tensor.hpp>

namespace moekit::inline v0 {

/// What ids mean. physical: an index into all P experts, expert_map (if any) applies, once, inside experts. local: a
/// slot of this rank, expert_map does not apply.
enum class IdSpace : std::uint8_t { physical, local };

/// ids [M, k] in [-1, P) and weights f32 [M, k]; -1 contributes nothing. At the edge ids may be i32, i64 or u32;
/// experts see i32. The same expert twice for one token counts twice. k may differ from the layer's (top-k override).
struct Routing {
  Tensor ids;
  Tensor weights;
  IdSpace id_space = IdSpace::physical;

  std::int64_t num_tokens() const { return ids.rank == 2 ? ids.shape[0] : 0; }
  std::int64_t top_k() const { return ids.rank == 2 ? ids.shape[1] : 0; }
  Routing slice_rows(std::int64_t begin, std::int64_t end) const {
    return {ids.slice_rows(begin, end), weights.slice_rows(begin, end), id_space};
  }
};
/// Shapes, types, strides (last one 1) of a routing as it arrives at the edge: `num_tokens` rows.
MOEKIT_API Status validate(const Routing& routing, std::int64_t num_tokens);

/// Checked mode: every id in [-1, num_experts), i32, i64 or u32; the failure names the value, the row and the slot.
MOEKIT_API Status check_ids(const Tensor& ids, std::int64_t num_experts);
/// ids i32, i64 or u32 [M, k] as i32 [M, k] in `out`; values outside [-1, num_experts) become -1, nothing wraps.
MOEKIT_API Status convert_ids(const Tensor& ids, std::int64_t num_experts, const Tensor& out);

/// Rows per local expert, i32 [L], on the device. The host copy is optional and never needed by an implementation.
/// A present record without counts means "no counts".
struct ExpertTokens {
  Tensor counts;
  std::span<const std::int32_t> host;
  std::shared_ptr<const std::int32_t[]> storage;  ///< set by from_host, keeps both views alive

  /// Copies, so the source may go.
  MOEKIT_API static ExpertTokens from_host(std::span<const std::int32_t> counts, Device device, const Stream& stream);
};

/// counts[e] = number of routes of `ids` (i32 [rows, k]) that land on local expert e; ids outside [0, E), -1 and
/// routes that the map sends elsewhere are not counted.
MOEKIT_API Status count_expert_tokens(const Tensor& ids, const Tensor* expert_map, std::span<std::int32_t> counts);

}  // namespace moekit::inline v0
