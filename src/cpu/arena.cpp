#include "cpu/arena.hpp"

#include <sys/mman.h>

#include <atomic>
#include <cstdint>

#include <moekit/status.hpp>

#include "text.hpp"

namespace moekit::cpu {
namespace {

constexpr std::size_t kHuge = std::size_t{2} << 20;
std::atomic<std::size_t> live_bytes{0};

std::size_t rounded(std::size_t bytes) { return (bytes + kHuge - 1) / kHuge * kHuge; }

[[noreturn]] void fail(std::size_t bytes) {
  throw Error(StatusCode::out_of_memory, text::concat("[arena] the system refused ", bytes, " bytes"),
              "free memory, or use fewer experts or narrower weights");
}

}  // namespace

Arena::Arena(std::size_t bytes) {
  if (bytes == 0) return;
  if (bytes > SIZE_MAX / 4) fail(bytes);
  const std::size_t length = rounded(bytes);
  void* mapping = mmap(nullptr, length + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) fail(bytes);
  auto* begin = static_cast<std::byte*>(mapping);
  const std::size_t head = rounded(reinterpret_cast<std::uintptr_t>(begin)) - reinterpret_cast<std::uintptr_t>(begin);
  if (head > 0) munmap(begin, head);
  if (kHuge - head > 0) munmap(begin + head + length, kHuge - head);
  data_ = begin + head;
  size_ = bytes;
  madvise(data_, length, MADV_HUGEPAGE);  // a wish: small pages are slower, not wrong
  live_bytes.fetch_add(size_, std::memory_order_relaxed);
}

Arena::~Arena() {
  if (!data_) return;
  munmap(data_, rounded(size_));
  live_bytes.fetch_sub(size_, std::memory_order_relaxed);
}

std::size_t arena_bytes() { return live_bytes.load(std::memory_order_relaxed); }

}  // namespace moekit::cpu
