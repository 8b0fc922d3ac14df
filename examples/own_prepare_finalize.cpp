// A dispatcher of your own in front of the built-in experts: it passes rows on and counts where they go.
#include "tiny_layer.hpp"

using namespace moekit;

static std::vector<long> g_load(4);  // routes per expert, all calls

class LoadCounter final : public PrepareFinalize {
 public:
  std::string_view name() const override { return "load_counter"; }
  ActivationFormat activation_format() const override { return ActivationFormat::standard; }
  // Asked at plan time. "No" needs a sentence: explain prints it.
  Verdict supports(const InputSpec& input) const override {
    return input.quantised() ? Verdict::no("passes rows on as they are, cannot quantise") : Verdict::yes();
  }
  Verdict supports(const Problem& problem) const override {
    return problem.weight_on_input ? Verdict::no("does not weight rows") : Verdict::yes();
  }
  std::size_t workspace_bytes(const Problem&, const InputSpec&) const override { return 0; }

  Status prepare(const PrepareArgs& args, Dispatched& out) override {
    const Tensor& ids = args.routing.ids;  // at the edge ids may have other types: convert_ids() does that
    if (ids.dtype != DType::i32) return Status(StatusCode::invalid_dtype, "[prepare] load_counter takes i32 ids");
    for (std::int64_t t = 0; t < ids.rows(); ++t)
      for (std::int64_t j = 0; j < ids.shape[1]; ++j)
        if (const auto id = ids.at<std::int32_t>(t, j); id >= 0 && id < args.num_experts)
          ++g_load[static_cast<std::size_t>(id)];
    out.activations.data = args.hidden;  // no routing comes back: the caller's stays in force
    return {};
  }

  // Writes every element of the output. What is left to do is the experts' word; Delegate leaves the choice here.
  Status finalize(const FinalizeArgs& args) override {
    const bool free_choice = args.reduce == WeightAndReduce::delegate();
    const WeightAndReduce reduce = free_choice ? WeightAndReduce::contiguous() : args.reduce;
    Tensor result;
    return reduce.apply(args.output, args.expert_output, args.routing, args.weight_on_input, result);
  }
};

static std::unique_ptr<PrepareFinalize> make(const MakeContext&) { return std::make_unique<LoadCounter>(); }
static const PrepareFinalizeEntry kMine[] = {{"load_counter", &make, ActivationFormat::standard}};

int main() {
  const Plan plan =
      Plan::create({}, tiny_config(), {.prepare_finalize = "load_counter", .extra_prepare_finalize = kMine});
  const int wrong = check_tiny_layer(plan, "load_counter", {3, 1});
  std::printf("routes per expert: %ld %ld %ld %ld\n", g_load[0], g_load[1], g_load[2], g_load[3]);
  return g_load == std::vector<long>{0, 1, 0, 1} ? wrong : 1;
}
