// moekit bench --batched: experts on rows that lie per expert, [E, T, K], against the same rows as tokens, [M, K].
#include <algorithm>
#include <cmath>
#include <cstring>

#include <moekit/kit/implementations.hpp>

#include "bench.hpp"
#include "console.hpp"
#include "cpu/arena.hpp"
#include "quant/numeric.hpp"

namespace moekit::cli {
namespace {

std::unique_ptr<Experts> make_named(const std::string& name, const MakeContext& context) {
  for (const ExpertsEntry& entry : experts_implementations())
    if (entry.name == name) return entry.make(context);
  throw Error(StatusCode::unsupported, "[bench] there is no " + name, "batched experts are cpu_batched.*");
}

/// One experts implementation alone, with the memory of its calls.
class ExpertsCall {
 public:
  ExpertsCall(const BenchJob& job, const WeightsView& weights, std::string name, const Tensor& rows,
              std::optional<BatchedShape> batched)
      : name_(std::move(name)), experts_(make_named(name_, {.batched = batched})), quant_(job.config.quant, {}) {
    const LayerConfig& c = job.config;
    problem_.size = {c.num_experts, rows.shape[rows.rank - 2], c.w1_rows(), c.hidden, c.top_k};
    problem_.num_experts = c.num_experts;
    problem_.format = batched ? ActivationFormat::batched_experts : ActivationFormat::standard;
    problem_.batched = batched;
    problem_.weights = weights.spec;
    problem_.quant = c.quant;
    problem_.activation = c.activation;
    problem_.hidden_dtype = c.dtype;
    problem_.determinism = determinism_from_name(job.args.determinism.value_or("fast"));
    problem_.threads = job.executor->concurrency();
    if (const Verdict v = experts_->supports(problem_); !v.ok())
      throw Error(StatusCode::unsupported, "[bench] " + name_ + ": " + v.reason());
    const ExpertsWorkspace need = experts_->workspace(problem_);
    for (cpu::Arena* arena : {&w13_, &w2_, &out_}) *arena = cpu::Arena(256 + bytes_of(need, arena));
    args_.output = need.output.on(out_.data(), {});
    std::memset(out_.data(), 0xff, need.output.bytes());
    args_.activations.data = rows;
    args_.weights = weights;
    args_.activation = c.activation;
    args_.num_experts = c.num_experts;
    args_.quant = &quant_;
    args_.workspace13 = {w13_.data(), need.w13_bytes};
    args_.workspace2 = {w2_.data(), need.w2_bytes};
    args_.context.stream.executor = job.executor;
  }
  ExpertsArgs& args() { return args_; }
  const std::string& name() const { return name_; }
  double us() {
    ExpertsResult result;
    const double start = now_s();
    throw_if_failed(experts_->apply(args_, result));
    return (now_s() - start) * 1e6;
  }
  float at(std::int64_t row, std::int64_t column) const {
    const std::int64_t K = args_.output.shape[args_.output.rank - 1];
    return numeric::load_f32(args_.output.data, args_.output.dtype, row * K + column);
  }

 private:
  std::size_t bytes_of(const ExpertsWorkspace& need, const cpu::Arena* arena) const {
    return arena == &w13_ ? need.w13_bytes : arena == &w2_ ? need.w2_bytes : need.output.bytes();
  }
  std::string name_;
  std::unique_ptr<Experts> experts_;
  QuantConfig quant_;
  Problem problem_;
  cpu::Arena w13_, w2_, out_;
  ExpertsArgs args_;
};

/// Tokens whose slots go round the experts, so that every expert gets its share, and where the rows lie when batched.
struct EqualRows {
  RoutingRows routing;
  Buffer hidden, batched;
  std::vector<std::int32_t> counts;
  std::vector<std::int64_t> row_of;  ///< (token, slot) → row of [E · T]
  std::int64_t capacity = 0;         ///< T
};

EqualRows equal_rows(const BenchJob& job, std::int64_t tokens) {
  const std::int64_t E = job.config.num_experts, k = job.config.top_k, K = job.config.hidden;
  EqualRows out{{Buffer(DType::i32, {tokens, k}), Buffer(DType::f32, {tokens, k})},
                generated_rows(tokens, K, job.config.dtype, job.seed + 1),
                {},
                std::vector<std::int32_t>(static_cast<std::size_t>(E)),
                {},
                (tokens * k + E - 1) / E};
  out.batched = Buffer(job.config.dtype, {E, out.capacity, K});
  const auto row_bytes = static_cast<std::size_t>(K * bytes(job.config.dtype));
  for (std::int64_t route = 0; route < tokens * k; ++route) {
    const std::int64_t e = route % E, row = e * out.capacity + out.counts[static_cast<std::size_t>(e)]++;
    out.routing.ids.tensor.as<std::int32_t>()[route] = static_cast<std::int32_t>(e);
    out.routing.weights.tensor.as<float>()[route] = 1.0f / static_cast<float>(1 + route % k);
    out.row_of.push_back(row);
    std::memcpy(out.batched.bytes.data() + static_cast<std::size_t>(row) * row_bytes,
                out.hidden.tensor.index(route / k).data, row_bytes);
  }
  return out;
}

/// Largest distance of Σ w · batched rows from the standard result, as a share of the largest result.
double difference(const EqualRows& rows, const ExpertsCall& standard, const ExpertsCall& batched) {
  const std::int64_t M = rows.routing.ids.tensor.shape[0], k = rows.routing.ids.tensor.shape[1],
                     K = rows.hidden.tensor.shape[1];
  double worst = 0, largest = 0;
  for (std::int64_t t = 0; t < M; ++t)
    for (std::int64_t c = 0; c < K; ++c) {
      double sum = 0;
      for (std::int64_t route = t * k; route < (t + 1) * k; ++route)
        sum += static_cast<double>(rows.routing.weights.tensor.as<float>()[route]) *
               static_cast<double>(batched.at(rows.row_of[static_cast<std::size_t>(route)], c));
      const double distance = std::fabs(sum - static_cast<double>(standard.at(t, c)));
      worst = distance <= worst ? worst : distance;  // NaN goes through
      largest = std::max(largest, std::fabs(sum));
    }
  return largest > 0 ? worst / largest : INFINITY;
}

struct Pair {
  std::vector<double> standard_us, batched_us;
  double error = 0;
};

Pair measured(const BenchJob& job, const EqualRows& rows, ExpertsCall& standard, ExpertsCall& batched) {
  Pair out;
  standard.args().routing = batched.args().routing = rows.routing.view();
  const ExpertTokens tokens = ExpertTokens::from_host(rows.counts, {}, {});
  batched.args().tokens = &tokens;
  standard.us();
  batched.us();
  out.error = difference(rows, standard, batched);
  const double start = now_s();
  while (!interrupted() && (now_s() - start < job.args.seconds || out.batched_us.size() < 5)) {
    out.standard_us.push_back(standard.us());
    out.batched_us.push_back(batched.us());
  }
  return out;
}

void show(const BenchJob& job, std::int64_t tokens, const EqualRows& rows, const Pair& pair,
          const std::pair<std::string, std::string>& names) {
  const Summary ratio = summarise(ratios(pair.batched_us, pair.standard_us));
  if (job.args.json)
    return print(Json::object()
                     .set("schema", "moekit.bench.batched/1")
                     .set("shape", shape_string(job.config))
                     .set("tokens", tokens)
                     .set("rows_per_expert", rows.capacity)
                     .set("threads", job.executor->concurrency())
                     .set("standard", names.first)
                     .set("batched", names.second)
                     .set("standard_us", median(pair.standard_us))
                     .set("batched_us", median(pair.batched_us))
                     .set("batched_over_standard", ratio.median)
                     .set("ratio_p10", quantile(ratios(pair.batched_us, pair.standard_us), 0.1))
                     .set("ratio_p90", ratio.p90)
                     .set("samples", ratio.samples)
                     .set("verified", true)
                     .set("max_rel_difference", pair.error)
                     .dump());
  print(format(
      "%s, %lld tokens, %lld rows an expert: %s %s, %s %s: %.3f times as long (median of %lld pairs), "
      "results %.1e apart",
      shape_string(job.config).c_str(), static_cast<long long>(tokens), static_cast<long long>(rows.capacity),
      names.first.c_str(), format_us(median(pair.standard_us)).c_str(), names.second.c_str(),
      format_us(median(pair.batched_us)).c_str(), ratio.median, static_cast<long long>(ratio.samples), pair.error));
}

/// Two roundings of the intermediate at most differ; then each route's output and the sum are rounded to the type.
double bound_of(DType type) { return type == DType::f32 ? 1e-5 : type == DType::f16 ? 0x1p-9 : 0x1p-6; }

}  // namespace

Exit bench_batched(const BenchJob& job) {
  if (job.config.quant.activations_quantised())
    throw Error(StatusCode::unsupported, "[bench] --batched with quantised activations: in a later version",
                "give a float scheme: bf16, f16 or f32");
  const Plan plan = plan_for(job, job.args.impl.value_or(""));
  const std::string standard_name = chosen_experts(plan, job.tokens.back());
  const std::size_t dot = standard_name.find('.');
  if (standard_name.substr(0, dot) != "cpu" || dot == std::string::npos)
    throw Error(StatusCode::unsupported, "[bench] --batched compares cpu.* with cpu_batched.*, not " + standard_name,
                "--impl cpu.avx2, for instance");
  const std::string batched_name = "cpu_batched" + standard_name.substr(dot);
  const Weights weights = Weights::pack(plan, job.source);
  for (const std::int64_t tokens : job.tokens) {
    if (interrupted()) return Exit::interrupted;
    const EqualRows rows = equal_rows(job, tokens);
    ExpertsCall standard(job, weights.view(), standard_name, rows.hidden.tensor, {});
    ExpertsCall batched(job, weights.view(), batched_name, rows.batched.tensor, BatchedShape{rows.capacity, 1});
    const Pair pair = measured(job, rows, standard, batched);
    if (!(pair.error <= bound_of(job.config.dtype))) {
      talk(format("WRONG RESULT, row not printed: %s and %s are %.2e apart, bound %.2e", standard_name.c_str(),
                  batched_name.c_str(), pair.error, bound_of(job.config.dtype)));
      return Exit::check_failed;
    }
    show(job, tokens, rows, pair, {standard_name, batched_name});
  }
  return Exit::ok;
}

}  // namespace moekit::cli
