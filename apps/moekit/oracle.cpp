#include "oracle.hpp"

#include <algorithm>
#include <cmath>
#include <mutex>

#include "console.hpp"
#include "experts/oracle.hpp"
#include "quant/numeric.hpp"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define MOEKIT_CLI_CLONES __attribute__((target_clones("avx2,fma", "default")))
#else
#define MOEKIT_CLI_CLONES
#endif

namespace moekit::cli {
namespace {

MOEKIT_CLI_CLONES double dot(const float* a, const double* b, std::int64_t n) {
  double sum[8] = {};
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int lane = 0; lane < 8; ++lane) sum[lane] += static_cast<double>(a[i + lane]) * b[i + lane];
  double total = 0;
  for (; i < n; ++i) total += static_cast<double>(a[i]) * b[i];
  for (const double part : sum) total += part;
  return total;
}

/// Σ (a·b)² beside Σ a·b.
MOEKIT_CLI_CLONES void dot_and_squares(const float* a, const double* b, std::int64_t n, double& total,
                                       double& squares) {
  double sum[8] = {}, square[8] = {};
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int lane = 0; lane < 8; ++lane) {
      const double product = static_cast<double>(a[i + lane]) * b[i + lane];
      sum[lane] += product;
      square[lane] += product * product;
    }
  total = squares = 0;
  for (; i < n; ++i) {
    const double product = static_cast<double>(a[i]) * b[i];
    total += product;
    squares += product * product;
  }
  for (int lane = 0; lane < 8; ++lane) {
    total += sum[lane];
    squares += square[lane];
  }
}

}  // namespace

Matrix dequantise(const Tensor& data, const Tensor& scale, const QuantDesc& desc) {
  Matrix out{data.shape[0], data.shape[1], std::vector<float>(static_cast<std::size_t>(data.numel()))};
  const std::int64_t per_row = desc.granularity.rows < 0 ? out.rows : desc.granularity.rows;
  const std::int64_t per_column = desc.granularity.cols < 0 ? out.columns : desc.granularity.cols;
  for (std::int64_t r = 0; r < out.rows; ++r) {
    for (std::int64_t c = 0; c < out.columns; ++c) {
      float value = numeric::load_f32(data.data, data.dtype, r * data.stride[0] + c * data.stride[1]);
      if (scale.present()) {
        const std::int64_t column_stride = scale.rank == 2 ? scale.stride[1] : 0;
        value *= numeric::load_f32(scale.data, scale.dtype,
                                   (r / per_row) * scale.stride[0] + (c / per_column) * column_stride);
      }
      out.values[static_cast<std::size_t>(r * out.columns + c)] = value;
    }
  }
  return out;
}

namespace {

std::vector<double> bias_of(const Tensor& bias) {
  std::vector<double> out;
  for (std::int64_t i = 0; bias.present() && i < bias.shape[0]; ++i)
    out.push_back(numeric::load_f32(bias.data, bias.dtype, i * bias.stride[0]));
  return out;
}

/// One expert (or shared expert), dequantised.
struct Dense {
  Matrix gate, up, down;
  std::vector<double> gate_bias, up_bias, down_bias;

  Dense(const CanonicalExpert& e, const QuantDesc& w1, const QuantDesc& w2)
      : up(dequantise(e.up, e.up_scale, w1)),
        down(dequantise(e.down, e.down_scale, w2)),
        gate_bias(bias_of(e.gate_bias)),
        up_bias(bias_of(e.up_bias)),
        down_bias(bias_of(e.down_bias)) {
    if (e.gate.present()) gate = dequantise(e.gate, e.gate_scale, w1);
  }
};

double sigmoid(double v) { return 1.0 / (1.0 + std::exp(-v)); }

double activate(const Activation& a, double gate, double up) {
  const double u = std::clamp(up, -static_cast<double>(a.clamp_up), static_cast<double>(a.clamp_up));
  const double v = a.gated ? std::min(gate, static_cast<double>(a.clamp_gate)) : u;
  double f = v;
  switch (a.kind) {
    case ActivationKind::silu: f = v * sigmoid(a.alpha * v); break;
    case ActivationKind::gelu: f = 0.5 * v * (1.0 + std::erf(v * M_SQRT1_2)); break;
    case ActivationKind::gelu_tanh:
      f = 0.5 * v * (1.0 + std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)));
      break;
    case ActivationKind::swigluoai: return v * sigmoid(a.alpha * v) * (u + a.beta);
    case ActivationKind::relu2: f = v > 0 ? v * v : 0.0; break;
    case ActivationKind::none: break;
  }
  return a.gated ? f * u : f;
}

/// Quantises a row in place as the scheme says (f32 arithmetic, nearest even) and gives each element's step.
void quantise_row(std::vector<double>& row, const QuantDesc& desc, float int8_divisor, std::vector<double>& steps) {
  steps.assign(row.size(), 0.0);
  if (is_float(desc.type)) return;
  const std::size_t group = desc.granularity.cols < 0 ? row.size() : static_cast<std::size_t>(desc.granularity.cols);
  const float divisor = desc.type == DType::i8 ? int8_divisor : 448.0f;
  for (std::size_t begin = 0; begin < row.size(); begin += group) {
    const std::size_t end = std::min(begin + group, row.size());
    float largest = 0;
    for (std::size_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(static_cast<float>(row[i])));
    const float scale = largest / divisor;
    for (std::size_t i = begin; i < end; ++i) {
      if (scale == 0) {
        row[i] = 0;
        continue;
      }
      const bool serving = desc.type == DType::i8 && int8_divisor == 127.0f;  // kernels multiply by 127 / absmax
      const float ratio =
          serving ? static_cast<float>(row[i]) * (divisor / largest) : static_cast<float>(row[i]) / scale;
      if (desc.type == DType::i8) {
        const float code = std::clamp(std::nearbyint(ratio), serving ? -127.0f : -128.0f, 127.0f);
        row[i] = static_cast<double>(code) * static_cast<double>(scale);
        steps[i] = scale;
      } else {
        const float code = numeric::e4m3_to_f32(numeric::f32_to_e4m3(ratio));
        row[i] = static_cast<double>(code) * static_cast<double>(scale);
        steps[i] = scale * std::max(std::ldexp(1.0, std::ilogb(std::max(std::fabs(code), 0x1p-6f)) - 3), 0x1p-9);
      }
    }
  }
}

/// Where one expert's contribution to one row goes.
struct Row {
  double* y;
  double* noise;  // squares until the end
  double* routes;
  double* flip;
};

/// row += weight · expert(x)
void add_expert(const Dense& expert, const std::vector<double>& x, double weight, const Activation& activation,
                const QuantSpec* quant, const Row& out) {
  const std::int64_t I = expert.up.rows, K = expert.down.rows;
  std::vector<double> h(static_cast<std::size_t>(I)), steps;
  for (std::int64_t i = 0; i < I; ++i) {
    const auto at = static_cast<std::size_t>(i);
    double up = dot(expert.up.row(i), x.data(), expert.up.columns), gate = 0;
    if (!expert.up_bias.empty()) up += expert.up_bias[at];
    if (expert.gate.rows > 0) gate = dot(expert.gate.row(i), x.data(), expert.gate.columns);
    if (!expert.gate_bias.empty()) gate += expert.gate_bias[at];
    h[at] = activate(activation, gate, up);
  }
  if (quant != nullptr) quantise_row(h, quant->a2, quant->int8_divisor, steps);
  const double step = steps.empty() ? 0 : *std::max_element(steps.begin(), steps.end());
  for (std::int64_t c = 0; c < K; ++c) {
    double total, squares;
    dot_and_squares(expert.down.row(c), h.data(), I, total, squares);
    if (!expert.down_bias.empty()) total += expert.down_bias[static_cast<std::size_t>(c)];
    out.y[c] += weight * total;
    out.noise[c] += weight * weight * squares;
    out.routes[c] += std::fabs(weight * total);
    if (step > 0) {
      double largest = 0;
      for (std::int64_t i = 0; i < I; ++i)
        largest = std::max(largest, steps[static_cast<std::size_t>(i)] * std::fabs(expert.down.row(c)[i]));
      out.flip[c] = std::max(out.flip[c], largest * std::fabs(weight));
    }
  }
}

std::vector<double> row_of(const Tensor& t, std::int64_t r) {
  std::vector<double> out(static_cast<std::size_t>(t.shape[1]));
  for (std::size_t c = 0; c < out.size(); ++c)
    out[c] = numeric::load_f32(t.data, t.dtype, r * t.stride[0] + static_cast<std::int64_t>(c) * t.stride[1]);
  return out;
}

/// One expert's share of every row that chose it; results of different experts are merged under a lock.
class Task {
 public:
  Task(const OracleProblem& problem, OracleResult& result) : problem_(problem), result_(result) {
    std::vector<std::vector<Route>> by_expert(static_cast<std::size_t>(problem.config.num_experts));
    for (std::size_t i = 0; i < problem.rows.size(); ++i)
      for (std::int64_t j = 0; j < problem.routing.top_k(); ++j) {
        const std::int32_t e = problem.routing.ids.at<std::int32_t>(problem.rows[i], j);
        if (e >= 0 && e < problem.config.num_experts)
          by_expert[static_cast<std::size_t>(e)].push_back({i, problem.routing.weights.at<float>(problem.rows[i], j)});
      }
    for (std::size_t e = 0; e < by_expert.size(); ++e)
      if (!by_expert[e].empty()) work_.push_back({static_cast<std::int64_t>(e), std::move(by_expert[e])});
  }
  std::int64_t size() const { return static_cast<std::int64_t>(work_.size()); }
  void run(std::int64_t index) {
    const auto& [e, routes] = work_[static_cast<std::size_t>(index)];
    CanonicalExpert canonical;
    {
      const std::lock_guard lock(mutex_);
      const Status status = problem_.source.expert(e, canonical);
      if (!status.ok()) {
        failure_ = status;
        return;
      }
    }
    const LayerConfig& config = problem_.config;
    const Dense dense(canonical, config.quant.w1, config.quant.w2);
    for (const Route& route : routes) add(dense, route);
  }
  Status failure() const { return failure_; }

 private:
  struct Route {
    std::size_t row;
    float weight;
  };
  void add(const Dense& dense, const Route& route) {
    const LayerConfig& config = problem_.config;
    std::vector<double> x = row_of(problem_.hidden, problem_.rows[route.row]), steps;
    double weight = route.weight;
    if (config.router.weight_on_input) {
      for (double& v : x)
        v = numeric::round_to(problem_.hidden.dtype, static_cast<float>(v) * static_cast<float>(weight));
      weight = 1;
    }
    quantise_row(x, config.quant.a1, config.quant.int8_divisor, steps);
    const auto K = static_cast<std::size_t>(config.hidden);
    std::vector<double> mine(4 * K);
    add_expert(dense, x, weight, config.activation, &config.quant,
               {mine.data(), mine.data() + K, mine.data() + 2 * K, mine.data() + 3 * K});
    const std::lock_guard lock(mutex_);
    for (std::size_t c = 0; c < K; ++c) {
      const std::size_t at = route.row * K + c;
      result_.y[at] += mine[c];
      result_.noise[at] += mine[K + c];
      result_.routes[at] += mine[2 * K + c];
      result_.flip[at] = std::max(result_.flip[at], mine[3 * K + c]);
    }
  }
  const OracleProblem& problem_;
  OracleResult& result_;
  std::vector<std::pair<std::int64_t, std::vector<Route>>> work_;
  std::mutex mutex_;
  Status failure_;
};

void add_shared(const OracleProblem& problem, OracleResult& result) {
  const LayerConfig& config = problem.config;
  if (config.shared.intermediate == 0) return;
  const QuantDesc plain{config.dtype, {}};
  const bool quantised = config.shared.quantised;
  const Dense dense(problem.source.shared.expert, quantised ? config.quant.w1 : plain,
                    quantised ? config.quant.w2 : plain);
  for (std::size_t i = 0; i < problem.rows.size(); ++i) {
    std::vector<double> x = row_of(problem.hidden, problem.rows[i]), steps;
    double weight = 1;
    if (config.shared.sigmoid_gate) {
      const Matrix gate = dequantise(problem.source.shared.gate_vector, {}, plain);
      weight = sigmoid(dot(gate.row(0), x.data(), gate.columns));
    }
    if (quantised) quantise_row(x, config.quant.a1, config.quant.int8_divisor, steps);
    const std::size_t at = i * static_cast<std::size_t>(config.hidden);
    add_expert(dense, x, weight, config.shared.activation, quantised ? &config.quant : nullptr,
               {&result.y[at], &result.noise[at], &result.routes[at], &result.flip[at]});
  }
}

/// Half an ulp of a value just below a power of two, relative to it; just above one it is twice that.
double unit_roundoff(DType type) {
  if (type == DType::bf16) return 0x1p-9;
  return type == DType::f16 ? 0x1p-12 : 0x1p-24;
}

}  // namespace

OracleResult oracle(const OracleProblem& problem) {
  OracleResult out;
  out.columns = problem.config.hidden;
  const std::size_t n = problem.rows.size() * static_cast<std::size_t>(out.columns);
  for (auto* values : {&out.y, &out.noise, &out.routes, &out.flip}) values->assign(n, 0.0);
  Task task(problem, out);
  cpu_executor().run(
      task.size(), [](void* arg, std::int64_t i) { static_cast<Task*>(arg)->run(i); }, &task);
  throw_if_failed(task.failure());
  add_shared(problem, out);
  for (std::size_t i = 0; i < n; ++i) {
    out.noise[i] = std::sqrt(out.noise[i]);
    out.largest = std::max(out.largest, std::fabs(out.y[i]));
  }
  return out;
}

std::vector<std::int64_t> sampled_rows(std::int64_t num_tokens, std::uint64_t seed) {
  return moekit::oracle::sample_rows(num_tokens, 32, seed);
}

std::string Comparison::text() const {
  return format("%.7g instead of %.7g at [%lld, %lld]: %.2e of the largest output off, bound %.2e%s", got, want,
                static_cast<long long>(t), static_cast<long long>(c), worst_rel, tol,
                finite ? "" : "; not every element is finite");
}

Comparison compare(const Tensor& got, const std::vector<std::int64_t>& rows, const OracleResult& want,
                   const LayerConfig& config) {
  Comparison out;
  const double u = unit_roundoff(config.dtype);
  double worst = -1, error_squares = 0, value_squares = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for (std::int64_t c = 0; c < want.columns; ++c) {
      const std::size_t at = i * static_cast<std::size_t>(want.columns) + static_cast<std::size_t>(c);
      const double value = numeric::load_f32(got.data, got.dtype, rows[i] * got.stride[0] + c * got.stride[1]);
      const double error = std::fabs(value - want.y[at]);
      const double bound = 6 / std::sqrt(3.0) * u * want.noise[at] + 1e-5 * want.largest + 4 * want.flip[at] +
                           (config.dtype == DType::f32 ? 0 : 2 * u * (std::fabs(want.y[at]) + want.routes[at]));
      if (!std::isfinite(value)) out.finite = false;
      error_squares += error * error;
      value_squares += want.y[at] * want.y[at];
      out.max_abs = std::max(out.max_abs, error);
      const double share = std::isfinite(value) ? error / std::max(bound, 1e-300) : 1e300;
      if (share <= worst) continue;
      worst = share;
      out.t = rows[i];
      out.c = c;
      out.got = value;
      out.want = want.y[at];
      out.worst_abs = error;
      out.worst_rel = want.largest > 0 ? error / want.largest : error;
      out.tol = want.largest > 0 ? bound / want.largest : 0;
    }
  }
  out.max_rel = want.largest > 0 ? out.max_abs / want.largest : out.max_abs;
  out.rms_rel = value_squares > 0 ? std::sqrt(error_squares / value_squares) : 0;
  out.ok = out.finite && worst <= 1;
  return out;
}

Comparison compare(const Tensor& got, const Tensor& want, double tol, double rms_tol) {
  Comparison out;
  out.tol = tol;
  double largest = 0, error_squares = 0, value_squares = 0, worst = -1;
  for (std::int64_t t = 0; t < want.shape[0]; ++t) {
    for (std::int64_t c = 0; c < want.shape[1]; ++c) {
      const double w = want.dtype == DType::f64 ? want.at<double>(t, c) : static_cast<double>(want.at<float>(t, c));
      const double g = numeric::load_f32(got.data, got.dtype, t * got.stride[0] + c * got.stride[1]);
      const double error = std::isfinite(g) ? std::fabs(g - w) : 1e300;
      out.finite = out.finite && std::isfinite(g);
      largest = std::max(largest, std::fabs(w));
      value_squares += w * w;
      if (std::isfinite(g)) error_squares += error * error;
      if (error <= worst) continue;
      worst = error;
      out.t = t;
      out.c = c;
      out.got = g;
      out.want = w;
    }
  }
  out.max_abs = std::max(worst, 0.0);
  out.max_rel = largest > 0 ? out.max_abs / largest : out.max_abs;
  out.worst_abs = out.max_abs;
  out.worst_rel = out.max_rel;
  out.rms_rel = value_squares > 0 ? std::sqrt(error_squares / value_squares) : 0;
  out.ok = out.finite && out.max_rel <= tol && (rms_tol == 0 || out.rms_rel <= rms_tol);
  return out;
}

}  // namespace moekit::cli
