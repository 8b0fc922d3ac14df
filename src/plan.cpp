#include <moekit/plan.hpp>

#include <algorithm>
#include <limits>

#include "enum_values.hpp"
#include "plan_impl.hpp"
#include "text.hpp"

namespace moekit::inline v0 {
using text::concat;

namespace {

/// FNV-1a over everything that decides how weights are packed and read.
class Fingerprint {
 public:
  void add(std::string_view text) {
    for (char c : text) state_ = (state_ ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
    state_ = (state_ ^ 0xffu) * 0x100000001b3ull;
  }
  std::uint64_t value() const { return state_; }

 private:
  std::uint64_t state_ = 0xcbf29ce484222325ull;
};

std::uint64_t fingerprint_of(const Plan::Impl& plan) {
  Fingerprint fingerprint;
  const LayerConfig& config = plan.config;
  fingerprint.add(shape_string(config));
  fingerprint.add(concat(name(config.dtype), " ", to_string(config.activation), " ", config.w1_bias, config.w2_bias));
  fingerprint.add(
      concat(to_string(config.router), " ", activations_scheme(config.quant), " ", config.quant.int8_divisor));
  fingerprint.add(concat(config.shared.intermediate, config.shared.quantised, config.shared.sigmoid_gate,
                         to_string(config.shared.activation)));
  fingerprint.add(concat(plan.format->id(), " ", plan.format->version()));
  for (const BucketPlan& bucket : plan.described)
    fingerprint.add(concat(bucket.max_tokens, " ", bucket.router, " ", bucket.prepare_finalize, " ", bucket.experts));
  return fingerprint.value();
}

Status validate_options(const LayerConfig& config, const PlanOptions& options) {
  auto bad = [](std::string message, std::string hint, std::string field) {
    return Status(StatusCode::invalid_argument, std::move(message), std::move(hint), std::move(field));
  };
  constexpr std::int64_t kMostTokens = std::int64_t{1} << 31;
  if (options.max_tokens < 1 || options.max_tokens > kMostTokens)
    return bad(concat("[plan] max_tokens must be in [1, ", kMostTokens, "], got ", options.max_tokens), "",
               "options.max_tokens");
  if (options.executor && options.executor->concurrency() < 1)
    return bad(concat("[plan] the executor's concurrency must be at least 1, got ", options.executor->concurrency()),
               "", "options.executor");
  if (options.chunk < 0)
    return bad(concat("[plan] chunk must not be negative, got ", options.chunk), "0 = all rows at once",
               "options.chunk");
  if (Status s = values::check("plan", "options.determinism", options.determinism); !s.ok()) return s;
  if (Status s = values::check("plan", "options.output", options.output); !s.ok()) return s;
  for (const PrepareFinalizeEntry& entry : options.extra_prepare_finalize)
    if (Status s = values::check("plan", "options.extra_prepare_finalize", entry.format); !s.ok()) return s;
  if (options.expert_out_dtype)
    if (Status s = values::check("plan", "options.expert_out_dtype", *options.expert_out_dtype); !s.ok()) return s;
  if (options.expert_out_dtype && *options.expert_out_dtype != DType::f32 && *options.expert_out_dtype != config.dtype)
    return bad(concat("[plan] expert_out_dtype must be f32 or ", name(config.dtype), ", got ",
                      name(*options.expert_out_dtype)),
               "", "options.expert_out_dtype");
  if (options.exact_activations && config.quant.activations_quantised())
    return bad(concat("[plan] exact activations were asked for, but the scheme quantises them (",
                      activations_scheme(config.quant), ")"),
               concat("set quant.a1 and quant.a2 to ", name(config.dtype)), "options.exact_activations");
  return {};
}

}  // namespace

Plan Plan::create(Device device, const LayerConfig& config, const PlanOptions& options) {
  throw_if_failed(validate(config));
  throw_if_failed(validate_options(config, options));
  throw_if_failed(values::check("plan", "device", device.type));
  if (device.type != DeviceType::cpu)
    throw Error(StatusCode::unsupported, concat("[plan] no backend for device ", to_string(device), " in this build"),
                "use device cpu", "device");
  auto impl = std::make_shared<Impl>();
  impl->device = device;
  impl->config = config;
  impl->options = options;
  impl->executor = options.executor ? options.executor : &cpu_executor();
  impl->spec = moekit::weights_spec(config, config.num_experts);
  choose_implementations(*impl);
  impl->options.extra_experts = {};  // the caller's spans are not kept
  impl->options.extra_prepare_finalize = {};
  impl->options.extra_routers = {};
  impl->fingerprint = fingerprint_of(*impl);
  Plan plan;
  plan.impl_ = std::move(impl);
  return plan;
}

const LayerConfig& Plan::config() const { return impl_->config; }
const PlanOptions& Plan::options() const { return impl_->options; }
Device Plan::device() const { return impl_->device; }
std::span<const BucketPlan> Plan::buckets() const { return impl_->described; }
const PackFormat& Plan::pack_format() const { return *impl_->format; }
WeightsSpec Plan::weights_spec() const { return impl_->spec; }
std::size_t Plan::persistent_bytes() const { return 0; }
std::size_t Plan::control_bytes() const { return 0; }
std::uint64_t Plan::fingerprint() const { return impl_->fingerprint; }
std::string Plan::explain(std::int64_t num_tokens) const { return explain_plan(*impl_, num_tokens); }

PlanFeatures Plan::features() const {
  PlanFeatures features;
  features.determinism = Determinism::batch_invariant;
  for (const Impl::Bucket& bucket : impl_->buckets)
    features.determinism = std::min(features.determinism, bucket.experts->determinism());
  return features;
}

std::size_t Plan::Impl::bucket_index(std::int64_t num_tokens) const {
  std::size_t i = 0;
  while (i + 1 < buckets.size() && buckets[i].max_tokens < num_tokens) ++i;
  return i;
}

const BucketPlan& Plan::bucket(std::int64_t num_tokens) const {
  return impl_->described[impl_->bucket_index(num_tokens)];
}

LayerScratch cut_workspace(const Plan::Impl& plan, const Plan::Impl::Bucket& bucket, std::int64_t num_tokens,
                           std::int64_t top_k, WorkspaceCursor& cursor) {
  const LayerConfig& config = plan.config;
  auto take = [&](DType type, std::int64_t rows, std::int64_t cols) {
    const Bytes memory = cursor.take(static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols) *
                                     static_cast<std::size_t>(bytes(type)));
    return Tensor(memory.data, type, {rows, cols}, plan.device);
  };
  LayerScratch scratch;
  if (bucket.router) scratch.logits = take(DType::f32, num_tokens, config.num_experts);
  scratch.ids = take(DType::i32, num_tokens, top_k);
  scratch.weights = take(DType::f32, num_tokens, top_k);
  if (bucket.router)
    scratch.router = cursor.take(
        bucket.router->workspace_bytes({plan.device, num_tokens, config.num_experts, top_k, config.router}));
  if (bucket.shared || plan.options.output == OutputKind::tail)
    scratch.routed = take(DType::f32, num_tokens, config.hidden);
  if (bucket.shared) scratch.shared = take(DType::f32, num_tokens, config.hidden);
  return scratch;
}

std::size_t Plan::workspace_bytes(std::int64_t num_tokens, std::int64_t top_k) const {
  const Impl& plan = *impl_;
  if (num_tokens < 0 || num_tokens > plan.options.max_tokens)
    throw Error(StatusCode::invalid_argument,
                concat("[plan] workspace_bytes of ", num_tokens, " tokens, but the plan takes at most ",
                       plan.options.max_tokens),
                concat("create the plan with max_tokens ≥ ", num_tokens), "num_tokens");
  if (top_k == 0) top_k = plan.config.top_k;
  if (top_k < 1)  // a caller's routing may name an expert twice, so k > E is legal
    throw Error(StatusCode::invalid_argument,
                concat("[plan] top_k ", top_k, " of ", plan.config.num_experts, " experts"), "", "top_k");
  std::size_t most = 0;
  for (std::size_t i = 0; i < plan.buckets.size(); ++i) {
    if (i > 0 && plan.buckets[i - 1].max_tokens >= num_tokens) break;  // no call of that size lands here
    const std::int64_t tokens = std::min(num_tokens, plan.buckets[i].max_tokens);
    WorkspaceCursor cursor({});
    cut_workspace(plan, plan.buckets[i], tokens, top_k, cursor);
    const std::size_t total = cursor.used() + plan.buckets[i].kernel->workspace_bytes(tokens, top_k);
    if (total > static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max()))
      throw Error(StatusCode::invalid_argument,
                  concat("[plan] the workspace of ", num_tokens, " tokens does not fit 63 bits"),
                  "use a smaller max_tokens, or chunk", "num_tokens");
    most = std::max(most, total);
  }
  return most;
}

}  // namespace moekit::inline v0
