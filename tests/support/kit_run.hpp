// Runs kernels with stand-ins: a log of events, an overlapped micro-batch, one poisoned workspace per call.
#pragma once
#include <gtest/gtest.h>

#include <functional>

#include "support/kit_doubles.hpp"

namespace moekit::testing {

using Log = std::vector<std::string>;

class LoggingShared final : public SharedExperts {
 public:
  explicit LoggingShared(Log* log = nullptr) : log_(log) {}
  std::size_t workspace_bytes(std::int64_t max_tokens) const override {
    return static_cast<std::size_t>(max_tokens) * 4;
  }
  Status apply(const Tensor& hidden, const Tensor& output, const CallContext& context) const override {
    if (log_) log_->push_back("shared");
    std::memset(context.workspace.data, 0x77, workspace_bytes(hidden.rows()));
    for (std::int64_t t = 0; t < hidden.rows(); ++t)
      for (std::int64_t c = 0; c < hidden.shape[1]; ++c) output.at<float>(t, c) = 2.0f * hidden.at<float>(t, c);
    return {};
  }

 private:
  Log* log_;
};

/// A micro-batch that is overlapped with another: hooks go to a list that only the test runs.
class TestUbatch final : public UbatchContext {
 public:
  TestUbatch(Log& log, int index) : log_(log), index_(index) {}
  int index() const override { return index_; }
  bool enabled() const override { return true; }
  Status yield() override {
    log_.push_back("yield");
    const bool aborts = abort && yields_before_abort-- <= 0;
    if (!aborts) registered.clear();  // the next micro-batch ran them
    return aborts ? Status(StatusCode::aborted, "[ubatch] another micro-batch failed") : Status();
  }
  Status register_recv_hook(Status (*hook)(void*), void* state) override {
    log_.push_back("register");
    EXPECT_NE(hook, nullptr);
    registered.push_back(state);
    return {};
  }
  void drop_recv_hook(void* state) override {
    log_.push_back("drop");
    std::erase(registered, state);
    if (on_drop) on_drop();
  }
  Status maybe_run_recv_hook() override { return log_.push_back("maybe_run"), Status(); }
  Status switch_to(Lane) override { return {}; }
  bool abort = false;
  int yields_before_abort = 0;
  std::vector<void*> registered;  // with the next micro-batch, not yet run
  std::function<void()> on_drop;

 private:
  Log& log_;
  int index_;
};

inline std::shared_ptr<const Experts> affine(AffineOptions options = {}) {
  return std::make_shared<AffineExperts>(std::move(options));
}

inline Status run(const ModularKernel& kernel, Case& c, KernelOutput& out, UbatchContext* ubatch = nullptr,
                  Executor* executor = nullptr) {
  static SerialExecutor serial;
  PoisonedBytes memory(kernel.workspace_bytes(c.M, c.k));
  CallContext context;
  context.workspace = memory.bytes();
  context.ubatch = ubatch;
  context.stream.executor = executor ? executor : &serial;
  const Status status = kernel.forward(c.input(), out, context);
  EXPECT_TRUE(memory.guard_intact()) << "something behind workspace_bytes() was written";
  return status;
}

inline void expect_routed(Case& c, const float* y) {
  for (std::int64_t t = 0; t < c.M; ++t)
    for (std::int64_t col = 0; col < c.K; ++col)
      ASSERT_FLOAT_EQ(y[t * c.K + col], static_cast<float>(c.expected(t, col))) << "[" << t << ", " << col << "]";
}

template <class Build>
std::string refusal(Build&& build) {
  try {
    build();
  } catch (const Error& error) {
    return error.status().message();
  }
  return "was built";
}

inline bool has(const std::string& text, std::initializer_list<const char*> words) {
  for (const char* word : words)
    if (text.find(word) == std::string::npos) return ADD_FAILURE() << "no '" << word << "' in: " << text, false;
  return true;
}

}  // namespace moekit::testing
