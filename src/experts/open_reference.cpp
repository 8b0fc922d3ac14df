// reference_open: the reference, able to stop after GEMM2. Slot by slot it asks the reference for one route per token,
// unweighted, so that row j * M + t of GEMM2's result is token t, slot j; who closes the sum multiplies and adds.
#include <algorithm>

#include "experts/call.hpp"
#include "experts/reference.hpp"
#include "text.hpp"

namespace moekit::experts {
namespace {

class OpenReference final : public Experts {
 public:
  std::string_view name() const override { return "reference_open"; }
  Verdict supports(const Problem& p) const override { return inner_->supports(p); }
  Formats activation_formats() const override { return {}; }
  bool accepts(const PackFormat& format) const override { return inner_->accepts(format); }
  const PackFormat& preferred_format(const WeightsSpec& spec) const override { return inner_->preferred_format(spec); }
  InputSpec input_spec(const Problem& p) const override { return inner_->input_spec(p); }
  WeightAndReduce weight_and_reduce() const override { return inner_->weight_and_reduce(); }
  bool supports_open_output() const override { return true; }
  Determinism determinism() const override { return inner_->determinism(); }
  Roundings roundings(const Problem& p) const override { return inner_->roundings(p); }
  double estimate_us(const Problem& p, const Ceilings& c) const override { return inner_->estimate_us(p, c) + 1.0; }
  std::string describe(const Problem& p) const override { return inner_->describe(p) + "; open: GEMM2's rows f32"; }

  ExpertsWorkspace workspace(const Problem& p, const ExpertTokens* tokens) const override {
    ExpertsWorkspace out = inner_->workspace(p, tokens);
    WorkspaceCursor w13({}), w2({});
    share(w13, w2, out, p.size);
    out.w13_bytes = w13.used();
    out.w2_bytes = w2.used();
    return out;
  }

  Status apply(const ExpertsArgs& args, ExpertsResult& result) const override {
    ProblemSize size;
    if (Status s = call_size(args, size); !s.ok()) return s;
    WorkspaceCursor w13(args.workspace13), w2(args.workspace2);
    const Shares shares = share(w13, w2, inner_sizes(args, size), size);
    if (!w13.fits() || !w2.fits())
      return Status(StatusCode::workspace_too_small,
                    text::concat("[experts] reference_open needs ", w13.used(), " and ", w2.used(), " bytes, got ",
                                 args.workspace13.size, " and ", args.workspace2.size),
                    "give what workspace() asks for", "workspace13");
    if (!args.leave_open) return inner_->apply(args, result);

    const Tensor gemm2(shares.gemm2.data, DType::f32, {size.k * size.M, size.K});
    for (std::int64_t j = 0; j < size.k; ++j) {
      ExpertsArgs slot = args;
      slot.output = gemm2.slice_rows(j * size.M, (j + 1) * size.M);
      slot.routing.ids = column(args.routing.ids, j);
      slot.routing.weights = column(args.routing.weights, j);
      slot.weight_on_input = true;  // the consumer weights
      slot.leave_open = false;
      slot.workspace13 = shares.inner13;
      slot.workspace2 = shares.inner2;
      if (Status s = inner_->apply(slot, result); !s.ok()) return s;
    }
    result.open = describe_rows(args, size, gemm2, shares);
    return {};
  }

 private:
  struct Shares {
    Bytes inner13, inner2, gemm2, map, ones;
  };

  static Shares share(WorkspaceCursor& w13, WorkspaceCursor& w2, const ExpertsWorkspace& inner,
                      const ProblemSize& size) {
    const auto routes = static_cast<std::size_t>(size.M * size.k);
    Shares shares;
    shares.inner13 = w13.take(inner.w13_bytes);
    shares.gemm2 = w13.take(routes * static_cast<std::size_t>(size.K) * sizeof(float));
    shares.inner2 = w2.take(inner.w2_bytes);
    shares.map = w2.take(routes * sizeof(std::int32_t));
    shares.ones = w2.take(routes * sizeof(float));
    return shares;
  }

  ExpertsWorkspace inner_sizes(const ExpertsArgs& args, const ProblemSize& size) const {
    Problem p;
    p.size = size;
    p.weights = args.weights.spec;
    p.num_experts = args.num_experts;
    return inner_->workspace(p, nullptr);
  }

  static Tensor column(const Tensor& matrix, std::int64_t j) {
    Tensor out = matrix;
    out.data = static_cast<std::byte*>(matrix.data) + j * matrix.stride[1] * bytes(matrix.dtype);
    out.shape[1] = 1;
    return out;
  }

  static UnfinalizedOutput describe_rows(const ExpertsArgs& args, const ProblemSize& size, const Tensor& gemm2,
                                         const Shares& shares) {
    UnfinalizedOutput open;
    open.gemm2_permuted = gemm2;
    open.expanded_to_permuted = Tensor(shares.map.data, DType::i32, {size.M, size.k});
    open.expert_weights = Tensor(shares.ones.data, DType::f32, {size.M, size.k});
    for (std::int64_t t = 0; t < size.M; ++t)
      for (std::int64_t j = 0; j < size.k; ++j) {
        const bool here = local_slot(args.routing.ids.at<std::int32_t>(t, j), args) >= 0;
        open.expanded_to_permuted.at<std::int32_t>(t, j) = here ? static_cast<std::int32_t>(j * size.M + t) : -1;
        open.expert_weights.at<float>(t, j) = args.weight_on_input ? 1.0f : args.routing.weights.at<float>(t, j);
      }
    return open;
  }

  std::unique_ptr<Experts> inner_ = make_reference({});
};

}  // namespace

std::unique_ptr<Experts> make_open_reference(const MakeContext&) { return std::make_unique<OpenReference>(); }

}  // namespace moekit::experts
