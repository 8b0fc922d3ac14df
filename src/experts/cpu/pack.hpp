// The pack "cpu32": what every CPU unit reads.
//
// One expert, sections in this order, each 64-byte aligned, padding zero:
//   w1        ceil(I / 16) panels of 16 gate | 16 up columns, or ceil(I / 32) of 32 up columns if ungated
//   w2        ceil(K / 32) panels of 32 output columns
//   w1_scale, w2_scale    f32; int8: [panel][32]; e4m3: [panel][ceil(k / 128)][2], for columns 0–15 and 16–31
//   w1_sum, w2_sum        i32 [panel][32], int8 only: sums of the codes of a column
//   w1_poison, w2_poison  f32 [panel][32], e4m3 only: NaN where a code of the column is NaN, else 0
//   w1_bias, w2_bias      f32 [panel][32], where the spec has them
// A panel is [k / kp][32][kp]: kp = 1 (f32, f16, e4m3), 2 (bf16: one 64-byte line = 16 columns × 2 k, as the bf16 dot
// instructions want it), 4 (int8). e4m3 has kp = 1 because its bytes become f16 in registers, 8 or 16 columns of one k
// at a time. k is padded to whole groups, e4m3 to 4.
#pragma once
#include <cstdint>

#include <moekit/kit/pack_format.hpp>

namespace moekit::cpu {

/// One matrix of one expert.
struct PanelLayout {
  std::int64_t panels = 0;
  std::int64_t k = 0;         ///< as meant
  std::int64_t k_padded = 0;  ///< as stored
  std::int64_t kp = 1;
  std::int64_t element = 4;                                           ///< bytes
  std::int64_t groups = 0;                                            ///< scales along k, e4m3
  std::size_t weights = 0, scale = 0, sum = 0, poison = 0, bias = 0;  ///< offsets; sections without use have no bytes
  bool has_scale = false, has_sum = false, has_poison = false, has_bias = false;

  std::int64_t k_bytes() const { return 32 * element; }  ///< of one k
  std::int64_t panel_bytes() const { return k_padded * k_bytes(); }
  std::int64_t scales_per_panel() const { return groups > 0 ? 2 * groups : 32; }
};

struct ExpertLayout {
  PanelLayout w1, w2;
  std::size_t bytes = 0;
};
ExpertLayout expert_layout(const WeightsSpec& spec);

const PackFormat& cpu32_format();

}  // namespace moekit::cpu
