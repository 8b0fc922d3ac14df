// The protocol by which two micro-batches take turns. Passed in; there is no thread-local state.
#pragma once
#include <moekit/status.hpp>

namespace moekit::inline v0 {

/// Exactly one micro-batch runs at a time; a failure in one aborts the others (every call then returns aborted).
/// Buffers, handles and events are per micro-batch: index() selects the set.
///
/// A hook refers to state that lives until its micro-batch has received or abandoned the result. So one that aborts
/// must drop what it has registered, before it abandons: the kernel calls drop_recv_hook when yield fails, and an
/// engine or a driver that registers hooks itself does the same. After an abort no registered hook runs any more.
class UbatchContext {
 public:
  enum class Lane { compute, comm };
  virtual ~UbatchContext() = default;
  virtual int index() const = 0;
  virtual bool enabled() const = 0;  ///< overlap is on
  /// Lets the next micro-batch run; returns when it is this one's turn again, the hooks that it registered having run.
  virtual Status yield() = 0;
  /// Registers a wait that the *next* micro-batch will run by maybe_run_recv_hook().
  virtual Status register_recv_hook(Status (*hook)(void*), void* state) = 0;
  virtual Status maybe_run_recv_hook() = 0;  ///< runs and clears what was registered for this one
  /// Forgets, unrun, the hooks that were registered through this one with `state`; nothing to forget is no error.
  virtual void drop_recv_hook(void* state) = 0;
  virtual Status switch_to(Lane lane) = 0;  ///< for engines: following work goes to that lane
};

/// One thread, one micro-batch: overlap off, yields at once, and a registered hook waits for this one's next
/// maybe_run_recv_hook().
class MOEKIT_API SingleUbatch final : public UbatchContext {
 public:
  explicit SingleUbatch(int index = 0) : index_(index) {}
  int index() const override { return index_; }
  bool enabled() const override { return false; }
  Status yield() override { return {}; }
  Status register_recv_hook(Status (*hook)(void*), void* state) override;
  Status maybe_run_recv_hook() override;
  void drop_recv_hook(void* state) override;
  Status switch_to(Lane) override { return {}; }

 private:
  int index_;
  Status (*hook_)(void*) = nullptr;
  void* state_ = nullptr;
};

}  // namespace moekit::inline v0
