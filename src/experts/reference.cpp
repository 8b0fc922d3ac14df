// The experts as the definition says, in f64, one expert and one row of its weights at a time. Slow and plain on
// purpose: standard activations in, [M, K] weighted and reduced out. Nothing is rounded but what the scheme quantises
// and the output. Routes of an expert are worked on in blocks, so that scratch does not grow with the routing; a
// token's sum goes in ascending expert order, which in f64 no rounding of the output can tell from slot order.
#include "experts/reference.hpp"

#include <algorithm>

#include "experts/activation.hpp"
#include "experts/call.hpp"
#include "experts/canonical.hpp"
#include "experts/dequantise.hpp"

namespace moekit::experts {
namespace {

constexpr std::int64_t kBlock = 16;  // routes that share one dequantised row of weights

struct Route {
  std::int64_t token;
  double weight;
};

/// Pieces of the two workspaces. The output may lie over workspace13, so sums over k are kept in workspace2.
struct Scratch {
  Bytes expert;      // one canonical expert
  double* row[2];    // [max(K, I)] a row of gate (or down) and of up
  double* x;         // [kBlock, K]
  double* h;         // [kBlock, I]
  float* h32;        // [I] h as it is quantised
  std::byte* codes;  // [I]
  float* scales;     // [groups of I]
  double* sum;       // [M, K]
};

template <class T>
T* take(WorkspaceCursor& cursor, std::int64_t count) {
  return reinterpret_cast<T*>(cursor.take(static_cast<std::size_t>(count) * sizeof(T)).data);
}

Scratch divide(const WeightsSpec& spec, std::int64_t M, WorkspaceCursor& w13, WorkspaceCursor& w2) {
  const std::int64_t K = spec.hidden, I = spec.intermediate;
  Scratch s;
  s.expert = w13.take(CanonicalLayout(spec).bytes());
  for (double*& row : s.row) row = take<double>(w13, std::max(K, I));
  s.x = take<double>(w13, kBlock * K);
  s.h = take<double>(w13, kBlock * I);
  s.h32 = take<float>(w13, I);
  s.codes = take<std::byte>(w13, I);
  s.scales = take<float>(w13, I);
  s.sum = take<double>(w2, M * K);
  return s;
}

double dot(const double* a, const double* b, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

/// The second GEMM's input as its scheme stores it: h → f32 → codes and scales → code · scale.
void quantise_h(const ExpertsArgs& args, std::int64_t slot, std::int64_t token, const Scratch& s, double* h) {
  const std::int64_t I = args.weights.spec.intermediate;
  const quant::RowScheme scheme = h_scheme(args, slot, token);
  for (std::int64_t i = 0; i < I; ++i) s.h32[i] = static_cast<float>(h[i]);
  quant::quantise_row({s.h32, DType::f32, I}, scheme, s.codes, s.scales);
  for (std::int64_t i = 0; i < I; ++i) {
    const double code = numeric::load_f32(s.codes, scheme.type, i);
    h[i] = code * s.scales[quant::scale_index(i, scheme.group)];
  }
}

/// h[b] = f(gate · x[b] + bias, up · x[b] + bias) for the routes of a block.
void first_gemm(const ExpertsArgs& args, const ExpertMatrices& expert, std::int64_t count, const Scratch& s) {
  const std::int64_t K = args.weights.spec.hidden, I = args.weights.spec.intermediate;
  for (std::int64_t i = 0; i < I; ++i) {
    if (args.activation.gated) expert.gate.row(i, s.row[0]);
    expert.up.row(i, s.row[1]);
    for (std::int64_t b = 0; b < count; ++b) {
      double gate = args.activation.gated ? dot(s.row[0], s.x + b * K, K) : 0.0;
      double up = dot(s.row[1], s.x + b * K, K);
      if (expert.gate_bias != nullptr) gate += expert.gate_bias[i];
      if (expert.up_bias != nullptr) up += expert.up_bias[i];
      s.h[b * I + i] = activate(args.activation, gate, up);
    }
  }
}

/// sum[token] += weight · (down · h[b] + bias)
void second_gemm(const ExpertsArgs& args, const ExpertMatrices& expert, std::span<const Route> routes,
                 const Scratch& s) {
  const std::int64_t K = args.weights.spec.hidden, I = args.weights.spec.intermediate;
  for (std::int64_t c = 0; c < K; ++c) {
    expert.down.row(c, s.row[0]);
    for (std::size_t b = 0; b < routes.size(); ++b) {
      double y = dot(s.row[0], s.h + static_cast<std::int64_t>(b) * I, I);
      if (expert.down_bias != nullptr) y += expert.down_bias[c];
      s.sum[routes[b].token * K + c] += routes[b].weight * y;
    }
  }
}

void run_block(const ExpertsArgs& args, std::int64_t slot, std::span<const Route> routes, const Scratch& s) {
  const std::int64_t K = args.weights.spec.hidden, I = args.weights.spec.intermediate;
  const auto count = static_cast<std::int64_t>(routes.size());
  const ExpertMatrices expert(args.weights.spec, CanonicalLayout(args.weights.spec).view(s.expert.data));
  for (std::int64_t b = 0; b < count; ++b) {
    const ActivationRow x(args, slot, routes[static_cast<std::size_t>(b)].token);
    for (std::int64_t k = 0; k < K; ++k) s.x[b * K + k] = x[k];
  }
  first_gemm(args, expert, count, s);
  if (quantises_h(args))
    for (std::int64_t b = 0; b < count; ++b)
      quantise_h(args, slot, routes[static_cast<std::size_t>(b)].token, s, s.h + b * I);
  second_gemm(args, expert, routes, s);
}

Status run_expert(const ExpertsArgs& args, std::int64_t slot, const Scratch& s) {
  const Routing& routing = args.routing;
  const CanonicalExpert unpacked = CanonicalLayout(args.weights.spec).view(s.expert.data);
  Route block[kBlock];
  std::size_t count = 0;
  bool is_unpacked = false;
  for (std::int64_t t = 0; t < routing.num_tokens(); ++t)
    for (std::int64_t j = 0; j < routing.top_k(); ++j) {
      if (local_slot(routing.ids.at<const std::int32_t>(t, j), args) != slot) continue;
      if (!is_unpacked)
        if (Status st = args.weights.format->unpack_expert(args.weights.expert(slot), args.weights.spec, unpacked);
            !st.ok())
          return st;
      is_unpacked = true;
      block[count++] = {t, args.weight_on_input ? 1.0 : routing.weights.at<const float>(t, j)};
      if (count < kBlock) continue;
      run_block(args, slot, {block, count}, s);
      count = 0;
    }
  if (count > 0) run_block(args, slot, {block, count}, s);
  return {};
}

class Reference final : public Experts {
 public:
  std::string_view name() const override { return "reference"; }
  Verdict supports(const Problem& p) const override { return check_problem(p, ActivationFormat::standard); }
  Formats activation_formats() const override { return {}; }
  bool accepts(const PackFormat&) const override { return true; }  // through unpack_expert
  const PackFormat& preferred_format(const WeightsSpec&) const override { return canonical_format(); }
  InputSpec input_spec(const Problem& p) const override { return experts::input_spec(p); }
  ExpertsWorkspace workspace(const Problem& p, const ExpertTokens*) const override {
    return sizes(p.weights, p.size.M, output_type(p));
  }
  WeightAndReduce weight_and_reduce() const override { return WeightAndReduce::no_op(); }
  Determinism determinism() const override { return Determinism::batch_invariant; }
  Roundings roundings(const Problem&) const override { return {.sums = DType::f64, .activation_error = 0x1p-46}; }
  double estimate_us(const Problem& p, const Ceilings&) const override {
    const double macs = static_cast<double>(p.size.M * p.size.k) *
                        static_cast<double>(p.size.N + p.weights.intermediate) * static_cast<double>(p.size.K);
    return 50.0 + macs * 1.5e-3;  // about 1.5 ns a multiplication
  }
  std::string describe(const Problem&) const override { return "f64, one thread; rounds only codes and output"; }

  Status apply(const ExpertsArgs& args, ExpertsResult& result) const override {
    ProblemSize size;
    if (Status s = call_size(args, size); !s.ok()) return s;
    const ExpertsWorkspace needed = sizes(args.weights.spec, size.M, args.output.dtype);
    if (Status s = check_call(args, ActivationFormat::standard, needed, size); !s.ok()) return s;
    WorkspaceCursor w13(args.workspace13), w2(args.workspace2);
    const Scratch scratch = divide(args.weights.spec, size.M, w13, w2);
    std::fill_n(scratch.sum, size.M * size.K, 0.0);
    for (std::int64_t slot = 0; slot < size.L; ++slot)
      if (Status s = run_expert(args, slot, scratch); !s.ok()) return s;
    for (std::int64_t t = 0; t < size.M; ++t)
      for (std::int64_t c = 0; c < size.K; ++c)
        numeric::store_f32(args.output.data, args.output.dtype, t * args.output.stride[0] + c * args.output.stride[1],
                           static_cast<float>(scratch.sum[t * size.K + c]));
    result.output = args.output;
    return {};
  }

 private:
  static ExpertsWorkspace sizes(const WeightsSpec& spec, std::int64_t M, DType output) {
    WorkspaceCursor w13({}), w2({});
    divide(spec, M, w13, w2);
    return {w13.used(), w2.used(), {output, 2, {M, spec.hidden}}};
  }
};

}  // namespace

std::unique_ptr<Experts> make_reference(const MakeContext&) { return std::make_unique<Reference>(); }

}  // namespace moekit::experts
