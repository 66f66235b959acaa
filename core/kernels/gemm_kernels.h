// The table of kernels that each instruction set's compile of gemm_kernels.cc exports to gemm.cc.
//
// Private to those two files; as in reduce_kernels.h, nothing here may be an inline function.
#pragma once

#include "kernels/gemm.h"

namespace unisono {

constexpr size_t kFewRows = 4;  // up to here b is read where it is

// A few rows of c: the product of rows of a (float32, packed: the rows' numbers of one k side by side) and columns of
// b, float32 or, with few rows, of any dtype. Every element is one chain of fused multiply-adds in the order of k, from
// zero or from `start`; then the `lefts` are joined, left + sum, one after the other; then the bias is added. With
// `first` it is two chains, of which the first is the first of the lefts. Columns come in panels of the table's width;
// the last may be narrower.
//
// In a table of pairs, numbers of k go two by two: what is said of one k here holds for a pair of bfloat16, which is as
// long as a float32, `b` is stored as bfloat16, and each chain adds the second product of a pair, then the first.
//
// Meanwhile `ahead_rows` rows of what is packed next, `ahead_bytes` long each, are asked for from memory.
struct Tile {
  size_t rows;  // 1 to the table's most
  size_t k;
  size_t first;  // how many of k the first chain has; 0: there is one chain
  const float* a;
  const void* b;
  DType b_type;
  size_t b_row;    // from one k to the next
  size_t b_odd;    // in pairs: from the first number to the second
  size_t b_panel;  // from one panel to the next
  float* kept;     // where one whole panel of b, of any dtype, is packed on the way; null: nowhere
  size_t columns;
  float* c;
  size_t c_row;
  const float* start;  // null: zero
  size_t start_row;
  const float* const* lefts;
  size_t nlefts, left_row;
  float* before;      // the first of the lefts, where the first chain's sum is put
  const float* bias;  // null: none
  const char* ahead;
  size_t ahead_row, ahead_rows, ahead_bytes;
};

struct GemmTable {
  size_t rows, columns;  // the most rows of a tile, the columns of a panel
  size_t products;       // of one k: 2 in a table of pairs, else 1
  void (*tile)(const Tile&);
  // k rows of whole panels of b as float32, panel after panel; b.col is 1.
  void (*pack)(const Matrix& b, size_t k, size_t panels, float* to);
  // The first rows of a matrix as float32, column after column: `to_column` elements from one to the next, a multiple
  // of a vector or the number of rows. The matrix has `readable` rows. Writes up to a vector beyond the last element.
  void (*pack_columns)(const Matrix& from, size_t rows, size_t columns, size_t readable, float* to, size_t to_column);
};

extern const GemmTable gemm_scalar;
#if defined(__x86_64__)
extern const GemmTable gemm_avx2;
extern const GemmTable gemm_avx512;
extern const GemmTable gemm_avx512_bf16;  // pairs
#endif

}  // namespace unisono
