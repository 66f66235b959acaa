// See gemm.h: how a product is cut so that what is used again is in the nearest cache.
//
// Many rows: for every block of k, rows of a are packed as float32 in the second-level cache, once; then panel by panel
// of b is used by all those rows, and packed into the first-level cache as float32 by the first of them on the way. Few
// rows do not pay for packing: they read b where it is, a few rows of b at a time, so that memory is read in order.
// Panels that were packed before are used as they are. A sliver is as many rows as one tile has accumulators for. While
// a panel is used, the next one is asked for from memory: without that a third of the time went into waiting for it (64
// rows, weights of 2 MiB). Sums over a part of k wait for the rest beside c, in the tree order (runs.h) a level of the
// tree each: rows of c may be a power of two apart and collide in the caches. Two runs that are joined first are one
// tile: the end of a tile costs as much as a dozen steps of k. Rows and columns are worked off in chunks, so that the
// sums that wait stay in the second-level cache.
#include "kernels/gemm.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <memory>
#include <new>

#include "kernels/gemm_kernels.h"
#include "kernels/reduce.h"
#include "kernels/runs.h"

namespace unisono {
namespace {

// Measured on Zen 4 (AVX2; 32 KiB, 1 MiB and 32 MiB of cache) and on a Xeon of 2023 (AVX-512; 48 KiB, 2 MiB), with rows
// of b 2 and 4 KiB apart.
constexpr size_t kPanel = 5632;    // elements of a block's panel: half of the first-level cache, 16 columns of two runs
constexpr size_t kRows = 256;      // rows of a block: the second-level cache
constexpr size_t kTreeRows = 128;  // in the tree order, where several levels of sums wait
constexpr size_t kStretch =
    16;  // bytes of a column: so many rows of b are read side by side; more collide in the cache
// Sums of many terms lose accuracy, so products are summed in runs, and these sums are summed. torch's sgemm has runs
// of about 190 here.
constexpr size_t kRun = 176;     // products of a tile
constexpr size_t kFewRun = 128;  // stretches of products of few rows, each of which c takes up at once
constexpr size_t kPad = 16;      // so that rows a power of two apart do not share the same cache sets; a line
constexpr size_t kAlign = 4096;
constexpr size_t kWaiting = 1 << 17;      // sums of a chunk that wait: with fewer rows it has more columns
constexpr size_t kTreeWaiting = 1 << 16;  // in the tree order, at each level
constexpr size_t kTreeDepth = 256;        // of two blocks: they are joined where they are made
static_assert(kTreeDepth >= kLongestBlock && kTreeDepth >= 2 * kBlock);
constexpr size_t kKept = 1 << 17;   // numbers of a up to which all that are packed are kept for the next columns
constexpr size_t kFewChunk = 4096;  // the same of few rows: b is read in stretches of 8 to 16 KiB

const GemmTable& table() {
#if defined(__x86_64__)
  if (current_isa() >= Isa::avx512) return gemm_avx512;
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

// From one row to the next of rows so long: lines that begin where the first does. Also room for so many numbers and a
// vector's slack.
size_t padded(size_t length) {
  return (length + kPad - 1) / kPad * kPad + kPad;
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
  const Matrix turned{rest.data, rest.dtype, rest.col, rest.row, rest.odd};
  for (size_t j = 0; j < n; j += t.columns)
    t.pack_columns(from(turned, j, 0), std::min(t.columns, n - j), k, n - j, to + j * k, t.columns);
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

size_t stretch_of(const Matrix& b) {
  return kStretch / dtype_bytes(b.dtype);
}

// A tile of few rows, which asks for the rows of the next stretch only.
Tile few_tile(const Product& p, const float* a, size_t k0, size_t k, size_t j, size_t n, size_t panel) {
  return {.rows = p.m,
          .k = k,
          .first = 0,
          .a = a + k0 * p.m,
          .b = from(p.b, k0, j).data,
          .b_type = p.b.dtype,
          .b_row = p.b.row,
          .b_odd = 0,
          .b_panel = panel,
          .kept = nullptr,
          .columns = n,
          .c = nullptr,
          .c_row = 0,
          .start = nullptr,
          .start_row = 0,
          .lefts = nullptr,
          .nlefts = 0,
          .left_row = 0,
          .before = nullptr,
          .bias = nullptr,
          .ahead = nullptr,
          .ahead_row = stretch_of(p.b) * p.b.row * dtype_bytes(p.b.dtype),
          .ahead_rows = 0,
          .ahead_bytes = 0};
}

void multiply_few(const GemmTable& t, const Product& p) {
  const size_t size = padded(p.m * p.k), stretch = stretch_of(p.b), run = kFewRun * stretch;
  float* const a = scratch(size + (p.k > run ? p.m * p.n : 0));
  float* const beside = a + size;  // the sums of a run but the first
  t.pack_columns(p.a, p.m, p.k, p.m, a, p.m);
  for (size_t k0 = 0; k0 < p.k; k0 += stretch) {
    Tile tile = few_tile(p, a, k0, std::min(stretch, p.k - k0), 0, p.n, t.columns);
    tile.c = k0 < run ? p.c : beside;
    tile.c_row = tile.left_row = k0 < run ? p.c_row : p.n;
    const float* const so_far = tile.c;
    tile.lefts = &so_far;
    tile.nlefts = k0 % run > 0;
    tile.bias = k0 == 0 ? p.bias : nullptr;
    t.tile(tile);
    if (tile.c == beside && ((k0 + stretch) % run == 0 || k0 + stretch >= p.k))
      for (size_t i = 0; i < p.m; i++)
        for (size_t j = 0; j < p.n; j++) p.c[i * p.c_row + j] += beside[i * p.n + j];
  }
}

// The sums of a chunk that wait for their right neighbours: for each level as many rows and columns as the chunk has,
// but for the levels below `near` those of one tile.
struct Waiting {
  float* data;
  size_t row, level;        // elements from one to the next
  size_t near, near_level;  // the same of those levels, which lie first
  const float* lefts[64];

  float* at(size_t l, size_t i, size_t j) const {
    return l < near ? data + l * near_level : data + near * near_level + (l - near) * level + i * row + j;
  }
  // Where the sum of a run goes, for the element at row i and column j of the chunk; sets the lefts that are joined.
  void join(Tile& tile, const Run& run, size_t i, size_t j, float* result, size_t result_row) {
    size_t n = 0;
    for (size_t bits = run.joins; bits; bits &= bits - 1)
      lefts[n++] = at(static_cast<size_t>(std::countr_zero(bits)), i, j);
    tile.lefts = lefts, tile.nlefts = n, tile.left_row = row;
    const bool last = run.waits < 0;
    tile.c = last ? result : at(static_cast<size_t>(run.waits), i, j);
    tile.c_row = last ? result_row : row;
  }
};

// As multiply_few, in the tree order: the chain of a run goes on from stretch to stretch.
void multiply_few_by_tree(const GemmTable& t, const Product& p) {
  const Runs runs = tree_runs(p.k, p.slice, kLongestBlock);
  const size_t size = padded(p.m * p.k), chunk = std::min(p.n, kFewChunk);
  float* const a = scratch(size + p.m * chunk * (runs.levels + 1));
  float* const chain = a + size;
  Waiting waiting{chain + p.m * chunk, chunk, p.m * chunk, 0, 0, {}};
  t.pack_columns(p.a, p.m, p.k, p.m, a, p.m);
  const size_t stretch = stretch_of(p.b);
  for (size_t j = 0; j < p.n; j += chunk) {
    for (const Run& run : runs.list)
      for (size_t k1 = 0; k1 < run.k; k1 += stretch) {
        const size_t k = std::min(stretch, run.k - k1);
        Tile tile = few_tile(p, a, run.k0 + k1, k, j, std::min(chunk, p.n - j), t.columns);
        tile.start = k1 ? chain : nullptr;
        tile.start_row = tile.c_row = chunk;
        tile.c = chain;
        if (k1 + k == run.k) waiting.join(tile, run, 0, 0, p.c + j, p.c_row);
        if (k1 + k == run.k && run.waits < 0 && p.bias) tile.bias = p.bias + j;
        t.tile(tile);
      }
  }
}

// What the tiles of one panel ask for from memory while they work: rows of what is packed next, a part in each tile.
struct Ahead {
  const std::byte* data = nullptr;
  size_t row = 0, bytes = 0, rows = 0;
};

// A block of rows and k of a product: rows [i0, i0 + m) of a, packed sliver by sliver, times rows [k0, k0 + k) of b, in
// columns [j0, j0 + n), by the runs from `first` to `last`.
struct GemmBlock {
  size_t i0, m, j0, n, k0, k;
  const Run* first;
  const Run* last;
  const float* a;
};

// The panel that is used next: in this block, in the next one of k, or in the next columns.
Ahead what_is_next(const GemmTable& t, const Product& p, const GemmBlock& block, size_t j) {
  size_t k0 = block.k0;
  j += t.columns;
  if (j >= block.j0 + block.n) {
    k0 += block.k;
    if (k0 < p.k) j = block.j0;
  }
  if (k0 >= p.k) k0 = 0;
  if (j >= p.n || (!p.panels && p.b.col != 1)) return {};
  const Matrix panel = p.panels ? Matrix{p.b.data, DType::f32, t.columns, 1} : p.b;
  const size_t size = dtype_bytes(panel.dtype);
  const Matrix next = p.panels ? from(panel, j / t.columns * p.k + k0, 0) : from(panel, k0, j);
  return {static_cast<const std::byte*>(next.data), next.row / t.products * size, std::min(t.columns, p.n - j) * size,
          std::min(block.k, p.k - k0) * t.products};
}

// Columns [j, j + one panel) of the block, sliver by sliver and run by run. `to_pack`: the panel, where the first
// sliver packs it on the way; null: it is packed.
void multiply_panel(const GemmTable& t, const Product& p, const GemmBlock& block, Waiting& waiting, const float* panel,
                    float* to_pack, size_t j) {
  const Ahead ahead = what_is_next(t, p, block, j);
  const size_t m = block.m, k = block.k;
  each_sliver(m, t.rows, [&](size_t i, size_t rows) {
    float* const c = p.c + (block.i0 + i) * p.c_row + j;
    for (const Run* run = block.first; run != block.last; run++) {
      const size_t k0 = run->k0, k1 = k0 - block.k0;
      const bool pair = run->waits == 0 && !run->joins && run + 1 != block.last;  // the next run joins this one first
      const size_t first = pair ? (run++)->k : 0, deep = first + run->k;
      const size_t begin = ahead.rows * (i * k + k1 * rows) / (m * k);
      const size_t end = ahead.rows * (i * k + (k1 + deep) * rows) / (m * k);
      const bool takes_bias = p.bias && run->waits < 0;
      Tile tile{.rows = rows,
                .k = deep,
                .first = first,
                .a = block.a + i * k + k1 * rows,
                .b = panel + k1 * t.columns,
                .b_type = DType::f32,
                .b_row = t.columns,
                .b_odd = 0,
                .b_panel = 0,
                .kept = nullptr,
                .columns = std::min(t.columns, p.n - j),
                .c = nullptr,
                .c_row = 0,
                .start = nullptr,
                .start_row = 0,
                .lefts = nullptr,
                .nlefts = 0,
                .left_row = 0,
                .before = pair ? waiting.at(0, i, j - block.j0) : nullptr,
                .bias = takes_bias ? p.bias + j : nullptr,
                .ahead = reinterpret_cast<const char*>(ahead.data + begin * ahead.row),
                .ahead_row = ahead.row,
                .ahead_rows = ahead.data ? end - begin : 0,
                .ahead_bytes = ahead.bytes};
      waiting.join(tile, *run, i, j - block.j0, c, p.c_row);
      if (to_pack && i == 0) {
        tile.kept = to_pack + k1 * t.columns;
        tile.b = from(p.b, k0, j).data;
        tile.b_type = p.b.dtype, tile.b_row = p.b.row, tile.b_odd = p.b.odd;
      }
      t.tile(tile);
    }
  });
}

void multiply_block(const GemmTable& t, const Product& p, const GemmBlock& block, Waiting& waiting, float* packed) {
  const size_t end = block.j0 + block.n;
  for (size_t j = block.j0; j < end; j += t.columns) {
    const bool on_the_way = !p.panels && p.b.col == 1 && j + t.columns <= end;
    if (!p.panels && !on_the_way) pack(t, from(p.b, block.k0, j), block.k, std::min(t.columns, end - j), packed);
    const float* panel = p.panels ? static_cast<const float*>(p.b.data) + j * p.k + block.k0 * t.columns : packed;
    multiply_panel(t, p, block, waiting, panel, on_the_way ? packed : nullptr, j);
  }
}

// Runs that are each added to the sum of those before. Where a unit has two, these two are added first, as in the tree
// order: that is one tile instead of two.
Runs plain_runs(size_t k, size_t depth, size_t run_length) {
  const bool pairs = depth >= 2 * run_length;
  const int so_far = pairs ? 1 : 0;  // the level of the sum of those before
  Runs runs;
  if (k > run_length) runs = {{}, pairs ? size_t{2} : 1, pairs ? size_t{1} : 0};
  for (size_t k0 = 0, i = 0; k0 < k; k0 += run_length, i++) {
    const bool last = k0 + run_length >= k, first_of_two = pairs && i % 2 == 0 && !last;
    Run run{k0, std::min(run_length, k - k0), k0 % depth == 0, 0, last ? -1 : first_of_two ? 0 : so_far};
    if (pairs && i % 2) run.joins = 1;
    if (!first_of_two && i > (pairs ? 1 : 0)) run.joins |= size_t{1} << so_far;
    runs.list.push_back(run);
  }
  return runs;
}

void multiply_blocks(const GemmTable& t, const Product& p) {
  const size_t deep = kPanel / t.columns;  // a multiple of kRun
  const size_t depth = p.slice ? kTreeDepth : deep;
  const Runs runs = p.slice ? tree_runs(p.k, p.slice, depth) : plain_runs(p.k, depth, kRun / t.products);
  const size_t most = std::min(p.m, p.slice ? kTreeRows : kRows);
  const size_t panels = (p.slice ? kTreeWaiting : kWaiting) / most / t.columns;
  const size_t chunk = std::min(p.n, panels * t.columns);
  const bool keeps = p.n > chunk && most * p.k <= kKept;
  const size_t a_size = padded(most * (keeps ? p.k : std::min(p.k, depth)));
  const size_t row = padded(chunk), level = most * row, near_level = t.rows * row;
  float* const a = scratch(a_size + depth * t.columns + runs.near * near_level + (runs.levels - runs.near) * level);
  float* const packed = a + a_size;
  Waiting waiting{packed + depth * t.columns, row, level, runs.near, near_level, {}};
  const Run* const end = runs.list.data() + runs.list.size();
  for (size_t i0 = 0; i0 < p.m; i0 += most)
    for (size_t j0 = 0; j0 < p.n; j0 += chunk)
      for (const Run *first = runs.list.data(), *last = first; first != end; first = last) {
        size_t k = 0;
        do k += (last++)->k;
        while (last != end && !last->begins);
        const size_t m = std::min(most, p.m - i0), k0 = first->k0;
        float* const rows = keeps ? a + k0 * m : a;
        const GemmBlock block{i0, m, j0, std::min(chunk, p.n - j0), k0, k, first, last, rows};
        if (j0 == 0 || !keeps)
          each_sliver(m, t.rows, [&](size_t i, size_t high) {
            t.pack_columns(from(p.a, i0 + i, k0), high, k, m - i, rows + i * k, high);
          });
        multiply_block(t, p, block, waiting, packed);
      }
}

#if defined(__x86_64__)

// Of two bfloat16 matrices, where the processor multiplies those in pairs: the same product with pairs for numbers.
bool has_pairs(const Product& p) {
  return current_isa() == Isa::avx512_bf16 && p.a.dtype == DType::bf16 && p.b.dtype == DType::bf16 && p.k % 2 == 0 &&
         !p.slice;
}

Product in_pairs(Product p) {
  p.k /= 2;
  p.a.odd = p.a.col, p.a.col *= 2;
  p.b.odd = p.b.row, p.b.row *= 2;
  return p;
}

#endif

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
#if defined(__x86_64__)
  if (!in_place && has_pairs(p)) return multiply_blocks(gemm_avx512_bf16, in_pairs(p));
#endif
  if (!in_place) return multiply_blocks(table(), p);
  p.slice ? multiply_few_by_tree(table(), p) : multiply_few(table(), p);
}

}  // namespace unisono
