// The built-in dispatchers, in order of preference.
#include <moekit/kit/implementations.hpp>

#include "dispatch/single_rank.hpp"

namespace moekit::inline v0 {

std::span<const PrepareFinalizeEntry> prepare_finalize_implementations() {
  static constexpr PrepareFinalizeEntry kDispatchers[] = {
      {"single_rank", &dispatch::make_single_rank, ActivationFormat::standard},
      {"single_rank_batched", &dispatch::make_single_rank_batched, ActivationFormat::batched_experts},
  };
  return kDispatchers;
}

}  // namespace moekit::inline v0
