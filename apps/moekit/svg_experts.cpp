// Expert load, layer × expert.
#include <algorithm>
#include <array>
#include <cmath>

#include "console.hpp"
#include "svg.hpp"

namespace moekit::cli {
namespace {

/// One hue from pale to dark, so that order is visible in grey and with every kind of colour blindness.
std::string colour(double share) {
  constexpr std::array<std::array<double, 3>, 5> kStops{
      {{237, 248, 251}, {179, 205, 227}, {107, 150, 199}, {51, 94, 165}, {14, 38, 92}}};
  const double position = std::clamp(share, 0.0, 1.0) * (kStops.size() - 1);
  const auto i = std::min(static_cast<std::size_t>(position), kStops.size() - 2);
  const double part = position - static_cast<double>(i);
  std::array<int, 3> rgb{};
  for (std::size_t c = 0; c < 3; ++c)
    rgb[c] = static_cast<int>(std::lround(kStops[i][c] * (1 - part) + kStops[i + 1][c] * part));
  return format("#%02x%02x%02x", rgb[0], rgb[1], rgb[2]);
}

struct RowStats {
  double mean = 0, busiest = 0;
  std::int64_t active = 0;
};
RowStats row_stats(const LayerLoad& row) {
  RowStats out;
  for (const std::int64_t n : row.tokens) {
    out.mean += static_cast<double>(n) / static_cast<double>(row.tokens.size());
    out.busiest = std::max(out.busiest, static_cast<double>(n));
    out.active += n > 0;
  }
  return out;
}

Json data_of(const std::vector<LayerLoad>& layers) {
  Json rows = Json::array();
  for (const LayerLoad& row : layers) rows.push(Json::object().set("layer", row.layer).set("tokens", Json(row.tokens)));
  return Json::object().set("picture", "expert_load").set("layers", rows);
}

struct Grid {
  double left, top, cell_w, cell_h;
};

void draw_row(Svg& svg, const Grid& grid, std::size_t index, const LayerLoad& row, double full) {
  const RowStats stats = row_stats(row);
  const double y = grid.top + static_cast<double>(index) * grid.cell_h;
  const double gap = grid.cell_w >= 8 && grid.cell_h >= 8 ? 2 : 0;
  for (std::size_t e = 0; e < row.tokens.size(); ++e) {
    const double x = grid.left + static_cast<double>(e) * grid.cell_w;
    const double load = stats.mean > 0 ? static_cast<double>(row.tokens[e]) / stats.mean : 0;
    svg.rect(x, y, grid.cell_w - gap, grid.cell_h - gap,
             format("fill=\"%s\"", colour(load / full).c_str()) + (gap > 0 ? " rx=\"3\"" : ""),
             format("layer %lld, expert %zu: %lld tokens, %.2f times the mean", static_cast<long long>(row.layer), e,
                    static_cast<long long>(row.tokens[e]), load));
    if (grid.cell_w >= 30 && grid.cell_h >= 22)
      svg.text(x + (grid.cell_w - gap) / 2, y + (grid.cell_h - gap) / 2 + 4, std::to_string(row.tokens[e]),
               load / full > 0.5 ? "on-dark" : "on-light", "middle", 11);
  }
  const double right = grid.left + static_cast<double>(row.tokens.size()) * grid.cell_w + 12;
  if (grid.cell_h >= 12 || index % 4 == 0) {
    svg.text(grid.left - 10, y + grid.cell_h / 2 + 3, std::to_string(row.layer), "soft", "end", 11.5);
    svg.text(right, y + grid.cell_h / 2 + 3,
             format("%.2f×   %lld/%zu", stats.mean > 0 ? stats.busiest / stats.mean : 0,
                    static_cast<long long>(stats.active), row.tokens.size()),
             "ink", "start", 11.5);
  }
}

void draw_legend(Svg& svg, double x, double y, double full) {
  constexpr int kSteps = 60;
  constexpr double kLength = 240;
  for (int i = 0; i < kSteps; ++i)
    svg.rect(x + i * kLength / kSteps, y, kLength / kSteps + 0.5, 10,
             format("fill=\"%s\"", colour((i + 0.5) / kSteps).c_str()));
  svg.text(x, y + 25, "0", "soft", "start", 11);
  svg.text(x + kLength / full, y + 25, "mean", "soft", "middle", 11);
  svg.text(x + kLength, y + 25, format("%.1f× mean", full), "soft", "end", 11);
}

}  // namespace

std::string expert_load_svg(std::string_view title, std::string_view subtitle, const std::vector<LayerLoad>& layers) {
  std::size_t experts = 1;
  double full = 2;  // load over mean at the dark end
  for (const LayerLoad& row : layers) {
    experts = std::max(experts, row.tokens.size());
    const RowStats stats = row_stats(row);
    if (stats.mean > 0) full = std::max(full, stats.busiest / stats.mean);
  }
  const double cell_w = std::clamp(720.0 / static_cast<double>(experts), 3.0, 44.0);
  const double cell_h = std::clamp(420.0 / static_cast<double>(std::max<std::size_t>(layers.size(), 1)), 8.0, 40.0);
  const Grid grid{70, 112, cell_w, cell_h};
  const double columns = cell_w * static_cast<double>(experts), rows = cell_h * static_cast<double>(layers.size());
  const double width = std::max(grid.left + columns + 150, 560.0), height = grid.top + rows + 84;

  Svg svg(width, height, title, data_of(layers));
  svg.text(26, 36, title, "ink", "start", 18);
  svg.text(26, 58, subtitle, "soft", "start", 12.5);
  svg.text(grid.left - 10, grid.top - 10, "layer", "soft", "end", 11.5);
  svg.text(grid.left + columns + 12, grid.top - 24, "busiest over mean,", "soft", "start", 11);
  svg.text(grid.left + columns + 12, grid.top - 10, "experts in use", "soft", "start", 11);
  const std::size_t step = experts <= 16 ? 1 : experts <= 64 ? 8 : 32;
  for (std::size_t e = 0; e < experts; e += step)
    svg.text(grid.left + (static_cast<double>(e) + 0.5) * cell_w - 1, grid.top - 10, std::to_string(e), "soft",
             "middle", 11);
  for (std::size_t i = 0; i < layers.size(); ++i) draw_row(svg, grid, i, layers[i], full);
  draw_legend(svg, grid.left, grid.top + rows + 24, full);
  svg.text(grid.left + 270, grid.top + rows + 34, "tokens routed to an expert", "soft", "start", 11.5);
  return svg.finish();
}

}  // namespace moekit::cli
