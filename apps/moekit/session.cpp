#include "session.hpp"

#include <cstdint>
#include <cstring>

#include "exit_code.hpp"

namespace moekit::cli {

Device device_from_name(const std::string& name) {
  if (name == "cpu") return {};
  if (name == "cuda") return {DeviceType::cuda, 0};
  throw UsageError("--device " + name + ": cpu or cuda");
}

Determinism determinism_from_name(const std::string& level) {
  for (const Determinism d : {Determinism::fast, Determinism::repeatable, Determinism::batch_invariant})
    if (level == moekit::name(d)) return d;
  throw UsageError("--determinism " + level + ": fast, repeatable or batch_invariant");
}

Executor& executor_for(int threads) { return cpu_executor(threads); }

Workspace::Workspace(std::size_t size) : storage_(size + kWorkspaceAlignment), size_(size) {
  const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
  data_ = storage_.data() + (kWorkspaceAlignment - address % kWorkspaceAlignment) % kWorkspaceAlignment;
}

namespace {
Layer make_layer(const LayerConfig& config, const PlanOptions& options, const WeightsSource& source) {
  Plan plan = Plan::create(Device{}, config, options);
  Weights weights = Weights::pack(plan, source);
  return Layer(std::move(plan), std::move(weights));
}
}  // namespace

Session::Session(const LayerConfig& config, const PlanOptions& options, const WeightsSource& source)
    : layer_(make_layer(config, options, source)),
      workspace_(layer_.plan().workspace_bytes(options.max_tokens)),
      executor_(options.executor) {
  poison();
}

void Session::forward(const LayerInput& in, const Tensor& out) {
  LayerOutput output;
  output.tensor = out;
  CallContext context;
  context.stream.executor = executor_;
  context.workspace = workspace_.bytes();
  throw_if_failed(layer_.forward(in, output, context));
}

void Session::poison() {
  const Bytes all = workspace_.bytes();
  const std::size_t control = std::min(plan().control_bytes(), all.size);
  if (all.size > control) std::memset(all.data + control, 0xff, all.size - control);
}

std::string chosen_experts(const Plan& plan, std::int64_t num_tokens) { return plan.bucket(num_tokens).experts; }

}  // namespace moekit::cli
