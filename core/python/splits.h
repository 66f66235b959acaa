// The usual case of a cut tensor, accepted quickly. Whatever is not usual, and every error, is left to Python
// (calls/splits.py), which has the words of the libraries whose functions these are.
#pragma once

#include <nanobind/nanobind.h>

namespace unisono {

// Elements of each rank's part of `rows` rows of `row` elements, by a list or tuple of plain numbers (None or empty:
// equal parts). `rows` below 0: as many as the splits say. None if anything is not so, or does not add up.
nanobind::object cut_rows(nanobind::handle splits, int64_t rows, int64_t row, int size);

// The same for a functional call: the rows of the result, and each rank's elements. `gathers`: the tensor is this
// rank's part of the whole, else it is the whole.
nanobind::object cut_tensor(nanobind::handle splits, nanobind::handle tensor, int rank, int size, bool gathers);

// Whether `part` is fit to be this rank's part of `whole`, cut by counts: both dense, contiguous, on the CPU, of one
// dtype and the right sizes, and either that very memory or apart from all of it.
bool is_part(nanobind::handle whole, nanobind::handle part, nanobind::handle counts, int rank, int size);

// Elements that this rank receives from each and sends to each, by a matrix whose entry (i, j) says how many rows of
// `row` elements rank i sends to rank j: a flat list, or a list of lists. None as above.
nanobind::object cut_matrix(nanobind::handle matrix, int64_t row, int rank, int size);

// For an exchange of rows of one tensor, with a result of this shape: the result's rows, and the elements that come
// from and go to each rank (None: equal parts). None unless all but dimension 0 are as the tensor's.
nanobind::object cut_exchange(nanobind::handle shape, nanobind::handle tensor, nanobind::handle output_splits,
                              nanobind::handle input_splits, int size);

// As cut_matrix, in elements of two tensors whose rows are equal, if the counts add up to them.
nanobind::object cut_by_matrix(nanobind::handle output, nanobind::handle input, nanobind::handle matrix, int rank,
                               int size);

// Whether these are lists of one shape and of one tensor for each rank, tensors of one dtype.
bool are_exchanged(nanobind::handle shapes, nanobind::handle tensors, int size);

// Whether the tensors are fit for an exchange by these counts, and apart from each other.
bool is_exchange(nanobind::handle output, nanobind::handle input, nanobind::handle received, nanobind::handle sent,
                 int rank, int size);

}  // namespace unisono
