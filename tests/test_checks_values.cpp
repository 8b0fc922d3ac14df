// Values that their enumerations do not name, at every place where they may enter: a failure that names the field, no
// look-up beyond a table, no silent default.
#include <gtest/gtest.h>

#include <functional>

#include <moekit/kit/modular_kernel.hpp>

#include "support/layers.hpp"

namespace moekit {
namespace {
using testing::Guarded;
using testing::LayerValues;
using testing::small_config;

template <class Enum>
Enum bad(int value = 77) {
  return static_cast<Enum>(value);
}

Status thrown_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.status();
  }
  return {};
}

void expect_field(const Status& status, const char* field, const char* value = "77") {
  EXPECT_FALSE(status.ok()) << field;
  EXPECT_EQ(status.field(), field) << status.to_string();
  EXPECT_NE(status.message().find(value), std::string::npos) << status.to_string();
}

struct Spoilt {
  const char* field;
  void (*spoil)(LayerConfig&);
};
constexpr Spoilt kConfigs[] = {
    {"dtype", [](LayerConfig& c) { c.dtype = bad<DType>(); }},
    {"activation.kind", [](LayerConfig& c) { c.activation.kind = bad<ActivationKind>(); }},
    {"activation.layout", [](LayerConfig& c) { c.activation.layout = bad<GateLayout>(); }},
    {"router.source", [](LayerConfig& c) { c.router.source = bad<RouterSource>(); }},
    {"router.score", [](LayerConfig& c) { c.router.score = bad<Score>(); }},
    {"router.softmax_over", [](LayerConfig& c) { c.router.softmax_over = bad<SoftmaxOver>(); }},
    {"router.group_score", [](LayerConfig& c) { c.router.group_score = bad<GroupScore>(); }},
    {"router.group_fill", [](LayerConfig& c) { c.router.group_fill = bad<GroupFill>(); }},
    {"router.renorm_eps_mode", [](LayerConfig& c) { c.router.renorm_eps_mode = bad<RenormEps>(); }},
    {"router.simulated",
     [](LayerConfig& c) { c.router.source = RouterSource::simulated, c.router.simulated = bad<Simulated>(); }},
    {"quant.a1.type", [](LayerConfig& c) { c.quant.a1.type = bad<DType>(); }},
    {"quant.w1.type", [](LayerConfig& c) { c.quant.w1.type = bad<DType>(); }},
    {"quant.a2.type", [](LayerConfig& c) { c.quant.a2.type = bad<DType>(); }},
    {"quant.w2.type", [](LayerConfig& c) { c.quant.w2.type = bad<DType>(); }},
    {"shared.activation.kind",
     [](LayerConfig& c) { c.shared.intermediate = 8, c.shared.activation.kind = bad<ActivationKind>(); }},
};

TEST(unnamed_values, of_a_configuration_are_refused_by_field_and_can_be_printed) {
  for (const Spoilt& spoilt : kConfigs) {
    LayerConfig config = small_config();
    spoilt.spoil(config);
    expect_field(validate(config), spoilt.field);
    expect_field(thrown_by([&] { (void)Plan::create({}, config); }), spoilt.field);
    EXPECT_FALSE(to_string(config.router).empty());
    EXPECT_FALSE(to_string(config.activation).empty());
    EXPECT_FALSE(weights_scheme(config.quant).empty());
    EXPECT_FALSE(shape_string(config).empty());
  }
}

TEST(unnamed_values, have_names_that_lie_in_no_table) {
  for (int value : {20, 21, 77, 200, 255}) {
    EXPECT_STREQ(name(bad<DType>(value)), "unknown type");
    EXPECT_EQ(bits(bad<DType>(value)), 0);
    EXPECT_FALSE(is_float(bad<DType>(value)));
  }
  EXPECT_STREQ(name(DType::nvfp4), "nvfp4");
  EXPECT_STREQ(name(bad<ActivationFormat>()), "unknown format");
  EXPECT_EQ(to_string(Device{bad<DeviceType>(), 0}), "unknown device 77");
  EXPECT_FALSE(to_string(InputSpec{DType::i8, {1, -1}, bad<InputSpec::ScaleLayout>(), false, 127, false}).empty());
}

TEST(unnamed_values, of_plan_options_and_device_are_refused) {
  PlanOptions options;
  options.determinism = bad<Determinism>();
  expect_field(thrown_by([&] { (void)Plan::create({}, small_config(), options); }), "options.determinism");
  options = {};
  options.output = bad<OutputKind>();
  expect_field(thrown_by([&] { (void)Plan::create({}, small_config(), options); }), "options.output");
  options = {};
  options.expert_out_dtype = bad<DType>();
  expect_field(thrown_by([&] { (void)Plan::create({}, small_config(), options); }), "options.expert_out_dtype");
  expect_field(thrown_by([&] { (void)Plan::create({bad<DeviceType>(), 0}, small_config()); }), "device");
  const PrepareFinalizeEntry entry{"mine", nullptr, bad<ActivationFormat>()};
  options = {};
  options.extra_prepare_finalize = {&entry, 1};
  expect_field(thrown_by([&] { (void)Plan::create({}, small_config(), options); }), "options.extra_prepare_finalize");
}

TEST(unnamed_values, of_weights_are_refused) {
  const LayerConfig config = small_config();
  const Plan plan = Plan::create({}, config);
  const LayerValues values(config);
  WeightsSource source = values.source();
  source.expert = [&](std::int64_t e, CanonicalExpert& expert) {
    const Status status = values.source().expert(e, expert);
    if (e == 5) expert.down.dtype = bad<DType>();
    return status;
  };
  expect_field(thrown_by([&] { (void)Weights::pack(plan, source); }), "down.dtype");
  source = values.source();
  source.router.weight.dtype = bad<DType>();
  expect_field(thrown_by([&] { (void)Weights::pack(plan, source); }), "router.weight.dtype");
  const Tensor odd(values.w1.data(), bad<DType>(), {8, 48, 40}), good(values.w2.data(), DType::f32, {8, 40, 24});
  expect_field(thrown_by([&] { (void)Weights::pack(plan, odd, good); }), "w1.dtype");
  source = values.source();
  source.quant.a1_scale = Tensor(values.w1.data(), bad<DType>(), {1});
  expect_field(thrown_by([&] { (void)Weights::pack(plan, source); }), "a1_scale.dtype");
}

TEST(unnamed_values, of_a_call_are_refused) {
  const LayerConfig config = small_config();
  const Plan plan = Plan::create({}, config);
  const Layer layer(plan, Weights::pack(plan, LayerValues(config).source()));
  std::vector<float> x(160, 0.5f), y(160), logits(32);
  std::vector<std::int32_t> ids(8);
  Guarded workspace(plan.workspace_bytes(4));
  LayerInput in;
  in.hidden = Tensor(x.data(), DType::f32, {4, 40});
  LayerOutput out;
  out.tensor = Tensor(y.data(), DType::f32, {4, 40});
  const CallContext context{{}, workspace.bytes(), nullptr};
  const auto call = [&] { return layer.forward(in, out, context); };
  ASSERT_TRUE(call().ok());
  in.hidden.dtype = bad<DType>();
  expect_field(call(), "hidden.dtype");
  in.hidden.dtype = DType::f32;
  out.tensor.dtype = bad<DType>();
  expect_field(call(), "output.dtype");
  out.tensor.dtype = DType::f32;
  in.logits = Tensor(logits.data(), bad<DType>(), {4, 8});
  expect_field(call(), "logits.dtype");
  in.logits = {};
  in.routing = {Tensor(ids.data(), DType::i32, {4, 2}), Tensor(logits.data(), DType::f32, {4, 2}), bad<IdSpace>()};
  expect_field(call(), "routing.id_space");
  in.routing.id_space = IdSpace::physical;
  in.routing.ids.dtype = bad<DType>();
  expect_field(call(), "routing.ids.dtype");
}

TEST(unnamed_values, of_the_kit_are_refused) {
  std::vector<float> values(64), result(64), logits(16);
  std::vector<std::int32_t> ids(4);
  const Routing routing{Tensor(ids.data(), DType::i32, {2, 2}), Tensor(values.data(), DType::f32, {2, 2})};
  Tensor reduced;
  const WeightAndReduce reduce{bad<WeightAndReduce::Kind>(), 0};
  expect_field(reduce.apply(Tensor(result.data(), DType::f32, {2, 4}), Tensor(values.data(), DType::f32, {4, 4}),
                            routing, false, reduced),
               "reduce");
  EXPECT_FALSE(reduced.present());

  RouterConfig config;
  config.score = bad<Score>();
  RouteArgs args;
  args.logits = Tensor(logits.data(), DType::f32, {2, 8});
  args.config = &config;
  args.ids = routing.ids, args.weights = routing.weights;
  for (const RouterEntry& entry : router_implementations())
    if (!entry.available || entry.available()) expect_field(entry.make()->route(args), "router.score");
  config = {};
  config.source = RouterSource::simulated;
  config.simulated = bad<Simulated>();
  expect_field(simulate_routing(config, 8, 0, routing.ids, routing.weights), "router.simulated");

  expect_field(thrown_by([] {
                 QuantSpec spec;
                 spec.w2.type = bad<DType>();
                 (void)QuantConfig(spec, {});
               }),
               "quant.w2.type");
}

TEST(unnamed_values, of_a_kernels_problem_are_refused) {
  const LayerConfig config = small_config();
  Problem good;
  good.size = {8, 4, 48, 40, 2};
  good.num_experts = 8;
  good.weights = weights_spec(config, 8);
  good.quant = config.quant;
  good.activation = config.activation;
  good.hidden_dtype = DType::f32;
  const auto build = [](const Problem& problem) {
    std::shared_ptr<PrepareFinalize> dispatcher;
    std::shared_ptr<const Experts> experts;
    for (const auto& entry : prepare_finalize_implementations())
      if (entry.name == "single_rank") dispatcher = entry.make({});
    for (const auto& entry : experts_implementations())
      if (entry.name == "reference") experts = entry.make({});
    return thrown_by([&] { ModularKernel(dispatcher, experts, nullptr, problem); });
  };
  ASSERT_TRUE(build(good).ok()) << build(good).to_string();
  const std::pair<const char*, void (*)(Problem&)> cases[] = {
      {"problem.device.type", [](Problem& p) { p.device.type = bad<DeviceType>(); }},
      {"problem.format", [](Problem& p) { p.format = bad<ActivationFormat>(); }},
      {"problem.hidden_dtype", [](Problem& p) { p.hidden_dtype = bad<DType>(); }},
      {"problem.out_dtype", [](Problem& p) { p.out_dtype = bad<DType>(); }},
      {"problem.determinism", [](Problem& p) { p.determinism = bad<Determinism>(); }},
      {"problem.weights.w1.type", [](Problem& p) { p.weights.w1.type = bad<DType>(); }},
      {"problem.weights.w2.type", [](Problem& p) { p.weights.w2.type = bad<DType>(); }},
      {"quant.a2.type", [](Problem& p) { p.quant.a2.type = bad<DType>(); }},
      {"activation.kind", [](Problem& p) { p.activation.kind = bad<ActivationKind>(); }},
  };
  for (const auto& [field, spoil] : cases) {
    Problem problem = good;
    spoil(problem);
    expect_field(build(problem), field);
  }
}

}  // namespace
}  // namespace moekit
