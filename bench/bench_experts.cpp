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
  void run(const ExpertsEntry& entry, std::int64_t tokens, int threads);
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

void Bench::run(const ExpertsEntry& entry, std::int64_t tokens, int threads) {
  auto impl = entry.make({});
  Problem p;
  p.size = {E, tokens, 2 * I, K, k};
  p.num_experts = E;
  p.weights = spec;
  p.quant = quant;
  p.hidden_dtype = hidden;
  p.threads = threads;
  const std::string label(entry.name);
  if (const Verdict v = impl->supports(p); !v.ok()) {
    std::printf("%-16s %-20s M=%-5ld refused: %s\n", label.c_str(), options["shape"].c_str(), static_cast<long>(tokens),
                v.reason().c_str());
    return;
  }
  Executor& executor = cpu_executor(threads);
  const cpu::Isa isa = cpu::isa_from_name(label.substr(label.find('.') + 1));
  const ExpertsWorkspace need = impl->workspace(p);
  cpu::Arena w13(need.w13_bytes + 256), w2(need.w2_bytes + 256);
  std::vector<float> out(static_cast<std::size_t>(tokens * K));
  Rows rows;
  const bool coded = !is_float(quant.a1.type);
  const DType type = coded ? quant.a1.type : hidden;
  rows.x.resize(static_cast<std::size_t>(tokens * K * bytes(type)));
  const std::int64_t groups = !coded || quant.a1.granularity.cols < 0 ? 1 : (K + 127) / 128;
  rows.scale.assign(static_cast<std::size_t>(tokens * groups), type == DType::i8 ? 1.0f / 100 : 1.0f / 300);
  for (std::int64_t n = 0; n < tokens * K; ++n) {
    if (type == DType::i8)
      reinterpret_cast<std::int8_t*>(rows.x.data())[n] = static_cast<std::int8_t>(random.below(255) - 127);
    else
      numeric::store_f32(rows.x.data(), type, n, random.uniform() * (type == DType::e4m3 ? 400.0f : 2.0f));
  }
  rows.ids.resize(static_cast<std::size_t>(tokens * k));
  rows.weights.assign(rows.ids.size(), 1.0f / static_cast<float>(k));
  const QuantConfig config(quant, {});
  ExpertsArgs args;
  args.output = Tensor(out.data(), DType::f32, {tokens, K});
  args.activations.data = Tensor(rows.x.data(), type, {tokens, K});
  if (coded) args.activations.scale = Tensor(rows.scale.data(), DType::f32, {tokens, groups});
  args.weights = {format, spec, arena.data(), expert_bytes};
  args.routing = {Tensor(rows.ids.data(), DType::i32, {tokens, k}),
                  Tensor(rows.weights.data(), DType::f32, {tokens, k})};
  args.num_experts = E;
  args.quant = &config;
  args.workspace13 = {w13.data(), need.w13_bytes};
  args.workspace2 = {w2.data(), need.w2_bytes};
  args.context.stream.executor = &executor;
  ExpertsResult result;
  std::int64_t hit = 0;
  auto draw = [&](std::int64_t round) {
    args.weights.data = arena.data() + static_cast<std::size_t>(round % layers * E) * expert_bytes;
    std::vector<bool> used(static_cast<std::size_t>(E), false);
    for (std::int64_t t = 0; t < tokens; ++t)
      for (std::int64_t j = 0; j < k; ++j) {
        std::int32_t& id = rows.ids[static_cast<std::size_t>(t * k + j)];
        for (bool again = true; again;) {
          id = static_cast<std::int32_t>(random.below(E));
          again = false;
          for (std::int64_t i = 0; i < j; ++i) again = again || rows.ids[static_cast<std::size_t>(t * k + i)] == id;
        }
        used[static_cast<std::size_t>(id)] = true;
      }
    hit = std::count(used.begin(), used.end(), true);
  };
  draw(0);
  throw_if_failed(impl->apply(args, result));
  double error = 0;
  for (std::int64_t t : {std::int64_t{0}, tokens / 2, tokens - 1}) {
    error = std::max(error, error_of(args, *this, t, out.data() + t * K));
    if (tokens == 1) break;
  }
  const double allowed = coded ? (type == DType::i8 ? 1.0 / 127 : 1.0 / 10) : hidden == DType::f32 ? 1e-5 : 1.0 / 256;
  if (!(error <= allowed)) {
    std::printf("%-16s M=%ld WRONG: error %.3g of the sum's magnitude, allowed %.3g\n", label.c_str(),
                static_cast<long>(tokens), error, allowed);
    return;
  }
  const bool integer = type == DType::i8;
  const bool dot = isa == cpu::Isa::avx512_bf16;
  int pattern = 0;
  double best = 0;
  const std::size_t probe_bytes = std::min<std::size_t>(arena.size(), 64 << 20);
  for (int i = 0; i < cpu::kReadPatterns * 2; ++i) {
    const double rate =
        cpu::probe_read_gbps(threads, arena.data() + (arena.size() - probe_bytes), probe_bytes, i % cpu::kReadPatterns);
    if (rate > best) best = rate, pattern = i % cpu::kReadPatterns;
  }
  std::vector<double> us, cpu_us, read, peak, frac;
  const double gap = std::stod(options["gap_ms"]), end = now() + std::stod(options["seconds"]);
  for (std::int64_t round = 1; now() < end || us.size() < 3; ++round) {
    draw(round);
    if (gap > 0) std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(gap));
    const double start = now(), cpu_start = cpu_now();
    const Status s = impl->apply(args, result);
    us.push_back((now() - start) * 1e6);
    cpu_us.push_back((cpu_now() - cpu_start) * 1e6 / threads);
    throw_if_failed(s);
    const std::size_t offset =
        static_cast<std::size_t>(random.below(static_cast<std::int64_t>((arena.size() - probe_bytes) / 4096 + 1))) *
        4096;
    read.push_back(cpu::probe_read_gbps(threads, arena.data() + offset, probe_bytes, pattern));
    const double rate = integer ? cpu::measure_int8_gops(isa, threads)
                        : dot   ? cpu::measure_bf16_dot_gflops(threads)
                                : cpu::measure_f32_gflops(isa, threads);
    peak.push_back(std::max(rate, dot ? cpu::measure_f32_gflops(isa, threads) : 0.0));
    const double bytes_us = static_cast<double>(hit) * static_cast<double>(expert_bytes) / (read.back() * 1e3);
    const double flops_us = 6.0 * static_cast<double>(tokens * k * K * I) / (peak.back() * 1e3);
    frac.push_back(std::max(bytes_us, flops_us) / us.back());
  }
  const double med = median(us), flops = 6.0 * static_cast<double>(tokens * k * K * I);
  std::printf(
      "%-16s %-20s %-13s M=%-5ld t=%d median %9.1f us  min %9.1f  p99 %9.1f  cpu %9.1f (min %9.1f)  n=%-4zu | %6.1f "
      "GB/s of "
      "%5.1f | %7.1f G/s of %6.1f | of floor %.3f  err %.1e\n",
      label.c_str(), options["shape"].c_str(), (weights_scheme(quant) + "/" + activations_scheme(quant)).c_str(),
      static_cast<long>(tokens), threads, med, percentile(us, 0), percentile(us, 0.99), median(cpu_us),
      percentile(cpu_us, 0), us.size(), static_cast<double>(hit) * static_cast<double>(expert_bytes) / med * 1e-3,
      median(read), flops / med * 1e-3, median(peak), median(frac), error);
  std::fflush(stdout);
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
              bench.run(entry, std::stol(tokens), std::stoi(threads));
        }
      }
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.status().to_string().c_str());
    return 1;
  }
  return 0;
}
