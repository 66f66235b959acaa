// The Python module unisono._yardstick: the limit that benchmark rows are measured against. A module and a library of
// its own, so that unisono._core holds nothing but the product.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "yardstick/yardstick.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono {
namespace {

Verb verb_of(const std::string& name) {
  for (int i = 0; i < static_cast<int>(Verb::count_); i++)
    if (name == verb_name(static_cast<Verb>(i))) return static_cast<Verb>(i);
  throw std::invalid_argument("no such verb: " + name);
}

}  // namespace
}  // namespace unisono

NB_MODULE(_yardstick, m) {
  using unisono::Yardstick;
  nb::class_<Yardstick>(m, "Yardstick")
      .def(
          "__init__",
          [](Yardstick* self, const std::string& verb, size_t bytes, const std::vector<double>& splits, int ranks) {
            nb::gil_scoped_release release;
            new (self) Yardstick(unisono::verb_of(verb), bytes, splits, ranks);
          },
          "verb"_a, "bytes"_a, "splits"_a, "ranks"_a)
      .def("round", &Yardstick::round, "calls"_a = 1, "warmup"_a = 1, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("variant", &Yardstick::variant)
      .def_prop_ro("threads", &Yardstick::threads);
}
