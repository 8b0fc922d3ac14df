// The rows that experts ask for (InputSpec), made from the caller's: passed, converted, weighted, quantised.
#pragma once
#include <moekit/kit/prepare_finalize.hpp>

#include "quant/quantise.hpp"

namespace moekit::dispatch {

/// What is written per row: nothing (pass), values of a float type, or codes with scales.
struct RowPlan {
  enum class Kind : std::uint8_t { pass, values, codes } kind = Kind::pass;
  DType type = DType::bf16;
  quant::RowScheme scheme{};    ///< codes
  Tensor static_scale;          ///< codes: [1] or [rows, 1]; absent = dynamic
  Granularity granularity{};    ///< of the scales that experts get
  std::int64_t num_groups = 0;  ///< scales per row

  std::size_t row_bytes(std::int64_t K) const { return static_cast<std::size_t>(K * bytes(type)); }
};

/// Where the tensors of a call lie, and that hidden and ids are matrices of as many rows.
Status check_prepare(const PrepareArgs& args);
/// Can rows of `hidden` floats be made into `input`? Whatever layout and granularity is missing is named.
Verdict can_make(const InputSpec& input);
/// `must_copy`: rows are weighted, or go elsewhere than they lie.
RowPlan plan_rows(const InputSpec& input, DType hidden, std::int64_t K, bool must_copy);
/// Adds the values of the call; fails where a static scale is missing or has a form that rows cannot use.
Status bind_static_scale(const InputSpec& input, const QuantConfig* quant, std::int64_t rows, RowPlan& plan);
/// Writes one row: `row` of `hidden`, times `factor`, to `data`, its scales to `scales`.
void make_row(const RowPlan& plan, const Tensor& hidden, std::int64_t row, float factor, void* data, float* scales);

}  // namespace moekit::dispatch
