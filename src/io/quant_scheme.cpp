// GCC 12 warns of its own <regex> under sanitizers; a false alarm.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include "io/quant_scheme.hpp"

#include <regex>

#include <moekit/status.hpp>

#include "text.hpp"

namespace moekit::io {
using text::concat;

namespace {

constexpr std::size_t kLongestPattern = 500;
constexpr std::string_view kRegex = "re:";

[[noreturn]] void not_read(const Fields& quant, std::string_view scheme) {
  throw Error(StatusCode::unsupported,
              concat("[checkpoint] ", quant.file(), ": quantisation ", scheme, " is not read yet"),
              "read are quant_method fp8 with weight_block_size [128, 128] and dynamic activations, and "
              "compressed-tensors int-quantized with int8 channel weights and int8 dynamic token activations",
              "quantization_config");
}

QuantScheme read_fp8(const Fields& quant) {
  const auto block = quant.integers("weight_block_size");
  if (!block) not_read(quant, "fp8 with one scale per tensor or channel (no weight_block_size)");
  if (*block != std::vector<std::int64_t>{128, 128}) {
    std::string sizes;
    for (const std::int64_t size : *block) sizes += concat(sizes.empty() ? "" : ", ", size);
    not_read(quant, concat("fp8 in blocks [", sizes, "]"));
  }
  if (const auto fmt = quant.string("fmt"); fmt && *fmt != "e4m3") not_read(quant, concat("fp8 ", *fmt));
  const auto activations = quant.string("activation_scheme");
  if (activations && *activations != "dynamic")
    not_read(quant, concat("fp8 with ", *activations, " activation scales"));
  QuantScheme scheme;
  scheme.name = "fp8_block128";
  scheme.type = DType::e4m3;
  scheme.granularity = {128, 128};
  scheme.scale_suffix = "_scale_inv";
  scheme.ignore_key = quant.key_path("modules_to_not_convert");
  scheme.ignore = quant.strings("modules_to_not_convert").value_or(std::vector<std::string>{});
  return scheme;
}

/// "4-bit int group (group_size 32)"
std::string describe_args(const Fields& args) {
  std::string out = concat(args.integer("num_bits").value_or(0), "-bit ", args.string("type").value_or("?"), " ",
                           args.string("strategy").value_or("?"));
  if (const auto group = args.integer("group_size")) out += concat(" (group_size ", *group, ")");
  if (!args.boolean("symmetric").value_or(true)) out += " asymmetric";
  return out;
}

bool is_int8(const Fields& args, std::string_view strategy) {
  return args.integer("num_bits") == 8 && args.string("type") == "int" && args.string("strategy") == strategy &&
         args.boolean("symmetric").value_or(true);
}
/// "dynamic" is a boolean or the word "local".
bool is_dynamic(const Fields& args) {
  const Json* dynamic = args.find("dynamic");
  if (dynamic && dynamic->string() && *dynamic->string() == "local") return false;
  return args.boolean("dynamic").value_or(false);
}

void check_group(const Fields& quant, const Fields& group, const std::string& format) {
  const auto weights = group.fields("weights");
  if (!weights) not_read(quant, concat("compressed-tensors ", format, " without quantised weights"));
  const auto activations = group.fields("input_activations");
  const std::string described =
      concat("compressed-tensors ", format, ": weights ", describe_args(*weights), ", activations ",
             activations ? describe_args(*activations) : std::string("not quantised"));
  if (format != "int-quantized" || !is_int8(*weights, "channel")) not_read(quant, described);
  if (!activations || !is_int8(*activations, "token")) not_read(quant, described);
  if (!is_dynamic(*activations)) not_read(quant, concat(described, " with static scales"));
  if (group.fields("output_activations")) not_read(quant, concat(described, " and quantised outputs"));
}

QuantScheme read_compressed_tensors(const Fields& quant) {
  const std::string format = quant.string("format").value_or("int-quantized");
  const auto groups = quant.fields("config_groups");
  if (!groups) not_read(quant, concat("compressed-tensors ", format, " without config_groups"));
  for (const auto& [name, value] : *groups->json().object()) {
    const Fields group(value, quant.file(), groups->key_path(name));
    check_group(quant, group, group.string("format").value_or(format));
  }
  if (groups->json().object()->empty()) quant.fail("config_groups", "is empty");
  if (const auto sparsity = quant.fields("sparsity_config"); sparsity && !sparsity->json().object()->empty())
    if (const auto kind = sparsity->string("format"); kind && *kind != "dense")
      not_read(quant, concat("compressed-tensors with sparsity ", *kind));
  if (const auto transform = quant.fields("transform_config"); transform && !transform->json().object()->empty())
    not_read(quant, "compressed-tensors with transforms");
  QuantScheme scheme;
  scheme.name = "int8";
  scheme.type = DType::i8;
  scheme.granularity = {1, -1};
  scheme.scale_suffix = "_scale";
  scheme.ignore_key = quant.key_path("ignore");
  scheme.ignore = quant.strings("ignore").value_or(std::vector<std::string>{});
  return scheme;
}

/// "mlp.gate" is part of "model.layers.0.mlp.gate" but not of "model.layers.0.mlp.gate_proj".
bool has_components(const std::string& module, const std::string& part) {
  for (std::size_t at = module.find(part); at != std::string::npos; at = module.find(part, at + 1)) {
    const std::size_t end = at + part.size();
    if ((at == 0 || module[at - 1] == '.') && (end == module.size() || module[end] == '.')) return true;
  }
  return false;
}

bool matches(const std::string& module, const std::string& pattern, const std::string& key) {
  const auto refuse = [&](std::string_view why) {
    throw Error(StatusCode::unsupported,
                concat("[checkpoint] \"", key, "\": pattern ", pattern.substr(0, 80), " ", why));
  };
  if (pattern.size() > kLongestPattern) refuse("is too long");
  try {
#ifdef __GLIBCXX__  // no backtracking: a hostile pattern costs no more than its length
    const std::regex regex(pattern, std::regex::ECMAScript | std::regex_constants::__polynomial);
#else
    const std::regex regex(pattern, std::regex::ECMAScript);
#endif
    return std::regex_search(module, regex, std::regex_constants::match_continuous);
  } catch (const std::regex_error& problem) {
    refuse(concat("cannot be read: ", problem.what()));
  }
  return false;
}

}  // namespace

bool QuantScheme::ignores(const std::string& module) const {
  for (const std::string& entry : ignore) {
    if (entry.starts_with(kRegex)) {
      if (matches(module, entry.substr(kRegex.size()), ignore_key)) return true;
    } else if (!entry.empty() && has_components(module, entry)) {
      return true;
    }
  }
  return false;
}

QuantScheme read_quant_scheme(const Fields& root, const Fields& text) {
  auto quant = root.fields("quantization_config");
  if (!quant) quant = text.fields("quantization_config");
  if (!quant) {
    if (root.has("compression_config")) not_read(root, "by a compression_config (an old form of compressed-tensors)");
    return {};
  }
  const auto method = quant->string("quant_method");
  if (!method) quant->fail("quant_method", "is missing");
  if (*method == "fp8") return read_fp8(*quant);
  if (*method == "compressed-tensors") return read_compressed_tensors(*quant);
  std::string details;
  if (const auto bits = quant->integer("bits")) details += concat(" ", *bits, "-bit");
  if (const auto group = quant->integer("group_size")) details += concat(" group_size ", *group);
  not_read(*quant, concat(*method, details));
}

}  // namespace moekit::io
