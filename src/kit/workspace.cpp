#include <moekit/kit/workspace.hpp>

#include <algorithm>
#include <array>
#include <mutex>
#include <new>

#include "text.hpp"

namespace moekit::inline v0 {
using text::concat;

namespace {

struct AlignedDelete {
  void operator()(std::byte* memory) const { ::operator delete (memory, std::align_val_t{kWorkspaceAlignment}); }
};

struct Buffer {
  std::unique_ptr<std::byte, AlignedDelete> memory;
  std::size_t size = 0;

  bool grow(std::size_t bytes) {
    if (bytes <= size) return true;
    void* fresh = ::operator new (bytes, std::align_val_t{kWorkspaceAlignment}, std::nothrow);
    if (!fresh) return false;
    memory.reset(static_cast<std::byte*>(fresh));
    size = bytes;
    return true;
  }
};

}  // namespace

struct WorkspacePool::State {
  Device device{};
  mutable std::mutex mutex;
  bool locked = false;
  std::array<std::array<Buffer, kMaxLanes>, kMaxUbatches> buffers;

  Status ensure(int ubatch, int lane, std::size_t bytes) {
    Buffer& buffer = buffers[static_cast<std::size_t>(ubatch)][static_cast<std::size_t>(lane)];
    if (bytes <= buffer.size) return {};
    if (locked)
      return Status(StatusCode::workspace_too_small,
                    concat("[workspace] the pool is locked with ", buffer.size, " bytes for ubatch ", ubatch, ", lane ",
                           lane, "; this call needs ", bytes),
                    concat("reserve(", ubatch + 1, ", ", bytes, ") before lock()"));
    if (device.type != DeviceType::cpu)
      return Status(StatusCode::unsupported, concat("[workspace] no allocator for ", to_string(device)),
                    "bring a workspace of your own in CallContext");
    if (!buffer.grow(bytes))
      return Status(StatusCode::out_of_memory, concat("[workspace] could not allocate ", bytes, " bytes"));
    return {};
  }
};

WorkspacePool::WorkspacePool(Device device) : state_(std::make_unique<State>()) { state_->device = device; }
WorkspacePool::~WorkspacePool() = default;

Status WorkspacePool::get(int ubatch, int lane, std::size_t bytes, Bytes& out) {
  if (ubatch < 0 || ubatch >= kMaxUbatches || lane < 0 || lane >= kMaxLanes)
    return Status(StatusCode::invalid_argument, concat("[workspace] ubatch ", ubatch, ", lane ", lane, " is outside ",
                                                       kMaxUbatches, " × ", kMaxLanes));
  const std::lock_guard hold(state_->mutex);
  if (Status s = state_->ensure(ubatch, lane, bytes); !s.ok()) return s;
  const Buffer& buffer = state_->buffers[static_cast<std::size_t>(ubatch)][static_cast<std::size_t>(lane)];
  out = {buffer.memory.get(), buffer.size};
  return {};
}

Status WorkspacePool::reserve(int ubatches, std::size_t bytes) {
  if (ubatches < 0 || ubatches > kMaxUbatches)
    return Status(StatusCode::invalid_argument,
                  concat("[workspace] ", ubatches, " ubatches, but a pool has ", kMaxUbatches));
  const std::lock_guard hold(state_->mutex);
  for (int ubatch = 0; ubatch < ubatches; ++ubatch)
    for (int lane = 0; lane < kMaxLanes; ++lane)
      if (Status s = state_->ensure(ubatch, lane, bytes); !s.ok()) return s;
  return {};
}

void WorkspacePool::lock() {
  const std::lock_guard hold(state_->mutex);
  state_->locked = true;
}
void WorkspacePool::unlock() {
  const std::lock_guard hold(state_->mutex);
  state_->locked = false;
}
bool WorkspacePool::locked() const {
  const std::lock_guard hold(state_->mutex);
  return state_->locked;
}
std::size_t WorkspacePool::bytes() const {
  const std::lock_guard hold(state_->mutex);
  std::size_t total = 0;
  for (const auto& lanes : state_->buffers)
    for (const Buffer& buffer : lanes) total += buffer.size;
  return total;
}

}  // namespace moekit::inline v0
