// Makes the handles of asynchronous calls: objects of Python's class unisono.base.handle.Handle, whose slots are filled
// here, since to call the class takes several times as long. The GIL is held in every function.
#pragma once

#include <nanobind/nanobind.h>

#include "base/types.h"

namespace nb = nanobind;

namespace unisono {

void learn_handles(nb::handle handle_type, nb::handle finished_type);
nb::object make_handle(nb::handle pending, Verb verb, nb::handle outputs);
// Of a call that was over before its handle was made; `source`: of a receive, else -1.
nb::object finished_handle(Verb verb, int source, nb::handle outputs);

}  // namespace unisono
