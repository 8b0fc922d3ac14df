#include "routing_spec.hpp"

#include <moekit/kit/router.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <map>

#include "console.hpp"
#include "exit_code.hpp"
#include "files.hpp"
#include "spelling.hpp"
#include "values.hpp"

namespace moekit::cli {
namespace {

constexpr std::string_view kHeader = "layer,token,slot,expert,weight";

double number_of(const std::string& text, const std::string& whole) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !std::isfinite(value) || value < 0)
    throw UsageError("--routing " + whole + ": " + (text.empty() ? "a number is missing" : text + " is no number") +
                     "; known: uniform balanced zipf:a hot:n,f single trace:FILE");
  return value;
}

[[noreturn]] void bad_line(const std::string& path, std::size_t line, const std::string& why) {
  throw Error(StatusCode::bad_file, format("[trace] %s line %zu: %s", path.c_str(), line, why.c_str()),
              "lines are layer,token,slot,expert,weight");
}

std::vector<std::string> lines_of(const std::string& path) {
  const std::string content = read_input(path, "trace", kLargestText);
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < content.size();) {
    const std::size_t end = std::min(content.find('\n', begin), content.size());
    std::string line = content.substr(begin, end - begin);
    if (!line.empty() && line.back() == '\r') line.pop_back();
    lines.push_back(std::move(line));
    begin = end + 1;
  }
  return lines;
}

TraceLine parse_line(const std::string& path, std::size_t number, const std::string& text) {
  std::string_view rest = text;
  std::int64_t whole[4];
  for (std::int64_t& value : whole) {
    const std::size_t comma = rest.find(',');
    const std::optional<std::int64_t> read = whole_number(rest.substr(0, comma));
    if (comma == std::string_view::npos || !read)
      bad_line(path, number, format("\"%.80s\" is not layer,token,slot,expert,weight", text.c_str()));
    value = *read;
    rest.remove_prefix(comma + 1);
  }
  TraceLine out{whole[0], whole[1], whole[2], whole[3], 0};
  const auto [stop, error] = std::from_chars(rest.data(), rest.data() + rest.size(), out.weight);
  if (stop != rest.data() + rest.size() || rest.empty())
    bad_line(path, number, format("\"%.80s\" is not layer,token,slot,expert,weight", text.c_str()));
  if (error != std::errc() || !std::isfinite(static_cast<float>(out.weight)))
    bad_line(path, number, "the weight " + std::string(rest) + " is not finite");
  if (out.layer < 0 || out.token < 0 || out.slot < 0 || out.expert < -1)
    bad_line(path, number, "a number below its range");
  return out;
}

/// Lines of one layer as rows; a row that lacks a slot has -1 there.
RoutingRows rows_of_trace(const std::string& path, const LayerConfig& config, std::int64_t layer,
                          std::int64_t num_tokens) {
  const std::vector<TraceLine> all = read_routing_csv(path);
  const bool has_layer = std::any_of(all.begin(), all.end(), [&](const TraceLine& l) { return l.layer == layer; });
  const std::int64_t wanted = has_layer || all.empty() ? layer : all.front().layer;
  std::map<std::int64_t, std::map<std::int64_t, const TraceLine*>> rows;
  for (const TraceLine& line : all) {
    if (line.layer != wanted) continue;
    if (line.expert >= config.num_experts || line.slot >= config.top_k)
      throw Error(
          StatusCode::bad_file,
          format("[trace] %s: layer %lld token %lld slot %lld expert %lld, but the layer has %lld experts, top-%lld",
                 path.c_str(), static_cast<long long>(line.layer), static_cast<long long>(line.token),
                 static_cast<long long>(line.slot), static_cast<long long>(line.expert),
                 static_cast<long long>(config.num_experts), static_cast<long long>(config.top_k)),
          "record the trace with a layer of this shape");
    rows[line.token][line.slot] = &line;
  }
  if (rows.empty()) throw Error(StatusCode::bad_file, "[trace] " + path + " holds no rows", "");
  RoutingRows out{Buffer(DType::i32, {num_tokens, config.top_k}), Buffer(DType::f32, {num_tokens, config.top_k})};
  auto row = rows.begin();
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    for (std::int64_t j = 0; j < config.top_k; ++j) {
      const auto found = row->second.find(j);
      const bool have = found != row->second.end();
      out.ids.tensor.at<std::int32_t>(t, j) = have ? static_cast<std::int32_t>(found->second->expert) : -1;
      out.weights.tensor.at<float>(t, j) = have ? static_cast<float>(found->second->weight) : 0.0f;
    }
    if (++row == rows.end()) row = rows.begin();
  }
  return out;
}

}  // namespace

RoutingSpec parse_routing(const std::string& text) {
  RoutingSpec out;
  out.text = text;
  const std::size_t colon = text.find(':');
  const std::string kind = text.substr(0, colon);
  const std::string rest = colon == std::string::npos ? "" : text.substr(colon + 1);
  if (kind == "uniform" && rest.empty()) {
    out.kind = Simulated::uniform;
  } else if (kind == "balanced" && rest.empty()) {
    out.kind = Simulated::balanced;
  } else if (kind == "single" && rest.empty()) {
    out.kind = Simulated::single;
  } else if (kind == "zipf") {
    out.kind = Simulated::zipf;
    out.a = number_of(rest, text);
  } else if (kind == "hot") {
    out.kind = Simulated::hot;
    const std::size_t comma = rest.find(',');
    const std::string complaint = whole_complaint(rest.substr(0, comma), 1, INT32_MAX);
    if (!complaint.empty()) throw UsageError("--routing " + text + ": n: " + complaint);
    out.n = *whole_number(rest.substr(0, comma));
    out.a = number_of(comma == std::string::npos ? "" : rest.substr(comma + 1), text);
    if (out.a > 1) throw UsageError("--routing " + text + ": hot:n,f needs n ≥ 1 and 0 ≤ f ≤ 1");
  } else if (kind == "trace" && !rest.empty()) {
    out.trace = rest;
  } else {
    const std::string best = nearest(kind, {"uniform", "balanced", "zipf", "hot", "single", "trace"});
    throw UsageError("--routing " + text + " is unknown" +
                     (best.empty() || best == kind ? "" : "; did you mean " + best + "?") +
                     " Known: uniform balanced zipf:a hot:n,f single trace:FILE");
  }
  return out;
}

std::vector<TraceLine> read_routing_csv(const std::string& path) {
  const std::vector<std::string> lines = lines_of(path);
  if (lines.empty() || lines.front() != kHeader) bad_line(path, 1, "the header must be " + std::string(kHeader));
  std::vector<TraceLine> out;
  std::map<std::array<std::int64_t, 3>, std::size_t> seen;  // layer, token, slot → line
  for (std::size_t i = 1; i < lines.size(); ++i) {
    if (lines[i].empty()) continue;
    const TraceLine line = parse_line(path, i + 1, lines[i]);
    const auto [first, added] = seen.emplace(std::array{line.layer, line.token, line.slot}, i + 1);
    if (!added)
      bad_line(path, i + 1,
               format("layer %lld token %lld slot %lld stands in line %zu already", static_cast<long long>(line.layer),
                      static_cast<long long>(line.token), static_cast<long long>(line.slot), first->second));
    out.push_back(line);
  }
  return out;
}

std::string routing_csv_header() { return std::string(kHeader) + '\n'; }

std::string routing_csv(std::int64_t layer, const Tensor& ids, const Tensor& weights) {
  std::string out;
  for (std::int64_t t = 0; t < ids.shape[0]; ++t)
    for (std::int64_t j = 0; j < ids.shape[1]; ++j)
      out +=
          format("%lld,%lld,%lld,%d,%.9g\n", static_cast<long long>(layer), static_cast<long long>(t),
                 static_cast<long long>(j), ids.at<std::int32_t>(t, j), static_cast<double>(weights.at<float>(t, j)));
  return out;
}

RoutingRows make_routing(const RoutingSpec& spec, const LayerConfig& config, std::int64_t layer,
                         std::int64_t num_tokens, std::uint64_t seed) {
  if (!spec.trace.empty()) return rows_of_trace(spec.trace, config, layer, num_tokens);
  RoutingRows out{Buffer(DType::i32, {num_tokens, config.top_k}), Buffer(DType::f32, {num_tokens, config.top_k})};
  RouterConfig router;
  router.source = RouterSource::simulated;
  router.simulated = spec.kind;
  router.simulated_a = spec.a;
  router.simulated_n = spec.n;
  router.seed = seed;
  throw_if_failed(simulate_routing(router, config.num_experts, 0, out.ids.tensor, out.weights.tensor));
  return out;
}

RoutingStats routing_stats(const Tensor& ids, std::int64_t num_experts) {
  RoutingStats out;
  out.tokens.assign(static_cast<std::size_t>(num_experts), 0);
  for (std::int64_t t = 0; t < ids.shape[0]; ++t)
    for (std::int64_t j = 0; j < ids.shape[1]; ++j) {
      const std::int32_t e = ids.at<std::int32_t>(t, j);
      if (e < 0 || e >= num_experts) continue;
      ++out.tokens[static_cast<std::size_t>(e)];
      ++out.routes;
    }
  double busiest = 0;
  for (const std::int64_t n : out.tokens) {
    out.active += n > 0;
    busiest = std::max(busiest, static_cast<double>(n));
    const double share = out.routes > 0 ? static_cast<double>(n) / static_cast<double>(out.routes) : 0;
    if (share > 0) out.entropy -= share * std::log(share);
  }
  if (out.routes > 0)
    out.busiest_over_mean = busiest * static_cast<double>(num_experts) / static_cast<double>(out.routes);
  if (num_experts > 1) out.entropy /= std::log(static_cast<double>(num_experts));
  return out;
}

}  // namespace moekit::cli
