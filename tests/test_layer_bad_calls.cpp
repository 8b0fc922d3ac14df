// Calls that cannot be right: a status that names the thing, nothing written, and the layer works afterwards.
#include <gtest/gtest.h>

#include <functional>

#include "support/layers.hpp"

namespace moekit {
namespace {
using testing::Guarded;
using testing::LayerValues;
using testing::small_config;

/// A good call that each test spoils in one place.
struct Call {
  LayerConfig config = small_config();
  PlanOptions options;
  std::unique_ptr<Layer> layer;
  std::vector<float> x, logits;
  std::unique_ptr<Guarded> workspace, output;
  LayerInput in;
  LayerOutput out;
  CallContext context;

  explicit Call(bool checked = false) {
    options.max_tokens = 16;
    options.checked = checked;
    const Plan plan = Plan::create({}, config, options);
    layer = std::make_unique<Layer>(plan, Weights::pack(plan, LayerValues(config).source()));
    x.assign(static_cast<std::size_t>(4 * config.hidden), 0.5f);
    logits.assign(static_cast<std::size_t>(4 * config.num_experts), 0.25f);
    workspace = std::make_unique<Guarded>(plan.workspace_bytes(16));
    output = std::make_unique<Guarded>(x.size() * 4);
    in.hidden = Tensor(x.data(), DType::f32, {4, config.hidden});
    out.tensor = Tensor(output->data(), DType::f32, {4, config.hidden});
    context.workspace = workspace->bytes();
  }

  /// The spoilt call fails with `code` and a text that contains `names`; the output keeps its poison; then a good call
  /// runs.
  void expect(StatusCode code, const char* names) {
    const Status status = layer->forward(in, out, context);
    EXPECT_EQ(status.code(), code) << status.to_string();
    EXPECT_NE(status.to_string().find(names), std::string::npos) << status.to_string();
    for (std::size_t i = 0; i < output->size(); ++i)
      ASSERT_EQ(output->data()[i], std::byte{0xff}) << "written at " << i;
    Call good;
    good.layer = std::move(layer);
    EXPECT_TRUE(good.layer->forward(good.in, good.out, good.context).ok());
  }
};

TEST(bad_call, null_hidden) {
  Call call;
  call.in.hidden.data = nullptr;
  call.expect(StatusCode::invalid_argument, "hidden");
}
TEST(bad_call, missing_output) {
  Call call;
  call.out.tensor = {};
  call.expect(StatusCode::invalid_argument, "output");
}
TEST(bad_call, hidden_of_another_width_names_both_shapes) {
  Call call;
  call.in.hidden = Tensor(call.x.data(), DType::f32, {4, 39});
  call.expect(StatusCode::invalid_shape, "[M, 40], got [4, 39]");
}
TEST(bad_call, hidden_of_another_type) {
  Call call;
  call.in.hidden.dtype = DType::bf16;
  call.expect(StatusCode::invalid_dtype, "must be f32, got bf16");
}
TEST(bad_call, output_with_other_rows) {
  Call call;
  call.out.tensor = Tensor(call.output->data(), DType::f32, {3, 40});
  call.expect(StatusCode::invalid_shape, "3 rows");
}
TEST(bad_call, transposed_hidden_is_refused_with_its_stride) {
  Call call;
  call.in.hidden = Tensor::strided(call.x.data(), DType::f32, {4, 40}, {1, 4});
  call.expect(StatusCode::invalid_shape, "stride");
}
TEST(bad_call, output_over_hidden_without_in_place) {
  Call call;
  call.in.hidden = call.out.tensor;
  call.expect(StatusCode::invalid_argument, "in_place");
}
TEST(bad_call, in_place_with_another_output_than_hidden) {
  Call call;
  call.out.in_place = true;
  call.expect(StatusCode::invalid_argument, "in_place");
}
TEST(bad_call, output_rows_that_overlap_each_other) {
  Call call;
  call.out.tensor = Tensor::strided(call.output->data(), DType::f32, {4, 40}, {39, 1});
  call.expect(StatusCode::invalid_shape, "overlap");
}
TEST(bad_plan, an_executor_without_threads_is_refused) {
  struct Nobody final : Executor {
    int concurrency() const override { return 0; }
    void run(std::int64_t, void (*)(void*, std::int64_t), void*) override {}
  } nobody;
  PlanOptions options;
  options.executor = &nobody;
  EXPECT_THROW((void)Plan::create({}, small_config(), options), Error);
}
TEST(bad_plan, a_shared_expert_of_absurd_width_is_refused) {
  LayerConfig config = small_config();
  config.shared.intermediate = std::int64_t{1} << 62;
  EXPECT_THROW((void)Plan::create({}, config), Error);
}
TEST(bad_weights, a_static_scale_without_data_and_alphas_that_nobody_reads_are_refused) {
  const LayerConfig config = small_config();
  const LayerValues values(config);
  const Plan plan = Plan::create({}, config);
  WeightsSource source = values.source();
  source.quant.a1_scale = Tensor(static_cast<void*>(nullptr), DType::f32, {1});
  EXPECT_THROW((void)Weights::pack(plan, source), Error);
  source = values.source();
  const float one = 1;
  source.quant.g1_alphas = Tensor(&one, DType::f32, {1});
  EXPECT_THROW((void)Weights::pack(plan, source), Error);
}
TEST(bad_call, more_tokens_than_the_plan_takes) {
  Call call;
  std::vector<float> many(17 * 40);
  call.in.hidden = Tensor(many.data(), DType::f32, {17, 40});
  call.expect(StatusCode::invalid_argument, "max_tokens");
}
TEST(bad_call, workspace_one_byte_too_small) {
  Call call;
  call.context.workspace.size = call.layer->plan().workspace_bytes(4) - 1;
  call.expect(StatusCode::workspace_too_small, "workspace");
}
TEST(bad_call, no_workspace) {
  Call call;
  call.context.workspace = {};
  call.expect(StatusCode::workspace_too_small, "workspace");
}
TEST(bad_call, misaligned_workspace) {
  Call call;
  call.context.workspace.data += 8;
  call.context.workspace.size -= 8;
  call.expect(StatusCode::invalid_argument, "aligned");
}
TEST(bad_call, logits_of_the_wrong_width) {
  Call call;
  call.in.logits = Tensor(call.logits.data(), DType::f32, {4, 7});
  call.expect(StatusCode::invalid_shape, "logits");
}
TEST(bad_call, integer_logits) {
  Call call;
  call.in.logits = Tensor(call.logits.data(), DType::i32, {4, 8});
  call.expect(StatusCode::invalid_dtype, "logits");
}
TEST(bad_call, top_k_above_the_number_of_experts) {
  Call call;
  call.in.top_k = 9;
  call.expect(StatusCode::invalid_argument, "top_k");
}
TEST(bad_call, routing_with_other_rows) {
  Call call;
  const std::vector<std::int32_t> ids(6, 0);
  const std::vector<float> weights(6, 0.5f);
  call.in.routing = {Tensor(ids.data(), DType::i32, {3, 2}), Tensor(weights.data(), DType::f32, {3, 2}),
                     IdSpace::physical};
  call.expect(StatusCode::invalid_shape, "3");
}
TEST(bad_call, an_id_out_of_range_is_an_error_in_checked_mode_and_names_value_and_place) {
  Call call(true);
  std::vector<std::int32_t> ids(8, 0);
  ids[5] = 8;
  const std::vector<float> weights(8, 0.5f);
  call.in.routing = {Tensor(ids.data(), DType::i32, {4, 2}), Tensor(weights.data(), DType::f32, {4, 2}),
                     IdSpace::physical};
  call.expect(StatusCode::invalid_argument, "8");
}
TEST(bad_call, a_nan_logit_is_an_error_in_checked_mode) {
  Call call(true);
  call.logits[9] = std::numeric_limits<float>::quiet_NaN();
  call.in.logits = Tensor(call.logits.data(), DType::f32, {4, 8});
  call.expect(StatusCode::invalid_argument, "NaN");
}
TEST(bad_call, a_tensor_of_another_device) {
  Call call;
  call.in.hidden.device = {DeviceType::cuda, 1};
  call.expect(StatusCode::invalid_argument, "cuda:1");
}

TEST(bad_weights, of_another_plan_are_refused_by_the_layer) {
  LayerConfig other = small_config();
  other.activation.kind = ActivationKind::gelu;
  const Plan plan = Plan::create({}, small_config()), other_plan = Plan::create({}, other);
  EXPECT_THROW(Layer(plan, Weights::pack(other_plan, LayerValues(other).source())), Error);
}

void expect_error(const std::function<void()>& body, StatusCode code, std::initializer_list<const char*> names) {
  try {
    body();
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    for (const char* text : names) EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(bad_weights, of_the_wrong_shape_name_tensor_and_both_shapes) {
  const LayerConfig config = small_config();
  const Plan plan = Plan::create({}, config);
  const std::vector<float> w1(8 * 24 * 40), w2(8 * 40 * 24);
  expect_error(
      [&] {
        (void)Weights::pack(plan, Tensor(w1.data(), DType::f32, {8, 24, 40}),
                            Tensor(w2.data(), DType::f32, {8, 40, 24}), LayerValues(config).source());
      },
      StatusCode::invalid_shape, {"w1", "[8, 48, 40]", "[8, 24, 40]"});
}
TEST(bad_weights, that_are_null_are_named) {
  const Plan plan = Plan::create({}, small_config());
  expect_error([&] { (void)Weights::pack(plan, {}, {}); }, StatusCode::invalid_argument, {"w1"});
  expect_error([&] { (void)Weights::pack(plan, WeightsSource{}); }, StatusCode::invalid_argument, {"expert"});
}
TEST(bad_weights, one_expert_of_the_wrong_shape_names_the_expert) {
  const LayerConfig config = small_config();
  const LayerValues values(config);
  const Plan plan = Plan::create({}, config);
  WeightsSource source = values.source();
  source.expert = [&](std::int64_t e, CanonicalExpert& expert) {
    const Status status = values.source().expert(e, expert);
    if (e == 5) expert.down = expert.down.transposed();
    return status;
  };
  expect_error([&] { (void)Weights::pack(plan, source); }, StatusCode::invalid_shape, {"expert 5", "down"});
}
TEST(bad_weights, a_missing_shared_gate_is_named) {
  LayerConfig config = small_config();
  config.shared = {24, false, true, {}};
  const Plan plan = Plan::create({}, config);
  const LayerValues values(config);
  WeightsSource source = values.source();
  source.shared.gate_vector = {};
  expect_error([&] { (void)Weights::pack(plan, source); }, StatusCode::invalid_shape, {"gate"});
}

}  // namespace
}  // namespace moekit
