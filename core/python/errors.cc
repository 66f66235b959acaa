// See errors.h.
#include "python/errors.h"

#include <iterator>

namespace unisono {
namespace {

constexpr const char* rule_names[] = {
    "whole_number",   "not_negative",
    "rank_range",     "another_rank",
    "list_length",    "list_dtype",
    "divides",        "counts_sequence",
    "counts_length",  "counts_negative",
    "counts_sum",     "dtype_of",
    "size_of",        "part_size",
    "own_part_size",  "overlap",
    "overlap_partly", "overlap_part",
    "op_name",        "op_dtype",
    "factor_missing", "factor_foreign",
    "timeout_number", "timeout_positive",
    "not_tensor",     "dense",
    "device",         "dtype_known",
    "contiguous",     "lazy",
    "no_memory",      "matrix",
    "like",           "inputs_and_factors",
    "float32_size",   "matrix_size",
    "own_elements",   "shared",
    "outside_heap",   "group_size",
};
static_assert(std::size(rule_names) == static_cast<size_t>(Rule::count_), "one name per rule, in the same order");

// Parts of a message come out of shared memory, where a broken peer may have put anything.
nb::object text_of(const std::string& s) {
  return nb::steal(PyUnicode_DecodeUTF8(s.data(), static_cast<Py_ssize_t>(s.size()), "replace"));
}

[[noreturn]] void throw_exception(nb::handle error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(error.type().ptr()), error.ptr());
  nb::raise_python_error();
}

}  // namespace

Hooks& hooks = *new Hooks;

std::string ArgumentName::text() const {
  std::string text = name;
  if (index >= 0) text.append("[").append(std::to_string(index)).append("]");
  return text;
}

const char* rule_name(Rule rule) {
  return rule_names[static_cast<size_t>(rule)];
}

void refuse(const Refusal& r) {
  throw_exception(hooks.make_argument_error(rule_name(r.rule), r.argument.text(), r.expected, r.got, r.other, r.index));
}

nb::object error_of(const Failure& f, const std::string& group, int rank) {
  nb::list lines;
  for (const std::string& line : f.lines) lines.append(text_of(line));
  return hooks.make_error(static_cast<int>(f.code), verb_name(f.verb), f.seq, text_of(group), rank, nb::cast(f.peers),
                          text_of(f.text), lines, f.first_cause);
}

void raise(const Failure& f, const std::string& group, int rank) {
  if (PyErr_Occurred()) nb::raise_python_error();  // a signal handler raised
  throw_exception(error_of(f, group, rank));
}

bool check_python_signals() {
  PyGILState_STATE state = PyGILState_Ensure();
  bool raised = PyErr_CheckSignals() != 0;
  PyGILState_Release(state);
  return raised;
}

}  // namespace unisono
