// single_rank and single_rank_batched: rows, scales, weights on the input, capacity, threads.
#include <gtest/gtest.h>

#include "dispatch/rows.hpp"
#include "support/kit_doubles.hpp"
#include "support/random.hpp"

namespace moekit::testing {
namespace {

constexpr InputSpec kInt8{.dtype = DType::i8, .granularity = {1, -1}};
constexpr InputSpec kFp8{.dtype = DType::e4m3, .granularity = {1, 128}};

/// A dispatcher with its memory and one prepared call.
struct Dispatch {
  std::shared_ptr<PrepareFinalize> engine;
  Problem problem;
  std::unique_ptr<PoisonedBytes> memory;
  PrepareArgs args;
  Dispatched out;
  SerialExecutor executor{3};

  Dispatch(const char* name, Case& c, const InputSpec& input, std::optional<BatchedShape> batched = {})
      : engine(make_dispatcher(name, {.batched = batched})), problem(c.problem) {
    problem.batched = batched;
    memory = std::make_unique<PoisonedBytes>(engine->workspace_bytes(problem, input));
    const KernelInput in = c.input();
    args.hidden = in.hidden;
    args.routing = in.routing;
    args.num_experts = c.P;
    args.num_local = c.L;
    args.expert_map = in.expert_map;
    args.weight_on_input = c.problem.weight_on_input;
    args.input = input;
    args.context.workspace = memory->bytes();
    args.context.stream.executor = &executor;
  }
  Status prepare() {
    const Status s = engine->prepare(args, out);
    EXPECT_TRUE(memory->guard_intact());
    return s;
  }
};

void randomise(Case& c, std::uint64_t seed) {
  Random random(seed);
  for (float& x : c.hidden) x = random.normal();
}

TEST(dispatch_single_rank, rows_pass_without_a_copy_when_nothing_has_to_change) {
  Case c(4, 8, 2, 3);
  Dispatch d("single_rank", c, {.dtype = DType::f32});
  ASSERT_TRUE(d.prepare().ok());
  EXPECT_EQ(d.out.activations.data.data, c.hidden.data());
  EXPECT_FALSE(d.out.activations.scale.present());
  EXPECT_FALSE(d.out.routing);
  EXPECT_FALSE(d.out.tokens);
  Dispatch deferred("single_rank", c, {.dtype = DType::i8, .granularity = {1, -1}, .deferred = true});
  ASSERT_TRUE(deferred.prepare().ok());
  EXPECT_EQ(deferred.out.activations.data.data, c.hidden.data()) << "experts asked to quantise themselves";
}

TEST(dispatch_single_rank, int8_rows_and_fp8_groups_are_those_of_the_one_definition) {
  for (const InputSpec& input : {kInt8, kFp8}) {
    Case c(5, 300, 2, 3);
    randomise(c, 5);
    Dispatch d("single_rank", c, input);
    ASSERT_TRUE(d.prepare().ok());
    const std::int64_t groups = input.dtype == DType::i8 ? 1 : 3;
    ASSERT_EQ(shape_string(d.out.activations.data), "[5, 300]");
    ASSERT_EQ(d.out.activations.scale.shape[1], groups);
    EXPECT_EQ(d.out.activations.granularity, input.granularity);
    std::vector<std::byte> codes(300);
    std::vector<float> scales(3);
    for (std::int64_t t = 0; t < 5; ++t) {
      quant::quantise_row({&c.hidden[static_cast<std::size_t>(t * 300)], DType::f32, 300},
                          {input.dtype, input.granularity.cols}, codes.data(), scales.data());
      EXPECT_EQ(std::memcmp(codes.data(), d.out.activations.data.index(t).data, 300), 0) << t;
      for (std::int64_t g = 0; g < groups; ++g)
        EXPECT_EQ(d.out.activations.scale.at<float>(t, g), scales[static_cast<std::size_t>(g)]);
    }
  }
}

TEST(dispatch_single_rank, the_weight_is_applied_before_the_quantisation_scale_is_computed) {
  Case c(1, 64, 1, 3);
  randomise(c, 6);
  c.problem.weight_on_input = true;
  c.weights[0] = 0.37f;
  float absmax = 0;
  for (float x : c.hidden) absmax = std::max(absmax, std::abs(x * 0.37f));
  Dispatch d("single_rank", c, {.dtype = DType::e4m3, .granularity = {1, -1}});
  const std::vector<float> before = c.hidden;
  ASSERT_TRUE(d.prepare().ok());
  EXPECT_FLOAT_EQ(d.out.activations.scale.at<float>(0, 0), absmax / 448.0f);
  EXPECT_EQ(c.hidden, before) << "the input was weighted in place";
}

TEST(dispatch_single_rank, weighted_rows_are_rounded_once_to_their_type) {
  Case c(3, 5, 1, 3);
  randomise(c, 7);
  c.problem.weight_on_input = true;
  std::vector<std::byte> narrow(3 * 5 * 2);
  for (std::int64_t i = 0; i < 15; ++i)
    numeric::store_f32(narrow.data(), DType::bf16, i, c.hidden[static_cast<std::size_t>(i)]);
  c.problem.hidden_dtype = DType::bf16;
  Dispatch d("single_rank", c, {.dtype = DType::bf16});
  d.args.hidden = Tensor(narrow.data(), DType::bf16, {3, 5});
  ASSERT_TRUE(d.prepare().ok());
  EXPECT_NE(d.out.activations.data.data, narrow.data());
  for (std::int64_t i = 0; i < 15; ++i)
    EXPECT_EQ(numeric::load_f32(d.out.activations.data.data, DType::bf16, i),
              numeric::round_to(DType::bf16, numeric::load_f32(narrow.data(), DType::bf16, i) *
                                                 c.weights[static_cast<std::size_t>(i / 5)]));
}

TEST(dispatch_single_rank, static_scales_per_tensor_and_per_row_are_used_as_given) {
  Case c(4, 6, 2, 3);
  randomise(c, 8);
  const std::vector<float> scales = {0.5f, 0.25f, 0.125f, 1.0f};
  QuantSpec spec;
  spec.w1 = spec.w2 = spec.a1 = spec.a2 = {.type = DType::i8, .granularity = {1, -1}};
  spec.a1.static_scale = true;
  InputSpec input = kInt8;
  input.static_scale = true;
  const auto go = [&](const Tensor& given) {
    QuantTensors tensors;
    tensors.a1_scale = given;
    const QuantConfig quant(spec, tensors);
    Dispatch d("single_rank", c, input);
    d.args.quant = &quant;
    EXPECT_TRUE(d.prepare().ok());
    std::vector<float> out;
    for (std::int64_t t = 0; t < 4; ++t) {
      out.push_back(d.out.activations.scale.at<float>(t, 0));
      const double x = c.hidden[static_cast<std::size_t>(t * 6)], s = out.back();
      EXPECT_NEAR(s * d.out.activations.data.as<std::int8_t>()[t * 6], std::clamp(x, -127 * s, 127 * s),
                  s / 2 * 1.0001);
    }
    return out;
  };
  EXPECT_EQ(go(Tensor(scales.data(), DType::f32, {1})), std::vector<float>(4, 0.5f));
  EXPECT_EQ(go(Tensor(scales.data(), DType::f32, {4, 1})), scales);
  Dispatch missing("single_rank", c, input);
  EXPECT_NE(missing.prepare().message().find("a1_scale"), std::string::npos);
}

TEST(dispatch_single_rank, strided_rows_broadcast_rows_and_odd_columns) {
  Case c(3, 7, 2, 3);
  std::vector<float> wide(3 * 20, std::nanf(""));
  for (std::int64_t t = 0; t < 3; ++t)
    std::copy_n(&c.hidden[static_cast<std::size_t>(t * 7)], 7, &wide[static_cast<std::size_t>(t * 20)]);
  Dispatch dense("single_rank", c, kInt8), strided("single_rank", c, kInt8), same("single_rank", c, kInt8);
  strided.args.hidden = Tensor::strided(wide.data(), DType::f32, {3, 7}, {20, 1});
  same.args.hidden = Tensor::strided(c.hidden.data(), DType::f32, {3, 7}, {0, 1});
  ASSERT_TRUE(dense.prepare().ok() && strided.prepare().ok() && same.prepare().ok());
  EXPECT_EQ(std::memcmp(dense.out.activations.data.data, strided.out.activations.data.data, 21), 0);
  for (std::int64_t t = 0; t < 3; ++t)
    EXPECT_EQ(std::memcmp(dense.out.activations.data.data, same.out.activations.data.index(t).data, 7), 0);
}

TEST(dispatch_single_rank, a_nan_stays_in_its_own_token) {
  Case c(3, 64, 1, 3), clean = c;
  c.hidden[64 + 5] = std::nanf("");
  Dispatch dirty("single_rank", c, kInt8), good("single_rank", clean, kInt8);
  ASSERT_TRUE(dirty.prepare().ok() && good.prepare().ok());
  for (std::int64_t t : {0, 2})
    EXPECT_EQ(std::memcmp(dirty.out.activations.data.index(t).data, good.out.activations.data.index(t).data, 64), 0);
  EXPECT_TRUE(std::isnan(dirty.out.activations.scale.at<float>(1, 0)));
}

TEST(dispatch_single_rank, bits_do_not_depend_on_the_number_of_threads) {
  Case c(37, 8192, 1, 3);  // enough to be shared out
  randomise(c, 9);
  for (const InputSpec& input : {kInt8, kFp8}) {
    Dispatch one("single_rank", c, input), many("single_rank", c, input);
    SerialExecutor single(1), seven(7);
    one.args.context.stream.executor = &single;
    many.args.context.stream.executor = &seven;
    ASSERT_TRUE(one.prepare().ok() && many.prepare().ok());
    EXPECT_EQ(std::memcmp(one.memory->bytes().data, many.memory->bytes().data, one.memory->bytes().size), 0);
  }
  // and so with real threads, through finalize
  std::vector<float> rows = c.hidden, a(rows.size()), b(rows.size());
  const auto finalize = [&](std::vector<float>& out, Executor* executor) {
    FinalizeArgs args;
    args.output = Tensor(out.data(), DType::f32, {37, 8192});
    args.expert_output = Tensor(rows.data(), DType::f32, {37, 8192});
    args.routing = c.routing();
    args.reduce = WeightAndReduce::contiguous();
    args.context.stream.executor = executor;
    EXPECT_TRUE(make_dispatcher("single_rank")->finalize(args).ok());
  };
  SerialExecutor single(1);
  finalize(a, &single);
  finalize(b, &cpu_executor(2));
  EXPECT_EQ(a, b);
}

TEST(dispatch_single_rank, what_cannot_be_delivered_is_refused_with_a_reason) {
  const auto engine = make_dispatcher("single_rank");
  for (const InputSpec& input :
       {InputSpec{.dtype = DType::i8, .granularity = {-1, -1}},
        InputSpec{.dtype = DType::mxfp4, .granularity = {1, 32}},
        InputSpec{.dtype = DType::e4m3, .granularity = {1, 128}, .scale_layout = InputSpec::ScaleLayout::token_major},
        InputSpec{.dtype = DType::e4m3, .granularity = {128, 128}}}) {
    const Verdict verdict = engine->supports(input);
    EXPECT_FALSE(verdict.ok()) << to_string(input);
    EXPECT_GT(verdict.reason().size(), 10u);
  }
  for (const InputSpec& input :
       {kInt8, kFp8, InputSpec{.dtype = DType::bf16}, InputSpec{.dtype = DType::e4m3, .granularity = {1, 32}}})
    EXPECT_TRUE(engine->supports(input).ok()) << to_string(input);
  Case c(1, 8, 1, 1);
  c.problem.device = {DeviceType::cuda, 0};
  EXPECT_NE(engine->supports(c.problem).reason().find("cuda:0"), std::string::npos);
}

TEST(dispatch_single_rank, naive_batched_reduce_is_refused_by_the_standard_dispatcher) {
  Case c(2, 4, 1, 2);
  FinalizeArgs args;
  args.output = Tensor(c.output.data(), DType::f32, {2, 4});
  args.expert_output = Tensor(c.hidden.data(), DType::f32, {2, 1, 4});
  args.routing = c.routing();
  args.reduce = WeightAndReduce::naive_batched();
  EXPECT_EQ(make_dispatcher("single_rank")->finalize(args).code(), StatusCode::invalid_argument);
}

// ---- batched -------------------------------------------------------------------------------------------------------

TEST(dispatch_batched, the_r_th_route_of_an_expert_is_its_row_r) {
  Case c(4, 3, 2, 3);
  c.ids = {2, 0, 2, 2, -1, 0, 5, 1};
  const BatchedShape shape{6, 1};
  Dispatch d("single_rank_batched", c, {.dtype = DType::f32}, shape);
  ASSERT_TRUE(d.prepare().ok());
  const Tensor& x = d.out.activations.data;
  ASSERT_EQ(shape_string(x), "[3, 6, 3]");
  const auto* counts = d.out.tokens->counts.as<std::int32_t>();
  EXPECT_EQ((std::vector<std::int32_t>(counts, counts + 3)), (std::vector<std::int32_t>{2, 1, 3}));
  EXPECT_EQ(d.out.tokens->host.size(), 3u);
  const auto token_at = [&](std::int64_t e, std::int64_t r) { return x.index(e).index(r).as<float>()[0]; };
  EXPECT_EQ(token_at(0, 0), c.hidden[0]);
  EXPECT_EQ(token_at(0, 1), c.hidden[6]);
  EXPECT_EQ(token_at(1, 0), c.hidden[9]);
  EXPECT_EQ(token_at(2, 0), c.hidden[0]);
  EXPECT_EQ(token_at(2, 1), c.hidden[3]);
  EXPECT_EQ(token_at(2, 2), c.hidden[3]);  // the same expert twice takes two rows
}

TEST(dispatch_batched, scales_lie_beside_the_rows) {
  Case c(3, 200, 2, 2);
  randomise(c, 10);
  const BatchedShape shape{4, 2};
  Dispatch d("single_rank_batched", c, kFp8, shape);
  ASSERT_TRUE(d.prepare().ok());
  EXPECT_EQ(shape_string(d.out.activations.data), "[2, 8, 200]");
  ASSERT_EQ(shape_string(d.out.activations.scale), "[2, 8, 2]");
  std::vector<std::byte> codes(200);
  float scales[2];
  quant::quantise_row({c.hidden.data(), DType::f32, 200}, {DType::e4m3, 128}, codes.data(), scales);
  const std::int32_t e = c.ids[0];
  EXPECT_EQ(std::memcmp(d.out.activations.data.index(e).index(0).data, codes.data(), 200), 0);
  EXPECT_EQ(d.out.activations.scale.index(e).at<float>(0, 1), scales[1]);
}

TEST(dispatch_batched, too_many_tokens_name_both_numbers_before_anything_is_written) {
  Case c(5, 4, 1, 2);
  Dispatch d("single_rank_batched", c, {.dtype = DType::f32}, BatchedShape{4, 1});
  const Status s = d.prepare();
  EXPECT_NE(s.message().find("5 tokens"), std::string::npos) << s.message();
  EXPECT_NE(s.message().find("at most 4"), std::string::npos) << s.message();
  for (std::size_t i = 0; i < d.memory->bytes().size; ++i) ASSERT_EQ(d.memory->bytes().data[i], std::byte{0xff});
  Case none(0, 4, 1, 2);
  Dispatch empty("single_rank_batched", none, {.dtype = DType::f32}, BatchedShape{4, 1});
  EXPECT_TRUE(empty.prepare().ok());
}

TEST(dispatch_batched, an_overfull_expert_names_both_numbers_before_rows_are_written) {
  Case c(4, 4, 2, 2);
  c.ids = {1, 1, 1, 1, 1, 0, 0, 0};  // five routes to expert 1
  Dispatch d("single_rank_batched", c, {.dtype = DType::f32}, BatchedShape{4, 1});
  const Status s = d.prepare();
  EXPECT_NE(s.message().find("local expert 1 got 5 rows"), std::string::npos) << s.message();
  EXPECT_NE(s.message().find("room for 4"), std::string::npos) << s.message();
  c.ids[0] = 0;
  EXPECT_TRUE(d.prepare().ok()) << "usable afterwards";
}

TEST(dispatch_batched, capacity_is_counted_once_per_dispatcher) {
  // 16 local experts, 64 tokens a rank, 32 ranks, 4096 columns of bf16: 256 MiB, not 32 times that
  Case c(1, 1, 1, 16);
  c.problem.size = {16, 64, 8, 4096, 1};
  c.problem.weights.hidden = 4096;
  c.problem.hidden_dtype = DType::bf16;
  const auto engine = make_dispatcher("single_rank_batched", {.batched = BatchedShape{64, 32}});
  const double formula = 16.0 * 64 * 32 * 4096 * 2;
  EXPECT_EQ(engine->max_rows(c.problem), 64 * 32);
  EXPECT_GE(static_cast<double>(engine->workspace_bytes(c.problem, {.dtype = DType::bf16})), formula);
  EXPECT_LE(static_cast<double>(engine->workspace_bytes(c.problem, {.dtype = DType::bf16})), 1.1 * formula);
}

TEST(dispatch_batched, finalize_equals_the_naive_batched_reduce_bit_for_bit) {
  Case c(6, 300, 3, 4);
  randomise(c, 12);
  c.ids[4] = c.ids[5];
  c.ids[7] = -1;
  Dispatch d("single_rank_batched", c, {.dtype = DType::f32}, BatchedShape{8, 1});
  ASSERT_TRUE(d.prepare().ok());
  std::vector<float> rows(4 * 8 * 300), own(6 * 300), naive(6 * 300);
  Random random(1);
  for (float& x : rows) x = random.normal();
  FinalizeArgs args;
  args.output = Tensor(own.data(), DType::f32, {6, 300});
  args.expert_output = Tensor(rows.data(), DType::f32, {4, 8, 300});
  args.routing = c.routing();
  args.handle = d.out.handle;
  args.context = d.args.context;
  Tensor result;
  ASSERT_TRUE(WeightAndReduce::naive_batched()
                  .apply(Tensor(naive.data(), DType::f32, {6, 300}), args.expert_output, args.routing, false, result)
                  .ok());
  for (WeightAndReduce reduce : {WeightAndReduce::delegate(), WeightAndReduce::naive_batched()}) {
    args.reduce = reduce;
    std::fill(own.begin(), own.end(), std::nanf(""));
    ASSERT_TRUE(d.engine->finalize(args).ok());
    EXPECT_EQ(own, naive);
  }
  args.reduce = WeightAndReduce::naive_batched(1);
  EXPECT_NE(d.engine->finalize(args).message().find("NaiveBatched(1)"), std::string::npos);
  args.reduce = WeightAndReduce::delegate();
  args.handle.id = 5;
  EXPECT_NE(d.engine->finalize(args).message().find("5 tokens"), std::string::npos);
}

TEST(dispatch_batched, expert_maps_and_ranks_choose_the_local_experts) {
  Case c(3, 4, 2, 4, 2);
  c.problem.expert_map = true;
  c.ids = {0, 1, 2, 3, 9, -1};
  c.map = {-1, 1, -1, 0};
  Dispatch mapped("single_rank_batched", c, {.dtype = DType::f32}, BatchedShape{4, 1});
  ASSERT_TRUE(mapped.prepare().ok());
  EXPECT_EQ(mapped.out.tokens->host[0], 1);
  EXPECT_EQ(mapped.out.tokens->host[1], 1);
  EXPECT_EQ(mapped.out.activations.data.index(0).index(0).as<float>()[0], c.hidden[4]);
  c.map.clear();
  Dispatch second("single_rank_batched", c, {.dtype = DType::f32}, BatchedShape{4, 1});
  second.engine =
      make_dispatcher("single_rank_batched", {.batched = BatchedShape{4, 1}, .rank = 1});  // experts 2 and 3
  ASSERT_TRUE(second.prepare().ok());
  EXPECT_EQ(second.out.tokens->host[0], 1);
  EXPECT_EQ(second.out.activations.data.index(1).index(0).as<float>()[0], c.hidden[4]);
}

TEST(dispatch_list, batched_dispatchers_need_a_shape_and_the_standard_one_comes_first) {
  const auto list = prepare_finalize_implementations();
  ASSERT_GE(list.size(), 2u);
  EXPECT_EQ(list[0].name, "single_rank");
  for (const PrepareFinalizeEntry& entry : list) {
    MakeContext context;
    if (entry.format == ActivationFormat::batched_experts) {
      EXPECT_EQ(entry.make(context), nullptr);
      context.batched = BatchedShape{4, 1};
    }
    const auto made = entry.make(context);
    ASSERT_NE(made, nullptr);
    EXPECT_EQ(made->name(), entry.name);
    EXPECT_EQ(made->activation_format(), entry.format);
  }
}

}  // namespace
}  // namespace moekit::testing
