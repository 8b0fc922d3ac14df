// Experts of your own behind the built-in dispatcher: plain loops over any pack format.
#include "tiny_layer.hpp"

using namespace moekit;

class PlainExperts final : public Experts {
 public:
  std::string_view name() const override { return "plain"; }
  Verdict supports(const Problem& p) const override {  // yes = correct for every routing of p; no says why
    if (p.hidden_dtype != DType::f32 || p.weights.w1.type != DType::f32) return Verdict::no("speaks f32 only");
    if (!(p.activation == Activation{})) return Verdict::no("knows gated silu, not " + to_string(p.activation));
    return p.weights.w1_bias || p.weights.w2_bias ? Verdict::no("has no biases") : Verdict::yes();
  }
  Formats activation_formats() const override { return {}; }       // [M, K] in and out
  bool accepts(const PackFormat&) const override { return true; }  // reads through unpack_expert
  const PackFormat& preferred_format(const WeightsSpec&) const override { return *pack_formats().back(); }
  InputSpec input_spec(const Problem&) const override { return {.dtype = DType::f32}; }
  WeightAndReduce weight_and_reduce() const override { return WeightAndReduce::no_op(); }  // done in apply
  bool supports_expert_map() const override { return false; }
  Determinism determinism() const override { return Determinism::batch_invariant; }
  double estimate_us(const Problem& p, const Ceilings&) const override { return 1e4 * static_cast<double>(p.size.M); }
  // One unpacked expert and h. In w2: output may lie in w13's memory and is written while this is read.
  ExpertsWorkspace workspace(const Problem& p, const ExpertTokens*) const override {
    const auto floats = static_cast<std::size_t>((3 * p.size.K + 1) * p.weights.intermediate);
    return {0, floats * sizeof(float), {DType::f32, 2, {p.size.M, p.size.K}}};
  }
  Status apply(const ExpertsArgs& args, ExpertsResult& result) const override {
    const WeightsView& w = args.weights;
    const Tensor &x = args.activations.data, &y = args.output;
    const std::int64_t K = w.spec.hidden, I = w.spec.intermediate;
    float* gate = reinterpret_cast<float*>(args.workspace2.data);
    float *up = gate + I * K, *down = up + I * K, *h = down + K * I;
    CanonicalExpert expert;
    expert.gate = Tensor(gate, DType::f32, {I, K}), expert.up = Tensor(up, DType::f32, {I, K});
    expert.down = Tensor(down, DType::f32, {K, I});
    std::fill_n(y.as<float>(), y.numel(), 0.0f);  // every element is written
    for (std::int64_t e = 0; e < w.spec.num_local; ++e) {
      if (Status s = w.format->unpack_expert(w.expert(e), w.spec, expert); !s.ok()) return s;
      for (std::int64_t t = 0; t < args.routing.num_tokens(); ++t)
        for (std::int64_t j = 0; j < args.routing.top_k(); ++j) {
          if (args.routing.ids.at<std::int32_t>(t, j) != e) continue;  // nobody is -1, or out of range
          const float weight = args.weight_on_input ? 1.0f : args.routing.weights.at<float>(t, j);
          const float* row = &x.at<float>(t, 0);
          for (std::int64_t i = 0; i < I; ++i) h[i] = silu(dot(row, gate + i * K, K)) * dot(row, up + i * K, K);
          for (std::int64_t c = 0; c < K; ++c) y.at<float>(t, c) += weight * dot(h, down + c * I, I);
        }
    }
    result.output = y;
    return {};
  }
};

std::unique_ptr<Experts> make(const MakeContext& c) { return c.batched ? nullptr : std::make_unique<PlainExperts>(); }
static const ExpertsEntry kMine[] = {{"plain", &make, nullptr}};

int main() {
  const Plan plan = Plan::create({}, tiny_config(), {.experts = "plain", .extra_experts = kMine});
  return check_tiny_layer(plan, "plain", {3, 3});  // the same expert twice counts twice
}
