// Simulated routing: ids drawn from a stated distribution, for load tests and benchmarks. Row r uses a generator of its
// own, seeded by (config.seed, r): a row does not depend on the others, their number or order.
//   uniform   k distinct experts, every set equally likely
//   balanced  route r·k + j goes to expert (a·(r·k + j) + b) mod E, a coprime to E: any M·k consecutive routes load the
//             experts evenly, up to one route
//   zipf      one after another without replacement, expert e with weight (e + 1)^-a
//   hot       each route goes to one of the experts 0 … n-1 with probability a, else to another one; a token's experts
//             are distinct, so it has at most n hot ones and at most E - n others, whatever a says
//   single    every token to the experts seed, seed + 1, … (mod E)
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>

#include <moekit/kit/router.hpp>

#include "tensor_checks.hpp"
#include "text.hpp"

namespace moekit::inline v0 {
namespace {

using text::concat;

/// splitmix64, seeded with a hash of seed and row.
class RowRandom {
 public:
  RowRandom(std::uint64_t seed, std::int64_t row) : state_(mix(mix(seed) ^ static_cast<std::uint64_t>(row))) {}
  std::uint64_t next() { return mix(state_ += 0x9e3779b97f4a7c15ull); }
  /// [0, n), n ≤ 2^31: the bias of the product's upper half is below n / 2^64.
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>((static_cast<unsigned __int128>(next()) * static_cast<std::uint64_t>(n)) >> 64);
  }
  double unit() { return (static_cast<double>(next() >> 11) + 0.5) * 0x1p-53; }  ///< (0, 1)

 private:
  static std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  std::uint64_t state_;
};

/// `count` distinct values of [first, first + n), every set equally likely (Floyd), in random order.
void draw_distinct(RowRandom& random, std::int64_t first, std::int64_t n, std::int64_t count, std::int32_t* out) {
  constexpr std::int64_t kTracked = 1 << 14;
  std::uint64_t taken[kTracked / 64];
  if (n <= kTracked) std::fill_n(taken, (n + 63) / 64, 0);
  const auto is_taken = [&](std::int64_t value, std::int64_t drawn) {
    if (n <= kTracked) return (taken[value / 64] >> (value % 64) & 1) != 0;
    return std::find(out, out + drawn, static_cast<std::int32_t>(first + value)) != out + drawn;
  };
  for (std::int64_t j = 0; j < count; ++j) {
    const std::int64_t last = n - count + j;
    std::int64_t value = random.below(last + 1);
    if (is_taken(value, j)) value = last;
    if (n <= kTracked) taken[value / 64] |= std::uint64_t{1} << (value % 64);
    out[j] = static_cast<std::int32_t>(first + value);
  }
  for (std::int64_t j = count - 1; j > 0; --j) std::swap(out[j], out[random.below(j + 1)]);
}

/// Successive sampling as an exponential race: expert e arrives at -ln(u) / weight_e; the first k to arrive.
class Zipf {
 public:
  Zipf(double exponent, std::int64_t num_experts) : num_experts_(num_experts) {
    if (num_experts > kInPlace) heap_ = std::make_unique<Entry[]>(static_cast<std::size_t>(num_experts));
    entries_ = heap_ ? heap_.get() : in_place_;
    exponent_ = exponent;
    for (std::int64_t e = 0; e < std::min(num_experts, kInPlace); ++e) mean_[e] = mean(e);
  }
  void draw(RowRandom& random, std::int64_t count, std::int32_t* out) {
    for (std::int64_t e = 0; e < num_experts_; ++e)
      entries_[e] = {-std::log(random.unit()) * (e < kInPlace ? mean_[e] : mean(e)), static_cast<std::int32_t>(e)};
    std::partial_sort(entries_, entries_ + count, entries_ + num_experts_, [](const Entry& a, const Entry& b) {
      return a.time < b.time || (a.time == b.time && a.expert < b.expert);
    });
    for (std::int64_t j = 0; j < count; ++j) out[j] = entries_[j].expert;
  }

 private:
  static constexpr std::int64_t kInPlace = 2048;  // more experts than any router of ours takes: memory from the heap
  struct Entry {
    double time;
    std::int32_t expert;
  };
  double mean(std::int64_t e) const { return std::pow(static_cast<double>(e + 1), exponent_); }

  std::int64_t num_experts_;
  double exponent_ = 0;
  Entry* entries_ = nullptr;
  std::unique_ptr<Entry[]> heap_;
  double mean_[kInPlace];
  Entry in_place_[kInPlace];
};

void draw_hot(const RouterConfig& config, std::int64_t num_experts, RowRandom& random, std::int64_t k,
              std::int32_t* out) {
  const std::int64_t n = config.simulated_n, others = num_experts - n;
  std::int64_t hot = 0;
  for (std::int64_t j = 0; j < k; ++j) hot += random.unit() < config.simulated_a ? 1 : 0;
  hot = std::clamp(hot, std::max<std::int64_t>(0, k - others), std::min(k, n));
  draw_distinct(random, 0, n, hot, out);
  draw_distinct(random, n, others, k - hot, out + hot);
}

/// a and b of the balanced map; a near the golden section of E, moved by the seed, coprime to E.
struct Balanced {
  std::int64_t a, b;
  Balanced(std::uint64_t seed, std::int64_t num_experts) {
    RowRandom random(seed, -1);
    a = 1 + random.below(num_experts), b = random.below(num_experts);
    while (std::gcd(a, num_experts) != 1) a = a % num_experts + 1;
  }
};

Status check_simulated(const RouterConfig& config, std::int64_t num_experts, std::int64_t first_token,
                       const Tensor& ids, const Tensor& weights) {
  if (config.source != RouterSource::simulated)
    return Status(StatusCode::invalid_argument,
                  concat("[router] asked to simulate, but the source is ", to_string(config)), {}, "router.source");
  if (Status s = tensors::check(ids, Device{}, "router", "ids"); !s.ok()) return s;
  if (Status s = tensors::check(weights, Device{}, "router", "weights"); !s.ok()) return s;
  if (ids.rank != 2 || weights.rank != 2 || ids.shape != weights.shape)
    return Status(
        StatusCode::invalid_shape,
        concat("[router] ids and weights must both be [M, k], got ", shape_string(ids), " and ", shape_string(weights)),
        {}, "ids");
  if (ids.dtype != DType::i32 || weights.dtype != DType::f32)
    return Status(
        StatusCode::invalid_dtype,
        concat("[router] ids must be i32 and weights f32, got ", name(ids.dtype), " and ", name(weights.dtype)), {},
        "ids");
  if (ids.shape[1] > 1 && (ids.stride[1] != 1 || weights.stride[1] != 1))
    return Status(
        StatusCode::invalid_shape,
        concat("[router] ids and weights must have column stride 1, got ", ids.stride[1], " and ", weights.stride[1]),
        {}, "ids");
  if (ids.numel() > 0 && (!ids.data || !weights.data))
    return Status(StatusCode::invalid_argument, "[router] ids or weights have no data", {}, "ids");
  if (tensors::overlap(ids, weights))
    return Status(StatusCode::invalid_argument, "[router] weights overlap the ids", "give them memory of their own",
                  "weights");
  if (first_token < 0)
    return Status(StatusCode::invalid_argument, concat("[router] first_token must not be negative, got ", first_token),
                  {}, "first_token");
  return validate(config, num_experts, ids.shape[1]);
}

void fill_row(const RouterConfig& config, std::int64_t num_experts, std::int64_t token, std::int64_t k,
              std::int32_t* out) {
  RowRandom random(config.seed, token);
  switch (config.simulated) {
    case Simulated::uniform: draw_distinct(random, 0, num_experts, k, out); break;
    case Simulated::hot: draw_hot(config, num_experts, random, k, out); break;
    case Simulated::single: {
      const std::int64_t first = static_cast<std::int64_t>(config.seed % static_cast<std::uint64_t>(num_experts));
      for (std::int64_t j = 0; j < k; ++j) out[j] = static_cast<std::int32_t>((first + j) % num_experts);
      break;
    }
    case Simulated::balanced: {
      const Balanced map(config.seed, num_experts);
      const std::int64_t start = token % num_experts * k % num_experts;
      for (std::int64_t j = 0; j < k; ++j)
        out[j] = static_cast<std::int32_t>((map.a * ((start + j) % num_experts) + map.b) % num_experts);
      break;
    }
    case Simulated::zipf: break;  // has tables: see simulate_routing
  }
}

}  // namespace

Status simulate_routing(const RouterConfig& config, std::int64_t num_experts, std::int64_t first_token,
                        const Tensor& ids, const Tensor& weights) {
  if (Status s = check_simulated(config, num_experts, first_token, ids, weights); !s.ok()) return s;
  const std::int64_t k = ids.shape[1];
  const auto row_ids = [&](std::int64_t t) { return ids.as<std::int32_t>() + t * ids.stride[0]; };
  if (config.simulated == Simulated::zipf) {
    Zipf zipf(config.simulated_a, num_experts);
    for (std::int64_t t = 0; t < ids.shape[0]; ++t) {
      RowRandom random(config.seed, first_token + t);
      zipf.draw(random, k, row_ids(t));
    }
  } else {
    for (std::int64_t t = 0; t < ids.shape[0]; ++t) fill_row(config, num_experts, first_token + t, k, row_ids(t));
  }
  for (std::int64_t t = 0; t < ids.shape[0]; ++t)
    std::fill_n(weights.as<float>() + t * weights.stride[0], k, 1.0f / static_cast<float>(k));
  return {};
}

}  // namespace moekit::inline v0
