// Top-k over integer keys whose order is that of the values; a tournament of three levels. Cost does not depend on
// data.
#pragma once
#include "route/vector.hpp"

namespace moekit::route {
namespace {

// Keys below every number's (that of -inf is -0x7f800001).
constexpr std::int32_t kKeyTaken = INT32_MIN;        // taken, or padding: never chosen while k ≤ E
constexpr std::int32_t kKeyNan = INT32_MIN + 1;      // ranks last
constexpr std::int32_t kKeyDropped = INT32_MIN + 2;  // below everything kept, above NaN

constexpr I8 kLaneIndex = {0, 1, 2, 3, 4, 5, 6, 7};

/// Monotone map from f32 to i32; -0 and +0 are one; NaN must be replaced.
MOEKIT_INLINE I8 order_key(F8 x) {
  const I8 code = (I8)(x + 0.0f);
  return code ^ ((code >> 31) & 0x7fffffff);
}
MOEKIT_INLINE std::int32_t order_key(float x) { return order_key(splat(x))[0]; }
MOEKIT_INLINE float value_of(std::int32_t key) { return __builtin_bit_cast(float, key ^ ((key >> 31) & 0x7fffffff)); }

constexpr std::int64_t kVectorsPerBlock = kBlockColumns / kLanes;  // 4
constexpr std::int64_t kBlocksPerSuper = 8;
constexpr std::int64_t kMaxBlocks = kRowLimit / kBlockColumns;  // 64

MOEKIT_INLINE std::int64_t padded(std::int64_t columns) {
  return (columns + kBlockColumns - 1) / kBlockColumns * kBlockColumns;
}

struct Tournament {
  std::int32_t* keys;  // padded with kKeyTaken; chosen ones are overwritten
  std::int64_t num_blocks, num_supers;
  I8 block[kMaxBlocks];                    // lane-wise maximum of a block's vectors
  I8 super[kMaxBlocks / kBlocksPerSuper];  // lane-wise maximum of a super's blocks

  MOEKIT_INLINE void update_block(std::int64_t b) {
    const std::int32_t* at = keys + b * kBlockColumns;
    block[b] = larger(larger(load<I8>(at), load<I8>(at + 8)), larger(load<I8>(at + 16), load<I8>(at + 24)));
  }
  MOEKIT_INLINE std::int64_t blocks_end(std::int64_t s) const {
    const std::int64_t end = (s + 1) * kBlocksPerSuper;
    return end < num_blocks ? end : num_blocks;
  }
  MOEKIT_INLINE void update_super(std::int64_t s) {
    I8 best = block[s * kBlocksPerSuper];
    for (std::int64_t b = s * kBlocksPerSuper + 1; b < blocks_end(s); ++b) best = larger(best, block[b]);
    super[s] = best;
  }

  Tournament(std::int32_t* from, std::int64_t columns)
      : keys(from),
        num_blocks(padded(columns) / kBlockColumns),
        num_supers((num_blocks + kBlocksPerSuper - 1) / kBlocksPerSuper) {
    for (std::int64_t b = 0; b < num_blocks; ++b) update_block(b);
    for (std::int64_t s = 0; s < num_supers; ++s) update_super(s);
  }

  /// Index of the largest key, the lowest of equals, and takes it out.
  MOEKIT_INLINE std::int64_t take() {
    I8 best = super[0];
    for (std::int64_t s = 1; s < num_supers; ++s) best = larger(best, super[s]);
    best = largest(best);

    std::int64_t s = 0;
    while (mask_bits(super[s] == best) == 0) ++s;
    unsigned hits = 0;  // without branches: which block it is cannot be predicted
    const std::int64_t first = s * kBlocksPerSuper;
    for (std::int64_t b = first; b < blocks_end(s); ++b)
      hits |= static_cast<unsigned>(mask_bits(block[b] == best) != 0) << (b - first);
    const std::int64_t b = first + __builtin_ctz(hits);

    std::int32_t* at = keys + b * kBlockColumns;
    unsigned lanes = 0;
    for (int v = 0; v < kVectorsPerBlock; ++v) lanes |= mask_bits(load<I8>(at + v * kLanes) == best) << (v * kLanes);
    const std::int32_t lane = __builtin_ctz(lanes);
    for (int v = 0; v < kVectorsPerBlock; ++v) {
      const I8 old = load<I8>(at + v * kLanes);
      store(at + v * kLanes, kLaneIndex + static_cast<std::int32_t>(v * kLanes) == lane ? splat(kKeyTaken) : old);
    }
    update_block(b);
    update_super(s);
    return b * kBlockColumns + lane;
  }
};

}  // namespace
}  // namespace moekit::route
