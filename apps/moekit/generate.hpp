// Seeded weights, rows and logits, for shapes without a checkpoint.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include <moekit/weights.hpp>

namespace moekit::cli {

/// Owns dense memory of one tensor.
struct Buffer {
  std::vector<std::byte> bytes;
  Tensor tensor;

  Buffer() = default;
  Buffer(DType type, std::initializer_list<std::int64_t> shape);  ///< filled with 0xFF
  Buffer(Buffer&&) = default;
  Buffer& operator=(Buffer&&) = default;
};

/// A copy of a rank-2 tensor in another float type.
Buffer converted(const Tensor& from, DType type);

/// N(0, 1) rows [rows, columns]: row r depends on the seed and r alone.
Buffer generated_rows(std::int64_t rows, std::int64_t columns, DType type, std::uint64_t seed);

/// A layer whose matrices are N(0, 1) / sqrt(input width) in the config's types, quantised ones with random codes and
/// scales, biases 0.3 · N(0, 1). Values are windows into a pool of normals, so that gigabytes cost what a copy costs.
/// The tensors that an expert is given as live until the same thread asks for the next one.
WeightsSource generated_weights(const LayerConfig& config, std::uint64_t seed);

/// Logits [M, E] f32 that make a router without groups and biases choose `ids` (i32 [M, k]), best first.
Buffer logits_for(const Tensor& ids, std::int64_t num_experts, std::uint64_t seed);

}  // namespace moekit::cli
