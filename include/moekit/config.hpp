// What a layer is, as data: activation, router, quantisation, sizes. No implementation is named here.
#pragma once
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include <moekit/export.hpp>
#include <moekit/tensor.hpp>

namespace moekit::inline v0 {

// ---- activation ------------------------------------------------------------------------------------------------

enum class ActivationKind : std::uint8_t { silu, gelu, gelu_tanh, swigluoai, relu2, none };
/// Where gate and up lie among the N = 2I rows of w1, as stored by the checkpoint. Packs and kernels see halves.
enum class GateLayout : std::uint8_t { halves, interleaved };

/// h = f(gate, up). With g = min(gate, clamp_gate) and u = clamp(up, -clamp_up, clamp_up):
///   silu, gelu (erf), gelu_tanh, relu2, gated:  f(g) · u       ungated: f(u), one matrix
///   swigluoai (gpt-oss):                        g · σ(alpha·g) · (u + beta)
///   none, ungated:                              u
/// silu and swigluoai share alpha: silu is g · σ(alpha·g), alpha 1.
struct Activation {
  ActivationKind kind = ActivationKind::silu;
  bool gated = true;
  GateLayout layout = GateLayout::halves;
  float alpha = 1.0f;
  float beta = 0.0f;
  float clamp_gate = std::numeric_limits<float>::infinity();  ///< upper bound of gate; must be > 0
  float clamp_up = std::numeric_limits<float>::infinity();    ///< bound of |up|; must be > 0
  bool operator==(const Activation&) const = default;

  static Activation swigluoai(float limit = 7.0f, float alpha = 1.702f) {
    return {ActivationKind::swigluoai, true, GateLayout::halves, alpha, 1.0f, limit, limit};
  }
};
MOEKIT_API const char* name(ActivationKind kind);
MOEKIT_API std::string to_string(
    const Activation& activation);                         ///< "silu", "relu2 ungated", "swigluoai(alpha=1.702, …)"
MOEKIT_API Status validate(const Activation& activation);  ///< clamps > 0, alpha finite, ungated kinds, …

// ---- router ----------------------------------------------------------------------------------------------------

enum class Score : std::uint8_t { softmax, sigmoid, sqrt_softplus, identity };
enum class SoftmaxOver : std::uint8_t { all, selected };  ///< selected: top-k on logits, softmax over the k
enum class GroupScore : std::uint8_t { max, top2_sum };
enum class GroupFill : std::uint8_t { neg_inf, zero };  ///< choice score of experts in dropped groups
enum class RenormEps : std::uint8_t { add, max };       ///< sum + eps, or max(sum, eps)
enum class RouterSource : std::uint8_t { logits, external, custom, simulated };
enum class Simulated : std::uint8_t { uniform, balanced, zipf, hot, single };

/// Routing rule (Shazeer et al. 2017; DeepSeek-V3 for groups and selection bias), per token:
///   z = logits + logit_bias;  s = score(z);  c = s + selection_bias
///   groups: keep the `keep` best of `n` equal groups by `group_score` of c; the others' c becomes `fill`
///   ids = the k largest c (ties: the lower index; a NaN logit ranks last); w = s[ids] (never c)
///   softmax_over selected: ids by z + selection_bias, w = softmax of z over the k
///   renormalise: w /= norm_p(w) with eps;  w *= scale
/// w is f32, ids i32. A row with a NaN among its logits gets NaN weights, no other row does; 0/0 is weight 0 (a row
/// without mass). Without selection_bias the logits themselves choose (scores increase with them: underflow makes no
/// ties), and fill zero sets s as well as c: an expert of a dropped group weighs 0. Scores below 2^-126 are 0.
struct RouterConfig {
  RouterSource source = RouterSource::logits;
  Score score = Score::softmax;
  SoftmaxOver softmax_over = SoftmaxOver::all;
  bool selection_bias = false;  ///< RouterTensors::selection_bias is given: chooses, does not weigh
  bool logit_bias = false;      ///< RouterTensors::logit_bias is given: part of the logit
  std::int64_t num_groups = 1;
  std::int64_t keep_groups = 1;
  GroupScore group_score = GroupScore::max;
  GroupFill group_fill = GroupFill::neg_inf;
  bool renormalise = false;
  float renorm_p = 1.0f;
  RenormEps renorm_eps_mode = RenormEps::add;
  float renorm_eps = 0.0f;
  float scale = 1.0f;            ///< routed_scaling_factor, folded into the weights
  bool weight_on_input = false;  ///< k = 1 only: the weight multiplies the expert's input (Llama 4)

  Simulated simulated = Simulated::uniform;  ///< source = simulated: the distribution …
  double simulated_a = 1.0;                  ///< … zipf exponent, or the share of the hot experts
  std::int64_t simulated_n = 1;              ///< … number of hot experts
  std::uint64_t seed = 0;
  bool operator==(const RouterConfig&) const = default;
};
MOEKIT_API std::string to_string(const RouterConfig& router);
/// k in [1, E], groups that divide E, top2_sum with ≥ 2 experts a group, k within the kept groups, finite eps, …
MOEKIT_API Status validate(const RouterConfig& router, std::int64_t num_experts, std::int64_t top_k);

// ---- quantisation ----------------------------------------------------------------------------------------------

/// One operand of one GEMM.
struct QuantDesc {
  DType type = DType::bf16;
  Granularity granularity{};  ///< of the scales; ignored for float types
  bool static_scale = false;  ///< activations: the scale is given (QuantTensors::a1_scale / a2_scale), not computed
  bool global_scale = false;  ///< a second, per-tensor scale
  bool zero_point = false;
  bool operator==(const QuantDesc&) const = default;
};

/// Types and granularities of the four operands: part of the plan. Values are in QuantTensors.
struct QuantSpec {
  QuantDesc a1, w1, a2, w2;
  /// int8 activations: scale = absmax / 127 (as the serving kernels), or / 127.5 (compressed-tensors).
  float int8_divisor = 127.0f;
  bool operator==(const QuantSpec&) const = default;

  /// Nothing quantised: weights and activations are `type`.
  static QuantSpec plain(DType type) { return {{type, {}}, {type, {}}, {type, {}}, {type, {}}, 127.0f}; }

  bool weights_quantised() const { return !is_float(w1.type) || !is_float(w2.type); }
  bool activations_quantised() const { return !is_float(a1.type) || !is_float(a2.type); }
};

/// Scheme names of the command line. Weights: f32 bf16 f16 int8 fp8_block128. Activations: f32 bf16 f16 int8_token
/// (int8), fp8_group128 (fp8), or "" for what the weights' scheme is published with (int8 → int8_token, fp8_block128
/// → fp8_group128, floats → themselves). Unknown and unsupported combinations are failures that list what there is.
MOEKIT_API Status quant_from_names(std::string_view weights, std::string_view activations, QuantSpec& out);
MOEKIT_API std::string weights_scheme(const QuantSpec& quant);      ///< "int8", …
MOEKIT_API std::string activations_scheme(const QuantSpec& quant);  ///< "int8_token", …
MOEKIT_API Status validate(const QuantSpec& quant);

// ---- layer -----------------------------------------------------------------------------------------------------

/// fast: any order. repeatable: same call, same bits. batch_invariant: a token's bits depend on its own input alone,
/// not on other tokens, their number, padding, chunking or threads.
enum class Determinism : std::uint8_t { fast, repeatable, batch_invariant };
MOEKIT_API const char* name(Determinism level);

/// A dense expert that every token passes, added to the routed sum; width 0 = none.
struct SharedExpertConfig {
  std::int64_t intermediate = 0;
  bool quantised =
      false;  ///< its matrices are stored in the experts' scheme, with scales; otherwise in the layer's dtype
  bool sigmoid_gate = false;  ///< times σ(hidden · gate), gate [1, K] (qwen2_moe)
  Activation activation{};
  bool operator==(const SharedExpertConfig&) const = default;
};

/// Everything that defines y = Σ_j w_j · Expert_j(x) (+ shared(x)); no tuning, no device.
struct LayerConfig {
  std::int64_t num_experts = 0;   ///< E, 1 … 2048
  std::int64_t top_k = 0;         ///< k ≤ min(E, 64) with a router of ours; any k ≤ E with external routing
  std::int64_t hidden = 0;        ///< K ≥ 1
  std::int64_t intermediate = 0;  ///< I ≥ 1
  DType dtype = DType::bf16;      ///< of hidden and of the output: f32, bf16 or f16
  Activation activation{};
  RouterConfig router{};
  /// Where nothing is said: nothing is quantised. When dtype is assigned later, this must be, too: float activations
  /// that are neither dtype nor f32 are refused.
  QuantSpec quant = QuantSpec::plain(dtype);
  bool w1_bias = false;
  bool w2_bias = false;
  SharedExpertConfig shared{};
  bool operator==(const LayerConfig&) const = default;

  std::int64_t w1_rows() const { return activation.gated ? 2 * intermediate : intermediate; }  ///< N
};
MOEKIT_API Status validate(const LayerConfig& config);
/// "e128k8h2048i768:bf16": accepted by every tool where SHAPE stands.
MOEKIT_API std::string shape_string(const LayerConfig& config);

}  // namespace moekit::inline v0
