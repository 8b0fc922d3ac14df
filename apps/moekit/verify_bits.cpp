// moekit verify --bits: the bits of a batch_invariant layer, whatever the number of threads and of other tokens.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "console.hpp"
#include "machine.hpp"
#include "session.hpp"
#include "verify_checks.hpp"

namespace moekit::cli {
namespace {

constexpr int kThreads[] = {1, 2, 3, 8};
constexpr std::int64_t kRowsAlone = 6;

std::string fnv1a64(const Buffer& y) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const std::byte byte : y.bytes) hash = (hash ^ static_cast<std::uint64_t>(byte)) * 0x100000001b3ull;
  return format("%016llx", static_cast<unsigned long long>(hash));
}

/// A router matrix whose logits are N(0, 1), for layers that come without one.
Buffer generated_router(const LayerConfig& config) {
  Buffer out = generated_rows(config.num_experts, config.hidden, DType::f32, 21);
  const float scale = 1.0f / std::sqrt(static_cast<float>(config.hidden));
  for (std::int64_t i = 0; i < out.tensor.numel(); ++i) out.tensor.as<float>()[i] *= scale;
  return out;
}

/// One implementation (empty: the plan's choice) of one layer, from hidden rows through the layer's own router.
class BitsOfLayer {
 public:
  BitsOfLayer(Subjected& s, const std::string& impl, const WeightsSource& source,
              const std::vector<std::int64_t>& tokens)
      : s_(s), impl_(impl), source_(source), tokens_(tokens), config_(s.layer.config), checks_(tokens.size()) {
    most_ = *std::max_element(tokens.begin(), tokens.end());
    x_ = generated_rows(most_, config_.hidden, config_.dtype, 11);
  }

  void run() {
    for (const int threads : kThreads) {
      plan(threads);
      for (std::size_t i = 0; i < tokens_.size(); ++i) {
        const Buffer y = forward(0, tokens_[i]);
        if (threads == kThreads[0]) want_.push_back(copy_of(y));
        compare_bits(i, format("threads %d", threads), y, want_[i]);
        if (threads != kThreads[0] && tokens_[i] > 1 && alone_.size() <= i) rows_alone(i);
      }
    }
    std::string counts;
    for (const int threads : kThreads) counts += format(" %d", threads);
    for (std::size_t i = 0; i < tokens_.size(); ++i)
      s_.report.add_all(checks_[i], format("M%lld bits, threads%s%s", static_cast<long long>(tokens_[i]),
                                           counts.c_str(), tokens_[i] > 1 ? ", rows alone" : ""));
  }

 private:
  /// The weights are packed once: plans of other thread counts take them, unless they choose otherwise.
  void plan(int threads) {
    PlanOptions options;
    options.max_tokens = most_;
    options.determinism = Determinism::batch_invariant;
    options.experts = impl_;
    options.extra_experts = s_.extra_experts;
    options.executor = executor_ = &executor_for(threads);
    Plan next = Plan::create(Device{}, config_, options);
    if (!weights_ || weights_->plan_fingerprint() != next.fingerprint()) {
      const WeightsSpec spec = next.weights_spec();
      const double bytes = static_cast<double>(next.pack_format().bytes(spec)) * static_cast<double>(spec.num_local);
      layer_.reset();
      weights_.reset();
      if (bytes > 0.8 * static_cast<double>(this_machine().available_bytes))
        throw Error(StatusCode::out_of_memory,
                    format("[verify] %s packed, %s free", format_bytes(bytes).c_str(),
                           format_bytes(static_cast<double>(this_machine().available_bytes)).c_str()));
      weights_ = Weights::pack(next, source_);
    }
    layer_.emplace(std::move(next), *weights_);
    workspace_.emplace(layer_->plan().workspace_bytes(most_));
  }

  Buffer forward(std::int64_t begin, std::int64_t end) {
    const Bytes all = workspace_->bytes();
    const std::size_t control = std::min(layer_->plan().control_bytes(), all.size);
    if (all.size > control) std::memset(all.data + control, 0xff, all.size - control);
    Buffer y(config_.dtype, {end - begin, config_.hidden});
    LayerOutput out;
    out.tensor = y.tensor;
    CallContext context;
    context.stream.executor = executor_;
    context.workspace = all;
    LayerInput in;
    in.hidden = x_.tensor.slice_rows(begin, end);
    throw_if_failed(layer_->forward(in, out, context));
    return y;
  }

  static Buffer copy_of(const Buffer& from) {
    Buffer out(from.tensor.dtype, {from.tensor.shape[0], from.tensor.shape[1]});
    out.bytes.assign(from.bytes.begin(), from.bytes.end());
    out.tensor.data = out.bytes.data();
    return out;
  }

  /// The first, the last and seeded rows of a batch, each in a call of its own.
  void rows_alone(std::size_t i) {
    std::vector<std::int64_t> rows = sampled_rows(tokens_[i], 9);
    while (static_cast<std::int64_t>(rows.size()) > kRowsAlone) rows.erase(rows.end() - 2);
    Buffer batch(config_.dtype, {static_cast<std::int64_t>(rows.size()), config_.hidden});
    Buffer alone(config_.dtype, {static_cast<std::int64_t>(rows.size()), config_.hidden});
    const auto row_bytes = static_cast<std::size_t>(config_.hidden * bytes(config_.dtype));
    std::string names;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const Buffer y = forward(rows[r], rows[r] + 1);
      std::memcpy(alone.bytes.data() + r * row_bytes, y.bytes.data(), row_bytes);
      std::memcpy(batch.bytes.data() + r * row_bytes, want_[i].tensor.index(rows[r]).data, row_bytes);
      names += format(" %lld", static_cast<long long>(rows[r]));
    }
    compare_bits(i, "rows alone:" + names, alone, batch);
    alone_.resize(i + 1);
  }

  /// Equal bytes of finite numbers that are not all zero.
  void compare_bits(std::size_t i, const std::string& what, const Buffer& y, const Buffer& want) {
    Comparison found = compare(y.tensor, converted(want.tensor, DType::f32).tensor, 0);
    const bool zero = std::all_of(y.bytes.begin(), y.bytes.end(), [](std::byte b) { return b == std::byte{0}; });
    found.ok = found.finite && !zero && y.bytes == want.bytes;
    const std::string name = chosen_experts(layer_->plan(), tokens_[i]);
    Check check = Check::of(s_.label, format("M%lld bits, %s", static_cast<long long>(tokens_[i]), what.c_str()),
                            impl_.empty() ? "plan: " + name : name, found);
    check.hash = fnv1a64(y);
    if (zero) check.note = "all zero";
    checks_[i].push_back(std::move(check));
  }

  Subjected& s_;
  std::string impl_;
  const WeightsSource& source_;
  const std::vector<std::int64_t>& tokens_;
  LayerConfig config_;
  std::vector<std::vector<Check>> checks_;  // one list per number of tokens
  std::int64_t most_ = 0;
  Buffer x_;
  Executor* executor_ = nullptr;
  std::optional<Weights> weights_;
  std::optional<Layer> layer_;
  std::optional<Workspace> workspace_;
  std::vector<Buffer> want_;  // with the first thread count
  std::vector<bool> alone_;
};

}  // namespace

void check_bits(Subjected& s, const std::vector<std::string>& impls, const std::vector<std::int64_t>& tokens) {
  const LayerConfig& config = s.layer.config;
  WeightsSource source = s.source;
  Buffer router;
  if (!source.router.weight.present()) {
    router = generated_router(config);
    source.router.weight = router.tensor;
  }
  for (const std::string& impl : impls) {
    const std::string name = impl.empty() ? "plan" : impl;
    try {
      if (config.router.source != RouterSource::logits)
        throw Error(StatusCode::unsupported, "routed outside: the layer has no router of its own");
      BitsOfLayer(s, impl, source, tokens).run();
    } catch (const Error& error) {
      if (error.code() == StatusCode::unsupported)
        s.report.add(Check::refuse(s.label, "bits", name, error.status().message()));
      else if (error.code() == StatusCode::out_of_memory)
        s.report.add(Check::skip(s.label, "bits", name, error.status().message()));
      else
        throw;
    }
  }
}

}  // namespace moekit::cli
