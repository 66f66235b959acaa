// See cpu.h.
//
// What is found out once is kept in atomics, relaxed: threads that come together find the same number, which publishes
// nothing else. Not in a `static const` of a function: while one thread is inside of its initialisation another may
// fork, and the child would wait for that thread for ever.
#include "base/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <fstream>
#include <string>

namespace unisono {
namespace detail {

constinit std::atomic<int> chosen_isa{kNoIsa};

}  // namespace detail

namespace {

bool cpu_has(Isa isa) {
  switch (isa) {
    case Isa::scalar:
      return true;
#if defined(__x86_64__)
    // The compiler's runtime also asks XGETBV whether the operating system saves the registers.
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2") &&
             __builtin_cpu_supports("fma");
    case Isa::avx512:
      return cpu_has(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case Isa::avx512_bf16:
      return cpu_has(Isa::avx512) && __builtin_cpu_supports("avx512bf16");
#endif
    default:
      return false;
  }
}

size_t read_cache_bytes() {
  size_t largest = 0;
  for (int i = 0; i < 8; i++) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(i) + "/size");
    size_t n = 0;
    char unit = 0;
    if (file >> n) file >> unit;
    largest = std::max(largest, unit == 'M' ? n << 20 : unit == 'K' ? n << 10 : n);
  }
  return largest ? largest : size_t{8} << 20;
}

}  // namespace

Isa best_isa() {
  static constinit std::atomic<int> known{detail::kNoIsa};  // written and read here only, relaxed: see above
  int best = known.load(std::memory_order_relaxed);
  if (best == detail::kNoIsa) {
    best = static_cast<int>(Isa::scalar);
    for (Isa isa : {Isa::avx2, Isa::avx512, Isa::avx512_bf16})
      if (cpu_has(isa)) best = static_cast<int>(isa);
    known.store(best, std::memory_order_relaxed);
  }
  return static_cast<Isa>(best);
}

bool is_intel() {
#if defined(__x86_64__)
  return __builtin_cpu_is("intel");
#else
  return false;
#endif
}

bool has_fast_strings() {
  static constinit std::atomic<int> known{-1};  // written and read here only, relaxed: see above
  int fast = known.load(std::memory_order_relaxed);
  if (fast < 0) {
    fast = 0;
#if defined(__x86_64__)
    constexpr unsigned kFastString = 1 << 9;  // of EBX, "enhanced REP MOVSB"
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) fast = (b & kFastString) != 0;
#endif
    known.store(fast, std::memory_order_relaxed);
  }
  return fast != 0;
}

bool set_isa(Isa isa) {
  if (!cpu_has(isa)) return false;
  detail::chosen_isa.store(static_cast<int>(isa), std::memory_order_relaxed);
  return true;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::scalar:
#if defined(__aarch64__)
      return "neon";  // the plain form is written in vectors of 16 bytes, which every 64-bit ARM has
#else
      return "scalar";
#endif
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::avx512_bf16:
      return "avx512_bf16";
  }
  return "?";
}

size_t last_cache_bytes() {
  static constinit std::atomic<size_t> known{0};  // written and read here only, relaxed: see above
  size_t bytes = known.load(std::memory_order_relaxed);
  if (bytes == 0) {
    bytes = read_cache_bytes();
    known.store(bytes, std::memory_order_relaxed);
  }
  return bytes;
}

}  // namespace unisono
