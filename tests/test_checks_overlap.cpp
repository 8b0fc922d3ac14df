// Memory that two arguments of a call share: refused by name unless the contract says that it may be.
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

TEST(overlap, is_exact_for_columns_of_one_wide_buffer_and_cautious_otherwise) {
  float memory[256] = {};
  const auto view = [&](std::int64_t at, std::int64_t rows, std::int64_t columns, std::int64_t pitch) {
    return Tensor::strided(memory + at, DType::f32, {rows, columns}, {pitch, 1});
  };
  EXPECT_TRUE(tensors::overlap(view(0, 4, 4, 8), view(0, 4, 4, 8)));
  EXPECT_FALSE(tensors::overlap(view(0, 4, 4, 8), view(4, 4, 4, 8)));
  EXPECT_FALSE(tensors::overlap(view(4, 4, 4, 8), view(0, 4, 4, 8)));
  EXPECT_TRUE(tensors::overlap(view(0, 4, 5, 8), view(4, 4, 4, 8)));
  EXPECT_TRUE(tensors::overlap(view(0, 4, 4, 8), view(7, 4, 4, 8)));     // the end of one row, the begin of the next
  EXPECT_FALSE(tensors::overlap(view(0, 4, 4, 8), view(12, 2, 4, 8)));   // columns beside, rows apart
  EXPECT_FALSE(tensors::overlap(view(24, 4, 4, -8), view(4, 4, 4, 8)));  // reversed rows
  EXPECT_TRUE(tensors::overlap(view(24, 4, 4, -8), view(2, 4, 4, 8)));
  EXPECT_FALSE(tensors::overlap(view(0, 4, 4, 8), view(36, 1, 4, 4)));  // one row between the rows
  EXPECT_TRUE(tensors::overlap(view(0, 4, 4, 8), view(17, 1, 2, 2)));
  EXPECT_FALSE(tensors::overlap(view(0, 4, 4, 8), Tensor(memory + 20, DType::f32, {4})));
  EXPECT_TRUE(tensors::overlap(view(0, 4, 4, 8), view(4, 4, 4, 16)));   // two pitches: the ranges decide
  EXPECT_FALSE(tensors::overlap(view(0, 4, 4, 8), view(28, 4, 4, 8)));  // behind the last element
  EXPECT_FALSE(tensors::overlap(view(0, 0, 4, 8), view(0, 4, 4, 8)));
  EXPECT_FALSE(tensors::overlap(Tensor(), view(0, 4, 4, 8)));
  const auto* bytes = reinterpret_cast<const std::byte*>(memory);
  EXPECT_TRUE(tensors::overlap(view(2, 1, 4, 4), bytes + 20, 4));
  EXPECT_FALSE(tensors::overlap(view(2, 1, 4, 4), bytes + 24, 8));
  EXPECT_FALSE(tensors::overlap(view(2, 1, 4, 4), bytes, 8));
}

/// Everything of a call in one block of memory, so that any two can be made to meet.
struct OneBlock {
  explicit OneBlock(OutputKind kind) : values(small_config()) {
    PlanOptions options;
    options.output = kind;
    options.max_tokens = 4;
    const Plan plan = Plan::create({}, values.config, options);
    layer = std::make_unique<Layer>(plan, Weights::pack(plan, values.source()));
    workspace = std::make_unique<Guarded>(plan.workspace_bytes(4) + 4096);
    in.hidden = rows(0);
    out.tensor = rows(1);
    tail = {rows(2), Tensor(memory.data() + 800, DType::f32, {40}), 1e-6f, rows(1), rows(3)};
    out.tail = kind == OutputKind::tail ? &tail : nullptr;
  }
  Tensor rows(std::int64_t i, std::int64_t shift = 0) {
    return Tensor(memory.data() + 200 * i + shift, DType::f32, {4, 40});
  }
  Status forward() {
    std::fill(memory.begin(), memory.end(), 0.5f);
    const Bytes all{workspace->data(), layer->plan().workspace_bytes(4)};
    return layer->forward(in, out, {{}, all, nullptr});
  }
  void expect_field(const char* field) {
    const Status status = forward();
    EXPECT_EQ(status.code(), StatusCode::invalid_argument) << field;
    EXPECT_EQ(status.field(), field) << status.to_string();
    EXPECT_NE(status.message().find("overlap"), std::string::npos) << status.to_string();
    for (float value : memory) ASSERT_EQ(value, 0.5f) << "written";
  }
  LayerValues values;
  std::unique_ptr<Layer> layer;
  std::unique_ptr<Guarded> workspace;
  std::vector<float> memory = std::vector<float>(1200, 0.5f);
  LayerInput in;
  LayerOutput out;
  Tail tail;
};

TEST(overlap, of_output_and_hidden_in_part_is_refused) {
  OneBlock c(OutputKind::tensor);
  ASSERT_TRUE(c.forward().ok());
  for (std::int64_t shift : {1, 40, -40, 159, -159}) {
    c.in.hidden = c.rows(1, shift);
    c.expect_field("output");
  }
  c.in.hidden = c.rows(1, 160);
  EXPECT_TRUE(c.forward().ok());
  c.in.hidden = c.rows(1, -160);
  EXPECT_TRUE(c.forward().ok());
}

TEST(overlap, exactly_in_place_and_columns_side_by_side_are_allowed) {
  OneBlock c(OutputKind::tensor);
  c.in.hidden = c.out.tensor;
  c.out.in_place = true;
  EXPECT_TRUE(c.forward().ok());
  c.out.in_place = false;
  c.in.hidden = Tensor::strided(c.memory.data(), DType::f32, {4, 40}, {80, 1});
  c.out.tensor = Tensor::strided(c.memory.data() + 40, DType::f32, {4, 40}, {80, 1});
  EXPECT_TRUE(c.forward().ok());
  c.out.tensor = Tensor::strided(c.memory.data() + 39, DType::f32, {4, 40}, {80, 1});
  c.expect_field("output");
}

TEST(overlap, of_output_with_logits_or_routing_is_refused) {
  OneBlock c(OutputKind::tensor);
  c.in.logits = Tensor(c.memory.data() + 1000, DType::f32, {4, 8});
  ASSERT_TRUE(c.forward().ok());
  c.in.logits = Tensor(c.out.tensor.as<float>() + 100, DType::f32, {4, 8});
  c.expect_field("output");
  c.in.logits = {};
  std::vector<std::int32_t> ids(8, 1);
  c.in.routing = {Tensor(ids.data(), DType::i32, {4, 2}), Tensor(c.out.tensor.as<float>() + 158, DType::f32, {4, 2})};
  c.expect_field("output");
  c.in.routing.weights = Tensor(c.memory.data() + 1000, DType::f32, {4, 2});
  EXPECT_TRUE(c.forward().ok());
}

TEST(overlap, of_the_workspace_with_what_a_call_reads_or_writes_is_refused) {
  OneBlock c(OutputKind::tensor);
  const auto inside = [&] { return Tensor(c.workspace->data(), DType::f32, {4, 40}); };
  c.out.tensor = inside();
  c.expect_field("output");
  c.out.tensor = c.rows(1);
  c.in.hidden = inside();
  c.expect_field("hidden");
  c.in.hidden = c.rows(0);
  c.in.logits = Tensor(c.workspace->data() + 256, DType::f32, {4, 8});
  c.expect_field("logits");
  c.in.logits = {};
  c.in.routing = {Tensor(c.workspace->data(), DType::i32, {4, 2}), Tensor(c.memory.data() + 1000, DType::f32, {4, 2})};
  c.expect_field("routing.ids");
  // what lies behind the bytes that the call needs may be anything
  c.in.routing = {};
  const std::size_t needed = c.layer->plan().workspace_bytes(4);
  c.in.hidden = Tensor(c.workspace->data() + needed, DType::f32, {4, 40});
  std::fill_n(c.in.hidden.as<float>(), 160, 0.5f);
  EXPECT_TRUE(c.layer->forward(c.in, c.out, {{}, c.workspace->bytes(), nullptr}).ok());
}

TEST(overlap, of_a_tails_tensors_is_refused_by_name) {
  OneBlock c(OutputKind::tail);
  ASSERT_TRUE(c.forward().ok());
  const Tail good = c.tail;
  c.tail.residual_out = c.tail.residual;  // as documented
  EXPECT_TRUE(c.forward().ok());
  struct Case {
    const char* field;
    Tensor Tail::*moved;
    Tensor Tail::*onto;
    std::int64_t shift;
  };
  const Case cases[] = {{"tail.residual_out", &Tail::residual_out, &Tail::residual, 40},
                        {"tail.residual_out", &Tail::residual_out, &Tail::residual, -1},
                        {"tail.norm_out", &Tail::norm_out, &Tail::residual, 0},
                        {"tail.norm_out", &Tail::norm_out, &Tail::residual, 159},
                        {"tail.norm_out", &Tail::norm_out, &Tail::residual_out, 0},
                        {"tail.norm_out", &Tail::norm_out, &Tail::residual_out, -80},
                        {"tail.norm_out", &Tail::norm_out, &Tail::gamma, 0},
                        {"tail.residual_out", &Tail::residual_out, &Tail::gamma, 39}};
  for (const Case& x : cases) {
    c.tail = good;
    (c.tail.*x.moved).data = (c.tail.*x.onto).as<float>() + x.shift;
    c.expect_field(x.field);
  }
  c.tail = good;
  c.tail.norm_out.data = c.in.hidden.as<float>() + 40;
  c.expect_field("tail.norm_out");
  c.tail = good;
  c.tail.residual_out.data = c.in.hidden.as<float>() + 39;
  c.expect_field("tail.residual_out");
  c.tail = good;
  c.tail.residual.data = c.in.hidden.data;  // both are read
  EXPECT_TRUE(c.forward().ok());
  c.tail.residual_out.data = c.workspace->data();
  c.expect_field("tail.residual_out");
}

TEST(overlap, of_a_closed_output_with_the_parts_is_refused_but_exactly_in_place) {
  std::vector<float> memory(400, 1.0f);
  const auto rows = [&](std::int64_t at) { return Tensor(memory.data() + at, DType::f32, {2, 40}); };
  MoeOutput moe{rows(0), rows(100), 1.0f};
  EXPECT_TRUE(close_output(moe, rows(200), {}).ok());
  EXPECT_TRUE(close_output(moe, rows(0), {}).ok());
  EXPECT_EQ(close_output(moe, rows(1), {}).field(), "output");
  EXPECT_EQ(close_output(moe, rows(140), {}).field(), "output");
  std::vector<std::int32_t> map{0, 1, 2, 3};
  moe.routed =
      UnfinalizedOutput{Tensor(memory.data(), DType::f32, {4, 20}), Tensor(memory.data() + 300, DType::f32, {2, 2}),
                        Tensor(map.data(), DType::i32, {2, 2})};
  moe.shared = {};
  const auto narrow = [&](std::int64_t at) { return Tensor(memory.data() + at, DType::f32, {2, 20}); };
  EXPECT_TRUE(close_output(moe, narrow(200), {}).ok());
  EXPECT_EQ(close_output(moe, narrow(0), {}).field(), "output");
  EXPECT_EQ(close_output(moe, narrow(299), {}).field(), "output");
}

TEST(overlap, of_what_the_kit_reads_and_writes_is_refused) {
  std::vector<float> memory(400, 0.5f);
  std::vector<std::int32_t> ids(8);
  RouterConfig config;
  RouteArgs args;
  args.config = &config;
  args.logits = Tensor(memory.data(), DType::f32, {4, 8});
  args.ids = Tensor(ids.data(), DType::i32, {4, 2});
  args.weights = Tensor(memory.data() + 24, DType::f32, {4, 2});
  for (const RouterEntry& entry : router_implementations()) {
    if (entry.available && !entry.available()) continue;
    EXPECT_EQ(entry.make()->route(args).field(), "weights") << entry.name;
    args.ids = Tensor(reinterpret_cast<const std::int32_t*>(memory.data()) + 31, DType::i32, {4, 2});
    EXPECT_EQ(entry.make()->route(args).field(), "ids") << entry.name;
    args.ids = Tensor(ids.data(), DType::i32, {4, 2});
  }
  EXPECT_EQ(router_gemm(Tensor(memory.data(), DType::f32, {4, 10}), Tensor(memory.data() + 100, DType::f32, {8, 10}),
                        Tensor(memory.data() + 39, DType::f32, {4, 8}), {})
                .field(),
            "logits");
  std::fill(ids.begin(), ids.end(), 0);
  const Routing routing{Tensor(ids.data(), DType::i32, {4, 2}), Tensor(memory.data() + 360, DType::f32, {4, 2})};
  Tensor result;
  const Tensor rows(memory.data(), DType::f32, {8, 10});
  EXPECT_EQ(WeightAndReduce::contiguous()
                .apply(Tensor(memory.data() + 40, DType::f32, {4, 10}), rows, routing, false, result)
                .field(),
            "output");
  EXPECT_EQ(WeightAndReduce::no_op()
                .apply(Tensor(memory.data() + 1, DType::f32, {8, 10}), rows, routing, false, result)
                .field(),
            "output");
  EXPECT_TRUE(WeightAndReduce::no_op().apply(rows, rows, routing, false, result).ok());
}

}  // namespace
}  // namespace moekit
