#include "shapes.hpp"

#include <charconv>
#include <fstream>

#include "text.hpp"

namespace moekit {
namespace {
using text::concat;

constexpr std::string_view kForm = "e128k8h2048i768[:scheme][@key=value,...]";
constexpr std::string_view kKeys[] = {"tokens",  "weights",     "activations", "impl", "device", "layer",
                                      "routing", "determinism", "threads",     "vs",   "peer",   "seed"};

Status bad(std::string_view text, std::string what) {
  return Status(StatusCode::invalid_argument, concat("[shape] '", text, "': ", what), concat("write ", kForm), "shape");
}

/// "e128" at the front of `rest`: eats the letter and the number.
Status eat_size(std::string_view text, std::string_view& rest, char letter, std::int64_t& value) {
  if (rest.empty() || rest[0] != letter)
    return bad(text, concat("expected '", letter, "' and a number, found ",
                            rest.empty() ? std::string("the end") : concat("'", rest.substr(0, 1), "'")));
  const char* begin = rest.data() + 1;
  const char* end = rest.data() + rest.size();
  const auto [stop, error] = std::from_chars(begin, end, value);
  if (error != std::errc() || value < 1)
    return bad(text, concat("'", letter, "' needs a number of at least 1 that fits 63 bits"));
  rest.remove_prefix(static_cast<std::size_t>(stop - rest.data()));
  return {};
}

/// key=value,key=value: a piece without '=' goes on with the value before it.
Status parse_settings(std::string_view text, std::string_view rest, std::map<std::string, std::string>& settings) {
  std::string key;
  while (!rest.empty()) {
    const std::string_view piece = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), piece.size() + 1));
    const std::size_t equals = piece.find('=');
    if (equals == std::string_view::npos) {
      if (key.empty()) return bad(text, concat("'", piece, "' must be key=value"));
      settings[key] += concat(",", piece);
      continue;
    }
    key = std::string(piece.substr(0, equals));
    std::string known;
    bool is_known = false;
    for (std::string_view candidate : kKeys) {
      is_known = is_known || candidate == key;
      known += concat(known.empty() ? "" : " ", candidate);
    }
    if (!is_known) return bad(text, concat("there is no setting '", key, "'; there are: ", known));
    if (!settings.emplace(key, piece.substr(equals + 1)).second) return bad(text, concat("'", key, "' is set twice"));
  }
  return {};
}

std::string setting(const ShapeString& shape, const char* key) {
  const auto found = shape.settings.find(key);
  return found == shape.settings.end() ? std::string() : found->second;
}

}  // namespace

Status parse_shape(std::string_view text, ShapeString& out) {
  const std::size_t at = text.find('@');
  std::string_view sizes = text.substr(0, at);
  const std::size_t colon = sizes.find(':');
  std::string weights = colon == std::string_view::npos ? "bf16" : std::string(sizes.substr(colon + 1));
  std::string_view rest = sizes.substr(0, colon);
  ShapeString shape;
  LayerConfig& c = shape.config;
  if (Status s = eat_size(text, rest, 'e', c.num_experts); !s.ok()) return s;
  if (Status s = eat_size(text, rest, 'k', c.top_k); !s.ok()) return s;
  if (Status s = eat_size(text, rest, 'h', c.hidden); !s.ok()) return s;
  if (Status s = eat_size(text, rest, 'i', c.intermediate); !s.ok()) return s;
  if (!rest.empty()) return bad(text, concat("'", rest, "' is left over after the sizes"));
  if (at != std::string_view::npos)
    if (Status s = parse_settings(text, text.substr(at + 1), shape.settings); !s.ok()) return s;
  if (const std::string given = setting(shape, "weights"); !given.empty()) {
    if (colon != std::string_view::npos && given != weights)
      return bad(text, concat("weights are '", weights, "' and '", given, "'"));
    weights = given;
  }
  if (Status s = quant_from_names(weights, setting(shape, "activations"), c.quant); !s.ok())
    return bad(text, concat(s.message(), "; ", s.hint()));
  if (is_float(c.quant.a1.type)) c.dtype = c.quant.a1.type;
  if (c.top_k > 64 || c.num_experts > 2048) c.router.source = RouterSource::external;
  if (Status s = validate(c); !s.ok()) return bad(text, s.message());
  out = std::move(shape);
  return {};
}

std::string to_string(const ShapeString& shape) {
  std::string out = shape_string(shape.config);
  char separator = '@';
  for (const auto& [key, value] : shape.settings) {
    if (key == "weights") continue;  // behind the colon
    out += concat(separator, key, "=", value);
    separator = ',';
  }
  return out;
}

Status parse_shape_line(std::string_view line, ShapeLine& out) {
  line = line.substr(0, line.find('#'));
  ShapeLine parsed;
  bool has_shape = false;
  while (!line.empty()) {
    const std::size_t begin = line.find_first_not_of(" \t\r");
    if (begin == std::string_view::npos) break;
    line.remove_prefix(begin);
    const std::string_view word = line.substr(0, line.find_first_of(" \t\r"));
    line.remove_prefix(word.size());
    if (!has_shape) {
      if (Status s = parse_shape(word, parsed.shape); !s.ok()) return s;
      has_shape = true;
    } else if (word.starts_with("M=")) {
      const auto [stop, error] = std::from_chars(word.data() + 2, word.data() + word.size(), parsed.tokens);
      if (error != std::errc() || stop != word.data() + word.size() || parsed.tokens < 0)
        return bad(word, "M must be a number of tokens");
    } else if (word.starts_with("routing=")) {
      parsed.routing = std::string(word.substr(8));
    } else {
      return Status(StatusCode::invalid_argument, concat("[shape] '", word, "' is neither M=… nor routing=…"));
    }
  }
  out = std::move(parsed);
  return {};
}

Status read_shapes(const std::string& path, std::vector<ShapeLine>& out) {
  std::ifstream file(path);
  if (!file) return Status(StatusCode::bad_file, concat("[shape] cannot read ", path));
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    const std::string_view content = std::string_view(line).substr(0, line.find('#'));
    if (content.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    ShapeLine parsed;
    if (Status s = parse_shape_line(line, parsed); !s.ok())
      return Status(StatusCode::bad_file, concat(path, ":", number, ": ", s.message()), s.hint());
    parsed.number = number;
    out.push_back(std::move(parsed));
  }
  return {};
}

}  // namespace moekit
