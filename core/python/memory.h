// What Python asks of the process's memory: how much the heap holds, trimming it, and the switch of sharing.h.
#pragma once

#include <nanobind/nanobind.h>

namespace unisono {

void add_memory(nanobind::module_& m);

}  // namespace unisono
