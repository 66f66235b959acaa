// See memory.h.
#include "python/memory.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <bit>
#include <utility>

#include "base/tuning.h"
#include "memory/heap.h"
#include "memory/sharing.h"
#include "python/errors.h"
#include "verbs/trial.h"

namespace nb = nanobind;

namespace unisono {
namespace {

std::shared_ptr<Heap> heap_or_raise() {
  Failure failure;
  auto heap = process_heap(failure);
  if (!heap) raise(failure, "", -1);
  return heap;
}

nb::dict heap_usage() {
  const Heap::Usage u = heap_or_raise()->usage();
  nb::dict d;
  d["in_use"] = u.in_use;
  d["reserved"] = u.reserved;
  d["quarantined"] = u.quarantined;
  d["resident"] = u.resident;
  d["capacity"] = u.capacity;
  return d;
}

size_t trim() {
  auto heap = heap_or_raise();
  nb::gil_scoped_release release;
  return heap->trim_now();
}

nb::dict describe_tuning(Tuning tuning) {
  nb::dict d;
  d["machine"] = machine_words();
  d["file"] = tuning_file();
  d["known"] = tuning.is_known();
  auto bytes = [](uint8_t log) { return log == Tuning::kNever ? 0 : size_t{1} << log; };
  d["single_copy_from"] = bytes(tuning.copies.from);
  d["single_copy_below"] = bytes(tuning.copies.below);
  d["single_reduce_from"] = bytes(tuning.reductions.from);
  d["single_reduce_below"] = bytes(tuning.reductions.below);
  d["piece_bytes"] = size_t{1} << tuning.piece;
  d["ring_bytes"] = size_t{1} << tuning.ring;
  return d;
}

// What ordinary tensors go by; `measure`: after a new measurement, which is kept, with its times.
nb::dict tuning(bool measure) {
  if (!measure) return describe_tuning(current_tuning());
  Trial trial;
  {
    nb::gil_scoped_release release;
    trial = measure_tuning();
    if (trial.is_complete) keep_tuning(trial.tuning);
  }
  nb::dict d = describe_tuning(current_tuning());
  nb::list times;
  for (const Trial::Time& t : trial.times) times.append(nb::make_tuple(t.way, t.bytes, t.us));
  d["times"] = times;
  d["complete"] = trial.is_complete;
  return d;
}

// For this process and for as long as it lives. Sizes of what is read where it is: from 0: never; below 0: no end.
void choose_tuning(std::pair<size_t, size_t> copies, std::pair<size_t, size_t> reductions, size_t piece_bytes,
                   size_t ring_bytes) {
  auto log = [](size_t n) { return n ? static_cast<uint8_t>(std::bit_width(n) - 1) : Tuning::kNever; };
  auto span = [&](const auto& sizes) { return Tuning::Span{log(sizes.first), log(sizes.second)}; };
  const Tuning wanted{span(copies), span(reductions), log(piece_bytes), log(ring_bytes), true};
  if (Tuning::of(wanted.word()) != wanted) throw nb::value_error("no such tuning: sizes are powers of two");
  set_tuning(wanted);
}

void replace_torch_allocator(const char* library) {
  Failure failure;
  if (!replace_allocator(library, failure)) raise(failure, "", -1);
}

}  // namespace

void add_memory(nb::module_& m) {
  m.def("heap_usage", &heap_usage);
  m.def("trim", &trim);
  m.def("tuning", &tuning, nb::arg("measure") = false);
  m.def("choose_tuning", &choose_tuning);
  m.def("replace_allocator", &replace_torch_allocator);
  m.def("share_from", &share_from);
  m.def("share_refusals", &share_refusals);
}

}  // namespace unisono
