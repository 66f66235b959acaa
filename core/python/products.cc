// See products.h.
#include "python/products.h"

#include "kernels/gemm.h"

namespace unisono {
namespace {

[[noreturn]] void refuse_floats(const char* argument, size_t expected, size_t got) {
  refuse({.rule = Rule::float32_size, .argument = argument, .expected = nb::int_(expected), .got = nb::int_(got)});
}

const float* floats(const View& view, size_t count, const char* argument) {
  if (view.dtype != DType::f32 || view.count != count) refuse_floats(argument, count, view.count);
  return reinterpret_cast<const float*>(view.data);
}

size_t panels_count(size_t rows, size_t columns) {
  const size_t width = panel_columns();
  return (columns + width - 1) / width * width * rows;
}

// The right side of a product of k rows and n columns.
void set_right_side(Product& p, nb::handle b) {
  if (nb::cast<int>(b.attr("ndim")) == 3) {
    p.b = {floats(view_tensor(b, "b"), panels_count(p.k, p.n), "b"), DType::f32, 0, 1};
    p.panels = true;
    return;
  }
  const MatrixView view = view_matrix(b, "b");
  if (view.rows != p.k || view.columns != p.n)
    refuse({.rule = Rule::matrix_size,
            .argument = "b",
            .expected = nb::make_tuple(p.k, p.n),
            .got = nb::make_tuple(view.rows, view.columns)});
  p.b = view.matrix;
}

}  // namespace

void multiply_pairs(nb::sequence a, nb::sequence b, const std::vector<size_t>& columns, nb::handle c,
                    std::optional<nb::sequence> bias, std::optional<std::vector<size_t>> slices) {
  const View out = view_tensor(c, "c");
  float* to = reinterpret_cast<float*>(out.data);
  size_t used = 0;
  std::vector<Product> products;
  for (size_t i = 0; i < columns.size(); i++) {
    const MatrixView x = view_matrix(nb::object(a[i]), "a");
    Product p{x.rows, x.columns, columns[i], x.matrix, {}, false, to + used, columns[i], nullptr, 0};
    set_right_side(p, nb::object(b[i]));
    if (slices) {
      p.slice = slices->at(i);
      if (p.slice == 0 || p.k % p.slice) throw nb::value_error("slices must divide the columns of a");
    }
    if (bias) p.bias = floats(view_tensor(nb::object((*bias)[i]), "bias"), p.n, "bias");
    used += p.m * p.n;
    if (out.dtype != DType::f32 || out.count < used) refuse_floats("c", used, out.count);
    products.push_back(p);
  }
  nb::gil_scoped_release release;
  for (const Product& p : products) multiply(p);
}

void pack_matrix(nb::handle b, nb::handle panels) {
  const MatrixView m = view_matrix(b, "b");
  const View out = view_tensor(panels, "panels");
  floats(out, panels_count(m.rows, m.columns), "panels");
  nb::gil_scoped_release release;
  pack_panels(m.matrix, m.rows, m.columns, reinterpret_cast<float*>(out.data));
}

}  // namespace unisono
