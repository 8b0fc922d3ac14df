// The ordered lists of implementations: what plan, tests, CLI and bench walk. Nothing else knows what exists.
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include <moekit/kit/experts.hpp>
#include <moekit/kit/prepare_finalize.hpp>
#include <moekit/kit/router.hpp>

namespace moekit::inline v0 {

/// What an implementation is built with.
struct MakeContext {
  Device device{};
  std::optional<BatchedShape> batched;  ///< set for batched dispatchers and experts, absent otherwise
  std::int64_t rank = 0;
};

struct ExpertsEntry {
  std::string_view name;
  std::unique_ptr<Experts> (*make)(const MakeContext&);
  /// Can this machine run it at all (ISA, device)? Asked before make.
  Verdict (*available)();
};
struct PrepareFinalizeEntry {
  std::string_view name;
  std::unique_ptr<PrepareFinalize> (*make)(const MakeContext&);
  ActivationFormat format;
};
struct RouterEntry {
  std::string_view name;
  std::unique_ptr<Router> (*make)();
  Verdict (*available)();
};

/// In order of priority, the reference last. Modules and callers hand in spans of the same entries (PlanOptions).
MOEKIT_API std::span<const ExpertsEntry> experts_implementations();
MOEKIT_API std::span<const PrepareFinalizeEntry> prepare_finalize_implementations();
MOEKIT_API std::span<const RouterEntry> router_implementations();
/// Every pack format, "canonical" last.
MOEKIT_API std::span<const PackFormat* const> pack_formats();

}  // namespace moekit::inline v0
