// single_rank_batched: rows are scattered to [L, T*D, K], the r-th route of an expert in (token, slot) order to its
// row r, and gathered from there.
#include <algorithm>

#include <moekit/kit/workspace.hpp>

#include "dispatch/finalize.hpp"
#include "dispatch/rows.hpp"
#include "dispatch/single_rank.hpp"
#include "kit/for_rows.hpp"
#include "reduce/row_sum.hpp"
#include "text.hpp"

namespace moekit::dispatch {
namespace {

using text::concat;

struct Shares {
  Bytes places;  ///< i64 [M, k]: row of [L * T*D] that a route went to, or -1
  Bytes ids, counts, rows, scales;
};

class SingleRankBatched final : public PrepareFinalize {
 public:
  SingleRankBatched(const BatchedShape& shape, std::int64_t rank) : shape_(shape), rank_(rank) {}

  std::string_view name() const override { return "single_rank_batched"; }
  ActivationFormat activation_format() const override { return ActivationFormat::batched_experts; }
  std::optional<std::int64_t> max_tokens_per_rank() const override { return shape_.max_tokens_per_rank; }
  std::int64_t num_dispatchers() const override { return shape_.num_dispatchers; }
  Verdict supports(const InputSpec& input) const override { return can_make(input); }
  Verdict supports(const Problem& problem) const override {
    if (problem.device.type != DeviceType::cpu)
      return Verdict::no(concat("runs on cpu, the problem is on ", to_string(problem.device)));
    return Verdict::yes();
  }
  std::int64_t max_rows(const Problem&) const override { return capacity(); }

  std::size_t workspace_bytes(const Problem& problem, const InputSpec& input) const override {
    const RowPlan plan = plan_rows(input, problem.hidden_dtype, problem.size.K, true);
    WorkspaceCursor cursor({});
    share(cursor, plan, problem.size);
    return cursor.used();
  }

  Status prepare(const PrepareArgs& args, Dispatched& out) override {
    if (Status s = check_prepare(args); !s.ok()) return s;
    const std::int64_t M = args.hidden.shape[0], K = args.hidden.shape[1], k = args.routing.top_k(), L = args.num_local;
    RowPlan plan = plan_rows(args.input, args.hidden.dtype, K, true);
    if (Status s = bind_static_scale(args.input, args.quant, M, plan); !s.ok()) return s;
    if (Status s = check(args, M, k); !s.ok()) return s;
    WorkspaceCursor cursor(args.context.workspace);
    const Shares shares = share(cursor, plan, {L, M, 0, K, k});
    if (!cursor.fits())
      return Status(StatusCode::workspace_too_small,
                    concat("[prepare] ", name(), " needs ", cursor.used(), " bytes for ", M, " tokens, got ",
                           args.context.workspace.size),
                    {}, "context.workspace");

    Routing routing = args.routing;
    if (routing.ids.dtype != DType::i32) {
      routing.ids = Tensor(shares.ids.data, DType::i32, {M, k});
      if (Status s = convert_ids(args.routing.ids, args.num_experts, routing.ids); !s.ok()) return s;
      out.routing = routing;
    }
    if (Status s = place(args, routing, shares); !s.ok()) return s;
    write_rows(args, routing, plan, shares);

    const std::int64_t T = capacity();
    out.activations.data = Tensor(shares.rows.data, plan.type, {L, T, K});
    if (plan.kind == RowPlan::Kind::codes) {
      out.activations.scale = Tensor(shares.scales.data, DType::f32, {L, T, plan.num_groups});
      out.activations.granularity = plan.granularity.per_tensor() ? Granularity{1, -1} : plan.granularity;
    }
    ExpertTokens tokens;
    tokens.counts = Tensor(shares.counts.data, DType::i32, {L});
    tokens.host = {tokens.counts.as<std::int32_t>(), static_cast<std::size_t>(L)};
    out.tokens = std::move(tokens);
    out.handle = {shares.places.data, static_cast<std::uint64_t>(M)};
    return {};
  }

  Status finalize(const FinalizeArgs& args) override {
    const Tensor& rows = args.expert_output;
    if (rows.numel() == 0) {
      fill_zero(args.output);
      return {};
    }
    if (Status s = check_finalize(args); !s.ok()) return s;
    const std::int64_t k = args.routing.top_k(), T = capacity();
    const auto* places = static_cast<const std::int64_t*>(args.handle.state);
    kit::for_rows(args.context.stream, args.output.shape[0], k * args.output.shape[1] * bytes(rows.dtype),
                  [&](std::int64_t begin, std::int64_t end) {
                    for (std::int64_t t = begin; t < end; ++t)
                      reduce::sum_row(args.output.index(t), rows.dtype, k, [&](std::int64_t j) -> reduce::Term {
                        const std::int64_t place = places[t * k + j];
                        if (place < 0) return {};
                        const float weight = args.weight_on_input ? 1.0f : args.routing.weights.at<float>(t, j);
                        return {rows.index(place / T).index(place % T).data, weight};
                      });
                  });
    return {};
  }

 private:
  std::int64_t capacity() const { return shape_.max_tokens_per_rank * shape_.num_dispatchers; }

  Shares share(WorkspaceCursor& cursor, const RowPlan& plan, const ProblemSize& size) const {
    const auto routes = static_cast<std::size_t>(size.M * size.k);
    const auto rows = static_cast<std::size_t>(size.L * capacity());
    Shares shares;
    shares.places = cursor.take(routes * sizeof(std::int64_t));
    shares.ids = cursor.take(routes * sizeof(std::int32_t));
    shares.counts = cursor.take(static_cast<std::size_t>(size.L) * sizeof(std::int32_t));
    shares.rows = cursor.take(rows * plan.row_bytes(size.K));
    shares.scales = cursor.take(rows * static_cast<std::size_t>(plan.num_groups) * sizeof(float));
    return shares;
  }

  Status check(const PrepareArgs& args, std::int64_t M, std::int64_t k) const {
    if (args.weight_on_input && k != 1)
      return Status(StatusCode::invalid_argument, concat("[prepare] weight_on_input needs k = 1, got k = ", k), {},
                    "weight_on_input");
    if (M > shape_.max_tokens_per_rank)
      return Status(StatusCode::invalid_argument,
                    concat("[prepare] ", M, " tokens, but this dispatcher takes at most ", shape_.max_tokens_per_rank,
                           " per rank"),
                    concat("create it with max_tokens_per_rank ≥ ", M), "hidden");
    return {};
  }

  /// Counts, and where each route goes. Nothing else is written before every expert is known to have room.
  Status place(const PrepareArgs& args, const Routing& routing, const Shares& shares) const {
    auto* places = reinterpret_cast<std::int64_t*>(shares.places.data);
    const std::int64_t L = args.num_local, T = capacity(), M = args.hidden.shape[0], k = routing.top_k();
    const std::span counts(reinterpret_cast<std::int32_t*>(shares.counts.data), static_cast<std::size_t>(L));
    std::fill(counts.begin(), counts.end(), 0);
    for (std::int64_t t = 0; t < M; ++t)
      for (std::int64_t j = 0; j < k; ++j) {
        const std::int64_t e = local_expert(args, routing.id_space, routing.ids.at<std::int32_t>(t, j));
        places[t * k + j] = e < 0 ? -1 : e * T + counts[static_cast<std::size_t>(e)]++;
      }
    for (std::int64_t e = 0; e < L; ++e)
      if (const std::int32_t count = counts[static_cast<std::size_t>(e)]; count > T)
        return Status(StatusCode::invalid_argument,
                      concat("[prepare] local expert ", e, " got ", count, " rows, but has room for ", T,
                             " (T = ", shape_.max_tokens_per_rank, ", D = ", shape_.num_dispatchers, ")"),
                      "a token that names an expert twice takes two rows: create the dispatcher with a larger T",
                      "routing.ids");
    return {};
  }

  std::int64_t local_expert(const PrepareArgs& args, IdSpace space, std::int64_t id) const {
    if (space == IdSpace::physical) {
      if (id < 0 || id >= args.num_experts) return -1;
      id = args.expert_map ? args.expert_map->as<std::int32_t>()[id] : id - rank_ * args.num_local;
    }
    return id >= 0 && id < args.num_local ? id : -1;
  }

  void write_rows(const PrepareArgs& args, const Routing& routing, const RowPlan& plan, const Shares& shares) const {
    const std::int64_t K = args.hidden.shape[1], k = routing.top_k();
    const auto* places = reinterpret_cast<const std::int64_t*>(shares.places.data);
    auto* scales = reinterpret_cast<float*>(shares.scales.data);
    const auto row_bytes = static_cast<std::int64_t>(plan.row_bytes(K));
    kit::for_rows(args.context.stream, args.hidden.shape[0], k * row_bytes, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t)
        for (std::int64_t j = 0; j < k; ++j) {
          const std::int64_t place = places[t * k + j];
          if (place < 0) continue;
          const float factor = args.weight_on_input ? routing.weights.at<float>(t, j) : 1.0f;
          make_row(plan, args.hidden, t, factor, shares.rows.data + place * row_bytes,
                   scales + place * plan.num_groups);
        }
    });
  }

  Status check_finalize(const FinalizeArgs& args) const {
    const Tensor& rows = args.expert_output;
    const bool known =
        args.reduce == WeightAndReduce::delegate() || args.reduce == WeightAndReduce::naive_batched(rank_);
    if (!known)
      return Status(StatusCode::invalid_argument,
                    concat("[finalize] ", name(), " of rank ", rank_, " combines for Delegate or NaiveBatched(", rank_,
                           "), got ", to_string(args.reduce)),
                    {}, "reduce");
    if (rows.rank != 3 || rows.shape[1] != capacity() || rows.shape[2] != args.output.shape[1])
      return Status(StatusCode::invalid_shape,
                    concat("[finalize] expert_output must be [L, ", capacity(), ", ", args.output.shape[1], "], got ",
                           shape_string(rows)),
                    {}, "expert_output");
    if (!reduce::can_sum(rows.dtype) || !reduce::can_sum(args.output.dtype))
      return Status(StatusCode::invalid_dtype, concat("[finalize] cannot sum ", moekit::name(rows.dtype), " into ",
                                                      moekit::name(args.output.dtype)));
    if (args.handle.state == nullptr || args.handle.id != static_cast<std::uint64_t>(args.output.shape[0]))
      return Status(StatusCode::invalid_argument,
                    concat("[finalize] the handle is of a dispatch of ", args.handle.id, " tokens, output has ",
                           args.output.shape[0]),
                    {}, "handle");
    return {};
  }

  BatchedShape shape_;
  std::int64_t rank_;
};

}  // namespace

std::unique_ptr<PrepareFinalize> make_single_rank_batched(const MakeContext& context) {
  if (!context.batched) return nullptr;
  return std::make_unique<SingleRankBatched>(*context.batched, context.rank);
}

}  // namespace moekit::dispatch
