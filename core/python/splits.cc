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

// As cut_rows; `total` are all rows.
nb::object cut(nb::handle splits, int64_t rows, int64_t row, int size, int64_t& total) {
  const bool listed = is_list(splits);
  if (!listed && !splits.is_none()) return nb::none();
  const Py_ssize_t length = listed ? PySequence_Size(splits.ptr()) : 0;
  if (length == 0 ? rows < 0 || rows % size : length != size) return nb::none();
  nb::object counts = nb::steal(PyTuple_New(size));
  if (!counts.is_valid()) nb::raise_python_error();
  total = 0;
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

int64_t sum(nb::handle numbers) {
  int64_t total = 0;
  for (nb::handle n : nb::borrow<nb::tuple>(numbers)) total += PyLong_AsLongLong(n.ptr());
  return total;
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
  int64_t total;
  return cut(splits, rows, row, size, total);
}

nb::object cut_tensor(nb::handle splits, nb::handle tensor, int rank, int size, bool gathers) {
  Shape shape;
  if (!read_shape(tensor, shape)) return nb::none();
  const int64_t row = shape.row();
  const bool equal = splits.is_none() || (is_list(splits) && PySequence_Size(splits.ptr()) == 0);
  int64_t whole = shape.rows(), total, mine;
  if (gathers && __builtin_mul_overflow(whole, static_cast<int64_t>(size), &whole)) return nb::none();
  nb::object counts = cut(splits, gathers && !equal ? -1 : whole, row, size, total);
  if (counts.is_none()) return counts;
  if (equal)
    mine = total / size;
  else if (!read_rows(item_of(splits, rank).ptr(), mine))
    return nb::none();
  if (gathers && mine != shape.rows()) return nb::none();
  return nb::make_tuple(gathers ? total : mine, counts);
}

nb::object cut_exchange(nb::handle shape, nb::handle tensor, nb::handle output_splits, nb::handle input_splits,
                        int size) {
  Shape given;
  if (!read_shape(tensor, given) || given.dims == 0 || !is_list(shape)) return nb::none();
  if (PySequence_Size(shape.ptr()) != given.dims) return nb::none();
  int64_t rows = 0;
  for (int d = given.dims; d-- > 0;) {  // dimension 0 last
    if (!read_rows(item_of(shape, d).ptr(), rows)) return nb::none();
    if (d > 0 && rows != given.sizes[d]) return nb::none();
  }
  nb::object sides[2];
  for (int i = 0; i < 2; i++) {
    nb::handle splits = i ? input_splits : output_splits;
    const int64_t all = i ? given.rows() : rows;
    sides[i] = nb::none();
    if (all % size == 0 && (splits.is_none() || (is_list(splits) && PySequence_Size(splits.ptr()) == 0))) continue;
    sides[i] = cut_rows(splits, all, given.row(), size);
    if (sides[i].is_none()) return nb::none();
  }
  return nb::make_tuple(rows, sides[0], sides[1]);
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

nb::object cut_by_matrix(nb::handle output, nb::handle input, nb::handle matrix, int rank, int size) {
  Shape to, from;
  if (!read_shape(output, to) || !read_shape(input, from) || to.row() != from.row() || !to.row()) return nb::none();
  nb::object counts = cut_matrix(matrix, to.row(), rank, size);
  if (counts.is_none() || sum(counts[0]) != to.rows() * to.row() || sum(counts[1]) != from.rows() * from.row())
    return nb::none();
  return counts;
}

bool are_exchanged(nb::handle shapes, nb::handle tensors, int size) {
  if (!is_list(shapes) || !is_list(tensors)) return false;
  if (PySequence_Size(shapes.ptr()) != size || PySequence_Size(tensors.ptr()) != size) return false;
  nb::object dtype;
  for (Py_ssize_t i = 0; i < size; i++) {
    nb::object shape = item_of(shapes, i), tensor = item_of(tensors, i);
    if (!is_list(shape) || !is_tensor(tensor)) return false;
    int64_t rows;
    for (Py_ssize_t d = 0; d < PySequence_Size(shape.ptr()); d++)
      if (!read_rows(item_of(shape, d).ptr(), rows)) return false;
    nb::object found = tensor.attr("dtype");
    if (i && !found.is(dtype)) return false;
    dtype = std::move(found);
  }
  return true;
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
