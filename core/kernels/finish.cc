// Chooses the kernels of finish.h for this CPU.
#include "kernels/finish.h"

#include "kernels/reduce.h"

namespace unisono {
namespace {

const FinishTable& table() {
#if defined(__x86_64__)
  if (current_isa() == Isa::avx512) return finish_avx512;
  if (current_isa() == Isa::avx2) return finish_avx2;
#endif
  return finish_scalar;
}

}  // namespace

bool finishing_exists(DType in, DType out, RedOp op) {
  if (out >= DType::count_ || op >= RedOp::count_) return false;
  const DType wide = out == DType::f64 ? DType::f64 : DType::f32;
  return in == wide && finish_scalar.kernel[static_cast<size_t>(out)][static_cast<size_t>(op)] != nullptr;
}

void reduce_and_finish(const Finishing& f) {
  if (f.count) table().kernel[static_cast<size_t>(f.out)][static_cast<size_t>(f.op)](f);
}

}  // namespace unisono
