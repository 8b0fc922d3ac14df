// The built-in lists. A new implementation or pack format = one file + one line here.
#include <moekit/kit/implementations.hpp>

#include "experts/canonical.hpp"
#include "experts/cpu/experts.hpp"
#include "experts/cpu/pack.hpp"
#include "experts/reference.hpp"

namespace moekit::inline v0 {
namespace {
using cpu::Isa;

Verdict anywhere() { return Verdict::yes(); }

// In order of priority: among those that say yes the lowest estimate wins, order breaks ties, any can be forced.
constexpr ExpertsEntry kExperts[] = {
    {"cpu.avx512_bf16", &cpu::make_standard<Isa::avx512_bf16>, &cpu::available<Isa::avx512_bf16>},
    {"cpu.avx512", &cpu::make_standard<Isa::avx512>, &cpu::available<Isa::avx512>},
    {"cpu.avx2", &cpu::make_standard<Isa::avx2>, &cpu::available<Isa::avx2>},
    {"cpu.portable", &cpu::make_standard<Isa::portable>, &cpu::available<Isa::portable>},
    {"cpu_batched.avx512_bf16", &cpu::make_batched<Isa::avx512_bf16>, &cpu::available<Isa::avx512_bf16>},
    {"cpu_batched.avx512", &cpu::make_batched<Isa::avx512>, &cpu::available<Isa::avx512>},
    {"cpu_batched.avx2", &cpu::make_batched<Isa::avx2>, &cpu::available<Isa::avx2>},
    {"cpu_batched.portable", &cpu::make_batched<Isa::portable>, &cpu::available<Isa::portable>},
    {"cpu_open", &experts::make_open_cpu, &anywhere},  // the widest of the first, which can stop after GEMM2
    {"naive_batched", &experts::make_naive_batched, &anywhere},
    {"reference_open", &experts::make_open_reference, &anywhere},  // the reference, which can stop after GEMM2
    {"reference", &experts::make_reference, &anywhere},            // f64, scalar
};

}  // namespace

std::span<const ExpertsEntry> experts_implementations() { return kExperts; }

std::span<const PackFormat* const> pack_formats() {
  static const PackFormat* const kFormats[] = {
      &cpu::cpu32_format(),
      &experts::canonical_format(),
  };
  return kFormats;
}

}  // namespace moekit::inline v0
