// Vectors as wide as the instruction set this file is compiled for, and the 16-bit float formats on them.
//
// Private to the kernels' files. GCC/Clang vector extensions, so one source serves SSE2, AVX2, AVX-512 and
// NEON. Invariant: every conversion gives the same bits on each of them (NaN payloads and denormals
// included); the integer fall-backs are exact copies of what F16C does. Everything is in an unnamed
// namespace: see the top of reduce_kernels.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "base/types.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace unisono {
namespace {

#if defined(__AVX512BW__)
constexpr size_t vec_bytes = 64;
#elif defined(__AVX2__)
constexpr size_t vec_bytes = 32;
#else
constexpr size_t vec_bytes = 16;
#endif

#define UNISONO_INLINE __attribute__((always_inline)) inline

template <class T>
struct VecOf {
  typedef T type __attribute__((vector_size(vec_bytes)));
};
template <class T>
using Vec = typename VecOf<T>::type;

using Bytes = Vec<uint8_t>;
using Floats = Vec<float>;
using Words = Vec<uint32_t>;
using Ints = Vec<int32_t>;

template <class V>
UNISONO_INLINE V load(const char* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
UNISONO_INLINE void store(char* to, V v) {
  __builtin_memcpy(to, &v, sizeof v);
}

// Two vectors of float32 that came from one vector of 16-bit elements; which lanes went where is the format's
// own business, since all work between unpacking and packing is per lane.
struct FloatPair {
  Floats a, b;
};

// Every NaN becomes the one positive quiet NaN. Which of two NaN operands an addition passes on depends on
// the operand order the compiler chose, and the sign of inf - inf on the CPU; without this the bits would
// too.
template <class T>
UNISONO_INLINE Vec<T> one_nan(Vec<T> v) {
  const Vec<T> nan = Vec<T>{} + static_cast<T>(__builtin_nanf(""));
  return v == v ? v : nan;
}

using Halves = Vec<int16_t>;

// The same for packed 16-bit numbers, given the bits of that format's infinity and its quiet NaN.
UNISONO_INLINE Bytes one_nan_16(Halves packed, int16_t infinity, int16_t nan) {
  return reinterpret_cast<Bytes>((packed & 0x7fff) > infinity ? Halves{} + nan : packed);
}

// Even 16-bit elements of x with odd ones of y.
template <size_t... lane>
UNISONO_INLINE Halves alternate(Words x, Words y, std::index_sequence<lane...>) {
  return __builtin_shufflevector(reinterpret_cast<Halves>(x), reinterpret_cast<Halves>(y),
                                 (lane & 1 ? lane + sizeof...(lane) : lane)...);
}

// bfloat16: even elements are the low halves of 32-bit lanes, odd elements the high halves, so widening is
// one shift or one mask and needs no lane crossing.
UNISONO_INLINE FloatPair unpack_bf16(const char* from) {
  const Words w = load<Words>(from);
  return {reinterpret_cast<Floats>(w << 16), reinterpret_cast<Floats>(w & 0xffff0000u)};
}

// To nearest even, in 16-bit lanes for twice the throughput: `high` is the truncated result, `low` what was
// cut off. Round up if low > 0x8000, or if equal and high is odd; with the odd bit put into low's last bit
// this is one comparison, made signed by flipping the top bit. NaN is 0x7fc0 whatever its sign, as torch's
// round_to_nearest_even has it. (A NaN made by float32 arithmetic is quiet and one that was loaded has an
// empty low half, so `high` alone tells NaN from infinity.)
UNISONO_INLINE Bytes pack_bf16(FloatPair v) {
  const Words a = reinterpret_cast<Words>(v.a);
  const Words b = reinterpret_cast<Words>(v.b);
  constexpr auto lanes = std::make_index_sequence<vec_bytes / 2>();
  const Halves high = alternate(a >> 16, b, lanes);
  const Halves low = alternate(a, b << 16, lanes);
  const Halves up = ((low | (high & 1)) ^ static_cast<int16_t>(0x8000)) > 0;  // -1 where true
  const Halves rounded = high - up;
  return reinterpret_cast<Bytes>((high & 0x7fff) > 0x7f80 ? Halves{} + 0x7fc0 : rounded);
}

// float16 in the low half of each lane -> float32. A signalling NaN is quieted and keeps its payload.
[[maybe_unused]] UNISONO_INLINE Floats widen_f16(Words half) {
  const Words exponent_mask = Words{} + (0x7c00u << 13);
  const Words magnitude = (half & 0x7fffu) << 13;
  const Words exponent = magnitude & exponent_mask;
  const Words normal = magnitude + ((127u - 15u) << 23);
  // Denormals: put the mantissa under an implicit one and let a subtraction of that one normalise it. Both
  // operands are normal numbers, so flush-to-zero modes do not matter.
  const Words one = Words{} + (113u << 23);
  const Words denormal =
      reinterpret_cast<Words>(reinterpret_cast<Floats>(magnitude + one) - reinterpret_cast<Floats>(one));
  const Words infinite = magnitude | 0x7f800000u;
  const Words special = magnitude > exponent_mask ? infinite | 0x00400000u : infinite;
  Words bits = exponent == exponent_mask ? special : normal;
  bits = exponent == Words{} ? denormal : bits;
  return reinterpret_cast<Floats>(bits | ((half & 0x8000u) << 16));
}

// float32 -> float16 in the low half of each lane, to nearest even. NaN is quieted and keeps its sign and the
// upper bits of its payload.
[[maybe_unused]] UNISONO_INLINE Words narrow_f16(Floats v) {
  const Words w = reinterpret_cast<Words>(v);
  // Magnitudes are compared as signed numbers: SSE2 has no unsigned comparison, and bit 31 is clear.
  const Ints magnitude = reinterpret_cast<Ints>(w & 0x7fffffffu);
  const Words m = reinterpret_cast<Words>(magnitude);
  const Words normal = (m - ((127u - 15u) << 23) + 0xfffu + ((m >> 13) & 1u)) >> 13;
  // Results below 2^-14: adding 0.5 moves the float16 denormal step to the last bit of the sum, so the
  // addition itself rounds to nearest even.
  const Floats half = Floats{} + 0.5f;
  const Words denormal = reinterpret_cast<Words>(reinterpret_cast<Floats>(m) + half) - reinterpret_cast<Words>(half);
  const Words nan = ((m >> 13) & 0x3ffu) | 0x7e00u;
  Words bits = magnitude < (113 << 23) ? denormal : normal;
  bits = magnitude >= ((127 + 16) << 23) ? Words{} + 0x7c00u : bits;
  bits = magnitude > 0x7f800000 ? nan : bits;
  return bits | ((w & 0x80000000u) >> 16);
}

UNISONO_INLINE FloatPair unpack_f16(const char* from) {
#if defined(__AVX512F__)
  // The maskz forms are the same instructions; GCC 12 warns of uninitialised reads inside the plain ones.
  return {_mm512_maskz_cvtph_ps(0xffff, load<__m256i>(from)), _mm512_maskz_cvtph_ps(0xffff, load<__m256i>(from + 32))};
#elif defined(__F16C__)
  return {_mm256_cvtph_ps(load<__m128i>(from)), _mm256_cvtph_ps(load<__m128i>(from + 16))};
#else
  const Words w = load<Words>(from);
  return {widen_f16(w & 0xffffu), widen_f16(w >> 16)};
#endif
}

UNISONO_INLINE Bytes pack_f16(FloatPair v) {
#if defined(__AVX512F__)
  const __m256i low = _mm512_maskz_cvtps_ph(0xffff, v.a, _MM_FROUND_TO_NEAREST_INT);
  const __m256i high = _mm512_maskz_cvtps_ph(0xffff, v.b, _MM_FROUND_TO_NEAREST_INT);
  const Halves packed = reinterpret_cast<Halves>(_mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(low), high, 1));
#elif defined(__F16C__)
  const __m128i low = _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT);
  const __m128i high = _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT);
  const Halves packed = reinterpret_cast<Halves>(_mm256_set_m128i(high, low));
#else
  const Halves packed = reinterpret_cast<Halves>(narrow_f16(v.a) | (narrow_f16(v.b) << 16));
#endif
  return one_nan_16(packed, 0x7c00, 0x7e00);
}

// One step of a reduction.
template <RedOp op, class T>
UNISONO_INLINE Vec<T> combine(Vec<T> x, Vec<T> y) {
  if constexpr (op == RedOp::sum || op == RedOp::avg || op == RedOp::premul_sum) {
    return x + y;
  } else if constexpr (op == RedOp::product) {
    return x * y;
  } else if constexpr (op == RedOp::band) {
    return x & y;
  } else if constexpr (op == RedOp::bor) {
    return x | y;
  } else if constexpr (op == RedOp::bxor) {
    return x ^ y;
  } else {
    // Of equal numbers (+0 and -0) the later one is taken, as torch.minimum and torch.maximum do.
    static_assert(op == RedOp::min || op == RedOp::max);
    const Vec<T> better = op == RedOp::min ? (x < y ? x : y) : (x > y ? x : y);
    if constexpr (std::is_floating_point_v<T>) {
      return x == x ? better : x;  // a NaN in y fails the comparison and is `better` already
    } else {
      return better;
    }
  }
}

}  // namespace
}  // namespace unisono
