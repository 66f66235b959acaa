// See memory.h.
#include "python/memory.h"

#include "memory/heap.h"
#include "memory/sharing.h"
#include "python/errors.h"

namespace nb = nanobind;

namespace unisono {
namespace {

std::shared_ptr<Heap> heap_or_raise() {
  Failure failure;
  auto heap = process_heap(failure);
  if (!heap) raise(failure, "", -1);
  return heap;
}

nb::dict heap_usage() {
  const Heap::Usage u = heap_or_raise()->usage();
  nb::dict d;
  d["in_use"] = u.in_use;
  d["reserved"] = u.reserved;
  d["quarantined"] = u.quarantined;
  d["resident"] = u.resident;
  d["capacity"] = u.capacity;
  return d;
}

size_t trim() {
  auto heap = heap_or_raise();
  nb::gil_scoped_release release;
  return heap->trim_now();
}

void replace_torch_allocator(const char* library) {
  Failure failure;
  if (!replace_allocator(library, failure)) raise(failure, "", -1);
}

}  // namespace

void add_memory(nb::module_& m) {
  m.def("heap_usage", &heap_usage);
  m.def("trim", &trim);
  m.def("replace_allocator", &replace_torch_allocator);
  m.def("share_from", &share_from);
  m.def("share_refusals", &share_refusals);
}

}  // namespace unisono
