// The table of kernels that each instruction set's compile of reduce_kernels.cc exports to reduce.cc.
//
// Private to those two files. Nothing here may be an inline function: a shared inline function compiled with
// AVX flags could be the copy the linker keeps for the baseline code.
#pragma once

#include "base/types.h"

namespace unisono {

// A range of bytes of one reduction. `dst` may equal a source exactly; see reduce.h.
struct KernelTask {
  const void* const* src;
  size_t nsrc;
  void* const* dst;
  size_t ndst;
  size_t src_offset;  // bytes added to every source pointer
  size_t bytes;
  const double* factors;
  bool past;  // two sources, one or two outputs: store past the caches; outputs are aligned to 64 bytes
};

using Kernel = void (*)(const KernelTask&);

struct KernelTable {
  // Null where no kernel of its own is needed: reduce.cc routes equal arithmetic to one kernel (signed sums
  // to unsigned, complex sums to their parts, bitwise operations to bytes).
  Kernel kernel[static_cast<size_t>(DType::count_)][static_cast<size_t>(RedOp::count_)];
  void (*copy_cached)(void* dst, const void* src, size_t bytes);
  // Non-temporal stores, not fenced.
  void (*stream_out)(void* dst, const void* src, size_t bytes);
  void (*stream_out_twice)(void* one, void* other, const void* src, size_t bytes);  // both aligned alike to 64 bytes
};

extern const KernelTable kernels_scalar;
#if defined(__x86_64__)
extern const KernelTable kernels_avx2;
extern const KernelTable kernels_avx512;
#endif

}  // namespace unisono
