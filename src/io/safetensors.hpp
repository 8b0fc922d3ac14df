// safetensors: {u64 header length, JSON header, tensor bytes}; one file, or a folder of shards with an index.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <moekit/tensor.hpp>

#include "io/mapped_file.hpp"

namespace moekit::io {

/// An element type of the format. `type` is absent for those that moekit knows by name and size only.
struct StoredType {
  const char* name;
  int bits;
  std::optional<DType> type;
};
const StoredType* stored_type(std::string_view name);  ///< null if the format has no such type

/// One entry of a header. begin and end are offsets into the file (not the data section).
struct StoredTensor {
  std::string name;
  const StoredType* type = nullptr;
  std::vector<std::int64_t> shape;  ///< any rank
  std::uint64_t begin = 0, end = 0;
  const std::byte* data = nullptr;
  const std::string* file = nullptr;  ///< path, for messages; as long as the file lives

  std::int64_t bytes() const { return static_cast<std::int64_t>(end - begin); }
  /// A dense view. Throws Error unsupported for types and ranks that moekit's tensors do not have, and for data that
  /// is not aligned to its element size.
  Tensor view() const;
};
std::string shape_string(const std::vector<std::int64_t>& shape);  ///< "[8, 64]"

/// Parses a header that is complete in memory; `file_size` bounds the offsets. Throws Error bad_file. Checked: length,
/// JSON, types, shape × type = bytes, offsets in range, no overlap, no hole, nothing after the last tensor, no name
/// twice, metadata are strings. The result is sorted by name; `data` and `file` are not set.
std::vector<StoredTensor> parse_safetensors_header(std::span<const std::byte> head, std::uint64_t file_size,
                                                   const std::string& file);

/// One mapped file.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  const std::string& path() const { return file_.path(); }
  const std::vector<StoredTensor>& tensors() const { return tensors_; }  ///< sorted by name
  const StoredTensor* find(std::string_view name) const;
  const StoredTensor& get(std::string_view name) const;  ///< throws Error bad_file if it is missing

 private:
  MappedFile file_;
  std::vector<StoredTensor> tensors_;
};

/// The tensors of a model folder: model.safetensors, or model.safetensors.index.json and its shards.
class ModelTensors {
 public:
  /// Throws Error: bad_file, or unsupported when the folder holds weights in another container (GGUF, PyTorch).
  explicit ModelTensors(const std::string& directory);

  const StoredTensor* find(std::string_view name) const;
  /// Tensors whose names begin with `prefix`, in order of name.
  std::span<const StoredTensor* const> with_prefix(std::string_view prefix) const;
  std::span<const StoredTensor* const> all() const { return sorted_; }
  const std::string& source() const { return source_; }  ///< the file or index that says what there is

 private:
  void open_index(const std::string& directory, const std::string& index);
  void sort_by_name();
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::vector<const StoredTensor*> sorted_;
  std::string source_;
};

}  // namespace moekit::io
