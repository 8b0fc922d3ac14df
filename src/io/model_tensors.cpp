#include <algorithm>
#include <filesystem>

#include <moekit/status.hpp>

#include "io/json.hpp"
#include "io/safetensors.hpp"
#include "text.hpp"

namespace moekit::io {
using text::concat;
namespace fs = std::filesystem;

namespace {

constexpr JsonLimits kIndexLimits{.bytes = std::size_t{256} << 20, .depth = 8, .values = 8'000'000};

[[noreturn]] void bad(const std::string& file, std::string_view what) {
  throw Error(StatusCode::bad_file, concat("[checkpoint] ", file, ": ", what));
}

bool exists(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

/// Says what the folder holds instead of safetensors.
[[noreturn]] void no_weights(const std::string& directory) {
  std::error_code problem;
  std::string others;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, problem)) {
    const std::string name = entry.path().filename().string();
    const std::string extension = entry.path().extension().string();
    if (extension == ".gguf")
      throw Error(StatusCode::unsupported,
                  concat("[checkpoint] ", directory, "/", name, ": GGUF files are not read yet"),
                  "use the safetensors form of the model");
    if (extension == ".bin" || extension == ".pt" || extension == ".pth")
      throw Error(StatusCode::unsupported,
                  concat("[checkpoint] ", directory, "/", name, ": PyTorch files are not read"),
                  "convert the model to safetensors");
    if (extension == ".safetensors" && others.size() < 200) others += (others.empty() ? "" : ", ") + name;
  }
  if (problem) bad(directory, concat("cannot be listed: ", problem.message()));
  bad(directory, concat("holds neither model.safetensors nor model.safetensors.index.json",
                        others.empty() ? "" : "; there are: ", others));
}

/// A shard is a file beside the index: nothing that could lead elsewhere.
void check_shard_name(const std::string& shard, const std::string& tensor, const std::string& index) {
  if (shard.empty() || shard == "." || shard == ".." ||
      shard.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos)
    bad(index,
        concat("weight_map sends tensor ", tensor, " to \"", shard, "\", which is not a file name in this folder"));
}

}  // namespace

ModelTensors::ModelTensors(const std::string& directory) {
  const std::string single = directory + "/model.safetensors";
  const std::string index = directory + "/model.safetensors.index.json";
  if (exists(single)) {
    source_ = single;
    files_.push_back(std::make_unique<SafetensorsFile>(single));
  } else if (exists(index)) {
    source_ = index;
    open_index(directory, index);
  } else {
    no_weights(directory);
  }
  sort_by_name();
}

void ModelTensors::open_index(const std::string& directory, const std::string& index) {
  const Json root = read_json(index, kIndexLimits);
  const auto map = Fields(root, index).fields("weight_map");
  if (!map) bad(index, "\"weight_map\" is missing");
  const Json::Object& entries = *map->json().object();
  if (entries.empty()) bad(index, "\"weight_map\" is empty");

  std::vector<std::string> shards;
  for (const auto& [tensor, shard] : entries) {
    if (!shard.string()) map->fail(tensor, concat("must be a string, got ", shard.kind()));
    check_shard_name(*shard.string(), tensor, index);
    shards.push_back(*shard.string());
  }
  std::sort(shards.begin(), shards.end());
  shards.erase(std::unique(shards.begin(), shards.end()), shards.end());
  for (const std::string& shard : shards) {
    const std::string path = concat(directory, "/", shard);
    if (!exists(path)) bad(index, concat("shard ", shard, " is not in the folder; is the download complete?"));
    files_.push_back(std::make_unique<SafetensorsFile>(path));
  }
  for (const auto& [tensor, shard] : entries) {
    const auto at = std::lower_bound(shards.begin(), shards.end(), *shard.string()) - shards.begin();
    if (files_[static_cast<std::size_t>(at)]->find(tensor)) continue;
    for (std::size_t other = 0; other < files_.size(); ++other)
      if (files_[other]->find(tensor))
        bad(index,
            concat("weight_map sends tensor ", tensor, " to ", *shard.string(), ", but it is in ", shards[other]));
    bad(index, concat("tensor ", tensor, " is not in its shard ", *shard.string(), " nor in any other"));
  }
}

void ModelTensors::sort_by_name() {
  for (const auto& file : files_)
    for (const StoredTensor& tensor : file->tensors()) sorted_.push_back(&tensor);
  std::sort(sorted_.begin(), sorted_.end(),
            [](const StoredTensor* a, const StoredTensor* b) { return a->name < b->name; });
  const auto twice = std::adjacent_find(
      sorted_.begin(), sorted_.end(), [](const StoredTensor* a, const StoredTensor* b) { return a->name == b->name; });
  if (twice != sorted_.end())
    bad(source_, concat("tensor ", (*twice)->name, " is in two shards, ", *(*twice)->file, " and ", *twice[1]->file));
}

const StoredTensor* ModelTensors::find(std::string_view name) const {
  const auto at = std::lower_bound(sorted_.begin(), sorted_.end(), name,
                                   [](const StoredTensor* tensor, std::string_view key) { return tensor->name < key; });
  return at != sorted_.end() && (*at)->name == name ? *at : nullptr;
}

std::span<const StoredTensor* const> ModelTensors::with_prefix(std::string_view prefix) const {
  const auto begin =
      std::lower_bound(sorted_.begin(), sorted_.end(), prefix,
                       [](const StoredTensor* tensor, std::string_view key) { return tensor->name < key; });
  auto end = begin;
  while (end != sorted_.end() && (*end)->name.starts_with(prefix)) ++end;
  return {begin, end};
}

}  // namespace moekit::io
