// How the weights of one expert lie in memory, and views of many packed experts.
#pragma once
#include <cstddef>
#include <string_view>

#include <moekit/kit/problem.hpp>

namespace moekit::inline v0 {

/// One expert as checkpoints mean it: matrices [out, in]. Any strides (a transposed or interleaved tensor of a file is
/// described by its strides, nothing is copied); read only.
struct CanonicalExpert {
  Tensor gate{};                                  ///< [I, K]; absent if ungated
  Tensor up{};                                    ///< [I, K]
  Tensor down{};                                  ///< [K, I]
  Tensor gate_scale{}, up_scale{}, down_scale{};  ///< f32 or bf16; [rows, groups], absent for float weights
  Tensor gate_bias{}, up_bias{}, down_bias{};     ///< any float type; [I], [I], [K]
};

/// A layout of one expert: w1, w2, scales and biases. Stateless; one object per format.
class PackFormat {
 public:
  virtual ~PackFormat() = default;
  virtual std::string_view id() const = 0;  ///< "canonical", "cpu32", …: what saved packs and explain say
  virtual int version() const = 0;
  virtual Verdict supports(const WeightsSpec& spec) const = 0;
  /// Bytes of one packed expert; a multiple of 64.
  virtual std::size_t bytes(const WeightsSpec& spec) const = 0;
  /// Writes all bytes(spec) of `dst` (padding is zero). Float matrices are converted to the spec's type, one rounding;
  /// quantised ones must have it. Fails on shapes that do not fit the spec and on scales that are not finite.
  /// @param dst  64-byte aligned
  virtual Status pack_expert(std::byte* dst, const WeightsSpec& spec, const CanonicalExpert& expert) const = 0;
  /// The inverse, exactly: writes matrices, scales and biases into the tensors of `expert` (f32 scales and biases, any
  /// strides), which the caller provides; absent tensors are skipped.
  virtual Status unpack_expert(const std::byte* src, const WeightsSpec& spec, const CanonicalExpert& expert) const = 0;
};

/// L packed experts, expert e at data + e * expert_stride.
struct WeightsView {
  const PackFormat* format = nullptr;
  WeightsSpec spec{};
  const std::byte* data = nullptr;
  std::size_t expert_stride = 0;  ///< bytes
  const std::byte* expert(std::int64_t slot) const { return data + static_cast<std::size_t>(slot) * expert_stride; }
};

}  // namespace moekit::inline v0
