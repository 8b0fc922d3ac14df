// single_rank: row t of the experts is row t of the caller.
#include "dispatch/single_rank.hpp"

#include <moekit/kit/workspace.hpp>

#include "dispatch/finalize.hpp"
#include "dispatch/rows.hpp"
#include "kit/for_rows.hpp"
#include "text.hpp"

namespace moekit::dispatch {
namespace {

using text::concat;

/// The engine's share of a workspace.
struct Shares {
  Bytes ids, rows, scales;
};

Shares share(WorkspaceCursor& cursor, const RowPlan& plan, std::int64_t M, std::int64_t K, std::int64_t k) {
  Shares shares;
  shares.ids = cursor.take(static_cast<std::size_t>(M * k) * sizeof(std::int32_t));
  if (plan.kind == RowPlan::Kind::pass) return shares;
  shares.rows = cursor.take(static_cast<std::size_t>(M) * plan.row_bytes(K));
  shares.scales = cursor.take(static_cast<std::size_t>(M * plan.num_groups) * sizeof(float));
  return shares;
}

class SingleRank final : public PrepareFinalize {
 public:
  std::string_view name() const override { return "single_rank"; }
  ActivationFormat activation_format() const override { return ActivationFormat::standard; }
  bool supports_open_output() const override { return true; }
  bool supports_direct_output() const override { return true; }
  Verdict supports(const InputSpec& input) const override { return can_make(input); }
  Verdict supports(const Problem& problem) const override {
    if (problem.device.type != DeviceType::cpu)
      return Verdict::no(concat("runs on cpu, the problem is on ", to_string(problem.device)));
    return Verdict::yes();
  }

  std::size_t workspace_bytes(const Problem& problem, const InputSpec& input) const override {
    const RowPlan plan = plan_rows(input, problem.hidden_dtype, problem.size.K, problem.weight_on_input);
    WorkspaceCursor cursor({});
    share(cursor, plan, problem.size.M, problem.size.K, problem.size.k);
    return cursor.used();
  }

  Status prepare(const PrepareArgs& args, Dispatched& out) override {
    if (Status s = check_prepare(args); !s.ok()) return s;
    const Tensor& hidden = args.hidden;
    const std::int64_t M = hidden.shape[0], K = hidden.shape[1], k = args.routing.top_k();
    RowPlan plan = plan_rows(args.input, hidden.dtype, K, args.weight_on_input);
    if (Status s = bind_static_scale(args.input, args.quant, M, plan); !s.ok()) return s;
    if (args.weight_on_input && k != 1)
      return Status(StatusCode::invalid_argument, concat("[prepare] weight_on_input needs k = 1, got k = ", k), {},
                    "weight_on_input");
    WorkspaceCursor cursor(args.context.workspace);
    const Shares shares = share(cursor, plan, M, K, k);
    if (!cursor.fits())
      return Status(StatusCode::workspace_too_small,
                    concat("[prepare] single_rank needs ", cursor.used(), " bytes for ", M, " tokens, got ",
                           args.context.workspace.size),
                    {}, "context.workspace");

    if (args.routing.ids.dtype != DType::i32) {
      const Tensor ids(shares.ids.data, DType::i32, {M, k});
      if (Status s = convert_ids(args.routing.ids, args.num_experts, ids); !s.ok()) return s;
      out.routing = Routing{ids, args.routing.weights, args.routing.id_space};
    }
    out.activations.data = hidden;
    if (plan.kind == RowPlan::Kind::pass) return {};
    write_rows(args, plan, shares);
    out.activations = activations(plan, shares, M, K);
    return {};
  }

  Status finalize(const FinalizeArgs& args) override { return reduce_rows(args, name()); }

 private:
  static void write_rows(const PrepareArgs& args, const RowPlan& plan, const Shares& shares) {
    const std::int64_t M = args.hidden.shape[0], K = args.hidden.shape[1];
    const auto row_bytes = static_cast<std::int64_t>(plan.row_bytes(K));
    auto* scales = reinterpret_cast<float*>(shares.scales.data);
    kit::for_rows(args.context.stream, M, K * bytes(args.hidden.dtype), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        const float factor = args.weight_on_input ? args.routing.weights.at<float>(t, 0) : 1.0f;
        make_row(plan, args.hidden, t, factor, shares.rows.data + t * row_bytes, scales + t * plan.num_groups);
      }
    });
  }

  static QTensor activations(const RowPlan& plan, const Shares& shares, std::int64_t M, std::int64_t K) {
    QTensor out;
    out.data = Tensor(shares.rows.data, plan.type, {M, K});
    if (plan.kind != RowPlan::Kind::codes) return out;
    const bool whole = plan.granularity.per_tensor();  // static: every row wrote the same scale
    out.scale = Tensor(shares.scales.data, DType::f32, {whole ? std::min<std::int64_t>(M, 1) : M, plan.num_groups});
    out.granularity = plan.granularity;
    return out;
  }
};

}  // namespace

std::unique_ptr<PrepareFinalize> make_single_rank(const MakeContext&) { return std::make_unique<SingleRank>(); }

}  // namespace moekit::dispatch
