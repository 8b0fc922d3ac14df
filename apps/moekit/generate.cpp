#include "generate.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "quant/numeric.hpp"
#include "seeded_random.hpp"

namespace moekit::cli {
using seeded::Random;

namespace {

constexpr std::int64_t kPool = 1 << 18;

std::uint64_t mix(std::uint64_t a, std::uint64_t b) { return Random(a * 0x9e3779b97f4a7c15ull ^ b).next(); }

/// A pool of normals in a storage type, and matrices whose rows are windows into it.
class Pool {
 public:
  Pool(DType type, std::int64_t longest_row, float scale, std::uint64_t seed)
      : type_(type), size_(kPool + longest_row), bytes_(static_cast<std::size_t>(size_ * moekit::bytes(type))) {
    Random random(seed);
    for (std::int64_t i = 0; i < size_; ++i) store(i, random.normal() * scale);
  }

  void fill(std::byte* dst, std::int64_t rows, std::int64_t columns, std::uint64_t key) const {
    const std::int64_t row_bytes = columns * moekit::bytes(type_);
    for (std::int64_t r = 0; r < rows; ++r) {
      const auto start = static_cast<std::int64_t>(mix(key, static_cast<std::uint64_t>(r)) % kPool);
      std::memcpy(dst + r * row_bytes, bytes_.data() + start * moekit::bytes(type_),
                  static_cast<std::size_t>(row_bytes));
    }
  }
  DType type() const { return type_; }

 private:
  void store(std::int64_t i, float value) {
    if (type_ == DType::i8)
      reinterpret_cast<std::int8_t*>(bytes_.data())[i] =
          static_cast<std::int8_t>(std::clamp(std::lround(value), -127l, 127l));
    else
      numeric::store_f32(bytes_.data(), type_, i, value);
  }
  DType type_;
  std::int64_t size_;
  std::vector<std::byte> bytes_;
};

/// Codes of quantised types spread over this many steps per standard deviation; the scales take it back.
float code_scale(DType type) {
  if (type == DType::i8) return 32.0f;
  return is_float(type) ? 1.0f : 64.0f;
}

/// One matrix [rows, columns] of a scheme, with scales.
struct MatrixKind {
  QuantDesc desc;
  std::int64_t rows, columns;
  std::int64_t scale_rows() const {
    return desc.granularity.rows < 0 ? 1 : (rows + desc.granularity.rows - 1) / desc.granularity.rows;
  }
  std::int64_t scale_columns() const {
    return desc.granularity.cols < 0 ? 1 : (columns + desc.granularity.cols - 1) / desc.granularity.cols;
  }
};

/// Memory of the expert that a thread looks at.
struct Scratch {
  Buffer matrix[3], scale[3], bias[3];
};

class Generator {
 public:
  Generator(const LayerConfig& config, std::uint64_t seed)
      : config_(config),
        seed_(seed),
        longest_(std::max({config.hidden, config.intermediate, config.shared.intermediate})),
        wide_(make_pool(config.quant.w1.type, config.hidden)),
        narrow_(make_pool(config.quant.w2.type, config.intermediate)) {}

  Status expert(std::int64_t e, CanonicalExpert& out) const {
    thread_local Scratch scratch;
    const std::int64_t I = config_.intermediate, K = config_.hidden;
    out = {};
    if (config_.activation.gated) matrix(scratch, 0, e, {config_.quant.w1, I, K}, out.gate, out.gate_scale);
    matrix(scratch, 1, e, {config_.quant.w1, I, K}, out.up, out.up_scale);
    matrix(scratch, 2, e, {config_.quant.w2, K, I}, out.down, out.down_scale);
    if (config_.w1_bias && config_.activation.gated) out.gate_bias = bias(scratch, 0, e, I);
    if (config_.w1_bias) out.up_bias = bias(scratch, 1, e, I);
    if (config_.w2_bias) out.down_bias = bias(scratch, 2, e, K);
    return {};
  }

 private:
  Pool make_pool(DType type, std::int64_t fan_in) const {
    const float scale = is_float(type) ? 1.0f / std::sqrt(static_cast<float>(fan_in)) : code_scale(type);
    return Pool(type, longest_, scale, seed_);
  }

  void matrix(Scratch& scratch, int which, std::int64_t e, const MatrixKind& kind, Tensor& data, Tensor& scale) const {
    const Pool& pool = which == 2 ? narrow_ : wide_;
    const std::uint64_t key = mix(seed_ * 4 + static_cast<std::uint64_t>(which), static_cast<std::uint64_t>(e));
    Buffer& values = scratch.matrix[which];
    if (values.tensor.dtype != pool.type() || values.tensor.shape[0] != kind.rows ||
        values.tensor.shape[1] != kind.columns)
      values = Buffer(pool.type(), {kind.rows, kind.columns});
    pool.fill(values.bytes.data(), kind.rows, kind.columns, key);
    data = values.tensor;
    if (is_float(kind.desc.type)) return;
    Buffer& scales = scratch.scale[which] = Buffer(DType::f32, {kind.scale_rows(), kind.scale_columns()});
    Random random(key);
    const float unit = 1.0f / (code_scale(kind.desc.type) * std::sqrt(static_cast<float>(kind.columns)));
    for (std::int64_t i = 0; i < scales.tensor.numel(); ++i)
      scales.tensor.as<float>()[i] = unit * (1.0f + 0.25f * static_cast<float>(random.uniform()));
    scale = scales.tensor;
  }

  Tensor bias(Scratch& scratch, int which, std::int64_t e, std::int64_t n) const {
    Buffer& values = scratch.bias[which] = Buffer(DType::f32, {n});
    Random random(mix(seed_ * 4 + 3 + static_cast<std::uint64_t>(which), static_cast<std::uint64_t>(e)));
    for (std::int64_t i = 0; i < n; ++i) values.tensor.as<float>()[i] = 0.3f * random.normal();
    return values.tensor;
  }

  LayerConfig config_;
  std::uint64_t seed_;
  std::int64_t longest_;
  Pool wide_, narrow_;
};

}  // namespace

Buffer::Buffer(DType type, std::initializer_list<std::int64_t> shape) {
  std::int64_t n = 1;
  for (const std::int64_t extent : shape) n *= extent;
  bytes.assign(static_cast<std::size_t>(n * moekit::bytes(type)), std::byte{0xff});
  tensor = Tensor(bytes.data(), type, shape);
}

Buffer converted(const Tensor& from, DType type) {
  Buffer out(type, {from.shape[0], from.shape[1]});
  for (std::int64_t r = 0; r < from.shape[0]; ++r)
    for (std::int64_t c = 0; c < from.shape[1]; ++c)
      numeric::store_f32(out.bytes.data(), type, r * from.shape[1] + c,
                         numeric::load_f32(from.data, from.dtype, r * from.stride[0] + c * from.stride[1]));
  return out;
}

Buffer generated_rows(std::int64_t rows, std::int64_t columns, DType type, std::uint64_t seed) {
  Buffer out(type, {rows, columns});
  for (std::int64_t r = 0; r < rows; ++r) {
    Random random(mix(seed, static_cast<std::uint64_t>(r)));
    for (std::int64_t c = 0; c < columns; ++c)
      numeric::store_f32(out.bytes.data(), type, r * columns + c, random.normal());
  }
  return out;
}

WeightsSource generated_weights(const LayerConfig& config, std::uint64_t seed) {
  WeightsSource source;
  auto generator = std::make_shared<const Generator>(config, seed);
  source.expert = [generator](std::int64_t e, CanonicalExpert& out) { return generator->expert(e, out); };
  return source;
}

Buffer logits_for(const Tensor& ids, std::int64_t num_experts, std::uint64_t seed) {
  const std::int64_t M = ids.shape[0], k = ids.shape[1];
  Buffer out(DType::f32, {M, num_experts});
  for (std::int64_t t = 0; t < M; ++t) {
    Random random(mix(seed, static_cast<std::uint64_t>(t)));
    float* row = out.tensor.as<float>() + t * num_experts;
    for (std::int64_t e = 0; e < num_experts; ++e) row[e] = -4.0f + 0.5f * static_cast<float>(random.uniform());
    for (std::int64_t j = 0; j < k; ++j) {
      const std::int32_t e = ids.at<std::int32_t>(t, j);
      // distinct and descending whatever k is: the j-th lies within (2 - 3j/k, 2 - 3j/k + 3/k · 0.5)
      if (e >= 0 && e < num_experts)
        row[e] =
            2.0f - 3.0f * (static_cast<float>(j) - 0.5f * static_cast<float>(random.uniform())) / static_cast<float>(k);
    }
  }
  return out;
}

}  // namespace moekit::cli
