#include <moekit/kit/ubatch.hpp>

#include <utility>

namespace moekit::inline v0 {

Status SingleUbatch::register_recv_hook(Status (*hook)(void*), void* state) {
  // The next micro-batch is this one; a wait that is still pending must not be lost.
  if (Status s = maybe_run_recv_hook(); !s.ok()) return s;
  hook_ = hook;
  state_ = state;
  return {};
}

Status SingleUbatch::maybe_run_recv_hook() {
  auto* hook = std::exchange(hook_, nullptr);
  return hook ? hook(std::exchange(state_, nullptr)) : Status();
}

void SingleUbatch::drop_recv_hook(void* state) {
  if (hook_ && state_ == state) hook_ = nullptr, state_ = nullptr;
}

}  // namespace moekit::inline v0
