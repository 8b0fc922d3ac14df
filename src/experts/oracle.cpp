#include "experts/oracle.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "experts/activation.hpp"
#include "experts/call.hpp"
#include "experts/canonical.hpp"
#include "experts/dequantise.hpp"
#include "experts/error_bound.hpp"

namespace moekit::oracle {
namespace {
using experts::ActivationRow;
using experts::ExpertMatrices;

/// A result row that one expert adds to.
struct Route {
  std::size_t result;  // index into Expected::rows
  std::int64_t row;    // of the activations
  double weight;
};

struct Dot {
  double sum = 0, abs_sum = 0;
};

/// Σ a·b and Σ |a·b|; four partial sums, so that the compiler may use vectors.
Dot dot(const double* a, const double* b, std::int64_t n) {
  double sum[4]{}, abs_sum[4]{};
  std::int64_t i = 0;
  for (; i + 4 <= n; i += 4)
    for (int lane = 0; lane < 4; ++lane) {
      const double product = a[i + lane] * b[i + lane];
      sum[lane] += product;
      abs_sum[lane] += std::abs(product);
    }
  for (; i < n; ++i) {
    sum[0] += a[i] * b[i];
    abs_sum[0] += std::abs(a[i] * b[i]);
  }
  return {(sum[0] + sum[1]) + (sum[2] + sum[3]), (abs_sum[0] + abs_sum[1]) + (abs_sum[2] + abs_sum[3])};
}

/// body(begin, end) over [0, n) in slabs, on all threads of the executor.
template <class Body>
void parallel(Executor& executor, std::int64_t n, const Body& body) {
  constexpr std::int64_t kSlab = 32;
  struct Job {
    const Body* body;
    std::int64_t n;
  } job{&body, n};
  executor.run((n + kSlab - 1) / kSlab,
               [](void* arg, std::int64_t i) {
                 const Job& j = *static_cast<Job*>(arg);
                 (*j.body)(i * kSlab, std::min(j.n, (i + 1) * kSlab));
               },
               &job);
}

class Calculation {
 public:
  Calculation(const ExpertsArgs& call, std::span<const Rounded> rounded, Executor& executor)
      : call_(call),
        rounded_(rounded),
        executor_(executor),
        K_(call.weights.spec.hidden),
        I_(call.weights.spec.intermediate),
        batched_(call.activations.data.rank == 3) {
    for (const Rounded& r : rounded)
      models_.emplace_back(r.at, call.quant ? &call.quant->spec() : nullptr, call.activation);
  }

  Expected run(std::vector<std::int64_t> rows) {
    out_.columns = K_;
    out_.rows = std::move(rows);
    const std::size_t n = out_.rows.size() * static_cast<std::size_t>(K_);
    out_.value.assign(n, 0.0);
    abs_sum_.assign(rounded_.size(), std::vector<double>(n, 0.0));
    carried_ = abs_sum_;
    terms_.assign(out_.rows.size(), 0);
    const auto routes = routes_by_slot();
    for (std::size_t slot = 0; slot < routes.size(); ++slot)
      if (!routes[slot].empty()) run_expert(static_cast<std::int64_t>(slot), routes[slot]);
    finish();
    return std::move(out_);
  }

 private:
  std::vector<std::vector<Route>> routes_by_slot() {
    std::vector<std::vector<Route>> routes(static_cast<std::size_t>(call_.weights.spec.num_local));
    for (std::size_t r = 0; r < out_.rows.size(); ++r) {
      const std::int64_t row = out_.rows[r];
      if (batched_) {
        const std::int64_t capacity = call_.activations.data.shape[1];
        routes[static_cast<std::size_t>(row / capacity)].push_back({r, row % capacity, 1.0});
        terms_[r] = 1;
        continue;
      }
      for (std::int64_t j = 0; j < call_.routing.top_k(); ++j) {
        const std::int64_t slot = experts::local_slot(call_.routing.ids.at<const std::int32_t>(row, j), call_);
        if (slot < 0) continue;
        const double weight = call_.weight_on_input ? 1.0 : call_.routing.weights.at<const float>(row, j);
        routes[static_cast<std::size_t>(slot)].push_back({r, row, weight});
        ++terms_[r];
      }
    }
    return routes;
  }

  void run_expert(std::int64_t slot, const std::vector<Route>& routes) {
    const WeightsSpec& spec = call_.weights.spec;
    const experts::CanonicalLayout layout(spec);
    std::vector<std::byte> memory(layout.bytes());
    throw_if_failed(call_.weights.format->unpack_expert(call_.weights.expert(slot), spec, layout.view(memory.data())));
    const ExpertMatrices expert(spec, layout.view(memory.data()));
    x_.resize(routes.size() * static_cast<std::size_t>(K_));
    for (std::size_t r = 0; r < routes.size(); ++r) {
      const ActivationRow row(call_, slot, routes[r].row);
      for (std::int64_t k = 0; k < K_; ++k) x_[r * static_cast<std::size_t>(K_) + static_cast<std::size_t>(k)] = row[k];
    }
    h_.resize(routes.size() * static_cast<std::size_t>(I_));
    h_error_.assign(rounded_.size(), std::vector<double>(h_.size()));
    parallel(executor_, I_, [&](std::int64_t begin, std::int64_t end) { first_gemm(expert, routes, begin, end); });
    for (std::size_t r = 0; r < routes.size(); ++r) store_h(slot, routes[r].row, r);
    parallel(executor_, K_, [&](std::int64_t begin, std::int64_t end) { second_gemm(expert, routes, begin, end); });
  }

  /// One row of gate or up with its bias.
  struct Half {
    std::vector<double> row;
    double bias = 0;
    void load(const experts::WeightMatrix& matrix, const float* biases, std::int64_t i) {
      row.resize(static_cast<std::size_t>(matrix.data.shape[1]));
      matrix.row(i, row.data());
      bias = biases ? biases[i] : 0.0;
    }
    Dot times(const double* x) const {
      Dot d = dot(row.data(), x, static_cast<std::int64_t>(row.size()));
      return {d.sum + bias, d.abs_sum + std::abs(bias)};
    }
  };

  void first_gemm(const ExpertMatrices& expert, const std::vector<Route>& routes, std::int64_t begin,
                  std::int64_t end) {
    Half gate_half, up_half;
    for (std::int64_t i = begin; i < end; ++i) {
      if (call_.activation.gated) gate_half.load(expert.gate, expert.gate_bias, i);
      up_half.load(expert.up, expert.up_bias, i);
      for (std::size_t r = 0; r < routes.size(); ++r) {
        const double* x = x_.data() + r * static_cast<std::size_t>(K_);
        const Dot gate = call_.activation.gated ? gate_half.times(x) : Dot{}, up = up_half.times(x);
        const std::size_t at = r * static_cast<std::size_t>(I_) + static_cast<std::size_t>(i);
        h_[at] = experts::activate(call_.activation, gate.sum, up.sum);
        for (std::size_t q = 0; q < models_.size(); ++q)
          h_error_[q][at] = models_[q].activate(gate.sum, models_[q].dot(K_, gate.sum, gate.abs_sum), up.sum,
                                                models_[q].dot(K_, up.sum, up.abs_sum));
      }
    }
  }

  void store_h(std::int64_t slot, std::int64_t row, std::size_t route) {
    const auto begin = route * static_cast<std::size_t>(I_), size = static_cast<std::size_t>(I_);
    const std::span<double> h(h_.data() + begin, size);
    std::vector<std::span<double>> errors;
    for (std::vector<double>& all : h_error_) errors.emplace_back(all.data() + begin, size);
    if (experts::quantises_h(call_)) return quantise_h(experts::h_scheme(call_, slot, row), h, errors);
    for (std::size_t q = 0; q < models_.size(); ++q)
      for (std::size_t i = 0; i < size; ++i) errors[q][i] = models_[q].store_h(h[i], errors[q][i]);
  }

  void second_gemm(const ExpertMatrices& expert, const std::vector<Route>& routes, std::int64_t begin,
                   std::int64_t end) {
    Half down;
    std::vector<double> magnitude(static_cast<std::size_t>(I_));
    for (std::int64_t c = begin; c < end; ++c) {
      down.load(expert.down, expert.down_bias, c);
      for (std::size_t i = 0; i < magnitude.size(); ++i) magnitude[i] = std::abs(down.row[i]);
      for (std::size_t r = 0; r < routes.size(); ++r) {
        const std::size_t from = r * static_cast<std::size_t>(I_);
        const Dot y = down.times(h_.data() + from);
        const std::size_t at = routes[r].result * static_cast<std::size_t>(K_) + static_cast<std::size_t>(c);
        const double weight = std::abs(routes[r].weight);
        out_.value[at] += routes[r].weight * y.sum;
        for (std::size_t q = 0; q < models_.size(); ++q) {
          const double h_part = dot(magnitude.data(), h_error_[q].data() + from, I_).sum;
          double error = models_[q].second_dot(I_, y.sum, y.abs_sum + h_part, h_part);
          error = models_[q].store_expert_output(y.sum, error);
          abs_sum_[q][at] += weight * (std::abs(y.sum) + error);
          carried_[q][at] += weight * error;
        }
      }
    }
  }

  void finish() {
    for (std::size_t q = 0; q < models_.size(); ++q) {
      out_.bound.emplace_back(out_.value.size());
      for (std::size_t at = 0; at < out_.value.size(); ++at) {
        const std::int64_t terms = terms_[at / static_cast<std::size_t>(K_)];
        const double error = batched_ ? carried_[q][at] : models_[q].combine(terms, abs_sum_[q][at], carried_[q][at]);
        // an f32 sum comes before a narrower output
        const double stored = error + rounding(DType::f32, out_.value[at], error);
        out_.bound[q][at] = terms == 0 ? 0.0 : stored + rounding(rounded_[q].output, out_.value[at], stored);
      }
    }
  }

  const ExpertsArgs& call_;
  std::span<const Rounded> rounded_;
  Executor& executor_;
  std::int64_t K_, I_;
  bool batched_;
  std::vector<ErrorModel> models_;
  std::vector<double> x_, h_;
  std::vector<std::vector<double>> h_error_, abs_sum_, carried_;  // one for each model
  std::vector<std::int64_t> terms_;
  Expected out_;
};

double largest(DType type) {
  if (type == DType::f16) return 65504.0;
  return type == DType::bf16 ? 0x1.fep127 : 0x1.fffffep127;
}

/// |value - reference| / bound; infinite where one of them should be a number and is not, or the other way round.
double miss(double value, double reference, double bound, DType type) {
  const double infinite = std::numeric_limits<double>::infinity();
  if (!std::isfinite(reference) || std::abs(reference) - bound > largest(type))
    return std::isfinite(value) ? infinite : 0;
  if (!std::isfinite(value)) return std::abs(reference) + bound > largest(type) ? 0 : infinite;
  const double difference = std::abs(value - reference);
  return difference == 0 ? 0 : bound > 0 ? difference / bound : infinite;
}

}  // namespace

std::vector<std::int64_t> sample_rows(std::int64_t num_rows, std::int64_t count, std::uint64_t seed) {
  std::vector<std::int64_t> rows;
  if (num_rows <= count + 2) {
    for (std::int64_t r = 0; r < num_rows; ++r) rows.push_back(r);
    return rows;
  }
  rows = {0, num_rows - 1};
  for (std::uint64_t state = seed; static_cast<std::int64_t>(rows.size()) < count + 2;) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const auto row = static_cast<std::int64_t>((state >> 33) % static_cast<std::uint64_t>(num_rows));
    if (std::find(rows.begin(), rows.end(), row) == rows.end()) rows.push_back(row);
  }
  std::sort(rows.begin(), rows.end());
  return rows;
}

Expected ask(const ExpertsArgs& call, std::span<const Rounded> rounded, std::span<const std::int64_t> rows,
             Executor& executor) {
  ProblemSize size;
  throw_if_failed(ProblemSize::from(call.activations.data, call.weights.spec, call.routing.ids, size));
  std::vector<std::int64_t> wanted(rows.begin(), rows.end());
  if (call.activations.data.rank == 3) {
    wanted.clear();
    for (std::int64_t slot = 0; slot < size.L; ++slot)
      for (std::int64_t r = 0; r < call.tokens->counts.as<const std::int32_t>()[slot]; ++r)
        wanted.push_back(slot * size.M + r);
  }
  return Calculation(call, rounded, executor).run(std::move(wanted));
}

Worst compare(const Tensor& output, const Expected& expected, std::size_t which) {
  const Tensor flat = output.rank == 2 ? output
                                       : Tensor(output.data, output.dtype,
                                                {output.shape[0] * output.shape[1], output.shape[2]}, output.device);
  Worst worst;
  worst.ratio = -1;
  for (std::size_t r = 0; r < expected.rows.size(); ++r)
    for (std::int64_t c = 0; c < expected.columns; ++c) {
      const std::size_t at = r * static_cast<std::size_t>(expected.columns) + static_cast<std::size_t>(c);
      const double bound = expected.bound[which][at];
      const double value =
          numeric::load_f32(flat.data, flat.dtype, expected.rows[r] * flat.stride[0] + c * flat.stride[1]);
      const double ratio = miss(value, expected.value[at], bound, flat.dtype);
      if (ratio > worst.ratio) worst = {ratio <= 1, expected.rows[r], c, value, expected.value[at], bound, ratio};
    }
  worst.ratio = std::max(worst.ratio, 0.0);
  return worst;
}

}  // namespace moekit::oracle
