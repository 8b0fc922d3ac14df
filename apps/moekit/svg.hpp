// Pictures: self-contained SVG, readable on light and dark pages, tooltips in <title>, data as JSON in <metadata>.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "json.hpp"

namespace moekit::cli {

/// Escapes text for element content and attribute values.
std::string xml(std::string_view text);

/// A document of fixed size. Classes of its style sheet: ink, soft (text), grid, axis (lines), s0 … s5 (series colours
/// as stroke; f0 … f5 as fill), floor.
class Svg {
 public:
  Svg(double width, double height, std::string_view title, const Json& data);
  void rect(double x, double y, double w, double h, std::string_view attributes, std::string_view tooltip = {});
  void line(double x1, double y1, double x2, double y2, std::string_view css_class);
  void path(std::string_view d, std::string_view attributes, std::string_view tooltip = {});
  void circle(double x, double y, double r, std::string_view css_class, std::string_view tooltip = {});
  /// anchor: start, middle or end
  void text(double x, double y, std::string_view content, std::string_view css_class, std::string_view anchor = "start",
            double size = 12);
  std::string finish() const;

 private:
  void element(std::string_view tag, std::string_view attributes, std::string_view tooltip);
  std::string out_;
};

/// One implementation in the latency picture.
struct LatencyPoint {
  std::int64_t tokens = 0;
  double median_us = 0, min_us = 0, p90_us = 0;
  double floor_us = 0;
};
struct LatencySeries {
  std::string name;
  std::vector<LatencyPoint> points;  ///< in ascending order of tokens
};
/// Latency against tokens, log-log: a line and a band (fastest to 90th percentile) per implementation, the floor
/// dashed.
std::string latency_svg(std::string_view title, std::string_view subtitle, const std::vector<LatencySeries>& series);

/// Tokens per expert of one layer.
struct LayerLoad {
  std::int64_t layer = 0;
  std::vector<std::int64_t> tokens;
};
/// Layer × expert; colour = load over the layer's mean; each row's busiest/mean and number of active experts at its
/// end.
std::string expert_load_svg(std::string_view title, std::string_view subtitle, const std::vector<LayerLoad>& layers);

/// Writes a whole file; throws Error(bad_file) if that does not work. Missing folders are not made.
void write_file(const std::string& path, std::string_view content);

}  // namespace moekit::cli
