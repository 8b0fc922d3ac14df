// The text of `explain`.
#include <algorithm>
#include <cstdio>

#include "plan_impl.hpp"
#include "text.hpp"

namespace moekit::inline v0 {
using text::concat;

namespace {

std::string pad(std::string text, std::size_t width) {
  if (text.size() < width) text.append(width - text.size(), ' ');
  return text;
}

std::string number(double value) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, value < 10 ? "%.2f" : value < 100 ? "%.1f" : "%.0f", value);
  return buffer;
}

std::string megabytes(std::size_t bytes) { return number(static_cast<double>(bytes) / 1048576.0) + " MiB"; }

void append_candidates(std::string& out, const BucketPlan& bucket, std::string_view stage) {
  std::size_t width = 0;
  for (const Candidate& candidate : bucket.candidates) width = std::max(width, candidate.name.size());
  for (const Candidate& candidate : bucket.candidates) {
    if (candidate.stage != stage) continue;
    out += concat(candidate.chosen ? "  * " : "    ", pad(candidate.name, width + 2));
    if (candidate.estimate_us > 0) out += pad(number(candidate.estimate_us) + " us", 12);
    if (candidate.chosen)
      out += candidate.reason.empty() ? "chosen" : candidate.reason;
    else
      out += concat("no: ", candidate.reason);
    out += "\n";
    if (candidate.chosen && !candidate.detail.empty()) out += concat("        ", candidate.detail, "\n");
  }
}

}  // namespace

std::string explain_plan(const Plan::Impl& plan, std::int64_t num_tokens) {
  const std::size_t i = plan.bucket_index(num_tokens);
  const BucketPlan& bucket = plan.described[i];
  const LayerConfig& config = plan.config;
  std::string out =
      concat(shape_string(config), " on ", to_string(plan.device), ", ", plan.executor->concurrency(), " threads, ",
             num_tokens, " tokens (bucket up to ", bucket.max_tokens, "), ", name(plan.options.determinism), "\n");
  out += concat("activations ", name(config.dtype), ", ", to_string(config.activation), "; router ",
                to_string(config.router), "\n");
  if (config.quant.activations_quantised())
    out += concat("activations quantised to ", activations_scheme(config.quant), " in front of both GEMMs\n");
  if (config.shared.intermediate > 0)
    out += concat("shared expert of width ", config.shared.intermediate,
                  config.shared.sigmoid_gate ? ", times sigmoid(gate)" : "", ": after finalize; added once in f32\n");
  for (const char* stage : {"router", "prepare_finalize", "experts", "shared experts", "tail"}) {
    const bool present = std::any_of(bucket.candidates.begin(), bucket.candidates.end(),
                                     [&](const Candidate& c) { return c.stage == stage; });
    if (present) out += concat(stage, "\n");
    append_candidates(out, bucket, stage);
  }
  if (bucket.candidates.empty() || !plan.buckets[i].router) out += concat("router: ", bucket.router, "\n");
  out +=
      concat("pack format ", bucket.format, ", ",
             megabytes(plan.format->bytes(plan.spec) * static_cast<std::size_t>(plan.spec.num_local)), " of weights\n");
  if (plan.options.chunk > 0) out += concat("chunks of ", plan.options.chunk, " rows\n");
  const Ceilings& c = plan.ceilings;
  out += concat("ceilings: read ", number(c.read_gbps), " GB/s, f32 FMA ", number(c.f32_gflops), " GF/s, bf16 dot ",
                c.bf16_dot_gflops > 0 ? number(c.bf16_dot_gflops) + " GF/s" : std::string("none"), ", int8 ",
                number(c.int8_gops), " Gop/s\n");
  out += concat("estimate ", number(bucket.estimate_us), " us, floor ", number(bucket.floor_us), " us (both for ",
                bucket.max_tokens, " tokens, uniform routing, weights from memory)\n");
  return out;
}

}  // namespace moekit::inline v0
