#include "svg.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "console.hpp"
#include "exit_code.hpp"

namespace moekit::cli {
namespace {

// Okabe-Ito series colours: distinguishable with every kind of colour blindness, on white and on near-black.
constexpr std::string_view kStyle = R"(
.bg{fill:#ffffff}.ink{fill:#1f2328}.soft{fill:#656d76}
.grid{stroke:#e3e6ea;stroke-width:1}.axis{stroke:#8c959f;stroke-width:1}
.floor{stroke:#8c959f;stroke-width:1.5;stroke-dasharray:5 4;fill:none}
.s0{stroke:#0072b2}.s1{stroke:#d55e00}.s2{stroke:#009e73}.s3{stroke:#cc79a7}.s4{stroke:#b8860b}.s5{stroke:#56b4e9}
.f0{fill:#0072b2}.f1{fill:#d55e00}.f2{fill:#009e73}.f3{fill:#cc79a7}.f4{fill:#b8860b}.f5{fill:#56b4e9}
.on-light{fill:#1f2328}.on-dark{fill:#ffffff}
.curve{fill:none;stroke-width:2.25;stroke-linejoin:round;stroke-linecap:round}.band{opacity:.16}
@media (prefers-color-scheme:dark){
.bg{fill:#0d1117}.ink{fill:#e6edf3}.soft{fill:#9198a1}
.grid{stroke:#21262d}.axis{stroke:#6e7681}.floor{stroke:#9198a1}
.s0{stroke:#4aa8e0}.s1{stroke:#f0883e}.s2{stroke:#2fc99a}.s3{stroke:#e29bc4}.s4{stroke:#e0b040}.s5{stroke:#7cc8f5}
.f0{fill:#4aa8e0}.f1{fill:#f0883e}.f2{fill:#2fc99a}.f3{fill:#e29bc4}.f4{fill:#e0b040}.f5{fill:#7cc8f5}
.band{opacity:.24}}
text{font-family:system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif}
)";

}  // namespace

std::string xml(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += c;
    }
  }
  return out;
}

Svg::Svg(double width, double height, std::string_view title, const Json& data) {
  out_ = format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" width=\"%g\" height=\"%g\" role=\"img\">\n",
      width, height, width, height);
  out_ += "<title>" + xml(title) + "</title>\n<metadata>" + xml(data.dump()) + "</metadata>\n<style>";
  out_ += kStyle;
  out_ += "</style>\n";
  rect(0, 0, width, height, "class=\"bg\" rx=\"8\"");
}

void Svg::element(std::string_view tag, std::string_view attributes, std::string_view tooltip) {
  out_ += '<';
  out_ += tag;
  out_ += ' ';
  out_ += attributes;
  if (tooltip.empty()) {
    out_ += "/>\n";
    return;
  }
  out_ += "><title>" + xml(tooltip) + "</title></";
  out_ += tag;
  out_ += ">\n";
}

void Svg::rect(double x, double y, double w, double h, std::string_view attributes, std::string_view tooltip) {
  element("rect", format("x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" ", x, y, w, h) + std::string(attributes),
          tooltip);
}

void Svg::line(double x1, double y1, double x2, double y2, std::string_view css_class) {
  element(
      "line",
      format("x1=\"%.2f\" y1=\"%.2f\" x2=\"%.2f\" y2=\"%.2f\" class=\"", x1, y1, x2, y2) + std::string(css_class) + '"',
      {});
}

void Svg::path(std::string_view d, std::string_view attributes, std::string_view tooltip) {
  element("path", "d=\"" + std::string(d) + "\" " + std::string(attributes), tooltip);
}

void Svg::circle(double x, double y, double r, std::string_view css_class, std::string_view tooltip) {
  element("circle", format("cx=\"%.2f\" cy=\"%.2f\" r=\"%.2f\" class=\"", x, y, r) + std::string(css_class) + '"',
          tooltip);
}

void Svg::text(double x, double y, std::string_view content, std::string_view css_class, std::string_view anchor,
               double size) {
  out_ += format("<text x=\"%.2f\" y=\"%.2f\" font-size=\"%g\" text-anchor=\"", x, y, size);
  out_ += anchor;
  out_ += "\" class=\"";
  out_ += css_class;
  out_ += "\">" + xml(content) + "</text>\n";
}

std::string Svg::finish() const { return out_ + "</svg>\n"; }

void write_file(const std::string& path, std::string_view content) {
  auto fail = [&](const char* what) {
    throw Error(StatusCode::bad_file, format("[output] cannot %s %s: %s", what, path.c_str(), std::strerror(errno)),
                "give a path in a folder that exists and can be written");
  };
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) fail("open");
  const std::size_t written = std::fwrite(content.data(), 1, content.size(), file);
  const bool closed = std::fclose(file) == 0;
  if (written != content.size() || !closed) fail("write");
}

}  // namespace moekit::cli
