// The one place where what a user wrote as a reduce operation becomes the core's RedOp and a factor.
#pragma once

#include <nanobind/nanobind.h>

#include "base/types.h"

namespace unisono {

struct OpAndFactor {
  RedOp op = RedOp::sum;
  double factor = 1;  // of a premul_sum; 1 for all others
};

// `reduce_op` is torch.distributed.ReduceOp; its RedOpType is found there. Once, before the first call.
void learn_reduce_ops(nanobind::handle reduce_op);

// `op` is a name ("sum"), a torch ReduceOp or a RedOpType. Raises ValueError for anything else, and for a factor that
// is missing or does not belong to the operation. The GIL is held.
OpAndFactor read_op(nanobind::handle op, nanobind::handle factor);

}  // namespace unisono
