// What a folder's golden.safetensors says about one layer: cases, expected routing, codes of quantised rows.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "io/golden.hpp"
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

/// Absent if the folder has none. Throws Error(bad_file) on one that cannot be read.
std::optional<io::Golden> open_golden(const Subject& subject);
/// Cases of a layer in ascending number of rows; throws Error(bad_file) for tensors that do not fit the layer.
std::vector<io::GoldenCase> golden_cases(const io::Golden& golden, const SubjectLayer& layer);
/// Expected ids and weights of a case; from its scores or its logits, in f64, where the file names no ids.
RoutingRows golden_routing(const io::GoldenCase& golden, const SubjectLayer& layer, const RouterTensors& tensors);
std::vector<GoldenCodes> golden_codes(const io::Golden& golden, const io::GoldenCase& of);

}  // namespace moekit::cli
