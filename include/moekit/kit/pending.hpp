// A result still on the wire.
#pragma once
#include <utility>

#include <moekit/status.hpp>

namespace moekit::inline v0 {

struct Nothing {};

/// What an asynchronous engine returns: plain functions and a state, so that nothing is allocated per call.
/// Move-only. `receive()` is called once, after the hook; one that is destroyed unreceived calls `abandon`, which
/// quiesces or quarantines its buffers.
template <class T>
class Pending {
 public:
  struct Functions {
    Status (*hook)(void* state) = nullptr;                ///< waits for the wire; cheap; may be null
    Status (*receive)(void* state, T& result) = nullptr;  ///< turns wire data into the result
    void (*abandon)(void* state) = nullptr;               ///< may be null
  };

  Pending() = default;
  Pending(const Functions& functions, void* state) : functions_(functions), state_(state) {}  ///< state: the engine's
  Pending(Pending&& other) noexcept
      : functions_(std::exchange(other.functions_, {})), state_(std::exchange(other.state_, nullptr)) {}
  Pending& operator=(Pending&& other) noexcept {
    if (this != &other) {
      drop();
      functions_ = std::exchange(other.functions_, {});
      state_ = std::exchange(other.state_, nullptr);
    }
    return *this;
  }
  ~Pending() { drop(); }

  bool valid() const { return functions_.receive != nullptr; }
  bool has_hook() const { return functions_.hook != nullptr; }
  /// The hook as a plain function, to be run now or by the next micro-batch; either way before receive().
  Status (*hook_function() const)(void*) { return functions_.hook; }
  void* state() const { return state_; }
  Status run_hook() { return functions_.hook ? functions_.hook(state_) : Status(); }
  Status receive(T& result) {
    if (!valid())
      return Status(StatusCode::invalid_argument,
                    "[pending] receive() was called on an empty or already received result");
    auto receive = std::exchange(functions_, {}).receive;
    return receive(std::exchange(state_, nullptr), result);
  }

 private:
  void drop() {
    if (functions_.receive && functions_.abandon) functions_.abandon(state_);
    functions_ = {};
  }
  Functions functions_{};
  void* state_ = nullptr;
};

}  // namespace moekit::inline v0
