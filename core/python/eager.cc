// See eager.h.
#include "python/eager.h"

#include "python/arguments.h"

namespace unisono {
namespace {

// What is asked of torch; never given back. Of modules their dicts are kept, since what they hold changes.
struct Torch {
  PyObject *tensor, *parameter, *buffer;         // classes without a behaviour of their own
  PyObject *compiler, *forward_ad, *c10d;        // dicts of modules
  PyObject *count_modes, *is_grad_enabled;       // functions
  PyObject *is_compiling, *level, *unpack_dual;  // names, from here on
  PyObject *world, *default_group, *default_group_kept, *requires_grad, *ours, *transport, *ranks;
  PyObject* world_class;  // of torch's world; null if it is not built as expected
};
Torch torch;

PyObject* dict_of(const char* module) {
  return nb::object(nb::module_::import_(module).attr("__dict__")).release().ptr();
}

PyObject* keep(nb::object object) {
  return object.release().ptr();
}

// An attribute; null if there is none.
nb::object look_up(PyObject* object, PyObject* name) {
  nb::object found = nb::steal(PyObject_GetAttr(object, name));
  if (found.is_valid()) return found;
  if (!PyErr_ExceptionMatches(PyExc_AttributeError)) nb::raise_python_error();
  PyErr_Clear();
  return found;
}

// An attribute that is there.
nb::object get(nb::handle object, PyObject* name) {
  nb::object found = nb::steal(PyObject_GetAttr(object.ptr(), name));
  if (!found.is_valid()) nb::raise_python_error();
  return found;
}

// What a module holds under a name, borrowed; null if nothing.
PyObject* global(PyObject* module, PyObject* name) {
  PyObject* found = PyDict_GetItemWithError(module, name);
  if (!found && PyErr_Occurred()) nb::raise_python_error();
  return found;
}

bool call(PyObject* function) {
  nb::object answer = nb::steal(PyObject_CallNoArgs(function));
  const int yes = answer.is_valid() ? PyObject_IsTrue(answer.ptr()) : -1;
  if (yes < 0) nb::raise_python_error();
  return yes == 1;
}

// Whether torch traces: torch.export sets a flag, fake tensors and proxies come with a mode. (torch.compile is seen in
// Python, where it reads along.)
bool is_traced() {
  return global(torch.compiler, torch.is_compiling) == Py_True || call(torch.count_modes);
}

bool has_tangent(nb::handle tensor) {
  PyObject* level = global(torch.forward_ad, torch.level);
  if (!level || !PyLong_Check(level) || PyLong_AsLong(level) < 0) return false;  // the usual case
  nb::object dual = nb::handle(global(torch.forward_ad, torch.unpack_dual))(tensor);
  return !nb::object(dual.attr("tangent")).is_none();
}

bool is_eager(nb::handle tensor) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
  if (type != torch.tensor && type != torch.parameter && type != torch.buffer) return false;
  nb::object requires_grad = get(tensor, torch.requires_grad);
  return !(requires_grad.is(nb::handle(Py_True)) && call(torch.is_grad_enabled)) && !has_tangent(tensor);
}

bool are_eager(nb::handle tensors) {
  if (!PyList_CheckExact(tensors.ptr()) && !PyTuple_CheckExact(tensors.ptr())) return false;
  const Py_ssize_t n = PySequence_Size(tensors.ptr());
  for (Py_ssize_t i = 0; i < n; i++)
    if (!is_eager(item_of(tensors, i))) return false;
  return n > 0;
}

// The unisono.Group that is meant; null if it is another one, or none yet.
nb::object find_ours(nb::handle group) {
  nb::object meant = nb::borrow(group);
  if (group.is_none()) {
    PyObject* world = global(torch.c10d, torch.world);
    // Its attribute rather than its property, which is a function in Python, unless somebody has put in a world of
    // another class.
    const bool is_torchs = world && reinterpret_cast<PyObject*>(Py_TYPE(world)) == torch.world_class;
    if (world) meant = look_up(world, is_torchs ? torch.default_group_kept : torch.default_group);
  }
  if (!meant.is_valid() || meant.is_none() || PyUnicode_Check(meant.ptr())) return {};
  nb::object ours = look_up(meant.ptr(), torch.ours);
  return ours.is_valid() && ours.is_none() ? nb::object() : ours;
}

nb::object transport_of(nb::handle group) {
  nb::object ours = find_ours(group);
  return ours.is_valid() ? get(ours, torch.transport) : nb::none();
}

// A rank's place in the list of the group's; -1 if it is no plain number in it.
Py_ssize_t place_of(nb::handle rank, nb::object held) {
  PyObject* ranks = held.ptr();
  if (!PyLong_CheckExact(rank.ptr()) || !PyList_CheckExact(ranks)) return -1;
  const int64_t wanted = PyLong_AsLongLong(rank.ptr());
  if (wanted == -1 && PyErr_Occurred()) PyErr_Clear();
  const Py_ssize_t size = PyList_Size(ranks);
  for (Py_ssize_t i = wanted >= 0 && wanted < size ? wanted : 0, seen = 0; seen < size; seen++, i = (i + 1) % size)
    if (PyLong_AsLongLong(PyList_GetItem(ranks, i)) == wanted) return i;
  return -1;
}

}  // namespace

void learn_torch() {
  const auto name = PyUnicode_InternFromString;
  nb::module_ top = nb::module_::import_("torch"), nn = nb::module_::import_("torch.nn");
  torch = {.tensor = keep(top.attr("Tensor")),
           .parameter = keep(nn.attr("Parameter")),
           .buffer = keep(nn.attr("Buffer")),
           .compiler = dict_of("torch.compiler"),
           .forward_ad = dict_of("torch.autograd.forward_ad"),
           .c10d = dict_of("torch.distributed.distributed_c10d"),
           .count_modes = keep(top.attr("_C").attr("_len_torch_dispatch_stack")),
           .is_grad_enabled = keep(top.attr("is_grad_enabled")),
           .is_compiling = name("_is_compiling_flag"),
           .level = name("_current_level"),
           .unpack_dual = name("unpack_dual"),
           .world = name("_world"),
           .default_group = name("default_pg"),
           .default_group_kept = name("_default_pg"),
           .requires_grad = name("requires_grad"),
           .ours = name("unisono_group"),
           .transport = name("transport"),
           .ranks = name("ranks"),
           .world_class = nullptr};
  nb::handle world = global(torch.c10d, torch.world);
  if (world.is_valid() && nb::hasattr(world, torch.default_group_kept))
    torch.world_class = keep(nb::borrow(world.type()));
}

nb::object eager_transport(nb::handle group, nb::handle tensor) {
  return is_eager(tensor) && !is_traced() ? transport_of(group) : nb::borrow(Py_False);
}

nb::object eager_transport_of_all(nb::handle group, nb::handle tensors) {
  return are_eager(tensors) && !is_traced() ? transport_of(group) : nb::borrow(Py_False);
}

nb::object eager_partner(nb::handle group, nb::handle tensor, nb::handle rank) {
  if (!is_eager(tensor) || is_traced()) return nb::none();
  nb::object ours = find_ours(group);
  if (!ours.is_valid()) return nb::none();
  const Py_ssize_t place = place_of(rank, get(ours, torch.ranks));
  return place < 0 ? nb::none() : nb::object(nb::make_tuple(get(ours, torch.transport), place));
}

}  // namespace unisono
