// The reducing pass of the fused matmuls: sums of products from all ranks become results.
//
// Rule: combine by the tree of reduce.h over `src`, in the inputs' type (float32; float64 for float64), AVG divides,
// then multiply by `scale`, then add the residual, then round once, to nearest even, into every output. The same bits
// in every loop and on every CPU, as in reduce.h.
#pragma once

#include "base/types.h"

namespace unisono {

struct FusedReduction {
  DType out;               // f16, bf16 or f32 from float32 inputs, f64 from float64
  RedOp op;                // sum, avg, min or max
  size_t count;            // elements
  const void* const* src;  // nsrc pointers
  size_t nsrc;
  void* const* dst;  // ndst pointers; none overlaps a source
  size_t ndst;
  double scale;
  const void* residual;  // `count` numbers of type `out`, or null
};

bool epilogue_exists(DType in, DType out, RedOp op);
void reduce_with_epilogue(const FusedReduction& f);

// Private to epilogue.cc and epilogue_kernels.cc: one table per instruction set, null where there is none.
struct EpilogueTable {
  void (*kernel[static_cast<size_t>(DType::count_)][static_cast<size_t>(RedOp::count_)])(const FusedReduction&);
};
extern const EpilogueTable epilogue_scalar;
#if defined(__x86_64__)
extern const EpilogueTable epilogue_avx2;
extern const EpilogueTable epilogue_avx512;
#endif

}  // namespace unisono
