// Dense experts that every token passes.
#pragma once
#include <moekit/stream.hpp>
#include <moekit/tensor.hpp>

namespace moekit::inline v0 {

/// Reads the caller's unquantised, unweighted hidden and writes its own output; the two never alias.
class SharedExperts {
 public:
  virtual ~SharedExperts() = default;
  virtual std::size_t workspace_bytes(std::int64_t max_tokens) const {
    (void)max_tokens;
    return 0;
  }
  virtual Status apply(const Tensor& hidden, const Tensor& output, const CallContext& context) const = 0;
};

}  // namespace moekit::inline v0
