// forward allocates nothing: every heap entry of the process is counted while it runs.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>

#include "support/layers.hpp"

namespace {
std::atomic<bool> counting{false};
std::atomic<long> allocations{0};
void count() {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1, std::memory_order_relaxed);
}
}  // namespace

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
// The sanitizers own malloc: count the C++ entries only. Out of line: gcc takes an inlined pair for a mismatch.
[[gnu::noinline]] void* operator new(std::size_t size) {
  count();
  return std::malloc(size);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
#else
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);
void* malloc(std::size_t size) {
  count();
  return __libc_malloc(size);
}
void* calloc(std::size_t n, std::size_t size) {
  count();
  return __libc_calloc(n, size);
}
void* realloc(void* memory, std::size_t size) {
  count();
  return __libc_realloc(memory, size);
}
void* memalign(std::size_t alignment, std::size_t size) {
  count();
  return __libc_memalign(alignment, size);
}
void* aligned_alloc(std::size_t alignment, std::size_t size) {
  count();
  return __libc_memalign(alignment, size);
}
int posix_memalign(void** out, std::size_t alignment, std::size_t size) {
  count();
  *out = __libc_memalign(alignment, size);
  return 0;
}
}
#endif

namespace moekit {
namespace {
using testing::Guarded;
using testing::LayerValues;
using testing::Random;

TEST(no_allocation, the_hook_sees_an_allocation) {
  counting = true;
  std::free(std::malloc(16));
  auto* object = new int(1);
  delete object;
  counting = false;
  EXPECT_GE(allocations.exchange(0), 1);
}

TEST(no_allocation, forward_allocates_nothing_and_touches_nothing_beyond_its_workspace) {
  for (const char* scheme : {"f32", "bf16", "f16"})
    for (const ExpertsEntry& entry : experts_implementations()) {
      LayerConfig config = testing::small_config(std::string_view(scheme) == "f32"   ? DType::f32
                                                 : std::string_view(scheme) == "f16" ? DType::f16
                                                                                     : DType::bf16);
      if (!testing::runs_here(entry, config.dtype)) continue;
      config.shared.intermediate = 24;
      PlanOptions options;
      options.experts = std::string(entry.name);
      options.max_tokens = 64;
      const Plan plan = Plan::create({}, config, options);
      const Layer layer(plan, Weights::pack(plan, LayerValues(config).source()));
      for (std::int64_t M : {1, 2, 33, 64}) {
        Random random(1);
        std::vector<std::byte> x = testing::normal_values(random, config.dtype, M * config.hidden);
        Guarded workspace(plan.workspace_bytes(M)), output(x.size());
        LayerInput in;
        in.hidden = Tensor(x.data(), config.dtype, {M, config.hidden});
        LayerOutput out;
        out.tensor = Tensor(output.data(), config.dtype, {M, config.hidden});
        CallContext context;
        context.workspace = workspace.bytes();
        ASSERT_TRUE(layer.forward(in, out, context).ok());  // the pool may start its threads once
        allocations = 0;
        counting = true;
        const Status status = layer.forward(in, out, context);
        counting = false;
        ASSERT_TRUE(status.ok()) << status.to_string();
        EXPECT_EQ(allocations.load(), 0) << entry.name << " " << scheme << " M=" << M;
        EXPECT_TRUE(workspace.intact() && output.intact()) << entry.name << " " << scheme << " M=" << M;
      }
    }
}

}  // namespace
}  // namespace moekit
