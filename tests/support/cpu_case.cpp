#include "support/cpu_case.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "experts/canonical.hpp"

namespace moekit::testing {
namespace {

double sigma(double z) { return 1 / (1 + std::exp(-z)); }

double nonlinear(const Activation& a, double z) {
  switch (a.kind) {
    case ActivationKind::silu:
    case ActivationKind::swigluoai: return z * sigma(a.alpha * z);
    case ActivationKind::gelu: return z * 0.5 * std::erfc(-z / std::sqrt(2.0));
    case ActivationKind::gelu_tanh: return 0.5 * z * (1 + std::tanh(std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z)));
    case ActivationKind::relu2: return z > 0 ? z * z : 0;
    case ActivationKind::none: return z;
  }
  return z;
}

double activated(const Activation& a, double gate, double up) {
  const double u = std::max(-static_cast<double>(a.clamp_up), std::min<double>(up, a.clamp_up));
  if (!a.gated) return nonlinear(a, u);
  const double g = std::min<double>(gate, a.clamp_gate);
  return nonlinear(a, g) * (a.kind == ActivationKind::swigluoai ? u + a.beta : u);
}

std::vector<std::byte> codes_of(Random& random, DType type, std::int64_t n) {
  std::vector<std::byte> out(static_cast<std::size_t>(n));
  for (auto& code : out) {
    auto value = static_cast<std::uint8_t>(random.below(256));
    if (type == DType::e4m3 && (value & 0x7f) == 0x7f) value ^= 0x10;  // no NaN
    if (type == DType::i8 && random.below(8) == 0) value = random.below(2) ? 0x80 : 0x7f;
    code = static_cast<std::byte>(value);
  }
  return out;
}

std::vector<float> scales(Random& random, std::int64_t n, float size) {
  std::vector<float> out(static_cast<std::size_t>(n));
  for (float& v : out) v = size * static_cast<float>(0.5 + random.uniform());
  return out;
}

}  // namespace

Case::Case(const CaseSpec& wanted) : s(wanted) {
  Random random(s.seed);
  const std::int64_t E = s.E, K = s.K, I = s.I;
  const bool coded = !is_float(s.weights);
  const Granularity of_weights = s.weights == DType::i8 ? Granularity{1, -1} : Granularity{128, 128};
  const Granularity of_rows = s.weights == DType::i8 ? Granularity{1, -1} : Granularity{1, 128};
  quant.w1 = quant.w2 = {s.weights, coded ? of_weights : Granularity{}};
  quant.a1 = quant.a2 = codes() ? QuantDesc{s.weights, of_rows} : QuantDesc{s.hidden, {}};
  quant.int8_divisor = s.int8_divisor;
  N = s.activation.gated ? 2 * I : I;

  const auto sqrt_k = static_cast<float>(1 / std::sqrt(static_cast<double>(K)));
  const auto sqrt_i = static_cast<float>(1 / std::sqrt(static_cast<double>(I)));
  auto matrix = [&](std::int64_t n, float size) {
    return coded ? codes_of(random, s.weights, n) : normal_values(random, s.weights, n, size);
  };
  gate = matrix(E * I * K, sqrt_k);
  up = matrix(E * I * K, sqrt_k);
  down = matrix(E * K * I, sqrt_i);
  const float code_size = s.weights == DType::i8 ? 1.0f / 70 : 1.0f / 100;
  auto scale_count = [&](std::int64_t r, std::int64_t c) {
    return s.weights == DType::i8 ? E * r : E * ((r + 127) / 128) * ((c + 127) / 128);
  };
  if (coded) {
    gate_scale = scales(random, scale_count(I, K), code_size * sqrt_k);
    up_scale = scales(random, scale_count(I, K), code_size * sqrt_k);
    down_scale = scales(random, scale_count(K, I), code_size * sqrt_i);
  }
  if (s.bias) {
    for (auto* bias : {&gate_bias, &up_bias, &down_bias}) {
      bias->resize(static_cast<std::size_t>(E * (bias == &down_bias ? K : I)));
      for (float& b : *bias) b = random.normal();
    }
  }
  ids.resize(static_cast<std::size_t>(s.M * s.k));
  weights.resize(ids.size());
  for (std::int64_t i = 0; i < s.M * s.k; ++i) {
    ids[static_cast<std::size_t>(i)] =
        random.below(100) < s.minus_one_percent ? -1 : static_cast<std::int32_t>(random.below(E));
    weights[static_cast<std::size_t>(i)] = static_cast<float>(random.uniform());
  }
  counts.assign(static_cast<std::size_t>(E), 0);
  for (std::int32_t id : ids)
    if (id >= 0) ++counts[static_cast<std::size_t>(id)];
  T = s.M * s.k + 1;
  const std::int64_t ld = K + s.row_padding;
  x = codes() ? codes_of(random, s.weights, rows() * ld) : normal_values(random, s.hidden, rows() * ld);
  a_groups = groups(K);
  if (codes()) x_scale = scales(random, rows() * a_groups, code_size);
}

double Case::input(std::int64_t row, std::int64_t c) const {
  const double value = numeric::load_f32(x.data(), codes() ? s.weights : s.hidden, row * (s.K + s.row_padding) + c);
  if (!codes()) return value;
  return value * x_scale[static_cast<std::size_t>(row * a_groups + (s.weights == DType::e4m3 ? c / 128 : 0))];
}

double Case::weight(const std::vector<std::byte>& m, const std::vector<float>& scale, std::int64_t cols, std::int64_t r,
                    std::int64_t c) const {
  const double value = numeric::load_f32(m.data(), s.weights, r * cols + c);
  if (is_float(s.weights)) return value;
  if (s.weights == DType::i8) return value * scale[static_cast<std::size_t>(r)];
  const std::int64_t extent = cols == s.K ? s.I : s.K, per_expert = (extent + 127) / 128, e = r / extent;
  return value * scale[static_cast<std::size_t>((e * per_expert + r % extent / 128) * groups(cols) + c / 128)];
}

void Case::route_output(std::int64_t e, std::int64_t row, std::vector<double>& y, std::vector<double>& size) const {
  const std::int64_t K = s.K, I = s.I;
  std::vector<float> h(static_cast<std::size_t>(I));
  for (std::int64_t i = 0; i < I; ++i) {
    double g = 0, u = 0;
    for (std::int64_t c = 0; c < K; ++c) {
      if (s.activation.gated) g += input(row, c) * weight(gate, gate_scale, K, e * I + i, c);
      u += input(row, c) * weight(up, up_scale, K, e * I + i, c);
    }
    if (s.bias) g += gate_bias[static_cast<std::size_t>(e * I + i)], u += up_bias[static_cast<std::size_t>(e * I + i)];
    h[static_cast<std::size_t>(i)] = static_cast<float>(activated(s.activation, g, u));
  }
  if (codes()) {
    std::vector<std::byte> code(static_cast<std::size_t>(I));
    std::vector<float> scale(static_cast<std::size_t>(groups(I)));
    const std::int64_t group = s.weights == DType::e4m3 ? 128 : -1;
    quant::quantise_row({h.data(), DType::f32, I}, {s.weights, group, s.int8_divisor}, code.data(), scale.data());
    for (std::int64_t i = 0; i < I; ++i)
      h[static_cast<std::size_t>(i)] =
          numeric::load_f32(code.data(), s.weights, i) * scale[static_cast<std::size_t>(group < 0 ? 0 : i / 128)];
  } else {
    for (float& v : h) v = numeric::round_to(s.hidden, v);
  }
  y.assign(static_cast<std::size_t>(K), 0);
  size = y;
  for (std::int64_t c = 0; c < K; ++c) {
    for (std::int64_t i = 0; i < I; ++i) {
      const double term = h[static_cast<std::size_t>(i)] * weight(down, down_scale, I, e * K + c, i);
      y[static_cast<std::size_t>(c)] += term;
      size[static_cast<std::size_t>(c)] += std::abs(term);
    }
    if (s.bias) y[static_cast<std::size_t>(c)] += down_bias[static_cast<std::size_t>(e * K + c)];
  }
}

std::vector<double> Case::reference() const {
  auto& bound = const_cast<std::vector<double>&>(magnitude);
  const auto K = static_cast<std::size_t>(s.K);
  std::vector<double> out(static_cast<std::size_t>(rows()) * K, 0), y, size;
  bound.assign(out.size(), 0);
  if (s.batched) {
    for (std::int64_t e = 0; e < s.E; ++e)
      for (std::int64_t r = 0; r < counts[static_cast<std::size_t>(e)]; ++r) {
        route_output(e, e * T + r, y, size);
        std::copy(y.begin(), y.end(),
                  out.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(e * T + r) * K));
        std::copy(size.begin(), size.end(),
                  bound.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(e * T + r) * K));
      }
    return out;
  }
  for (std::int64_t t = 0; t < s.M; ++t)
    for (std::int64_t j = 0; j < s.k; ++j) {
      const auto slot = static_cast<std::size_t>(t * s.k + j);
      if (ids[slot] < 0) continue;
      route_output(ids[slot], t, y, size);
      const double w = s.weight_on_input ? 1.0 : weights[slot];
      for (std::size_t c = 0; c < K; ++c) {
        out[static_cast<std::size_t>(t) * K + c] += w * y[c];
        bound[static_cast<std::size_t>(t) * K + c] += std::abs(w) * size[c];
      }
    }
  return out;
}

CanonicalExpert Case::expert(std::int64_t e) const {
  const std::int64_t K = s.K, I = s.I, bytes = moekit::bytes(s.weights);
  CanonicalExpert out;
  if (s.activation.gated) out.gate = Tensor(gate.data() + e * I * K * bytes, s.weights, {I, K});
  out.up = Tensor(up.data() + e * I * K * bytes, s.weights, {I, K});
  out.down = Tensor(down.data() + e * I * K * bytes, s.weights, {K, I});
  auto scale = [&](const std::vector<float>& all, std::int64_t rows, std::int64_t cols) {
    const std::int64_t r = s.weights == DType::i8 ? rows : (rows + 127) / 128;
    return Tensor(all.data() + e * r * groups(cols), DType::f32, {r, groups(cols)});
  };
  if (!is_float(s.weights)) {
    if (s.activation.gated) out.gate_scale = scale(gate_scale, I, K);
    out.up_scale = scale(up_scale, I, K);
    out.down_scale = scale(down_scale, K, I);
  }
  if (s.bias) {
    if (s.activation.gated) out.gate_bias = Tensor(gate_bias.data() + e * I, DType::f32, {I});
    out.up_bias = Tensor(up_bias.data() + e * I, DType::f32, {I});
    out.down_bias = Tensor(down_bias.data() + e * K, DType::f32, {K});
  }
  return out;
}

Problem Case::problem(int threads) const {
  Problem p;
  p.size = {s.E, s.batched ? T : s.M, N, s.K, s.k};
  p.num_experts = s.E;
  if (s.batched) {
    p.format = ActivationFormat::batched_experts;
    p.batched = BatchedShape{T, 1};
  }
  p.weights = {s.E, s.K, s.I, s.activation.gated, quant.w1, quant.w2, s.bias, s.bias};
  p.quant = quant;
  p.activation = s.activation;
  p.hidden_dtype = s.hidden;
  p.out_dtype = s.output;
  p.weight_on_input = s.weight_on_input;
  p.threads = threads;
  return p;
}

WeightsView Case::packed(const PackFormat& format, std::vector<std::byte>& storage) const {
  const Problem p = problem(1);
  const std::size_t bytes = format.bytes(p.weights);
  storage.resize(bytes * static_cast<std::size_t>(s.E) + 64);
  auto* begin = storage.data() + (64 - reinterpret_cast<std::uintptr_t>(storage.data()) % 64) % 64;
  for (std::int64_t e = 0; e < s.E; ++e) {
    const Status packed = format.pack_expert(begin + static_cast<std::size_t>(e) * bytes, p.weights, expert(e));
    EXPECT_TRUE(packed.ok()) << packed.to_string();
  }
  return {&format, p.weights, begin, bytes};
}

namespace {

/// `size` bytes, 256-aligned, 0xFF, with a guard on both sides.
class Guarded {
 public:
  explicit Guarded(std::size_t size) : size_(size), memory_(size + 2 * kGuard + 256, std::byte{0xff}) {
    begin_ = memory_.data() + kGuard;
    begin_ += (256 - reinterpret_cast<std::uintptr_t>(begin_) % 256) % 256;
    for (std::size_t i = 0; i < kGuard; ++i)
      begin_[size_ + i] = begin_[-1 - static_cast<std::ptrdiff_t>(i)] = std::byte{0xa5};
  }
  Bytes bytes() { return {begin_, size_}; }
  bool intact() const {
    for (std::size_t i = 0; i < kGuard; ++i)
      if (begin_[size_ + i] != std::byte{0xa5} || begin_[-1 - static_cast<std::ptrdiff_t>(i)] != std::byte{0xa5})
        return false;
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 512;
  std::size_t size_;
  std::vector<std::byte> memory_;
  std::byte* begin_;
};

}  // namespace

std::vector<float> Case::run(const Experts& experts, Executor& executor) const {
  const Problem p = problem(executor.concurrency());
  const Verdict verdict = experts.supports(p);
  EXPECT_TRUE(verdict.ok()) << verdict.reason();
  const ExpertsWorkspace need = experts.workspace(p);
  Guarded w13(need.w13_bytes), w2(need.w2_bytes);
  const std::int64_t ld = s.K + s.row_padding;
  Guarded out(static_cast<std::size_t>(rows() * ld * moekit::bytes(s.output)));
  std::vector<std::byte> storage;
  const QuantConfig config(quant, {});
  ExpertTokens tokens;
  tokens.counts = Tensor(counts.data(), DType::i32, {s.E});
  auto shaped = [&](const void* data, DType type, std::int64_t stride, std::int64_t cols) {
    return s.batched ? Tensor::strided(data, type, {s.E, T, cols}, {T * stride, stride, 1})
                     : Tensor::strided(data, type, {s.M, cols}, {stride, 1});
  };
  ExpertsArgs args;
  args.output = shaped(out.bytes().data, s.output, ld, s.K);
  args.activations.data = shaped(x.data(), codes() ? s.weights : s.hidden, ld, s.K);
  if (codes()) {
    args.activations.scale = shaped(x_scale.data(), DType::f32, a_groups, a_groups);
    args.activations.granularity = quant.a1.granularity;
  }
  args.weights = packed(experts.preferred_format(p.weights), storage);
  args.routing = {Tensor(ids.data(), DType::i32, {s.M, s.k}), Tensor(weights.data(), DType::f32, {s.M, s.k})};
  args.activation = s.activation;
  args.num_experts = s.E;
  args.quant = &config;
  args.workspace13 = w13.bytes();
  args.workspace2 = w2.bytes();
  args.tokens = s.batched ? &tokens : nullptr;
  args.weight_on_input = s.weight_on_input;
  args.context.stream.executor = &executor;
  ExpertsResult result;
  const Status status = experts.apply(args, result);
  EXPECT_TRUE(status.ok()) << status.to_string() << " for " << to_string(s);
  EXPECT_TRUE(w13.intact() && w2.intact() && out.intact()) << "memory beyond a buffer was written: " << to_string(s);
  std::vector<float> values;
  for (std::int64_t r = 0; r < rows(); ++r) {
    for (std::int64_t c = 0; c < s.K; ++c) values.push_back(numeric::load_f32(out.bytes().data, s.output, r * ld + c));
    const auto* padding = out.bytes().data + (r * ld + s.K) * moekit::bytes(s.output);
    for (std::int64_t i = 0; i < s.row_padding * moekit::bytes(s.output); ++i)
      EXPECT_EQ(padding[i], std::byte{0xff}) << "padding of row " << r << " was written";
  }
  return values;
}

}  // namespace moekit::testing
