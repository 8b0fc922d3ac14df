#include "testing/suite_data.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "experts/canonical.hpp"
#include "quant/quantise.hpp"

namespace moekit::suite {
namespace {
using experts::ExpertPart;

constexpr std::size_t kZone = 64;
constexpr std::byte kZoneByte{0xa5};

/// Quantised parts come from f32 values, so that codes and scales belong together.
void quantise_into(const std::vector<float>& values, const Tensor& codes, const Tensor& scale, const QuantDesc& desc) {
  const Tensor matrix(values.data(), DType::f32, {codes.shape[0], codes.shape[1]});
  throw_if_failed(quant::quantise_weights(matrix, desc, codes, scale));
}

}  // namespace

Guarded::Guarded(std::size_t bytes, std::byte fill)
    : memory_(bytes + 2 * kZone + kWorkspaceAlignment, kZoneByte), size_(bytes) {
  const auto start = reinterpret_cast<std::uintptr_t>(memory_.data()) + kZone;
  const std::size_t offset = (kWorkspaceAlignment - start % kWorkspaceAlignment) % kWorkspaceAlignment + kZone;
  data_ = memory_.data() + offset;
  std::fill_n(data_, size_, fill);
}

bool Guarded::intact() const {
  if (data_ == nullptr) return true;
  auto is_zone = [](std::byte b) { return b == kZoneByte; };
  return std::all_of(data_ - kZone, data_, is_zone) && std::all_of(data_ + size_, data_ + size_ + kZone, is_zone);
}

PatternFactors pattern_factors(std::int64_t e) {
  return {e % 2 == 0 ? 1.0f : 0.5f, e % 3 == 0 ? 1.0f : 2.0f, static_cast<float>(1 << (e % 4))};
}

SuiteWeights::SuiteWeights(const WeightsSpec& spec, Fill fill, std::uint64_t seed) : spec_(spec) {
  const std::size_t bytes = experts::canonical_format().bytes(spec);
  Guarded memory(bytes * static_cast<std::size_t>(spec.num_local), std::byte{0});
  Random random(seed);
  for (std::int64_t e = 0; e < spec.num_local; ++e) {
    std::byte* expert = memory.data() + static_cast<std::size_t>(e) * bytes;
    if (fill == Fill::random)
      fill_random(expert, random);
    else
      fill_pattern(expert, e, fill);
  }
  packs_.emplace("canonical", std::move(memory));
}

void SuiteWeights::fill_random(std::byte* data, Random& random) const {
  const CanonicalExpert expert = experts::CanonicalLayout(spec_).view(data);
  const auto parts = experts::expert_parts(spec_);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const ExpertPart& part = parts[p];
    if (!part.wanted || part.role == ExpertPart::Role::scale) continue;
    const Tensor& tensor = expert.*part.member;
    const float size =
        part.role == ExpertPart::Role::bias ? 0.25f : 1.0f / std::sqrt(static_cast<float>(part.shape[1]));
    if (is_float(part.type)) {
      for (std::int64_t i = 0; i < part.numel(); ++i)
        numeric::store_f32(tensor.data, part.type, i, random.centred() * size);
      continue;
    }
    std::vector<float> values(static_cast<std::size_t>(part.numel()));
    for (float& value : values) value = random.centred() * size;
    if (part.shape[0] > 2) std::fill_n(values.begin(), part.shape[1], 0.0f);  // a channel without any weight
    const bool is_down = part.member == &CanonicalExpert::down;
    quantise_into(values, tensor, expert.*parts[p + 3].member, is_down ? spec_.w2 : spec_.w1);
  }
}

void SuiteWeights::fill_pattern(std::byte* data, std::int64_t e, Fill fill) const {
  const CanonicalExpert expert = experts::CanonicalLayout(spec_).view(data);
  const std::int64_t K = spec_.hidden, I = spec_.intermediate;
  const PatternFactors f = pattern_factors(e);
  auto set = [&](const Tensor& matrix, std::int64_t r, std::int64_t c, float value) {
    numeric::store_f32(matrix.data, matrix.dtype, r * matrix.stride[0] + c * matrix.stride[1], value);
  };
  for (std::int64_t i = 0; i < I; ++i)
    for (std::int64_t h = 0; h < K; ++h) {
      if (fill == Fill::flat) {
        set(expert.gate, i, h, f.g / static_cast<float>(K));
        set(expert.up, i, h, f.u / static_cast<float>(K));
        set(expert.down, h, i, f.d / static_cast<float>(I));
      } else {
        if (h == i % K) set(expert.gate, i, h, f.g), set(expert.up, i, h, f.u);
        if (i % K == h % I) set(expert.down, h, i, f.d);
      }
    }
}

WeightsView SuiteWeights::view(const PackFormat& format, std::int64_t num_local) {
  const std::size_t bytes = format.bytes(spec_);
  auto found = packs_.find(format.id());
  if (found == packs_.end()) {
    Guarded memory(bytes * static_cast<std::size_t>(spec_.num_local), std::byte{0xff});
    const WeightsView canonical = view(experts::canonical_format(), spec_.num_local);
    const experts::CanonicalLayout layout(spec_);
    for (std::int64_t e = 0; e < spec_.num_local; ++e)
      throw_if_failed(format.pack_expert(memory.data() + static_cast<std::size_t>(e) * bytes, spec_,
                                         layout.view(canonical.expert(e))));
    found = packs_.emplace(std::string(format.id()), std::move(memory)).first;
  }
  WeightsView out{&format, spec_, found->second.data(), bytes};
  out.spec.num_local = num_local;
  return out;
}

WeightsSpec spec_of(const LayerConfig& config) { return weights_spec(config, config.num_experts); }

void route_randomly(SuiteCase& c, Random& random) {
  const std::int64_t E = c.num_experts();
  std::vector<std::int32_t> experts(static_cast<std::size_t>(E));
  for (std::int64_t e = 0; e < E; ++e) experts[static_cast<std::size_t>(e)] = static_cast<std::int32_t>(e);
  c.ids.assign(static_cast<std::size_t>(c.M * c.k), -1);
  c.route_weights.assign(c.ids.size(), 0.0f);
  for (std::int64_t t = 0; t < c.M; ++t)
    for (std::int64_t j = 0; j < c.k; ++j) {
      std::swap(experts[static_cast<std::size_t>(j)], experts[static_cast<std::size_t>(j + random.below(E - j))]);
      c.set_id(t, j, experts[static_cast<std::size_t>(j)]);
      c.route_weights[static_cast<std::size_t>(t * c.k + j)] =
          (0.5f + static_cast<float>(random.below(1000)) / 1000.0f) / static_cast<float>(c.k);
    }
}

SuiteCase make_case(const LayerConfig& config, std::int64_t num_tokens, std::shared_ptr<SuiteWeights> weights,
                    std::uint64_t seed) {
  SuiteCase c;
  c.check = "values";
  c.shape = shape_string(config) + " M=" + std::to_string(num_tokens);
  c.weights = std::move(weights);
  c.config = config;
  c.num_local = config.num_experts;
  c.M = num_tokens;
  c.k = config.top_k;
  Random random(seed ^ 0x5eedull);
  c.rows.resize(static_cast<std::size_t>(c.M * c.K()));
  for (float& value : c.rows) value = numeric::round_to(config.dtype, random.centred());
  route_randomly(c, random);
  return c;
}

Problem problem_of(const SuiteCase& c, ActivationFormat format, std::int64_t capacity) {
  Problem p;
  p.weights = c.weights->spec();
  p.weights.num_local = c.num_local;
  const bool batched = format == ActivationFormat::batched_experts;
  p.size = {c.num_local, batched ? capacity : c.M, p.weights.w1_rows(), c.K(), c.k};
  p.num_experts = c.num_experts();
  p.format = format;
  if (batched) p.batched = BatchedShape{capacity, 1};
  p.quant = c.config.quant;
  p.activation = c.config.activation;
  p.hidden_dtype = c.config.dtype;
  p.out_dtype = c.out_dtype;
  p.weight_on_input = c.weight_on_input;
  p.expert_map = !c.map.empty();
  return p;
}

}  // namespace moekit::suite
