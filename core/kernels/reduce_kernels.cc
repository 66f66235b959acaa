// The reduction kernels, compiled once per instruction set; each compile exports one KernelTable.
//
// Flags of every compile: -std=c++20 -O3 -ffp-contract=off, never fast-math, and in addition
//   -DUNISONO_ISA=scalar   (nothing more: x86-64 with SSE2, or aarch64 with NEON)
//   -DUNISONO_ISA=avx2     -mavx2 -mf16c -mbmi2 -mfma
//   -DUNISONO_ISA=avx512   -mavx512f -mavx512bw -mavx512dq -mavx512vl -mf16c -mfma -mprefer-vector-width=512
//
// Vocabulary: a format (Plain, Float16, ...) loads one vector of stored elements into accumulators and packs
// accumulators back; a Step is one format with one operation; the loops below are written once over Steps.
//
// Invariants:
// - An element's arithmetic is the same in every loop, in tails and for every vector width, so instruction
//   set, alignment, message size and number of outputs never change a bit of the result. tree.h has its order.
// - All sources of a position are loaded before any output of it is stored: outputs may be sources.
// - No symbol but the table leaves this file, and no inline function or std template that another file may
//   also instantiate is used: the linker could keep the AVX copy for everybody.
#include "kernels/reduce_kernels.h"

#include <type_traits>
#include <utility>

#include "base/vectors.h"
#include "kernels/tree.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace unisono {
namespace {

// ---- Formats ----

// Elements accumulated in their own type.
template <class T>
struct Plain {
  using Scalar = T;
  struct Acc {
    Vec<T> a;
  };
  static UNISONO_INLINE Acc unpack(const char* from) { return {load<Vec<T>>(from)}; }
  static UNISONO_INLINE Bytes pack(Acc v) {
    if constexpr (std::is_floating_point_v<T>) v.a = one_nan<T>(v.a);
    return reinterpret_cast<Bytes>(v.a);
  }
};

// Real and imaginary parts in turn; only the product needs to know.
template <class T>
struct Complex : Plain<T> {};

struct Boolean : Plain<uint8_t> {
  static UNISONO_INLINE Acc unpack(const char* from) {
    return {reinterpret_cast<Bytes>(load<Bytes>(from) != Bytes{}) & 1};
  }
};

struct Float16 {
  using Scalar = float;
  using Acc = FloatPair;
  static UNISONO_INLINE Acc unpack(const char* from) { return unpack_f16(from); }
  static UNISONO_INLINE Bytes pack(Acc v) { return pack_f16(v); }
};

struct BFloat16 {
  using Scalar = float;
  using Acc = FloatPair;
  static UNISONO_INLINE Acc unpack(const char* from) { return unpack_bf16(from); }
  static UNISONO_INLINE Bytes pack(Acc v) { return pack_bf16(v); }
};

template <class Format>
constexpr bool is_complex = false;
template <class T>
constexpr bool is_complex<Complex<T>> = true;

// ---- Arithmetic on one vector ----

template <class T, size_t... lane>
UNISONO_INLINE Vec<T> multiply_complex(Vec<T> x, Vec<T> y, std::index_sequence<lane...>) {
  const Vec<T> real = __builtin_shufflevector(x, x, (lane & ~size_t{1})...);
  const Vec<T> imaginary = __builtin_shufflevector(x, x, (lane | 1)...);
  const Vec<T> swapped = __builtin_shufflevector(y, y, (lane ^ 1)...);
  constexpr Vec<T> sign = {(lane & 1 ? T{1} : T{-1})...};
  return real * y + sign * (imaginary * swapped);
}

template <class T>
UNISONO_INLINE Vec<T> divide(Vec<T> v, size_t divisor) {
  if constexpr (std::is_floating_point_v<T>) {
    return v / static_cast<T>(divisor);
  } else {
    T lanes[vec_bytes / sizeof(T)];
    __builtin_memcpy(lanes, &v, sizeof v);
    for (T& lane : lanes) {
      if constexpr (sizeof(T) == 8) {
        lane /= static_cast<T>(divisor);
      } else {
        // Exact: a quotient of 32-bit numbers that is no integer is further from one than a double rounds.
        lane = static_cast<T>(static_cast<double>(lane) / static_cast<double>(divisor));
      }
    }
    __builtin_memcpy(&v, lanes, sizeof v);
    return v;
  }
}

// ---- One format with one operation ----

template <class F, RedOp op>
struct Step {
  using Scalar = typename F::Scalar;
  using Acc = typename F::Acc;
  static constexpr bool paired = std::is_same_v<Acc, FloatPair>;

  static UNISONO_INLINE Acc first(const char* from, Scalar factor) {
    Acc v = F::unpack(from);
    if constexpr (op == RedOp::premul_sum) {
      v.a = v.a * factor;
      if constexpr (paired) v.b = v.b * factor;
    }
    return v;
  }

  static UNISONO_INLINE Acc join(Acc acc, Acc v) {
    if constexpr (is_complex<F> && op == RedOp::product) {
      acc.a = multiply_complex<Scalar>(acc.a, v.a, std::make_index_sequence<vec_bytes / sizeof(Scalar)>());
    } else {
      acc.a = join_one(acc.a, v.a);
      if constexpr (paired) acc.b = join_one(acc.b, v.b);
    }
    return acc;
  }

  static UNISONO_INLINE Acc next(Acc acc, const char* from, Scalar factor) { return join(acc, first(from, factor)); }

  static UNISONO_INLINE Bytes last(Acc acc, size_t nsrc) {
    if constexpr (op == RedOp::avg) {
      acc.a = divide<Scalar>(acc.a, nsrc);
      if constexpr (paired) acc.b = divide<Scalar>(acc.b, nsrc);
    }
    return F::pack(acc);
  }

 private:
  static UNISONO_INLINE Vec<Scalar> join_one(Vec<Scalar> x, Vec<Scalar> y) {
    if constexpr (op == RedOp::avg && std::is_signed_v<Scalar> && std::is_integral_v<Scalar>) {
      using Unsigned = std::make_unsigned_t<Scalar>;  // signed overflow would be undefined
      return reinterpret_cast<Vec<Scalar>>(reinterpret_cast<Vec<Unsigned>>(x) + reinterpret_cast<Vec<Unsigned>>(y));
    } else {
      return combine<op, Scalar>(x, y);
    }
  }
};

// ---- Loops ----

template <class S>
UNISONO_INLINE typename S::Scalar factor_of(const KernelTask& task, size_t source) {
  if constexpr (std::is_floating_point_v<typename S::Scalar>) {
    if (task.factors) return static_cast<typename S::Scalar>(task.factors[source]);
  }
  return 1;
}

UNISONO_INLINE const char* source(const KernelTask& task, size_t s) {
  return static_cast<const char*>(task.src[s]) + task.src_offset;
}

UNISONO_INLINE char* output(const KernelTask& task, size_t d) {
  return static_cast<char*>(task.dst[d]);
}

// The last bytes, fewer than a vector: the same steps on zero-padded copies.
template <class S>
[[gnu::noinline]] void reduce_tail(const KernelTask& task, size_t done) {
  const size_t rest = task.bytes - done;
  if (rest == 0) return;
  char padded[vec_bytes] = {};
  typename S::Acc acc[1];
  const auto leaf = [&](typename S::Acc(&to)[1], size_t s) __attribute__((always_inline)) {
    __builtin_memcpy(padded, source(task, s) + done, rest);
    to[0] = S::first(padded, factor_of<S>(task, s));
  };
  tree_of_all(acc, task.nsrc, leaf, S::join);
  store(padded, S::last(acc[0], task.nsrc));
  for (size_t d = 0; d < task.ndst; ++d) __builtin_memcpy(output(task, d) + done, padded, rest);
}

// Past the caches; `to` is aligned.
UNISONO_INLINE void store_past(char* to, Bytes v) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), reinterpret_cast<__m512i>(v));
#elif defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(v));
#elif defined(__SSE2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), reinterpret_cast<__m128i>(v));
#else
  store(to, v);
#endif
}

// The hot case: two sources, one or two outputs, one pass with everything in registers.
template <class S, size_t outputs, bool past>
void reduce_two(const KernelTask& task) {
  const char* const a = source(task, 0);
  const char* const b = source(task, 1);
  char* const c = output(task, 0);
  char* const d = output(task, outputs - 1);
  const auto factor_a = factor_of<S>(task, 0);
  const auto factor_b = factor_of<S>(task, 1);
  const size_t whole = task.bytes - task.bytes % vec_bytes;
  size_t i = 0;
  if constexpr (past) {
    constexpr size_t step = 4;  // vectors: whole lines, one output after the other
    for (; i + step * vec_bytes <= whole; i += step * vec_bytes) {
      Bytes result[step];
#pragma GCC unroll 4
      for (size_t v = 0; v < step; ++v) {
        const size_t at = i + v * vec_bytes;
        result[v] = S::last(S::next(S::first(a + at, factor_a), b + at, factor_b), 2);
      }
#pragma GCC unroll 4
      for (size_t v = 0; v < step; ++v) store_past(c + i + v * vec_bytes, result[v]);
      if constexpr (outputs == 2) {
#pragma GCC unroll 4
        for (size_t v = 0; v < step; ++v) store_past(d + i + v * vec_bytes, result[v]);
      }
    }
  }
#pragma GCC unroll 2
  for (; i < whole; i += vec_bytes) {
    const Bytes result = S::last(S::next(S::first(a + i, factor_a), b + i, factor_b), 2);
    store(c + i, result);
    if constexpr (outputs == 2) store(d + i, result);
  }
  reduce_tail<S>(task, whole);
}

// Sources read side by side in one pass are those of one group of the tree: few enough for the hardware prefetchers and
// the ways of the L1 cache (sources of equal alignment fall into the same sets). Measured on Zen 4: 64 sources of 512
// KiB run at 5 GB/s in one pass and at 31 in groups of 8.
constexpr size_t tile_bytes = 4096;
constexpr size_t waiting_bytes = 16384;  // of accumulators that wait for their right neighbours, all in the L1 cache

// What all blocks of one group of sources have in common.
template <class S>
struct Group {
  size_t begin, sources;
  typename S::Scalar factors[group_sources];
  size_t completes;  // see completed_by
  bool last;
  typename S::Acc* waiting;  // a tile for each level, `stride` accumulators apart
  size_t stride;
  typename S::Acc* after;  // where what comes of it waits
};

// One group of sources over `vectors` consecutive vectors, the first of them vector `v` of its tile.
template <class S, size_t vectors>
UNISONO_INLINE void reduce_block(const KernelTask& task, const Group<S>& group, size_t at, size_t v) {
  using Acc = typename S::Acc;
  Acc acc[vectors];
  const auto leaf = [&](Acc(&to)[vectors], size_t s) __attribute__((always_inline)) {
    const char* const from = source(task, s) + at;
    const auto factor = group.factors[s - group.begin];
#pragma GCC unroll 8
    for (size_t i = 0; i < vectors; ++i) to[i] = S::first(from + i * vec_bytes, factor);
  };
  tree_of_group(acc, group.begin, group.sources, leaf, S::join);
  for (size_t done = group.completes; done; done &= done - 1) {
    const Acc* const left = group.waiting + static_cast<size_t>(__builtin_ctzll(done)) * group.stride + v;
#pragma GCC unroll 8
    for (size_t i = 0; i < vectors; ++i) acc[i] = S::join(left[i], acc[i]);
  }
  if (!group.last) {
#pragma GCC unroll 8
    for (size_t i = 0; i < vectors; ++i) group.after[v + i] = acc[i];
    return;
  }
  Bytes result[vectors];
#pragma GCC unroll 8
  for (size_t i = 0; i < vectors; ++i) result[i] = S::last(acc[i], task.nsrc);
  for (size_t d = 0; d < task.ndst; ++d) {
    char* const to = output(task, d) + at;
#pragma GCC unroll 8
    for (size_t i = 0; i < vectors; ++i) store(to + i * vec_bytes, result[i]);
  }
}

// Any number of sources and outputs. A tile's accumulators stay in the L1 cache between groups of sources.
template <class S>
void reduce_many(const KernelTask& task) {
  using Acc = typename S::Acc;
  constexpr size_t block = S::paired ? 2 : 4;  // three partials of a tree of eight stay in registers
  Acc waiting[waiting_bytes / sizeof(Acc)];
  const size_t groups = (task.nsrc + group_sources - 1) / group_sources;
  const size_t levels = groups > 1 ? 64 - static_cast<size_t>(__builtin_clzll(groups - 1)) : 1;
  const size_t room = waiting_bytes / sizeof(Acc) / levels / block * block;
  const size_t stride = room < tile_bytes / vec_bytes ? room : tile_bytes / vec_bytes;
  const size_t whole = task.bytes - task.bytes % vec_bytes;
  for (size_t tile_at = 0; tile_at < whole; tile_at += stride * vec_bytes) {
    const size_t left = (whole - tile_at) / vec_bytes;
    const size_t vectors = left < stride ? left : stride;
    for (size_t g = 0; g < groups; ++g) {
      Group<S> group;
      group.begin = g * group_sources;
      group.last = g + 1 == groups;
      group.sources = group.last ? task.nsrc - group.begin : group_sources;
      for (size_t s = 0; s < group.sources; ++s) group.factors[s] = factor_of<S>(task, group.begin + s);
      group.completes = completed_by(g, group.last);
      group.waiting = waiting;
      group.stride = stride;
      group.after = waiting + (group.last ? 0 : level_after(g)) * stride;
      size_t v = 0;
      for (; v + block <= vectors; v += block) reduce_block<S, block>(task, group, tile_at + v * vec_bytes, v);
      for (; v < vectors; ++v) reduce_block<S, 1>(task, group, tile_at + v * vec_bytes, v);
    }
  }
  reduce_tail<S>(task, whole);
}

template <class F, RedOp op>
void run(const KernelTask& task) {
  using S = Step<F, op>;
  if (task.nsrc == 2 && task.ndst == 1) {
    task.past ? reduce_two<S, 1, true>(task) : reduce_two<S, 1, false>(task);
  } else if (task.nsrc == 2 && task.ndst == 2) {
    task.past ? reduce_two<S, 2, true>(task) : reduce_two<S, 2, false>(task);
  } else {
    reduce_many<S>(task);
  }
}

// ---- Copies ----

// All loads first: a load that follows a store to the same page offset would wait for it.
UNISONO_INLINE void copy_four(char* to, const char* from) {
  const Bytes a = load<Bytes>(from);
  const Bytes b = load<Bytes>(from + vec_bytes);
  const Bytes c = load<Bytes>(from + 2 * vec_bytes);
  const Bytes d = load<Bytes>(from + 3 * vec_bytes);
  store(to, a);
  store(to + vec_bytes, b);
  store(to + 2 * vec_bytes, c);
  store(to + 3 * vec_bytes, d);
}

// Not the C library's memcpy: from 2 KiB on glibc may choose `rep movsb`, which on AMD Zen runs at 1/14 of
// the speed when the output's page offset is slightly above the source's (measured: 2.7 against 38 GB/s), and
// near the size of the last-level cache it bypasses the caches.
void copy_cached(void* dst, const void* src, size_t bytes) {
  constexpr size_t step = 4 * vec_bytes;
  if (bytes < 1024) {
    __builtin_memcpy(dst, src, bytes);
    return;
  }
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  // The first and the last vectors overlap the aligned middle: both times the same bytes are written.
  store(to, load<Bytes>(from));
  const size_t head = vec_bytes - reinterpret_cast<uintptr_t>(to) % vec_bytes;
  const size_t end = bytes - step;
  for (size_t i = head; i < end; i += step) copy_four(to + i, from + i);
  copy_four(to + end, from + end);
}

// Full cache lines past the caches, what is left at both ends through them.
void stream_out(void* dst, const void* src, size_t bytes) {
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
#if defined(__SSE2__)
  constexpr size_t line = 64;
  const size_t head = -reinterpret_cast<uintptr_t>(to) % line;
  if (bytes >= head + line) {
    __builtin_memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    for (; bytes >= line; to += line, from += line, bytes -= line) {
#pragma GCC unroll 4
      for (size_t i = 0; i < line; i += vec_bytes) {
        store_past(to + i, load<Bytes>(from + i));
      }
    }
  }
#endif
  __builtin_memcpy(to, from, bytes);
}

void stream_out_twice(void* one, void* other, const void* src, size_t bytes) {
  constexpr size_t line = 64, step = 4 * vec_bytes;
  const size_t head = -reinterpret_cast<uintptr_t>(one) % line;
  char* c = static_cast<char*>(one);
  char* d = static_cast<char*>(other);
  const char* from = static_cast<const char*>(src);
  size_t i = bytes < head ? bytes : head;
  __builtin_memcpy(c, from, i);
  __builtin_memcpy(d, from, i);
  for (; i + step <= bytes; i += step) {
    Bytes v[4];
#pragma GCC unroll 4
    for (size_t k = 0; k < 4; ++k) v[k] = load<Bytes>(from + i + k * vec_bytes);
#pragma GCC unroll 4
    for (size_t k = 0; k < 4; ++k) store_past(c + i + k * vec_bytes, v[k]);
#pragma GCC unroll 4
    for (size_t k = 0; k < 4; ++k) store_past(d + i + k * vec_bytes, v[k]);
  }
  __builtin_memcpy(c + i, from + i, bytes - i);
  __builtin_memcpy(d + i, from + i, bytes - i);
}

// ---- The table ----

struct Filler {
  KernelTable table{};

  template <class F, RedOp... op>
  constexpr void add(DType dtype) {
    ((table.kernel[static_cast<size_t>(dtype)][static_cast<size_t>(op)] = run<F, op>), ...);
  }
};

constexpr KernelTable filled_table() {
  using enum RedOp;
  Filler f;
  f.add<Plain<double>, sum, avg, product, min, max, premul_sum>(DType::f64);
  f.add<Plain<float>, sum, avg, product, min, max, premul_sum>(DType::f32);
  f.add<Float16, sum, avg, product, min, max, premul_sum>(DType::f16);
  f.add<BFloat16, sum, avg, product, min, max, premul_sum>(DType::bf16);
  f.add<Plain<int8_t>, avg, min, max>(DType::i8);
  f.add<Plain<int16_t>, avg, min, max>(DType::i16);
  f.add<Plain<int32_t>, avg, min, max>(DType::i32);
  f.add<Plain<int64_t>, avg, min, max>(DType::i64);
  f.add<Plain<uint8_t>, sum, avg, product, min, max, band, bor, bxor>(DType::u8);
  f.add<Plain<uint16_t>, sum, avg, product, min, max>(DType::u16);
  f.add<Plain<uint32_t>, sum, avg, product, min, max>(DType::u32);
  f.add<Plain<uint64_t>, sum, avg, product, min, max>(DType::u64);
  f.add<Boolean, band, bor, bxor>(DType::boolean);
  f.add<Complex<float>, product>(DType::c64);
  f.add<Complex<double>, product>(DType::c128);
  f.table.copy_cached = copy_cached;
  f.table.stream_out = stream_out;
  f.table.stream_out_twice = stream_out_twice;
  return f.table;
}

}  // namespace

#define UNISONO_JOIN_(a, b) a##b
#define UNISONO_JOIN(a, b) UNISONO_JOIN_(a, b)
constinit const KernelTable UNISONO_JOIN(kernels_, UNISONO_ISA) = filled_table();

}  // namespace unisono
