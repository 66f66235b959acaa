// Matrix products for the fused operations, as Python calls them; the numbers are made in kernels/gemm.h.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <vector>

#include "python/tensors.h"

namespace unisono {

// c = a @ b (+ bias) for pairs of matrices, the products one behind the other in `c`. `columns` are those of each
// product. A three-dimensional b is what pack_panels made of a matrix. With `slices`, one per product, sums are made in
// the tree order.
void multiply_pairs(nb::sequence a, nb::sequence b, const std::vector<size_t>& columns, nb::handle c,
                    std::optional<nb::sequence> bias, std::optional<std::vector<size_t>> slices);

// Rearranges a matrix into panels that multiply_pairs reads faster.
void pack_matrix(nb::handle b, nb::handle panels);

}  // namespace unisono
