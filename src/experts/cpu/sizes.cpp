#include "experts/cpu/sizes.hpp"

#include <algorithm>

#include "cpu/isa.hpp"

namespace moekit::cpu {
namespace {

constexpr std::int64_t kChunkBytes = 4 << 20;  // partial sums of one thread: the more, the less often h is read again
constexpr std::int64_t kGatherBytes = 3 << 20;

std::int64_t round_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b * b; }

/// 16 KiB of weights (32 KiB of f32 where L1 holds 48): with the rows of a tile they stay in L1 while all row tiles
/// pass over them.
std::int64_t block_k(Gemm gemm) {
  switch (gemm) {
    case Gemm::i8: return 512;
    case Gemm::bf16:
    case Gemm::f16:
    case Gemm::bf16_dot: return 256;
    case Gemm::e4m3: return kScaleGroup;
    default: return caches().l1 >= (48 << 10) ? 256 : 128;
  }
}
std::int64_t row_element(const Unit& unit, Gemm gemm) {
  return gemm == Gemm::i8 ? unit.i8_a_bytes : gemm == Gemm::bf16_dot ? 2 : 4;
}

}  // namespace

Gemm choose_gemm(const Unit& unit, DType weights, DType activations) {
  switch (weights) {
    case DType::bf16: return unit.has_bf16_dot && activations == DType::bf16 ? Gemm::bf16_dot : Gemm::bf16;
    case DType::f16: return Gemm::f16;
    case DType::i8: return activations == DType::i8 ? Gemm::i8 : Gemm::i8_wide;
    case DType::e4m3: return Gemm::e4m3;
    default: return Gemm::f32;
  }
}

Sizes sizes_of(const Request& r) {
  const WeightsSpec& spec = *r.spec;
  Sizes s;
  s.batched = r.batched;
  s.threads = std::max<std::int64_t>(r.threads, 1);
  s.top_k = r.batched ? 1 : std::max<std::int64_t>(r.top_k, 1);
  s.num_local = spec.num_local;
  s.hidden = spec.hidden;
  s.intermediate = spec.intermediate;
  const std::int64_t tokens = r.batched ? spec.num_local * r.rows : r.rows;
  s.max_rows = std::min(tokens * s.top_k, std::max(kMaxRoutes, s.top_k));  // monotone in rows and in top_k
  s.expert = expert_layout(spec);
  s.gemm = choose_gemm(*r.unit, spec.w1.type, r.a1);
  s.quantised_h = !is_float(r.a2);
  s.kc = block_k(s.gemm);
  const std::int64_t columns = spec.gated ? kHalfPanel : kPanelColumns;
  const std::int64_t h_width = round_up(spec.intermediate, columns);
  const std::int64_t element = row_element(*r.unit, s.gemm);
  s.rows1 = {s.expert.w1.k_padded, element, s.kc};
  s.rows2 = {h_width, element, s.kc};
  s.h = {h_width, 4, s.kc};
  const std::int64_t fitting = kGatherBytes / std::max<std::int64_t>(1, s.rows1.width * 4);
  s.row_block = std::min(s.max_rows, std::clamp<std::int64_t>(fitting / 6 * 6, 24, 192));
  const std::int64_t panel = s.max_rows * kPanelColumns * 4;
  s.chunk_bytes = r.batched ? 0 : std::min(s.expert.w2.panels * panel, std::max(kChunkBytes, panel));
  return s;
}

namespace {

struct Carver {
  WorkspaceCursor cursor;
  template <class T>
  T* take(std::int64_t count) {
    return reinterpret_cast<T*>(cursor.take(static_cast<std::size_t>(count) * sizeof(T)).data);
  }
};

void carve_thread(const Sizes& s, Carver& at, ThreadScratch& out) {
  out.c = at.take<float>(kPanelGroup * s.row_block * kPanelColumns);
  out.expanded = at.take<float>(s.gemm == Gemm::e4m3 ? kScaleGroup * kPanelColumns : 0);
  out.partial = at.take<float>(s.chunk_bytes / 4);
  out.rows = at.take<const float*>(s.top_k);
  out.weights = at.take<float>(s.top_k);
}
void carve_gather(const Sizes& s, Carver& at, ThreadScratch& out) {
  out.a = at.take<std::byte>(s.row_block * s.rows1.row_bytes());
  out.a_scale = at.take<float>(s.row_block * std::max<std::int64_t>(1, s.expert.w1.groups));
}

}  // namespace

WorkspaceBytes divide(const Sizes& s, Bytes w13, Bytes w2, Workspace& out) {
  ThreadScratch unused;
  Carver one_thread{WorkspaceCursor({})}, one_gather{WorkspaceCursor({})};
  carve_thread(s, one_thread, unused);
  carve_gather(s, one_gather, unused);
  out.thread_bytes = one_thread.cursor.used();
  out.gather_bytes = one_gather.cursor.used();
  Carver at{WorkspaceCursor(w2)};
  out.order = at.take<std::int32_t>(s.batched ? 0 : s.max_rows);
  out.begin = at.take<std::int32_t>(s.batched ? 0 : s.num_local + 1);
  out.segments = at.take<Segment>(std::min(s.num_local, s.max_rows) + 1);
  out.rows2 = at.take<std::byte>(s.max_rows * s.rows2.row_bytes());
  out.scale2 = at.take<float>(s.quantised_h ? s.max_rows * std::max<std::int64_t>(1, s.expert.w2.groups) : 0);
  out.per_thread = at.take<std::byte>(s.threads * static_cast<std::int64_t>(out.thread_bytes));
  Carver early{WorkspaceCursor(w13)};
  out.gather = early.take<std::byte>(s.threads * static_cast<std::int64_t>(out.gather_bytes));
  out.h = early.take<std::byte>(s.gemm == Gemm::i8 ? s.max_rows * s.h.row_bytes() : 0);
  return {early.cursor.used(), at.cursor.used()};
}

ThreadScratch scratch_of(const Sizes& s, const Workspace& ws, std::int64_t thread) {
  ThreadScratch out;
  const auto index = static_cast<std::size_t>(thread);
  Carver at{WorkspaceCursor({ws.per_thread + index * ws.thread_bytes, ws.thread_bytes})};
  carve_thread(s, at, out);
  Carver early{WorkspaceCursor({ws.gather + index * ws.gather_bytes, ws.gather_bytes})};
  carve_gather(s, early, out);
  return out;
}

}  // namespace moekit::cpu
