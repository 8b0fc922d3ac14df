// Copies of the golden checkpoints with something changed.
#pragma once
#include <gtest/gtest.h>

#include <map>

#include "support/checkpoint_files.hpp"
#include "text.hpp"

namespace moekit::testing {

using Tensors = std::map<std::string, FileTensor>;

inline Tensors golden(const std::string& family) {
  Tensors out;
  for (FileTensor& tensor : read_tensors(data_path(text::concat("golden/", family, "/model.safetensors"))))
    out[tensor.name] = tensor;
  return out;
}
inline std::string golden_config(const std::string& family) {
  return read_text(data_path(text::concat("golden/", family, "/config.json")));
}
/// A copy of `text` in which `from`, which must be there, is `to`.
inline std::string edited(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}
inline void write_folder(const TempFolder& folder, const std::string& config, const Tensors& tensors) {
  std::vector<FileTensor> list;
  for (const auto& [name, tensor] : tensors) list.push_back(tensor);
  write_text(folder / "config.json", config);
  write_safetensors(folder / "model.safetensors", list);
}

}  // namespace moekit::testing
