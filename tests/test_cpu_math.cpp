// Vector functions against f64 over the whole range of f32, and the ceilings.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/ceilings.hpp"
#include "cpu/isa.hpp"
#include "quant/numeric.hpp"
#include "support/cpu_math.hpp"

namespace moekit {
namespace {

using testing::MathFunctions;

struct Table {
  const char* name;
  const MathFunctions* functions;
  bool fused;
};
std::vector<Table> tables() {
  std::vector<Table> out{{"portable", &testing::kPortableMath, false}};
#if defined(__x86_64__)
  if (cpu::can_run(cpu::Isa::avx2).ok()) out.push_back({"avx2", &testing::kAvx2Math, true});
#endif
  return out;
}

/// Every 2053rd bit pattern (a prime: all exponents, all kinds of mantissas, both signs), and the special ones.
const std::vector<float>& inputs() {
  static const std::vector<float> all = [] {
    std::vector<float> x;
    for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += 2053)
      x.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
    for (float v : {0.0f, -0.0f, 1.0f, -1.0f, 88.7f, 88.8f, -87.4f, -103.9f, -104.1f, 0.625f, 0.85f, -13.0f, 13.2f})
      x.push_back(v);
    for (float v : {INFINITY, -INFINITY, std::numeric_limits<float>::quiet_NaN()}) x.push_back(v);
    for (int i = -20000; i <= 20000; ++i) x.push_back(static_cast<float>(i) * 1e-3f);  // where it matters
    while (x.size() % 16 != 0) x.push_back(0.0f);
    return x;
  }();
  return all;
}

double ulp(double value) {
  const double magnitude = std::max(std::abs(value), 0x1p-126);
  return std::ldexp(1.0, std::max(std::ilogb(magnitude), -126) - 23);
}

/// Largest error in ulps of the result; NaN exactly where the reference has it, infinities alike.
template <class Reference>
double worst_ulps(void (*function)(const float*, float*, std::int64_t), const Reference& reference, const char* name) {
  const std::vector<float>& x = inputs();
  std::vector<float> y(x.size());
  function(x.data(), y.data(), static_cast<std::int64_t>(x.size()));
  double worst = 0;
  float at = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double want = reference(static_cast<double>(x[i]));
    EXPECT_EQ(std::isnan(want), std::isnan(y[i])) << name << "(" << x[i] << ")";
    if (std::isnan(want)) continue;
    if (std::abs(want) > 3.4028235e38) {
      EXPECT_GE(std::abs(y[i]), 3.4028234e38f) << name << "(" << x[i] << ")";
      continue;
    }
    const double off = std::abs(y[i] - want) / ulp(want);
    if (!(off <= worst)) worst = off, at = x[i];
  }
  ::testing::Test::RecordProperty(name, std::to_string(worst));
  std::printf("  %s: %.2f ulp at %a\n", name, worst, static_cast<double>(at));
  return worst;
}

double phi(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

TEST(CpuMath, errors_are_as_documented) {
  for (const Table& t : tables()) {
    SCOPED_TRACE(t.name);
    std::printf("%s\n", t.name);
    EXPECT_LE(worst_ulps(
                  t.functions->exp, [](double x) { return std::exp(x); }, "exp"),
              1.0);
    EXPECT_LE(worst_ulps(
                  t.functions->sigmoid, [](double x) { return 1 / (1 + std::exp(-x)); }, "sigmoid"),
              2.1);
    EXPECT_LE(worst_ulps(
                  t.functions->tanh, [](double x) { return std::tanh(x); }, "tanh"),
              3.0);
    EXPECT_LE(worst_ulps(
                  t.functions->erf, [](double x) { return std::erf(x); }, "erf"),
              3.0);
    EXPECT_LE(worst_ulps(t.functions->normal_cdf, phi, "Phi"), t.fused ? 5.9 : 70.0);
  }
}

TEST(CpuMath, conversions_agree_with_the_scalar_ones) {
  const std::vector<float>& x = inputs();
  std::vector<float> y(x.size());
  for (const Table& t : tables()) {
    t.functions->to_bf16(x.data(), y.data(), static_cast<std::int64_t>(x.size()));
    for (std::size_t i = 0; i < x.size(); ++i)
      ASSERT_EQ(std::bit_cast<std::uint32_t>(y[i]),
                std::bit_cast<std::uint32_t>(numeric::bf16_to_f32(numeric::f32_to_bf16(x[i]))))
          << t.name << " " << x[i];
    t.functions->to_f16(x.data(), y.data(), static_cast<std::int64_t>(x.size()));
    for (std::size_t i = 0; i < x.size(); ++i) {
      const float want = numeric::f16_to_f32(numeric::f32_to_f16(x[i]));
      ASSERT_TRUE(std::bit_cast<std::uint32_t>(y[i]) == std::bit_cast<std::uint32_t>(want) ||
                  (std::isnan(y[i]) && std::isnan(want)))
          << t.name << " " << x[i];
    }
  }
}

TEST(CpuCeilings, are_measured_once_and_have_sensible_order) {
  const cpu::Isa best = cpu::usable_isa();
  const Ceilings c = cpu::ceilings(best, 2);
  EXPECT_GT(c.read_gbps, 0.1);
  EXPECT_GT(c.f32_gflops, 0.1);
  EXPECT_GT(c.int8_gops, 0.1);
  EXPECT_EQ(c.threads, 2);
  EXPECT_EQ(c.bf16_dot_gflops > 0, best == cpu::Isa::avx512_bf16);
  const Ceilings again = cpu::ceilings(best, 2);
  EXPECT_EQ(again.f32_gflops, c.f32_gflops);
  EXPECT_EQ(cpu::known_ceilings(best, 2).read_gbps, c.read_gbps);
  EXPECT_EQ(cpu::known_ceilings(best, 999).read_gbps, 0);
}

}  // namespace
}  // namespace moekit
