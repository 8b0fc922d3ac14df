// Cache sizes: the kernel's texts, a folder of them, and which of two answers counts.
#include <gtest/gtest.h>

#include "cpu/caches.hpp"
#include "support/checkpoint_files.hpp"

namespace moekit::cpu {
namespace {
using testing::TempFolder;
using testing::write_text;

TEST(caches, sizes_are_read_with_their_unit_and_nothing_else_is) {
  EXPECT_EQ(parse_cache_size("32768K\n"), 32 << 20);
  EXPECT_EQ(parse_cache_size("512K"), 512 << 10);
  EXPECT_EQ(parse_cache_size("1M\n"), 1 << 20);
  EXPECT_EQ(parse_cache_size("2G"), std::int64_t{2} << 30);
  EXPECT_EQ(parse_cache_size("4096"), 4096);
  for (const char* text :
       {"", "\n", "K", "-1K", "1.5M", "32768KB", "x", "0x20K", "99999999999999999999", "9999999999G"})
    EXPECT_EQ(parse_cache_size(text), 0) << text;
}

TEST(caches, of_a_folder_are_those_of_data) {
  const TempFolder folder;
  const auto add = [&](const std::string& index, const char* level, const char* type, const char* size) {
    std::filesystem::create_directory(folder / index);
    write_text(folder / (index + "/level"), level);
    write_text(folder / (index + "/type"), type);
    write_text(folder / (index + "/size"), size);
  };
  add("index0", "1\n", "Data\n", "48K\n");
  add("index1", "1\n", "Instruction\n", "64K\n");
  add("index2", "2\n", "Unified\n", "2048K\n");
  add("index3", "3\n", "Unified\n", "32768K\n");
  add("index4", "4\n", "Unified\n", "1G\n");
  const Caches found = caches_of_folder(folder.path());
  EXPECT_EQ(found.l1, 48 << 10);
  EXPECT_EQ(found.l2, 2 << 20);
  EXPECT_EQ(found.l3, 32 << 20);
  const Caches none = caches_of_folder(folder / "nowhere");
  EXPECT_EQ(none.l1 + none.l2 + none.l3, 0);
}

TEST(caches, the_smaller_of_two_answers_counts_and_the_guess_where_there_is_none) {
  const Caches both = smaller_of({32 << 10, 512 << 10, 32 << 20}, {32 << 10, 1 << 20, 256 << 20});
  EXPECT_EQ(both.l2, 512 << 10);
  EXPECT_EQ(both.l3, 32 << 20);
  EXPECT_EQ(smaller_of({0, 0, 0}, {0, 0, 256 << 20}).l3, 256 << 20);
  EXPECT_EQ(smaller_of({0, 0, 16 << 20}, {0, 0, 0}).l3, 16 << 20);
  EXPECT_EQ(smaller_of({0, 0, 0}, {0, 0, 0}).l1, Caches{}.l1);
}

TEST(caches, of_this_machine_are_not_above_what_the_kernel_says_of_one_domain) {
  const Caches said = caches_of_folder("/sys/devices/system/cpu/cpu0/cache");
  if (said.l3 == 0) GTEST_SKIP() << "the kernel says nothing here";
  EXPECT_LE(caches().l3, said.l3);
  EXPECT_GT(caches().l3, 0);
}

}  // namespace
}  // namespace moekit::cpu
