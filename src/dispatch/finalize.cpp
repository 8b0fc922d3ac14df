#include "dispatch/finalize.hpp"

#include <cstring>
#include <mutex>

#include "kit/for_rows.hpp"
#include "text.hpp"

namespace moekit::dispatch {

void fill_zero(const Tensor& output) {
  for (std::int64_t t = 0; t < output.shape[0]; ++t)
    std::memset(output.index(t).data, 0, static_cast<std::size_t>(output.shape[1] * bytes(output.dtype)));
}

Status reduce_rows(const FinalizeArgs& args, std::string_view engine) {
  const Tensor& output = args.output;
  const Tensor& rows = args.expert_output;
  if (output.rank != 2)
    return Status(StatusCode::invalid_shape,
                  text::concat("[finalize] output must be [M, K], got ", shape_string(output)), {}, "output");
  if (rows.numel() == 0) {
    fill_zero(output);
    return {};
  }
  WeightAndReduce reduce = args.reduce;
  if (reduce.kind == WeightAndReduce::Kind::delegate) reduce = WeightAndReduce::contiguous();
  if (reduce.kind == WeightAndReduce::Kind::naive_batched)
    return Status(
        StatusCode::invalid_argument,
        text::concat("[finalize] ", engine, " gets standard rows, ", to_string(reduce), " takes batched ones"), {},
        "reduce");

  if (reduce == WeightAndReduce::no_op() && rows.data == output.data && rows.dtype == output.dtype)
    return {};  // the experts wrote the output themselves

  const std::int64_t M = output.shape[0];
  if (M == 0) return {};
  const std::int64_t per_token = rows.shape[0] / M;  // rows of expert_output; 0 is refused below
  Tensor result;
  if (per_token * M != rows.shape[0] || args.routing.num_tokens() != M || rows.rank < 2)  // the reduce names both sides
    return reduce.apply(output, rows, args.routing, args.weight_on_input, result);
  Status failure;
  std::mutex failing;
  kit::for_rows(args.context.stream, M, per_token * rows.stride[0] * bytes(rows.dtype),
                [&](std::int64_t begin, std::int64_t end) {
                  Tensor part;
                  Status s =
                      reduce.apply(output.slice_rows(begin, end), rows.slice_rows(begin * per_token, end * per_token),
                                   args.routing.slice_rows(begin, end), args.weight_on_input, part);
                  if (s.ok()) return;
                  const std::lock_guard hold(failing);
                  failure = std::move(s);
                });
  return failure;
}

}  // namespace moekit::dispatch
