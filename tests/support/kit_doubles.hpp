// Stand-ins with values that are easy to predict: local expert e maps x to (e + 1) · x.
#pragma once
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <moekit/kit/implementations.hpp>
#include <moekit/kit/modular_kernel.hpp>

#include "quant/numeric.hpp"

namespace moekit::testing {

/// Runs everything on the calling thread, or in `concurrency` slabs that are still run one after the other.
class SerialExecutor final : public Executor {
 public:
  explicit SerialExecutor(int concurrency = 1) : concurrency_(concurrency) {}
  int concurrency() const override { return concurrency_; }
  void run(std::int64_t count, void (*body)(void*, std::int64_t), void* arg) override {
    for (std::int64_t i = count; i-- > 0;) body(arg, i);  // last first: nothing may depend on the order
  }

 private:
  int concurrency_;
};

/// 256-byte-aligned memory with a guard of 0xEE behind it; the rest holds 0xFF.
class PoisonedBytes {
 public:
  explicit PoisonedBytes(std::size_t size)
      : size_(size), memory_(static_cast<std::byte*>(std::aligned_alloc(256, (size + 511) / 256 * 256 + 256))) {
    std::memset(memory_.get(), 0xff, size_);
    std::memset(memory_.get() + size_, 0xee, 256);
  }
  Bytes bytes() const { return {memory_.get(), size_}; }
  bool guard_intact() const {
    for (std::size_t i = 0; i < 256; ++i)
      if (memory_.get()[size_ + i] != std::byte{0xee}) return false;
    return true;
  }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::size_t size_;
  std::unique_ptr<std::byte, Free> memory_;
};

struct AffineOptions {
  WeightAndReduce reduce = WeightAndReduce::no_op();
  bool batched = false;
  bool chunking = true;
  bool expert_map = true;
  bool open = false;
  InputSpec input{.dtype = DType::f32};
  DType out = DType::f32;
  std::function<void(const ExpertsArgs&)> seen{};  ///< called by every apply
  std::function<Status()> fail{};                  ///< asked by every apply
};

class AffineExperts final : public Experts {
 public:
  explicit AffineExperts(AffineOptions options = {}) : o_(std::move(options)) {}
  std::string_view name() const override { return "affine"; }
  Verdict supports(const Problem&) const override { return Verdict::yes(); }
  Formats activation_formats() const override {
    const auto format = o_.batched ? ActivationFormat::batched_experts : ActivationFormat::standard;
    return {format, format};
  }
  bool accepts(const PackFormat& format) const override { return format.id() == "canonical"; }
  const PackFormat& preferred_format(const WeightsSpec&) const override { return *pack_formats().back(); }
  InputSpec input_spec(const Problem&) const override { return o_.input; }
  WeightAndReduce weight_and_reduce() const override { return o_.reduce; }
  bool supports_chunking() const override { return o_.chunking; }
  bool supports_expert_map() const override { return o_.expert_map; }
  bool supports_open_output() const override { return o_.open; }
  Determinism determinism() const override { return Determinism::batch_invariant; }
  double estimate_us(const Problem&, const Ceilings&) const override { return 1; }

  ExpertsWorkspace workspace(const Problem& problem, const ExpertTokens*) const override {
    const ProblemSize& size = problem.size;
    const std::int64_t rows = o_.batched ? size.L * size.M : size.M * size.k;
    ExpertsWorkspace out;
    out.w13_bytes = static_cast<std::size_t>(rows * std::max(size.N, size.K)) * sizeof(float);
    out.w2_bytes = static_cast<std::size_t>(rows * (size.N / 2 + size.K + 1)) * sizeof(float);
    if (o_.batched)
      out.output = {o_.out, 3, {size.L, size.M, size.K}};
    else
      out.output = {o_.out, 2, {o_.reduce == WeightAndReduce::no_op() ? size.M : rows, size.K}};
    return out;
  }

  Status apply(const ExpertsArgs& args, ExpertsResult& result) const override {
    if (o_.seen) o_.seen(args);
    if (o_.fail)
      if (Status s = o_.fail(); !s.ok()) return s;
    if (o_.batched)
      batched(args);
    else if (args.leave_open && o_.open)
      open(args, result);
    else
      standard(args);
    result.output = args.output;
    return {};
  }

 private:
  std::int64_t local(const ExpertsArgs& args, std::int64_t t, std::int64_t j) const {
    std::int64_t id = args.routing.ids.at<std::int32_t>(t, j);
    const std::int64_t limit = args.routing.id_space == IdSpace::local ? args.weights.spec.num_local : args.num_experts;
    if (id < 0 || id >= limit) return -1;
    if (args.expert_map && args.routing.id_space == IdSpace::physical) id = args.expert_map->as<std::int32_t>()[id];
    return id < args.weights.spec.num_local ? id : -1;
  }
  static float load(const QTensor& x, std::int64_t at, std::int64_t row, std::int64_t c) {
    const float value = numeric::load_f32(x.data.data, x.data.dtype, at);
    if (!x.scale.present()) return value;
    const std::int64_t groups = x.scale.shape[x.scale.rank - 1];
    const std::int64_t columns = x.data.shape[x.data.rank - 1];
    const std::int64_t per_group = groups == 1 ? columns : x.granularity->cols;
    return value * x.scale.as<float>()[(x.scale.numel() == 1 ? 0 : row * groups) + c / per_group];
  }

  void standard(const ExpertsArgs& args) const {
    const std::int64_t M = args.activations.data.shape[0], K = args.activations.data.shape[1];
    const std::int64_t k = args.routing.top_k();
    const bool reduces = o_.reduce == WeightAndReduce::no_op();
    for (std::int64_t t = 0; t < M; ++t)
      for (std::int64_t c = 0; c < K; ++c) {
        float sum = 0;
        for (std::int64_t j = 0; j < k; ++j) {
          const std::int64_t e = local(args, t, j);
          const float x = e < 0 ? 0.0f : load(args.activations, t * args.activations.data.stride[0] + c, t, c);
          const float y = static_cast<float>(e + 1) * x;
          if (!reduces) numeric::store_f32(args.output.data, o_.out, (t * k + j) * K + c, y);
          if (e >= 0) sum += args.weight_on_input ? y : y * args.routing.weights.at<float>(t, j);
        }
        if (reduces) numeric::store_f32(args.output.data, o_.out, t * K + c, sum);
      }
  }

  /// Rows of GEMM2 in reverse order of the routes; absent routes have none.
  void open(const ExpertsArgs& args, ExpertsResult& result) const {
    const std::int64_t M = args.activations.data.shape[0], K = args.activations.data.shape[1];
    const std::int64_t k = args.routing.top_k(), rows = M * k;
    auto* gemm2 = reinterpret_cast<float*>(args.workspace13.data);
    auto* map = reinterpret_cast<std::int32_t*>(args.workspace2.data);
    auto* ones = reinterpret_cast<float*>(map + rows);
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t t = r / k, e = local(args, t, r % k), row = rows - 1 - r;
      map[r] = e < 0 ? -1 : static_cast<std::int32_t>(row);
      ones[r] = 1.0f;
      for (std::int64_t c = 0; e >= 0 && c < K; ++c)
        gemm2[row * K + c] =
            static_cast<float>(e + 1) * load(args.activations, t * args.activations.data.stride[0] + c, t, c);
    }
    UnfinalizedOutput left;
    left.gemm2_permuted = Tensor(gemm2, DType::f32, {rows, K});
    left.expert_weights = args.weight_on_input ? Tensor(ones, DType::f32, {M, k}) : args.routing.weights;
    left.expanded_to_permuted = Tensor(map, DType::i32, {M, k});
    result.open = left;
  }

  void batched(const ExpertsArgs& args) const {
    const Tensor& x = args.activations.data;
    const auto* counts = args.tokens->counts.as<std::int32_t>();
    for (std::int64_t e = 0; e < x.shape[0]; ++e)
      for (std::int64_t r = 0; r < counts[e]; ++r)
        for (std::int64_t c = 0; c < x.shape[2]; ++c) {
          const std::int64_t row = e * x.shape[1] + r;
          numeric::store_f32(args.output.data, o_.out, row * x.shape[2] + c,
                             static_cast<float>(e + 1) * load(args.activations, row * x.shape[2] + c, row, c));
        }
  }

  AffineOptions o_;
};

/// One problem with its data: hidden f32 [M, K], ids, weights, output, all poisoned or filled.
struct Case {
  std::int64_t M, K, k, P, L;
  std::vector<float> hidden, output, shared, weights;
  std::vector<std::int32_t> ids, map;
  std::byte no_weights[64] = {};
  Tensor map_tensor;
  Problem problem;

  Case(std::int64_t tokens, std::int64_t columns, std::int64_t slots, std::int64_t physical, std::int64_t local = -1)
      : M(tokens), K(columns), k(slots), P(physical), L(local < 0 ? physical : local) {
    hidden.resize(static_cast<std::size_t>(M * K));
    for (std::size_t i = 0; i < hidden.size(); ++i) hidden[i] = static_cast<float>(i % 97) - 40.0f;
    output.assign(hidden.size(), std::nanf(""));
    shared.assign(hidden.size(), std::nanf(""));
    ids.resize(static_cast<std::size_t>(M * k));
    weights.resize(ids.size());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<std::int32_t>((i * 7 + i / 3) % static_cast<std::size_t>(P));
      weights[i] = 0.25f * static_cast<float>(1 + i % 3);
    }
    problem.size = {L, M, 8, K, k};
    problem.num_experts = P;
    problem.weights = {.num_local = L, .hidden = K, .intermediate = 4};
    problem.hidden_dtype = DType::f32;
  }

  Routing routing() { return {Tensor(ids.data(), DType::i32, {M, k}), Tensor(weights.data(), DType::f32, {M, k})}; }
  KernelInput input() {
    KernelInput in;
    in.hidden = Tensor(hidden.data(), DType::f32, {M, K});
    in.routing = routing();
    in.weights = {pack_formats().back(), problem.weights, no_weights, 0};
    in.num_experts = P;
    in.weight_on_input = problem.weight_on_input;
    if (!map.empty()) {
      map_tensor = Tensor(map.data(), DType::i32, {P});
      in.expert_map = &map_tensor;
    }
    return in;
  }
  KernelOutput result() {
    KernelOutput out;
    out.output = Tensor(output.data(), DType::f32, {M, K});
    out.shared = Tensor(shared.data(), DType::f32, {M, K});
    return out;
  }
  /// f64: Σ_j w_j (e_j + 1) x, the weights once whichever side they are applied on.
  double expected(std::int64_t t, std::int64_t c) const {
    double sum = 0;
    for (std::int64_t j = 0; j < k; ++j) {
      std::int64_t e = ids[static_cast<std::size_t>(t * k + j)];
      if (e < 0 || e >= P) continue;
      if (!map.empty()) e = map[static_cast<std::size_t>(e)];
      if (e < 0 || e >= L) continue;
      sum += static_cast<double>(weights[static_cast<std::size_t>(t * k + j)]) * static_cast<double>(e + 1) *
             static_cast<double>(hidden[static_cast<std::size_t>(t * K + c)]);
    }
    return sum;
  }
};

inline std::shared_ptr<PrepareFinalize> make_dispatcher(const char* name, const MakeContext& context = {}) {
  for (const PrepareFinalizeEntry& entry : prepare_finalize_implementations())
    if (entry.name == name) return entry.make(context);
  return nullptr;
}

/// An asynchronous engine around another one: what would be on the wire happens in the hook, abandoned results are
/// counted, and any step can be made to fail.
class AsyncEngine final : public PrepareFinalize {
 public:
  explicit AsyncEngine(std::shared_ptr<PrepareFinalize> inner, std::vector<std::string>* log = nullptr)
      : inner_(std::move(inner)), log_(log) {}

  bool with_hook = true;
  std::string fail_at;  ///< "prepare_hook", "finalize_receive", …
  int abandoned = 0;

  std::string_view name() const override { return "async_double"; }
  ActivationFormat activation_format() const override { return inner_->activation_format(); }
  std::optional<std::int64_t> max_tokens_per_rank() const override { return inner_->max_tokens_per_rank(); }
  std::int64_t num_dispatchers() const override { return inner_->num_dispatchers(); }
  bool supports_async() const override { return true; }
  bool supports_open_output() const override { return inner_->supports_open_output(); }
  Verdict supports(const InputSpec& input) const override { return inner_->supports(input); }
  std::size_t workspace_bytes(const Problem& problem, const InputSpec& input) const override {
    return inner_->workspace_bytes(problem, input);
  }
  Status prepare(const PrepareArgs& args, Dispatched& out) override { return inner_->prepare(args, out); }
  Status finalize(const FinalizeArgs& args) override { return inner_->finalize(args); }

  Status prepare_async(const PrepareArgs& args, Pending<Dispatched>& out) override {
    if (Status s = step("prepare_launch"); !s.ok()) return s;
    prepare_args_ = args;
    Pending<Dispatched>::Functions f;
    if (with_hook) f.hook = [](void* self) { return static_cast<AsyncEngine*>(self)->step("prepare_hook"); };
    f.receive = [](void* self, Dispatched& result) {
      auto& engine = *static_cast<AsyncEngine*>(self);
      if (Status s = engine.step("prepare_receive"); !s.ok()) return s;
      return engine.inner_->prepare(engine.prepare_args_, result);
    };
    f.abandon = [](void* self) { ++static_cast<AsyncEngine*>(self)->abandoned; };
    out = Pending<Dispatched>(f, this);
    return {};
  }
  Status finalize_async(const FinalizeArgs& args, Pending<Nothing>& out) override {
    if (Status s = step("finalize_launch"); !s.ok()) return s;
    finalize_args_ = args;
    Pending<Nothing>::Functions f;
    if (with_hook) f.hook = [](void* self) { return static_cast<AsyncEngine*>(self)->step("finalize_hook"); };
    f.receive = [](void* self, Nothing&) {
      auto& engine = *static_cast<AsyncEngine*>(self);
      if (Status s = engine.step("finalize_receive"); !s.ok()) return s;
      return engine.inner_->finalize(engine.finalize_args_);
    };
    f.abandon = [](void* self) { ++static_cast<AsyncEngine*>(self)->abandoned; };
    out = Pending<Nothing>(f, this);
    return {};
  }

 private:
  Status step(const char* what) {
    if (log_) log_->push_back(what);
    if (fail_at != what) return {};
    return Status(StatusCode::device_error, std::string("[double] ") + what + " failed on purpose");
  }
  std::shared_ptr<PrepareFinalize> inner_;
  std::vector<std::string>* log_;
  PrepareArgs prepare_args_;
  FinalizeArgs finalize_args_;
};

}  // namespace moekit::testing
