// Chooses the kernels for this CPU and routes reductions and copies to them.
//
// Invariant: which instruction set runs, how a range is cut into tiles and whether stores bypass the caches
// never changes a result; reduce_kernels.cc keeps an element's arithmetic the same in all of them.
#include "kernels/reduce.h"

#include <algorithm>
#include <cstdint>

#include "kernels/reduce_kernels.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace unisono {
namespace {

const KernelTable& table_of(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::avx2:
      return kernels_avx2;
    case Isa::avx512:
    case Isa::avx512_bf16:
      return kernels_avx512;
#endif
    default:
      return kernels_scalar;
  }
}

bool is_complex(DType t) {
  return t == DType::c64 || t == DType::c128;
}
bool is_float(DType t) {
  return t == DType::f64 || t == DType::f32 || t == DType::f16 || t == DType::bf16;
}

// The kernel that does the arithmetic of `dtype` and `op`. Pairs of equal arithmetic share one: bits do not
// care for sign in wrapping sums and products, nor for width in bitwise operations, and complex numbers are
// their parts in all but the product.
Kernel find_kernel(const KernelTable& table, DType dtype, RedOp op) {
  const bool bitwise = op == RedOp::band || op == RedOp::bor || op == RedOp::bxor;
  const bool wrapping = op == RedOp::sum || op == RedOp::product;
  switch (dtype) {
    case DType::boolean:
      if (op == RedOp::sum || op == RedOp::max) op = RedOp::bor;
      if (op == RedOp::product || op == RedOp::min) op = RedOp::band;
      break;
    case DType::c64:
      if (op != RedOp::product) dtype = DType::f32;
      break;
    case DType::c128:
      if (op != RedOp::product) dtype = DType::f64;
      break;
    case DType::i8:
      if (wrapping) dtype = DType::u8;
      break;
    case DType::i16:
      if (wrapping) dtype = DType::u16;
      break;
    case DType::i32:
      if (wrapping) dtype = DType::u32;
      break;
    case DType::i64:
      if (wrapping) dtype = DType::u64;
      break;
    default:
      break;
  }
  if (bitwise && dtype != DType::boolean) dtype = DType::u8;
  return table.kernel[static_cast<size_t>(dtype)][static_cast<size_t>(op)];
}

void fence_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Straight past the caches if the outputs are aligned alike. Otherwise tiles are reduced into L1 and stored from there.
void reduce_streaming(const KernelTable& table, Kernel kernel, KernelTask task, const Reduction& r) {
  constexpr size_t tile_bytes = 4096;
  constexpr size_t line = 64;
  const size_t before = std::min<size_t>(-reinterpret_cast<uintptr_t>(r.dst[0]) % line, task.bytes);
  const bool alike = r.ndst == 1 || (r.ndst == 2 && reinterpret_cast<uintptr_t>(r.dst[1]) % line ==
                                                        reinterpret_cast<uintptr_t>(r.dst[0]) % line);
  if (r.nsrc == 2 && alike && before % dtype_bytes(r.dtype) == 0) {
    const size_t rest = task.bytes - before;
    task.bytes = before;
    if (before) kernel(task);
    void* dst[2];
    for (size_t d = 0; d < r.ndst; ++d) dst[d] = static_cast<char*>(r.dst[d]) + before;
    task.dst = dst;
    task.src_offset = before;
    task.bytes = rest;
    task.past = true;
    kernel(task);
    return fence_streams();
  }
  alignas(line) char tile[tile_bytes];
  void* const into_tile[] = {tile};
  task.dst = into_tile;
  task.ndst = 1;
  const size_t total = task.bytes;
  // A short first tile, so that the others begin and end on cache lines of the first output (and of the
  // others where these are aligned alike): a line that is written in two parts is slow.
  const size_t head = -reinterpret_cast<uintptr_t>(r.dst[0]) % line;
  size_t next_bytes = head && head % dtype_bytes(r.dtype) == 0 ? head : tile_bytes;
  for (size_t at = 0; at < total; at += task.bytes, next_bytes = tile_bytes) {
    task.src_offset = at;
    task.bytes = std::min(next_bytes, total - at);
    kernel(task);
    for (size_t d = 0; d < r.ndst; ++d) {
      table.stream_out(static_cast<char*>(r.dst[d]) + at, tile, task.bytes);
    }
  }
  fence_streams();
}

}  // namespace

bool reduction_exists(DType dtype, RedOp op) {
  if (!is_reducible(dtype) || op >= RedOp::none) return false;
  switch (op) {
    case RedOp::min:
    case RedOp::max:
      return !is_complex(dtype);
    case RedOp::avg:
      return dtype != DType::boolean;
    case RedOp::band:
    case RedOp::bor:
    case RedOp::bxor:
      return !is_float(dtype) && !is_complex(dtype);
    case RedOp::premul_sum:
      return is_float(dtype) || is_complex(dtype);
    default:
      return true;
  }
}

void reduce(const Reduction& r) {
  const size_t bytes = r.count * dtype_bytes(r.dtype);
  if (bytes == 0) return;
  // One source is the result, whatever the operation, unless it must be multiplied or made 0 or 1.
  if (r.nsrc == 1 && r.op != RedOp::premul_sum && r.dtype != DType::boolean) {
    for (size_t d = 0; d < r.ndst; ++d) {
      if (r.dst[d] == r.src[0]) continue;
      r.stream ? copy_stream(r.dst[d], r.src[0], bytes) : copy_bytes(r.dst[d], r.src[0], bytes);
    }
    return;
  }
  const KernelTable& table = table_of(current_isa());
  const Kernel kernel = find_kernel(table, r.dtype, r.op);
  KernelTask task{.src = r.src,
                  .nsrc = r.nsrc,
                  .dst = r.dst,
                  .ndst = r.ndst,
                  .src_offset = 0,
                  .bytes = bytes,
                  .factors = r.op == RedOp::premul_sum ? r.factors : nullptr,
                  .past = false};
  if (r.stream) {
    reduce_streaming(table, kernel, task, r);
  } else {
    kernel(task);
  }
}

void copy_bytes(void* dst, const void* src, size_t bytes) {
  if (bytes == 0) return;  // the pointers may be null then
  table_of(current_isa()).copy_cached(dst, src, bytes);
}

// A store to a line that another core has waits until that core has given it up; the string instruction writes whole
// lines and waits for nothing. Measured on Zen 5, two cores of one last-level cache: 43 GB/s instead of 7.
void copy_over(void* dst, const void* src, size_t bytes) {
  constexpr size_t least = 1024;  // it takes a while to begin
#if defined(__x86_64__)
  // Where the output's page offset is slightly above the input's, Zen 4 copies at a fourteenth of the speed.
  const size_t ahead = (reinterpret_cast<uintptr_t>(dst) - reinterpret_cast<uintptr_t>(src)) % 4096;
  if (bytes >= least && (ahead == 0 || ahead >= 64) && has_fast_strings()) {
    asm volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(bytes) : : "memory");
    return;
  }
#endif
  copy_bytes(dst, src, bytes);
}

void copy_stream(void* dst, const void* src, size_t bytes) {
  if (bytes == 0) return;
  table_of(current_isa()).stream_out(dst, src, bytes);
  fence_streams();
}

void copy_stream_to_all(void* const* dst, size_t ndst, const void* src, size_t bytes) {
  constexpr size_t tile = 4096;  // stays in the first-level cache for the second output
  const KernelTable& table = table_of(current_isa());
  const auto alignment = [&](size_t d) { return reinterpret_cast<uintptr_t>(dst[d]) % 64; };
  if (ndst == 2 && dst[0] != src && dst[1] != src && alignment(0) == alignment(1)) {
    table.stream_out_twice(dst[0], dst[1], src, bytes);
    return fence_streams();
  }
  for (size_t at = 0; at < bytes; at += tile)
    for (size_t d = 0; d < ndst; d++)
      if (dst[d] != src)
        table.stream_out(static_cast<char*>(dst[d]) + at, static_cast<const char*>(src) + at,
                         std::min(tile, bytes - at));
  fence_streams();
}

}  // namespace unisono
