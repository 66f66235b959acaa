// The kernels of epilogue.h, compiled once per instruction set like reduce_kernels.cc, with the same flags and for the
// same reasons; each compile exports one EpilogueTable.
#include "base/vectors.h"
#include "kernels/epilogue.h"

namespace unisono {
namespace {

typedef uint16_t HalfWords __attribute__((vector_size(vec_bytes / 2)));

// Formats: one vector of accumulators from and to memory. Numbers that come to `put` have one kind of NaN only.
template <class T>
struct Same {
  using Scalar = T;
  static constexpr size_t size = sizeof(T);
  static UNISONO_INLINE Vec<T> get(const char* from) { return load<Vec<T>>(from); }
  static UNISONO_INLINE void put(char* to, Vec<T> v) { store(to, v); }
};

struct Half {
  using Scalar = float;
  static constexpr size_t size = 2;
  static UNISONO_INLINE Floats get(const char* from) {
#if defined(__AVX512F__)
    return _mm512_maskz_cvtph_ps(0xffff, load<__m256i>(from));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(load<__m128i>(from));
#else
    return widen_f16(__builtin_convertvector(load<HalfWords>(from), Words));
#endif
  }
  static UNISONO_INLINE void put(char* to, Floats v) {
#if defined(__AVX512F__)
    store(to, _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    store(to, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
    store(to, __builtin_convertvector(narrow_f16(v), HalfWords));
#endif
  }
};

struct Brain {
  using Scalar = float;
  static constexpr size_t size = 2;
  static UNISONO_INLINE Floats get(const char* from) {
    return reinterpret_cast<Floats>(__builtin_convertvector(load<HalfWords>(from), Words) << 16);
  }
  static UNISONO_INLINE void put(char* to, Floats v) {
    const Words w = reinterpret_cast<Words>(v);
    store(to, __builtin_convertvector((w + 0x7fffu + (w >> 16 & 1u)) >> 16, HalfWords));
  }
};

// `vectors` vectors from element `at` on.
template <class Out, RedOp op, size_t vectors>
UNISONO_INLINE void block(const FusedReduction& f, size_t at) {
  using T = typename Out::Scalar;
  constexpr size_t lanes = vec_bytes / sizeof(T);
  Vec<T> acc[vectors];
  const char* from = static_cast<const char*>(f.src[0]) + at * sizeof(T);
#pragma GCC unroll 8
  for (size_t v = 0; v < vectors; v++) acc[v] = load<Vec<T>>(from + v * vec_bytes);
  for (size_t s = 1; s < f.nsrc; s++) {
    from = static_cast<const char*>(f.src[s]) + at * sizeof(T);
#pragma GCC unroll 8
    for (size_t v = 0; v < vectors; v++) acc[v] = combine<op, T>(acc[v], load<Vec<T>>(from + v * vec_bytes));
  }
  const T scale = static_cast<T>(f.scale), divisor = static_cast<T>(f.nsrc);
#pragma GCC unroll 8
  for (size_t v = 0; v < vectors; v++) {
    if constexpr (op == RedOp::avg) acc[v] = acc[v] / divisor;
    if (f.scale != 1) acc[v] = acc[v] * scale;
    if (f.residual) acc[v] = acc[v] + Out::get(static_cast<const char*>(f.residual) + (at + v * lanes) * Out::size);
    acc[v] = one_nan<T>(acc[v]);
  }
  for (size_t d = 0; d < f.ndst; d++)
#pragma GCC unroll 8
    for (size_t v = 0; v < vectors; v++) Out::put(static_cast<char*>(f.dst[d]) + (at + v * lanes) * Out::size, acc[v]);
}

// Less than a vector, through memory beside.
template <class Out, RedOp op>
void tail(const FusedReduction& f, size_t at) {
  using T = typename Out::Scalar;
  constexpr size_t lanes = vec_bytes / sizeof(T);
  const size_t left = f.count - at;
  T acc[lanes] = {}, next[lanes] = {};
  char out[vec_bytes], residual[vec_bytes] = {};
  __builtin_memcpy(acc, static_cast<const T*>(f.src[0]) + at, left * sizeof(T));
  const void* const pair[] = {acc, next};
  void* const sum[] = {acc};
  for (size_t s = 1; s < f.nsrc; s++) {
    // Two at a time, with nothing but the sum.
    __builtin_memcpy(next, static_cast<const T*>(f.src[s]) + at, left * sizeof(T));
    constexpr RedOp step = op == RedOp::avg ? RedOp::sum : op;
    block<Same<T>, step, 1>({FusedReduction{.out = f.out,
                                            .op = step,
                                            .count = lanes,
                                            .src = pair,
                                            .nsrc = 2,
                                            .dst = sum,
                                            .ndst = 1,
                                            .scale = 1,
                                            .residual = nullptr}},
                            0);
  }
  if constexpr (op == RedOp::avg)
    for (T& x : acc) x = x / static_cast<T>(f.nsrc);
  if (f.residual) __builtin_memcpy(residual, static_cast<const char*>(f.residual) + at * Out::size, left * Out::size);
  const void* const one[] = {acc};
  void* const to[] = {out};
  block<Out, RedOp::sum, 1>({FusedReduction{.out = f.out,
                                            .op = RedOp::sum,
                                            .count = lanes,
                                            .src = one,
                                            .nsrc = 1,
                                            .dst = to,
                                            .ndst = 1,
                                            .scale = f.scale,
                                            .residual = f.residual ? residual : nullptr}},
                            0);
  for (size_t d = 0; d < f.ndst; d++)
    __builtin_memcpy(static_cast<char*>(f.dst[d]) + at * Out::size, out, left * Out::size);
}

template <class Out, RedOp op>
void run(const FusedReduction& f) {
  constexpr size_t lanes = vec_bytes / sizeof(typename Out::Scalar);
  size_t at = 0;
  for (; at + 4 * lanes <= f.count; at += 4 * lanes) block<Out, op, 4>(f, at);
  for (; at + lanes <= f.count; at += lanes) block<Out, op, 1>(f, at);
  if (at < f.count) tail<Out, op>(f, at);
}

struct Filler {
  EpilogueTable table{};
  template <class Out, RedOp... op>
  constexpr void add(DType dtype) {
    ((table.kernel[static_cast<size_t>(dtype)][static_cast<size_t>(op)] = run<Out, op>), ...);
  }
};

constexpr EpilogueTable filled_table() {
  using enum RedOp;
  Filler f;
  f.add<Same<double>, sum, avg, min, max>(DType::f64);
  f.add<Same<float>, sum, avg, min, max>(DType::f32);
  f.add<Half, sum, avg, min, max>(DType::f16);
  f.add<Brain, sum, avg, min, max>(DType::bf16);
  return f.table;
}

}  // namespace

#define UNISONO_JOIN_(a, b) a##b
#define UNISONO_JOIN(a, b) UNISONO_JOIN_(a, b)
constinit const EpilogueTable UNISONO_JOIN(epilogue_, UNISONO_ISA) = filled_table();

}  // namespace unisono
