// ISA detection and arenas.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <utility>

#include "cpu/arena.hpp"
#include "cpu/isa.hpp"

namespace moekit::cpu {
namespace {

TEST(CpuIsa, names_round_trip_and_an_unknown_one_lists_them) {
  for (Isa isa : {Isa::portable, Isa::avx2, Isa::avx512, Isa::avx512_bf16}) EXPECT_EQ(isa_from_name(name(isa)), isa);
  EXPECT_EQ(isa_from_name(""), Isa::avx512_bf16);
  try {
    (void)isa_from_name("avx9");
    FAIL();
  } catch (const Error& error) {
    const std::string text = error.status().to_string();
    for (const char* part : {"avx9", "portable", "avx2", "avx512", "avx512_bf16"})
      EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

TEST(CpuIsa, the_compiler_agrees_with_detection) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  EXPECT_EQ(detected_isa() >= Isa::avx2, avx2);
  EXPECT_EQ(detected_isa() >= Isa::avx512,
            avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512vnni"));
#else
  EXPECT_EQ(detected_isa(), Isa::portable);
#endif
}

TEST(CpuIsa, a_unit_beyond_the_machine_is_refused_with_a_reason) {
  EXPECT_TRUE(can_run(Isa::portable).ok());
  EXPECT_TRUE(can_run(usable_isa()).ok());
  if (usable_isa() < Isa::avx512_bf16) {
    EXPECT_FALSE(can_run(Isa::avx512_bf16).reason().empty());
  }
}

TEST(CpuArena, aligned_zero_filled_and_counted) {
  const std::size_t before = arena_bytes();
  {
    Arena arena((std::size_t{5} << 20) + 3);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(arena.data()) % (std::size_t{2} << 20), 0u);
    EXPECT_EQ(arena_bytes(), before + arena.size());
    for (std::size_t i = 0; i < arena.size(); i += 4093) ASSERT_EQ(std::to_integer<int>(arena.data()[i]), 0);
    std::memset(arena.data(), 0xff, arena.size());
    Arena other = std::move(arena);
    EXPECT_EQ(arena.data(), nullptr);
    EXPECT_EQ(other.size(), (std::size_t{5} << 20) + 3);
  }
  EXPECT_EQ(arena_bytes(), before);
  EXPECT_EQ(Arena(0).data(), nullptr);
}

TEST(CpuArena, a_size_that_cannot_be_had_is_an_error_that_names_it) {
  const std::size_t bytes = std::size_t{1} << 62;
  try {
    Arena arena(bytes);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::out_of_memory);
    EXPECT_NE(std::string(error.what()).find(std::to_string(bytes)), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace moekit::cpu
