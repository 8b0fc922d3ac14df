// Permute → GEMM1 → activation → (quantise) → GEMM2 → unpermute: the middle of the pipeline.
#pragma once
#include <array>
#include <optional>
#include <string_view>

#include <moekit/kit/open_output.hpp>
#include <moekit/kit/pack_format.hpp>
#include <moekit/kit/problem.hpp>
#include <moekit/kit/quant_config.hpp>
#include <moekit/kit/weight_and_reduce.hpp>

namespace moekit::inline v0 {

/// Type and shape of a tensor that somebody else will provide.
struct TensorSpec {
  DType dtype = DType::f32;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  MOEKIT_API std::size_t bytes() const;
  MOEKIT_API Tensor on(void* data, Device device) const;  ///< a dense tensor of this spec at `data`
};

/// Scratch and result of one apply. w13 holds what GEMM1 or GEMM2 leaves, w2 what the activation leaves.
/// Unchunked output may share w13's memory: an implementation's last read before it writes output is never w13.
struct ExpertsWorkspace {
  std::size_t w13_bytes = 0;
  std::size_t w2_bytes = 0;
  TensorSpec output{};
};

struct ExpertsArgs {
  Tensor output{};      ///< as workspace().output says; every element is written, unless the result is left open
  QTensor activations;  ///< [M, K] or [L, T*D, K] with the scales that prepare returned
  WeightsView weights;
  Routing routing{};  ///< ids i32 [M, k]; batched: of the tokens that arrived, informative
  Activation activation{};
  std::int64_t num_experts = 0;        ///< P
  const Tensor* expert_map = nullptr;  ///< i32 [P], local slot or -1; ignored where routing.id_space is local
  const QuantConfig* quant = nullptr;
  Tensor a2_scale{};  ///< static scale of the second GEMM's input, sliced with the chunk; absent = dynamic
  Bytes workspace13, workspace2;
  const ExpertTokens* tokens = nullptr;  ///< rows per local expert; required for batched input
  bool weight_on_input = false;          ///< true: weights are in the input already, do not weight again
  bool leave_open = false;               ///< return an open result if the implementation can
  CallContext context{};
};

/// What apply left: `output` was written, or `open` holds GEMM2's rows and output is untouched.
struct ExpertsResult {
  Tensor output;
  std::optional<UnfinalizedOutput> open;
};

/// Where an implementation rounds, besides storing its output: what the error bound is made of (docs/numerics.md) and
/// what explain prints. The default is the loosest that the rounding contract allows without a word: f32 sums in any
/// order, everything between the GEMMs f32.
struct Roundings {
  DType sums = DType::f32;           ///< f32, or f64
  std::int64_t sum_lanes = 1;        ///< a sum over n is made of at least this many partial sums of ≤ ceil(n / lanes)
  bool integer_dots = false;         ///< products of int8 codes are summed exactly
  DType h = DType::f32;              ///< result of the activation, schemes with float activations
  DType expert_output = DType::f32;  ///< GEMM2's row of one route, before it is weighted
  double activation_error = 0x1p-20;  ///< |f̂(g) - f(g)| ≤ this · max(|f(g)|, |g|), f32 arithmetic included
  bool operator==(const Roundings&) const = default;
};

/// One implementation. Immutable; no weights and no per-layer state inside; apply may run on several threads at once.
class Experts {
 public:
  struct Formats {
    ActivationFormat in = ActivationFormat::standard;
    ActivationFormat out = ActivationFormat::standard;
  };
  virtual ~Experts() = default;
  virtual std::string_view name() const = 0;  ///< file, list entry, bench row and what --impl takes
  virtual Verdict supports(const Problem& problem) const = 0;
  virtual Formats activation_formats() const = 0;
  virtual bool accepts(const PackFormat& format) const = 0;
  /// Formats in order of preference; a plan picks one that all its implementations accept.
  virtual const PackFormat& preferred_format(const WeightsSpec& spec) const = 0;
  virtual InputSpec input_spec(const Problem& problem) const = 0;
  /// Monotone in problem.size.M; true for every routing. `tokens` may refine it but is never needed.
  virtual ExpertsWorkspace workspace(const Problem& problem, const ExpertTokens* tokens = nullptr) const = 0;
  virtual WeightAndReduce weight_and_reduce() const = 0;
  virtual bool supports_chunking() const { return true; }
  virtual bool supports_expert_map() const { return true; }
  virtual bool supports_open_output() const { return false; }
  virtual Determinism determinism() const = 0;  ///< the highest level it keeps
  virtual Roundings roundings(const Problem& problem) const {
    (void)problem;
    return {};
  }
  /// Predicted time for problem.size, uniform routing.
  virtual double estimate_us(const Problem& problem, const Ceilings& ceilings) const = 0;
  /// What explain prints: tile configuration, roundings ("h bf16; output f32"), why this unit.
  virtual std::string describe(const Problem& problem) const {
    (void)problem;
    return {};
  }
  virtual Status apply(const ExpertsArgs& args, ExpertsResult& result) const = 0;
};

}  // namespace moekit::inline v0
