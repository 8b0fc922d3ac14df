// Router weights of the caller that are no numbers: they reach the output of their own token and nothing else.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/layers.hpp"

namespace moekit {
namespace {
using testing::Guarded;
using testing::LayerValues;
using testing::small_config;

struct Routed {
  explicit Routed(const std::string& experts) : values(config()) {
    PlanOptions options;
    options.experts = experts;
    options.max_tokens = 4;
    options.checked = true;  // which speaks of ids and logits
    const Plan plan = Plan::create({}, values.config, options);
    layer = std::make_unique<Layer>(plan, Weights::pack(plan, values.source()));
    workspace = std::make_unique<Guarded>(plan.workspace_bytes(4));
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = 0.01f * static_cast<float>(i % 37) - 0.2f;
  }
  static LayerConfig config() {
    LayerConfig out = small_config();
    out.router.source = RouterSource::external;
    return out;
  }
  std::vector<float> forward(const std::vector<std::int32_t>& ids, const std::vector<float>& weights) {
    std::vector<float> y(160, 99.0f);
    LayerInput in;
    in.hidden = Tensor(x.data(), DType::f32, {4, 40});
    in.routing = {Tensor(ids.data(), DType::i32, {4, 2}), Tensor(weights.data(), DType::f32, {4, 2})};
    LayerOutput out;
    out.tensor = Tensor(y.data(), DType::f32, {4, 40});
    const Status status = layer->forward(in, out, {{}, workspace->bytes(), nullptr});
    EXPECT_TRUE(status.ok()) << status.to_string();
    return y;
  }
  LayerValues values;
  std::unique_ptr<Layer> layer;
  std::unique_ptr<Guarded> workspace;
  std::vector<float> x = std::vector<float>(160);
};

TEST(router_weights, that_are_no_numbers_reach_their_own_token_alone_and_no_slot_without_expert) {
  int asked = 0;
  for (const ExpertsEntry& entry : experts_implementations()) {
    if (!testing::runs_here(entry, DType::f32)) continue;
    const auto experts = entry.make({});
    if (!experts || experts->activation_formats().in != ActivationFormat::standard) continue;
    SCOPED_TRACE(std::string(entry.name));
    Routed run{std::string(entry.name)};
    ++asked;
    const std::vector<std::int32_t> ids{0, 3, 3, 5, -1, 3, 0, 5};  // every token shares an expert with another
    const std::vector<float> clean{0.5f, 0.25f, 0.75f, 0.5f, 0.125f, 0.5f, 0.25f, 1.0f};
    const std::vector<float> wanted = run.forward(ids, clean);
    for (float odd : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      std::vector<float> weights = clean;
      weights[2] = odd;  // token 1, slot 0
      weights[4] = odd;  // token 2, slot 0: -1, nothing to weigh
      const std::vector<float> got = run.forward(ids, weights);
      for (std::size_t i = 0; i < got.size(); ++i) {
        if (i / 40 == 1)
          EXPECT_FALSE(std::isfinite(got[i])) << i;
        else
          EXPECT_EQ(got[i], wanted[i]) << i;
      }
    }
  }
  EXPECT_GE(asked, 2);
}

}  // namespace
}  // namespace moekit
