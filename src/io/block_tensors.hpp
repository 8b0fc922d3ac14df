// The tensors below one MoE block: which names are there, which of them have been asked for, and what is missing.
#pragma once
#include <initializer_list>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "io/families.hpp"
#include "io/safetensors.hpp"

namespace moekit::io {

class BlockTensors {
 public:
  /// Finds out which spelling of the block's name is in the file, and whether its experts are apart or in one tensor.
  /// Throws Error bad_file that lists what stands there when the experts' names are not those of the family.
  BlockTensors(const ModelTensors& tensors, const Family& family, std::int64_t layer);

  const std::string& module() const { return module_; }
  bool per_expert() const { return per_expert_; }
  std::string full_name(std::string_view name) const { return prefix_ + std::string(name); }
  bool has(const std::string& name) const { return tensors_.find(name) != nullptr; }

  /// The tensor of that name; throws Error bad_file if it is missing, with what stands beside it.
  /// @param expert  whose it is, for the message; -1 = nobody's
  const StoredTensor& need(const std::string& name, std::int64_t expert = -1);
  /// A dense view; throws Error bad_file that names both shapes if it has another one.
  Tensor shaped(const StoredTensor& tensor, std::initializer_list<std::int64_t> shape, std::string_view meaning) const;
  /// need and shaped, for a tensor that is never quantised.
  Tensor float_tensor(const std::string& name, std::initializer_list<std::int64_t> shape, std::string_view meaning);
  /// A tensor of the block that nobody asked for would change the result if somebody did: throws Error bad_file.
  void refuse_leftovers() const;
  std::int64_t bytes_needed() const { return bytes_; }

  [[noreturn]] void bad(std::string_view what, std::string hint = {}) const;
  [[noreturn]] void not_read(std::string_view what) const;

 private:
  void choose(const Family& family);
  bool has_numbered_experts() const;
  [[noreturn]] void no_experts() const;
  [[noreturn]] void missing(const std::string& name, std::int64_t expert) const;

  const ModelTensors& tensors_;
  const Family& family_;
  std::int64_t layer_;
  std::string prefix_, module_;
  bool per_expert_ = false;
  std::unordered_set<const StoredTensor*> used_;
  std::int64_t bytes_ = 0;
};

/// F32, BF16 or F16: the types that weights have when they are not quantised.
bool is_weight_float(const StoredTensor& tensor);
/// "model.layers.#.mlp" with a number for the mark.
std::string replace_mark(std::string_view pattern, char mark, std::int64_t number);

}  // namespace moekit::io
