#include "experts/cpu/pack.hpp"

#include <cmath>
#include <cstring>
#include <limits>

#include "experts/canonical.hpp"
#include "experts/cpu/unit.hpp"
#include "quant/numeric.hpp"

namespace moekit::cpu {
namespace {

constexpr std::int64_t kColumns = kPanelColumns;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

PanelLayout panel_layout(std::int64_t panels, std::int64_t k, const QuantDesc& desc, bool bias) {
  PanelLayout out;
  out.panels = panels;
  out.k = k;
  out.element = moekit::bytes(desc.type);
  out.kp = desc.type == DType::bf16 ? 2 : desc.type == DType::i8 ? 4 : 1;
  const std::int64_t unit = desc.type == DType::e4m3 ? 4 : out.kp;
  out.k_padded = ceil_div(k, unit) * unit;
  out.groups = desc.type == DType::e4m3 ? ceil_div(k, kScaleGroup) : 0;
  out.has_scale = !is_float(desc.type);
  out.has_sum = desc.type == DType::i8;
  out.has_poison = desc.type == DType::e4m3;
  out.has_bias = bias;
  return out;
}

/// Where the columns of a panel come from: column c of panel p is row `row` of matrix `of`; none = padding.
struct Column {
  int of = -1;  // 0 gate, 1 up, 2 down
  std::int64_t row = 0;
};
struct ColumnMap {
  bool w1, gated;
  std::int64_t rows;  // I, or K for w2
  Column at(std::int64_t panel, std::int64_t c) const {
    const bool halves = w1 && gated;
    const std::int64_t row = halves ? panel * kHalfPanel + c % kHalfPanel : panel * kColumns + c;
    if (row >= rows) return {};
    return {!w1 ? 2 : halves && c < kHalfPanel ? 0 : 1, row};
  }
};

struct Parts {
  const Tensor* matrix[3];
  const Tensor* scale[3];
  const Tensor* bias[3];
};
Parts parts_of(const CanonicalExpert& e) {
  return {
      {&e.gate, &e.up, &e.down}, {&e.gate_scale, &e.up_scale, &e.down_scale}, {&e.gate_bias, &e.up_bias, &e.down_bias}};
}

std::size_t element_at(const PanelLayout& l, std::int64_t panel, std::int64_t k, std::int64_t c) {
  return static_cast<std::size_t>((panel * l.k_padded + k / l.kp * l.kp) * kColumns + c * l.kp + k % l.kp);
}

template <class T>
void pack_column(T* dst, const PanelLayout& l, std::int64_t panel, std::int64_t c, const T* src, std::int64_t stride) {
  T* out = dst + element_at(l, panel, 0, c);
  const std::int64_t kp = l.kp, step = kColumns * kp;
  for (std::int64_t k = 0; k < l.k; k += kp, out += step)
    for (std::int64_t p = 0; p < kp && k + p < l.k; ++p) out[p] = src[(k + p) * stride];
}
template <class T>
void unpack_column(const T* src, const PanelLayout& l, std::int64_t panel, std::int64_t c, T* dst,
                   std::int64_t stride) {
  const T* in = src + element_at(l, panel, 0, c);
  for (std::int64_t k = 0; k < l.k; ++k) dst[k * stride] = in[k / l.kp * l.kp * kColumns + k % l.kp];
}

template <class Run>
void with_element(std::int64_t bytes, const Run& run) {
  if (bytes == 1)
    run(std::uint8_t{});
  else if (bytes == 2)
    run(std::uint16_t{});
  else
    run(std::uint32_t{});
}

class Packer {
 public:
  Packer(const PanelLayout& layout, const ColumnMap& map, const QuantDesc& desc, const Parts& parts)
      : l_(layout), map_(map), desc_(desc), parts_(parts) {}

  void pack(std::byte* dst) const {
    each_column([&](std::int64_t panel, std::int64_t c, const Column& column) {
      pack_weights(dst, panel, c, *parts_.matrix[column.of], column.row);
      if (l_.has_sum) section<std::int32_t>(dst, l_.sum)[panel * kColumns + c] = sum_of(dst, panel, c);
      if (l_.has_poison) section<float>(dst, l_.poison)[panel * kColumns + c] = poison_of(dst, panel, c);
      each_scale(panel, c, column, [&](std::size_t at, const Tensor& scale, std::int64_t row, std::int64_t col) {
        section<float>(dst, l_.scale)[at] =
            numeric::load_f32(scale.data, scale.dtype, row * scale.stride[0] + col * scale.stride[1]);
      });
      if (l_.has_bias) {
        const Tensor& bias = *parts_.bias[column.of];
        section<float>(dst, l_.bias)[panel * kColumns + c] =
            numeric::load_f32(bias.data, bias.dtype, column.row * bias.stride[0]);
      }
    });
  }

  void unpack(const std::byte* src) const {
    each_column([&](std::int64_t panel, std::int64_t c, const Column& column) {
      if (const Tensor& m = *parts_.matrix[column.of]; m.present()) unpack_weights(src, panel, c, m, column.row);
      each_scale(panel, c, column, [&](std::size_t at, const Tensor& scale, std::int64_t row, std::int64_t col) {
        numeric::store_f32(scale.data, scale.dtype, row * scale.stride[0] + col * scale.stride[1],
                           section<const float>(src, l_.scale)[at]);
      });
      const Tensor& bias = *parts_.bias[column.of];
      if (l_.has_bias && bias.present())
        numeric::store_f32(bias.data, bias.dtype, column.row * bias.stride[0],
                           section<const float>(src, l_.bias)[panel * kColumns + c]);
    });
  }

 private:
  template <class T, class Byte>
  static T* section(Byte* base, std::size_t offset) {
    return reinterpret_cast<T*>(base + offset);
  }
  template <class Run>
  void each_column(const Run& run) const {
    for (std::int64_t panel = 0; panel < l_.panels; ++panel)
      for (std::int64_t c = 0; c < kColumns; ++c)
        if (const Column column = map_.at(panel, c); column.of >= 0) run(panel, c, column);
  }
  template <class Run>
  void each_scale(std::int64_t panel, std::int64_t c, const Column& column, const Run& run) const {
    const Tensor& scale = *parts_.scale[column.of];
    if (!l_.has_scale || !scale.present()) return;
    if (l_.groups == 0) return run(static_cast<std::size_t>(panel * kColumns + c), scale, column.row, 0);
    if (c % kHalfPanel != 0) return;  // 16 columns lie in one block of 128 rows
    for (std::int64_t g = 0; g < l_.groups; ++g)
      run(static_cast<std::size_t>((panel * l_.groups + g) * 2 + c / kHalfPanel), scale, column.row / kScaleGroup, g);
  }

  void pack_weights(std::byte* dst, std::int64_t panel, std::int64_t c, const Tensor& m, std::int64_t row) const {
    if (m.dtype == desc_.type) {
      with_element(l_.element, [&](auto zero) {
        using T = decltype(zero);
        pack_column(section<T>(dst, l_.weights), l_, panel, c, m.as<T>() + row * m.stride[0], m.stride[1]);
      });
      return;
    }
    for (std::int64_t k = 0; k < l_.k; ++k)
      numeric::store_f32(dst + l_.weights, desc_.type, static_cast<std::int64_t>(element_at(l_, panel, k, c)),
                         numeric::load_f32(m.data, m.dtype, row * m.stride[0] + k * m.stride[1]));
  }
  void unpack_weights(const std::byte* src, std::int64_t panel, std::int64_t c, const Tensor& m,
                      std::int64_t row) const {
    if (m.dtype == desc_.type) {
      with_element(l_.element, [&](auto zero) {
        using T = decltype(zero);
        unpack_column(section<const T>(src, l_.weights), l_, panel, c, m.as<T>() + row * m.stride[0], m.stride[1]);
      });
      return;
    }
    for (std::int64_t k = 0; k < l_.k; ++k)
      numeric::store_f32(
          m.data, m.dtype, row * m.stride[0] + k * m.stride[1],
          numeric::load_f32(src + l_.weights, desc_.type, static_cast<std::int64_t>(element_at(l_, panel, k, c))));
  }
  std::int32_t sum_of(const std::byte* dst, std::int64_t panel, std::int64_t c) const {
    std::int32_t sum = 0;
    for (std::int64_t k = 0; k < l_.k; ++k)
      sum += section<const std::int8_t>(dst, l_.weights)[element_at(l_, panel, k, c)];
    return sum;
  }
  float poison_of(const std::byte* dst, std::int64_t panel, std::int64_t c) const {
    for (std::int64_t k = 0; k < l_.k; ++k)
      if ((section<const std::uint8_t>(dst, l_.weights)[element_at(l_, panel, k, c)] & 0x7f) == 0x7f)
        return std::numeric_limits<float>::quiet_NaN();
    return 0.0f;
  }

  const PanelLayout& l_;
  const ColumnMap map_;
  const QuantDesc& desc_;
  const Parts parts_;
};

class Cpu32Format final : public PackFormat {
 public:
  std::string_view id() const override { return "cpu32"; }
  int version() const override { return 1; }
  Verdict supports(const WeightsSpec& spec) const override { return experts::check_spec(spec); }
  std::size_t bytes(const WeightsSpec& spec) const override { return expert_layout(spec).bytes; }

  Status pack_expert(std::byte* dst, const WeightsSpec& spec, const CanonicalExpert& expert) const override {
    if (Status s = experts::check_expert(spec, expert); !s.ok()) return s;
    const ExpertLayout layout = expert_layout(spec);
    std::memset(dst, 0, layout.bytes);
    const Parts parts = parts_of(expert);
    Packer(layout.w1, {true, spec.gated, spec.intermediate}, spec.w1, parts).pack(dst);
    Packer(layout.w2, {false, spec.gated, spec.hidden}, spec.w2, parts).pack(dst);
    return {};
  }
  Status unpack_expert(const std::byte* src, const WeightsSpec& spec, const CanonicalExpert& expert) const override {
    if (Status s = experts::check_destination(spec, expert); !s.ok()) return s;
    const ExpertLayout layout = expert_layout(spec);
    const Parts parts = parts_of(expert);
    Packer(layout.w1, {true, spec.gated, spec.intermediate}, spec.w1, parts).unpack(src);
    Packer(layout.w2, {false, spec.gated, spec.hidden}, spec.w2, parts).unpack(src);
    return {};
  }
};

}  // namespace

ExpertLayout expert_layout(const WeightsSpec& spec) {
  ExpertLayout out;
  const std::int64_t columns1 = spec.gated ? kHalfPanel : kColumns;
  out.w1 = panel_layout(ceil_div(spec.intermediate, columns1), spec.hidden, spec.w1, spec.w1_bias);
  out.w2 = panel_layout(ceil_div(spec.hidden, kColumns), spec.intermediate, spec.w2, spec.w2_bias);
  std::size_t at = 0;
  auto take = [&](std::int64_t bytes) {
    const std::size_t begin = at;
    at += (static_cast<std::size_t>(bytes) + 63) / 64 * 64;
    return begin;
  };
  PanelLayout* const both[] = {&out.w1, &out.w2};
  for (PanelLayout* l : both) l->weights = take(l->panels * l->panel_bytes());
  for (PanelLayout* l : both) l->scale = take(l->has_scale ? l->panels * l->scales_per_panel() * 4 : 0);
  for (PanelLayout* l : both) l->sum = take(l->has_sum ? l->panels * kColumns * 4 : 0);
  for (PanelLayout* l : both) l->poison = take(l->has_poison ? l->panels * kColumns * 4 : 0);
  for (PanelLayout* l : both) l->bias = take(l->has_bias ? l->panels * kColumns * 4 : 0);
  out.bytes = at;
  return out;
}

const PackFormat& cpu32_format() {
  static const Cpu32Format format;
  return format;
}

}  // namespace moekit::cpu
