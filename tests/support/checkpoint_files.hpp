// Writes small safetensors files and folders for tests, right or wrong on purpose.
#pragma once
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <moekit/status.hpp>

#include "io/safetensors.hpp"

namespace moekit::testing {

/// A folder that goes away with the object.
class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "moekit_test_XXXXXX").string();
    if (!::mkdtemp(pattern.data())) throw std::runtime_error("mkdtemp failed");
    path_ = pattern;
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline void write_text(const std::string& path, std::string_view text) {
  std::ofstream(path, std::ios::binary).write(text.data(), static_cast<std::streamsize>(text.size()));
}
inline std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

/// One tensor to be written.
struct FileTensor {
  std::string name, dtype;
  std::vector<std::int64_t> shape;
  std::string data;
};

inline FileTensor f32_tensor(std::string name, std::vector<std::int64_t> shape, const std::vector<float>& values) {
  return {std::move(name), "F32", std::move(shape),
          std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float))};
}

/// `header` verbatim (padded to 8 bytes), then `data`.
inline void write_raw(const std::string& path, std::string header, const std::string& data) {
  while (header.size() % 8 != 0) header += ' ';
  const std::uint64_t length = header.size();
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  write_text(path, out + header + data);
}

inline void write_safetensors(const std::string& path, const std::vector<FileTensor>& tensors) {
  std::string header = "{", data;
  for (const FileTensor& tensor : tensors) {
    header += header.size() > 1 ? ",\"" : "\"";
    header += tensor.name + R"(":{"dtype":")" + tensor.dtype + R"(","shape":)" + io::shape_string(tensor.shape) +
              R"(,"data_offsets":[)" + std::to_string(data.size()) + ",";
    data += tensor.data;
    header += std::to_string(data.size()) + "]}";
  }
  write_raw(path, header + "}", data);
}

/// All tensors of a file, in the order of their data.
inline std::vector<FileTensor> read_tensors(const std::string& path) {
  const io::SafetensorsFile file(path);
  std::vector<const io::StoredTensor*> order;
  for (const io::StoredTensor& tensor : file.tensors()) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) { return a->begin < b->begin; });
  std::vector<FileTensor> out;
  for (const io::StoredTensor* tensor : order)
    out.push_back(
        {tensor->name, tensor->type->name, tensor->shape,
         std::string(reinterpret_cast<const char*>(tensor->data), static_cast<std::size_t>(tensor->bytes()))});
  return out;
}

/// What `action` throws; a status that is ok if it does not throw.
template <class Action>
Status thrown_by(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.status();
  }
  return {};
}

inline std::string data_path(const std::string& name) { return std::string(MOEKIT_SOURCE_DIR) + "/tests/data/" + name; }

}  // namespace moekit::testing
