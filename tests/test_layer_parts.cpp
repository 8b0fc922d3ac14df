// What a layer is given beside experts: routers of the caller's, static scales, the sizes of a group.
#include <gtest/gtest.h>

#include "support/layers.hpp"

namespace moekit {
namespace {
using testing::FlatLayer;
using testing::Guarded;
using testing::LayerValues;
using testing::small_config;

/// Memory of one call of a layer whose input and output are f32.
struct Call {
  const Layer& layer;
  std::int64_t M, K;
  std::vector<float> x, y;
  Guarded memory;
  LayerInput in;

  Call(const Layer& of, std::vector<float> hidden)
      : layer(of),
        K(of.plan().config().hidden),
        x(std::move(hidden)),
        y(x.size(), std::nanf("")),
        memory(of.plan().workspace_bytes(static_cast<std::int64_t>(x.size()) / K)) {
    M = static_cast<std::int64_t>(x.size()) / K;
    in.hidden = Tensor(x.data(), DType::f32, {M, K});
  }
  Status run() {
    LayerOutput out{.tensor = Tensor(y.data(), DType::f32, {M, K})};
    const Status status = layer.forward(in, out, {{}, memory.bytes()});
    EXPECT_TRUE(memory.intact());
    return status;
  }
};

// ---- routers
// ---------------------------------------------------------------------------------------------------------

struct Seen {
  int calls = 0;
  std::int64_t tokens = 0, top_k = 0;
  bool hidden = false, logits = false, workspace = false;
  std::int32_t first = 5;  // the expert of slot 0; slot 1 goes to the expert after it
} g_seen;

/// Sends every token to two fixed experts, 0.75 and 0.25, and notes what it was given.
class FixedRouter final : public Router {
 public:
  std::string_view name() const override { return "fixed"; }
  Verdict supports(const RouteProblem& p) const override {
    return p.top_k == 2 ? Verdict::yes() : Verdict::no("writes two slots");
  }
  std::size_t workspace_bytes(const RouteProblem&) const override { return 64; }
  double estimate_us(const RouteProblem&, const Ceilings&) const override { return 1e6; }  // slow, and yet the one
  Status route(const RouteArgs& args) const override {
    ++g_seen.calls;
    g_seen.tokens = args.ids.rows(), g_seen.top_k = args.ids.shape[1];
    g_seen.hidden = args.hidden.present(), g_seen.logits = args.logits.present();
    g_seen.workspace = args.context.workspace.data != nullptr && args.context.workspace.size >= 64;
    for (std::int64_t t = 0; t < args.ids.rows(); ++t)
      for (std::int32_t j = 0; j < 2; ++j) {
        args.ids.at<std::int32_t>(t, j) = g_seen.first + j;
        args.weights.at<float>(t, j) = j == 0 ? 0.75f : 0.25f;
      }
    return {};
  }
};
const RouterEntry kFixed[] = {
    {"refusing", []() -> std::unique_ptr<Router> { return std::make_unique<FixedRouter>(); },
     [] { return Verdict::no("is not here today"); }},
    {"fixed", []() -> std::unique_ptr<Router> { return std::make_unique<FixedRouter>(); }, nullptr},
    {"second", []() -> std::unique_ptr<Router> { return std::make_unique<FixedRouter>(); }, nullptr}};

Plan custom_plan(bool checked = false) {
  LayerConfig config = small_config();
  config.router.source = RouterSource::custom;
  PlanOptions options;
  options.extra_routers = kFixed, options.max_tokens = 16, options.checked = checked;
  return Plan::create({}, config, options);
}

WeightsSource flat_source(FlatLayer& flat, const LayerConfig& config) {
  flat.gate = flat.up = flat.down = std::vector<float>(8, 1.0f);
  flat.down[5] = 2, flat.down[6] = 4;
  return flat.source(config);
}

TEST(layer_router, a_custom_router_is_called_and_its_choice_decides_the_output) {
  const Plan plan = custom_plan();
  FlatLayer flat;
  const Layer layer(plan, Weights::pack(plan, flat_source(flat, plan.config())));
  Call call(layer, std::vector<float>(3 * 40, 1.0f));
  g_seen = {};
  const Status status = call.run();
  ASSERT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(g_seen.calls, 1);
  EXPECT_EQ(g_seen.tokens, 3);
  EXPECT_EQ(g_seen.top_k, 2);
  EXPECT_TRUE(g_seen.hidden);
  EXPECT_TRUE(g_seen.workspace);
  EXPECT_FALSE(g_seen.logits);  // the layer has no router weights and the call no logits
  for (float y : call.y)
    ASSERT_NEAR(y, 0.75 * FlatLayer::value(1, 1, 1, 2) + 0.25 * FlatLayer::value(1, 1, 1, 4), 1e-5);
}

TEST(layer_router, a_custom_router_gets_logits_where_there_are_any) {
  const Plan plan = custom_plan();
  const LayerValues values(plan.config());
  const Layer with_gemm(plan, Weights::pack(plan, values.source()));
  Call call(with_gemm, std::vector<float>(2 * 40, 1.0f));
  g_seen = {};
  ASSERT_TRUE(call.run().ok());
  EXPECT_TRUE(g_seen.logits);

  FlatLayer flat;
  const Layer without(plan, Weights::pack(plan, flat_source(flat, plan.config())));
  Call given(without, std::vector<float>(2 * 40, 1.0f));
  const std::vector<float> logits(2 * 8, 0.5f);
  given.in.logits = Tensor(logits.data(), DType::f32, {2, 8});
  g_seen = {};
  ASSERT_TRUE(given.run().ok());
  EXPECT_TRUE(g_seen.logits);
}

TEST(layer_router, the_first_custom_router_that_says_yes_is_taken_and_explain_lists_all) {
  const Plan plan = custom_plan();
  EXPECT_EQ(plan.bucket(1).router, "fixed");
  const std::string text = plan.explain(1);
  EXPECT_NE(text.find("* fixed"), std::string::npos) << text;
  EXPECT_NE(text.find("is not here today"), std::string::npos) << text;
  EXPECT_NE(text.find("fixed comes first in the list"), std::string::npos) << text;
}

TEST(layer_router, ids_of_a_custom_router_outside_the_experts_are_skipped_or_in_checked_mode_an_error) {
  for (bool checked : {false, true}) {
    const Plan plan = custom_plan(checked);
    FlatLayer flat;
    const Layer layer(plan, Weights::pack(plan, flat_source(flat, plan.config())));
    Call call(layer, std::vector<float>(40, 1.0f));
    g_seen = {};
    g_seen.first = 7;  // slot 1 becomes 8 of 8
    const Status status = call.run();
    EXPECT_EQ(status.ok(), !checked) << status.to_string();
    if (checked) EXPECT_NE(status.message().find("8"), std::string::npos) << status.message();
    if (!checked) EXPECT_NEAR(call.y[0], 0.75 * FlatLayer::value(1), 1e-5);
  }
}

TEST(layer_router, a_custom_source_without_a_router_says_where_to_put_one) {
  LayerConfig config = small_config();
  config.router.source = RouterSource::custom;
  try {
    (void)Plan::create({}, config);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(error.status().to_string().find("extra_routers"), std::string::npos) << error.what();
  }
}

// ---- group_tokens
// ----------------------------------------------------------------------------------------------------

TEST(layer_group, one_rank_takes_its_own_tokens_or_nothing_and_refuses_another_number) {
  const Plan plan = Plan::create({}, small_config());
  const Layer layer(plan, Weights::pack(plan, LayerValues(small_config()).source()));
  Call call(layer, std::vector<float>(4 * 40, 0.5f));
  for (std::int64_t fits : {0, 4}) {
    call.in.group_tokens = fits;
    EXPECT_TRUE(call.run().ok()) << fits;
  }
  for (std::int64_t wrong : {-4, 3, 5}) {
    call.in.group_tokens = wrong;
    std::fill(call.y.begin(), call.y.end(), std::nanf(""));
    const Status status = call.run();
    EXPECT_EQ(status.code(), StatusCode::invalid_argument) << wrong;
    EXPECT_EQ(status.field(), "group_tokens");
    EXPECT_NE(status.message().find(std::to_string(wrong)), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("4 tokens"), std::string::npos) << status.message();
    EXPECT_TRUE(std::isnan(call.y[0]));
  }
}

// ---- static activation scales
// ----------------------------------------------------------------------------------------

/// Every weight 1 as int8 with a scale, so that every matrix is a mean.
struct OnesInt8 {
  std::vector<std::int8_t> codes = std::vector<std::int8_t>(40 * 24, 1);
  std::vector<float> in_scale = std::vector<float>(24, 1.0f / 40), out_scale = std::vector<float>(40, 1.0f / 24);
  CanonicalExpert expert() const {
    CanonicalExpert e;
    e.gate = e.up = Tensor(codes.data(), DType::i8, {24, 40});
    e.down = Tensor(codes.data(), DType::i8, {40, 24});
    e.gate_scale = e.up_scale = Tensor(in_scale.data(), DType::f32, {24, 1});
    e.down_scale = Tensor(out_scale.data(), DType::f32, {40, 1});
    return e;
  }
};

LayerConfig static_int8() {
  LayerConfig config = small_config();
  throw_if_failed(quant_from_names("int8", "", config.quant));
  config.quant.a1.static_scale = config.quant.a2.static_scale = true;
  config.shared = {24, true, false, {}};
  config.router.source = RouterSource::external;
  return config;
}

TEST(layer_static_scales, a_quantised_shared_expert_has_its_own) {
  const LayerConfig config = static_int8();
  const OnesInt8 ones;
  const float a1 = 1.0f / 32, a2 = 1.0f / 16, shared_a2 = 1.0f / 32;
  WeightsSource source;
  source.expert = [&](std::int64_t, CanonicalExpert& expert) {
    expert = ones.expert();
    return Status();
  };
  source.quant.a1_scale = Tensor(&a1, DType::f32, {1});
  source.quant.a2_scale = Tensor(&a2, DType::f32, {1});
  source.shared.expert = ones.expert();
  source.shared.quant.a1_scale = Tensor(&a1, DType::f32, {1});
  source.shared.quant.a2_scale = Tensor(&shared_a2, DType::f32, {1});
  for (const ExpertsEntry& entry : experts_implementations()) {
    if (!testing::runs_here(entry, config.dtype)) continue;
    PlanOptions options;
    options.experts = std::string(entry.name);
    const Plan plan = Plan::create({}, config, options);
    const Layer layer(plan, Weights::pack(plan, source));
    Call call(layer, std::vector<float>(2 * 40, 2.0f));
    const std::vector<std::int32_t> ids{3, -1, 0, 1};
    const std::vector<float> weights{1, 0, 0.5f, 0.5f};
    call.in.routing = {Tensor(ids.data(), DType::i32, {2, 2}), Tensor(weights.data(), DType::f32, {2, 2})};
    const Status status = call.run();
    ASSERT_TRUE(status.ok()) << entry.name << ": " << status.to_string();
    // h = 2 · silu(2) = 3.5232: 56 sixteenths of the routed experts, 113 thirty-seconds of the shared one
    for (float y : call.y) ASSERT_NEAR(y, 56.0 / 16 + 113.0 / 32, 1e-5) << entry.name;
  }
}

TEST(layer_static_scales, that_are_missing_or_do_not_fit_are_named) {
  const LayerConfig config = static_int8();
  const Plan plan = Plan::create({}, config);
  const OnesInt8 ones;
  const std::vector<float> scales(8, 0.5f);
  const auto one = [&] { return Tensor(scales.data(), DType::f32, {1}); };
  WeightsSource good;
  good.expert = [&](std::int64_t, CanonicalExpert& expert) {
    expert = ones.expert();
    return Status();
  };
  good.shared.expert = ones.expert();
  for (QuantTensors* quant : {&good.quant, &good.shared.quant}) quant->a1_scale = quant->a2_scale = one();
  (void)Weights::pack(plan, good);

  const auto expect = [&](const WeightsSource& source, std::initializer_list<const char*> names) {
    try {
      (void)Weights::pack(plan, source);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      const std::string text = error.status().to_string();
      for (const char* name : names) EXPECT_NE(text.find(name), std::string::npos) << text;
    }
  };
  WeightsSource source = good;
  source.shared.quant = {};
  expect(source, {"shared expert", "a1_scale", "shared.quant"});
  source = good;
  source.quant.a1_scale = Tensor(scales.data(), DType::f32, {8});  // rows are quantised before they are at an expert
  expect(source, {"a1_scale", "[1]", "[8]"});
  source = good;
  source.quant.a2_scale = Tensor(scales.data(), DType::f32, {7});
  expect(source, {"a2_scale", "[8]", "[7]"});
  source = good;
  source.quant.a2_scale = Tensor(scales.data(), DType::f32, {8});  // one per expert
  EXPECT_NO_THROW((void)Weights::pack(plan, source));
}

}  // namespace
}  // namespace moekit
