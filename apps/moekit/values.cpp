#include "values.hpp"

#include <algorithm>
#include <vector>

#include <moekit/status.hpp>

#include "console.hpp"
#include "exit_code.hpp"
#include "spelling.hpp"

namespace moekit::cli {
namespace {

struct Schemes {
  const char* what;
  std::vector<std::string> now, later;
};

const Schemes& weights_schemes() {
  static const Schemes schemes{
      "weights",
      {"f32", "bf16", "f16", "int8", "fp8_block128"},
      {"int8_g16",  "int8_g32",   "int8_g64",    "int8_g128", "int4_g16", "int4_g32", "int4_g64",
       "int4_g128", "fp8_tensor", "fp8_channel", "mxfp4",     "mxfp8",    "nvfp4",    "q4_0",
       "q4_1",      "q5_0",       "q5_1",        "q8_0",      "q2_k",     "q3_k",     "q4_k",
       "q5_k",      "q6_k",       "iq4_nl",      "iq4_xs"}};
  return schemes;
}
const Schemes& activations_schemes() {
  static const Schemes schemes{"activations",
                               {"f32", "bf16", "f16", "int8", "int8_token", "fp8", "fp8_group128"},
                               {"fp8_token", "mxfp4", "mxfp8", "nvfp4"}};
  return schemes;
}

void check_scheme(const Schemes& schemes, const std::string& name) {
  auto among = [&](const std::vector<std::string>& list) {
    return std::find(list.begin(), list.end(), name) != list.end();
  };
  if (among(schemes.now)) return;
  std::string list;
  for (const std::string& one : schemes.now) list += " " + one;
  if (among(schemes.later))
    throw Error(StatusCode::unsupported, std::string("[scheme] ") + schemes.what + " " + name + ": in a later version",
                "there are:" + list);
  const std::string best = nearest(name, schemes.now);
  throw UsageError(std::string(schemes.what) + " " + name + ": there is no such scheme" +
                   (best.empty() ? "" : "; did you mean " + best + "?") + " There are:" + list);
}

}  // namespace

std::string whole_complaint(const std::string& text, std::int64_t least, std::int64_t most) {
  const std::optional<std::int64_t> value = whole_number(text);
  if (value && *value >= least && *value <= most) return "";
  const std::string shown = text.empty() ? "nothing" : text;
  if (most == INT64_MAX)
    return format("%s is no whole number of at least %lld that fits 63 bits", shown.c_str(),
                  static_cast<long long>(least));
  return format("%s is no whole number from %lld to %lld", shown.c_str(), static_cast<long long>(least),
                static_cast<long long>(most));
}

void check_weights_scheme(const std::string& name) { check_scheme(weights_schemes(), name); }
void check_activations_scheme(const std::string& name) { check_scheme(activations_schemes(), name); }

}  // namespace moekit::cli
