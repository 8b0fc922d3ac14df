// Latency against tokens with its floor.
#include <algorithm>
#include <cmath>

#include "console.hpp"
#include "svg.hpp"

namespace moekit::cli {
namespace {

constexpr double kWidth = 860, kHeight = 520;
constexpr double kLeft = 84, kRight = 190, kTop = 84, kBottom = 62;

/// A logarithmic axis: value in [low, high] → position between `from` and `to`.
struct LogAxis {
  double low, high, from, to;
  double at(double value) const {
    return from + (to - from) * (std::log(value) - std::log(low)) / (std::log(high) - std::log(low));
  }
};

/// 1, 2, 5 × 10ⁿ inside the range; only 1 × 10ⁿ when that is enough.
std::vector<double> ticks(double low, double high) {
  std::vector<double> all, decades;
  for (int n = -3; n <= 12; ++n) {
    for (const double step : {1.0, 2.0, 5.0}) {
      const double value = step * std::pow(10.0, n);
      if (value < low * 0.999 || value > high * 1.001) continue;
      all.push_back(value);
      if (step == 1.0) decades.push_back(value);
    }
  }
  return decades.size() >= 4 ? decades : all;
}

std::string tick_us(double us) {
  if (us >= 1e6) return format("%g s", us * 1e-6);
  if (us >= 1e3) return format("%g ms", us * 1e-3);
  return format("%g µs", us);
}

Json data_of(const std::vector<LatencySeries>& series) {
  Json list = Json::array();
  for (const LatencySeries& s : series) {
    Json points = Json::array();
    for (const LatencyPoint& p : s.points)
      points.push(Json::object()
                      .set("tokens", p.tokens)
                      .set("median_us", p.median_us)
                      .set("min_us", p.min_us)
                      .set("p90_us", p.p90_us)
                      .set("floor_us", p.floor_us));
    list.push(Json::object().set("impl", s.name).set("points", points));
  }
  return Json::object().set("picture", "latency").set("series", list);
}

struct Chart {
  Svg& svg;
  LogAxis x, y;

  void axes(const std::vector<std::int64_t>& tokens) {
    const double right = kWidth - kRight, bottom = kHeight - kBottom;
    for (const double value : ticks(y.low, y.high)) {
      svg.line(kLeft, y.at(value), right, y.at(value), "grid");
      svg.text(kLeft - 10, y.at(value) + 4, tick_us(value), "soft", "end");
    }
    double last = -1e9;
    for (const std::int64_t value : tokens) {
      const double at = x.at(static_cast<double>(value));
      svg.line(at, kTop, at, bottom, "grid");
      if (at - last < 34) continue;
      last = at;
      svg.text(at, bottom + 20, std::to_string(value), "soft", "middle");
    }
    svg.line(kLeft, bottom, right, bottom, "axis");
    svg.line(kLeft, kTop, kLeft, bottom, "axis");
    svg.text((kLeft + right) / 2, kHeight - 16, "tokens in the call", "soft", "middle");
  }

  std::string polyline(const std::vector<LatencyPoint>& points, double LatencyPoint::*value, bool reverse = false,
                       bool resume = false) const {
    std::string d;
    for (std::size_t i = 0; i < points.size(); ++i) {
      const LatencyPoint& p = points[reverse ? points.size() - 1 - i : i];
      d += format("%s%.2f %.2f", d.empty() && !resume ? "M" : "L", x.at(static_cast<double>(p.tokens)),
                  y.at(std::max(p.*value, y.low)));
    }
    return d;
  }

  void band_and_curve(const LatencySeries& s, std::size_t colour) {
    const std::string digit = std::to_string(colour % 6);
    if (s.points.size() > 1) {
      svg.path(polyline(s.points, &LatencyPoint::min_us) + polyline(s.points, &LatencyPoint::p90_us, true, true) + "Z",
               "class=\"band f" + digit + "\"");
      svg.path(polyline(s.points, &LatencyPoint::median_us), "class=\"curve s" + digit + "\"");
    }
    for (const LatencyPoint& p : s.points)
      svg.circle(x.at(static_cast<double>(p.tokens)), y.at(p.median_us), 4, "f" + digit,
                 format("%s, %lld tokens: median %s, fastest %s, 90th percentile %s; floor %s (%.0f %% of it reached)",
                        s.name.c_str(), static_cast<long long>(p.tokens), format_us(p.median_us).c_str(),
                        format_us(p.min_us).c_str(), format_us(p.p90_us).c_str(), format_us(p.floor_us).c_str(),
                        100 * p.floor_us / p.median_us));
  }
};

/// End-of-line labels, pushed apart so that they do not overlap.
struct Label {
  double y;
  std::string text, css_class;
};
void draw_labels(Svg& svg, std::vector<Label> labels, double x) {
  std::sort(labels.begin(), labels.end(), [](const Label& a, const Label& b) { return a.y < b.y; });
  for (std::size_t i = 1; i < labels.size(); ++i) labels[i].y = std::max(labels[i].y, labels[i - 1].y + 18);
  for (const Label& label : labels) svg.text(x, label.y + 4, label.text, label.css_class, "start", 13);
}

}  // namespace

std::string latency_svg(std::string_view title, std::string_view subtitle, const std::vector<LatencySeries>& series) {
  std::vector<std::int64_t> tokens;
  double low = 1e300, high = 0;
  const LatencySeries* longest = nullptr;
  for (const LatencySeries& s : series) {
    if (longest == nullptr || s.points.size() > longest->points.size()) longest = &s;
    for (const LatencyPoint& p : s.points) {
      tokens.push_back(p.tokens);
      low = std::min({low, p.min_us, p.floor_us > 0 ? p.floor_us : p.min_us});
      high = std::max({high, p.p90_us, p.median_us});
    }
  }
  Svg svg(kWidth, kHeight, title, data_of(series));
  svg.text(kLeft - 58, 36, title, "ink", "start", 18);
  svg.text(kLeft - 58, 58, subtitle, "soft", "start", 12.5);
  if (tokens.empty()) {
    svg.text(kWidth / 2, kHeight / 2, "no measurements", "soft", "middle", 14);
    return svg.finish();
  }
  std::sort(tokens.begin(), tokens.end());
  tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
  const double first = static_cast<double>(tokens.front()), last = static_cast<double>(tokens.back());
  Chart chart{svg,
              {first * 0.85, std::max(last, first * 1.5) * 1.15, kLeft, kWidth - kRight},
              {low * 0.75, high * 1.35, kHeight - kBottom, kTop}};
  chart.axes(tokens);

  const double label_x = kWidth - kRight + 10;
  std::vector<Label> labels;
  svg.path(chart.polyline(longest->points, &LatencyPoint::floor_us), "class=\"floor\"",
           "the machine's floor: the larger of bytes / measured bandwidth and operations / measured peak");
  labels.push_back({chart.y.at(std::max(longest->points.back().floor_us, chart.y.low)), "floor (measured)", "soft"});
  for (std::size_t i = 0; i < series.size(); ++i) {
    if (series[i].points.empty()) continue;
    chart.band_and_curve(series[i], i);
    labels.push_back({chart.y.at(series[i].points.back().median_us), series[i].name, format("f%zu", i % 6)});
  }
  draw_labels(svg, labels, label_x);
  return svg.finish();
}

}  // namespace moekit::cli
