// The Python module unisono._core. With communicator.h and pending.h the only code that knows both Python's objects and
// the core. Numbers of enums come from the tables at the end.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "kernels/gemm.h"
#include "kernels/reduce.h"
#include "python/communicator.h"
#include "yardstick/yardstick.h"

using namespace nb::literals;

namespace unisono {
namespace {

class Door {
 public:
  Door() {
    Failure failure;
    heap_ = process_heap(failure);
    if (heap_) door_ = Listener::open(failure);
    if (!door_) raise(failure, "", -1);
  }
  const std::string& name() const { return door_->name(); }
  std::unique_ptr<Communicator> join(int rank, int size, const std::string& group, nb::bytes nonce, uint64_t id,
                                     double timeout_s, const std::vector<std::string>& names,
                                     std::optional<double> limit_s) {
    Token token;
    if (nonce.size() != sizeof token || names.size() != static_cast<size_t>(size) || size > kMostRanks)
      throw nb::value_error(
          ("a group has 1 to " + std::to_string(kMostRanks) + " ranks, a name for each and a nonce of 16 bytes")
              .c_str());
    std::memcpy(&token, nonce.c_str(), sizeof token);
    Failure failure;
    GroupFacts facts{rank, size, group, id, nanoseconds(timeout_s)};
    std::shared_ptr<Engine> engine;
    {
      nb::gil_scoped_release release;
      engine = Engine::open(door_->join(heap_, facts, token, names, nanoseconds(limit_s.value_or(timeout_s)), failure));
    }
    if (!engine) raise(failure, group, rank);
    return std::make_unique<Communicator>(std::move(engine));
  }

 private:
  std::shared_ptr<Heap> heap_;
  std::unique_ptr<Listener> door_;
};

nb::object empty(const std::vector<int64_t>& shape, int code, int bits) {
  Failure failure;
  nb::object tensor =
      make_tensor(shape.data(), shape.size(), {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1}, failure);
  if (!tensor.is_valid()) raise(failure, "", -1);
  return tensor;
}

nb::object empty_like(nb::handle other) {
  Failure failure;
  nb::object tensor = make_twin(other, failure).made;
  if (!tensor.is_valid()) raise(failure, "", -1);
  return tensor;
}

// Combines tensors of this process, one per rank and in rank order, by the number rule of reduce.h.
void combine(nb::handle output, nb::list inputs, int op, const std::vector<double>& factors) {
  View out = view_tensor(output, "output");
  Call call;
  set_reduction(call, output, out.dtype, op, 1.0);
  std::vector<const void*> sources;
  for (nb::handle input : inputs) {
    View in = view_tensor(input, "inputs");
    if (in.dtype != out.dtype || in.count != out.count)
      throw nb::value_error("argument 'inputs' must have the dtype and the number of elements of 'output'");
    sources.push_back(in.data);
  }
  if (sources.empty() || factors.size() != sources.size())
    throw nb::value_error("argument 'inputs' must have at least one tensor, and 'factors' a number for each");
  void* to = out.data;
  nb::gil_scoped_release release;
  reduce({call.dtype, call.op, out.count, sources.data(), sources.size(), &to, 1, factors.data(), false});
}

nb::dict heap_usage() {
  Failure failure;
  auto heap = process_heap(failure);
  if (!heap) raise(failure, "", -1);
  Heap::Usage u = heap->usage();
  nb::dict d;
  d["in_use"] = u.in_use;
  d["reserved"] = u.reserved;
  d["quarantined"] = u.quarantined;
  d["capacity"] = u.capacity;
  return d;
}

// Products of pairs of matrices, one behind the other in c. A three-dimensional b is what pack_panels made.
void multiply_pairs(nb::sequence a, nb::sequence b, const std::vector<size_t>& columns, nb::handle c,
                    std::optional<nb::sequence> bias) {
  View out = view_tensor(c, "c");
  float* to = reinterpret_cast<float*>(out.data);
  size_t left = out.count;
  std::vector<Product> products;
  for (size_t i = 0; i < columns.size(); i++) {
    MatrixView x = view_matrix(nb::object(a[i]), "a");
    Product p{x.rows, x.columns, columns[i], x.matrix, {}, false, to, columns[i], nullptr};
    nb::object w = b[i];
    if (nb::cast<int>(w.attr("ndim")) == 3) {
      View panels = view_tensor(w, "b");
      const size_t width = panel_columns(), count = (p.n + width - 1) / width;
      if (panels.dtype != DType::f32 || panels.count != count * width * p.k)
        throw nb::value_error("argument 'b' holds panels of another matrix or another processor");
      p.b = {panels.data, DType::f32, 0, 1};
      p.panels = true;
    } else {
      MatrixView y = view_matrix(w, "b");
      if (y.rows != p.k || y.columns != p.n) throw nb::value_error("arguments 'a' and 'b' do not fit each other");
      p.b = y.matrix;
    }
    if (bias) {
      View row = view_tensor(nb::object((*bias)[i]), "bias");
      if (row.dtype != DType::f32 || row.count != p.n) throw nb::value_error("argument 'bias' must be float32 of n");
      p.bias = reinterpret_cast<const float*>(row.data);
    }
    if (out.dtype != DType::f32 || left < p.m * p.n) throw nb::value_error("argument 'c' must be float32 of all m * n");
    left -= p.m * p.n;
    to += p.m * p.n;
    products.push_back(p);
  }
  nb::gil_scoped_release release;
  for (const Product& p : products) multiply(p);
}

void pack_into(nb::handle b, nb::handle panels) {
  MatrixView m = view_matrix(b, "b");
  View out = view_tensor(panels, "panels");
  const size_t width = panel_columns(), count = (m.columns + width - 1) / width;
  if (out.dtype != DType::f32 || out.count != count * width * m.rows)
    throw nb::value_error("argument 'panels' must be float32 of the panels' size");
  nb::gil_scoped_release release;
  pack_panels(m.matrix, m.rows, m.columns, reinterpret_cast<float*>(out.data));
}

template <class Enum>
nb::dict numbers_of(const char* (*name)(Enum)) {
  nb::dict dict;
  for (int i = 0; i < static_cast<int>(Enum::count_); i++) dict[name(static_cast<Enum>(i))] = i;
  return dict;
}

}  // namespace
}  // namespace unisono

NB_MODULE(_core, m) {
  using namespace unisono;
  python_interrupted = check_python_signals;

  m.def("setup", [](nb::handle tensor_type, nb::object make_error, nb::object call_site, uint64_t heap_max,
                    int64_t spin_us, uint64_t fork_copy_max) {
    learn_tensor_type(tensor_type);
    hooks = {std::move(make_error), std::move(call_site)};
    if (heap_max) set_heap_capacity(heap_max);
    if (spin_us >= 0) spin_ns = spin_us * 1000;
    set_fork_copy_max(fork_copy_max);
  });
  m.def("empty", &unisono::empty);
  m.def("empty_like", &unisono::empty_like);
  m.def("is_shared", [](nb::handle t) {
    View view = view_tensor(t, "tensor");
    return is_reachable(view.data, view.bytes());
  });
  m.def("in_region", [](uintptr_t p) { return in_region(reinterpret_cast<const void*>(p)); });
  m.def("combine", &combine);
  m.def("heap_usage", &heap_usage);
  m.def("memory_available", &memory_available);
  m.def("isa", [] { return isa_name(current_isa()); });
  m.def("set_isa", [](const std::string& name) {
    for (Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512})
      if (name == isa_name(isa)) return set_isa(isa);
    return false;
  });
  m.def("bury", &Pending::bury);
  m.def("multiply", &multiply_pairs, "a"_a, "b"_a, "columns"_a, "c"_a, "bias"_a.none());
  m.def("pack_panels", &pack_into);
  m.def("panel_columns", &panel_columns);
  m.attr("VERBS") = numbers_of<Verb>(&verb_name);
  m.attr("OPS") = numbers_of<RedOp>(&redop_name);
  m.attr("DTYPES") = numbers_of<DType>(&dtype_name);
  m.attr("LAYOUT") = kLayoutVersion;
  m.attr("INLINE_BYTES") = kInlineBytes;
  m.attr("SLOT_BYTES") = kSlotBytes;
  m.attr("STAGE_BYTES") = kPieceBytes;

  nb::class_<Pending>(m, "Pending")
      .def("done", &Pending::done)
      .def("wait", &Pending::wait)
      .def("error", &Pending::error)
      .def("on_done", &Pending::on_done)
      .def_prop_ro("source", &Pending::source)
      .def_prop_ro("seq", &Pending::seq);

  nb::class_<Communicator>(m, "Communicator")
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def_prop_ro("name", &Communicator::name)
      .def_prop_ro("staged_bytes", &Communicator::staged_bytes)
      .def_prop_ro("calls", &Communicator::calls)
      .def_prop_ro("crowded", &Communicator::crowded)
      .def_prop_ro("id", &Communicator::id)
      .def_prop_ro("cache_bytes", &Communicator::cache_bytes)
      .def_prop_ro("pids", &Communicator::pids)
      .def("rename", &Communicator::rename)
      .def("barrier", &Communicator::barrier)
      .def("all_reduce", &Communicator::all_reduce, "tensor"_a, "out"_a.none(), "op"_a, "factor"_a, "timeout_s"_a,
           "async"_a)
      .def("all_reduced", &Communicator::all_reduced)
      .def("reduce", &Communicator::reduce, "tensor"_a, "root"_a, "out"_a.none(), "op"_a, "factor"_a, "timeout_s"_a,
           "async"_a)
      .def("broadcast", &Communicator::broadcast)
      .def("all_gather", &Communicator::all_gather, "output"_a, "input"_a, "counts"_a.none(), "timeout_s"_a, "async"_a)
      .def("reduce_scatter", &Communicator::reduce_scatter, "output"_a, "input"_a, "counts"_a.none(), "op"_a,
           "factor"_a, "timeout_s"_a, "async"_a)
      .def("gather", &Communicator::gather, "output"_a.none(), "input"_a, "root"_a, "counts"_a.none(), "timeout_s"_a,
           "async"_a)
      .def("scatter", &Communicator::scatter, "output"_a, "input"_a.none(), "root"_a, "counts"_a.none(), "timeout_s"_a,
           "async"_a)
      .def("all_to_all", &Communicator::all_to_all, "output"_a, "input"_a, "output_counts"_a.none(),
           "input_counts"_a.none(), "timeout_s"_a, "async"_a)
      .def("matmul_reduce", &Communicator::matmul_reduce, "products"_a, "output"_a, "op"_a, "scale"_a,
           "residual"_a.none(), "counts"_a.none(), "hash"_a, "words"_a, "timeout_s"_a)
      .def("send", &Communicator::send)
      .def("recv", &Communicator::recv, "tensor"_a, "src"_a.none(), "tag"_a, "timeout_s"_a, "async"_a)
      .def("close", &Communicator::close)
      .def("abort", &Communicator::abort)
      .def("make_block", &Communicator::make_block)
      .def("drop_block", &Communicator::drop_block, "offset"_a, "rank"_a, "reason"_a.none())
      .def("split", &Communicator::split)
      .def("offset_of", &Communicator::offset_of)
      .def("peer_bytes", &Communicator::peer_bytes);

  nb::class_<Door>(m, "Door")
      .def(nb::init<>())
      .def_prop_ro("name", &Door::name)
      .def("join", &Door::join, "rank"_a, "size"_a, "group"_a, "nonce"_a, "id"_a, "timeout_s"_a, "names"_a,
           "limit_s"_a = nb::none());

  nb::class_<Yardstick>(m, "Yardstick")
      .def("__init__",
           [](Yardstick* self, int verb, size_t bytes, const std::vector<double>& splits, int ranks) {
             nb::gil_scoped_release release;
             new (self) Yardstick(static_cast<Verb>(verb), bytes, splits, ranks);
           })
      .def("round", &Yardstick::round, "calls"_a = 1, "warmup"_a = 1, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("variant", &Yardstick::variant)
      .def_prop_ro("threads", &Yardstick::threads);
}
