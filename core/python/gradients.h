// A word to whoever loses gradients: autograd does not see collectives, as with torch's own backends, which say so too.
#pragma once

#include <nanobind/nanobind.h>

#include "base/types.h"

namespace unisono {

void learn_gradients(nanobind::handle tensor_type);

// Warns, once in a process, if a tensor that a verb reads, or one of a list, has a gradient to lose. `in_place`: the
// verb writes it too; then a leaf loses nothing, such as a parameter that is broadcast before training. With the GIL
// held; raises if the program made errors of warnings.
void warn_if_gradient_is_cut(nanobind::handle tensor_or_list, bool in_place, Verb verb);

}  // namespace unisono
