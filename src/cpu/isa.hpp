// Which instructions may be used here, and how large the caches are.
#pragma once
#include <cstdint>
#include <string>

#include <moekit/status.hpp>

#include "cpu/caches.hpp"

namespace moekit::cpu {

/// Units that kernels are compiled for; each contains those before it.
enum class Isa : std::uint8_t {
  portable,
  avx2,         ///< AVX2, FMA, F16C
  avx512,       ///< AVX-512 F BW VL DQ VNNI
  avx512_bf16,  ///< and BF16
};
const char* name(Isa isa);

/// What processor and operating system offer (CPUID and XGETBV).
Isa detected_isa();
/// The largest unit in use: detected_isa(), capped by the environment variable MOEKIT_CPU_ISA, which is read once per
/// process and holds one of portable, avx2, avx512, avx512_bf16. Throws Error on another value. The only place of the
/// library that reads the environment.
Isa usable_isa();
/// The cap that a text names; throws Error listing the names. Empty = no cap.
Isa isa_from_name(const std::string& text);
/// Yes if `unit` may run here, else the reason.
Verdict can_run(Isa unit);

enum class Vendor : std::uint8_t { amd, intel, other };
Vendor vendor();

}  // namespace moekit::cpu
