#include <moekit/kit/experts.hpp>

namespace moekit::inline v0 {

std::size_t TensorSpec::bytes() const {
  std::size_t count = rank > 0 ? 1 : 0;
  for (int axis = 0; axis < rank; ++axis) count *= static_cast<std::size_t>(shape[axis]);
  return count * static_cast<std::size_t>(bits(dtype)) / 8;
}

Tensor TensorSpec::on(void* data, Device device) const {
  Tensor out;
  out.data = data;
  out.dtype = dtype;
  out.device = device;
  out.rank = rank;
  std::int64_t step = 1;
  for (int axis = rank - 1; axis >= 0; --axis) {
    out.shape[axis] = shape[axis];
    out.stride[axis] = step;
    step *= shape[axis];
  }
  return out;
}

}  // namespace moekit::inline v0
