// Inputs and packed weights of a benchmark.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "bench.hpp"
#include "console.hpp"
#include "machine.hpp"
#include "route.hpp"

namespace moekit::cli {
namespace {

bool same_sets(const Tensor& a, const Tensor& b) {
  for (std::int64_t t = 0; t < a.shape[0]; ++t) {
    std::vector<std::int32_t> x, y;
    for (std::int64_t j = 0; j < a.shape[1]; ++j) {
      x.push_back(a.at<std::int32_t>(t, j));
      y.push_back(b.at<std::int32_t>(t, j));
    }
    std::sort(x.begin(), x.end());
    std::sort(y.begin(), y.end());
    if (x != y) return false;
  }
  return true;
}

}  // namespace

LayerInput BenchInput::view() const {
  LayerInput out;
  out.hidden = hidden.tensor;
  if (as_routing)
    out.routing = routing.view();
  else
    out.logits = logits.tensor;
  return out;
}

BenchInput make_input(const BenchJob& job, std::int64_t tokens) {
  BenchInput out;
  out.tokens = tokens;
  out.hidden = generated_rows(tokens, job.config.hidden, job.config.dtype, job.seed + 1);
  RoutingRows wanted = make_routing(job.routing, job.config, job.layer.index, tokens, job.seed + 2);
  out.logits = logits_for(wanted.ids.tensor, job.config.num_experts, job.seed + 3);
  out.routing = route_with("reference", out.logits.tensor, job.config, job.source.router);
  if (!same_sets(out.routing.ids.tensor, wanted.ids.tensor)) {
    out.as_routing = true;
    out.routing = std::move(wanted);
  }
  out.work = work_of(job.config, out.routing.ids.tensor);
  return out;
}

std::int64_t most_calls(const BenchArgs& args) {
  const double timed = std::min(1000.0 * args.seconds, static_cast<double>(kMostSamples));
  return 8 + static_cast<std::int64_t>(std::max(timed, static_cast<double>(kEnoughSamples))) +
         (args.gap_ms >= 0 ? kGapCalls : 0);
}

std::int64_t copies_needed(double pack_bytes, double hit_bytes, std::int64_t most_calls) {
  const Machine machine = this_machine();
  const double cache = 4.0 * static_cast<double>(std::max<std::int64_t>(machine.last_level_cache, 8 << 20));
  const double wanted =
      std::max(std::ceil(std::max(1073741824.0, cache) / pack_bytes), std::ceil(cache / std::max(hit_bytes, 1.0)));
  // Arenas come in pages of 2 MiB: thousands of small packs would fill the memory with their margins. What few copies
  // leave in cache, the read probe between the calls evicts.
  const double in_memory = std::max(pack_bytes, 2097152.0);
  const double limit = 0.5 * static_cast<double>(machine.available_bytes);
  const double possible = std::floor((pack_bytes < 2097152.0 ? std::min(limit, 3221225472.0) : limit) / in_memory);
  return static_cast<std::int64_t>(
      std::clamp(std::min(wanted, static_cast<double>(most_calls)), 1.0, std::max(possible, 1.0)));
}

Plan plan_for(const BenchJob& job, const std::string& impl) {
  PlanOptions options;
  options.max_tokens = *std::max_element(job.tokens.begin(), job.tokens.end());
  options.determinism = determinism_from_name(job.args.determinism.value_or("fast"));
  options.experts = impl;
  options.executor = job.executor;
  options.extra_experts = job.args.extra_experts;
  return Plan::create(Device{}, job.config, options);
}

Contender::Contender(const BenchJob& job, std::string impl, std::int64_t sets)
    : impl_(std::move(impl)), executor_(job.executor) {
  const Plan plan = plan_for(job, impl_);
  Progress progress("pack " + (impl_.empty() ? std::string("weights") : impl_), sets);
  for (std::int64_t i = 0; i < sets && !interrupted(); ++i) {
    layers_.emplace_back(plan, Weights::pack(plan, job.source));
    progress.step();
  }
  if (layers_.empty()) layers_.emplace_back(plan, Weights::pack(plan, job.source));
  workspace_ = std::make_unique<Workspace>(plan.workspace_bytes(plan.options().max_tokens));
  poison();
}

std::string Contender::name(std::int64_t tokens) const {
  return impl_.empty() ? chosen_experts(plan(), tokens) : impl_;
}

double Contender::bytes() const {
  double total = 0;
  for (const Layer& layer : layers_) total += static_cast<double>(layer.weights().bytes());
  return total;
}

void Contender::poison() {
  const Bytes all = workspace_->bytes();
  const std::size_t control = std::min(plan().control_bytes(), all.size);
  if (all.size > control) std::memset(all.data + control, 0xff, all.size - control);
}

double Contender::call_us(const LayerInput& in, const Tensor& y) {
  const Layer& layer = layers_[next_];
  next_ = (next_ + 1) % layers_.size();
  LayerOutput out;
  out.tensor = y;
  CallContext context;
  context.stream.executor = executor_;
  context.workspace = workspace_->bytes();
  const double start = now_s();
  const Status status = layer.forward(in, out, context);
  const double us = (now_s() - start) * 1e6;
  throw_if_failed(status);
  return us;
}

}  // namespace moekit::cli
