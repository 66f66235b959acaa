// Chooses the kernels of epilogue.h for this CPU.
#include "kernels/epilogue.h"

#include "kernels/reduce.h"

namespace unisono {
namespace {

const EpilogueTable& table() {
#if defined(__x86_64__)
  if (current_isa() >= Isa::avx512) return epilogue_avx512;
  if (current_isa() == Isa::avx2) return epilogue_avx2;
#endif
  return epilogue_scalar;
}

}  // namespace

bool epilogue_exists(DType in, DType out, RedOp op) {
  if (out >= DType::count_ || op >= RedOp::count_) return false;
  const DType wide = out == DType::f64 ? DType::f64 : DType::f32;
  return in == wide && epilogue_scalar.kernel[static_cast<size_t>(out)][static_cast<size_t>(op)] != nullptr;
}

void reduce_with_epilogue(const FusedReduction& f) {
  if (f.count) table().kernel[static_cast<size_t>(f.out)][static_cast<size_t>(f.op)](f);
}

}  // namespace unisono
