// Tensors that claim another device, or whose strides lead out of the address space, are refused by name before
// anything is written, at every entry point that takes one.
#include <gtest/gtest.h>

#include <functional>

#include <moekit/kit/modular_kernel.hpp>

#include "support/layers.hpp"
#include "tensor_checks.hpp"

namespace moekit {
namespace {
using testing::Guarded;
using testing::LayerValues;
using testing::small_config;

constexpr std::int64_t kHuge = std::int64_t{1} << 61;

Status thrown_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.status();
  }
  return {};
}

/// `tensor` spoilt in every way in turn: each time `call` fails and names `field`. Then it works again.
void expect_refused(const std::string& field, Tensor& tensor, const std::function<Status()>& call) {
  ASSERT_TRUE(tensor.present()) << field;
  ASSERT_TRUE(call().ok()) << field << ": " << call().to_string();
  const Tensor good = tensor;
  const auto refused = [&](StatusCode code, const char* says) {
    const Status status = call();
    EXPECT_EQ(status.code(), code) << field << ": " << status.to_string();
    EXPECT_EQ(status.field(), field) << status.to_string();
    EXPECT_NE(status.to_string().find(says), std::string::npos) << status.to_string();
    tensor = good;
  };
  tensor.device = {DeviceType::cuda, 1};
  refused(StatusCode::invalid_argument, "copy it to cpu");
  if (tensor.rank > 1 && tensor.shape[0] > 1) {
    tensor.stride[0] = kHuge;  // times the element size beyond 63 bits, or times the rows
    refused(StatusCode::invalid_shape, "address space");
    tensor.stride[0] = -kHuge;
    refused(StatusCode::invalid_shape, "address space");
  }
  tensor.rank = 1000;
  refused(StatusCode::invalid_shape, "rank 1000");
  tensor.rank = -1;
  refused(StatusCode::invalid_shape, "rank -1");
  EXPECT_TRUE(call().ok()) << field;
}

TEST(byte_range, covers_strides_of_both_signs_and_refuses_what_does_not_fit) {
  float memory[64] = {};
  const auto range = [&](std::initializer_list<std::int64_t> shape, std::initializer_list<std::int64_t> stride) {
    return tensors::byte_range(Tensor::strided(memory, DType::f32, shape, stride));
  };
  const auto bytes = range({3, 4}, {8, 1});
  ASSERT_TRUE(bytes);
  EXPECT_EQ(bytes->begin, 0);
  EXPECT_EQ(bytes->end, (2 * 8 + 4) * 4);
  const auto back = range({3, 4}, {-8, 1});
  ASSERT_TRUE(back);
  EXPECT_EQ(back->begin, -2 * 8 * 4);
  EXPECT_EQ(back->end, 16);
  const auto broadcast = range({std::int64_t{1} << 40, 4}, {0, 1});
  ASSERT_TRUE(broadcast);
  EXPECT_EQ(broadcast->end, 16);
  EXPECT_EQ(range({0, 4}, {kHuge, 1})->end, 0);
  EXPECT_EQ(range({1, 4}, {kHuge, 1})->end, 16);
  EXPECT_FALSE(range({3, 4}, {kHuge, 1}));
  EXPECT_FALSE(range({3, 4}, {kHuge * 2, 1}));
  EXPECT_FALSE(range({3, 4}, {-kHuge, 1}));
  EXPECT_FALSE(range({2, 2}, {kHuge, 1}));                // 2^61 elements, 2^63 bytes
  EXPECT_FALSE(range({2, 2, 2}, {kHuge, kHuge, kHuge}));  // sums
  EXPECT_FALSE(range({-1, 4}, {4, 1}));
  EXPECT_FALSE(range({std::int64_t{1} << 40, std::int64_t{1} << 40}, {0, 0}));  // so many elements
  EXPECT_EQ(tensors::byte_range(Tensor(memory, DType::int4, {3}))->end, 2);
}

TEST(tensor, products_of_extents_that_do_not_fit_match_nothing) {
  const std::int64_t big = std::int64_t{1} << 40;
  const Tensor tensor(static_cast<void*>(nullptr), DType::f32, {big, big, 2});
  EXPECT_EQ(tensor.numel(), std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(Tensor(static_cast<void*>(nullptr), DType::f32, {big, big, 0}).numel(), 0);
  Tensor out;
  EXPECT_FALSE(tensor.view({4}, out).ok());
}

// ---- the layer -----------------------------------------------------------------------------------------------------

struct LayerCall {
  static LayerConfig config(bool biases) {
    LayerConfig out = small_config();
    out.router.logit_bias = out.router.selection_bias = biases;
    out.router.score = biases ? Score::sigmoid : Score::softmax;
    return out;
  }
  explicit LayerCall(OutputKind kind) : values(config(false)) {
    PlanOptions options;
    options.output = kind;
    options.max_tokens = 4;
    const Plan plan = Plan::create({}, values.config, options);
    layer = std::make_unique<Layer>(plan, Weights::pack(plan, values.source()));
    workspace = std::make_unique<Guarded>(plan.workspace_bytes(4));
    in.hidden = Tensor(x.data(), DType::f32, {4, 40});
    out.tensor = Tensor(y.data(), DType::f32, {4, 40});
    tail.residual = Tensor(r.data(), DType::f32, {4, 40});
    tail.gamma = Tensor(g.data(), DType::f32, {40});
    tail.norm_out = Tensor(y.data(), DType::f32, {4, 40});
    tail.residual_out = Tensor(z.data(), DType::f32, {4, 40});
    out.tail = &tail;
  }
  std::function<Status()> call() {
    return [this] { return layer->forward(in, out, {{}, workspace->bytes(), nullptr}); };
  }
  LayerValues values;
  std::unique_ptr<Layer> layer;
  std::unique_ptr<Guarded> workspace;
  std::vector<float> x = std::vector<float>(160, 0.5f), y = x, z = x, r = x, g = x, logits = x, weights = x;
  std::vector<std::int32_t> ids = std::vector<std::int32_t>(8, 1);
  LayerInput in;
  Tail tail;
  LayerOutput out;
};

TEST(refused_tensors, of_a_layers_call) {
  LayerCall c(OutputKind::tensor);
  expect_refused("hidden", c.in.hidden, c.call());
  expect_refused("output", c.out.tensor, c.call());
  c.in.logits = Tensor(c.logits.data(), DType::f32, {4, 8});
  expect_refused("logits", c.in.logits, c.call());
  c.in.routing = {Tensor(c.ids.data(), DType::i32, {4, 2}), Tensor(c.weights.data(), DType::f32, {4, 2})};
  expect_refused("routing.ids", c.in.routing.ids, c.call());
  expect_refused("routing.weights", c.in.routing.weights, c.call());
}

TEST(refused_tensors, of_a_layers_tail) {
  LayerCall c(OutputKind::tail);
  expect_refused("tail.residual", c.tail.residual, c.call());
  expect_refused("tail.norm_out", c.tail.norm_out, c.call());
  expect_refused("tail.residual_out", c.tail.residual_out, c.call());
  expect_refused("tail.gamma", c.tail.gamma, c.call());
}

TEST(refused_tensors, nothing_of_a_tail_is_written_when_its_gamma_or_epsilon_is_refused) {
  LayerCall c(OutputKind::tail);
  const std::vector<float> poison(160, 7.0f);
  c.y = c.z = poison;
  const std::vector<std::byte> before(c.workspace->data(), c.workspace->data() + c.workspace->size());
  c.tail.gamma.dtype = DType::i32;
  EXPECT_EQ(c.call()().field(), "tail.gamma");
  c.tail.gamma.dtype = DType::f32;
  c.tail.eps = -1;
  EXPECT_EQ(c.call()().field(), "tail.eps");
  c.tail.eps = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(c.call()().field(), "tail.eps");
  EXPECT_EQ(c.y, poison);
  EXPECT_EQ(c.z, poison);
  EXPECT_TRUE(std::equal(before.begin(), before.end(), c.workspace->data()));  // found before any work
}

TEST(refused_tensors, a_stream_of_another_device_is_refused) {
  LayerCall c(OutputKind::tensor);
  CallContext context{{}, c.workspace->bytes(), nullptr};
  context.stream.device = {DeviceType::cuda, 0};
  EXPECT_EQ(c.layer->forward(c.in, c.out, context).field(), "context.stream");
}

// ---- weights -------------------------------------------------------------------------------------------------------

TEST(refused_tensors, of_weights) {
  LayerConfig config = LayerCall::config(true);
  config.w1_bias = config.w2_bias = true;
  config.shared = {24, false, true, {}};
  const LayerValues values(config);
  const Plan plan = Plan::create({}, config, {.max_tokens = 4});
  CanonicalExpert spoilt;
  ASSERT_TRUE(values.source().expert(3, spoilt).ok());
  WeightsSource source = values.source();
  source.expert = [&](std::int64_t e, CanonicalExpert& expert) {
    if (e == 3) expert = spoilt;
    return e == 3 ? Status() : values.source().expert(e, expert);
  };
  const std::vector<float> bias(8, 0.5f);
  source.router.logit_bias = source.router.selection_bias = Tensor(bias.data(), DType::f32, {8});
  const auto call = [&] { return thrown_by([&] { (void)Weights::pack(plan, source); }); };
  for (const auto& [field, member] : {std::pair{"gate", &CanonicalExpert::gate},
                                      {"up", &CanonicalExpert::up},
                                      {"down", &CanonicalExpert::down},
                                      {"gate_bias", &CanonicalExpert::gate_bias},
                                      {"up_bias", &CanonicalExpert::up_bias},
                                      {"down_bias", &CanonicalExpert::down_bias}})
    expect_refused(field, spoilt.*member, call);
  expect_refused("router.weight", source.router.weight, call);
  expect_refused("router.logit_bias", source.router.logit_bias, call);
  expect_refused("router.selection_bias", source.router.selection_bias, call);
  expect_refused("shared.gate_vector", source.shared.gate_vector, call);
  expect_refused("down", source.shared.expert.down, call);
}

TEST(refused_tensors, of_stacked_weights) {
  const LayerConfig config = small_config();
  const LayerValues values(config);
  const Plan plan = Plan::create({}, config, {.max_tokens = 4});
  Tensor w1(values.w1.data(), DType::f32, {8, 48, 40}), w2(values.w2.data(), DType::f32, {8, 40, 24});
  WeightsSource rest = values.source();
  rest.expert = nullptr;
  const auto call = [&] { return thrown_by([&] { (void)Weights::pack(plan, w1, w2, rest); }); };
  expect_refused("w1", w1, call);
  expect_refused("w2", w2, call);
}

// ---- the kit -------------------------------------------------------------------------------------------------------

TEST(refused_tensors, of_the_kits_steps) {
  std::vector<float> logits(32, 0.5f), weights(8), rows(8 * 40), result(160), x(160), w(8 * 40);
  std::vector<std::int32_t> ids(8), small(8);
  RouterConfig config;
  RouteArgs args;
  args.config = &config;
  args.logits = Tensor(logits.data(), DType::f32, {4, 8});
  args.ids = Tensor(ids.data(), DType::i32, {4, 2});
  args.weights = Tensor(weights.data(), DType::f32, {4, 2});
  for (const RouterEntry& entry : router_implementations()) {
    if (entry.available && !entry.available()) continue;
    const auto call = [&] { return entry.make()->route(args); };
    expect_refused("logits", args.logits, call);
    expect_refused("ids", args.ids, call);
    expect_refused("weights", args.weights, call);
  }
  Tensor hidden(x.data(), DType::f32, {4, 40}), matrix(w.data(), DType::f32, {8, 40});
  const auto gemm = [&] { return router_gemm(hidden, matrix, args.logits, {}); };
  expect_refused("hidden", hidden, gemm);
  expect_refused("weight", matrix, gemm);
  expect_refused("logits", args.logits, gemm);

  Tensor output(result.data(), DType::f32, {4, 40}), expert_rows(rows.data(), DType::f32, {8, 40}), reduced;
  Routing routing{args.ids, args.weights};
  const auto reduce = [&] { return WeightAndReduce::contiguous().apply(output, expert_rows, routing, false, reduced); };
  expect_refused("output", output, reduce);
  expect_refused("expert_output", expert_rows, reduce);
  expect_refused("routing.ids", routing.ids, reduce);
  expect_refused("routing.weights", routing.weights, reduce);

  Tensor narrow(small.data(), DType::i32, {4, 2});
  const auto convert = [&] { return convert_ids(routing.ids, 8, narrow); };
  expect_refused("routing.ids", routing.ids, convert);
  expect_refused("out", narrow, convert);
  expect_refused("routing.ids", routing.ids, [&] { return check_ids(routing.ids, 8); });
  std::int32_t counts[8];
  expect_refused("routing.ids", routing.ids, [&] { return count_expert_tokens(routing.ids, nullptr, counts); });

  MoeOutput moe{expert_rows.slice_rows(0, 4), {}, 1.0f};
  expect_refused("output", output, [&] { return close_output(moe, output, {}); });
  expect_refused("routed", std::get<Tensor>(moe.routed), [&] { return close_output(moe, output, {}); });
}

TEST(refused_tensors, of_a_kernels_call) {
  const LayerConfig config = small_config();
  const LayerValues values(config);
  const Plan plan = Plan::create({}, config, {.max_tokens = 4, .experts = "reference"});
  const Weights packed = Weights::pack(plan, values.source());
  Problem problem;
  problem.size = {8, 4, 48, 40, 2};
  problem.num_experts = 8;
  problem.weights = plan.weights_spec();
  problem.quant = config.quant;
  problem.activation = config.activation;
  problem.hidden_dtype = DType::f32;
  problem.expert_map = true;
  std::shared_ptr<PrepareFinalize> dispatcher;
  std::shared_ptr<const Experts> experts;
  for (const auto& entry : prepare_finalize_implementations())
    if (entry.name == "single_rank") dispatcher = entry.make({});
  for (const auto& entry : experts_implementations())
    if (entry.name == "reference") experts = entry.make({});
  const ModularKernel kernel(dispatcher, experts, nullptr, problem);
  std::vector<float> x(160, 0.5f), y(160), weights(8, 0.5f);
  std::vector<std::int32_t> ids(8, 1), map{0, 1, 2, 3, 4, 5, 6, 7};
  KernelInput in;
  in.hidden = Tensor(x.data(), DType::f32, {4, 40});
  in.routing = {Tensor(ids.data(), DType::i32, {4, 2}), Tensor(weights.data(), DType::f32, {4, 2})};
  in.weights = packed.view();
  in.activation = config.activation;
  Tensor expert_map(map.data(), DType::i32, {8});
  in.expert_map = &expert_map;
  KernelOutput out;
  out.output = Tensor(y.data(), DType::f32, {4, 40});
  Guarded workspace(kernel.workspace_bytes(4));
  const auto call = [&] {
    KernelOutput copy = out;
    return kernel.forward(in, copy, {{}, workspace.bytes(), nullptr});
  };
  expect_refused("hidden", in.hidden, call);
  expect_refused("output", out.output, call);
  expect_refused("routing.ids", in.routing.ids, call);
  expect_refused("routing.weights", in.routing.weights, call);
  expect_refused("expert_map", expert_map, call);
}

TEST(refused_tensors, of_a_dispatchers_call) {
  std::vector<float> x(160, 0.5f), weights(8, 0.5f);
  std::vector<std::int32_t> ids(8, 1), map(8, 0);
  Tensor expert_map(map.data(), DType::i32, {8});
  for (const PrepareFinalizeEntry& entry : prepare_finalize_implementations()) {
    MakeContext make;
    if (entry.format == ActivationFormat::batched_experts) make.batched = BatchedShape{16, 1};
    const auto engine = entry.make(make);
    Problem problem;
    problem.size = {8, 4, 48, 40, 2};
    problem.hidden_dtype = DType::f32;
    PrepareArgs args;
    args.input.dtype = DType::f32;
    Guarded workspace(std::max<std::size_t>(1, engine->workspace_bytes(problem, args.input)));
    args.hidden = Tensor(x.data(), DType::f32, {4, 40});
    args.routing = {Tensor(ids.data(), DType::i32, {4, 2}), Tensor(weights.data(), DType::f32, {4, 2})};
    args.num_experts = args.num_local = 8;
    args.expert_map = &expert_map;
    args.context.workspace = workspace.bytes();
    const auto call = [&] {
      Dispatched out;
      return engine->prepare(args, out);
    };
    SCOPED_TRACE(std::string(entry.name));
    expect_refused("hidden", args.hidden, call);
    expect_refused("routing.ids", args.routing.ids, call);
    expect_refused("routing.weights", args.routing.weights, call);
    expect_refused("expert_map", expert_map, call);
  }
}

TEST(refused_tensors, of_an_experts_call) {
  const LayerConfig config = small_config();
  const LayerValues values(config);
  std::vector<float> x(160, 0.5f), y(160), weights(8, 0.5f);
  std::vector<std::int32_t> ids(8, 1);
  for (const ExpertsEntry& entry : experts_implementations()) {
    if (entry.available && !entry.available()) continue;
    const auto experts = entry.make({});
    if (!experts || experts->activation_formats().in != ActivationFormat::standard) continue;
    Problem problem;
    problem.size = {8, 4, 48, 40, 2};
    problem.num_experts = 8;
    problem.weights = weights_spec(config, 8);
    problem.quant = config.quant;
    problem.activation = config.activation;
    problem.hidden_dtype = DType::f32;
    if (!experts->supports(problem)) continue;
    const PackFormat& format = experts->preferred_format(problem.weights);
    const std::size_t stride = format.bytes(problem.weights);
    Guarded pack(8 * stride);
    for (std::int64_t e = 0; e < 8; ++e) {
      CanonicalExpert expert;
      ASSERT_TRUE(values.source().expert(e, expert).ok());
      ASSERT_TRUE(format.pack_expert(pack.data() + static_cast<std::size_t>(e) * stride, problem.weights, expert).ok());
    }
    const ExpertsWorkspace need = experts->workspace(problem);
    Guarded w13(std::max<std::size_t>(1, need.w13_bytes)), w2(std::max<std::size_t>(1, need.w2_bytes));
    Guarded rows(need.output.bytes());
    ExpertsArgs args;
    args.output = need.output.on(rows.data(), {});
    args.activations.data = Tensor(x.data(), DType::f32, {4, 40});
    args.weights = {&format, problem.weights, pack.data(), stride};
    args.routing = {Tensor(ids.data(), DType::i32, {4, 2}), Tensor(weights.data(), DType::f32, {4, 2})};
    args.activation = config.activation;
    args.num_experts = 8;
    args.workspace13 = w13.bytes(), args.workspace2 = w2.bytes();
    const auto call = [&] {
      ExpertsResult result;
      return experts->apply(args, result);
    };
    SCOPED_TRACE(std::string(entry.name));
    expect_refused("output", args.output, call);
    expect_refused("activations", args.activations.data, call);
    expect_refused("routing.ids", args.routing.ids, call);
    expect_refused("routing.weights", args.routing.weights, call);
  }
}

}  // namespace
}  // namespace moekit
