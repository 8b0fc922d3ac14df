#include "verify_checks.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>

#include "console.hpp"
#include "io/json.hpp"
#include "quant/quantise.hpp"
#include "route.hpp"
#include "session.hpp"

namespace moekit::cli {
namespace {

double largest_of(const Tensor& t) {
  double out = 0;
  for (std::int64_t i = 0; i < t.numel(); ++i) out = std::max(out, std::fabs(static_cast<double>(t.as<float>()[i])));
  return out;
}

/// Mine against the file's logits, which include the logit bias.
void check_logits(Subjected& s, const CaseRows& rows, const Buffer& mine, const Tensor& logits) {
  const Tensor& bias = s.source.router.logit_bias;
  if (s.layer.config.router.logit_bias)
    for (std::int64_t t = 0; t < mine.tensor.shape[0]; ++t)
      for (std::int64_t e = 0; e < mine.tensor.shape[1]; ++e)
        mine.tensor.at<float>(t, e) += numeric::load_f32(bias.data, bias.dtype, e * bias.stride[0]);
  s.report.add(Check::of(s.label, rows.name + " router logits", "router_gemm", compare(mine.tensor, logits, 1e-5)));
}

/// Ids as sets, weights by id. A wrong set is an error of 1 in the weight that is missing.
Comparison compare_routing(const RoutingRows& got, const Routing& want, double tol) {
  Comparison out;
  out.tol = tol;
  double worst = -1;
  for (std::int64_t t = 0; t < want.ids.shape[0]; ++t) {
    for (std::int64_t j = 0; j < want.ids.shape[1]; ++j) {
      const std::int32_t e = want.ids.at<std::int32_t>(t, j);
      double mine = 0;
      bool found = false;
      for (std::int64_t i = 0; i < want.ids.shape[1]; ++i) {
        if (got.ids.tensor.at<std::int32_t>(t, i) != e) continue;
        mine = got.weights.tensor.at<float>(t, i);
        found = true;
      }
      const double wanted = want.weights.at<float>(t, j);
      double error = found ? std::fabs(mine - wanted) : 1.0;
      if (!std::isfinite(error)) {
        out.finite = false;
        error = 1e300;
      }
      if (error <= worst) continue;
      worst = error;
      out.t = t;
      out.c = j;
      out.got = mine;
      out.want = wanted;
    }
  }
  out.max_abs = out.max_rel = out.worst_abs = out.worst_rel = std::max(worst, 0.0);
  out.ok = out.finite && worst <= tol;
  return out;
}

/// Runs one implementation of a form of the layer; a refusal becomes the reason.
bool run_forced(Subjected& s, const ExpertsEntry& entry, const LayerConfig& config, const CaseRows& rows, Buffer& y,
                std::string& refusal) {
  PlanOptions options;
  options.max_tokens = rows.in.shape[0];
  options.experts = std::string(entry.name);
  options.executor = &executor_for(s.threads);
  try {
    Session session(config, options, s.source);
    const Buffer x = converted(rows.in, config.dtype);
    y = Buffer(config.dtype, {rows.in.shape[0], config.hidden});
    LayerInput in;
    in.hidden = x.tensor;
    in.routing = rows.routing;
    session.forward(in, y.tensor);
    return true;
  } catch (const Error& error) {
    if (error.code() != StatusCode::unsupported) throw;
    refusal = error.status().message();
    return false;
  }
}

/// A form of the layer that a published result exists for.
struct Form {
  std::string name;  ///< "experts bf16"
  LayerConfig config;
  Tensor want;
  double tol, rms_tol;
};

std::vector<Form> forms_of(const io::Golden& golden, const io::GoldenCase& of, const LayerConfig& stored) {
  const io::GoldenTolerances& tol = golden.tolerances();
  const LayerConfig f32 = with_float_type(stored, DType::f32);
  if (!stored.quant.weights_quantised())
    return {{"experts f32", f32, of.out, tol.f32, 0},
            {"experts bf16", with_float_type(stored, DType::bf16), of.out, tol.bf16, tol.bf16_rms}};
  std::vector<Form> out{{"experts, activations f32", f32, of.out, tol.f32, 0}};
  auto quantised = [&](const std::string& name, DType dtype, float divisor, const Tensor& want) {
    if (!want.present()) return;
    LayerConfig config = stored;
    config.dtype = dtype;
    config.quant.int8_divisor = divisor;
    // bf16 rows are exact in these files; each expert's output and the sum are rounded once, 2⁻⁹ of what they are
    out.push_back({"experts, " + name, config, want, dtype == DType::f32 ? tol.actq : 3 * 0x1p-9, 0});
  };
  const std::string scheme = activations_scheme(stored.quant);
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const std::string rows = std::string(", rows ") + name(dtype);
    if (stored.quant.a1.type == DType::i8) {
      quantised(scheme + " /127" + rows, dtype, 127.0f, of.out_actq_127);
      quantised(scheme + " /127.5" + rows, dtype, 127.5f, of.out_actq);
    } else {
      quantised(scheme + rows, dtype, 127.0f, of.out_actq);
    }
  }
  return out;
}

}  // namespace

void check_routers(Subjected& s, const CaseRows& rows, const Tensor& logits) {
  const LayerConfig& config = s.layer.config;
  Buffer mine = router_logits(rows.in, s.source.router, config.num_experts);
  for (const RouterEntry& entry : router_implementations()) {
    const std::string name(entry.name);
    const std::string what = rows.name + " router";
    if (Verdict verdict = router_verdict(entry, config, rows.in.shape[0]); !verdict.ok()) {
      s.report.add(Check::refuse(s.label, what, name, verdict.reason()));
      continue;
    }
    const RoutingRows got = route_with(name, mine.tensor, config, s.source.router);
    s.report.add(Check::of(s.label, what, name, compare_routing(got, rows.routing, 1e-5)));
  }
  if (logits.present() && largest_of(logits) > 0) check_logits(s, rows, mine, logits);
}

void check_golden_experts(Subjected& s, const io::Golden& golden, const io::GoldenCase& of, const CaseRows& rows) {
  for (const Form& form : forms_of(golden, of, s.layer.config)) {
    for (const ExpertsEntry* entry : s.experts) {
      const std::string name(entry->name), what = rows.name + " " + form.name;
      Buffer y;
      std::string refusal;
      if (run_forced(s, *entry, form.config, rows, y, refusal))
        s.report.add(Check::of(s.label, what, name, compare(y.tensor, form.want, form.tol, form.rms_tol)));
      else
        s.report.add(Check::refuse(s.label, what, name, refusal));
    }
  }
}

void check_against_oracle(Subjected& s, const CaseRows& rows) {
  const LayerConfig& config = s.layer.config;
  const Buffer x = converted(rows.in, config.dtype);
  const std::vector<std::int64_t> sample = sampled_rows(rows.in.shape[0], 3);
  const OracleResult want = oracle({config, s.source, x.tensor, rows.routing, sample});
  for (const ExpertsEntry* entry : s.experts) {
    const std::string name(entry->name), what = rows.name + " experts float64";
    Buffer y;
    std::string refusal;
    if (run_forced(s, *entry, config, rows, y, refusal))
      s.report.add(Check::of(s.label, what, name, compare(y.tensor, sample, want, config)));
    else
      s.report.add(Check::refuse(s.label, what, name, refusal));
  }
}

// ---- codes and dequantised values --------------------------------------------------------------------------------

namespace {

std::string fnv1a64(const Matrix& matrix) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const float value : matrix.values) {
    const std::uint32_t code = std::bit_cast<std::uint32_t>(value + 0.0f);  // -0 counts as +0
    for (int shift = 0; shift < 32; shift += 8) hash = (hash ^ ((code >> shift) & 0xff)) * 0x100000001b3ull;
  }
  return format("%016llx", static_cast<unsigned long long>(hash));
}

void check_dequantised(Subjected& s, const std::string& path) {
  const io::Json hashes = io::read_json(path);
  std::int64_t wrong = 0, seen = 0;
  std::string first;
  auto check = [&](std::int64_t e, const char* which, const Tensor& data, const Tensor& scale, const QuantDesc& desc) {
    const std::string key = format("experts.%lld.%s", static_cast<long long>(e), which);
    const io::Json* entry = hashes.find(key);
    const io::Json* hash = entry != nullptr ? entry->find("fnv1a64") : nullptr;
    if (hash == nullptr || hash->string() == nullptr)
      throw Error(StatusCode::bad_file, "[golden] " + path + " has no fnv1a64 of " + key, "");
    ++seen;
    if (*hash->string() == fnv1a64(dequantise(data, scale, desc))) return;
    if (wrong++ == 0) first = key;
  };
  const QuantSpec& quant = s.layer.config.quant;
  for (std::int64_t e = 0; e < s.layer.config.num_experts; ++e) {
    CanonicalExpert expert;
    throw_if_failed(s.source.expert(e, expert));
    check(e, "gate", expert.gate, expert.gate_scale, quant.w1);
    check(e, "up", expert.up, expert.up_scale, quant.w1);
    check(e, "down", expert.down, expert.down_scale, quant.w2);
  }
  Check out = Check::of(s.label, "dequantised weights", "loader", {});
  out.max_abs = static_cast<double>(wrong);
  out.ok = wrong == 0;
  if (wrong > 0)
    out.note = format("%lld of %lld matrices differ, the first is %s", static_cast<long long>(wrong),
                      static_cast<long long>(seen), first.c_str());
  s.report.add(out);
}

/// Codes equal; scales equal where a group has a code that is not 0.
void check_codes(Subjected& s, const std::string& case_name, const GoldenCodes& golden) {
  const QuantDesc& desc =
      golden.name.find("|mid") != std::string::npos ? s.layer.config.quant.a2 : s.layer.config.quant.a1;
  const quant::RowScheme scheme{desc.type, desc.granularity.cols,
                                desc.type == DType::i8 && !golden.divisor_127 ? 127.5f : 127.0f};
  const std::int64_t n = golden.row.shape[1], groups = scheme.num_groups(n);
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(n), 0xff);
  std::vector<float> scales(static_cast<std::size_t>(groups), -1.0f);
  quant::quantise_row({golden.row.data, golden.row.dtype, n}, scheme, codes.data(), scales.data());
  Check out = Check::of(s.label, case_name + " " + golden.name + " codes", "quantise", {});
  out.ok = true;
  for (std::int64_t i = 0; i < n && out.ok; ++i) {
    const std::int64_t group = scheme.group < 0 ? 0 : i / scheme.group;
    const std::uint8_t want = golden.codes.as<std::uint8_t>()[i], got = codes[static_cast<std::size_t>(i)];
    const float scale = scales[static_cast<std::size_t>(group)], wanted = golden.scales.as<float>()[group];
    if (want == got && (want == 0 || scale == wanted)) continue;
    out.ok = false;
    out.c = i;
    out.max_abs = std::fabs(static_cast<double>(got) - want);
    out.note = format("code %d instead of %d, scale %.9g instead of %.9g at [0, %lld]", got, want,
                      static_cast<double>(scale), static_cast<double>(wanted), static_cast<long long>(i));
  }
  s.report.add(out);
}

}  // namespace

void check_golden_codes(Subjected& s, const std::string& directory, const io::Golden& golden,
                        const std::vector<io::GoldenCase>& cases) {
  const std::string path = directory + "/dequant_hash.json";
  if (s.layer.config.quant.weights_quantised() && std::ifstream(path).good()) check_dequantised(s, path);
  for (const io::GoldenCase& of : cases)
    for (const GoldenCodes& codes : golden_codes(golden, of)) check_codes(s, of.name, codes);
}

}  // namespace moekit::cli
