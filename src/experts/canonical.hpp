// The pack "canonical", and what every pack format shares: checks of an expert against the spec, sizes of its scales.
#pragma once
#include <array>

#include <moekit/kit/pack_format.hpp>

namespace moekit::experts {

/// A tensor of CanonicalExpert: which member, and what the spec wants it to be.
struct ExpertPart {
  const char* name;  ///< "gate", "up_scale", …
  Tensor CanonicalExpert::*member;
  int rank;  ///< 2 for matrices and scales, 1 for biases
  std::array<std::int64_t, 2> shape;
  DType type;  ///< as stored in a canonical pack: matrices the spec's, scales and biases f32
  enum class Role : std::uint8_t { matrix, scale, bias } role;
  bool wanted;  ///< the spec has it
  std::int64_t numel() const { return rank == 2 ? shape[0] * shape[1] : shape[0]; }
};
/// gate, up, down, their scales, their biases: in the order in which a canonical pack stores them.
std::array<ExpertPart, 9> expert_parts(const WeightsSpec& spec);

/// Types and granularities that packs can hold: f32, bf16, f16, int8 per row, e4m3 in blocks; w1 and w2 alike or not.
Verdict check_spec(const WeightsSpec& spec);

/// What pack_expert refuses: a tensor that is missing, not asked for, of another shape or type than the spec's (both
/// are named), a scale that is not finite (its position is named). Every pack format calls this first.
Status check_expert(const WeightsSpec& spec, const CanonicalExpert& expert);

/// What unpack_expert refuses: a present destination of another shape or type than the spec's.
Status check_destination(const WeightsSpec& spec, const CanonicalExpert& expert);

/// Elements of `src` written to `dst`, same shape (rank 1 or 2), any strides. Equal types are copied bit for bit;
/// floats are converted with one rounding. Types must be equal or both floats of at most 32 bits.
void copy_elements(const Tensor& src, const Tensor& dst);

/// Where the parts of one expert lie in a canonical pack; absent parts have no bytes.
class CanonicalLayout {
 public:
  explicit CanonicalLayout(const WeightsSpec& spec);
  std::size_t bytes() const { return bytes_; }
  /// Dense tensors over the memory of one packed expert: what unpack_expert writes into, and what kernels read.
  CanonicalExpert view(const std::byte* data) const;

 private:
  std::array<ExpertPart, 9> parts_;
  std::array<std::size_t, 9> offsets_{};
  std::size_t bytes_ = 0;
};

/// w1 (gate rows, then up rows) and w2, row-major; scales and biases f32: the layout of this project's documents.
const PackFormat& canonical_format();

}  // namespace moekit::experts
