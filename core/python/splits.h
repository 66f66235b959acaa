// The usual case of a cut tensor, accepted quickly. Whatever is not usual, and every error, is left to Python
// (calls/splits.py), which has the words of the libraries whose functions these are.
#pragma once

#include <nanobind/nanobind.h>

namespace unisono {

// Elements of each rank's part of `rows` rows of `row` elements, by a list or tuple of plain numbers (None or empty:
// equal parts). `rows` below 0: as many as the splits say. None if anything is not so, or does not add up.
nanobind::object cut_rows(nanobind::handle splits, int64_t rows, int64_t row, int size);

// Whether `part` is fit to be this rank's part of `whole`, cut by counts: both dense, contiguous, on the CPU, of one
// dtype and the right sizes, and either that very memory or apart from all of it.
bool is_part(nanobind::handle whole, nanobind::handle part, nanobind::handle counts, int rank, int size);

// Elements that this rank receives from each and sends to each, by a matrix whose entry (i, j) says how many rows of
// `row` elements rank i sends to rank j: a flat list, or a list of lists. None as above.
nanobind::object cut_matrix(nanobind::handle matrix, int64_t row, int rank, int size);

// Whether the tensors are fit for an exchange by these counts, and apart from each other.
bool is_exchange(nanobind::handle output, nanobind::handle input, nanobind::handle received, nanobind::handle sent,
                 int rank, int size);

}  // namespace unisono
