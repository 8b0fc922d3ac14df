#include <moekit/kit/routing.hpp>

#include <algorithm>

#include "enum_values.hpp"
#include "tensor_checks.hpp"
#include "text.hpp"

namespace moekit::inline v0 {
using text::concat;

namespace {

bool is_id_type(DType type) { return type == DType::i32 || type == DType::i64 || type == DType::u32; }

std::int64_t id_at(const Tensor& ids, std::int64_t row, std::int64_t slot) {
  const std::int64_t at = row * ids.stride[0] + slot * ids.stride[1];
  if (ids.dtype == DType::i64) return ids.as<std::int64_t>()[at];
  if (ids.dtype == DType::u32) return ids.as<std::uint32_t>()[at];
  return ids.as<std::int32_t>()[at];
}

Status check_matrix(const Tensor& tensor, const char* what, std::int64_t num_tokens) {
  const std::string field = concat("routing.", what);
  if (Status s = tensors::check(tensor, tensor.device, "routing", field); !s.ok()) return s;
  if (tensor.rank != 2 || tensor.shape[0] != num_tokens || tensor.shape[1] < 1)
    return Status(StatusCode::invalid_shape,
                  concat("[routing] ", what, " must be [", num_tokens, ", k ≥ 1], got ", shape_string(tensor)), {},
                  field);
  if (tensor.stride[1] != 1 && tensor.shape[1] > 1)
    return Status(StatusCode::invalid_shape,
                  concat("[routing] the slots of ", what, " must lie side by side, got stride ", tensor.stride[1]),
                  "copy them, or transpose the producer", field);
  if (tensor.data == nullptr && tensor.numel() > 0)
    return Status(StatusCode::invalid_argument, concat("[routing] ", what, " is a null pointer"), {}, field);
  return {};
}

}  // namespace

Status validate(const Routing& routing, std::int64_t num_tokens) {
  if (Status s = values::check("routing", "routing.id_space", routing.id_space); !s.ok()) return s;
  if (Status s = check_matrix(routing.ids, "ids", num_tokens); !s.ok()) return s;
  if (Status s = check_matrix(routing.weights, "weights", num_tokens); !s.ok()) return s;
  if (routing.ids.shape[1] != routing.weights.shape[1])
    return Status(StatusCode::invalid_shape,
                  concat("[routing] ids have k = ", routing.ids.shape[1], ", weights k = ", routing.weights.shape[1]),
                  {}, "routing.weights");
  if (!is_id_type(routing.ids.dtype))
    return Status(StatusCode::invalid_dtype,
                  concat("[routing] ids must be i32, i64 or u32, got ", name(routing.ids.dtype)), {}, "routing.ids");
  if (routing.weights.dtype != DType::f32)
    return Status(StatusCode::invalid_dtype, concat("[routing] weights must be f32, got ", name(routing.weights.dtype)),
                  {}, "routing.weights");
  if (!(routing.ids.device == routing.weights.device))
    return Status(StatusCode::invalid_argument,
                  concat("[routing] ids are on ", to_string(routing.ids.device), ", weights on ",
                         to_string(routing.weights.device)),
                  {}, "routing.weights");
  return {};
}

Status check_ids(const Tensor& ids, std::int64_t num_experts) {
  if (Status s = tensors::check(ids, Device{}, "routing", "routing.ids"); !s.ok()) return s;
  if (ids.rank != 2 || !is_id_type(ids.dtype))
    return Status(StatusCode::invalid_dtype,
                  concat("[routing] ids must be i32, i64 or u32 [M, k], got ", name(ids.dtype), " ", shape_string(ids)),
                  {}, "routing.ids");
  for (std::int64_t row = 0; row < ids.shape[0]; ++row)
    for (std::int64_t slot = 0; slot < ids.shape[1]; ++slot)
      if (const std::int64_t id = id_at(ids, row, slot); id < -1 || id >= num_experts)
        return Status(
            StatusCode::invalid_argument,
            concat("[routing] id ", id, " of row ", row, ", slot ", slot, " is outside [-1, ", num_experts, ")"),
            "-1 means not routed", "routing.ids");
  return {};
}

Status convert_ids(const Tensor& ids, std::int64_t num_experts, const Tensor& out) {
  if (Status s = tensors::check(ids, Device{}, "routing", "routing.ids"); !s.ok()) return s;
  if (Status s = tensors::check(out, Device{}, "routing", "out"); !s.ok()) return s;
  if (ids.rank != 2 || !is_id_type(ids.dtype) || out.dtype != DType::i32 || out.rank != 2 ||
      out.shape[0] != ids.shape[0] || out.shape[1] != ids.shape[1])
    return Status(StatusCode::invalid_argument,
                  concat("[routing] cannot write ids ", name(ids.dtype), " ", shape_string(ids), " to ",
                         name(out.dtype), " ", shape_string(out)),
                  {}, "routing.ids");
  for (std::int64_t row = 0; row < ids.shape[0]; ++row)
    for (std::int64_t slot = 0; slot < ids.shape[1]; ++slot) {
      const std::int64_t id = id_at(ids, row, slot);
      out.at<std::int32_t>(row, slot) = id >= 0 && id < num_experts ? static_cast<std::int32_t>(id) : -1;
    }
  return {};
}

ExpertTokens ExpertTokens::from_host(std::span<const std::int32_t> counts, Device device, const Stream&) {
  if (device.type != DeviceType::cpu)
    throw Error(StatusCode::unsupported, concat("[routing] cannot copy counts to ", to_string(device), " from here"),
                "the device's module provides its own");
  std::shared_ptr<std::int32_t[]> copy(new std::int32_t[counts.size()]);
  std::copy(counts.begin(), counts.end(), copy.get());
  ExpertTokens out;
  out.counts = Tensor(copy.get(), DType::i32, {static_cast<std::int64_t>(counts.size())}, device);
  out.host = {copy.get(), counts.size()};
  out.storage = std::move(copy);
  return out;
}

Status count_expert_tokens(const Tensor& ids, const Tensor* expert_map, std::span<std::int32_t> counts) {
  if (Status s = tensors::check(ids, Device{}, "routing", "routing.ids"); !s.ok()) return s;
  if (expert_map)
    if (Status s = tensors::check(*expert_map, Device{}, "routing", "expert_map"); !s.ok()) return s;
  if (ids.rank != 2 || ids.dtype != DType::i32)
    return Status(StatusCode::invalid_dtype,
                  concat("[routing] counting takes ids i32 [rows, k], got ", name(ids.dtype), " ", shape_string(ids)),
                  {}, "routing.ids");
  const auto num_local = static_cast<std::int64_t>(counts.size());
  const std::int64_t num_ids = expert_map ? expert_map->numel() : num_local;
  std::fill(counts.begin(), counts.end(), 0);
  for (std::int64_t row = 0; row < ids.shape[0]; ++row)
    for (std::int64_t slot = 0; slot < ids.shape[1]; ++slot) {
      std::int64_t id = ids.at<std::int32_t>(row, slot);
      if (id < 0 || id >= num_ids) continue;
      if (expert_map) id = expert_map->as<std::int32_t>()[id * expert_map->stride[0]];
      if (id >= 0 && id < num_local) ++counts[static_cast<std::size_t>(id)];
    }
  return {};
}

}  // namespace moekit::inline v0
