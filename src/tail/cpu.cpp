#include <cmath>

#include "quant/numeric.hpp"
#include "tail/tail.hpp"
#include "text.hpp"

namespace moekit::tail {
using text::concat;

namespace {

float load(const Tensor& row, std::int64_t c) { return numeric::load_f32(row.data, row.dtype, c * row.stride[0]); }
void store(const Tensor& row, std::int64_t c, float v) {
  numeric::store_f32(row.data, row.dtype, c * row.stride[0], v);
}

/// Column c of r for one token.
class Row {
 public:
  Row(const MoeOutput& moe, const Tail& tail, std::int64_t t) : moe_(moe), t_(t), residual_(tail.residual.index(t)) {
    if (moe.shared.present()) shared_ = moe.shared.index(t);
    if (const Tensor* finalised = std::get_if<Tensor>(&moe.routed))
      routed_ = finalised->index(t);
    else
      open_ = &std::get<UnfinalizedOutput>(moe.routed);
  }
  float value(std::int64_t c) const {
    float sum = open_ ? open_sum(c) : load(routed_, c);
    sum *= moe_.routed_scaling_factor;
    if (shared_.present()) sum += load(shared_, c);
    return load(residual_, c) + sum;
  }

 private:
  float open_sum(std::int64_t c) const {
    float sum = 0;
    const Tensor ids = open_->expanded_to_permuted.index(t_), weights = open_->expert_weights.index(t_);
    for (std::int64_t j = 0; j < ids.shape[0]; ++j) {
      const std::int32_t at = ids.as<std::int32_t>()[j * ids.stride[0]];
      if (at >= 0) sum += load(weights, j) * load(open_->gemm2_permuted.index(at), c);
    }
    return sum;
  }

  const MoeOutput& moe_;
  std::int64_t t_;
  Tensor residual_, shared_, routed_;
  const UnfinalizedOutput* open_ = nullptr;
};

Status check(const Tensor& tensor, const char* what, std::int64_t rows, std::int64_t columns) {
  if (tensor.data == nullptr)
    return Status(StatusCode::invalid_argument, concat("[tail] ", what, " is missing"), "", what);
  const bool shaped = columns == 0 ? tensor.rank == 1 && tensor.shape[0] == rows
                                   : tensor.rank == 2 && tensor.shape[0] == rows && tensor.shape[1] == columns;
  if (!shaped)
    return Status(StatusCode::invalid_shape,
                  concat("[tail] ", what, " is ", shape_string(tensor), ", the layer has ", rows, " rows of ", columns),
                  "", what);
  if (!is_float(tensor.dtype))
    return Status(StatusCode::invalid_dtype, concat("[tail] ", what, " must be a float type, got ", name(tensor.dtype)),
                  "", what);
  return {};
}

struct Work {
  const MoeOutput* moe;
  const Tail* tail;
};

void run_row(void* state, std::int64_t t) {
  const Work& work = *static_cast<const Work*>(state);
  const Tail& tail = *work.tail;
  const Row row(*work.moe, tail, t);
  const Tensor norm = tail.norm_out.index(t), sum_out = tail.residual_out.index(t);
  const std::int64_t columns = norm.shape[0];
  float squares = 0;
  for (std::int64_t c = 0; c < columns; ++c) {
    const float v = row.value(c);
    squares += v * v;
  }
  const float factor = 1.0f / std::sqrt(squares / static_cast<float>(columns) + tail.eps);
  for (std::int64_t c = 0; c < columns; ++c) {
    const float v = row.value(c);  // once more: residual_out may be residual
    store(norm, c, v * factor * load(tail.gamma, c));
    store(sum_out, c, v);
  }
}

}  // namespace

Status add_and_norm(const MoeOutput& moe, const Tail& tail, const CallContext& context) {
  const std::int64_t rows = tail.residual.rows(), columns = tail.residual.rank == 2 ? tail.residual.shape[1] : 0;
  if (Status s = check(tail.residual, "residual", rows, columns); !s.ok()) return s;
  if (Status s = check(tail.norm_out, "norm_out", rows, columns); !s.ok()) return s;
  if (Status s = check(tail.residual_out, "residual_out", rows, columns); !s.ok()) return s;
  if (Status s = check(tail.gamma, "gamma", columns, 0); !s.ok()) return s;
  if (tail.norm_out.data == tail.residual.data || tail.norm_out.data == tail.residual_out.data)
    return Status(StatusCode::invalid_argument, "[tail] norm_out may alias neither residual nor residual_out", "",
                  "norm_out");
  if (!(tail.eps >= 0))
    return Status(StatusCode::invalid_argument, concat("[tail] eps must not be negative, got ", tail.eps), "", "eps");
  Work work{&moe, &tail};
  Executor& executor = context.stream.executor ? *context.stream.executor : cpu_executor();
  executor.run(rows, &run_row, &work);
  return {};
}

}  // namespace moekit::tail
