#include "cpu/isa.hpp"

#include <cstdlib>
#include <cstring>

#include "text.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace moekit::cpu {
namespace {

constexpr Isa kAll[] = {Isa::portable, Isa::avx2, Isa::avx512, Isa::avx512_bf16};

const char* needs(Isa isa) {
  switch (isa) {
    case Isa::portable: return "nothing";
    case Isa::avx2: return "AVX2, FMA and F16C";
    case Isa::avx512: return "AVX-512 F, BW, VL, DQ and VNNI";
    case Isa::avx512_bf16: return "AVX-512 BF16";
  }
  return "?";
}

#if defined(__x86_64__)

struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
};
Leaf cpuid(unsigned leaf, unsigned sub = 0) {
  Leaf out;
  if (!__get_cpuid_count(leaf, sub, &out.a, &out.b, &out.c, &out.d)) return {};
  return out;
}
bool has(unsigned word, int bit) { return (word >> bit & 1u) != 0; }

/// Register state that the operating system saves: bit 1 xmm, 2 ymm, 5–7 AVX-512.
std::uint64_t enabled_state() {
  if (!has(cpuid(1).c, 27)) return 0;  // OSXSAVE
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
}

Isa detect() {
  const Leaf one = cpuid(1), seven = cpuid(7);
  const std::uint64_t state = enabled_state();
  const bool ymm = (state & 0x06) == 0x06, zmm = (state & 0xe6) == 0xe6;
  const bool avx2 = ymm && has(one.c, 28) && has(one.c, 12) && has(one.c, 29) && has(seven.b, 5);
  if (!avx2) return Isa::portable;
  const bool avx512 =
      zmm && has(seven.b, 16) && has(seven.b, 17) && has(seven.b, 30) && has(seven.b, 31) && has(seven.c, 11);
  if (!avx512) return Isa::avx2;
  return seven.a >= 1 && has(cpuid(7, 1).a, 5) ? Isa::avx512_bf16 : Isa::avx512;
}

Vendor detect_vendor() {
  const Leaf zero = cpuid(0);
  char text[12];
  std::memcpy(text, &zero.b, 4);
  std::memcpy(text + 4, &zero.d, 4);
  std::memcpy(text + 8, &zero.c, 4);
  if (std::memcmp(text, "AuthenticAMD", 12) == 0) return Vendor::amd;
  if (std::memcmp(text, "GenuineIntel", 12) == 0) return Vendor::intel;
  return Vendor::other;
}

#else

Isa detect() { return Isa::portable; }
Vendor detect_vendor() { return Vendor::other; }

#endif

}  // namespace

const char* name(Isa isa) {
  switch (isa) {
    case Isa::portable: return "portable";
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
    case Isa::avx512_bf16: return "avx512_bf16";
  }
  return "?";
}

Isa detected_isa() {
  static const Isa found = detect();
  return found;
}

Isa isa_from_name(const std::string& text) {
  if (text.empty()) return kAll[std::size(kAll) - 1];
  std::string names;
  for (Isa isa : kAll) {
    if (text == name(isa)) return isa;
    if (!names.empty()) names.append(", ");
    names.append(name(isa));
  }
  throw Error(StatusCode::invalid_argument, text::concat("[cpu] MOEKIT_CPU_ISA is '", text, "'"),
              text::concat("set it to one of ", names, ", or leave it unset"), "MOEKIT_CPU_ISA");
}

Isa usable_isa() {
  static const Isa usable = [] {
    const char* text = std::getenv("MOEKIT_CPU_ISA");
    const Isa cap = isa_from_name(text ? text : "");
    return cap < detected_isa() ? cap : detected_isa();
  }();
  return usable;
}

Verdict can_run(Isa unit) {
  if (unit <= usable_isa()) return Verdict::yes();
  if (unit <= detected_isa())
    return Verdict::no(text::concat("MOEKIT_CPU_ISA allows no more than ", name(usable_isa())));
  return Verdict::no(text::concat(
      "needs ", needs(unit), ", and the operating system to save that state; this machine has ", name(detected_isa())));
}

Vendor vendor() {
  static const Vendor found = detect_vendor();
  return found;
}

}  // namespace moekit::cpu
