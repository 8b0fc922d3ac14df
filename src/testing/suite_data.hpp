// Inputs of the conformance suite: seeded weights in the canonical pack, rows and routes, and what a call is made of.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <moekit/kit/experts.hpp>

#include "quant/numeric.hpp"
#include "seeded_random.hpp"
#include "shapes.hpp"

namespace moekit::suite {

using seeded::Random;

/// Memory that starts at a multiple of 256 and ends exactly where it should: 64 bytes on both sides are watched.
class Guarded {
 public:
  Guarded() = default;
  Guarded(std::size_t bytes, std::byte fill);
  Guarded(Guarded&&) = default;
  Guarded& operator=(Guarded&&) = default;
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  Bytes bytes() const { return {data_, size_}; }
  bool intact() const;

 private:
  std::vector<std::byte> memory_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// The experts of a layer, packed in every format that somebody asked for.
class SuiteWeights {
 public:
  enum class Fill : std::uint8_t { random, flat, hot };
  /// flat: gate g/K, up u/K, down d/I everywhere. hot: gate[i, i mod K] = g, up[i, i mod K] = u, down[h, i] = d where
  /// i mod K = h mod I. With g, u and d of the expert (pattern_factors), all powers of two.
  SuiteWeights(const WeightsSpec& spec, Fill fill, std::uint64_t seed);
  const WeightsSpec& spec() const { return spec_; }
  /// The first `num_local` experts in `format`; packed on first use. Throws Error if it cannot be.
  WeightsView view(const PackFormat& format, std::int64_t num_local);

 private:
  void fill_random(std::byte* expert, Random& random) const;
  void fill_pattern(std::byte* expert, std::int64_t e, Fill fill) const;
  WeightsSpec spec_;
  std::map<std::string, Guarded, std::less<>> packs_;
};
/// g, u, d of expert e under Fill::flat and Fill::hot.
struct PatternFactors {
  float g, u, d;
};
PatternFactors pattern_factors(std::int64_t e);

/// One call: everything that apply() reads, owned. Copy it and change a copy to make a variant.
struct SuiteCase {
  std::string check;
  std::string shape;  ///< for reports
  std::shared_ptr<SuiteWeights> weights;
  LayerConfig config;          ///< activation, quant, dtype (of the rows)
  std::int64_t num_local = 0;  ///< L: the first experts of `weights`
  std::int64_t M = 0, k = 0;
  std::vector<float> rows;        ///< [M, K], rounded to config.dtype
  std::vector<std::int32_t> ids;  ///< [M, k]
  std::vector<float> route_weights;
  std::vector<std::int32_t> map;  ///< [E]; empty = none
  IdSpace id_space = IdSpace::physical;
  bool weight_on_input = false;
  std::int64_t padding = 0;  ///< elements between the rows of activations, ids and weights; poisoned
  std::optional<DType> out_dtype;
  std::vector<float> a1_scale, a2_scale;  ///< static scales; a2: [1], [L], or [M, 1] (a2_per_row)
  bool a2_per_row = false;

  std::int64_t K() const { return config.hidden; }
  std::int64_t num_experts() const { return map.empty() ? num_local : static_cast<std::int64_t>(map.size()); }
  void set_id(std::int64_t t, std::int64_t j, std::int64_t id) {
    ids[static_cast<std::size_t>(t * k + j)] = static_cast<std::int32_t>(id);
  }
};

WeightsSpec spec_of(const LayerConfig& config);
/// Distinct experts for each token, weights positive with sum about 1.
void route_randomly(SuiteCase& c, Random& random);
SuiteCase make_case(const LayerConfig& config, std::int64_t num_tokens, std::shared_ptr<SuiteWeights> weights,
                    std::uint64_t seed);
/// The problem that a case is, for rows of `format`; batched: with `capacity` rows per expert.
Problem problem_of(const SuiteCase& c, ActivationFormat format, std::int64_t capacity);

}  // namespace moekit::suite
