// The oracle: every step of the rule as it is written down, in f64 from the logits given; nothing shared with the fast
// path. Choices:
//   - A score is strictly increasing in its logit. So where no bias comes between, the logits themselves choose, and a
//     score that underflows or saturates makes no ties.
//   - Scores below the smallest normal f32 are 0; a row without any mass (every logit -inf) has softmax scores 0.
//   - A logit of +inf takes all the softmax mass, in equal parts if there are several.
//   - 0/0 in the renormalisation is 0. Identity and sqrt_softplus of +inf have no finite norm: those weights are not.
#include "route/reference.hpp"

#include <cmath>
#include <limits>

#include "quant/numeric.hpp"

namespace moekit::route {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// What an expert is ranked by: the tier, then the value, then the lower index.
enum Tier : std::uint8_t { kTaken, kNan, kDropped, kKept };

struct Row {
  std::int64_t E = 0, k = 0;
  double logit[kMaxExperts];   // z, logit bias included
  double score[kMaxExperts];   // s
  double choice[kMaxExperts];  // c, or z where it orders alike
  Tier tier[kMaxExperts];
  bool nan = false;      // one of the logits is
  bool by_logit = true;  // choice is z
};

double load(const Tensor& tensor, std::int64_t i) {
  return tensor.dtype == DType::f64 ? tensor.as<double>()[i]
                                    : static_cast<double>(numeric::load_f32(tensor.data, tensor.dtype, i));
}

double flush(double score) { return std::abs(score) < static_cast<double>(kSmallestScore) ? 0.0 : score; }

/// e^(z - m), where m is the largest of a set that z belongs to; NaN and a set without mass give 0.
double mass(double z, double m) {
  if (std::isnan(z) || m == -kInfinity) return 0;
  return z == m ? 1.0 : std::exp(z - m);
}

void read_logits(const RouteArgs& args, std::int64_t row, Row& r) {
  r.nan = false;
  for (std::int64_t e = 0; e < r.E; ++e) {
    r.logit[e] = load(args.logits, row * args.logits.stride[0] + e);
    if (args.config->logit_bias) r.logit[e] += load(args.tensors->logit_bias, e);
    r.tier[e] = std::isnan(r.logit[e]) ? kNan : kKept;
    r.nan = r.nan || r.tier[e] == kNan;
  }
}

void score_row(Score kind, Row& r) {
  double m = -kInfinity, sum = 0;
  for (std::int64_t e = 0; e < r.E; ++e)
    if (r.logit[e] > m) m = r.logit[e];
  for (std::int64_t e = 0; e < r.E; ++e) sum += mass(r.logit[e], m);
  for (std::int64_t e = 0; e < r.E; ++e) {
    const double z = r.logit[e];
    switch (kind) {
      case Score::softmax: r.score[e] = sum > 0 ? flush(mass(z, m) / sum) : 0.0; break;
      case Score::sigmoid: r.score[e] = flush(1.0 / (1.0 + std::exp(-z))); break;
      case Score::sqrt_softplus:
        r.score[e] = flush(std::sqrt(std::fmax(z, 0.0) + std::log1p(std::exp(-std::abs(z)))));
        break;
      case Score::identity: r.score[e] = z; break;
    }
  }
}

void set_choices(const RouteArgs& args, Row& r) {
  const RouterConfig& config = *args.config;
  r.by_logit = !config.selection_bias;
  for (std::int64_t e = 0; e < r.E; ++e) {
    r.choice[e] = r.logit[e];
    if (config.selection_bias) {
      const double chosen_by = config.softmax_over == SoftmaxOver::selected ? r.logit[e] : r.score[e];
      r.choice[e] = chosen_by + load(args.tensors->selection_bias, e);
      if (std::isnan(r.choice[e])) r.tier[e] = kNan;
    }
  }
}

/// Index of the best of n by (tier, value, lower index), none of them taken.
std::int64_t best(const Tier* tier, const double* value, std::int64_t n) {
  std::int64_t at = 0;
  for (std::int64_t i = 1; i < n; ++i)
    if (tier[i] > tier[at] || (tier[i] == tier[at] && tier[i] != kNan && value[i] > value[at])) at = i;
  return at;
}

/// Score of the group [begin, end); kNan if it has none.
Tier group_score(const Row& r, GroupScore kind, std::int64_t begin, std::int64_t end, double& out) {
  double first = -kInfinity, second = -kInfinity;
  bool any = false;
  for (std::int64_t e = begin; e < end; ++e) {
    if (r.tier[e] == kNan) continue;
    const double value = kind == GroupScore::top2_sum && r.by_logit ? r.score[e] : r.choice[e];
    any = true;
    second = std::fmax(second, std::fmin(first, value));
    first = std::fmax(first, value);
  }
  out = kind == GroupScore::max ? first : first + second;
  return any && !std::isnan(out) ? kKept : kNan;
}

void drop_groups(const RouterConfig& config, Row& r) {
  const std::int64_t n = config.num_groups, per_group = r.E / n;
  double value[kMaxExperts];
  Tier tier[kMaxExperts];
  for (std::int64_t g = 0; g < n; ++g)
    tier[g] = group_score(r, config.group_score, g * per_group, (g + 1) * per_group, value[g]);
  for (std::int64_t i = 0; i < config.keep_groups; ++i) tier[best(tier, value, n)] = kTaken;
  // The logit whose score is 0 stands for a fill of 0 where logits choose.
  const double zero = r.by_logit && config.score != Score::identity ? -kInfinity : 0.0;
  for (std::int64_t e = 0; e < r.E; ++e) {
    if (tier[e / per_group] == kTaken) continue;
    if (config.group_fill == GroupFill::zero) {
      r.choice[e] = zero;
      if (r.by_logit) r.score[e] = 0;  // c and s are one value
    } else if (r.tier[e] == kKept) {
      r.tier[e] = kDropped, r.choice[e] = 0;
    }
  }
}

void softmax_selected(Row& r, const std::int32_t* ids, double* weights) {
  double m = -kInfinity, sum = 0;
  for (std::int64_t j = 0; j < r.k; ++j) m = std::fmax(m, r.logit[ids[j]]);
  for (std::int64_t j = 0; j < r.k; ++j) sum += mass(r.logit[ids[j]], m);
  for (std::int64_t j = 0; j < r.k; ++j) weights[j] = sum > 0 ? flush(mass(r.logit[ids[j]], m) / sum) : 0.0;
}

void renormalise(const RouterConfig& config, double* weights, std::int64_t k) {
  const double p = static_cast<double>(config.renorm_p), eps = static_cast<double>(config.renorm_eps);
  double largest = 0, sum = 0;
  for (std::int64_t j = 0; j < k; ++j) largest = std::fmax(largest, std::abs(weights[j]));
  if (largest > 0)
    for (std::int64_t j = 0; j < k; ++j) sum += std::pow(std::abs(weights[j]) / largest, p);
  const double norm = std::isinf(p) ? largest : largest * std::pow(sum, 1.0 / p);
  const double divisor = config.renorm_eps_mode == RenormEps::add ? norm + eps : std::fmax(norm, eps);
  for (std::int64_t j = 0; j < k; ++j) weights[j] = largest > 0 ? weights[j] / divisor : 0.0;
}

}  // namespace

void reference_row(const RouteArgs& args, const RouteSize& size, std::int64_t row) {
  const RouterConfig& config = *args.config;
  Row r;
  r.E = size.num_experts, r.k = size.top_k;
  std::int32_t* ids = args.ids.as<std::int32_t>() + row * args.ids.stride[0];
  float* out = args.weights.as<float>() + row * args.weights.stride[0];

  read_logits(args, row, r);
  score_row(config.score, r);
  set_choices(args, r);
  if (config.keep_groups < config.num_groups) drop_groups(config, r);
  for (std::int64_t j = 0; j < r.k; ++j) {
    ids[j] = static_cast<std::int32_t>(best(r.tier, r.choice, r.E));
    r.tier[ids[j]] = kTaken;
  }
  double weights[kMaxTopK];
  for (std::int64_t j = 0; j < r.k; ++j) weights[j] = r.score[ids[j]];
  if (config.softmax_over == SoftmaxOver::selected) softmax_selected(r, ids, weights);
  if (config.renormalise) renormalise(config, weights, r.k);
  for (std::int64_t j = 0; j < r.k; ++j)
    out[j] = r.nan ? std::numeric_limits<float>::quiet_NaN()
                   : static_cast<float>(weights[j] * static_cast<double>(config.scale));
}

namespace {

class Reference final : public Router {
 public:
  std::string_view name() const override { return "reference"; }
  Verdict supports(const RouteProblem& problem) const override { return route::supports(problem); }
  double estimate_us(const RouteProblem& problem, const Ceilings&) const override {
    // two exponentials of about 10 ns an expert, k scans of about 1 ns an expert
    return 1e-3 * static_cast<double>(problem.num_tokens) * static_cast<double>(problem.num_experts) *
           static_cast<double>(20 + problem.top_k);
  }
  Status route(const RouteArgs& args) const override {
    RouteSize size;
    if (Status s = check(args, size); !s.ok()) return s;
    for (std::int64_t row = 0; row < size.num_valid; ++row) reference_row(args, size, row);
    clear_rows(args, size.num_valid, size.num_rows);
    return {};
  }
};

}  // namespace

std::unique_ptr<Router> make_reference() { return std::make_unique<Reference>(); }

}  // namespace moekit::route
