#include <gtest/gtest.h>

#include "io/npy.hpp"
#include "support/checkpoint_files.hpp"

namespace moekit::io {
namespace {
using testing::TempFolder;
using testing::thrown_by;

/// A version 1 file with this dict, as NumPy lays it out.
std::string npy(std::string dict, const std::string& data) {
  while ((10 + dict.size() + 1) % 64 != 0) dict += ' ';
  dict += '\n';
  std::string head("\x93NUMPY\1\0", 8);
  head += static_cast<char>(dict.size() & 0xff);
  head += static_cast<char>(dict.size() >> 8);
  return head + dict + data;
}
std::string floats(std::initializer_list<float> values) {
  return {reinterpret_cast<const char*>(values.begin()), values.size() * sizeof(float)};
}
struct Npy : ::testing::Test {
  Status read(const std::string& bytes, NpyU16 u16 = NpyU16::refuse) {
    testing::write_text(folder / "x.npy", bytes);
    return thrown_by([&] { array = read_npy(folder / "x.npy", u16); });
  }
  TempFolder folder;
  NpyArray array;
};

TEST_F(Npy, reads_what_numpy_writes) {
  ASSERT_TRUE(
      read(npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", floats({1, 2, 3, 4, 5, 6}))).ok());
  EXPECT_EQ(shape_string(array.tensor), "[2, 3]");
  EXPECT_EQ((array.tensor.at<float>(1, 2)), 6.0f);
  ASSERT_TRUE(read(npy("{'descr': '<f4', 'fortran_order': True, 'shape': (2,), }", floats({1, 2}))).ok());
  EXPECT_EQ(shape_string(array.tensor), "[2]");
  ASSERT_TRUE(
      read(npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1, 1), }", std::string("\5\0\0\0\0\0\0\0", 8)))
          .ok());
  EXPECT_EQ((array.tensor.at<std::int64_t>(0, 0)), 5);
  ASSERT_TRUE(read(npy("{'descr': '<f2', 'fortran_order': False, 'shape': (0, 4), }", "")).ok());
  EXPECT_EQ(array.tensor.dtype, DType::f16);
  ASSERT_TRUE(read(npy("{'descr': '<f4', 'fortran_order': False, 'shape': (), }", floats({3}))).ok());
  EXPECT_EQ(array.tensor.as<float>()[0], 3.0f);
}

TEST_F(Npy, u16_is_bf16_only_on_request) {
  const std::string file = npy("{'descr': '<u2', 'fortran_order': False, 'shape': (1,), }", std::string("\x80\x3f", 2));
  EXPECT_EQ(read(file).code(), StatusCode::unsupported);
  ASSERT_TRUE(read(file, NpyU16::as_bf16).ok());
  EXPECT_EQ(array.tensor.dtype, DType::bf16);
}

TEST_F(Npy, refuses_with_a_reason) {
  const std::string four = floats({1, 2, 3, 4});
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"", "is no .npy file"},
      {"PK\3\4aaaaaaaaaaaaaaa", "is no .npy file"},
      {std::string("\x93NUMPY\1\0\xff\xff", 10), "header length is 65535"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (5,), }", four),
       "needs 20 bytes of data, the file has 16"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }", four),
       "needs 12 bytes of data, the file has 16"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 4), }", four), "overflows"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (0, 4611686018427387904, 4), }", ""), "overflows"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,), }", four), "beyond 63 bits"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-4,), }", four), "whole numbers"},
      {npy("{'descr': '<f4', 'fortran_order': False, }", four), "must have descr"},
      {npy("{'descr': '<f4', 'descr': '<f4', 'shape': (4,), }", four), "stands twice"},
      {npy("{'descr': '<f4', 'fortran_order': Maybe, 'shape': (4,), }", four), "True or False"},
      {npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4,), } junk", four), "after the dict"},
      {npy("{'descr': '<f4", four), "without an end"},
  };
  for (const auto& [file, part] : bad) {
    const Status s = read(file);
    EXPECT_EQ(s.code(), StatusCode::bad_file) << part;
    EXPECT_NE(s.message().find(part), std::string::npos) << s.message();
  }
  for (const auto& [dict, part] : std::vector<std::pair<std::string, std::string>>{
           {"{'descr': '>f4', 'fortran_order': False, 'shape': (4,), }", "big-endian"},
           {"{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }", "elements are <f8"},
           {"{'descr': '<f4', 'fortran_order': True, 'shape': (2, 2), }", "Fortran order"},
           {"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (4,), }", "structured"},
           {"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 1, 1, 4), }", "5 dimensions"}}) {
    const Status s = read(npy(dict, four));
    EXPECT_EQ(s.code(), StatusCode::unsupported) << part;
    EXPECT_NE(s.message().find(part), std::string::npos) << s.message();
    EXPECT_FALSE(s.hint().empty());
  }
}

TEST_F(Npy, written_arrays_are_read_back) {
  std::vector<float> values = {1, 2, 3, 4, 5, 6, 7, 8};
  const Tensor strided = Tensor::strided(values.data(), DType::f32, {2, 3}, {4, 1});
  write_npy(folder / "y.npy", strided);
  const NpyArray back = read_npy(folder / "y.npy");
  EXPECT_EQ(shape_string(back.tensor), "[2, 3]");
  EXPECT_EQ((back.tensor.at<float>(1, 0)), 5.0f);
  EXPECT_EQ((back.tensor.at<float>(1, 2)), 7.0f);
  write_npy(folder / "t.npy", strided.transposed());
  EXPECT_EQ((read_npy(folder / "t.npy").tensor.at<float>(2, 1)), 7.0f);
  std::vector<std::uint16_t> half = {0x3f80, 0x4000};
  write_npy(folder / "b.npy", Tensor(half.data(), DType::bf16, {2}));
  EXPECT_EQ(read_npy(folder / "b.npy").tensor.as<float>()[1], 2.0f);
  EXPECT_EQ(thrown_by([&] { write_npy(folder / "no/such/y.npy", strided); }).code(), StatusCode::bad_file);
  const std::string text = testing::read_text(folder / "y.npy");
  EXPECT_EQ((text.size() - 24) % 64, 0u) << "data begins at a multiple of 64";
  EXPECT_NE(text.find("'shape': (2, 3), }"), std::string::npos);
}

}  // namespace
}  // namespace moekit::io
