// Matrix products with float32 sums of float16, bfloat16 and float32 matrices: what torch lacks on CPUs without 16-bit
// matrix instructions.
//
// torch's own 16-bit product is 50 to 100 times slower than its float32 one there, and gives 16-bit results. Here
// 16-bit numbers become float32 while a matrix is packed into cache, so they cost no pass of their own. One thread; for
// tall float32 matrices torch's product is used instead (see fused/gemm.py). The order of an ordinary product's sums
// depends on its shape, as in every BLAS. With `slice` it is that of runs.h: the same bits for an element whatever the
// other rows and columns, the instruction set and the dtype its numbers are stored in.
// Where the processor multiplies bfloat16 in pairs, an ordinary product of two such matrices takes half as long; there
// numbers below 2^-126 count as zero, as those instructions have it.
#pragma once

#include "base/types.h"

namespace unisono {

struct Matrix {
  const void* data;
  DType dtype;      // f16, bf16 or f32
  size_t row, col;  // strides in elements; quick where one of them is 1
  size_t odd = 0;   // in pairs (gemm.cc): from the first number of a pair to the second
};

struct Product {
  size_t m, k, n;
  Matrix a, b;
  bool panels;        // b is what pack_panels made of it
  float* c;           // m rows of n
  size_t c_row;       // elements from one row to the next
  const float* bias;  // n numbers that are added to every row, or null
  size_t slice = 0;   // the tree order (runs.h), in slices that divide k; 0: any order
};

void multiply(const Product& product);  // throws std::bad_alloc; c must not overlap a or b

// The right-hand side as multiply reads it: panels of `panel_columns()` columns, each k rows long, the last filled up
// with zeros. `panels` has room for all of them.
size_t panel_columns();
void pack_panels(const Matrix& b, size_t k, size_t n, float* panels);

}  // namespace unisono
