// See arguments.h.
#include "python/arguments.h"

#include <algorithm>

#include "kernels/reduce.h"

namespace nb = nanobind;

namespace unisono {
namespace {

std::string words(const std::string& s) {
  return s;
}
std::string words(nb::handle object) {
  return nb::cast<std::string>(nb::repr(object));
}
template <class Number>
  requires std::is_arithmetic_v<Number>
std::string words(Number n) {
  return std::to_string(n);
}

template <class... T>
[[noreturn]] void wrong_value(const T&... parts) {
  throw nb::value_error((words(parts) + ...).c_str());
}
template <class... T>
[[noreturn]] void wrong_type(const T&... parts) {
  throw nb::type_error((words(parts) + ...).c_str());
}

bool overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  auto x = reinterpret_cast<uintptr_t>(a), y = reinterpret_cast<uintptr_t>(b);
  return a_bytes && b_bytes && x < y + b_bytes && y < x + a_bytes;
}

// An item of a sequence, held: checking one may run Python code that changes the sequence.
nb::object item_of(nb::handle sequence, int i) {
  PyObject* item;
  if (PyList_Check(sequence.ptr()))
    Py_XINCREF(item = PyList_GetItem(sequence.ptr(), i));
  else
    item = PySequence_GetItem(sequence.ptr(), i);
  if (!item) nb::raise_python_error();
  return nb::steal(item);
}

}  // namespace

int64_t whole_number(nb::handle object, const char* argument) {
  nb::object index = nb::steal(PyNumber_Index(object.ptr()));
  int64_t n = 0;
  if (index.is_valid() && nb::try_cast(index, n)) return n;
  PyErr_Clear();
  wrong_type("argument '", argument, "' must be a whole number, got ", object);
}

int64_t not_negative(nb::handle object, const char* argument) {
  int64_t n = whole_number(object, argument);
  if (n < 0) wrong_value("argument '", argument, "' must not be negative, got ", n);
  return n;
}

int Arguments::rank_in_group(nb::handle object, const char* argument) const {
  int64_t r = whole_number(object, argument);
  if (r < 0 || r >= size_) wrong_value("argument '", argument, "' must be a rank from 0 to ", size_ - 1, ", got ", r);
  return static_cast<int>(r);
}

int Arguments::another_rank(nb::handle object, const char* argument) const {
  int r = rank_in_group(object, argument);
  if (r == rank_) wrong_value("argument '", argument, "' must be another rank than this one, ", r);
  return r;
}

void Arguments::read_parts(Parts& parts, nb::handle object, const char* argument, nb::handle counts,
                           const char* counts_argument) const {
  parts.resize(static_cast<size_t>(size_));
  if (PyList_Check(object.ptr()) || PyTuple_Check(object.ptr())) return read_list(parts, object, argument);
  View whole = view_tensor(object, argument);
  parts.dtype = whole.dtype;
  if (counts.is_none())
    cut_equally(parts, whole, argument, counts_argument);
  else
    cut_by_counts(parts, whole, argument, counts, counts_argument);
}

void Arguments::read_list(Parts& parts, nb::handle list, const char* argument) const {
  if (nb::len(list) != static_cast<size_t>(size_))
    wrong_value("argument '", argument, "' must have one tensor per rank: expected ", size_, ", got ", nb::len(list));
  Part* part = parts.data();
  for (int i = 0; i < size_; i++) {
    const ArgumentName name(argument, i);
    View v = view_tensor(item_of(list, i), name);
    if (i == 0) parts.dtype = v.dtype;
    if (v.dtype != parts.dtype)
      wrong_type("argument '", name.text(), "' has dtype ", dtype_name(v.dtype), ", the first has ",
                 dtype_name(parts.dtype));
    part[i] = {v.data, v.count};
  }
}

void Arguments::cut_equally(Parts& parts, const View& whole, const char* argument, const char* counts_argument) const {
  const auto ranks = static_cast<size_t>(size_);
  if (whole.count % ranks)
    wrong_value("argument '", argument, "' has ", whole.count, " elements, which do not divide into ", ranks,
                " equal parts; give '", counts_argument, "'");
  const size_t count = whole.count / ranks, bytes = count * dtype_bytes(whole.dtype);
  for (size_t i = 0; i < ranks; i++) parts.data()[i] = {whole.data + i * bytes, count};
}

void Arguments::cut_by_counts(Parts& parts, const View& whole, const char* argument, nb::handle counts,
                              const char* counts_argument) const {
  if (!PySequence_Check(counts.ptr()))
    wrong_type("argument '", counts_argument, "' must be a sequence of whole numbers, got ", counts);
  if (nb::len(counts) != static_cast<size_t>(size_))
    wrong_value("argument '", counts_argument, "' must have one number per rank: expected ", size_, ", got ",
                nb::len(counts));
  const size_t element = dtype_bytes(whole.dtype);
  Part* part = parts.data();
  std::byte* at = whole.data;
  size_t left = whole.count;
  bool too_many = false;
  for (int i = 0; i < size_; i++) {
    int64_t n = whole_number(item_of(counts, i), counts_argument);
    if (n < 0) wrong_value("argument '", counts_argument, "' must not be negative, got ", n, " for rank ", i);
    too_many = too_many || static_cast<size_t>(n) > left;
    if (too_many) continue;
    part[i] = {at, static_cast<size_t>(n)};
    at += static_cast<size_t>(n) * element;
    left -= static_cast<size_t>(n);
  }
  if (too_many || left)
    wrong_value("argument '", counts_argument, "' must add up to the ", whole.count, " elements of '", argument,
                "', got ", counts);
}

void Arguments::fits(const View& one, const char* one_argument, const Parts& many, const char* many_argument) const {
  if (one.dtype != many.dtype)
    wrong_type("argument '", one_argument, "' must have the dtype of '", many_argument, "', ", dtype_name(many.dtype),
               ", got ", dtype_name(one.dtype));
  if (one.count != many.of(rank_).count)
    wrong_value("argument '", one_argument, "' must have as many elements as this rank's part of '", many_argument,
                "': expected ", many.of(rank_).count, ", got ", one.count);
  for (int r = 0; r < size_; r++) {
    const Part& part = many.of(r);
    if (r == rank_ && part.ptr == one.data) continue;
    if (overlap(part.ptr, part.count * dtype_bytes(many.dtype), one.data, one.bytes()))
      wrong_value("argument '", one_argument, "' overlaps '", many_argument,
                  "' and is not exactly this rank's part of it");
  }
}

void set_reduction(Call& call, nb::handle tensor, DType dtype, OpAndFactor reduction) {
  call.dtype = dtype;
  call.op = reduction.op;
  call.factor = reduction.factor;
  if (!reduction_exists(dtype, call.op))
    wrong_type("argument 'op': ", redop_name(call.op), " is not defined for ",
               nb::cast<std::string>(nb::str(nb::object(tensor.attr("dtype")))));
}

std::byte* matching_output(nb::handle out, const View& in) {
  View v = view_tensor(out, "out");
  if (v.dtype != in.dtype)
    wrong_type("argument 'out' must have the dtype of 'tensor', ", dtype_name(in.dtype), ", got ", dtype_name(v.dtype));
  if (v.count != in.count)
    wrong_value("argument 'out' must have as many elements as 'tensor': expected ", in.count, ", got ", v.count);
  if (v.data != in.data && overlap(v.data, v.bytes(), in.data, in.bytes()))
    wrong_value("argument 'out' overlaps 'tensor' partly; give the same memory or memory apart");
  return v.data;
}

void Arguments::fit(const Parts& output, const Parts& input) const {
  if (output.dtype != input.dtype)
    wrong_type("argument 'output' must have the dtype of 'input', ", dtype_name(input.dtype), ", got ",
               dtype_name(output.dtype));
  if (output.of(rank_).count != input.of(rank_).count)
    wrong_value("argument 'output' must have as many elements from this rank as 'input' has for it: expected ",
                input.of(rank_).count, ", got ", output.of(rank_).count);
  const size_t element = dtype_bytes(input.dtype);
  for (const Part& o : output)
    for (const Part& i : input)
      if (overlap(o.ptr, o.count * element, i.ptr, i.count * element))
        wrong_value("argument 'output' must not overlap 'input'");
}

int64_t call_timeout_ns(nb::handle object) {
  if (object.is_none()) return 0;
  const double seconds = PyFloat_AsDouble(object.ptr());
  if (seconds == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    wrong_type("argument 'timeout_s' must be a number of seconds, got ", object);
  }
  if (seconds == 0) return 0;
  if (!(seconds > 0)) wrong_value("argument 'timeout_s' must be positive, got ", seconds);
  return std::max<int64_t>(static_cast<int64_t>(std::min(seconds, 9e9) * 1e9), 1);
}

}  // namespace unisono
