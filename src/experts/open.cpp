// cpu_open, reference_open: experts of the list, able to stop after GEMM2. Slot by slot they are asked for one route
// per token, unweighted, so that row j * M + t of GEMM2's result is token t, slot j; who closes the sum multiplies and
// adds. An expert that several slots name is read once for each: dear for many tokens, for few most are named once.
#include <algorithm>

#include "experts/call.hpp"
#include "experts/cpu/experts.hpp"
#include "experts/reference.hpp"
#include "text.hpp"

namespace moekit::experts {
namespace {

class Open final : public Experts {
 public:
  Open(std::string_view name, std::unique_ptr<Experts> inner) : name_(name), inner_(std::move(inner)) {}
  std::string_view name() const override { return name_; }
  Verdict supports(const Problem& p) const override {
    const Verdict whole = inner_->supports(p);
    return whole ? inner_->supports(one_slot(p)) : whole;
  }
  Formats activation_formats() const override { return {}; }
  bool accepts(const PackFormat& format) const override { return inner_->accepts(format); }
  const PackFormat& preferred_format(const WeightsSpec& spec) const override { return inner_->preferred_format(spec); }
  InputSpec input_spec(const Problem& p) const override { return inner_->input_spec(p); }
  WeightAndReduce weight_and_reduce() const override { return inner_->weight_and_reduce(); }
  bool supports_open_output() const override { return true; }
  Determinism determinism() const override { return inner_->determinism(); }
  Roundings roundings(const Problem& p) const override { return inner_->roundings(p); }
  /// Of an open call: what it is there for. Closed, the inner one is never slower.
  double estimate_us(const Problem& p, const Ceilings& c) const override {
    const double slots = static_cast<double>(p.size.k) * inner_->estimate_us(one_slot(p), c);
    return 1.0 + std::max(slots, inner_->estimate_us(p, c));
  }
  std::string describe(const Problem& p) const override {
    return text::concat(inner_->name(), " slot by slot: ", inner_->describe(p), "; open: GEMM2's rows f32");
  }

  ExpertsWorkspace workspace(const Problem& p, const ExpertTokens* tokens) const override {
    ExpertsWorkspace out = inner_->workspace(p, tokens);
    const ExpertsWorkspace slot = inner_->workspace(one_slot(p), nullptr);
    WorkspaceCursor w13({}), w2({});
    share(w13, w2, p.size);
    out.w13_bytes = w13.used() + std::max(out.w13_bytes, slot.w13_bytes);
    out.w2_bytes = w2.used() + std::max(out.w2_bytes, slot.w2_bytes);
    return out;
  }

  Status apply(const ExpertsArgs& args, ExpertsResult& result) const override {
    ProblemSize size;
    if (Status s = call_size(args, size); !s.ok()) return s;
    WorkspaceCursor w13(args.workspace13), w2(args.workspace2);
    const Shares shares = share(w13, w2, size);
    if (!w13.fits() || !w2.fits())
      return Status(StatusCode::workspace_too_small,
                    text::concat("[experts] ", name_, " needs ", w13.used(), " and ", w2.used(),
                                 " bytes and more, got ", args.workspace13.size, " and ", args.workspace2.size),
                    "give what workspace() asks for", "workspace13");
    ExpertsArgs slot = args;
    slot.workspace13 = behind(args.workspace13, w13);
    slot.workspace2 = behind(args.workspace2, w2);
    if (!args.leave_open) return inner_->apply(slot, result);

    const Tensor gemm2(shares.gemm2.data, DType::f32, {size.k * size.M, size.K});
    slot.weight_on_input = true;  // the consumer weights
    slot.leave_open = false;
    for (std::int64_t j = 0; j < size.k; ++j) {
      slot.output = gemm2.slice_rows(j * size.M, (j + 1) * size.M);
      slot.routing.ids = column(args.routing.ids, j);
      slot.routing.weights = column(args.routing.weights, j);
      if (Status s = inner_->apply(slot, result); !s.ok()) return s;
    }
    result.open = describe_rows(args, size, gemm2, shares);
    return {};
  }

 private:
  struct Shares {
    Bytes gemm2, map, weights;
  };

  static Shares share(WorkspaceCursor& w13, WorkspaceCursor& w2, const ProblemSize& size) {
    const auto routes = static_cast<std::size_t>(size.M * size.k);
    Shares shares;
    shares.gemm2 = w13.take(routes * static_cast<std::size_t>(size.K) * sizeof(float));
    shares.map = w2.take(routes * sizeof(std::int32_t));
    shares.weights = w2.take(routes * sizeof(float));
    return shares;
  }

  static Bytes behind(const Bytes& whole, const WorkspaceCursor& taken) {
    return {whole.data + taken.used(), whole.size - taken.used()};
  }

  static Problem one_slot(Problem p) {
    p.size.k = 1;
    p.out_dtype = DType::f32;
    return p;
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
    open.expert_weights = Tensor(shares.weights.data, DType::f32, {size.M, size.k});
    for (std::int64_t t = 0; t < size.M; ++t)
      for (std::int64_t j = 0; j < size.k; ++j) {
        const bool here = local_slot(args.routing.ids.at<std::int32_t>(t, j), args) >= 0;
        open.expanded_to_permuted.at<std::int32_t>(t, j) = here ? static_cast<std::int32_t>(j * size.M + t) : -1;
        open.expert_weights.at<float>(t, j) = args.weight_on_input ? 1.0f : args.routing.weights.at<float>(t, j);
      }
    return open;
  }

  std::string_view name_;
  std::unique_ptr<Experts> inner_;
};

}  // namespace

std::unique_ptr<Experts> make_open_reference(const MakeContext&) {
  return std::make_unique<Open>("reference_open", make_reference({}));
}

/// The widest unit that takes every type: the bf16 dot takes bf16 alone.
std::unique_ptr<Experts> make_open_cpu(const MakeContext& context) {
  const cpu::Isa isa = std::min(cpu::usable_isa(), cpu::Isa::avx512);
  return std::make_unique<Open>("cpu_open", cpu::make_experts(isa, ActivationFormat::standard, context));
}

}  // namespace moekit::experts
