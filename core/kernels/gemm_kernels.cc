// The kernels of matrix products, compiled once per instruction set; each compile exports one GemmTable.
//
// Flags as for reduce_kernels.cc. A product's sums are fused multiply-adds, on every instruction set: an element's sum
// over the k of a tile has the same bits on all of them, whatever the tile's rows, columns and place. The accumulators
// of a tile (rows x 2 vectors) fill the registers; everything else streams.
#include "kernels/gemm_kernels.h"

#include "base/vectors.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace unisono {
namespace {

constexpr size_t lanes = vec_bytes / sizeof(float);
constexpr size_t width = 2 * lanes;
#if defined(__AVX512F__)
constexpr size_t most_rows = 14;
#else
constexpr size_t most_rows = 6;
#endif

#if defined(__AVX512BF16__)
constexpr size_t products = 2;  // numbers are pairs of bfloat16: see gemm_kernels.h
#else
constexpr size_t products = 1;
#endif

typedef uint16_t HalfWords __attribute__((vector_size(vec_bytes / 2)));

// ---- Loads of `lanes` numbers of one k, consecutive in memory, as float32 or pairs ----

struct FromF32 {  // or packed pairs
  using Stored = float;
  static UNISONO_INLINE Floats wide(const char* from, size_t) { return load<Floats>(from); }
  static UNISONO_INLINE Floats along(const char* from) { return load<Floats>(from); }
};
struct FromBf16 {
  using Stored = uint16_t;
  static UNISONO_INLINE Floats wide(const char* from, [[maybe_unused]] size_t odd) {
    if constexpr (products == 2) return reinterpret_cast<Floats>(words(from) | words(from + odd) << 16);
    return reinterpret_cast<Floats>(words(from) << 16);
  }
  // Of several k.
  static UNISONO_INLINE Floats along(const char* from) {
    if constexpr (products == 2) return load<Floats>(from);
    return wide(from, 0);
  }
  // One instruction, of which GCC makes five if it is not named.
  static UNISONO_INLINE Words words(const char* from) {
#if defined(__AVX512F__)
    return reinterpret_cast<Words>(_mm512_maskz_cvtepu16_epi32(0xffff, load<__m256i>(from)));
#elif defined(__AVX2__)
    return reinterpret_cast<Words>(_mm256_cvtepu16_epi32(load<__m128i>(from)));
#else
    return __builtin_convertvector(load<HalfWords>(from), Words);
#endif
  }
};
struct FromF16 {
  using Stored = uint16_t;
  static UNISONO_INLINE Floats along(const char* from) { return wide(from, 0); }
  static UNISONO_INLINE Floats wide(const char* from, size_t) {
#if defined(__AVX512F__)
    return _mm512_maskz_cvtph_ps(0xffff, load<__m256i>(from));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(load<__m128i>(from));
#else
    return widen_f16(__builtin_convertvector(load<HalfWords>(from), Words));
#endif
  }
};

// The first `count` lanes, zeros behind them; reads nothing beyond.
template <class F>
UNISONO_INLINE Floats wide_part(const char* from, size_t odd, size_t count) {
  char held[products][vec_bytes] = {};
  for (size_t i = 0; i < count * sizeof(typename F::Stored); i++)
    for (size_t p = 0; p < products; p++) held[p][i] = from[p * odd + i];
  return F::wide(held[0], vec_bytes);
}
template <class F>
UNISONO_INLINE Floats along_part(const char* from, size_t count) {
  char held[vec_bytes] = {};
  for (size_t i = 0; i < count * products * sizeof(typename F::Stored); i++) held[i] = from[i];
  return F::along(held);
}

// ---- Tiles ----

// One number in all lanes; as an integer, since adding it to 0.0 would be an addition.
UNISONO_INLINE Floats spread(const float* from) {
  return reinterpret_cast<Floats>(Words{} + load<uint32_t>(reinterpret_cast<const char*>(from)));
}

// a * b + c, rounded once, on every instruction set; of pairs the second product, then the first, is added so.
UNISONO_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#elif defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  // The product is exact in double; the sum is rounded to odd there, so that rounding it to float32 rounds but once.
  Floats result;
  for (size_t l = 0; l < lanes; l++) {
    const double p = static_cast<double>(a[l]) * static_cast<double>(b[l]), z = static_cast<double>(c[l]);
    const double sum = p + z, of_z = sum - p, lost = (p - (sum - of_z)) + (z - of_z);
    uint64_t bits = __builtin_bit_cast(uint64_t, sum);
    // No NaN is above or below zero.
    if ((lost > 0 || lost < 0) && !(bits & 1)) bits += (lost > 0) == (sum > 0) ? 1 : uint64_t(-1);
    result[l] = static_cast<float>(__builtin_bit_cast(double, bits));
  }
  return result;
#endif
}

UNISONO_INLINE Floats floats_at(const float* from) {
  return load<Floats>(reinterpret_cast<const char*>(from));
}

// The panel of columns [at, at + width). `simple`: it is one chain and asks for nothing ahead; products of few rows are
// made of very short ones.
template <class F, size_t rows, bool simple, bool keeps = false>
UNISONO_INLINE void one_panel(const Tile& t, const char* b, size_t at) {
  constexpr size_t size = sizeof(typename F::Stored);
  Floats left[rows], right[rows];
#pragma GCC unroll 16
  for (size_t i = 0; i < rows; i++) left[i] = right[i] = Floats{};
  if (t.start) {
#pragma GCC unroll 16
    for (size_t i = 0; i < rows; i++) {
      left[i] = floats_at(t.start + i * t.start_row + at);
      right[i] = floats_at(t.start + i * t.start_row + at + lanes);
    }
  }
  const float* a = t.a;
  const size_t b_row = t.b_row * size, odd = t.b_odd * size;
  char* kept = reinterpret_cast<char*>(t.kept);
  auto step = [&]() __attribute__((always_inline)) {
    if constexpr (simple) {
      for (size_t by = 0; by < width * size; by += 64) __builtin_prefetch(b + t.ahead_row + by, 0, 3);
    }
    const Floats x = F::wide(b, odd), y = F::wide(b + lanes * size, odd);
    if constexpr (keeps) {
      store(kept, x);
      store(kept + vec_bytes, y);
      kept += width * sizeof(float);
    }
#pragma GCC unroll 16
    for (size_t i = 0; i < rows; i++) {
      const Floats factor = spread(a + i);
      left[i] = multiply_add(factor, x, left[i]);
      right[i] = multiply_add(factor, y, right[i]);
    }
    a += rows, b += b_row;
  };
  if constexpr (simple) {
#pragma GCC unroll 2
    for (size_t k = 0; k < t.k; k++) step();
  } else {
    constexpr size_t stretch = 8;
    const char* ahead = t.ahead;
    const size_t each = t.ahead_rows ? (t.ahead_rows * stretch + t.k - 1) / t.k : 0;
    if (each) {
#pragma GCC unroll 16
      for (size_t i = 0; i < rows; i++) __builtin_prefetch(t.c + at + i * t.c_row, 1, 2);
      for (size_t l = 0; l < t.nlefts; l++) {
#pragma GCC unroll 16
        for (size_t i = 0; i < rows; i++) __builtin_prefetch(t.lefts[l] + at + i * t.left_row, 0, 3);
      }
    }
    size_t k = 0, asked = 0;
    for (size_t end = t.first ? t.first : t.k;; end = t.k) {
      for (; k + stretch <= end; k += stretch) {
        for (size_t r = 0; r < each && asked < t.ahead_rows; r++, asked++, ahead += t.ahead_row)
          for (size_t by = 0; by < t.ahead_bytes; by += 64) __builtin_prefetch(ahead + by, 0, 2);
#pragma GCC unroll 2
        for (size_t i = 0; i < stretch; i++) step();
      }
#pragma GCC unroll 2
      for (; k < end; k++) step();
      if (end == t.k) break;
#pragma GCC unroll 16
      for (size_t i = 0; i < rows; i++) {
        char* const to = reinterpret_cast<char*>(t.before + i * t.left_row + at);
        store(to, left[i]);
        store(to + vec_bytes, right[i]);
        left[i] = right[i] = Floats{};
      }
    }
  }
  for (size_t l = 0; l < t.nlefts; l++) {
    const float* const from = t.lefts[l] + at;
#pragma GCC unroll 16
    for (size_t i = 0; i < rows; i++) {
      left[i] = floats_at(from + i * t.left_row) + left[i];
      right[i] = floats_at(from + i * t.left_row + lanes) + right[i];
    }
  }
#pragma GCC unroll 16
  for (size_t i = 0; i < rows; i++) {
    char* const to = reinterpret_cast<char*>(t.c + i * t.c_row + at);
    if (t.bias) {
      left[i] += floats_at(t.bias + at);
      right[i] += floats_at(t.bias + at + lanes);
    }
    store(to, left[i]);
    store(to + vec_bytes, right[i]);
  }
}

// A narrower last panel: computed beside and copied. `b` may end with its last column, so it is copied first, in
// stretches of k that fit on the stack.
template <class F, size_t rows>
void last_panel(const Tile& t, const char* b, size_t at, size_t columns) {
  constexpr size_t size = sizeof(typename F::Stored), stretch = 32;
  float held[stretch * width], part[rows * width] = {};
  for (size_t i = 0; t.start && i < rows; i++)
    for (size_t j = 0; j < columns; j++) part[i * width + j] = t.start[i * t.start_row + at + j];
  const size_t left = columns < lanes ? columns : lanes;
  for (size_t k = 0, some; k < t.k; k += some) {
    const size_t rest = (k < t.first ? t.first : t.k) - k;
    some = rest < stretch ? rest : stretch;
    for (size_t i = 0; i < some; i++) {
      const char* from = b + (k + i) * t.b_row * size;
      const size_t odd = t.b_odd * size;
      char* to = reinterpret_cast<char*>(held + i * width);
      store(to, wide_part<F>(from, odd, left));
      store(to + vec_bytes, wide_part<F>(from + lanes * size, odd, columns - left));
    }
    Tile inner = t;
    inner.k = some, inner.first = 0, inner.a = t.a + k * rows, inner.b_row = width, inner.c = part, inner.c_row = width;
    inner.start = part, inner.start_row = width;
    inner.nlefts = 0, inner.bias = nullptr, inner.ahead_rows = 0;
    one_panel<FromF32, rows, true>(inner, reinterpret_cast<const char*>(held), 0);
    if (k + some != t.first) continue;
    for (size_t i = 0; i < rows; i++)
      for (size_t j = 0; j < columns; j++) t.before[i * t.left_row + at + j] = std::exchange(part[i * width + j], 0.0f);
  }
  for (size_t i = 0; i < rows; i++)
    for (size_t j = 0; j < columns; j++) {
      float x = part[i * width + j];
      for (size_t l = 0; l < t.nlefts; l++) x = t.lefts[l][i * t.left_row + at + j] + x;
      t.c[i * t.c_row + at + j] = t.bias ? x + t.bias[at + j] : x;
    }
}

template <class F, size_t rows>
void tile_of(const Tile& t) {
  constexpr size_t size = sizeof(typename F::Stored);
  const char* b = static_cast<const char*>(t.b);
  size_t at = 0;
  if (t.first || t.ahead_rows)
    for (; at + width <= t.columns; at += width, b += t.b_panel * size) one_panel<F, rows, false>(t, b, at);
  else
    for (; at + width <= t.columns; at += width, b += t.b_panel * size) one_panel<F, rows, true>(t, b, at);
  if (at < t.columns) last_panel<F, rows>(t, b, at, t.columns - at);
}

template <class F, size_t rows>
void tile_rows(const Tile& t) {
  if (t.rows == rows) return tile_of<F, rows>(t);
  if constexpr (rows > 1) tile_rows<F, rows - 1>(t);
}

template <class F, size_t rows>
void packing_tile_rows(const Tile& t) {
  if (t.rows == rows) return one_panel<F, rows, false, true>(t, static_cast<const char*>(t.b), 0);
  if constexpr (rows > 1) packing_tile_rows<F, rows - 1>(t);
}

#if defined(__AVX512BF16__)

void tile(const Tile& t) {
  t.kept ? packing_tile_rows<FromBf16, most_rows>(t) : tile_rows<FromF32, most_rows>(t);
}

#else

void tile(const Tile& t) {
  if (t.kept) {
    if (t.b_type == DType::f32) return packing_tile_rows<FromF32, most_rows>(t);
    if (t.b_type == DType::bf16) return packing_tile_rows<FromBf16, most_rows>(t);
    return packing_tile_rows<FromF16, most_rows>(t);
  }
  if (t.b_type == DType::f32) return tile_rows<FromF32, most_rows>(t);
  if (t.b_type == DType::bf16) return tile_rows<FromBf16, kFewRows>(t);
  return tile_rows<FromF16, kFewRows>(t);
}

#endif

// ---- Packing ----

template <class F>
void pack_of(const Matrix& b, size_t k, size_t panels, float* to) {
  constexpr size_t size = sizeof(typename F::Stored);
  const char* from = static_cast<const char*>(b.data);
  const size_t panel_bytes = k * width * sizeof(float), odd = b.odd * size;
  char* out = reinterpret_cast<char*>(to);
  for (size_t i = 0; i < k; i++, from += b.row * size, out += width * sizeof(float))
    for (size_t p = 0; p < panels; p++) {
      store(out + p * panel_bytes, F::wide(from + p * width * size, odd));
      store(out + p * panel_bytes + vec_bytes, F::wide(from + (p * width + lanes) * size, odd));
    }
}

void pack(const Matrix& b, size_t k, size_t panels, float* to) {
  if constexpr (products == 1) {
    if (b.dtype == DType::f32) return pack_of<FromF32>(b, k, panels, to);
    if (b.dtype == DType::f16) return pack_of<FromF16>(b, k, panels, to);
  }
  pack_of<FromBf16>(b, k, panels, to);
}

// A square of numbers is turned by exchanging ever smaller halves.

template <size_t step, size_t... lane>
UNISONO_INLINE void exchange(Floats& x, Floats& y, std::index_sequence<lane...>) {
  const Floats u = __builtin_shufflevector(x, y, (lane & step ? lanes + lane - step : lane)...);
  const Floats v = __builtin_shufflevector(x, y, (lane & step ? lanes + lane : lane + step)...);
  x = u, y = v;
}

template <size_t step>
UNISONO_INLINE void transpose(Floats (&v)[lanes]) {
#pragma GCC unroll 16
  for (size_t i = 0; i < lanes; i++)
    if (!(i & step)) exchange<step>(v[i], v[i + step], std::make_index_sequence<lanes>());
  if constexpr (step > 1) transpose<step / 2>(v);
}

// Stores whole vectors: what they write beyond a column's rows is written again by the columns after it, or is slack.
template <class F>
void pack_columns_of(const Matrix& from, size_t rows, size_t columns, size_t readable, float* to, size_t to_column) {
  constexpr size_t size = sizeof(typename F::Stored);
  const char* const data = static_cast<const char*>(from.data);
  const size_t odd = from.odd * size;
  const bool is_along = products == 2 ? from.odd == 1 && from.col == 2 : from.col == 1;
  if (from.row == 1) {
    for (size_t k = 0; k < columns; k++)
      for (size_t i = 0; i < rows; i += lanes) {
        const char* const at = data + (i + k * from.col) * size;
        char* const out = reinterpret_cast<char*>(to + k * to_column + i);
        store(out, i + lanes <= readable ? F::wide(at, odd) : wide_part<F>(at, odd, readable - i));
      }
    return;
  }
  // Rows are read along (any other stride one by one) and turned.
  constexpr size_t most_turns = (width > most_rows ? width : most_rows) / lanes + 1;
  for (size_t k = 0; k < columns; k += lanes) {
    const size_t across = columns - k < lanes ? columns - k : lanes;
    Floats turned[most_turns][lanes];
    for (size_t i = 0, turn = 0; i < rows; i += lanes, turn++) {
      Floats(&v)[lanes] = turned[turn];
      for (size_t l = 0; l < lanes; l++) {
        const char* const at = data + ((i + l) * from.row + k * from.col) * size;
        if (i + l >= rows) {
          v[l] = Floats{};
        } else if (is_along) {
          __builtin_prefetch(at + rows * from.row * size);  // the next sliver's
          v[l] = across == lanes ? F::along(at) : along_part<F>(at, across);
        } else {
          char held[vec_bytes] = {};
          for (size_t c = 0; c < across; c++)
            for (size_t p = 0; p < products; p++)
              __builtin_memcpy(held + (c * products + p) * size, at + c * from.col * size + p * odd, size);
          v[l] = F::along(held);
        }
      }
      transpose<lanes / 2>(v);
    }
    for (size_t c = 0; c < across; c++)
      for (size_t i = 0, turn = 0; i < rows; i += lanes, turn++)
        store(reinterpret_cast<char*>(to + (k + c) * to_column + i), turned[turn][c]);
  }
}

void pack_columns(const Matrix& from, size_t rows, size_t columns, size_t readable, float* to, size_t to_column) {
  if constexpr (products == 1) {
    if (from.dtype == DType::f32) return pack_columns_of<FromF32>(from, rows, columns, readable, to, to_column);
    if (from.dtype == DType::f16) return pack_columns_of<FromF16>(from, rows, columns, readable, to, to_column);
  }
  pack_columns_of<FromBf16>(from, rows, columns, readable, to, to_column);
}

}  // namespace

#define UNISONO_JOIN_(a, b) a##b
#define UNISONO_JOIN(a, b) UNISONO_JOIN_(a, b)
constinit const GemmTable UNISONO_JOIN(gemm_, UNISONO_ISA) = {most_rows, width, products, tile, pack, pack_columns};

}  // namespace unisono
