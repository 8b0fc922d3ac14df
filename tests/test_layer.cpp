// The product level end to end: values, routing sources, shared experts, determinism, memory.
#include <gtest/gtest.h>

#include <thread>

#include "support/layers.hpp"

namespace moekit {
namespace {
using testing::FlatLayer;
using testing::Guarded;
using testing::LayerValues;
using testing::Random;
using testing::small_config;

/// Every experts implementation that runs f32 layers here, by name.
std::vector<std::string> implementations() {
  std::vector<std::string> out;
  for (const ExpertsEntry& entry : experts_implementations())
    if (testing::runs_here(entry, DType::f32)) out.emplace_back(entry.name);
  return out;
}

Plan plan_for(const LayerConfig& config, const std::string& experts = {}, std::int64_t max_tokens = 64) {
  PlanOptions options;
  options.experts = experts;
  options.max_tokens = max_tokens;
  return Plan::create({}, config, options);
}

struct Outcome {
  std::vector<std::byte> output;
  Status status;
  bool intact = false;
};

/// hidden f32 values are rounded to the layer's type; the output comes back as raw bytes.
Outcome run(const Layer& layer, const std::vector<float>& hidden, const Routing& routing = {},
            const Tensor& logits = {}) {
  const LayerConfig& config = layer.plan().config();
  const std::int64_t K = config.hidden, M = static_cast<std::int64_t>(hidden.size()) / K;
  std::vector<std::byte> x(hidden.size() * static_cast<std::size_t>(bytes(config.dtype)));
  for (std::size_t i = 0; i < hidden.size(); ++i)
    numeric::store_f32(x.data(), config.dtype, static_cast<std::int64_t>(i), hidden[i]);
  Guarded workspace(layer.plan().workspace_bytes(M)), output(x.size());
  LayerInput in;
  in.hidden = Tensor(x.data(), config.dtype, {M, K});
  in.routing = routing;
  in.logits = logits;
  LayerOutput out;
  out.tensor = Tensor(output.data(), config.dtype, {M, K});
  CallContext context;
  context.workspace = workspace.bytes();
  Outcome result;
  result.status = layer.forward(in, out, context);
  result.output.assign(output.data(), output.data() + output.size());
  result.intact = workspace.intact() && output.intact();
  return result;
}

float value(const Outcome& run, DType dtype, std::int64_t i) { return numeric::load_f32(run.output.data(), dtype, i); }

struct Ids {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::int64_t k;
  Routing routing() {
    const std::int64_t M = static_cast<std::int64_t>(ids.size()) / k;
    return {Tensor(ids.data(), DType::i32, {M, k}), Tensor(weights.data(), DType::f32, {M, k}), IdSpace::physical};
  }
};

LayerConfig external(LayerConfig config) {
  config.router.source = RouterSource::external;
  return config;
}

std::vector<float> rows_of(std::initializer_list<float> values, std::int64_t K) {
  std::vector<float> out;
  for (float v : values) out.insert(out.end(), static_cast<std::size_t>(K), v);
  return out;
}

TEST(layer, flat_weights_give_the_closed_form_in_every_column) {
  const LayerConfig config = external(small_config());
  FlatLayer flat{{1, 1, 1, 1, 2, 1, 1, 1}, {1, 1, 1, 1, 1, 3, 1, 1}, {1, 1, 1, 1, 1, 1, 0.5f, 1}, {}};
  for (const std::string& name : implementations()) {
    const Plan plan = plan_for(config, name);
    const Layer layer(plan, Weights::pack(plan, flat.source(config)));
    Ids ids{{4, 5, 6, 0}, {0.25f, 0.75f, 1.0f, 0.5f}, 2};
    const Outcome result = run(layer, rows_of({2, 3}, config.hidden), ids.routing());
    ASSERT_TRUE(result.status.ok()) << name << ": " << result.status.to_string();
    EXPECT_TRUE(result.intact) << name;
    const double first = 0.25 * FlatLayer::value(2, 2, 1, 1) + 0.75 * FlatLayer::value(2, 1, 3, 1);
    const double second = FlatLayer::value(3, 1, 1, 0.5) + 0.5 * FlatLayer::value(3);
    for (std::int64_t c = 0; c < config.hidden; ++c) {
      EXPECT_NEAR(value(result, DType::f32, c), first, 2e-5 * first) << name << " column " << c;
      EXPECT_NEAR(value(result, DType::f32, config.hidden + c), second, 2e-5 * second) << name << " column " << c;
    }
  }
}

TEST(layer, the_same_expert_twice_for_one_token_counts_twice) {
  const LayerConfig config = external(small_config());
  FlatLayer flat{std::vector<float>(8, 1), std::vector<float>(8, 1), std::vector<float>(8, 1), {}};
  for (const std::string& name : implementations()) {
    const Plan plan = plan_for(config, name);
    const Layer layer(plan, Weights::pack(plan, flat.source(config)));
    Ids ids{{3, 3}, {0.25f, 0.5f}, 2};
    const Outcome result = run(layer, rows_of({1}, config.hidden), ids.routing());
    ASSERT_TRUE(result.status.ok()) << result.status.to_string();
    EXPECT_NEAR(value(result, DType::f32, 7), 0.548294, 1e-5) << name;
  }
}

TEST(layer, ids_outside_the_experts_add_nothing_and_leave_the_neighbours_bits_alone) {
  const LayerConfig config = external(small_config());
  const LayerValues values(config);
  for (const std::string& name : implementations()) {
    const Plan plan = plan_for(config, name);
    const Layer layer(plan, Weights::pack(plan, values.source()));
    Random random(3);
    std::vector<float> x(static_cast<std::size_t>(3 * config.hidden));
    for (float& v : x) v = random.normal();
    Ids clean{{1, 2, -1, 7, 5, 6}, {0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f}, 2};
    const Outcome expected = run(layer, x, clean.routing());
    for (std::int32_t wild :
         {8, 15, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min()}) {
      Ids dirty = clean;
      dirty.ids[2] = wild;
      const Outcome result = run(layer, x, dirty.routing());
      ASSERT_TRUE(result.status.ok()) << result.status.to_string();
      EXPECT_EQ(result.output, expected.output) << name << " id " << wild;
    }
  }
}

TEST(layer, ids_of_every_index_type_give_the_same_bits) {
  const LayerConfig config = external(small_config());
  const LayerValues values(config);
  const Plan plan = plan_for(config);
  const Layer layer(plan, Weights::pack(plan, values.source()));
  const std::vector<float> x = rows_of({0.5f, -1}, config.hidden);
  Ids ids{{1, 2, -1, 7}, {0.5f, 0.5f, 0.5f, 0.5f}, 2};
  const Outcome expected = run(layer, x, ids.routing());
  std::vector<std::int64_t> wide(ids.ids.begin(), ids.ids.end());
  std::vector<std::uint32_t> unsigned_ids(ids.ids.begin(), ids.ids.end());
  Routing routing = ids.routing();
  routing.ids = Tensor(wide.data(), DType::i64, {2, 2});
  EXPECT_EQ(run(layer, x, routing).output, expected.output);
  routing.ids = Tensor(unsigned_ids.data(), DType::u32, {2, 2});
  EXPECT_EQ(run(layer, x, routing).output, expected.output);
  routing.ids = Tensor(ids.weights.data(), DType::f32, {2, 2});
  EXPECT_EQ(run(layer, x, routing).status.code(), StatusCode::invalid_dtype);
}

TEST(layer, logits_given_and_the_layers_own_router_gemm_agree) {
  const LayerConfig config = small_config();
  const LayerValues values(config);
  const Plan plan = plan_for(config);
  const Layer layer(plan, Weights::pack(plan, values.source()));
  Random random(5);
  std::vector<float> x(static_cast<std::size_t>(9 * config.hidden));
  for (float& v : x) v = random.normal();
  std::vector<float> logits(static_cast<std::size_t>(9 * config.num_experts));
  ASSERT_TRUE(router_gemm(Tensor(x.data(), DType::f32, {9, config.hidden}),
                          Tensor(values.router.data(), DType::f32, {8, config.hidden}),
                          Tensor(logits.data(), DType::f32, {9, 8}), {})
                  .ok());
  EXPECT_EQ(run(layer, x).output, run(layer, x, {}, Tensor(logits.data(), DType::f32, {9, 8})).output);
}

TEST(layer, a_shared_expert_sees_the_callers_hidden_and_is_added_once_unscaled) {
  LayerConfig config = external(small_config());
  config.shared.intermediate = 24;
  FlatLayer flat{std::vector<float>(8, 1), std::vector<float>(8, 1), std::vector<float>(8, 1), {}};
  std::vector<float> matrix(static_cast<std::size_t>(config.hidden * 24), 1.0f / static_cast<float>(config.hidden));
  std::vector<float> down(matrix.size(), 1.0f / 24);
  WeightsSource source = flat.source(config);
  source.shared.expert = {Tensor(matrix.data(), DType::f32, {24, config.hidden}),
                          Tensor(matrix.data(), DType::f32, {24, config.hidden}),
                          Tensor(down.data(), DType::f32, {config.hidden, 24}),
                          {},
                          {},
                          {},
                          {},
                          {},
                          {}};
  const Plan plan = plan_for(config);
  const Layer layer(plan, Weights::pack(plan, source));
  Ids ids{{2, -1}, {2.5f, 0}, 2};
  const Outcome result = run(layer, rows_of({2}, config.hidden), ids.routing());
  ASSERT_TRUE(result.status.ok()) << result.status.to_string();
  EXPECT_NEAR(value(result, DType::f32, 0), 3.5 * FlatLayer::value(2), 1e-4);
}

TEST(layer, a_shared_experts_sigmoid_gate_is_per_token) {
  LayerConfig config = external(small_config());
  config.shared = {24, false, true, {}};
  const LayerValues values(config);
  LayerConfig plain = config;
  plain.shared.sigmoid_gate = false;
  const Plan gated_plan = plan_for(config), plain_plan = plan_for(plain);
  LayerValues plain_values = values;
  plain_values.config = plain;
  const Layer gated(gated_plan, Weights::pack(gated_plan, values.source())),
      open(plain_plan, Weights::pack(plain_plan, plain_values.source()));
  Random random(9);
  std::vector<float> x(static_cast<std::size_t>(2 * config.hidden));
  for (float& v : x) v = random.normal();
  Ids nowhere{{-1, -1, -1, -1}, {0, 0, 0, 0}, 2};
  const Outcome with = run(gated, x, nowhere.routing()), without = run(open, x, nowhere.routing());
  for (std::int64_t t = 0; t < 2; ++t) {
    double z = 0;
    for (std::int64_t c = 0; c < config.hidden; ++c)
      z += static_cast<double>(x[static_cast<std::size_t>(t * config.hidden + c)]) *
           static_cast<double>(values.shared_gate[static_cast<std::size_t>(c)]);
    const double gate = 1 / (1 + std::exp(-z));
    for (std::int64_t c = 0; c < config.hidden; ++c) {
      const double expected = gate * static_cast<double>(value(without, DType::f32, t * config.hidden + c));
      EXPECT_NEAR(value(with, DType::f32, t * config.hidden + c), expected, 1e-5 * std::abs(expected) + 1e-6);
    }
  }
}

TEST(layer, rows_beyond_num_valid_are_zero_and_not_routed) {
  const LayerConfig config = small_config(DType::bf16);
  const LayerValues values(config);
  const Plan plan = plan_for(config);
  const Layer layer(plan, Weights::pack(plan, values.source()));
  const std::int64_t K = config.hidden;
  std::vector<std::uint16_t> x(static_cast<std::size_t>(5 * K), 0x7fff);  // NaN beyond the valid rows
  for (std::int64_t i = 0; i < 3 * K; ++i)
    numeric::store_f32(x.data(), DType::bf16, i, 0.25f * static_cast<float>(i % 7));
  Guarded workspace(plan.workspace_bytes(5)), output(x.size() * 2);
  const std::int32_t num_valid = 3;
  LayerInput in;
  in.hidden = Tensor(x.data(), DType::bf16, {5, K});
  in.num_valid = &num_valid;
  LayerOutput out;
  out.tensor = Tensor(output.data(), DType::bf16, {5, K});
  CallContext context;
  context.workspace = workspace.bytes();
  ASSERT_TRUE(layer.forward(in, out, context).ok());
  for (std::int64_t i = 0; i < 5 * K; ++i) {
    const float v = numeric::load_f32(output.data(), DType::bf16, i);
    EXPECT_TRUE(std::isfinite(v));
    if (i >= 3 * K) EXPECT_EQ(v, 0.0f);
  }
}

TEST(layer, zero_tokens_are_legal) {
  const Plan plan = plan_for(small_config());
  const Layer layer(plan, Weights::pack(plan, LayerValues(small_config()).source()));
  EXPECT_TRUE(run(layer, {}).status.ok());
}

TEST(layer, in_place_gives_the_bits_of_out_of_place) {
  LayerConfig config = small_config();
  for (std::int64_t shared : {0, 24}) {
    config.shared.intermediate = shared;
    const LayerValues values(config);
    for (const std::string& name : implementations()) {
      const Plan plan = plan_for(config, name);
      const Layer layer(plan, Weights::pack(plan, values.source()));
      Random random(11);
      std::vector<float> x(static_cast<std::size_t>(7 * config.hidden));
      for (float& v : x) v = random.normal();
      const Outcome expected = run(layer, x);
      std::vector<float> both = x;
      Guarded workspace(plan.workspace_bytes(7));
      LayerInput in;
      in.hidden = Tensor(both.data(), DType::f32, {7, config.hidden});
      LayerOutput out;
      out.tensor = in.hidden;
      out.in_place = true;
      CallContext context;
      context.workspace = workspace.bytes();
      ASSERT_TRUE(layer.forward(in, out, context).ok());
      EXPECT_EQ(std::memcmp(both.data(), expected.output.data(), expected.output.size()), 0) << name;
    }
  }
}

TEST(layer, a_top_k_override_is_the_layer_with_that_k) {
  const LayerConfig config = small_config();
  const LayerValues values(config);
  const std::string same = "cpu.portable";  // two plans may choose differently, and then the bits differ
  const Plan plan = plan_for(config, same);
  const Layer layer(plan, Weights::pack(plan, values.source()));
  Random random(13);
  std::vector<float> x(static_cast<std::size_t>(5 * config.hidden));
  for (float& v : x) v = random.normal();
  for (std::int64_t k : {1, 3, 8}) {
    LayerConfig other = config;
    other.top_k = k;
    const Plan other_plan = plan_for(other, same);
    const Layer other_layer(other_plan, Weights::pack(other_plan, values.source()));
    const Outcome expected = run(other_layer, x);
    Guarded workspace(plan.workspace_bytes(5, k)), output(x.size() * 4);
    LayerInput in;
    in.hidden = Tensor(x.data(), DType::f32, {5, config.hidden});
    in.top_k = k;
    LayerOutput out;
    out.tensor = Tensor(output.data(), DType::f32, {5, config.hidden});
    CallContext context;
    context.workspace = workspace.bytes();
    const Status status = layer.forward(in, out, context);
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_TRUE(workspace.intact());
    EXPECT_EQ(std::memcmp(output.data(), expected.output.data(), expected.output.size()), 0) << k;
  }
}

TEST(layer, two_threads_running_one_layer_at_once_get_the_serial_bits) {
  LayerConfig config = small_config(DType::bf16);
  config.shared.intermediate = 24;
  const LayerValues values(config);
  const Plan plan = plan_for(config);
  const Layer layer(plan, Weights::pack(plan, values.source()));
  std::vector<std::vector<float>> inputs(2);
  std::vector<Outcome> expected;
  for (int i = 0; i < 2; ++i) {
    Random random(100 + static_cast<std::uint64_t>(i));
    inputs[static_cast<std::size_t>(i)].resize(static_cast<std::size_t>(33 * config.hidden));
    for (float& v : inputs[static_cast<std::size_t>(i)]) v = random.normal();
    expected.push_back(run(layer, inputs[static_cast<std::size_t>(i)]));
  }
  std::vector<std::thread> threads;
  std::array<int, 2> wrong{};
  for (std::size_t i = 0; i < 2; ++i)
    threads.emplace_back([&, i] {
      for (int round = 0; round < 50; ++round) wrong[i] += run(layer, inputs[i]).output != expected[i].output;
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong[0], 0);
  EXPECT_EQ(wrong[1], 0);
}

TEST(layer, layers_that_share_one_workspace_do_not_inherit_each_others_clamp) {
  LayerConfig clamped = external(small_config()), plain = external(small_config());
  clamped.activation.clamp_gate = 4, clamped.activation.clamp_up = 4;
  FlatLayer flat{std::vector<float>(8, 10), std::vector<float>(8, 10), std::vector<float>(8, 1), {}};
  const Plan first_plan = plan_for(clamped), second_plan = plan_for(plain);
  const Layer first(first_plan, Weights::pack(first_plan, flat.source(clamped))),
      second(second_plan, Weights::pack(second_plan, flat.source(plain)));
  Ids ids{{1, -1}, {1, 0}, 2};
  EXPECT_NEAR(value(run(first, rows_of({1}, 40), ids.routing()), DType::f32, 0), 15.71222, 1e-3);
  EXPECT_NEAR(value(run(second, rows_of({1}, 40), ids.routing()), DType::f32, 0), 99.99546, 1e-2);
}

TEST(layer, replacing_an_expert_changes_that_expert_alone) {
  const LayerConfig config = external(small_config());
  const LayerValues values(config), others(config, 77);
  const Plan plan = plan_for(config);
  Weights weights = Weights::pack(plan, values.source());
  const Layer layer(plan, weights);
  const std::vector<float> x = rows_of({0.5f, 0.5f}, config.hidden);
  Ids ids{{3, -1, 4, -1}, {1, 0, 1, 0}, 2};
  const Outcome before = run(layer, x, ids.routing());
  CanonicalExpert expert;
  ASSERT_TRUE(others.source().expert(3, expert).ok());
  weights.replace_expert(3, expert);
  const Outcome after = run(layer, x, ids.routing());
  const std::size_t row = static_cast<std::size_t>(config.hidden) * 4;
  EXPECT_NE(std::memcmp(before.output.data(), after.output.data(), row), 0);
  EXPECT_EQ(std::memcmp(before.output.data() + row, after.output.data() + row, row), 0);
}

TEST(layer, stacked_and_interleaved_w1_give_the_bits_of_separate_gate_and_up) {
  const LayerConfig config = external(small_config());
  const LayerValues values(config);
  const std::int64_t E = config.num_experts, I = config.intermediate, K = config.hidden;
  const Plan plan = plan_for(config);
  const Layer apart(plan, Weights::pack(plan, values.source()));
  const Tensor w1(values.w1.data(), DType::f32, {E, 2 * I, K}), w2(values.w2.data(), DType::f32, {E, K, I});
  const Layer stacked(plan, Weights::pack(plan, w1, w2));
  LayerConfig woven_config = config;
  woven_config.activation.layout = GateLayout::interleaved;
  std::vector<float> woven(values.w1.size());
  for (std::int64_t e = 0; e < E; ++e)
    for (std::int64_t i = 0; i < 2 * I; ++i)
      std::copy_n(values.w1.data() + (e * 2 * I + i) * K, K,
                  woven.data() + (e * 2 * I + (i < I ? 2 * i : 2 * (i - I) + 1)) * K);
  const Plan woven_plan = plan_for(woven_config);
  const Layer interleaved(woven_plan, Weights::pack(woven_plan, Tensor(woven.data(), DType::f32, {E, 2 * I, K}), w2));
  Ids ids{{3, 1, 4, 7}, {0.5f, 0.5f, 1, 0.25f}, 2};
  const std::vector<float> x = rows_of({0.5f, -0.75f}, K);
  const Outcome expected = run(apart, x, ids.routing());
  EXPECT_EQ(run(stacked, x, ids.routing()).output, expected.output);
  EXPECT_EQ(run(interleaved, x, ids.routing()).output, expected.output);
}

}  // namespace
}  // namespace moekit
