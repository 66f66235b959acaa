// See gemm.h: how a product is cut so that what is used again is in the nearest cache.
//
// Many rows: for every block of k, rows of a become float32 in the second-level cache, once; then panel by panel of b
// is packed into the first-level cache as float32 and used by all those rows. Few rows do not pay for packing: they
// read b where it is, a few rows of b at a time, so that memory is read in order. Panels that were packed before are
// used as they are. A sliver is as many rows as one tile has accumulators for. While a panel is used, what is packed
// next is asked for from memory: without that a third of the time went into waiting for it (64 rows, weights of 2 MiB).
#include "kernels/gemm.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "kernels/gemm_kernels.h"
#include "kernels/reduce.h"

namespace unisono {
namespace {

// Measured on Zen 4 (32 KiB, 1 MiB and 32 MiB of cache), with rows of b 2 and 4 KiB apart.
constexpr size_t kDepth = 352;  // k of a block: two runs; its panel fits the first-level cache
constexpr size_t kRows = 512;   // rows of a block: the second-level cache
constexpr size_t kPanels = 4;   // packed together, so that rows of b are read in longer stretches
constexpr size_t kStretch = 8;  // rows of b that are read side by side; more collide in the first-level cache
constexpr size_t kFewRows = 4;  // up to here b is read where it is
// Sums of many terms lose accuracy, so products are summed in runs, and these sums are summed. torch's sgemm has runs
// of about 190 here.
constexpr size_t kRun = 176;      // products of a tile
constexpr size_t kFewRun = 1024;  // products of few rows, where c takes up kStretch at a time
constexpr size_t kPad = 16;       // so that rows a power of two apart do not share the same cache sets
constexpr size_t kAlign = 4096;

const GemmTable& table() {
#if defined(__x86_64__)
  if (current_isa() == Isa::avx512) return gemm_avx512;
  if (current_isa() == Isa::avx2) return gemm_avx2;
#endif
  return gemm_scalar;
}

struct Free {
  void operator()(float* p) const { std::free(p); }
};

// This thread's working memory; grows and stays.
float* scratch(size_t count) {
  thread_local std::unique_ptr<float, Free> held;
  thread_local size_t size = 0;
  if (count > size) {
    held.reset();
    held.reset(static_cast<float*>(std::aligned_alloc(kAlign, (count * sizeof(float) + kAlign - 1) / kAlign * kAlign)));
    if (!held) throw std::bad_alloc();
    size = count;
  }
  return held.get();
}

Matrix from(const Matrix& m, size_t i, size_t j) {
  Matrix moved = m;
  moved.data = static_cast<const std::byte*>(m.data) + (i * m.row + j * m.col) * dtype_bytes(m.dtype);
  return moved;
}

// Panels of n columns, one behind the other.
void pack(const GemmTable& t, const Matrix& b, size_t k, size_t n, float* to) {
  const size_t whole = b.col == 1 ? n / t.columns : 0;
  if (whole) t.pack(b, k, whole, to);
  if (whole * t.columns == n) return;
  to += whole * t.columns * k;
  const Matrix rest = from(b, 0, whole * t.columns);
  n -= whole * t.columns;
  for (size_t i = 0; i < k; i += kStretch)
    for (size_t j = 0; j < n; j += t.columns)
      t.widen(from(rest, i, j), std::min(kStretch, k - i), std::min(t.columns, n - j), to + j * k + i * t.columns,
              t.columns);
}

// Rows [0, m) in slivers of nearly equal height.
template <class F>
void each_sliver(size_t m, size_t most, F f) {
  const size_t slivers = (m + most - 1) / most;
  for (size_t s = 0; s < slivers; s++) {
    const size_t i = m * s / slivers;
    f(i, m * (s + 1) / slivers - i);
  }
}

void multiply_few(const GemmTable& t, const Product& p) {
  const size_t a_row = p.k + kPad;
  float* const a = scratch(p.m * (a_row + (p.k > kFewRun ? p.n : 0)));
  float* const beside = a + p.m * a_row;  // the sums of a run but the first
  t.widen(p.a, p.m, p.k, a, a_row);
  for (size_t k0 = 0; k0 < p.k; k0 += kStretch) {
    float* const c = k0 < kFewRun ? p.c : beside;
    const size_t c_row = k0 < kFewRun ? p.c_row : p.n;
    each_sliver(p.m, t.rows, [&](size_t i, size_t rows) {
      t.tile({.rows = rows,
              .k = std::min(kStretch, p.k - k0),
              .a = a + i * a_row + k0,
              .a_row = a_row,
              .b = from(p.b, k0, 0).data,
              .b_type = p.b.dtype,
              .b_row = p.b.row,
              .b_panel = t.columns,
              .columns = p.n,
              .c = c + i * c_row,
              .c_row = c_row,
              .bias = k0 == 0 ? p.bias : nullptr,
              .add = k0 % kFewRun > 0,
              .next_a = nullptr,
              .ahead = nullptr,
              .ahead_row = 0,
              .ahead_rows = 0,
              .ahead_bytes = 0});
    });
    if (c == beside && ((k0 + kStretch) % kFewRun == 0 || k0 + kStretch >= p.k))
      for (size_t i = 0; i < p.m; i++)
        for (size_t j = 0; j < p.n; j++) p.c[i * p.c_row + j] += beside[i * p.n + j];
  }
}

// What the tiles of one panel ask for from memory while they work: rows of what is packed next, a part in each tile.
struct Ahead {
  const std::byte* data = nullptr;
  size_t row = 0, bytes = 0;
  size_t first = 0, rows = 0;
};

// A block of rows and k of a product: rows [i0, i0 + m) of a, widened, times rows [k0, k0 + k) of b.
struct GemmBlock {
  size_t i0, m, k0, k;
  const float* a;
  size_t a_row;
};

// The panel after this one; of b itself the panels after those that are packed now, a part for each of them.
Ahead what_is_next(const GemmTable& t, const Product& p, const GemmBlock& block, const float* panel, size_t j) {
  if (p.panels) {
    if (j + t.columns >= p.n) return {};
    const size_t bytes = t.columns * sizeof(float);
    return {reinterpret_cast<const std::byte*>(panel + p.k * t.columns), bytes, bytes, 0, block.k};
  }
  const size_t turn = j / t.columns % kPanels, next = (j / t.columns - turn + kPanels) * t.columns;
  if (p.b.col != 1 || next >= p.n) return {};
  const size_t size = dtype_bytes(p.b.dtype), first = block.k * turn / kPanels;
  return {static_cast<const std::byte*>(from(p.b, block.k0, next).data), p.b.row * size,
          std::min(kPanels * t.columns, p.n - next) * size, first, block.k * (turn + 1) / kPanels - first};
}

// Columns [j, j + one panel) of the block, sliver by sliver and run by run.
void multiply_panel(const GemmTable& t, const Product& p, const GemmBlock& block, const float* panel, size_t j) {
  const Ahead ahead = what_is_next(t, p, block, panel, j);
  const size_t m = block.m, k = block.k;
  each_sliver(m, t.rows, [&](size_t i, size_t rows) {
    for (size_t k1 = 0; k1 < k; k1 += kRun) {
      const size_t run = std::min(kRun, k - k1);
      const size_t begin = ahead.first + ahead.rows * (i * k + k1 * rows) / (m * k);
      const size_t end = ahead.first + ahead.rows * (i * k + (k1 + run) * rows) / (m * k);
      t.tile({.rows = rows,
              .k = run,
              .a = block.a + i * block.a_row + k1,
              .a_row = block.a_row,
              .b = panel + k1 * t.columns,
              .b_type = DType::f32,
              .b_row = t.columns,
              .b_panel = 0,
              .columns = std::min(t.columns, p.n - j),
              .c = p.c + (block.i0 + i) * p.c_row + j,
              .c_row = p.c_row,
              .bias = p.bias ? p.bias + j : nullptr,
              .add = block.k0 + k1 > 0,
              .next_a = block.a + (i + rows < m ? i + rows : 0) * block.a_row + k1,
              .ahead = reinterpret_cast<const char*>(ahead.data + begin * ahead.row),
              .ahead_row = ahead.row,
              .ahead_rows = ahead.data ? end - begin : 0,
              .ahead_bytes = ahead.bytes});
    }
  });
}

void multiply_blocks(const GemmTable& t, const Product& p) {
  const size_t depth = std::min(p.k, kDepth), a_row = depth + kPad, most = std::min(p.m, kRows);
  float* const a = scratch(most * a_row + kPanels * depth * t.columns);
  float* const packed = a + most * a_row;
  for (size_t i0 = 0; i0 < p.m; i0 += most)
    for (size_t k0 = 0; k0 < p.k; k0 += depth) {
      const GemmBlock block{i0, std::min(most, p.m - i0), k0, std::min(depth, p.k - k0), a, a_row};
      t.widen(from(p.a, i0, k0), block.m, block.k, a, a_row);
      for (size_t j = 0; j < p.n; j += t.columns) {
        const size_t turn = j / t.columns % kPanels;
        if (!p.panels && turn == 0) pack(t, from(p.b, k0, j), block.k, std::min(kPanels * t.columns, p.n - j), packed);
        const float* panel = p.panels ? static_cast<const float*>(p.b.data) + j * p.k + k0 * t.columns
                                      : packed + turn * block.k * t.columns;
        multiply_panel(t, p, block, panel, j);
      }
    }
}

}  // namespace

size_t panel_columns() {
  return table().columns;
}

void pack_panels(const Matrix& b, size_t k, size_t n, float* panels) {
  const GemmTable& t = table();
  const size_t whole = n / t.columns * t.columns;
  if (whole < n) std::fill(panels + whole * k, panels + (whole + t.columns) * k, 0.0f);
  pack(t, b, k, n, panels);
}

void multiply(const Product& p) {
  if (p.m == 0 || p.n == 0) return;
  if (p.k == 0) {
    for (size_t i = 0; i < p.m; i++)
      for (size_t j = 0; j < p.n; j++) p.c[i * p.c_row + j] = p.bias ? p.bias[j] : 0;
    return;
  }
  const bool in_place = !p.panels && p.m <= kFewRows && p.b.col == 1;
  in_place ? multiply_few(table(), p) : multiply_blocks(table(), p);
}

}  // namespace unisono
