#include "quant/quantise.hpp"

#include "text.hpp"

namespace moekit::quant {
namespace {

// load(i) → f32; the type is resolved outside the loops.
template <class Load>
void quantise_loaded(const Load& load, std::int64_t n, const RowScheme& scheme, void* codes, float* scales) {
  const bool to_int8 = scheme.type == DType::i8;
  const float divisor = to_int8 ? scheme.int8_divisor : kE4m3Largest;
  const std::int64_t group = scheme.group < 0 ? std::max<std::int64_t>(n, 1) : scheme.group;
  for (std::int64_t begin = 0, g = 0; begin < n; begin += group, ++g) {
    const std::int64_t end = std::min(n, begin + group);
    UnitScale unit{scheme.static_scale, 0.0f, false};
    if (scheme.static_scale <= 0) {
      Absmax absmax;
      for (std::int64_t i = begin; i < end; ++i) absmax.add(load(i));
      unit = unit_scale(absmax, divisor);
    }
    scales[g] = unit.scale;
    for (std::int64_t i = begin; i < end; ++i) {
      if (!to_int8)
        static_cast<std::uint8_t*>(codes)[i] = e4m3_code(load(i), unit);
      else if (scheme.static_scale > 0)
        static_cast<std::int8_t*>(codes)[i] = int8_code(load(i) / unit.scale, divisor);
      else
        static_cast<std::int8_t*>(codes)[i] = int8_code(load(i), unit, divisor);
    }
  }
}

struct Block {
  std::int64_t r0, r1, c0, c1;  // rows [r0, r1), columns [c0, c1)
};

Status quantise_block(const Tensor& matrix, const QuantDesc& desc, const Tensor& codes, const Block& block,
                      float& scale) {
  const auto [r0, r1, c0, c1] = block;
  auto element = [&](std::int64_t r, std::int64_t c) {
    return numeric::load_f32(matrix.data, matrix.dtype, r * matrix.stride[0] + c * matrix.stride[1]);
  };
  Absmax absmax;
  for (std::int64_t r = r0; r < r1; ++r)
    for (std::int64_t c = c0; c < c1; ++c) absmax.add(element(r, c));
  const float divisor = desc.type == DType::i8 ? 127.0f : kE4m3Largest;
  const UnitScale unit = unit_scale(absmax, divisor);
  if (!absmax.finite())
    return Status(StatusCode::invalid_argument,
                  text::concat("[quant] the block at row ", r0, ", column ", c0, " holds a value that is not finite"));
  scale = unit.scale;
  for (std::int64_t r = r0; r < r1; ++r)
    for (std::int64_t c = c0; c < c1; ++c) {
      const std::int64_t at = r * codes.stride[0] + c * codes.stride[1];
      if (desc.type == DType::i8)
        codes.as<std::int8_t>()[at] = int8_code(element(r, c), unit, divisor);
      else
        codes.as<std::uint8_t>()[at] = e4m3_code(element(r, c), unit);
    }
  return {};
}

}  // namespace

void quantise_row(const RowSource& row, const RowScheme& scheme, void* codes, float* scales) {
  auto with = [&](auto convert) {
    auto load = [&row, convert](std::int64_t i) { return convert(i * row.stride) * row.factor; };
    quantise_loaded(load, row.n, scheme, codes, scales);
  };
  switch (row.type) {
    case DType::f32: return with([p = static_cast<const float*>(row.data)](std::int64_t i) { return p[i]; });
    case DType::bf16:
      return with(
          [p = static_cast<const std::uint16_t*>(row.data)](std::int64_t i) { return numeric::bf16_to_f32(p[i]); });
    default: return with([&row](std::int64_t i) { return numeric::load_f32(row.data, row.type, i); });
  }
}

Status quantise_weights(const Tensor& matrix, const QuantDesc& desc, const Tensor& codes, const Tensor& scales) {
  const std::int64_t rows = matrix.shape[0], cols = matrix.shape[1];
  const std::int64_t block_rows = desc.granularity.rows < 0 ? rows : desc.granularity.rows;
  const std::int64_t block_cols = desc.granularity.cols < 0 ? cols : desc.granularity.cols;
  for (std::int64_t r = 0; r < rows; r += block_rows)
    for (std::int64_t c = 0; c < cols; c += block_cols) {
      float& scale = scales.at<float>(r / block_rows, c / block_cols);
      const Block block{r, std::min(rows, r + block_rows), c, std::min(cols, c + block_cols)};
      if (Status s = quantise_block(matrix, desc, codes, block, scale); !s.ok()) return s;
    }
  return {};
}

}  // namespace moekit::quant
