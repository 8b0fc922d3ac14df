// Chunks: which rows, scales, ids and counts each call of the experts gets.
#include <gtest/gtest.h>

#include "support/kit_doubles.hpp"

namespace moekit::testing {
namespace {

/// What one apply was given, by value.
struct Seen {
  std::int64_t first_row, rows, output_rows, scale_rows, a2_first, a2_rows;
  const void* a2_data;
  std::vector<std::int32_t> counts;
  bool has_counts, has_host;
  std::size_t w13, w2;
};

struct Chunked {
  Case c;
  AffineOptions options;
  std::vector<Seen> seen;
  const QuantConfig* quant = nullptr;
  bool leave_open = false;
  explicit Chunked(std::int64_t M, std::int64_t k = 2) : c(M, 4, k, 5) {
    options.seen = [this](const ExpertsArgs& args) {
      Seen s{};
      const Tensor& x = args.activations.data;
      s.first_row = row_of(x);
      s.rows = x.rows();
      s.output_rows = args.output.rows();
      s.scale_rows = args.activations.scale.present() ? args.activations.scale.rows() : -1;
      s.a2_rows = args.a2_scale.present() ? args.a2_scale.rows() : -1;
      s.a2_data = args.a2_scale.data;
      if ((s.has_counts = args.tokens != nullptr)) {
        const auto* n = args.tokens->counts.as<std::int32_t>();
        s.counts.assign(n, n + args.tokens->counts.numel());
        s.has_host = !args.tokens->host.empty();
      }
      s.w13 = args.workspace13.size, s.w2 = args.workspace2.size;
      seen.push_back(s);
    };
  }
  std::int64_t row_of(const Tensor& x) const {
    return static_cast<const float*>(x.data) - c.hidden.data() >= 0
               ? (static_cast<const float*>(x.data) - c.hidden.data()) / 4
               : -1;
  }
  Status run(std::shared_ptr<PrepareFinalize> dispatcher, std::int64_t chunk, std::int64_t open = 0) {
    const ModularKernel kernel(std::move(dispatcher), std::make_shared<AffineExperts>(options), nullptr, c.problem,
                               {.chunk = chunk, .open_max_tokens = open});
    PoisonedBytes memory(kernel.workspace_bytes(c.M));
    KernelInput in = c.input();
    in.quant = quant;
    in.leave_open = leave_open;
    KernelOutput out = c.result();
    const Status status = kernel.forward(in, out, {.workspace = memory.bytes()});
    EXPECT_TRUE(memory.guard_intact());
    return status;
  }
};

/// single_rank that also says how many rows each expert got, as all-to-all dispatchers do.
class Counting final : public PrepareFinalize {
 public:
  explicit Counting(bool host, bool counts = true) : host_(host), give_(counts) {}
  std::string_view name() const override { return "counting"; }
  ActivationFormat activation_format() const override { return ActivationFormat::standard; }
  Verdict supports(const InputSpec& s) const override { return inner_->supports(s); }
  std::size_t workspace_bytes(const Problem& p, const InputSpec& s) const override {
    return inner_->workspace_bytes(p, s);
  }
  Status prepare(const PrepareArgs& args, Dispatched& out) override {
    if (Status s = inner_->prepare(args, out); !s.ok()) return s;
    ExpertTokens tokens;
    if (give_) {
      counts_.resize(static_cast<std::size_t>(args.num_local));
      (void)count_expert_tokens(args.routing.ids, args.expert_map, counts_);
      tokens.counts = Tensor(counts_.data(), DType::i32, {args.num_local});
      if (host_) tokens.host = counts_;
    }
    out.tokens = tokens;
    return {};
  }
  Status finalize(const FinalizeArgs& args) override { return inner_->finalize(args); }

 private:
  bool host_, give_;
  std::shared_ptr<PrepareFinalize> inner_ = make_dispatcher("single_rank");
  std::vector<std::int32_t> counts_;
};

TEST(kit_chunking, chunked_results_equal_unchunked_ones_bit_for_bit) {
  for (WeightAndReduce reduce : {WeightAndReduce::no_op(), WeightAndReduce::contiguous()})
    for (std::int64_t M : {1, 63, 64, 65, 74, 128, 129}) {
      Chunked whole(M), parts(M);
      whole.options.reduce = parts.options.reduce = reduce;
      ASSERT_TRUE(whole.run(make_dispatcher("single_rank"), 0).ok());
      ASSERT_TRUE(parts.run(make_dispatcher("single_rank"), 64).ok());
      EXPECT_EQ(whole.c.output, parts.c.output) << M;
      EXPECT_EQ(parts.seen.size(), static_cast<std::size_t>((M + 63) / 64));
      EXPECT_EQ(whole.seen.size(), 1u);
    }
}

TEST(kit_chunking, a_short_last_chunk_gets_rows_ids_and_output_of_its_own) {
  Chunked run(10, 3);
  run.options.reduce = WeightAndReduce::contiguous();
  ASSERT_TRUE(run.run(make_dispatcher("single_rank"), 4).ok());
  ASSERT_EQ(run.seen.size(), 3u);
  EXPECT_EQ(run.seen[2].first_row, 8);
  EXPECT_EQ(run.seen[2].rows, 2);
  EXPECT_EQ(run.seen[2].output_rows, 6);  // M*k rows scale with the chunk
  EXPECT_LT(run.seen[2].w13, run.seen[1].w13);
}

TEST(kit_chunking, chunked_counts_are_recomputed_only_where_counts_were_given) {
  for (bool host : {false, true}) {
    Chunked run(7);
    run.c.ids = {0, 1, 1, 1, -1, 9, 4, 0, 3, 3, 2, 2, 0, 0};
    ASSERT_TRUE(run.run(std::make_shared<Counting>(host), 3).ok());
    ASSERT_EQ(run.seen.size(), 3u);
    EXPECT_EQ(run.seen[0].counts, (std::vector<std::int32_t>{1, 3, 0, 0, 0}));
    EXPECT_EQ(run.seen[1].counts, (std::vector<std::int32_t>{1, 0, 2, 2, 1}));
    EXPECT_EQ(run.seen[2].counts, (std::vector<std::int32_t>{2, 0, 0, 0, 0}));
    for (const Seen& s : run.seen) EXPECT_EQ(s.has_host, host);
  }
  Chunked none(7);
  ASSERT_TRUE(none.run(make_dispatcher("single_rank"), 3).ok());
  for (const Seen& s : none.seen) EXPECT_FALSE(s.has_counts);
  Chunked empty_record(7);  // a record without counts means "no counts"
  ASSERT_TRUE(empty_record.run(std::make_shared<Counting>(false, false), 3).ok());
  for (const Seen& s : empty_record.seen) EXPECT_FALSE(s.has_counts);
}

TEST(kit_chunking, row_scales_are_sliced_and_a_one_row_chunk_keeps_its_scale) {
  for (std::int64_t chunk : {1, 3}) {
    Chunked quantised(7), whole(7);
    for (Chunked* run : {&quantised, &whole}) run->options.input = {.dtype = DType::i8, .granularity = {1, -1}};
    ASSERT_TRUE(quantised.run(make_dispatcher("single_rank"), chunk).ok());
    ASSERT_TRUE(whole.run(make_dispatcher("single_rank"), 0).ok());
    EXPECT_EQ(quantised.c.output, whole.c.output) << "a scale of another row was used";
    for (const Seen& s : quantised.seen) EXPECT_EQ(s.scale_rows, s.rows);
  }
}

TEST(kit_chunking, a_per_tensor_scale_passes_whole) {
  Chunked run(7);
  const float scale = 0.5f;
  QuantSpec spec;
  spec.w1 = spec.w2 = spec.a1 = spec.a2 = {.type = DType::i8, .granularity = {1, -1}};
  spec.a1.static_scale = true;
  QuantTensors tensors;
  tensors.a1_scale = Tensor(&scale, DType::f32, {1});
  const QuantConfig quant(spec, tensors);
  run.quant = &quant;
  run.c.problem.quant = spec;
  run.options.input = {.dtype = DType::i8, .static_scale = true};  // granularity: per tensor
  ASSERT_TRUE(run.run(make_dispatcher("single_rank"), 3).ok());
  ASSERT_EQ(run.seen.size(), 3u);
  for (const Seen& s : run.seen) EXPECT_EQ(s.scale_rows, 1);
}

TEST(kit_chunking, static_a2_scales_per_tensor_and_per_expert_pass_whole_and_per_row_are_sliced) {
  std::vector<float> scales = {1, 2, 3, 4, 5};
  QuantSpec spec;
  spec.w1 = spec.w2 = spec.a1 = spec.a2 = {.type = DType::i8, .granularity = {1, -1}};
  spec.a2.static_scale = true;
  const auto go = [&](const Tensor& scale) {
    Chunked run(5);  // five tokens and five experts: only the rank tells the two apart
    QuantTensors tensors;
    tensors.a2_scale = scale;
    const QuantConfig quant(spec, tensors);
    run.quant = &quant;
    run.c.problem.quant = spec;
    EXPECT_TRUE(run.run(make_dispatcher("single_rank"), 2).ok());
    return run.seen;
  };
  for (const Seen& s : go(Tensor(scales.data(), DType::f32, {1}))) EXPECT_EQ(s.a2_data, scales.data());
  for (const Seen& s : go(Tensor(scales.data(), DType::f32, {5}))) EXPECT_EQ(s.a2_rows, 5);
  const auto by_row = go(Tensor(scales.data(), DType::f32, {5, 1}));
  EXPECT_EQ(by_row[1].a2_rows, 2);
  EXPECT_EQ(by_row[1].a2_data, scales.data() + 2);
  EXPECT_EQ(by_row[2].a2_rows, 1);
}

TEST(kit_chunking, a_tensor_without_granularity_follows_the_one_element_rule) {
  const float scales[] = {1, 2, 3};
  EXPECT_EQ(slice_scale(Tensor(scales, DType::f32, {1}), std::nullopt, 1, 2).data, scales);
  EXPECT_EQ(slice_scale(Tensor(scales, DType::f32, {3, 1}), std::nullopt, 1, 2).data, scales + 1);
  EXPECT_FALSE(slice_scale({}, std::nullopt, 1, 2).present());
}

TEST(kit_chunking, batched_input_unwilling_experts_and_open_results_are_never_chunked) {
  Chunked unwilling(7);
  unwilling.options.chunking = false;
  ASSERT_TRUE(unwilling.run(make_dispatcher("single_rank"), 2).ok());
  EXPECT_EQ(unwilling.seen.size(), 1u);

  Chunked batched(7);
  batched.c.problem.format = ActivationFormat::batched_experts;
  batched.c.problem.batched = BatchedShape{16, 1};
  batched.options.batched = true;
  batched.options.reduce = WeightAndReduce::delegate();
  ASSERT_TRUE(batched.run(make_dispatcher("single_rank_batched", {.batched = batched.c.problem.batched}), 2).ok());
  EXPECT_EQ(batched.seen.size(), 1u);

  Chunked open(7);
  open.options.open = open.leave_open = true;
  ASSERT_TRUE(open.run(make_dispatcher("single_rank"), 2, 7).ok());
  EXPECT_EQ(open.seen.size(), 1u);
}

TEST(kit_chunking, chunks_need_less_memory_than_the_whole) {
  Case c(1024, 64, 4, 8);
  const auto kernel = [&](std::int64_t chunk) {
    return ModularKernel(make_dispatcher("single_rank"), std::make_shared<AffineExperts>(), nullptr, c.problem,
                         {.chunk = chunk})
        .workspace_bytes(1024);
  };
  EXPECT_LT(kernel(64), kernel(0) / 2);
  EXPECT_EQ(kernel(1024), kernel(0));
}

}  // namespace
}  // namespace moekit::testing
