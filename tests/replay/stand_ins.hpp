// Recording stand-ins: each writes down what it was given, and answers what the trace's configuration says.
#pragma once
#include <moekit/kit/modular_kernel.hpp>
#include <vector>

#include "replay/replay.hpp"

namespace moekit::replay {

/// What a trace configures, with the memory that the stand-ins hand out.
struct Scene {
  explicit Scene(const Json& line);

  const Json& config;
  std::int64_t M, K, N, L, G, k, T, arrived;
  bool batched, replaces_routing;
  std::string async, a1_scale, a2_scale, meta, output, reduce;

  std::vector<std::int32_t> ids, dispatched_ids, map, counts;
  std::vector<float> weights, dispatched_weights, hidden, activations, scale1, scale2;
  Tensor map_tensor;

  Json events = Json::array();
  Json questions = Json::array();               // workspace shapes that were asked for
  std::vector<const std::byte*> apply_outputs;  // where each apply wrote
  void record(const char* name, Json what = Json::object()) { events.push_back({name, std::move(what)}); }

  Routing caller_routing();
  Problem problem() const;
  QuantSpec quant_spec() const;
  bool has_map() const { return !map.empty(); }
};

class Dispatcher final : public PrepareFinalize {
 public:
  explicit Dispatcher(Scene& scene) : scene_(scene) {}
  std::string_view name() const override { return "recording_dispatcher"; }
  ActivationFormat activation_format() const override {
    return scene_.batched ? ActivationFormat::batched_experts : ActivationFormat::standard;
  }
  std::optional<std::int64_t> max_tokens_per_rank() const override {
    return scene_.batched ? std::optional(scene_.T) : std::nullopt;
  }
  bool supports_async() const override { return scene_.async != "sync"; }
  Verdict supports(const InputSpec&) const override { return Verdict::yes(); }
  std::size_t workspace_bytes(const Problem&, const InputSpec&) const override { return 0; }
  std::int64_t max_rows(const Problem& problem) const override {
    return scene_.batched ? scene_.T : std::max(problem.size.M, scene_.arrived);
  }
  Status prepare(const PrepareArgs& args, Dispatched& out) override;
  Status finalize(const FinalizeArgs& args) override;
  Status prepare_async(const PrepareArgs& args, Pending<Dispatched>& out) override;
  Status finalize_async(const FinalizeArgs& args, Pending<Nothing>& out) override;

 private:
  void deliver(Dispatched& out);
  void record_prepare(const char* name, const PrepareArgs& args);
  void record_finalize(const char* name, const FinalizeArgs& args);
  Scene& scene_;
};

class RecordingExperts final : public Experts {
 public:
  explicit RecordingExperts(Scene& scene) : scene_(scene) {}
  std::string_view name() const override { return "recording_experts"; }
  Verdict supports(const Problem&) const override { return Verdict::yes(); }
  Formats activation_formats() const override {
    const auto format = scene_.batched ? ActivationFormat::batched_experts : ActivationFormat::standard;
    return {format, format};
  }
  bool accepts(const PackFormat&) const override { return true; }
  const PackFormat& preferred_format(const WeightsSpec& spec) const override;
  InputSpec input_spec(const Problem&) const override { return {.dtype = DType::f32}; }
  ExpertsWorkspace workspace(const Problem& problem, const ExpertTokens* tokens) const override;
  WeightAndReduce weight_and_reduce() const override;
  bool supports_chunking() const override { return scene_.config.at("supports_chunking"); }
  Determinism determinism() const override { return Determinism::batch_invariant; }
  double estimate_us(const Problem&, const Ceilings&) const override { return 1; }
  Status apply(const ExpertsArgs& args, ExpertsResult& result) const override;

 private:
  Scene& scene_;
};

class RecordingUbatch final : public UbatchContext {
 public:
  explicit RecordingUbatch(Scene& scene) : scene_(scene) {}
  int index() const override { return scene_.config.at("ubatch"); }
  bool enabled() const override { return scene_.config.at("dbo"); }
  Status yield() override { return scene_.record("yield"), Status(); }
  Status register_recv_hook(Status (*)(void*), void*) override { return scene_.record("register_recv_hook"), Status(); }
  Status maybe_run_recv_hook() override { return scene_.record("maybe_run_recv_hook"), Status(); }
  void drop_recv_hook(void*) override { scene_.record("drop_recv_hook"); }
  Status switch_to(Lane) override { return {}; }

 private:
  Scene& scene_;
};

class RecordingShared final : public SharedExperts {
 public:
  explicit RecordingShared(Scene& scene) : scene_(scene) {}
  Status apply(const Tensor& hidden, const Tensor&, const CallContext&) const override {
    return scene_.record("shared_experts", {{"rows", hidden.rows()}}), Status();
  }

 private:
  Scene& scene_;
};

}  // namespace moekit::replay
