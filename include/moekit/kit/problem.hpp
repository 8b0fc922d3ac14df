// The question that implementations answer: sizes, formats, types, and what the caller demands.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include <moekit/config.hpp>
#include <moekit/kit/routing.hpp>

namespace moekit::inline v0 {

/// standard: rows [rows, K]. batched_experts: [L, T*D, K], the first counts[e] rows of each expert are valid.
enum class ActivationFormat : std::uint8_t { standard, batched_experts };
MOEKIT_API const char* name(ActivationFormat format);

/// The experts of this rank as they are meant, whatever their pack looks like.
struct WeightsSpec {
  std::int64_t num_local = 0;     ///< L
  std::int64_t hidden = 0;        ///< K
  std::int64_t intermediate = 0;  ///< I
  bool gated = true;
  QuantDesc w1{}, w2{};
  bool w1_bias = false;
  bool w2_bias = false;
  bool operator==(const WeightsSpec&) const = default;

  std::int64_t w1_rows() const { return gated ? 2 * intermediate : intermediate; }  ///< N
};
MOEKIT_API WeightsSpec weights_spec(const LayerConfig& config, std::int64_t num_local);

/// Sizes as experts see them. M = rows after dispatch; batched: T*D.
struct ProblemSize {
  std::int64_t L = 0, M = 0, N = 0, K = 0, k = 0;
  bool operator==(const ProblemSize&) const = default;
  /// From the activations ([M,K] or [L,T*D,K]), the weights' spec (never packed extents) and the ids. Every mismatch
  /// is a failure that names both numbers: K against the spec's hidden, M against the ids' rows (standard), L
  /// (batched).
  MOEKIT_API static Status from(const Tensor& activations, const WeightsSpec& weights, const Tensor& ids,
                                ProblemSize& out);
};

/// How the rows must arrive at experts. The dispatcher says at build whether it can deliver that.
struct InputSpec {
  enum class ScaleLayout : std::uint8_t { row_major, token_major, packed_ue8m0 };
  DType dtype = DType::bf16;
  Granularity granularity{};  ///< of the scales, for quantised types
  ScaleLayout scale_layout = ScaleLayout::row_major;
  bool static_scale = false;  ///< the scale is QuantTensors::a1_scale
  float int8_divisor = 127.0f;
  bool deferred = false;  ///< rows arrive unquantised, experts quantise them
  bool operator==(const InputSpec&) const = default;
  bool quantised() const { return !deferred && !is_float(dtype); }
};
MOEKIT_API std::string to_string(const InputSpec& spec);

/// Sizes of a batched dispatcher; batched experts are built with them.
struct BatchedShape {
  std::int64_t max_tokens_per_rank = 0;  ///< T
  std::int64_t num_dispatchers = 1;      ///< D
  bool operator==(const BatchedShape&) const = default;
};

/// What an Experts implementation is asked to do.
struct Problem {
  Device device{};
  ProblemSize size{};            ///< M is the most rows that will be asked for
  std::int64_t num_experts = 0;  ///< P, the id space
  ActivationFormat format = ActivationFormat::standard;
  std::optional<BatchedShape> batched;
  WeightsSpec weights{};
  QuantSpec quant{};
  Activation activation{};
  DType hidden_dtype = DType::bf16;  ///< of the caller's rows
  std::optional<DType> out_dtype;    ///< demanded type of the experts' output; absent = the implementation's word
  Determinism determinism = Determinism::fast;
  bool weight_on_input = false;
  bool expert_map = false;
  int threads = 1;  ///< CPU: the executor's concurrency
};
/// "e128k8h2048i768:bf16 M=512": for messages.
MOEKIT_API std::string to_string(const Problem& problem);

/// Limits of the machine, measured once per process. 0 = unknown.
struct Ceilings {
  double read_gbps = 0;  ///< DRAM, all threads
  double l3_gbps = 0;
  double f32_gflops = 0;       ///< f32 FMA of the ISA unit asked about, all threads
  double bf16_dot_gflops = 0;  ///< bf16 dot instruction; 0 where there is none
  double int8_gops = 0;        ///< best 8-bit dot sequence of the unit
  int threads = 1;
};

}  // namespace moekit::inline v0
