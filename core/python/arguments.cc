// See arguments.h.
#include "python/arguments.h"

#include <algorithm>

#include "base/faults.h"
#include "kernels/reduce.h"

namespace unisono {
namespace {

template <class Number>
nb::object number(Number n) {
  return nb::int_(n);
}
nb::object name_of(DType dtype) {
  return nb::str(dtype_name(dtype));
}

bool overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  auto x = reinterpret_cast<uintptr_t>(a), y = reinterpret_cast<uintptr_t>(b);
  return a_bytes && b_bytes && x < y + b_bytes && y < x + a_bytes;
}

}  // namespace

nb::object item_of(nb::handle sequence, Py_ssize_t i) {
  PyObject* item;
  if (PyList_Check(sequence.ptr()))
    Py_XINCREF(item = PyList_GetItem(sequence.ptr(), i));
  else
    item = PySequence_GetItem(sequence.ptr(), i);
  if (!item) nb::raise_python_error();
  return nb::steal(item);
}

int64_t whole_number(nb::handle object, const char* argument) {
  nb::object index = nb::steal(PyNumber_Index(object.ptr()));
  int64_t n = 0;
  if (index.is_valid() && nb::try_cast(index, n)) return n;
  PyErr_Clear();
  refuse({.rule = Rule::whole_number, .argument = argument, .got = nb::borrow(object)});
}

int64_t not_negative(nb::handle object, const char* argument) {
  int64_t n = whole_number(object, argument);
  if (n < 0) refuse({.rule = Rule::not_negative, .argument = argument, .got = number(n)});
  return n;
}

int Arguments::rank_in_group(nb::handle object, const char* argument) const {
  int64_t r = whole_number(object, argument);
  if (r < 0 || r >= size_)
    refuse({.rule = Rule::rank_range, .argument = argument, .expected = number(size_ - 1), .got = number(r)});
  return static_cast<int>(r);
}

int Arguments::another_rank(nb::handle object, const char* argument) const {
  int r = rank_in_group(object, argument);
  if (r == rank_) refuse({.rule = Rule::another_rank, .argument = argument, .got = number(r)});
  return r;
}

void Arguments::read_parts(Parts& parts, nb::handle object, const char* argument, nb::handle counts,
                           const char* counts_argument, const View* known) const {
  parts.resize(static_cast<size_t>(size_));
  if (PyList_Check(object.ptr()) || PyTuple_Check(object.ptr())) return read_list(parts, object, argument);
  const View whole = known ? *known : view_tensor(object, argument);
  parts.dtype = whole.dtype;
  if (counts.is_none())
    cut_equally(parts, whole, argument, counts_argument);
  else
    cut_by_counts(parts, whole, argument, counts, counts_argument);
}

void Arguments::read_list(Parts& parts, nb::handle list, const char* argument) const {
  if (nb::len(list) != static_cast<size_t>(size_))
    refuse({.rule = Rule::list_length, .argument = argument, .expected = number(size_), .got = number(nb::len(list))});
  Part* part = parts.data();
  for (int i = 0; i < size_; i++) {
    const ArgumentName name(argument, i);
    View v = view_tensor(item_of(list, i), name);
    if (i == 0) parts.dtype = v.dtype;
    if (v.dtype != parts.dtype)
      refuse({.rule = Rule::list_dtype, .argument = name, .expected = name_of(parts.dtype), .got = name_of(v.dtype)});
    part[i] = {v.data, v.count};
  }
}

void Arguments::cut_equally(Parts& parts, const View& whole, const char* argument, const char* counts_argument) const {
  const auto ranks = static_cast<size_t>(size_);
  if (whole.count % ranks)
    refuse({.rule = Rule::divides,
            .argument = argument,
            .expected = number(ranks),
            .got = number(whole.count),
            .other = counts_argument});
  const size_t count = whole.count / ranks, bytes = count * dtype_bytes(whole.dtype);
  for (size_t i = 0; i < ranks; i++) parts.data()[i] = {whole.data + i * bytes, count};
}

void Arguments::cut_by_counts(Parts& parts, const View& whole, const char* argument, nb::handle counts,
                              const char* counts_argument) const {
  if (!PySequence_Check(counts.ptr()))
    refuse({.rule = Rule::counts_sequence, .argument = counts_argument, .got = nb::borrow(counts)});
  if (nb::len(counts) != static_cast<size_t>(size_) && is_up(Defence::arguments))
    refuse({.rule = Rule::counts_length,
            .argument = counts_argument,
            .expected = number(size_),
            .got = number(nb::len(counts))});
  const size_t element = dtype_bytes(whole.dtype);
  Part* part = parts.data();
  std::byte* at = whole.data;
  size_t left = whole.count;
  bool too_many = false;
  for (int i = 0; i < size_; i++) {
    int64_t n = whole_number(item_of(counts, i), counts_argument);
    if (n < 0) refuse({.rule = Rule::counts_negative, .argument = counts_argument, .got = number(n), .index = i});
    too_many = too_many || static_cast<size_t>(n) > left;
    if (too_many) continue;
    part[i] = {at, static_cast<size_t>(n)};
    at += static_cast<size_t>(n) * element;
    left -= static_cast<size_t>(n);
  }
  if (too_many || left)
    refuse({.rule = Rule::counts_sum,
            .argument = counts_argument,
            .expected = number(whole.count),
            .got = nb::borrow(counts),
            .other = argument});
}

void Arguments::check_single_part(const View& one, const char* one_argument, const Parts& many,
                                  const char* many_argument) const {
  if (one.dtype != many.dtype)
    refuse({.rule = Rule::dtype_of,
            .argument = one_argument,
            .expected = name_of(many.dtype),
            .got = name_of(one.dtype),
            .other = many_argument});
  if (one.count != many.of(rank_).count)
    refuse({.rule = Rule::part_size,
            .argument = one_argument,
            .expected = number(many.of(rank_).count),
            .got = number(one.count),
            .other = many_argument});
  for (int r = 0; r < size_; r++) {
    const Part& part = many.of(r);
    if (r == rank_ && part.ptr == one.data) continue;
    if (overlap(part.ptr, part.count * dtype_bytes(many.dtype), one.data, one.bytes()))
      refuse({.rule = Rule::overlap_part, .argument = one_argument, .other = many_argument});
  }
}

void set_reduction(Call& call, nb::handle tensor, DType dtype, OpAndFactor reduction) {
  call.dtype = dtype;
  call.op = reduction.op;
  call.factor = reduction.factor;
  if (!reduction_exists(dtype, call.op)) refuse_reduction(call.op, tensor);
}

void refuse_reduction(RedOp op, nb::handle tensor) {
  refuse({.rule = Rule::op_dtype, .argument = "op", .expected = tensor.attr("dtype"), .got = nb::str(redop_name(op))});
}

std::byte* matching_output(nb::handle out, const View& in) {
  View v = view_tensor(out, "out");
  if (v.dtype != in.dtype)
    refuse({.rule = Rule::dtype_of,
            .argument = "out",
            .expected = name_of(in.dtype),
            .got = name_of(v.dtype),
            .other = "tensor"});
  if (v.count != in.count)
    refuse({.rule = Rule::size_of,
            .argument = "out",
            .expected = number(in.count),
            .got = number(v.count),
            .other = "tensor"});
  if (v.data != in.data && overlap(v.data, v.bytes(), in.data, in.bytes()))
    refuse({.rule = Rule::overlap_partly, .argument = "out", .other = "tensor"});
  return v.data;
}

void Arguments::check_exchange(const Parts& output, const Parts& input) const {
  if (output.dtype != input.dtype)
    refuse({.rule = Rule::dtype_of,
            .argument = "output",
            .expected = name_of(input.dtype),
            .got = name_of(output.dtype),
            .other = "input"});
  if (output.of(rank_).count != input.of(rank_).count)
    refuse({.rule = Rule::own_part_size,
            .argument = "output",
            .expected = number(input.of(rank_).count),
            .got = number(output.of(rank_).count),
            .other = "input"});
  const size_t element = dtype_bytes(input.dtype);
  for (const Part& o : output)
    for (const Part& i : input)
      if (overlap(o.ptr, o.count * element, i.ptr, i.count * element))
        refuse({.rule = Rule::overlap, .argument = "output", .other = "input"});
}

int64_t call_timeout_ns(nb::handle object) {
  if (object.is_none()) return 0;
  const double seconds = PyFloat_AsDouble(object.ptr());
  if (seconds == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    refuse({.rule = Rule::timeout_number, .argument = "timeout_s", .got = nb::borrow(object)});
  }
  if (seconds == 0) return 0;
  if (!(seconds > 0)) refuse({.rule = Rule::timeout_positive, .argument = "timeout_s", .got = nb::float_(seconds)});
  return std::max<int64_t>(static_cast<int64_t>(std::min(seconds, 9e9) * 1e9), 1);
}

}  // namespace unisono
