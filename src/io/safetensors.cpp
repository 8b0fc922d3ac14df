#include "io/safetensors.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include <moekit/status.hpp>

#include "io/json.hpp"
#include "text.hpp"

namespace moekit::io {
using text::concat;

static_assert(std::endian::native == std::endian::little, "the format is little-endian and views are not converted");

namespace {

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kLargestHeader = 100'000'000;  // the reference parser's limit
constexpr JsonLimits kHeaderLimits{.bytes = kLargestHeader, .depth = 8, .values = 20'000'000};

constexpr StoredType kTypes[] = {
    {"BOOL", 8, DType::boolean},  {"U8", 8, DType::u8},        {"I8", 8, DType::i8},
    {"F8_E5M2", 8, DType::e5m2},  {"F8_E4M3", 8, DType::e4m3}, {"F8_E8M0", 8, DType::e8m0},
    {"I16", 16, DType::i16},      {"U16", 16, DType::u16},     {"F16", 16, DType::f16},
    {"BF16", 16, DType::bf16},    {"I32", 32, DType::i32},     {"U32", 32, DType::u32},
    {"F32", 32, DType::f32},      {"F64", 64, DType::f64},     {"I64", 64, DType::i64},
    {"U64", 64, DType::u64},      {"F4", 4, std::nullopt},     {"F6_E2M3", 6, std::nullopt},
    {"F6_E3M2", 6, std::nullopt}, {"C64", 64, std::nullopt},
};

[[noreturn]] void bad(const std::string& file, std::string_view what) {
  throw Error(StatusCode::bad_file, concat("[checkpoint] ", file, ": ", what));
}

/// shape × bits in bytes; every product is checked, as if an extent of 0 were 1: strides are products of the others.
std::uint64_t tensor_bytes(const StoredTensor& tensor, const std::string& file) {
  std::int64_t bits = tensor.type->bits;
  bool empty = false;
  for (const std::int64_t extent : tensor.shape) {
    empty = empty || extent == 0;
    if (__builtin_mul_overflow(bits, extent == 0 ? 1 : extent, &bits))
      bad(file, concat("tensor ", tensor.name, ": size of shape ", shape_string(tensor.shape), " overflows"));
  }
  if (empty) return 0;
  if (bits % 8 != 0)
    bad(file, concat("tensor ", tensor.name, ": shape ", shape_string(tensor.shape), " of ", tensor.type->name,
                     " does not fill whole bytes"));
  return static_cast<std::uint64_t>(bits / 8);
}

void read_shape(const Fields& entry, StoredTensor& tensor) {
  const auto shape = entry.integers("shape");
  if (!shape) entry.fail("shape", "is missing");
  for (const std::int64_t extent : *shape)
    if (extent < 0) entry.fail("shape", concat("has a negative extent: ", shape_string(*shape)));
  tensor.shape = *shape;
}

StoredTensor read_entry(const Json::Member& member, const std::string& file) {
  const auto& [name, value] = member;
  const Fields entry(value, file, name);
  StoredTensor tensor;
  tensor.name = name;
  const auto type = entry.string("dtype");
  if (!type) entry.fail("dtype", "is missing");
  tensor.type = stored_type(*type);
  if (!tensor.type) entry.fail("dtype", concat("is \"", *type, "\", which is no type of safetensors"));
  read_shape(entry, tensor);
  const auto offsets = entry.integers("data_offsets");
  if (!offsets || offsets->size() != 2 || (*offsets)[0] < 0 || (*offsets)[1] < (*offsets)[0])
    entry.fail("data_offsets", "must be [begin, end] with 0 ≤ begin ≤ end");
  tensor.begin = static_cast<std::uint64_t>((*offsets)[0]);
  tensor.end = static_cast<std::uint64_t>((*offsets)[1]);
  const std::uint64_t bytes = tensor_bytes(tensor, file);
  if (bytes != tensor.end - tensor.begin)
    bad(file, concat("tensor ", name, ": ", tensor.type->name, " ", shape_string(tensor.shape), " takes ", bytes,
                     " bytes, but data_offsets give ", tensor.end - tensor.begin));
  return tensor;
}

void check_metadata(const Json& metadata, const std::string& file) {
  const Fields fields(metadata, file, "__metadata__");
  for (const Json::Member& member : *metadata.object())
    if (!member.second.string()) fields.fail(member.first, concat("must be a string, got ", member.second.kind()));
}

/// Offsets must cover the data section exactly once.
void check_layout(const std::vector<StoredTensor>& tensors, std::uint64_t data_size, const std::string& file) {
  std::vector<const StoredTensor*> order;
  order.reserve(tensors.size());
  for (const StoredTensor& tensor : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const StoredTensor* a, const StoredTensor* b) {
    return a->begin != b->begin ? a->begin < b->begin : a->end < b->end;
  });
  std::uint64_t covered = 0;
  const StoredTensor* last = nullptr;
  for (const StoredTensor* tensor : order) {
    if (tensor->begin < covered)
      bad(file, concat("tensors ", last->name, " and ", tensor->name, " overlap: data_offsets [", last->begin, ", ",
                       last->end, "] and [", tensor->begin, ", ", tensor->end, "]"));
    if (tensor->begin > covered)
      bad(file, concat("tensor ", tensor->name, " begins at data offset ", tensor->begin, ", but the ",
                       last ? concat("tensor before it (", last->name, ") ends") : std::string("first one must begin"),
                       " at ", covered, ": bytes that belong to no tensor"));
    if (tensor->end > data_size)
      bad(file, concat("tensor ", tensor->name, " is cut off: it ends at data offset ", tensor->end, ", the file has ",
                       data_size, " bytes of data; is the download complete?"));
    covered = tensor->end;
    if (tensor->end > tensor->begin || !last) last = tensor;
  }
  if (covered != data_size) bad(file, concat(data_size - covered, " bytes after the last tensor"));
}

std::uint64_t header_length(std::span<const std::byte> head, std::uint64_t file_size, const std::string& file) {
  if (file_size < kLengthBytes || head.size() < kLengthBytes)
    bad(file, concat("has ", file_size, " bytes, too few for a safetensors header"));
  std::uint64_t length = 0;
  std::memcpy(&length, head.data(), kLengthBytes);
  if (length > file_size - kLengthBytes)
    bad(file, concat("header length is ", length, ", but the file has only ", file_size - kLengthBytes,
                     " bytes after it; is it a safetensors file, and is the download complete?"));
  if (length > kLargestHeader) bad(file, concat("header length is ", length, ", at most ", kLargestHeader, " is read"));
  if (length > head.size() - kLengthBytes) bad(file, concat("header of ", length, " bytes is incomplete"));
  return length;
}

}  // namespace

const StoredType* stored_type(std::string_view name) {
  for (const StoredType& type : kTypes)
    if (name == type.name) return &type;
  return nullptr;
}

std::string shape_string(const std::vector<std::int64_t>& shape) {
  std::string out = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) out += concat(i ? ", " : "", shape[i]);
  return out + "]";
}

Tensor StoredTensor::view() const {
  const auto refuse = [this](std::string_view why) {
    throw Error(StatusCode::unsupported, concat("[checkpoint] ", *file, ": tensor ", name, " ", why));
  };
  if (!type->type) refuse(concat("is ", type->name, ", which is not read yet"));
  if (shape.size() > kMaxRank) refuse(concat("has ", shape.size(), " dimensions, at most ", kMaxRank, " are read"));
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  if (const auto size = static_cast<std::uintptr_t>(type->bits / 8); address % size != 0)
    refuse(concat("lies at file offset ", begin, ", which is no multiple of its ", size,
                  "-byte elements; write the file again with a current safetensors library"));
  Tensor tensor(static_cast<const void*>(data), *type->type, {});
  tensor.rank = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    tensor.shape[axis] = shape[axis];
    tensor.stride[axis] = stride;
    stride *= shape[axis];
  }
  return tensor;
}

std::vector<StoredTensor> parse_safetensors_header(std::span<const std::byte> head, std::uint64_t file_size,
                                                   const std::string& file) {
  const std::uint64_t length = header_length(head, file_size, file);
  const std::string_view text(reinterpret_cast<const char*>(head.data()) + kLengthBytes, length);
  if (text.empty() || text.front() != '{') bad(file, "header must begin with '{'; is it a safetensors file?");
  const Json header = parse_json(text, concat(file, " (header)"), kHeaderLimits);
  if (!header.object()) bad(file, concat("header must be an object, got ", header.kind()));
  std::vector<StoredTensor> tensors;
  tensors.reserve(header.object()->size());
  for (const Json::Member& member : *header.object()) {
    if (member.first == "__metadata__")
      check_metadata(member.second, file);
    else
      tensors.push_back(read_entry(member, file));
  }
  const std::uint64_t data_begin = kLengthBytes + length;
  check_layout(tensors, file_size - data_begin, file);
  for (StoredTensor& tensor : tensors) {
    tensor.begin += data_begin;
    tensor.end += data_begin;
  }
  std::sort(tensors.begin(), tensors.end(),
            [](const StoredTensor& a, const StoredTensor& b) { return a.name < b.name; });
  return tensors;
}

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path) {
  tensors_ = parse_safetensors_header({file_.data(), file_.size()}, file_.size(), path);
  for (StoredTensor& tensor : tensors_) {
    tensor.data = file_.data() + tensor.begin;
    tensor.file = &file_.path();
  }
}

const StoredTensor* SafetensorsFile::find(std::string_view name) const {
  const auto at = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                                   [](const StoredTensor& tensor, std::string_view key) { return tensor.name < key; });
  return at != tensors_.end() && at->name == name ? &*at : nullptr;
}

const StoredTensor& SafetensorsFile::get(std::string_view name) const {
  if (const StoredTensor* tensor = find(name)) return *tensor;
  bad(path(), concat("tensor ", name, " is missing"));
}

}  // namespace moekit::io
