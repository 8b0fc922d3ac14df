// Batched experts as plainly as can be: for every local expert the first counts[e] rows of [L, T·D, K], f32 sums in
// ascending order. Rows beyond the count are never read; their output is zero. Unweighted: finalize weights and
// reduces.
#include <algorithm>

#include "experts/activation.hpp"
#include "experts/call.hpp"
#include "experts/canonical.hpp"
#include "experts/dequantise.hpp"
#include "experts/reference.hpp"
#include "text.hpp"

namespace moekit::experts {
namespace {

struct Scratch {
  Bytes expert;      // one canonical expert
  float* x;          // [K]
  float* h;          // [I]
  std::byte* codes;  // [I]
  float* scales;     // [groups of I]
};

float* take_floats(WorkspaceCursor& cursor, std::int64_t count) {
  return reinterpret_cast<float*>(cursor.take(static_cast<std::size_t>(count) * sizeof(float)).data);
}

Scratch divide(const WeightsSpec& spec, WorkspaceCursor& w2) {  // the output may lie over workspace13
  Scratch s;
  s.expert = w2.take(CanonicalLayout(spec).bytes());
  s.x = take_floats(w2, spec.hidden);
  s.h = take_floats(w2, spec.intermediate);
  s.codes = w2.take(static_cast<std::size_t>(spec.intermediate)).data;
  s.scales = take_floats(w2, spec.intermediate);
  return s;
}

float dot(const WeightMatrix& matrix, std::int64_t row, const float* x, std::int64_t n) {
  float sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += matrix(row, i) * x[i];
  return sum;
}

void run_row(const ExpertsArgs& args, std::int64_t slot, std::int64_t row, const Scratch& s) {
  const std::int64_t K = args.weights.spec.hidden, I = args.weights.spec.intermediate;
  const ExpertMatrices expert(args.weights.spec, CanonicalLayout(args.weights.spec).view(s.expert.data));
  const ActivationRow x(args, slot, row);
  for (std::int64_t k = 0; k < K; ++k) s.x[k] = static_cast<float>(x[k]);
  for (std::int64_t i = 0; i < I; ++i) {
    float gate = args.activation.gated ? dot(expert.gate, i, s.x, K) : 0.0f;
    float up = dot(expert.up, i, s.x, K);
    if (expert.gate_bias != nullptr) gate += expert.gate_bias[i];
    if (expert.up_bias != nullptr) up += expert.up_bias[i];
    s.h[i] = activate(args.activation, gate, up);
  }
  if (quantises_h(args)) {
    const quant::RowScheme scheme = h_scheme(args, slot, row);
    quant::quantise_row({s.h, DType::f32, I}, scheme, s.codes, s.scales);
    for (std::int64_t i = 0; i < I; ++i)
      s.h[i] = numeric::load_f32(s.codes, scheme.type, i) * s.scales[quant::scale_index(i, scheme.group)];
  }
  const Tensor& out = args.output;
  for (std::int64_t c = 0; c < K; ++c) {
    float y = dot(expert.down, c, s.h, I);
    if (expert.down_bias != nullptr) y += expert.down_bias[c];
    numeric::store_f32(out.data, out.dtype, slot * out.stride[0] + row * out.stride[1] + c * out.stride[2], y);
  }
}

void clear_row(const Tensor& out, std::int64_t slot, std::int64_t row) {
  for (std::int64_t c = 0; c < out.shape[2]; ++c)
    numeric::store_f32(out.data, out.dtype, slot * out.stride[0] + row * out.stride[1] + c * out.stride[2], 0.0f);
}

class NaiveBatched final : public Experts {
 public:
  explicit NaiveBatched(std::optional<BatchedShape> shape) : shape_(shape) {}
  std::string_view name() const override { return "naive_batched"; }
  Verdict supports(const Problem& p) const override {
    if (Verdict v = check_batched(p, shape_); !v) return v;
    return check_problem(p, ActivationFormat::batched_experts);
  }
  Formats activation_formats() const override {
    return {ActivationFormat::batched_experts, ActivationFormat::batched_experts};
  }
  bool accepts(const PackFormat&) const override { return true; }  // through unpack_expert
  const PackFormat& preferred_format(const WeightsSpec&) const override { return canonical_format(); }
  InputSpec input_spec(const Problem& p) const override { return experts::input_spec(p); }
  ExpertsWorkspace workspace(const Problem& p, const ExpertTokens*) const override {
    return sizes(p.weights, p.size.M, output_type(p));
  }
  WeightAndReduce weight_and_reduce() const override { return WeightAndReduce::delegate(); }
  bool supports_chunking() const override { return false; }
  bool supports_expert_map() const override { return false; }  // rows lie with their expert already
  Determinism determinism() const override { return Determinism::batch_invariant; }
  double estimate_us(const Problem& p, const Ceilings&) const override {
    const double rows = static_cast<double>(p.size.L * p.size.M);
    return 50.0 + rows * static_cast<double>(p.size.N + p.weights.intermediate) * static_cast<double>(p.size.K) * 5e-3;
  }
  std::string describe(const Problem&) const override { return "f32, one thread; h f32"; }

  Status apply(const ExpertsArgs& args, ExpertsResult& result) const override {
    ProblemSize size;
    if (Status s = call_size(args, size); !s.ok()) return s;
    const ExpertsWorkspace needed = sizes(args.weights.spec, size.M, args.output.dtype);
    if (Status s = check_call(args, ActivationFormat::batched_experts, needed, size); !s.ok()) return s;
    WorkspaceCursor w2(args.workspace2);
    const Scratch scratch = divide(args.weights.spec, w2);
    const CanonicalExpert unpacked = CanonicalLayout(args.weights.spec).view(scratch.expert.data);
    for (std::int64_t slot = 0; slot < size.L; ++slot) {
      const Tensor& counts = args.tokens->counts;
      const std::int64_t given = counts.as<const std::int32_t>()[slot * counts.stride[0]];
      const std::int64_t rows = std::clamp<std::int64_t>(given, 0, size.M);
      if (rows > 0)
        if (Status s = args.weights.format->unpack_expert(args.weights.expert(slot), args.weights.spec, unpacked);
            !s.ok())
          return s;
      for (std::int64_t row = 0; row < rows; ++row) run_row(args, slot, row, scratch);
      for (std::int64_t row = rows; row < size.M; ++row) clear_row(args.output, slot, row);
    }
    result.output = args.output;
    return {};
  }

 private:
  static ExpertsWorkspace sizes(const WeightsSpec& spec, std::int64_t M, DType output) {
    WorkspaceCursor w2({});
    divide(spec, w2);
    return {0, w2.used(), {output, 3, {spec.num_local, M, spec.hidden}}};
  }
  std::optional<BatchedShape> shape_;
};

}  // namespace

std::unique_ptr<Experts> make_naive_batched(const MakeContext& context) {
  return std::make_unique<NaiveBatched>(context.batched);
}

}  // namespace moekit::experts
