#include <gtest/gtest.h>

#include <map>
#include <set>

#include "io/safetensors.hpp"
#include "support/checkpoint_files.hpp"
#include "text.hpp"

namespace moekit::io {
namespace {
using testing::FileTensor;
using testing::TempFolder;
using testing::thrown_by;
using text::concat;

std::string header_of(const std::string& json) {
  const std::uint64_t length = json.size();
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  return out + json;
}
/// A tensor of bytes.
std::string entry(const char* name, int begin, int end) {
  return std::string("\"") + name + R"(":{"dtype":"U8","shape":[)" + std::to_string(end - begin) +
         R"(],"data_offsets":[)" + std::to_string(begin) + "," + std::to_string(end) + "]}";
}
/// Status of a header with `data` bytes behind it.
Status header_status(const std::string& bytes, std::uint64_t data = 0) {
  return thrown_by([&] {
    parse_safetensors_header({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()}, bytes.size() + data,
                             "m.safetensors");
  });
}
bool says(const Status& status, const std::string& part) {
  return status.code() == StatusCode::bad_file && status.message().find(part) != std::string::npos;
}

TEST(Safetensors, every_type_is_read_and_others_are_known_by_name) {
  const TempFolder folder;
  const std::map<std::string, DType> types = {
      {"BOOL", DType::boolean}, {"U8", DType::u8},        {"I8", DType::i8},   {"F8_E5M2", DType::e5m2},
      {"F8_E4M3", DType::e4m3}, {"F8_E8M0", DType::e8m0}, {"I16", DType::i16}, {"U16", DType::u16},
      {"F16", DType::f16},      {"BF16", DType::bf16},    {"I32", DType::i32}, {"U32", DType::u32},
      {"F32", DType::f32},      {"F64", DType::f64},      {"I64", DType::i64}, {"U64", DType::u64}};
  std::vector<FileTensor> tensors;
  for (const auto& [name, type] : types)
    tensors.push_back({name, name, {2, 4}, std::string(static_cast<std::size_t>(8 * bytes(type)), '\1')});
  for (const auto& [name, size] :
       std::map<std::string, std::size_t>{{"F4", 4}, {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"C64", 64}})
    tensors.push_back({name, name, {2, 4}, std::string(size, '\1')});
  testing::write_safetensors(folder / "m.safetensors", tensors);
  const SafetensorsFile file(folder / "m.safetensors");
  for (const auto& [name, type] : types) {
    const Tensor view = file.get(name).view();
    EXPECT_EQ(view.dtype, type);
    EXPECT_EQ(shape_string(view), "[2, 4]");
    EXPECT_EQ(view.stride[0], 4);
  }
  for (const char* name : {"F4", "F6_E2M3", "F6_E3M2", "C64"}) {
    const Status s = thrown_by([&] { file.get(name).view(); });
    EXPECT_EQ(s.code(), StatusCode::unsupported);
    EXPECT_NE(s.message().find(name), std::string::npos) << s.message();
  }
  EXPECT_TRUE(says(thrown_by([&] { file.get("nothing"); }), "tensor nothing is missing"));
}

TEST(Safetensors, header_cases_are_errors_without_a_crash_or_a_large_allocation) {
  const auto one = [](const std::string& entry) { return header_of(concat("{\"t\":", entry, "}")); };
  const std::string good = R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  EXPECT_TRUE(header_status(one(good), 8).ok());
  EXPECT_TRUE(header_status(header_of("{}"), 0).ok());

  std::string huge = header_of("{}");
  huge[7] = '\x80';  // 2^63
  EXPECT_TRUE(says(header_status(huge), "header length is 9223372036854775810"));
  EXPECT_TRUE(says(header_status(header_of("{}").substr(0, 9)), "header length is 2, but the file has only 1"));
  EXPECT_TRUE(says(header_status("1234567"), "7 bytes"));
  EXPECT_TRUE(says(header_status(""), "0 bytes"));
  std::string long_header = header_of("{}");
  long_header[3] = '\x10';  // 268 MB, in a file that is said to be large enough
  EXPECT_TRUE(says(header_status(long_header, std::uint64_t{1} << 40), "at most 100000000"));

  const std::vector<std::pair<std::string, std::string>> cases = {
      {header_of("not json"), "must begin with '{'"},
      {header_of("{\"t\":1"), "not valid JSON"},
      {header_of(R"({},"__metadata__":{})"), "not valid JSON"},  // an old writer's metadata-only file
      {one("7"), "must be an object, got an integer"},
      {one(R"({"shape":[2],"data_offsets":[0,8]})"), "\"t.dtype\" is missing"},
      {one(R"({"dtype":"F12_X","shape":[2],"data_offsets":[0,8]})"), "\"t.dtype\" is \"F12_X\""},
      {one(R"({"dtype":"F32","data_offsets":[0,8]})"), "\"t.shape\" is missing"},
      {one(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})"), "negative extent"},
      {one(R"({"dtype":"F32","shape":[2.5],"data_offsets":[0,8]})"), "list of integers"},
      {one(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})"), "0 ≤ begin ≤ end"},
      {one(R"({"dtype":"F32","shape":[2],"data_offsets":[0]})"), "[begin, end]"},
      {one(R"({"dtype":"F32","shape":[2],"data_offsets":[-8,0]})"), "[begin, end]"},
      {one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,18446744073709551615]})"), "list of integers"},
      {one(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})"), "takes 12 bytes, but data_offsets give 8"},
      {one(R"({"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]})"), "overflows"},
      {one(R"({"dtype":"F32","shape":[0,4611686018427387904,4],"data_offsets":[0,0]})"), "overflows"},
      {one(R"({"dtype":"F4","shape":[3],"data_offsets":[0,1]})"), "whole bytes"},
      {header_of(concat("{\"t\":", good, ",\"t\":", good, "}")), "\"t\" stands twice"},
      {header_of(concat("{\"__metadata__\":{\"a\":1},\"t\":", good, "}")), "\"__metadata__.a\" must be a string"},
      {header_of(concat("{\"__metadata__\":[],\"t\":", good, "}")), "must be an object"},
      {header_of(concat("{\"t\":", std::string(1'000'000, '['))), "nested deeper"},
  };
  for (const auto& [bytes, part] : cases) {
    const Status s = header_status(bytes, 8);
    EXPECT_TRUE(says(s, part)) << part << " | " << s.message();
    EXPECT_TRUE(says(s, "m.safetensors"));
  }
}

TEST(Safetensors, offsets_must_cover_the_data_once) {
  const auto two = [](int a0, int a1, int b0, int b1) {
    return header_of(concat("{", entry("a", a0, a1), ",", entry("b", b0, b1), "}"));
  };
  EXPECT_TRUE(header_status(two(0, 8, 8, 16), 16).ok());
  EXPECT_TRUE(header_status(two(8, 16, 0, 8), 16).ok()) << "order in the header is free";
  EXPECT_TRUE(says(header_status(two(0, 8, 4, 12), 12), "tensors a and b overlap"));
  EXPECT_TRUE(says(header_status(two(0, 8, 0, 8), 8), "tensors a and b overlap"));
  EXPECT_TRUE(says(header_status(two(0, 8, 12, 20), 20), "bytes that belong to no tensor"));
  EXPECT_TRUE(says(header_status(two(4, 12, 12, 20), 20), "the first one must begin at 0"));
  EXPECT_TRUE(says(header_status(two(0, 8, 8, 16), 20), "4 bytes after the last tensor"));
  EXPECT_TRUE(header_status(two(0, 8, 8, 8), 8).ok()) << "empty tensors take no room";
}

TEST(Safetensors, truncated_file_names_the_first_tensor_that_is_cut) {
  const std::string header =
      header_of(concat("{", entry("c", 16, 24), ",", entry("a", 0, 8), ",", entry("b", 8, 16), "}"));
  EXPECT_TRUE(says(header_status(header, 23), "tensor c is cut off"));
  EXPECT_TRUE(says(header_status(header, 15), "tensor b is cut off"));
  EXPECT_TRUE(says(header_status(header, 0), "tensor a is cut off"));
}

TEST(Safetensors, offsets_beyond_4_gib_are_exact) {
  const std::uint64_t big = (std::uint64_t{5} << 30) + 8;
  const std::string header = header_of(R"({"a":{"dtype":"U8","shape":[5368709128],"data_offsets":[0,5368709128]},)"
                                       R"("b":{"dtype":"F32","shape":[2],"data_offsets":[5368709128,5368709136]}})");
  const auto tensors = parse_safetensors_header({reinterpret_cast<const std::byte*>(header.data()), header.size()},
                                                header.size() + big + 8, "m");
  ASSERT_EQ(tensors.size(), 2u);
  EXPECT_EQ(tensors[1].begin, header.size() + big);
  EXPECT_TRUE(says(header_status(header, big), "tensor b is cut off"));
}

TEST(Safetensors, misaligned_tensor_is_refused_by_name) {
  const TempFolder folder;
  testing::write_safetensors(folder / "m.safetensors",
                             {{"a", "U8", {3}, "abc"}, testing::f32_tensor("b", {1}, {1.0f})});
  const SafetensorsFile file(folder / "m.safetensors");
  EXPECT_EQ(file.get("a").view().as<char>()[2], 'c');
  const Status s = thrown_by([&] { file.get("b").view(); });
  EXPECT_EQ(s.code(), StatusCode::unsupported);
  EXPECT_NE(s.message().find("tensor b lies at file offset"), std::string::npos) << s.message();
}

// ---- sharded ---------------------------------------------------------------------------------------------------

class Index : public ::testing::Test {
 protected:
  Index() {
    testing::write_safetensors(folder / "s1.safetensors",
                               {testing::f32_tensor("a", {2}, {1, 2}), testing::f32_tensor("c", {1}, {5})});
    testing::write_safetensors(folder / "s2.safetensors", {testing::f32_tensor("b", {2}, {3, 4})});
  }
  Status open(const std::string& index) {
    testing::write_text(folder / "model.safetensors.index.json", index);
    return thrown_by([&] { ModelTensors tensors(folder.path()); });
  }
  static std::string map(const std::string& entries) {
    return R"({"metadata":{"total_size":20},"weight_map":{)" + entries + "}}";
  }
  TempFolder folder;
};

TEST_F(Index, tensors_of_all_shards_are_found) {
  ASSERT_TRUE(open(map(R"("a":"s1.safetensors","c":"s1.safetensors","b":"s2.safetensors")")).ok());
  const ModelTensors tensors(folder.path());
  EXPECT_EQ(tensors.all().size(), 3u);
  EXPECT_EQ(tensors.find("b")->view().as<float>()[1], 4.0f);
  EXPECT_EQ(tensors.find("c")->view().as<float>()[0], 5.0f);
  EXPECT_EQ(tensors.find("d"), nullptr);
  EXPECT_EQ(tensors.with_prefix("b").size(), 1u);
}

TEST_F(Index, index_variants_are_distinct_errors) {
  testing::write_safetensors(folder / "s3.safetensors", {testing::f32_tensor("b", {2}, {3, 4})});
  const std::vector<std::pair<std::string, std::string>> cases = {
      {map(R"("a":"s9.safetensors")"), "shard s9.safetensors is not in the folder"},
      {map(R"("a":"s1.safetensors","c":"s2.safetensors")"), "tensor c to s2.safetensors, but it is in s1.safetensors"},
      {map(R"("a":"s1.safetensors","x":"s1.safetensors")"),
       "tensor x is not in its shard s1.safetensors nor in any other"},
      {map(R"("a":"s1.safetensors","a":"s2.safetensors")"), "\"a\" stands twice"},
      {map(R"("a":"s1.safetensors","b":"s2.safetensors","c":"s3.safetensors")"),
       "tensor c to s3.safetensors, but it is in s1"},
      {map(R"("b":"../s2.safetensors")"), "\"../s2.safetensors\", which is not a file name in this folder"},
      {map(R"("b":"/tmp/s2.safetensors")"), "\"/tmp/s2.safetensors\", which is not a file name"},
      {map(R"("b":"..")"), "\"..\", which is not a file name"},
      {map(R"("b":"")"), "\"\", which is not a file name"},
      {map(R"("b":7)"), "\"weight_map.b\" must be a string"},
      {map(""), "\"weight_map\" is empty"},
      {R"({"metadata":{}})", "\"weight_map\" is missing"},
      {R"({"weight_map":[]})", "\"weight_map\" must be an object"},
      {"[]", "must be an object"},
      {"{", "not valid JSON"},
  };
  std::set<std::string> messages;
  for (const auto& [index, part] : cases) {
    const Status s = open(index);
    EXPECT_TRUE(says(s, part)) << part << " | " << s.message();
    EXPECT_TRUE(says(s, "model.safetensors.index.json")) << s.message();
    messages.insert(s.message());
  }
  EXPECT_EQ(messages.size(), cases.size());
  EXPECT_TRUE(
      says(open(map(R"("a":"s1.safetensors","b":"s2.safetensors","c":"s1.safetensors","b2":"s3.safetensors")")), "b2"));
}

TEST_F(Index, tensor_in_two_shards_is_an_error) {
  testing::write_safetensors(folder / "s3.safetensors",
                             {testing::f32_tensor("b", {2}, {3, 4}), testing::f32_tensor("d", {1}, {3})});
  const Status s = open(map(R"("b":"s2.safetensors","d":"s3.safetensors")"));
  EXPECT_TRUE(says(s, "tensor b is in two shards")) << s.message();
}

TEST(ModelFolder, other_containers_are_refused_by_name) {
  const TempFolder folder;
  const auto open = [&] { return thrown_by([&] { ModelTensors tensors(folder.path()); }); };
  EXPECT_TRUE(says(open(), "holds neither model.safetensors nor model.safetensors.index.json"));
  testing::write_safetensors(folder / "other.safetensors", {});
  EXPECT_TRUE(says(open(), "there are: other.safetensors"));
  testing::write_text(folder / "pytorch_model.bin", "x");
  EXPECT_EQ(open().code(), StatusCode::unsupported);
  EXPECT_NE(open().message().find("PyTorch"), std::string::npos);
}

}  // namespace
}  // namespace moekit::io
