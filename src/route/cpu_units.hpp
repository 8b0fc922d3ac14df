// What the routing stage runs per instruction set. Plain data and functions only: this header is read by translation
// units compiled with instruction-set flags, which must share no inline code with the rest of the library.
#pragma once
#include <cstdint>

namespace moekit::route {

inline constexpr std::int64_t kRowLimit = 2048;    ///< most experts
inline constexpr std::int64_t kTopKLimit = 64;     ///< most experts a token
inline constexpr std::int64_t kBlockColumns = 32;  ///< biases are padded to a multiple of it

enum class FloatType : std::uint8_t { f32, bf16, f16 };
enum class ScoreKind : std::uint8_t { softmax, softmax_selected, sigmoid, sqrt_softplus, identity };

/// A checked call, flattened.
struct RowsTask {
  const void* logits = nullptr;  ///< [M, E]
  FloatType type = FloatType::f32;
  std::int64_t logits_stride = 0;
  std::int32_t* ids = nullptr;  ///< [M, k]
  std::int64_t ids_stride = 0;
  float* weights = nullptr;  ///< [M, k]
  std::int64_t weights_stride = 0;
  std::int64_t num_experts = 0, top_k = 0;

  ScoreKind score = ScoreKind::softmax;
  const float* logit_bias = nullptr;      ///< padded; null = none
  const float* selection_bias = nullptr;  ///< padded; null = none
  std::int64_t num_groups = 1, keep_groups = 1;
  bool group_top2 = false;  ///< else the maximum
  bool fill_zero = false;   ///< else below everything kept
  bool renormalise = false;
  double renorm_p = 1, renorm_eps = 0;
  bool eps_is_floor = false;  ///< max(norm, eps), else norm + eps
  double scale = 1;

  /// Rows whose largest logit is not finite: done elsewhere.
  void (*odd_row)(const void* context, std::int64_t row) = nullptr;
  const void* context = nullptr;
};

/// Part of logits = hidden · weightᵀ.
struct GemmTask {
  const void* hidden = nullptr;  ///< [M, K]
  FloatType hidden_type = FloatType::f32;
  std::int64_t hidden_stride = 0;
  const void* weight = nullptr;  ///< [E, K]
  FloatType weight_type = FloatType::f32;
  std::int64_t weight_stride = 0;
  float* logits = nullptr;  ///< [M, E]
  std::int64_t logits_stride = 0;
  std::int64_t depth = 0;  ///< K
};
struct GemmRange {
  std::int64_t row_begin = 0, row_end = 0, expert_begin = 0, expert_end = 0;
};

struct CpuUnit {
  const char* name;
  void (*route_rows)(const RowsTask& task, std::int64_t begin, std::int64_t end);
  void (*gemm)(const GemmTask& task, const GemmRange& range);
};
extern const CpuUnit kPortableUnit;
#if defined(__x86_64__)
extern const CpuUnit kAvx2Unit;
#endif

/// The unit for this machine, chosen once.
const CpuUnit& cpu_unit();

}  // namespace moekit::route
