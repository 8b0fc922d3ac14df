// What one ISA unit offers to the loop nest: plain functions over plain records. The loop nest (gemm.hpp, forward.cpp)
// is compiled without ISA flags; each unit_*.cpp with its own. Nothing here may need a constructor or a template of
// the standard library: an inline function compiled for a wide unit must never be picked for a narrow CPU.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace moekit::cpu {

inline constexpr int kPanelColumns = 32;  ///< output columns of a panel: 16 gate | 16 up, or 32 of one matrix
inline constexpr int kHalfPanel = 16;
inline constexpr int kScaleGroup = 128;  ///< k that share a scale, e4m3
/// Units decode an e4m3 weight to value / 256; e4m3 activations are kept times 256, others bring it in by the scale.
inline constexpr float kE4m3Shift = 256;

/// A GEMM: weight type in the pack and how it is multiplied.
///   f32 bf16 f16  widened to f32 in registers, f32 activations
///   i8_wide       int8 weights with float activations
///   e4m3          groups of 128 summed from zero, then C = fma(sum, scale, C); f32 activations times 256
///   i8            int8 activations, exact i32 sums
///   bf16_dot      bf16 activations, dot instruction
enum class Gemm : uint8_t { f32, bf16, f16, i8_wide, e4m3, i8, bf16_dot };
inline constexpr int kNumGemms = 7;

/// Types that rows are read and written in.
enum class Element : uint8_t { f32, bf16, f16, e4m3, i8 };

/// C [rows, 32] (+)= A [rows, k] · B [k, 32], a piece of one panel. C is f32, i32 for i8; one accumulator per element,
/// ascending k.
struct BlockArgs {
  const char* b = nullptr;  ///< [k / kp][32][kp], 64-byte aligned
  const char* a = nullptr;
  int64_t lda = 0;  ///< bytes
  int64_t rows = 0;
  int64_t k = 0;       ///< a multiple of kp; e4m3: several groups only when rows ≤ Unit::stream_rows
  float* c = nullptr;  ///< leading dimension 32
  bool first = true;   ///< C starts from zero
  // e4m3
  const float* a_scale = nullptr;  ///< [rows][groups]; null: activations that are no codes
  int64_t a_scale_stride = 0;
  const float* b_scale = nullptr;  ///< [groups][2]: columns 0–15, 16–31
  float* expanded = nullptr;       ///< scratch [128][32] for a decoded group
  // what will be read next: asked for while this piece is multiplied; null = nothing
  const char* next = nullptr;
  int64_t next_bytes = 0;
  // one row: several panels at a time, panel s at b + s · panel_stride, c + 32 s, b_scale + s · b_scale_stride
  int panels = 1;  ///< ≤ Unit::streams; more than 1 only with rows = 1 and all of K
  int64_t panel_stride = 0, b_scale_stride = 0;
  int64_t ahead = 0;             ///< bytes between what is read and what is asked for
  bool fast_subnormals = false;  ///< the processor multiplies subnormal operands at full speed
};

/// i32 sums to f32, scales, biases: C in place.
struct SettleArgs {
  float* c = nullptr;
  int64_t rows = 0;
  const float* a_scale = nullptr;   ///< one per row; null = 1
  int64_t a_scale_stride = 1;       ///< floats; 0 = one for all
  const float* w_scale = nullptr;   ///< [32]; null = 1
  const int32_t* colsum = nullptr;  ///< [32]: i8 sums of the columns, for units that offset activations
  const float* bias = nullptr;      ///< [32]; null = none
  const float* poison = nullptr;    ///< [32]: 0, or NaN where a weight of the column is NaN
  bool integer = false;             ///< C holds i32
};

enum class ActKind : uint8_t { silu, gelu, gelu_tanh, swigluoai, relu2, none };
struct ActArgs {
  const float* c = nullptr;  ///< [rows, 32]
  int64_t rows = 0;
  float* h = nullptr;  ///< [rows, ldh]: 16 columns if gated, else 32
  int64_t ldh = 0;     ///< floats
  int valid = 0;       ///< columns beyond it are written as zero
  ActKind kind = ActKind::silu;
  bool gated = true;
  float alpha = 1, beta = 0, clamp_gate = 0, clamp_up = 0;
  Element round = Element::f32;  ///< h is rounded to it
};

/// out[0, n) = round(Σ_j w_j · rows_j[0, n)), ascending j.
struct ReduceArgs {
  const float* const* rows = nullptr;
  const float* weights = nullptr;  ///< null = 1
  int64_t count = 0;
  int64_t n = 0;
  void* out = nullptr;
  Element type = Element::f32;
};

struct Unit {
  const char* name;
  int max_rows;     ///< rows of the register tile
  int stream_rows;  ///< up to so many rows, every byte of B is read once, in order: no need to cut K
  int streams;      ///< panels that one row reads at a time
  int i8_a_bytes;   ///< bytes of one int8 activation as the kernel reads it
  bool i8_offset;   ///< activations are offset by 128: SettleArgs::colsum
  bool has_bf16_dot;
  void (*gemm[kNumGemms])(const BlockArgs&);
  /// n elements to f32; e4m3 comes times 256.
  void (*widen)(const void* src, Element type, int64_t n, float* dst);
  /// n int8 codes (padded with zeros to a multiple of 4) as the i8 kernel reads them.
  void (*pack_i8)(const int8_t* src, int64_t n, void* dst);
  /// n f32 to bf16, exact where they are bf16 values.
  void (*narrow)(const float* src, int64_t n, void* dst, Element type);
  void (*settle)(const SettleArgs&);
  void (*activate)(const ActArgs&);
  void (*reduce)(const ReduceArgs&);
  /// Largest |x| as bits of an f32: NaN and infinity come out on top.
  uint32_t (*absmax)(const float* x, int64_t n);
  /// int8 codes of x, as quant/quantise.hpp: x · factor, or x / factor; NaN → 0, range [lowest, 127].
  void (*quantise_i8)(const float* x, int64_t n, float factor, bool divide, float lowest, int8_t* codes);
  /// x = 256 · the e4m3 value nearest to x / scale, saturating at ±448, in place.
  void (*quantise_e4m3)(float* x, int64_t n, float scale);
};

extern const Unit kPortableUnit;
#if defined(__x86_64__)
extern const Unit kAvx2Unit;
extern const Unit kAvx512Unit;
extern const Unit kAvx512Bf16Unit;
#endif

}  // namespace moekit::cpu
