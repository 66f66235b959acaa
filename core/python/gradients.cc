// See gradients.h.
#include "python/gradients.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "python/arguments.h"
#include "python/sites.h"

namespace nb = nanobind;

namespace unisono {
namespace {

// The property of torch.Tensor and what reads it: every call asks, and looking the name up takes longer than the rest.
nb::handle requires_grad;
descrgetfunc read_property = nullptr;
nb::handle is_grad_enabled;
bool was_said = false;

// Reading the flag would make an 8-byte call a tenth slower, so only the first calls of a process and every 61st are
// looked at: a program that cuts gradients does so in its first steps, and again in each. Guarded by the GIL.
bool is_looked_at() {
  static unsigned calls = 0;
  constexpr unsigned first = 256, each = 61;
  return ++calls <= first || calls % each == 0;
}

bool loses_gradient(nb::handle object, bool in_place) {
  if (is_tensor(object)) {
    nb::object required = nb::steal(read_property(requires_grad.ptr(), object.ptr(), nullptr));
    if (!required.is_valid()) nb::raise_python_error();
    return required.ptr() == Py_True && nb::cast<bool>(is_grad_enabled()) &&
           !(in_place && nb::cast<bool>(object.attr("is_leaf")));
  }
  if (!PyList_CheckExact(object.ptr()) && !PyTuple_CheckExact(object.ptr())) return false;
  const Py_ssize_t length = PySequence_Size(object.ptr());
  for (Py_ssize_t i = 0; i < length; i++)
    if (nb::object item = item_of(object, i); is_tensor(item) && loses_gradient(item, in_place)) return true;
  return false;
}

}  // namespace

void learn_gradients(nb::handle tensor_type) {
  requires_grad = nb::object(tensor_type.attr("requires_grad")).release();  // kept for good, as the next
  is_grad_enabled = nb::object(nb::module_::import_("torch").attr("is_grad_enabled")).release();
  read_property = reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(requires_grad.ptr()), Py_tp_descr_get));
}

void warn_if_gradient_is_cut(nb::handle tensor_or_list, bool in_place, Verb verb) {
  if (was_said || !tensor_or_list.is_valid() || !is_looked_at() || !loses_gradient(tensor_or_list, in_place)) return;
  const std::string words = std::string(verb_name(verb)) +
                            ": autograd does not see this call, so the gradient of its input ends here. For one that "
                            "goes through, call unisono.comm_func; if none is meant, give tensor.detach() or use "
                            "torch.no_grad(). Said once.";
  const char* site = find_call_site();  // "train.py:88"
  const char* line = site ? std::strrchr(site, ':') : nullptr;
  const int raised = line ? PyErr_WarnExplicit(PyExc_UserWarning, words.c_str(), std::string(site, line).c_str(),
                                               std::atoi(line + 1), nullptr, nullptr)
                          : PyErr_WarnEx(PyExc_UserWarning, words.c_str(), 1);
  if (raised) nb::raise_python_error();
  was_said = true;
}

}  // namespace unisono
