// One call of a router as a value: logits at the end of a page, poisoned outputs, results as plain vectors.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <moekit/kit/implementations.hpp>

#include "quant/numeric.hpp"
#include "route/cpu.hpp"

namespace moekit::testing {

/// Memory whose last byte is the last before an unreadable page.
class GuardedMemory {
 public:
  explicit GuardedMemory(std::size_t size) {
    const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t used = (size + page - 1) / page * page;
    mapped_ = used + page;
    base_ = static_cast<std::byte*>(mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_ + used, page, PROT_NONE) != 0) throw std::bad_alloc();
    data_ = base_ + used - size;
  }
  GuardedMemory(GuardedMemory&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), data_(other.data_), mapped_(other.mapped_) {}
  ~GuardedMemory() {
    if (base_) munmap(base_, mapped_);
  }
  std::byte* data() const { return data_; }

 private:
  std::byte* base_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t mapped_ = 0;
};

/// `values` stored as `type` at the end of a page.
inline GuardedMemory guarded(const std::vector<float>& values, DType type) {
  GuardedMemory memory(values.size() * static_cast<std::size_t>(bytes(type)));
  for (std::size_t i = 0; i < values.size(); ++i)
    numeric::store_f32(memory.data(), type, static_cast<std::int64_t>(i), values[i]);
  return memory;
}

struct RouteCase {
  RouterConfig config{};
  std::int64_t M = 1, E = 4, k = 2;
  std::vector<float> logits{};  ///< [M, E]
  DType dtype = DType::f32;
  std::vector<float> logit_bias{}, selection_bias{};
  DType bias_dtype = DType::f32;
  std::int64_t num_valid = -1;
  bool checked = false;
  Executor* executor = nullptr;
};

struct RouteResult {
  Status status;
  std::int64_t k = 0;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::vector<std::int32_t> row_ids(std::int64_t row) const {
    return {ids.begin() + row * k, ids.begin() + (row + 1) * k};
  }
  std::vector<float> row_weights(std::int64_t row) const {
    return {weights.begin() + row * k, weights.begin() + (row + 1) * k};
  }
};

/// Runs on outputs poisoned with 0xFF whose rows are 3 elements longer than k; the gaps must stay as they were.
inline RouteResult run_route(const Router& router, const RouteCase& c) {
  const GuardedMemory logits = guarded(c.logits, c.dtype);
  const GuardedMemory logit_bias = guarded(c.logit_bias, c.bias_dtype);
  const GuardedMemory selection_bias = guarded(c.selection_bias, c.bias_dtype);
  const std::int64_t stride = c.k + 3;
  const std::size_t padded = static_cast<std::size_t>(c.M * stride);
  std::vector<std::int32_t> ids(padded, -1), weights(padded, -1);

  RouterTensors tensors;
  if (!c.logit_bias.empty()) tensors.logit_bias = Tensor(logit_bias.data(), c.bias_dtype, {c.E});
  if (!c.selection_bias.empty()) tensors.selection_bias = Tensor(selection_bias.data(), c.bias_dtype, {c.E});
  RouteArgs args;
  args.logits = Tensor(logits.data(), c.dtype, {c.M, c.E});
  args.config = &c.config;
  args.tensors = &tensors;
  args.ids = Tensor::strided(ids.data(), DType::i32, {c.M, c.k}, {stride, 1});
  args.weights = Tensor::strided(weights.data(), DType::f32, {c.M, c.k}, {stride, 1});
  args.num_valid = c.num_valid;
  args.checked = c.checked;
  args.context.stream.executor = c.executor;
  // ids are poisoned with a value that no router writes
  for (std::int32_t& id : ids) id = 0x7fffffff;
  std::vector<std::byte> workspace(1 << 16, std::byte{0xff});
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(workspace.data()) % kWorkspaceAlignment;
  args.context.workspace = {workspace.data() + (kWorkspaceAlignment - misaligned) % kWorkspaceAlignment, 1 << 15};

  RouteResult result;
  result.k = c.k;
  result.status = router.route(args);
  for (std::int64_t row = 0; row < c.M; ++row)
    for (std::int64_t j = 0; j < stride; ++j) {
      const std::size_t at = static_cast<std::size_t>(row * stride + j);
      if (j < c.k) {
        result.ids.push_back(ids[at]);
        result.weights.push_back(std::bit_cast<float>(weights[at]));
      } else if (ids[at] != 0x7fffffff || weights[at] != -1) {
        result.status = Status(StatusCode::internal, "wrote between the rows, row " + std::to_string(row));
      }
    }
  return result;
}

/// The list, and the portable kernels where the list's "cpu" uses others.
inline std::vector<std::unique_ptr<Router>> all_routers() {
  std::vector<std::unique_ptr<Router>> out;
  for (const RouterEntry& entry : router_implementations())
    if (entry.available().ok()) out.push_back(entry.make());
  if (&route::cpu_unit() != &route::kPortableUnit) out.push_back(route::make_cpu(route::kPortableUnit));
  return out;
}
inline std::vector<const route::CpuUnit*> all_units() {
  std::vector<const route::CpuUnit*> out = {&route::cpu_unit()};
  if (out[0] != &route::kPortableUnit) out.push_back(&route::kPortableUnit);
  return out;
}

}  // namespace moekit::testing
