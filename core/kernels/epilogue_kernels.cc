// The kernels of epilogue.h, compiled once per instruction set like reduce_kernels.cc, with the same flags and for the
// same reasons; each compile exports one EpilogueTable.
#include "base/vectors.h"
#include "kernels/epilogue.h"
#include "kernels/tree.h"

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

// What follows the tree: divided, scaled, with the residual at `residual` if there is one, and one kind of NaN.
template <class Out, RedOp op, size_t vectors>
UNISONO_INLINE void finish(const FusedReduction& f, Vec<typename Out::Scalar> (&acc)[vectors], const char* residual) {
  using T = typename Out::Scalar;
  constexpr size_t lanes = vec_bytes / sizeof(T);
  const T scale = static_cast<T>(f.scale), divisor = static_cast<T>(f.nsrc);
#pragma GCC unroll 8
  for (size_t v = 0; v < vectors; v++) {
    if constexpr (op == RedOp::avg) acc[v] = acc[v] / divisor;
    if (f.scale != 1) acc[v] = acc[v] * scale;
    if (residual) acc[v] = acc[v] + Out::get(residual + v * lanes * Out::size);
    acc[v] = one_nan<T>(acc[v]);
  }
}

UNISONO_INLINE const char* residual_at(const FusedReduction& f, size_t byte) {
  return f.residual ? static_cast<const char*>(f.residual) + byte : nullptr;
}

// `vectors` vectors from element `at` on.
template <class Out, RedOp op, size_t vectors>
UNISONO_INLINE void block(const FusedReduction& f, size_t at) {
  using T = typename Out::Scalar;
  constexpr size_t lanes = vec_bytes / sizeof(T);
  Vec<T> acc[vectors];
  const auto leaf = [&](Vec<T>(&to)[vectors], size_t s) __attribute__((always_inline)) {
    const char* const from = static_cast<const char*>(f.src[s]) + at * sizeof(T);
#pragma GCC unroll 8
    for (size_t v = 0; v < vectors; v++) to[v] = load<Vec<T>>(from + v * vec_bytes);
  };
  tree_of_all(acc, f.nsrc, leaf, combine<op, T>);
  finish<Out, op>(f, acc, residual_at(f, at * Out::size));
  for (size_t d = 0; d < f.ndst; d++)
#pragma GCC unroll 8
    for (size_t v = 0; v < vectors; v++) Out::put(static_cast<char*>(f.dst[d]) + (at + v * lanes) * Out::size, acc[v]);
}

// Less than a vector, by zero-padded copies.
template <class Out, RedOp op>
[[gnu::noinline]] void tail(const FusedReduction& f, size_t at) {
  using T = typename Out::Scalar;
  const size_t left = f.count - at;
  char padded[vec_bytes] = {};
  Vec<T> acc[1];
  const auto leaf = [&](Vec<T>(&to)[1], size_t s) __attribute__((always_inline)) {
    __builtin_memcpy(padded, static_cast<const T*>(f.src[s]) + at, left * sizeof(T));
    to[0] = load<Vec<T>>(padded);
  };
  tree_of_all(acc, f.nsrc, leaf, combine<op, T>);
  if (f.residual) __builtin_memcpy(padded, residual_at(f, at * Out::size), left * Out::size);
  finish<Out, op>(f, acc, f.residual ? padded : nullptr);
  Out::put(padded, acc[0]);
  for (size_t d = 0; d < f.ndst; d++)
    __builtin_memcpy(static_cast<char*>(f.dst[d]) + at * Out::size, padded, left * Out::size);
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
