// Results of other people's modules beside a checkpoint: golden.safetensors in any of its three published layouts.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/safetensors.hpp"
#include "routing_spec.hpp"
#include "subject.hpp"

namespace moekit::cli {

/// Codes of one quantised row: what it was made of, codes, scales.
struct GoldenCodes {
  std::string name;  ///< "actq|slot0|mid"
  Tensor row;        ///< f32
  Tensor codes, scales;
  bool divisor_127 = false;
};

/// One module and one number of rows. Absent tensors are not in the file.
struct GoldenCase {
  std::string name;                    ///< "M37"
  Tensor in;                           ///< f32 [M, K]
  Tensor out, out_actq, out_actq_127;  ///< f32 or f64 [M, K]
  Tensor logits;                       ///< f32 [M, E]
  Tensor scores;                       ///< f32 [M, E]: the weight at chosen experts, 0 elsewhere
  Tensor ids, weights;                 ///< i64, f32 [M, k]
  std::vector<GoldenCodes> codes;
};

class Golden {
 public:
  /// Absent if the folder has no golden.safetensors. Throws Error(bad_file) on one that cannot be read.
  static std::optional<Golden> open(const std::string& directory);
  /// Cases of a layer in ascending number of rows; throws Error(bad_file) if tensors of a case are missing or do not
  /// fit the layer.
  std::vector<GoldenCase> cases(const SubjectLayer& layer) const;
  /// Expected ids and weights of a case; from its scores or its logits, in f64, where the file names no ids.
  RoutingRows routing(const GoldenCase& golden, const SubjectLayer& layer, const RouterTensors& tensors) const;

 private:
  std::shared_ptr<const io::SafetensorsFile> file_;
};

}  // namespace moekit::cli
