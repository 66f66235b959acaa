// See splits.h.
#include "python/splits.h"

#include "python/arguments.h"

namespace unisono {
namespace {

bool is_list(nb::handle object) {
  return PyList_CheckExact(object.ptr()) || PyTuple_CheckExact(object.ptr());
}

// False for anything but a plain whole number that is not negative.
bool read_rows(PyObject* object, int64_t& rows) {
  if (!PyLong_CheckExact(object)) return false;
  rows = PyLong_AsLongLong(object);
  if (rows < 0) PyErr_Clear();  // negative, or too large for 64 bits
  return rows >= 0;
}

template <class Check>
bool is_accepted(Check check) {
  try {
    check();
    return true;
  } catch (const nb::python_error&) {
    return false;
  }
}

}  // namespace

nb::object cut_rows(nb::handle splits, int64_t rows, int64_t row, int size) {
  const bool listed = is_list(splits);
  if (!listed && !splits.is_none()) return nb::none();
  const Py_ssize_t length = listed ? PySequence_Size(splits.ptr()) : 0;
  if (length == 0 ? rows < 0 || rows % size : length != size) return nb::none();
  nb::object counts = nb::steal(PyTuple_New(size));
  if (!counts.is_valid()) nb::raise_python_error();
  int64_t total = 0;
  for (Py_ssize_t i = 0; i < size; i++) {
    int64_t part = rows / size, elements;
    if (length && !read_rows(item_of(splits, i).ptr(), part)) return nb::none();
    if (__builtin_add_overflow(total, part, &total) || __builtin_mul_overflow(part, row, &elements)) return nb::none();
    PyObject* number = PyLong_FromLongLong(elements);
    if (!number) nb::raise_python_error();
    PyTuple_SetItem(counts.ptr(), i, number);
  }
  return rows >= 0 && total != rows ? nb::object(nb::none()) : counts;
}

nb::object cut_matrix(nb::handle matrix, int64_t row, int rank, int size) {
  if (!is_list(matrix) || PySequence_Size(matrix.ptr()) < 1) return nb::none();
  const Py_ssize_t length = PySequence_Size(matrix.ptr()), n = size;
  const bool nested = is_list(item_of(matrix, 0));
  if (length != (nested ? n : n * n)) return nb::none();
  nb::object received = nb::steal(PyTuple_New(n)), sent = nb::steal(PyTuple_New(n));
  if (!received.is_valid() || !sent.is_valid()) nb::raise_python_error();
  for (Py_ssize_t i = 0; i < n; i++) {
    nb::object line = nested ? item_of(matrix, i) : nb::borrow(matrix);
    if (nested && (!is_list(line) || PySequence_Size(line.ptr()) != n)) return nb::none();
    for (Py_ssize_t j = 0; j < n; j++) {
      int64_t rows, elements;
      if (!read_rows(item_of(line, nested ? j : i * n + j).ptr(), rows)) return nb::none();
      if (__builtin_mul_overflow(rows, row, &elements)) return nb::none();
      if (j == rank) PyTuple_SetItem(received.ptr(), i, PyLong_FromLongLong(elements));
      if (i == rank) PyTuple_SetItem(sent.ptr(), j, PyLong_FromLongLong(elements));
    }
  }
  return nb::make_tuple(received, sent);
}

bool is_part(nb::handle whole, nb::handle part, nb::handle counts, int rank, int size) {
  const Arguments arguments(rank, size);
  return is_accepted([&] {
    Parts parts;
    arguments.read_parts(parts, whole, "whole", counts, "counts");
    arguments.check_single_part(view_tensor(part, "part"), "part", parts, "whole");
  });
}

bool is_exchange(nb::handle output, nb::handle input, nb::handle received, nb::handle sent, int rank, int size) {
  const Arguments arguments(rank, size);
  return is_accepted([&] {
    Parts out, in;
    arguments.read_parts(out, output, "output", received, "received");
    arguments.read_parts(in, input, "input", sent, "sent");
    arguments.check_exchange(out, in);
  });
}

}  // namespace unisono
