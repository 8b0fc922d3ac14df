// forward() does not allocate when the context brings a workspace: the whole program's operator new and malloc count.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "support/kit_doubles.hpp"

namespace {
std::atomic<long> g_allocations{0};
std::atomic<bool> g_counting{false};

void* count_malloc(std::size_t size) {
  if (g_counting) ++g_allocations;
  return std::malloc(size ? size : 1);
}
void* count_aligned(std::size_t size, std::align_val_t align) {
  if (g_counting) ++g_allocations;
  const auto to = static_cast<std::size_t>(align);
  return std::aligned_alloc(to, (size + to - 1) / to * to);
}
}  // namespace

void* operator new(std::size_t size) { return count_malloc(size); }
void* operator new[](std::size_t size) { return count_malloc(size); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return count_malloc(size); }
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept { return count_malloc(size); }
void* operator new(std::size_t size, std::align_val_t align) { return count_aligned(size, align); }
void* operator new[](std::size_t size, std::align_val_t align) { return count_aligned(size, align); }
void* operator new(std::size_t size, std::align_val_t align, const std::nothrow_t&) noexcept {
  return count_aligned(size, align);
}
void* operator new[](std::size_t size, std::align_val_t align, const std::nothrow_t&) noexcept {
  return count_aligned(size, align);
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }

namespace moekit::testing {
namespace {

class Doubling final : public SharedExperts {
 public:
  Status apply(const Tensor& hidden, const Tensor& output, const CallContext&) const override {
    std::memcpy(output.data, hidden.data, static_cast<std::size_t>(hidden.numel()) * 4);
    return {};
  }
};

template <class Call>
long allocations(Call&& call) {
  g_allocations = 0;
  g_counting = true;
  call();
  g_counting = false;
  return g_allocations;
}

TEST(kit_allocation, the_hook_counts) {
  EXPECT_EQ(allocations([] { delete new int(3); }), 1);
  EXPECT_GE(allocations([] {
              std::vector<float> v(100);
              v[3] = 1;
              asm volatile("" ::"r"(v.data()) : "memory");
            }),
            1);
}

TEST(kit_allocation, forward_does_not_allocate_when_the_context_brings_a_workspace) {
  for (const char* dispatcher : {"single_rank", "single_rank_batched", "async"})
    for (std::int64_t chunk : {0, 5})
      for (bool quantise : {false, true})
        for (DType id_type : {DType::i32, DType::i64}) {
          Case c(23, 320, 2, 4);
          const bool batched = dispatcher == std::string("single_rank_batched");
          if (batched) c.problem.format = ActivationFormat::batched_experts, c.problem.batched = BatchedShape{64, 1};
          AffineOptions options{.reduce = batched ? WeightAndReduce::delegate() : WeightAndReduce::contiguous(),
                                .batched = batched};
          if (quantise) options.input = {.dtype = DType::i8, .granularity = {1, -1}};
          std::shared_ptr<PrepareFinalize> engine =
              make_dispatcher(batched ? dispatcher : "single_rank", {.batched = c.problem.batched});
          if (dispatcher == std::string("async")) engine = std::make_shared<AsyncEngine>(engine);
          const ModularKernel kernel(engine, std::make_shared<AffineExperts>(options), std::make_shared<Doubling>(),
                                     c.problem, {.chunk = chunk});
          PoisonedBytes memory(kernel.workspace_bytes(c.M));
          std::vector<std::int64_t> wide(c.ids.begin(), c.ids.end());
          KernelInput in = c.input();
          if (id_type == DType::i64) in.routing.ids = Tensor(wide.data(), DType::i64, {c.M, c.k});
          KernelOutput out = c.result();
          SerialExecutor serial(3);
          SingleUbatch ubatch;
          const CallContext context{.stream = {.executor = &serial}, .workspace = memory.bytes(), .ubatch = &ubatch};
          Status status;
          EXPECT_EQ(allocations([&] { status = kernel.forward(in, out, context); }), 0)
              << dispatcher << " chunk " << chunk;
          EXPECT_TRUE(status.ok()) << status.to_string();
        }
}

TEST(kit_allocation, a_warm_pool_does_not_allocate) {
  Case c(23, 32, 2, 4);
  const auto pool = std::make_shared<WorkspacePool>();
  const ModularKernel kernel(make_dispatcher("single_rank"), std::make_shared<AffineExperts>(), nullptr, c.problem,
                             {.pool = pool});
  KernelOutput out = c.result();
  ASSERT_TRUE(kernel.forward(c.input(), out, {}).ok());
  const KernelInput in = c.input();
  EXPECT_EQ(allocations([&] { (void)kernel.forward(in, out, {}); }), 0);
}

}  // namespace
}  // namespace moekit::testing
