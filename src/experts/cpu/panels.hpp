// Rows of one expert times a range of its panels.
#pragma once
#include <algorithm>

#include "cpu/isa.hpp"
#include "experts/cpu/sizes.hpp"

namespace moekit::cpu {

struct PanelJob {
  const Unit* unit = nullptr;
  Gemm gemm = Gemm::f32;
  const PanelLayout* layout = nullptr;
  const std::byte* expert = nullptr;
  std::int64_t first_panel = 0, last_panel = 0;
  const std::byte* a = nullptr;     ///< rows as RowLayout says, `a_rows` of them in a block
  RowLayout rows_layout;            ///< kc = width where K is not cut
  std::int64_t a_rows = 0;          ///< rows that lie together
  std::int64_t row0 = 0, rows = 0;  ///< those that are multiplied
  const float* a_scale = nullptr;   ///< of row0; [rows][groups], i8 and e4m3
  std::int64_t a_scale_stride = 1;  ///< floats
  std::int64_t group = 1;           ///< panels that share a pass over A
  const char* after = nullptr;      ///< weights that the thread reads when this job is done
  ThreadScratch scratch;
};

/// k of a block for a segment of `rows` rows: all of it where every weight is used once.
inline std::int64_t block_of(const Unit& unit, const RowLayout& layout, std::int64_t rows) {
  return rows <= unit.stream_rows ? layout.width : layout.kc;
}
/// Where block `kb` of a segment's rows begins, and the bytes from row to row within it.
inline std::int64_t block_offset(const RowLayout& l, std::int64_t rows, std::int64_t kb) {
  return kb * l.kc * rows * l.element;
}
inline std::int64_t block_stride(const RowLayout& l, std::int64_t kb) {
  return std::min(l.kc, l.width - kb * l.kc) * l.element;
}

inline void multiply_block(const PanelJob& job, std::int64_t panel, std::int64_t kb, float* c, const char* next,
                           int panels = 1) {
  const PanelLayout& l = *job.layout;
  const RowLayout& r = job.rows_layout;
  const std::int64_t k0 = kb * r.kc;
  BlockArgs g;
  g.b = reinterpret_cast<const char*>(job.expert + l.weights) + panel * l.panel_bytes() + k0 * l.k_bytes();
  g.lda = block_stride(r, kb);
  g.a = reinterpret_cast<const char*>(job.a) + block_offset(r, job.a_rows, kb) + job.row0 * g.lda;
  g.rows = job.rows;
  g.k = std::min(r.kc, l.k_padded - k0);
  g.c = c;
  g.first = kb == 0;
  g.next = next;
  g.next_bytes = g.k * l.k_bytes();
  g.panels = panels;
  g.panel_stride = l.panel_bytes();
  g.b_scale_stride = 2 * l.groups;
  g.ahead = vendor() == Vendor::intel ? 1024 : 0;  // helps there, hurts elsewhere
  if (job.gemm == Gemm::e4m3) {
    const std::int64_t at = k0 / kScaleGroup;
    if (job.a_scale) g.a_scale = job.a_scale + at;
    g.a_scale_stride = job.a_scale_stride;
    g.b_scale = reinterpret_cast<const float*>(job.expert + l.scale) + 2 * (panel * l.groups + at);
    g.expanded = job.scratch.expanded;
    g.fast_subnormals = vendor() == Vendor::amd;
  }
  job.unit->gemm[static_cast<int>(job.gemm)](g);
}

inline void settle_panel(const PanelJob& job, std::int64_t panel, float* c) {
  const PanelLayout& l = *job.layout;
  SettleArgs s;
  s.c = c;
  s.rows = job.rows;
  auto column = [&](std::size_t offset) {
    return reinterpret_cast<const float*>(job.expert + offset) + panel * kPanelColumns;
  };
  s.integer = job.gemm == Gemm::i8;
  if (s.integer) {
    s.a_scale = job.a_scale;
    s.a_scale_stride = job.a_scale_stride;
    if (job.unit->i8_offset) s.colsum = reinterpret_cast<const std::int32_t*>(column(l.sum));
  }
  if (l.has_scale && l.groups == 0) s.w_scale = column(l.scale);
  if (l.has_bias) s.bias = column(l.bias);
  if (l.has_poison) s.poison = column(l.poison);
  if (s.w_scale || s.bias || s.poison) job.unit->settle(s);
}

/// done(panel, c): [rows, 32] f32 of a finished panel, biases added.
template <class Done>
void multiply_panels(const PanelJob& job, const Done& done) {
  const PanelLayout& l = *job.layout;
  const RowLayout& r = job.rows_layout;
  const std::int64_t blocks = (l.k_padded + r.kc - 1) / r.kc;
  const auto* weights = reinterpret_cast<const char*>(job.expert + l.weights);
  const std::int64_t stride = job.rows * kPanelColumns;
  for (std::int64_t p0 = job.first_panel; p0 < job.last_panel; p0 += job.group) {
    const std::int64_t p1 = std::min(job.last_panel, p0 + job.group);
    if (job.rows == 1 && blocks == 1)
      multiply_block(job, p0, 0, job.scratch.c, nullptr, static_cast<int>(p1 - p0));
    else
      for (std::int64_t kb = 0; kb < blocks; ++kb)
        for (std::int64_t p = p0; p < p1; ++p) {
          // what comes after this piece: the same block of the next panel, or the next block
          const std::int64_t next_p = p + 1 < p1 ? p + 1 : kb + 1 < blocks ? p0 : p1;
          const std::int64_t next_k = p + 1 < p1 ? kb : kb + 1 < blocks ? kb + 1 : 0;
          const char* next =
              next_p < job.last_panel ? weights + next_p * l.panel_bytes() + next_k * r.kc * l.k_bytes() : job.after;
          if (blocks == 1) next = nullptr;  // one long stream: the processor sees it coming
          multiply_block(job, p, kb, job.scratch.c + (p - p0) * stride, next);
        }
    for (std::int64_t p = p0; p < p1; ++p) {
      float* c = job.scratch.c + (p - p0) * stride;
      settle_panel(job, p, c);
      done(p, c);
    }
  }
}

}  // namespace moekit::cpu
