// Quantise + dispatch, and combine: the two ends of the pipeline, bundled because their communication must agree.
#pragma once
#include <optional>
#include <string_view>

#include <moekit/kit/pending.hpp>
#include <moekit/kit/problem.hpp>
#include <moekit/kit/quant_config.hpp>
#include <moekit/kit/weight_and_reduce.hpp>

namespace moekit::inline v0 {

/// Names one dispatch, so that finalize finds what prepare left. The engine's; copied freely.
struct DispatchHandle {
  void* state = nullptr;
  std::uint64_t id = 0;
};

struct PrepareArgs {
  Tensor hidden{};                     ///< [M, K] unquantised; read; never modified
  Routing routing{};                   ///< the caller's; ids i32, i64 or u32
  std::int64_t num_experts = 0;        ///< P
  const Tensor* expert_map = nullptr;  ///< i32 [P], local slot or -1
  std::int64_t num_local = 0;          ///< L
  bool weight_on_input = false;        ///< k = 1: weight a copy of the rows, before they are quantised
  InputSpec input{};                   ///< what the experts want
  const QuantConfig* quant = nullptr;
  CallContext context{};  ///< workspace: this stage's share, workspace_bytes()
};

/// Rows that arrived at this rank. Memory is the engine's and valid until finalize of the same handle has been
/// enqueued.
struct Dispatched {
  QTensor activations;                 ///< [rows, K] or [L, T*D, K]; scales [.., groups] beside the data
  std::optional<ExpertTokens> tokens;  ///< rows per local expert
  std::optional<Routing> routing;      ///< replaces the caller's for experts *and* finalize
  DispatchHandle handle{};
};

struct FinalizeArgs {
  Tensor output{};               ///< [M, K]; every element is written
  Tensor expert_output{};        ///< as the experts' reduce says; [0, K] if nothing arrived; read
  Routing routing{};             ///< the caller's, or the one that prepare returned
  bool weight_on_input = false;  ///< weights have been applied already
  WeightAndReduce reduce{};
  DispatchHandle handle{};
  CallContext context{};
};

/// Stateless but for its communicator; may be shared by layers. Every fact is declared; the kernel trusts them.
class MOEKIT_API PrepareFinalize {
 public:
  virtual ~PrepareFinalize() = default;
  virtual std::string_view name() const = 0;
  virtual ActivationFormat activation_format() const = 0;
  virtual std::optional<DType> topk_ids_dtype() const { return std::nullopt; }  ///< informational: engines convert
  virtual std::optional<std::int64_t> max_tokens_per_rank() const { return std::nullopt; }
  virtual std::int64_t num_dispatchers() const { return 1; }
  virtual bool output_is_reduced() const { return true; }  ///< finalize's result is summed over ranks
  virtual bool supports_async() const { return false; }
  virtual bool supports_open_output() const { return false; }  ///< all that finalize does, the consumer can take over
  /// With NoOp the experts may write the caller's output themselves: finalize then gets it as expert_output, too, and
  /// has nothing to do. Only where dispatched row t is the caller's row t.
  virtual bool supports_direct_output() const { return false; }
  virtual Verdict supports(const InputSpec& input) const = 0;
  virtual Verdict supports(const Problem& problem) const {
    (void)problem;
    return Verdict::yes();
  }
  /// Scratch of one prepare + finalize for up to `problem.size.M` rows of the caller; monotone in M.
  virtual std::size_t workspace_bytes(const Problem& problem, const InputSpec& input) const = 0;
  /// Rows that may arrive here when the caller has `problem.size.M`.
  virtual std::int64_t max_rows(const Problem& problem) const { return problem.size.M; }

  virtual Status prepare(const PrepareArgs& args, Dispatched& out) = 0;
  virtual Status finalize(const FinalizeArgs& args) = 0;
  /// Launch without waiting. Only where supports_async().
  virtual Status prepare_async(const PrepareArgs& args, Pending<Dispatched>& out);
  virtual Status finalize_async(const FinalizeArgs& args, Pending<Nothing>& out);
};

}  // namespace moekit::inline v0
