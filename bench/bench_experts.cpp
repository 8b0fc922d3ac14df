// Times the CPU experts alone, every unit that this machine has: bench_experts [key=value …]
//   shape=e128k8h2048i768  weights=bf16  activations=  hidden=bf16  tokens=1,16,512  impl=cpu.*  threads=2
//   seconds=3  gap_ms=0  rotate_mib=1024  csv=0
// Lists separated by commas are crossed. Weights are read cold: layers are rotated over at least rotate_mib. Routing is
// uniform and drawn anew for every call. A row is printed only if three tokens of it agree with a plain f64 loop over
// the unpacked weights. Every sample is paired with a probe of the bandwidth and of the multiplication rate.
#include <fnmatch.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <moekit/kit/implementations.hpp>

#include "cpu/arena.hpp"
#include "cpu/ceilings.hpp"
#include "experts/activation.hpp"
#include "experts/canonical.hpp"
#include "quant/quantise.hpp"

namespace {
using namespace moekit;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/// CPU time of the process: on a busy machine it says more than the clock on the wall. Waiting threads spin at first,
/// so it is an upper bound.
double cpu_now() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

struct Random {
  std::uint64_t state = 42;
  std::uint64_t next() {
    std::uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  float uniform() { return static_cast<float>(next() >> 40) * 0x1p-23f - 1.0f; }  // [-1, 1)
  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(n)); }
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> out;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    out.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

struct Bench {
  std::map<std::string, std::string> options{{"shape", "e128k8h2048i768"},
                                             {"weights", "bf16"},
                                             {"activations", ""},
                                             {"hidden", "bf16"},
                                             {"tokens", "1,16,512"},
                                             {"impl", "cpu.*"},
                                             {"threads", "2"},
                                             {"seconds", "3"},
                                             {"gap_ms", "0"},
                                             {"rotate_mib", "1024"}};
  std::int64_t E = 0, k = 0, K = 0, I = 0, layers = 1;
  WeightsSpec spec;
  QuantSpec quant;
  DType hidden = DType::bf16;
  std::size_t expert_bytes = 0;
  const PackFormat* format = nullptr;
  cpu::Arena arena;
  Random random;

  void load(const std::string& shape, const std::string& weights);
};

/// Four experts of random values, packed; every slot of every layer is a copy of one of them.
void Bench::load(const std::string& shape, const std::string& weights) {
  long e, kk, h, i;
  if (std::sscanf(shape.c_str(), "e%ldk%ldh%ldi%ld", &e, &kk, &h, &i) != 4)
    throw Error(StatusCode::invalid_argument, "shape must look like e128k8h2048i768");
  E = e, k = kk, K = h, I = i;
  throw_if_failed(quant_from_names(weights, options["activations"], quant));
  hidden = *dtype_from_name(options["hidden"].c_str());
  if (is_float(quant.a1.type)) quant.a1.type = quant.a2.type = hidden;
  spec = {E, K, I, true, quant.w1, quant.w2, false, false};
  for (const PackFormat* f : pack_formats())
    if (f->id() == "cpu32") format = f;
  expert_bytes = format->bytes(spec);
  const std::size_t layer = expert_bytes * static_cast<std::size_t>(E);
  layers = static_cast<std::int64_t>(((std::stoull(options["rotate_mib"]) << 20) + layer - 1) / layer);
  arena = cpu::Arena();
  arena = cpu::Arena(layer * static_cast<std::size_t>(layers));
  constexpr std::size_t kDistinct = 4;
  std::vector<std::byte> canonical(experts::CanonicalLayout(spec).bytes());
  const CanonicalExpert expert = experts::CanonicalLayout(spec).view(canonical.data());
  for (std::size_t slot = 0; slot < static_cast<std::size_t>(E * layers); ++slot) {
    std::byte* dst = arena.data() + slot * expert_bytes;
    if (slot >= kDistinct) {
      std::memcpy(dst, arena.data() + (slot * 7 + slot / 13) % kDistinct * expert_bytes, expert_bytes);
      continue;
    }
    for (const experts::ExpertPart& part : experts::expert_parts(spec)) {
      if (!part.wanted) continue;
      const Tensor& t = expert.*part.member;
      for (std::int64_t n = 0; n < t.numel(); ++n) {
        if (part.role == experts::ExpertPart::Role::scale)
          t.as<float>()[n] = 2e-4f * (1.5f + random.uniform());
        else if (t.dtype == DType::i8)
          t.as<std::int8_t>()[n] = static_cast<std::int8_t>(random.below(255) - 127);
        else
          numeric::store_f32(t.data, t.dtype, n, random.uniform() * (t.dtype == DType::e4m3 ? 400.0f : 0.03f));
      }
    }
    throw_if_failed(format->pack_expert(dst, spec, expert));
  }
}

struct Rows {
  std::vector<std::byte> x;
  std::vector<float> scale;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

/// The token of `args` again, in f64; returns the largest error over the sum's magnitude.
double error_of(const ExpertsArgs& args, const Bench& b, std::int64_t token, const float* got) {
  std::vector<std::byte> canonical(experts::CanonicalLayout(b.spec).bytes());
  const CanonicalExpert e = experts::CanonicalLayout(b.spec).view(canonical.data());
  auto value = [](const Tensor& m, const Tensor& scale, std::int64_t r, std::int64_t c) {
    const double v = numeric::load_f32(m.data, m.dtype, r * m.stride[0] + c);
    if (!scale.present()) return v;
    return v * (scale.shape[0] == m.shape[0] ? scale.at<float>(r, 0) : scale.at<float>(r / 128, c / 128));
  };
  const auto K = static_cast<std::size_t>(b.K), I = static_cast<std::size_t>(b.I);
  std::vector<double> y(K, 0), size(K, 0), x(K);
  const QTensor& rows = args.activations;
  for (std::size_t c = 0; c < K; ++c) {
    x[c] = numeric::load_f32(rows.data.data, rows.data.dtype, token * b.K + static_cast<std::int64_t>(c));
    if (rows.scale.present())
      x[c] *= rows.scale.at<float>(token, rows.scale.shape[1] == 1 ? 0 : static_cast<std::int64_t>(c) / 128);
  }
  for (std::int64_t j = 0; j < b.k; ++j) {
    throw_if_failed(
        b.format->unpack_expert(args.weights.expert(args.routing.ids.at<std::int32_t>(token, j)), b.spec, e));
    std::vector<float> h(I);
    for (std::int64_t i = 0; i < b.I; ++i) {
      double g = 0, u = 0;
      for (std::int64_t c = 0; c < b.K; ++c) {
        g += x[static_cast<std::size_t>(c)] * value(e.gate, e.gate_scale, i, c);
        u += x[static_cast<std::size_t>(c)] * value(e.up, e.up_scale, i, c);
      }
      h[static_cast<std::size_t>(i)] = static_cast<float>(experts::activate<double>(args.activation, g, u));
    }
    const QuantDesc& a2 = b.quant.a2;
    if (!is_float(a2.type)) {
      std::vector<std::byte> codes(I);
      std::vector<float> scales(I / 128 + 1);
      const std::int64_t group = a2.granularity.cols;
      quant::quantise_row({h.data(), DType::f32, b.I}, {a2.type, group}, codes.data(), scales.data());
      for (std::int64_t i = 0; i < b.I; ++i)
        h[static_cast<std::size_t>(i)] =
            numeric::load_f32(codes.data(), a2.type, i) * scales[static_cast<std::size_t>(group < 0 ? 0 : i / group)];
    } else {
      for (float& v : h) v = numeric::round_to(a2.type, v);
    }
    const double w = args.routing.weights.at<float>(token, j);
    for (std::int64_t c = 0; c < b.K; ++c)
      for (std::int64_t i = 0; i < b.I; ++i) {
        const double term = w * h[static_cast<std::size_t>(i)] * value(e.down, e.down_scale, c, i);
        y[static_cast<std::size_t>(c)] += term;
        size[static_cast<std::size_t>(c)] += std::abs(term);
      }
  }
  double worst = 0;
  for (std::size_t c = 0; c < K; ++c) {
    const double error = std::abs(got[c] - y[c]) / size[c];
    worst = error <= worst ? worst : error;
    if (!std::isfinite(got[c])) worst = 1e30;
  }
  return worst;
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}
double percentile(std::vector<double> v, double p) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[std::min(v.size() - 1, static_cast<std::size_t>(p * static_cast<double>(v.size())))];
}

/// One implementation on one number of tokens.
class Case {
 public:
  Case(Bench& b, const ExpertsEntry& entry, std::int64_t tokens, int threads)
      : b_(b), label_(entry.name), impl_(entry.make({})), tokens_(tokens), threads_(threads), config_(b.quant, {}) {}
  void run();

 private:
  Problem problem() const;
  void fill_rows();
  void bind(const ExpertsWorkspace& need);
  void draw(std::int64_t round);
  bool right();
  void pick_probe();
  void sample(std::int64_t round, double gap_ms);
  void print() const;
  bool coded() const { return !is_float(b_.quant.a1.type); }
  DType type() const { return coded() ? b_.quant.a1.type : b_.hidden; }
  std::int64_t groups() const { return !coded() || b_.quant.a1.granularity.cols < 0 ? 1 : (b_.K + 127) / 128; }
  cpu::Isa isa() const { return cpu::isa_from_name(label_.substr(label_.find('.') + 1)); }

  Bench& b_;
  std::string label_;
  std::unique_ptr<Experts> impl_;
  std::int64_t tokens_;
  int threads_;
  QuantConfig config_;
  Rows rows_;
  std::vector<float> out_;
  cpu::Arena w13_, w2_;
  ExpertsArgs args_;
  ExpertsResult result_;
  std::int64_t hit_ = 0;
  double error_ = 0;
  int pattern_ = 0;
  std::size_t probe_bytes_ = 0;
  std::vector<double> us_, cpu_us_, read_, peak_, frac_;
};

Problem Case::problem() const {
  Problem p;
  p.size = {b_.E, tokens_, 2 * b_.I, b_.K, b_.k};
  p.num_experts = b_.E;
  p.weights = b_.spec;
  p.quant = b_.quant;
  p.hidden_dtype = b_.hidden;
  p.threads = threads_;
  return p;
}

void Case::fill_rows() {
  rows_.x.resize(static_cast<std::size_t>(tokens_ * b_.K * bytes(type())));
  rows_.scale.assign(static_cast<std::size_t>(tokens_ * groups()), type() == DType::i8 ? 1.0f / 100 : 1.0f / 300);
  for (std::int64_t n = 0; n < tokens_ * b_.K; ++n) {
    if (type() == DType::i8)
      reinterpret_cast<std::int8_t*>(rows_.x.data())[n] = static_cast<std::int8_t>(b_.random.below(255) - 127);
    else
      numeric::store_f32(rows_.x.data(), type(), n, b_.random.uniform() * (type() == DType::e4m3 ? 400.0f : 2.0f));
  }
  rows_.ids.resize(static_cast<std::size_t>(tokens_ * b_.k));
  rows_.weights.assign(rows_.ids.size(), 1.0f / static_cast<float>(b_.k));
}

void Case::bind(const ExpertsWorkspace& need) {
  w13_ = cpu::Arena(need.w13_bytes + 256);
  w2_ = cpu::Arena(need.w2_bytes + 256);
  out_.resize(static_cast<std::size_t>(tokens_ * b_.K));
  args_.output = Tensor(out_.data(), DType::f32, {tokens_, b_.K});
  args_.activations.data = Tensor(rows_.x.data(), type(), {tokens_, b_.K});
  if (coded()) args_.activations.scale = Tensor(rows_.scale.data(), DType::f32, {tokens_, groups()});
  args_.weights = {b_.format, b_.spec, b_.arena.data(), b_.expert_bytes};
  args_.routing = {Tensor(rows_.ids.data(), DType::i32, {tokens_, b_.k}),
                   Tensor(rows_.weights.data(), DType::f32, {tokens_, b_.k})};
  args_.num_experts = b_.E;
  args_.quant = &config_;
  args_.workspace13 = {w13_.data(), need.w13_bytes};
  args_.workspace2 = {w2_.data(), need.w2_bytes};
  args_.context.stream.executor = &cpu_executor(threads_);
}

/// Uniform routing, and the next layer's weights.
void Case::draw(std::int64_t round) {
  args_.weights.data = b_.arena.data() + static_cast<std::size_t>(round % b_.layers * b_.E) * b_.expert_bytes;
  std::vector<bool> used(static_cast<std::size_t>(b_.E), false);
  for (std::int64_t t = 0; t < tokens_; ++t)
    for (std::int64_t j = 0; j < b_.k; ++j) {
      std::int32_t& id = rows_.ids[static_cast<std::size_t>(t * b_.k + j)];
      for (bool again = true; again;) {
        id = static_cast<std::int32_t>(b_.random.below(b_.E));
        again = false;
        for (std::int64_t i = 0; i < j; ++i) again = again || rows_.ids[static_cast<std::size_t>(t * b_.k + i)] == id;
      }
      used[static_cast<std::size_t>(id)] = true;
    }
  hit_ = std::count(used.begin(), used.end(), true);
}

bool Case::right() {
  draw(0);
  throw_if_failed(impl_->apply(args_, result_));
  for (std::int64_t t : {std::int64_t{0}, tokens_ / 2, tokens_ - 1}) {
    error_ = std::max(error_, error_of(args_, b_, t, out_.data() + t * b_.K));
    if (tokens_ == 1) break;
  }
  const double allowed = coded()                   ? (type() == DType::i8 ? 1.0 / 127 : 1.0 / 10)
                         : b_.hidden == DType::f32 ? 1e-5
                                                   : 1.0 / 256;
  if (error_ <= allowed) return true;
  std::printf("%-16s M=%ld WRONG: error %.3g of the sum's magnitude, allowed %.3g\n", label_.c_str(),
              static_cast<long>(tokens_), error_, allowed);
  return false;
}

/// The read pattern that is fastest here.
void Case::pick_probe() {
  probe_bytes_ = std::min<std::size_t>(b_.arena.size(), 64 << 20);
  double best = 0;
  for (int i = 0; i < cpu::kReadPatterns * 2; ++i) {
    const double rate = cpu::probe_read_gbps(threads_, b_.arena.data() + (b_.arena.size() - probe_bytes_), probe_bytes_,
                                             i % cpu::kReadPatterns);
    if (rate > best) best = rate, pattern_ = i % cpu::kReadPatterns;
  }
}

/// One call, then the two probes.
void Case::sample(std::int64_t round, double gap_ms) {
  draw(round);
  if (gap_ms > 0) std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(gap_ms));
  const double start = now(), cpu_start = cpu_now();
  const Status s = impl_->apply(args_, result_);
  us_.push_back((now() - start) * 1e6);
  cpu_us_.push_back((cpu_now() - cpu_start) * 1e6 / threads_);
  throw_if_failed(s);
  const auto pages = static_cast<std::int64_t>((b_.arena.size() - probe_bytes_) / 4096 + 1);
  const std::size_t offset = static_cast<std::size_t>(b_.random.below(pages)) * 4096;
  read_.push_back(cpu::probe_read_gbps(threads_, b_.arena.data() + offset, probe_bytes_, pattern_));
  const bool integer = type() == DType::i8, dot = isa() == cpu::Isa::avx512_bf16;
  const double rate = integer ? cpu::measure_int8_gops(isa(), threads_) : cpu::measure_f32_gflops(isa(), threads_);
  peak_.push_back(dot ? std::max(rate, cpu::measure_bf16_dot_gflops(threads_)) : rate);
  const double bytes_us = static_cast<double>(hit_) * static_cast<double>(b_.expert_bytes) / (read_.back() * 1e3);
  const double flops_us = 6.0 * static_cast<double>(tokens_ * b_.k * b_.K * b_.I) / (peak_.back() * 1e3);
  frac_.push_back(std::max(bytes_us, flops_us) / us_.back());
}

void Case::print() const {
  const double med = median(us_), flops = 6.0 * static_cast<double>(tokens_ * b_.k * b_.K * b_.I);
  std::printf("%-16s %-20s %-13s M=%-5ld t=%d median %9.1f us  min %9.1f  p99 %9.1f  cpu %9.1f (min %9.1f)  n=%-4zu",
              label_.c_str(), b_.options["shape"].c_str(),
              (weights_scheme(b_.quant) + "/" + activations_scheme(b_.quant)).c_str(), static_cast<long>(tokens_),
              threads_, med, percentile(us_, 0), percentile(us_, 0.99), median(cpu_us_), percentile(cpu_us_, 0),
              us_.size());
  std::printf(" | %6.1f GB/s of %5.1f | %7.1f G/s of %6.1f | of floor %.3f  err %.1e\n",
              static_cast<double>(hit_) * static_cast<double>(b_.expert_bytes) / med * 1e-3, median(read_),
              flops / med * 1e-3, median(peak_), median(frac_), error_);
  std::fflush(stdout);
}

void Case::run() {
  if (const Verdict v = impl_->supports(problem()); !v.ok()) {
    std::printf("%-16s %-20s M=%-5ld refused: %s\n", label_.c_str(), b_.options["shape"].c_str(),
                static_cast<long>(tokens_), v.reason().c_str());
    return;
  }
  fill_rows();
  bind(impl_->workspace(problem()));
  if (!right()) return;
  pick_probe();
  const double gap = std::stod(b_.options["gap_ms"]), end = now() + std::stod(b_.options["seconds"]);
  for (std::int64_t round = 1; now() < end || us_.size() < 3; ++round) sample(round, gap);
  print();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Bench bench;
    for (int i = 1; i < argc; ++i) {
      const std::string text = argv[i];
      const std::size_t equals = text.find('=');
      if (equals == std::string::npos || !bench.options.count(text.substr(0, equals))) {
        std::fprintf(stderr, "unknown option '%s'; see the head of bench/bench_experts.cpp\n", argv[i]);
        return 2;
      }
      bench.options[text.substr(0, equals)] = text.substr(equals + 1);
    }
    const auto chosen = bench.options;
    for (const std::string& shape : split(chosen.at("shape")))
      for (const std::string& weights : split(chosen.at("weights"))) {
        bench.options["shape"] = shape;
        bench.load(shape, weights);
        for (const ExpertsEntry& entry : experts_implementations()) {
          if (fnmatch(chosen.at("impl").c_str(), std::string(entry.name).c_str(), 0) != 0) continue;
          if (const Verdict v = entry.available(); !v.ok()) {
            std::printf("%-16s not here: %s\n", std::string(entry.name).c_str(), v.reason().c_str());
            continue;
          }
          for (const std::string& tokens : split(chosen.at("tokens")))
            for (const std::string& threads : split(chosen.at("threads")))
              Case(bench, entry, std::stol(tokens), std::stoi(threads)).run();
        }
      }
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.status().to_string().c_str());
    return 1;
  }
  return 0;
}
