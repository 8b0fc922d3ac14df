// Sizes of one call: which GEMM, how rows and K are blocked, what lies where in the workspaces. Pure functions of the
// problem; every size grows with M, k and the number of threads.
#pragma once
#include <moekit/kit/experts.hpp>
#include <moekit/kit/workspace.hpp>

#include "experts/cpu/pack.hpp"
#include "experts/cpu/unit.hpp"

namespace moekit::cpu {

/// Routes worked on at a time. More tokens are taken in turns: the weights are read again, the scratch stays bounded.
inline constexpr std::int64_t kMaxRoutes = 32768;
/// Panels that share one pass over an A that does not fit the L2 cache.
inline constexpr std::int64_t kPanelGroup = 4;

/// How the rows of one GEMM lie: [block of k][row][kc], so that the rows of a block are one stretch of memory.
struct RowLayout {
  std::int64_t width = 0;    ///< elements of a row, ≥ the k that is multiplied
  std::int64_t element = 4;  ///< bytes
  std::int64_t kc = 0;       ///< k of a block

  std::int64_t row_bytes() const { return width * element; }
};

struct Sizes {
  bool batched = false;
  std::int64_t threads = 1;
  std::int64_t top_k = 1;     ///< slots of a token; 1 if batched
  std::int64_t max_rows = 0;  ///< routes of one turn
  std::int64_t num_local = 0;
  std::int64_t hidden = 0, intermediate = 0;
  ExpertLayout expert;
  Gemm gemm = Gemm::f32;
  bool quantised_h = false;
  std::int64_t kc = 0;           ///< k of a block where there are several
  RowLayout rows1, rows2, h;     ///< rows2: what GEMM2 reads; h: what the activation writes, if that is another buffer
  std::int64_t row_block = 0;    ///< rows gathered at a time
  std::int64_t chunk_bytes = 0;  ///< of per-route partial sums, one thread
};

/// What apply and workspace() are asked for.
struct Request {
  const Unit* unit = nullptr;
  const WeightsSpec* spec = nullptr;
  DType a1 = DType::f32, a2 = DType::f32;  ///< types of the two activations
  std::int64_t rows = 0;                   ///< M, or T·D
  std::int64_t top_k = 1;
  std::int64_t threads = 1;
  bool batched = false;
};
Gemm choose_gemm(const Unit& unit, DType weights, DType activations);
Sizes sizes_of(const Request& request);

/// Rows of one expert that are worked on together.
struct Segment {
  std::int64_t expert = 0;
  std::int64_t first = 0;  ///< position among the routes of the turn
  std::int64_t rows = 0;
  std::int64_t source = 0;  ///< batched: first row of the expert
};

/// Pieces of workspace2 (read until the output is written) and workspace13 (dead by then).
struct Workspace {
  std::int32_t* order = nullptr;    ///< [max_rows] position → route
  std::int32_t* begin = nullptr;    ///< [L + 1] counting sort
  Segment* segments = nullptr;      ///< [min(L, max_rows)]
  std::byte* rows2 = nullptr;       ///< [max_rows] as RowLayout rows2
  float* scale2 = nullptr;          ///< [max_rows, groups]
  std::byte* per_thread = nullptr;  ///< what GEMM2 needs, too
  std::byte* gather = nullptr;      ///< w13: per thread
  std::byte* h = nullptr;           ///< w13: f32, where rows2 holds codes
  std::size_t thread_bytes = 0, gather_bytes = 0;
};
struct WorkspaceBytes {
  std::size_t w13 = 0, w2 = 0;
};
WorkspaceBytes divide(const Sizes& sizes, Bytes w13, Bytes w2, Workspace& out);

/// One thread's share.
struct ThreadScratch {
  float* c = nullptr;            ///< [kPanelGroup][row_block][32]
  float* expanded = nullptr;     ///< [128][32]
  float* partial = nullptr;      ///< chunk_bytes
  const float** rows = nullptr;  ///< [top_k]
  float* weights = nullptr;      ///< [top_k]
  std::byte* a = nullptr;        ///< row_block rows as rows1
  float* a_scale = nullptr;      ///< [row_block, groups]
};
ThreadScratch scratch_of(const Sizes& sizes, const Workspace& ws, std::int64_t thread);

}  // namespace moekit::cpu
