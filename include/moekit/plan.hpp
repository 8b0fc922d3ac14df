// Which implementations a layer runs on this machine, and why.
#pragma once
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <moekit/config.hpp>
#include <moekit/kit/implementations.hpp>

namespace moekit::inline v0 {

/// What the layer's output is. tensor: [M, K]. open: MoeOutput, left to the caller. tail: finalised together with
/// shared experts, residual and RMSNorm.
/// With open the plan takes experts and a dispatcher that can leave the output open before any that cannot, be they
/// faster or not; where none can (also: none of the forced name), and above tail_max_tokens, the layer closes the
/// output and MoeOutput::routed is that tensor. BucketPlan::tail says which, the "tail" candidates say why.
enum class OutputKind : std::uint8_t { tensor, open, tail };

struct PlanOptions {
  std::int64_t max_tokens = 8192;  ///< largest M that forward will be called with
  Determinism determinism = Determinism::fast;
  std::string experts{};  ///< force by name or glob ("cpu.avx2", "reference"); impossible = Error, never ignored
  std::string router{};
  std::string prepare_finalize{};
  std::int64_t chunk = 0;                   ///< rows per experts call; 0 = all at once
  std::optional<DType> expert_out_dtype{};  ///< f32 or the layer's type; absent = the implementation's word
  bool exact_activations = false;           ///< refuse schemes that quantise activations
  bool checked = false;                     ///< ids out of range and NaN logits are errors instead of being skipped
  Executor* executor = nullptr;             ///< CPU; null = cpu_executor()
  OutputKind output = OutputKind::tensor;
  std::int64_t tail_max_tokens = 256;             ///< OutputKind::tail and open: above it the layer finalises by itself
  std::span<const ExpertsEntry> extra_experts{};  ///< yours, in front of the built-in list
  std::span<const PrepareFinalizeEntry> extra_prepare_finalize{};
  /// Yours, in front of the built-in list. config.router.source == custom takes the first of these that says yes,
  /// whatever it estimates, or the one named by `router`; without one, Plan::create fails.
  std::span<const RouterEntry> extra_routers{};
};

/// One implementation that was asked.
struct Candidate {
  std::string stage;  ///< "router", "prepare_finalize", "experts", "tail"
  std::string name;
  bool chosen = false;
  std::string reason;  ///< why it was refused, or why it is not the one ("slower: 310 us against 120 us")
  double estimate_us = 0;
  std::string detail;  ///< tile configuration, roundings
};

/// The choice for up to `max_tokens` tokens (and more than the bucket before).
struct BucketPlan {
  std::int64_t max_tokens = 0;
  std::string router, prepare_finalize, experts;
  std::string tail;    ///< who closes the output: "layer" (finalize), "cpu" (the tail), "caller" (it is left open)
  std::string format;  ///< pack format
  double estimate_us = 0;
  double floor_us = 0;  ///< the larger of bytes / bandwidth and operations / peak
  std::vector<Candidate> candidates;
};

struct PlanFeatures {
  bool graph = false;      ///< may be captured
  bool host_sync = false;  ///< forward waits for the device
  Determinism determinism = Determinism::fast;
};

/// Immutable, cheap to copy, safe to share between threads.
class MOEKIT_API Plan {
 public:
  /// Throws Error: invalid configuration, nothing can run it (the text lists every refusal), a forced name that is
  /// unknown or refused.
  static Plan create(Device device, const LayerConfig& config, const PlanOptions& options = {});

  const LayerConfig& config() const;
  const PlanOptions& options() const;
  Device device() const;
  PlanFeatures features() const;
  std::span<const BucketPlan> buckets() const;
  const BucketPlan& bucket(std::int64_t num_tokens) const;
  const PackFormat& pack_format() const;
  WeightsSpec weights_spec() const;
  /// Bytes that any m ≤ num_tokens and any routing need; monotone; nothing beyond it is touched. Throws Error when the
  /// size does not fit 63 bits or num_tokens is above max_tokens.
  /// @param top_k  for a run-time override above the layer's; 0 = the layer's
  std::size_t workspace_bytes(std::int64_t num_tokens, std::int64_t top_k = 0) const;
  std::size_t persistent_bytes() const;  ///< windows, flags, tables: 0 on one CPU rank
  /// Leading bytes of a workspace that must be zero once when it is bound, and are left zero by every forward.
  std::size_t control_bytes() const;
  /// Identifies configuration, choices and pack format.
  std::uint64_t fingerprint() const;
  /// What `moekit explain` prints for `num_tokens`.
  std::string explain(std::int64_t num_tokens) const;

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  std::shared_ptr<const Impl> impl_;
};

}  // namespace moekit::inline v0
