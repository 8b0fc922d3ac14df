// Shape strings and files of them: how tools, tests and benchmarks name a layer.
//
//   e128k8h2048i768            E, k, K (hidden), I (intermediate); gated, silu, softmax router
//   e128k8h2048i768:int8       … with a weight scheme; without one bf16
//   e128k8h2048i768:bf16@tokens=1,16,512,threads=2,routing=hot:2,0.5
//                              … with settings: the long flags of `moekit bench` without their dashes. A piece between
//                              commas that has no '=' belongs to the value before it.
#pragma once
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <moekit/config.hpp>

namespace moekit {

struct ShapeString {
  LayerConfig config;                           ///< sizes, schemes, dtype; k > 64 or E > 2048: external routing
  std::map<std::string, std::string> settings;  ///< "tokens" → "1,16,512"; weights and activations are in config, too
};
/// Failures name the piece that is wrong and what was expected there.
Status parse_shape(std::string_view text, ShapeString& out);
/// The inverse: "e8k2h64i96:bf16@tokens=33".
std::string to_string(const ShapeString& shape);

/// A line of shapes/*.txt: a shape string, then M=… and routing=… where the file says so. '#' starts a comment.
struct ShapeLine {
  ShapeString shape;
  std::int64_t tokens = 0;  ///< 0 = the line has none
  std::string routing;      ///< empty = the reader's choice
  int number = 0;           ///< line of the file, from 1
};
Status parse_shape_line(std::string_view line, ShapeLine& out);
/// Failures name the file and the line.
Status read_shapes(const std::string& path, std::vector<ShapeLine>& out);

}  // namespace moekit
