// Tails on CPU: one pass over the routes of a token per block of columns, everything f32, one rounding per output.
#include <cmath>
#include <cstdlib>

#include "kit/for_rows.hpp"
#include "reduce/row_sum.hpp"
#include "tail/tail.hpp"
#include "tensor_checks.hpp"
#include "text.hpp"

namespace moekit::tail {
using text::concat;

namespace {

using reduce::kBlock;

void add(float* sum, const Tensor& row, std::int64_t begin, std::int64_t count) {
  reduce::add_scaled(sum, row.data, row.dtype, begin, count, 1.0f);
}

/// value[i] = scale · Σ_j w_j · gemm2[idx_j] (+ shared) for columns [begin, begin + count) of token t.
void routed_block(const MoeOutput& moe, std::int64_t t, std::int64_t begin, std::int64_t count, float* value) {
  std::fill_n(value, count, 0.0f);
  if (const Tensor* finalised = std::get_if<Tensor>(&moe.routed)) {
    add(value, finalised->index(t), begin, count);
  } else {
    const UnfinalizedOutput& open = std::get<UnfinalizedOutput>(moe.routed);
    const Tensor& weights = open.expert_weights;
    const std::int64_t k = open.expanded_to_permuted.shape[1];
    for (std::int64_t j = 0; j < k; ++j) {
      const std::int32_t row = open.expanded_to_permuted.at<std::int32_t>(t, j);
      if (row < 0 || row >= open.gemm2_permuted.shape[0]) continue;
      const float weight =
          numeric::load_f32(weights.data, weights.dtype, t * weights.stride[0] + j * weights.stride[1]);
      reduce::add_scaled(value, open.gemm2_permuted.index(row).data, open.gemm2_permuted.dtype, begin, count, weight);
    }
  }
  if (moe.routed_scaling_factor != 1.0f)
    for (std::int64_t i = 0; i < count; ++i) value[i] *= moe.routed_scaling_factor;
  if (moe.shared.present()) add(value, moe.shared.index(t), begin, count);
}

/// Σ x², sixteen partial sums.
float sum_of_squares(const float* x, std::int64_t n) {
  float lanes[16] = {};
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (std::int64_t l = 0; l < 16; ++l) lanes[l] += x[i + l] * x[i + l];
  for (; i < n; ++i) lanes[i % 16] += x[i] * x[i];
  float sum = 0;
  for (float lane : lanes) sum += lane;
  return sum;
}

void norm_row(const MoeOutput& moe, const Tail& tail, std::int64_t t) {
  const Tensor residual = tail.residual.index(t), norm = tail.norm_out.index(t),
               residual_out = tail.residual_out.index(t);
  const std::int64_t K = residual.shape[0];
  float value[kBlock];
  const auto block = [&](std::int64_t begin, std::int64_t count) {
    routed_block(moe, t, begin, count, value);
    add(value, residual, begin, count);
  };
  float squares = 0;
  for (std::int64_t begin = 0; begin < K; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, K - begin);
    block(begin, count);
    squares += sum_of_squares(value, count);
  }
  const float factor = 1.0f / std::sqrt(squares / static_cast<float>(K) + tail.eps);
  for (std::int64_t begin = 0; begin < K; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, K - begin);
    block(begin, count);  // once more; read before it is written: residual_out may be residual
    reduce::store(residual_out.data, residual_out.dtype, begin, count, value);
    for (std::int64_t i = 0; i < count; ++i)
      value[i] =
          value[i] * factor * numeric::load_f32(tail.gamma.data, tail.gamma.dtype, (begin + i) * tail.gamma.stride[0]);
    reduce::store(norm.data, norm.dtype, begin, count, value);
  }
}

Status check_rows(const Tensor& tensor, const char* what, std::int64_t rows, std::int64_t columns) {
  if (Status s = tensors::check(tensor, Device{}, "tail", what); !s.ok()) return s;
  if (tensor.rank != 2 || tensor.shape[0] != rows || tensor.shape[1] != columns)
    return Status(StatusCode::invalid_shape,
                  concat("[tail] ", what, " must be [", rows, ", ", columns, "], got ", shape_string(tensor)), {},
                  what);
  if (tensor.data == nullptr && tensor.numel() > 0)
    return Status(StatusCode::invalid_argument, concat("[tail] ", what, " is a null pointer"), {}, what);
  if (!reduce::can_sum(tensor.dtype))
    return Status(StatusCode::invalid_dtype,
                  concat("[tail] ", what, " must be f32, bf16 or f16, got ", name(tensor.dtype)), {}, what);
  if (tensor.stride[1] != 1 && columns > 1)
    return Status(StatusCode::invalid_shape,
                  concat("[tail] the columns of ", what, " must lie side by side, got stride ", tensor.stride[1]), {},
                  what);
  return {};
}

Status check_written(const Tensor& tensor, const char* what, std::int64_t rows, std::int64_t columns) {
  if (Status s = check_rows(tensor, what, rows, columns); !s.ok()) return s;
  if (rows <= 1 || std::abs(tensor.stride[0]) >= columns) return {};
  return Status(StatusCode::invalid_shape,
                concat("[tail] rows of ", what, " overlap: row stride ", tensor.stride[0], ", ", columns, " columns"),
                {}, what);
}

constexpr const char* kOwn = "give it memory of its own";

Status overlaps(const char* field, const char* other, const char* hint) {
  return Status(StatusCode::invalid_argument, concat("[tail] ", field, " overlaps ", other), hint, field);
}

/// The same rows in the same type: reading and writing go block by block.
bool in_place(const Tensor& written, const Tensor& read) {
  return written.data == read.data && written.dtype == read.dtype &&
         (written.rows() <= 1 || written.stride[0] == read.stride[0]);
}

/// Which part of a MoeOutput lies under `written`, but not exactly in place; null if none does.
const char* part_under(const MoeOutput& moe, const Tensor& written) {
  if (moe.shared.present() && !in_place(written, moe.shared) && tensors::overlap(written, moe.shared)) return "shared";
  if (const Tensor* finalised = std::get_if<Tensor>(&moe.routed))
    return !in_place(written, *finalised) && tensors::overlap(written, *finalised) ? "routed" : nullptr;
  const UnfinalizedOutput& open = std::get<UnfinalizedOutput>(moe.routed);
  if (tensors::overlap(written, open.gemm2_permuted)) return "gemm2_permuted";
  if (tensors::overlap(written, open.expert_weights)) return "expert_weights";
  return tensors::overlap(written, open.expanded_to_permuted) ? "expanded_to_permuted" : nullptr;
}

Status check_moe(const MoeOutput& moe, std::int64_t rows, std::int64_t columns) {
  if (moe.shared.present())
    if (Status s = check_rows(moe.shared, "shared", rows, columns); !s.ok()) return s;
  if (const Tensor* finalised = std::get_if<Tensor>(&moe.routed))
    return check_rows(*finalised, "routed", rows, columns);
  const UnfinalizedOutput& open = std::get<UnfinalizedOutput>(moe.routed);
  if (Status s = tensors::check(open.expert_weights, Device{}, "tail", "expert_weights"); !s.ok()) return s;
  if (Status s = tensors::check(open.expanded_to_permuted, Device{}, "tail", "expanded_to_permuted"); !s.ok()) return s;
  const Tensor parts[] = {open.gemm2_permuted, open.expert_weights, open.expanded_to_permuted};
  std::variant<Tensor, UnfinalizedOutput> checked;
  if (Status s = normalize_output({parts}, false, rows, open.expanded_to_permuted.shape[1], {}, checked); !s.ok())
    return s;
  if (open.expert_weights.rank != 2 || !reduce::can_sum(open.expert_weights.dtype))
    return Status(StatusCode::invalid_dtype,
                  concat("[tail] weights must be f32, bf16 or f16 [M, k], got ", name(open.expert_weights.dtype), " ",
                         shape_string(open.expert_weights)),
                  {}, "expert_weights");
  return check_rows(open.gemm2_permuted, "gemm2_permuted", open.gemm2_permuted.shape[0], columns);
}

/// Bytes that a row costs: its routes once or twice, and what is added.
std::int64_t row_cost(const MoeOutput& moe, std::int64_t columns) {
  const auto* open = std::get_if<UnfinalizedOutput>(&moe.routed);
  return columns * 4 * (open ? open->expanded_to_permuted.shape[1] + 2 : 3);
}

}  // namespace

Status check(const Tail& tail, std::int64_t rows, std::int64_t columns) {
  if (Status s = check_rows(tail.residual, "tail.residual", rows, columns); !s.ok()) return s;
  if (Status s = check_written(tail.norm_out, "tail.norm_out", rows, columns); !s.ok()) return s;
  if (Status s = check_written(tail.residual_out, "tail.residual_out", rows, columns); !s.ok()) return s;
  const Tensor& gamma = tail.gamma;
  if (Status s = tensors::check(gamma, Device{}, "tail", "tail.gamma"); !s.ok()) return s;
  if (gamma.data == nullptr || gamma.rank != 1 || gamma.shape[0] != columns || !is_float(gamma.dtype))
    return Status(StatusCode::invalid_shape,
                  concat("[tail] tail.gamma must be [", columns, "] floats, got ",
                         gamma.present() ? concat(name(gamma.dtype), " ", shape_string(gamma)) : "nothing"),
                  {}, "tail.gamma");
  if (!(tail.eps >= 0) || !std::isfinite(tail.eps))
    return Status(StatusCode::invalid_argument, concat("[tail] eps must be finite and not negative, got ", tail.eps),
                  {}, "tail.eps");
  if (!in_place(tail.residual_out, tail.residual) && tensors::overlap(tail.residual_out, tail.residual))
    return overlaps("tail.residual_out", "residual", "it may be residual itself, or memory of its own");
  if (tensors::overlap(tail.residual_out, gamma)) return overlaps("tail.residual_out", "gamma", kOwn);
  if (tensors::overlap(tail.norm_out, tail.residual)) return overlaps("tail.norm_out", "residual", kOwn);
  if (tensors::overlap(tail.norm_out, tail.residual_out)) return overlaps("tail.norm_out", "residual_out", kOwn);
  if (tensors::overlap(tail.norm_out, gamma)) return overlaps("tail.norm_out", "gamma", kOwn);
  return {};
}

Status add_and_norm(const MoeOutput& moe, const Tail& tail, const CallContext& context) {
  const std::int64_t rows = tail.residual.rows(), columns = tail.residual.rank == 2 ? tail.residual.shape[1] : 0;
  if (Status s = check(tail, rows, columns); !s.ok()) return s;
  if (Status s = check_moe(moe, rows, columns); !s.ok()) return s;
  for (const auto& [field, written] :
       {std::pair{"tail.norm_out", &tail.norm_out}, std::pair{"tail.residual_out", &tail.residual_out}})
    if (const char* part = part_under(moe, *written)) return overlaps(field, part, kOwn);
  kit::for_rows(context.stream, rows, row_cost(moe, columns), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) norm_row(moe, tail, t);
  });
  return {};
}

}  // namespace moekit::tail

namespace moekit::inline v0 {

Status close_output(const MoeOutput& moe, const Tensor& output, const CallContext& context) {
  const std::int64_t rows = output.rows(), columns = output.rank == 2 ? output.shape[1] : 0;
  if (Status s = tail::check_written(output, "output", rows, columns); !s.ok()) return s;
  if (Status s = tail::check_moe(moe, rows, columns); !s.ok()) return s;
  if (const char* part = tail::part_under(moe, output)) return tail::overlaps("output", part, tail::kOwn);
  kit::for_rows(context.stream, rows, tail::row_cost(moe, columns), [&](std::int64_t begin, std::int64_t end) {
    float value[reduce::kBlock];
    for (std::int64_t t = begin; t < end; ++t)
      for (std::int64_t at = 0; at < columns; at += reduce::kBlock) {
        const std::int64_t count = std::min(reduce::kBlock, columns - at);
        tail::routed_block(moe, t, at, count, value);
        reduce::store(output.index(t).data, output.dtype, at, count, value);
      }
  });
  return {};
}

}  // namespace moekit::inline v0
