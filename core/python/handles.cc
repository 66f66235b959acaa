// See handles.h.
#include "python/handles.h"

#include "group/control.h"

namespace unisono {
namespace {

// A slot of the class: the descriptor that Python made for it, and what this descriptor sets it with.
struct Slot {
  PyObject* descriptor;
  descrsetfunc set;
};

// Kept for good, as all that is learnt of Python.
PyTypeObject* type;
PyObject* finished[1 + kMostRanks];  // what the handles of calls ask that are over, by source
PyObject* verbs[static_cast<size_t>(Verb::count_)];
enum { kPending, kOp, kOutputs, kCallbacks, kSlots };
Slot slots[kSlots];

}  // namespace

void learn_handles(nb::handle handle_type, nb::handle finished_type) {
  type = reinterpret_cast<PyTypeObject*>(nb::borrow(handle_type).release().ptr());
  for (int source = -1; source < kMostRanks; source++)
    finished[1 + source] = nb::object(finished_type(source)).release().ptr();
  const char* names[kSlots] = {"_pending", "_op", "_outputs", "_callbacks"};
  for (int i = 0; i < kSlots; i++) {
    PyObject* descriptor = nb::object(handle_type.attr(names[i])).release().ptr();
    slots[i] = {descriptor, reinterpret_cast<descrsetfunc>(PyType_GetSlot(Py_TYPE(descriptor), Py_tp_descr_set))};
  }
  for (size_t i = 0; i < static_cast<size_t>(Verb::count_); i++)
    verbs[i] = PyUnicode_InternFromString(verb_name(static_cast<Verb>(i)));
}

nb::object make_handle(nb::handle pending, Verb verb, nb::handle outputs) {
  nb::object made = nb::steal(PyType_GenericAlloc(type, 0));
  if (!made.is_valid()) nb::raise_python_error();
  PyObject* values[kSlots] = {pending.ptr(), verbs[static_cast<size_t>(verb)], outputs.ptr(), Py_None};
  for (int i = 0; i < kSlots; i++)
    if (slots[i].set(slots[i].descriptor, made.ptr(), values[i]) != 0) nb::raise_python_error();
  return made;
}

nb::object finished_handle(Verb verb, int source, nb::handle outputs) {
  return make_handle(nb::handle(finished[1 + source]), verb, outputs);
}

}  // namespace unisono
