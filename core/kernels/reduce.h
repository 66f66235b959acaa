// Element-wise reduction of several inputs into several outputs: the rule by which numbers are combined.
//
// Rule (the same for every algorithm, size, tail and CPU): out[i] is src[0][i] op src[1][i] op ... by the binary tree
// over the numbers of `src`: neighbours are combined, ((0 op 1) op (2 op 3)) op ..., then their results, and so on;
// what has no right neighbour passes on as it is. float16 and bfloat16 accumulate in float32 and are rounded once, to
// nearest even; AVG divides the accumulator by `nsrc` before that rounding; PREMUL_SUM multiplies each input by its
// factor in the accumulator's type first. Integers wrap, integer AVG truncates toward zero, NaN propagates in MIN and
// MAX, bool SUM/MAX/BOR is logical or, bool PRODUCT/MIN/BAND is logical and, and results are 0 or 1.
//
// The tree composes. The sources [j * 2^p, (j + 1) * 2^p) are a subtree, and so are fewer of them if they are the last
// ones. So whoever has such aligned blocks (a host its ranks, a rank its part of a product) may combine each for itself
// and then the blocks by the same tree: blocks of 2^p sources that begin at multiples of 2^p give the same bits as all
// sources at once, as long as the partial results are kept in the accumulator's type (float32 for 16-bit types), AVG
// divides by the number of all sources at the end, PREMUL_SUM multiplies only at the leaves, and the rounding is the
// last step. Blocks that are not so aligned (3 ranks on one host, 3 on the other) are not subtrees.
#pragma once

#include "base/cpu.h"
#include "base/types.h"

namespace unisono {

struct Reduction {
  DType dtype;
  RedOp op;
  size_t count;            // elements
  const void* const* src;  // nsrc pointers, any alignment that suits one element or worse
  size_t nsrc;             // >= 1
  void* const* dst;        // ndst pointers; each may be equal to one of src, never overlap it otherwise
  size_t ndst;             // >= 1
  const double* factors;   // nsrc numbers, read for premul_sum only
  bool stream;             // outputs will not be read soon: use non-temporal stores, fenced before return
};

// What this pair means nothing for: bitwise ops on floats, MIN/MAX of complex, AVG of bool, PREMUL_SUM of
// integers or bool, anything on what is only moved.
bool reduction_exists(DType dtype, RedOp op);

void reduce(const Reduction& r);

// Copies of non-overlapping memory. `copy_stream` bypasses the caches on the way out and fences before return.
// `copy_over` is for lines that another core may have: they are taken from it without being read first.
void copy_bytes(void* dst, const void* src, size_t bytes);
void copy_over(void* dst, const void* src, size_t bytes);
void copy_stream(void* dst, const void* src, size_t bytes);
// The same to several outputs at once: the source is loaded from memory once. Outputs equal to the source are left out.
void copy_stream_to_all(void* const* dst, size_t ndst, const void* src, size_t bytes);

}  // namespace unisono
