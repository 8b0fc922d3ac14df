#include "experts/cpu/experts.hpp"

#include <algorithm>
#include <cmath>

#include "cpu/ceilings.hpp"
#include "experts/call.hpp"
#include "experts/cpu/forward.hpp"
#include "text.hpp"

namespace moekit::cpu {
namespace {
using text::concat;

constexpr std::int64_t kMaxIntegerK = 131071;  // 128 · 128 · K stays below 2^31

/// Lanes of f32 work per cycle, relative: how a ceiling measured for the best unit of this machine reads for another.
double width(Isa isa) {
  switch (isa) {
    case Isa::portable: return 2;
    case Isa::avx2: return 8;
    default: return 16;
  }
}
/// As width(), for 8-bit dots: VNNI does in one instruction what takes avx2 four.
double integer_width(Isa isa) {
  switch (isa) {
    case Isa::portable: return 1;
    case Isa::avx2: return 12;
    default: return 64;
  }
}

class CpuExperts final : public Experts {
 public:
  CpuExperts(Isa isa, ActivationFormat format, std::optional<BatchedShape> shape)
      : isa_(isa),
        unit_(*unit_of(isa)),
        format_(format),
        shape_(shape),
        name_(concat(format == ActivationFormat::standard ? "cpu." : "cpu_batched.", cpu::name(isa))) {}

  std::string_view name() const override { return name_; }
  Verdict supports(const Problem& p) const override;
  Formats activation_formats() const override { return {format_, format_}; }
  bool accepts(const PackFormat& format) const override { return format.id() == cpu32_format().id(); }
  const PackFormat& preferred_format(const WeightsSpec&) const override { return cpu32_format(); }
  InputSpec input_spec(const Problem& p) const override { return experts::input_spec(p); }
  ExpertsWorkspace workspace(const Problem& p, const ExpertTokens*) const override;
  WeightAndReduce weight_and_reduce() const override {
    return batched() ? WeightAndReduce::delegate() : WeightAndReduce::no_op();
  }
  bool supports_chunking() const override { return !batched(); }
  bool supports_expert_map() const override { return !batched(); }  // batched rows lie with their expert already
  Determinism determinism() const override { return Determinism::batch_invariant; }
  Roundings roundings(const Problem& p) const override;
  double estimate_us(const Problem& p, const Ceilings& c) const override;
  std::string describe(const Problem& p) const override;
  Status apply(const ExpertsArgs& args, ExpertsResult& result) const override;

 private:
  bool batched() const { return format_ == ActivationFormat::batched_experts; }
  bool is_dot() const { return isa_ == Isa::avx512_bf16; }
  Request request_of(const Problem& p) const;
  ExpertsWorkspace needed(const Request& request, DType output) const;

  Isa isa_;
  const Unit& unit_;
  ActivationFormat format_;
  std::optional<BatchedShape> shape_;
  std::string name_;
};

Verdict CpuExperts::supports(const Problem& p) const {
  if (Verdict v = experts_available(isa_); !v.ok()) return v;
  if (batched())
    if (Verdict v = experts::check_batched(p, shape_); !v.ok()) return v;
  if (Verdict v = experts::check_problem(p, format_); !v.ok()) return v;
  if (p.quant.a1.type == DType::i8 && std::max(p.weights.hidden, p.weights.intermediate) > kMaxIntegerK)
    return Verdict::no(concat("int8 sums are exact up to ", kMaxIntegerK, " elements, the longest has ",
                              std::max(p.weights.hidden, p.weights.intermediate)));
  if (is_dot() && (p.weights.w1.type != DType::bf16 || p.quant.a1.type != DType::bf16 ||
                   p.quant.a2.type != DType::bf16 || p.hidden_dtype != DType::bf16))
    return Verdict::no(concat("is for bf16 x bf16, got ", moekit::name(p.weights.w1.type), " weights and ",
                              moekit::name(p.hidden_dtype), " rows; avx512 does the rest"));
  return Verdict::yes();
}

Request CpuExperts::request_of(const Problem& p) const {
  return {.unit = &unit_,
          .spec = &p.weights,
          .a1 = is_float(p.quant.a1.type) ? p.hidden_dtype : p.quant.a1.type,
          .a2 = p.quant.a2.type,
          .rows = p.size.M,
          .top_k = p.size.k,
          .threads = p.threads,
          .batched = batched()};
}

ExpertsWorkspace CpuExperts::needed(const Request& r, DType output) const {
  Workspace unused;
  const WorkspaceBytes bytes = divide(sizes_of(r), {}, {}, unused);
  const TensorSpec out = batched() ? TensorSpec{output, 3, {r.spec->num_local, r.rows, r.spec->hidden}}
                                   : TensorSpec{output, 2, {r.rows, r.spec->hidden}};
  return {bytes.w13, bytes.w2, out};
}

ExpertsWorkspace CpuExperts::workspace(const Problem& p, const ExpertTokens*) const {
  return needed(request_of(p), experts::output_type(p));
}

Roundings CpuExperts::roundings(const Problem& p) const {
  Roundings out;
  const Gemm gemm = choose_gemm(unit_, p.weights.w1.type, p.quant.a1.type);
  out.integer_dots = gemm == Gemm::i8;
  if (is_float(p.quant.a2.type)) out.h = p.quant.a2.type;
  return out;
}

/// The larger of the time to read the weights of the experts that are hit and the time to multiply.
double CpuExperts::estimate_us(const Problem& p, const Ceilings& c) const {
  const double L = static_cast<double>(std::max<std::int64_t>(1, p.weights.num_local));
  const double P = static_cast<double>(std::max<std::int64_t>(p.num_experts, p.weights.num_local));
  const double routes = static_cast<double>(p.size.M) *
                        (batched() ? L : static_cast<double>(p.size.k) * std::min(1.0, L / std::max(1.0, P)));
  const double hit = L * (1 - std::pow(1 - 1 / L, routes));
  const double macs =
      static_cast<double>(p.weights.w1_rows() + p.weights.intermediate) * static_cast<double>(p.weights.hidden);
  const double bytes = hit * static_cast<double>(cpu32_format().bytes(p.weights));
  const Gemm gemm = choose_gemm(unit_, p.weights.w1.type, request_of(p).a1);
  const Isa best = usable_isa();
  double peak = c.f32_gflops * width(isa_) / width(best);
  if (gemm == Gemm::i8) peak = c.int8_gops * integer_width(isa_) / integer_width(best);
  if (gemm == Gemm::bf16_dot) peak = c.bf16_dot_gflops;
  const double read = c.read_gbps > 0 ? c.read_gbps : 10.0;
  if (!(peak > 0)) peak = 10.0;
  const double reading = bytes / (0.95 * read * 1e3), multiplying = 2 * macs * routes / (0.85 * peak * 1e3);
  return 5.0 + std::max(reading, multiplying) + 0.1 * std::min(reading, multiplying) + routes * 0.01;
}

std::string CpuExperts::describe(const Problem& p) const {
  const Gemm gemm = choose_gemm(unit_, p.weights.w1.type, request_of(p).a1);
  const Ceilings known = known_ceilings(isa_, p.threads);
  std::string how;
  switch (gemm) {
    case Gemm::f32: how = "f32 FMA"; break;
    case Gemm::bf16: how = "bf16 widened to f32 FMA"; break;
    case Gemm::f16: how = "f16 widened to f32 FMA"; break;
    case Gemm::i8_wide: how = "int8 weights widened to f32 FMA"; break;
    case Gemm::e4m3: how = "e4m3 widened to f32 FMA, groups of 128"; break;
    case Gemm::i8: how = "int8 dots, exact i32 sums"; break;
    case Gemm::bf16_dot: how = "bf16 dot instruction"; break;
  }
  if (known.f32_gflops > 0 && (gemm == Gemm::bf16 || gemm == Gemm::bf16_dot)) {
    how += concat(" (measured: ", std::round(known.f32_gflops), " GF/s f32");
    how += known.bf16_dot_gflops > 0 ? concat(", ", std::round(known.bf16_dot_gflops), " GF/s the dot)") : ")";
  }
  const Sizes s = sizes_of(request_of(p));
  const DType h = p.quant.a2.type;
  return concat(how, "; panels of ", kPanelColumns, " columns, tiles of ", unit_.max_rows, " rows, k blocks of ", s.kc,
                "; ", p.threads, " threads; h ", moekit::name(h), is_float(h) ? "" : ", quantised from f32",
                "; output ", moekit::name(experts::output_type(p)));
}

Status check_strides(const ExpertsArgs& args) {
  auto unit_stride = [](const Tensor& t, const char* what) {
    const int last = t.rank - 1;
    if (last < 0 || t.shape[last] <= 1 || t.stride[last] == 1) return Status();
    return Status(StatusCode::invalid_shape,
                  concat("[experts] ", what, " must be dense along K, got a stride of ", t.stride[last]), "", what);
  };
  if (Status s = unit_stride(args.activations.data, "activations"); !s.ok()) return s;
  return unit_stride(args.output, "output");
}

Status CpuExperts::apply(const ExpertsArgs& args, ExpertsResult& result) const {
  if (args.weights.format == nullptr || !accepts(*args.weights.format))
    return Status(StatusCode::invalid_argument,
                  concat("[experts] ", name_, " reads ", cpu32_format().id(), " packs, got ",
                         args.weights.format ? args.weights.format->id() : "none"),
                  "pack the weights for this plan", "weights.format");
  ProblemSize size;
  if (Status s = experts::call_size(args, size); !s.ok()) return s;
  Executor& executor = args.context.stream.executor ? *args.context.stream.executor : cpu_executor();
  const DType arrives = args.activations.data.dtype;
  Request request{.unit = &unit_,
                  .spec = &args.weights.spec,
                  .a1 = arrives,
                  .a2 = args.quant ? args.quant->spec().a2.type : arrives,
                  .rows = size.M,
                  .top_k = size.k,
                  .threads = executor.concurrency(),
                  .batched = batched()};
  // the workspace was sized for the plan's threads: an executor with more of them does not get them all
  ExpertsWorkspace need = needed(request, args.output.dtype);
  while (request.threads > 1 && (need.w13_bytes > args.workspace13.size || need.w2_bytes > args.workspace2.size)) {
    --request.threads;
    need = needed(request, args.output.dtype);
  }
  if (Status s = experts::check_call(args, format_, need, size); !s.ok()) return s;
  if (Status s = check_strides(args); !s.ok()) return s;
  const Sizes sizes = sizes_of(request);
  Workspace workspace;
  divide(sizes, args.workspace13, args.workspace2, workspace);
  if (args.output.numel() > 0) forward(unit_, sizes, workspace, args, executor);
  result.output = args.output;
  result.open.reset();
  return {};
}

}  // namespace

const Unit* unit_of(Isa isa) {
  switch (isa) {
    case Isa::portable: return &kPortableUnit;
#if defined(__x86_64__)
    case Isa::avx2: return &kAvx2Unit;
    case Isa::avx512: return &kAvx512Unit;
    case Isa::avx512_bf16: return &kAvx512Bf16Unit;
#else
    default: return nullptr;
#endif
  }
  return nullptr;
}

Verdict experts_available(Isa isa) {
  if (!unit_of(isa)) return Verdict::no(concat("this build has no ", name(isa), " unit"));
  return can_run(isa);
}

std::unique_ptr<Experts> make_experts(Isa isa, ActivationFormat format, const MakeContext& context) {
  return std::make_unique<CpuExperts>(isa, format, context.batched);
}

}  // namespace moekit::cpu
