// See reduce_ops.h. Reading "sum" is on the way of every small call: names are interned strings, so a name written in
// Python source is found by comparing pointers.
#include "python/reduce_ops.h"

#include <array>
#include <cctype>
#include <string>
#include <vector>

#include "python/errors.h"

namespace unisono {
namespace {

constexpr int kOps = static_cast<int>(RedOp::none);
constexpr size_t kHashes = 32;  // more than torch has kinds of reductions

struct Name {
  PyObject* word;  // interned, kept for good
  RedOp op;
};

PyTypeObject *reduce_op_type = nullptr, *red_op_type = nullptr;
std::vector<Name>& names = *new std::vector<Name>;  // "sum" first
PyObject* by_name = nullptr;                        // dict: the same names -> code
std::array<RedOp, kHashes> by_hash;                 // none: no such operation

void add_name(const char* word, RedOp op) {
  PyObject* interned = PyUnicode_InternFromString(word);
  names.push_back({interned, op});
  if (PyDict_SetItem(by_name, interned, nb::int_(static_cast<int>(op)).ptr()) != 0) nb::raise_python_error();
}

// A ReduceOp and a RedOpType both hash to the number of the type; comparing two of them takes microseconds.
RedOp op_by_hash(nb::handle object) {
  Py_hash_t hash = PyObject_Hash(object.ptr());
  if (hash == -1 && PyErr_Occurred()) nb::raise_python_error();
  return hash >= 0 && hash < static_cast<Py_hash_t>(kHashes) ? by_hash[static_cast<size_t>(hash)] : RedOp::none;
}

RedOp op_by_name(nb::handle object) {
  for (const Name& name : names)
    if (name.word == object.ptr()) return name.op;
  PyObject* code = PyDict_GetItemWithError(by_name, object.ptr());
  if (!code && PyErr_Occurred()) nb::raise_python_error();
  return code ? static_cast<RedOp>(PyLong_AsLong(code)) : RedOp::none;
}

double number(nb::handle object) {
  nb::object as_float = nb::steal(PyNumber_Float(object.ptr()));
  if (!as_float.is_valid()) nb::raise_python_error();
  return PyFloat_AsDouble(as_float.ptr());
}

[[noreturn]] void refuse_op(nb::handle op) {
  nb::list known;
  for (const Name& name : names) known.append(nb::handle(name.word));
  known.sort();
  refuse({.rule = Rule::op_name, .argument = "op", .expected = known, .got = nb::borrow(op)});
}

}  // namespace

void learn_reduce_ops(nb::handle reduce_op) {
  nb::object red_op = reduce_op.attr("RedOpType");
  reduce_op_type = reinterpret_cast<PyTypeObject*>(nb::borrow(reduce_op).release().ptr());
  by_hash.fill(RedOp::none);
  names.clear();
  by_name = PyDict_New();
  for (int code = 0; code < kOps; code++) {
    std::string word = redop_name(static_cast<RedOp>(code));
    add_name(word.c_str(), static_cast<RedOp>(code));
    for (char& letter : word) letter = static_cast<char>(std::toupper(letter));
    Py_hash_t hash = PyObject_Hash(nb::object(red_op.attr(word.c_str())).ptr());
    if (hash < 0 || hash >= static_cast<Py_hash_t>(kHashes))
      throw nb::import_error("this torch has reductions unisono does not know how to tell apart");
    by_hash[static_cast<size_t>(hash)] = static_cast<RedOp>(code);
  }
  add_name("prod", RedOp::product);
  red_op_type = reinterpret_cast<PyTypeObject*>(red_op.release().ptr());
}

OpAndFactor read_op(nb::handle op, nb::handle factor) {
  PyTypeObject* type = Py_TYPE(op.ptr());  // isinstance is slow for torch's types, and says yes too often
  OpAndFactor read{RedOp::none};
  if (PyUnicode_CheckExact(op.ptr()))
    read.op = op_by_name(op);
  else if (type == reduce_op_type || type == red_op_type)
    read.op = op_by_hash(op);
  if (read.op == RedOp::none) refuse_op(op);
  if (read.op != RedOp::premul_sum) {
    if (!factor.is_none())
      refuse({.rule = Rule::factor_foreign, .argument = "factor", .got = nb::borrow(op), .other = "op"});
    return read;
  }
  if (!factor.is_none())
    read.factor = number(factor);
  else if (type == reduce_op_type)
    read.factor = number(nb::object(nb::object(op.attr("__getstate__")())[1]));
  else
    refuse({.rule = Rule::factor_missing, .argument = "factor", .other = "op"});
  return read;
}

}  // namespace unisono
