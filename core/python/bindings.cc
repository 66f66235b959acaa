// The Python module unisono._core: the table of what it offers, and the functions that need no file of their own. This
// folder is the only place that knows both Python's objects and the core.
#include <nanobind/nanobind.h>
#include <nanobind/stl/chrono.h>

#include <chrono>

#include "base/faults.h"
#include "kernels/gemm.h"
#include "kernels/reduce.h"
#include "memory/dump.h"
#include "memory/limits.h"
#include "python/communicator.h"
#include "python/eager.h"
#include "python/gradients.h"
#include "python/handles.h"
#include "python/listener.h"
#include "python/memory.h"
#include "python/products.h"
#include "python/sites.h"
#include "python/splits.h"
#include "python/survivors.h"

using namespace nb::literals;

namespace unisono {
namespace {

nb::object empty(const std::vector<int64_t>& shape, int code, int bits) {
  Failure failure;
  nb::object tensor =
      make_tensor(shape.data(), shape.size(), {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1}, failure);
  if (!tensor.is_valid()) raise(failure, "", -1);
  return tensor;
}

nb::object empty_like(nb::handle other) {
  Failure failure;
  nb::object tensor = make_like(other, {}, failure);
  if (!tensor.is_valid()) raise(failure, "", -1);
  return tensor;
}

// Combines tensors of this process, one per rank in the order of ranks, by the number rule of reduce.h; `op` is a
// number that read_op gave.
void combine(nb::handle output, nb::list inputs, int op, const std::vector<double>& factors) {
  const View out = view_tensor(output, "output");
  if (op < 0 || op >= static_cast<int>(RedOp::none)) throw nb::value_error("op must be a number that read_op gave");
  Call call;
  set_reduction(call, output, out.dtype, {static_cast<RedOp>(op), 1.0});
  std::vector<const void*> sources;
  for (nb::handle input : inputs) {
    View in = view_tensor(input, "inputs");
    if (in.dtype != out.dtype || in.count != out.count)
      refuse({.rule = Rule::like, .argument = "inputs", .other = "output"});
    sources.push_back(in.data);
  }
  if (sources.empty() || factors.size() != sources.size())
    refuse({.rule = Rule::inputs_and_factors, .argument = "inputs", .other = "factors"});
  void* to = out.data;
  nb::gil_scoped_release release;
  reduce({call.dtype, call.op, out.count, sources.data(), sources.size(), &to, 1, factors.data(), false});
}

template <class Enum>
nb::dict numbers_of(const char* (*name)(Enum)) {
  nb::dict dict;
  for (int i = 0; i < static_cast<int>(Enum::count_); i++) dict[name(static_cast<Enum>(i))] = i;
  return dict;
}

// Calls a verb for torch, by its name: now, with the time limit of torch's options, or `timeout_s` if they have none.
// False: they ask for a call in the background. One step here, since the parts take longer in Python than the call.
bool call_now(nb::handle communicator, nb::handle verb, nb::tuple arguments, nb::handle options, nb::handle timeout_s) {
  static PyObject *async_op = PyUnicode_InternFromString("asyncOp"), *timeout = PyUnicode_InternFromString("timeout");
  if (nb::object(options.attr(nb::handle(async_op))).ptr() == Py_True) return false;
  constexpr std::chrono::microseconds unset = std::chrono::milliseconds(-1);  // torch's word for it
  const auto limit = nb::cast<std::chrono::microseconds>(options.attr(nb::handle(timeout)));
  nb::object seconds =
      limit == unset ? nb::borrow(timeout_s) : nb::object(nb::float_(std::chrono::duration<double>(limit).count()));
  constexpr size_t most = 5;  // arguments of a verb, without the last two
  PyObject* all[1 + most + 2] = {communicator.ptr()};
  size_t count = 1;
  if (nb::len(arguments) > most) throw nb::value_error("too many arguments for a verb");
  for (nb::handle argument : arguments) all[count++] = argument.ptr();
  all[count++] = seconds.ptr();
  all[count++] = Py_False;
  if (!nb::steal(PyObject_VectorcallMethod(verb.ptr(), all, count, nullptr)).is_valid()) nb::raise_python_error();
  return true;
}

// A parameter that takes any object: None too, so that the verb refuses it by name.
auto operator""_any(const char* name, size_t) {
  return nb::arg(name).none();
}

void add_functions(nb::module_& m) {
  m.def(
      "setup",
      [](nb::handle tensor, nb::handle reduce_op, nb::handle handle, nb::handle finished, nb::object make_error,
         nb::object make_argument_error, nb::object warn, std::vector<std::string> library_folders,
         const std::string& trace_folder, int trace_signal, uint64_t heap_max, int64_t spin_us,
         uint64_t fork_copy_max) {
        learn_tensor_type(tensor);
        learn_gradients(tensor);
        learn_reduce_ops(reduce_op);
        learn_torch();
        learn_handles(handle, finished);
        hooks = {std::move(make_error), std::move(make_argument_error), std::move(warn)};
        set_library_folders(std::move(library_folders));
        set_trace_folder(trace_folder);
        if (trace_signal && !dump_on_signal(trace_signal)) throw nb::value_error("UNISONO_TRACE_SIGNAL: not possible");
        if (heap_max) set_heap_capacity(heap_max);
        if (spin_us >= 0) spin_ns = spin_us * 1000;
        set_fork_copy_max(fork_copy_max);
      },
      nb::kw_only(), "tensor"_a, "reduce_op"_a, "handle"_a, "finished"_a, "make_error"_a, "make_argument_error"_a,
      "warn"_a, "library_folders"_a, "trace_folder"_a, "trace_signal"_a, "heap_max"_a, "spin_us"_a, "fork_copy_max"_a);
  m.def("record_calls", [](bool on) { records_calls.store(on, std::memory_order_relaxed); }, "on"_a);
  m.def(
      "read_op",
      [](nb::handle op, nb::handle factor) {
        OpAndFactor reduction = read_op(op, factor);
        return nb::make_tuple(static_cast<int>(reduction.op), reduction.factor);
      },
      "op"_any, "factor"_any = nb::none());
  m.def("cut_rows", &cut_rows, "splits"_any, "rows"_a, "row"_a, "size"_a);
  m.def("cut_tensor", &cut_tensor, "splits"_any, "tensor"_any, "rank"_a, "size"_a, "gathers"_a);
  m.def("cut_exchange", &cut_exchange, "shape"_any, "tensor"_any, "output_splits"_any, "input_splits"_any, "size"_a);
  m.def("cut_by_matrix", &cut_by_matrix, "output"_any, "input"_any, "matrix"_any, "rank"_a, "size"_a);
  m.def("are_exchanged", &are_exchanged, "shapes"_any, "tensors"_any, "size"_a);
  m.def("is_part", &is_part, "whole"_any, "part"_any, "counts"_any, "rank"_a, "size"_a);
  m.def("cut_matrix", &cut_matrix, "matrix"_any, "row"_a, "rank"_a, "size"_a);
  m.def("is_exchange", &is_exchange, "output"_any, "input"_any, "received"_any, "sent"_any, "rank"_a, "size"_a);
  m.def("empty", &unisono::empty);
  m.def("empty_like", &unisono::empty_like);
  m.def("is_plain", &is_plain);
  m.def("eager_transport", &eager_transport, "group"_any, "tensor"_any);
  m.def("eager_transport_of_all", &eager_transport_of_all, "group"_any, "tensors"_any);
  m.def("eager_partner", &eager_partner, "group"_any, "tensor"_any, "rank"_any);
  m.def("is_reachable", [](uintptr_t p) { return is_reachable(reinterpret_cast<const void*>(p), 1); });
  m.def("combine", &combine);
  m.def("memory_available", &memory_available);
  m.def("processors_allowed", &processors_allowed);
  m.def(
      "read_record",
      [](int fd, const std::string& why, size_t most) { return record_of_file(fd, why, most ? most : SIZE_MAX); },
      "fd"_a, "why"_a, "most"_a);
  m.def("call_site", [] {
    const char* site = find_call_site();
    return nb::str(site ? site : "");
  });
  m.def("isa", [] { return isa_name(current_isa()); });
  m.def("is_intel", is_intel);
  m.def("set_isa", [](const std::string& name) {
    for (Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512_bf16})
      if (name == isa_name(isa)) return set_isa(isa);
    return false;
  });
  m.def("multiply", &multiply_pairs, "a"_a, "b"_a, "columns"_a, "c"_a, "bias"_a.none(), "slices"_a.none() = nb::none());
  m.def("pack_panels", &pack_matrix);
  m.def("panel_columns", &panel_columns);
  m.attr("OPS") = numbers_of<RedOp>(&redop_name);
  m.attr("RULES") = numbers_of<Rule>(&rule_name);
  m.attr("LAYOUT") = kLayoutVersion;
}

void add_verbs(nb::class_<Communicator>& communicator) {
  communicator.def("barrier", &Communicator::barrier, "timeout_s"_any, "async_op"_a)
      .def("all_reduce", &Communicator::all_reduce, "tensor"_any, "out"_any, "op"_any, "factor"_any, "timeout_s"_any,
           "async_op"_a)
      .def("reduce", &Communicator::reduce, "tensor"_any, "root"_any, "out"_any, "op"_any, "factor"_any,
           "timeout_s"_any, "async_op"_a)
      .def("broadcast", &Communicator::broadcast, "tensor"_any, "root"_any, "out"_any, "timeout_s"_any, "async_op"_a)
      .def("all_gather", &Communicator::all_gather, "output"_any, "input"_any, "counts"_any, "timeout_s"_any,
           "async_op"_a)
      .def("reduce_scatter", &Communicator::reduce_scatter, "output"_any, "input"_any, "counts"_any, "op"_any,
           "factor"_any, "timeout_s"_any, "async_op"_a)
      .def("gather", &Communicator::gather, "output"_any, "input"_any, "root"_any, "counts"_any, "timeout_s"_any,
           "async_op"_a)
      .def("scatter", &Communicator::scatter, "output"_any, "input"_any, "root"_any, "counts"_any, "timeout_s"_any,
           "async_op"_a)
      .def("all_to_all", &Communicator::all_to_all, "output"_any, "input"_any, "output_counts"_any, "input_counts"_any,
           "timeout_s"_any, "async_op"_a)
      .def("matmul_reduce", &Communicator::matmul_reduce, "products"_any, "output"_any, "op"_any, "scale"_a,
           "residual"_any, "counts"_any, "hash"_a, "words"_any, "timeout_s"_any)
      .def("send", &Communicator::send, "tensor"_any, "dst"_any, "tag"_any, "timeout_s"_any, "async_op"_a)
      .def("recv", &Communicator::recv, "tensor"_any, "src"_any, "tag"_any, "timeout_s"_any, "async_op"_a)
      .def("call_now", &call_now, "verb"_any, "arguments"_a, "options"_any, "timeout_s"_any)
      .def("new_like", &Communicator::new_like, "tensor"_any)
      .def("new_rows", &Communicator::new_rows, "tensor"_any, "rows"_any);
}

void add_classes(nb::module_& m) {
  nb::class_<Pending>(m, "Pending")
      .def("done", &Pending::done)
      .def("wait", &Pending::wait)
      .def("withdraw", &Pending::withdraw)
      .def("error", &Pending::error)
      .def("on_done", &Pending::on_done)
      .def_prop_ro("source", &Pending::source);

  nb::class_<Communicator> communicator(m, "Communicator");
  communicator.def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def_prop_ro("name", &Communicator::name)
      .def_prop_ro("staged_bytes", &Communicator::staged_bytes)
      .def_prop_ro("single_copy_bytes", &Communicator::single_copy_bytes)
      .def_prop_ro("calls", &Communicator::calls)
      .def_prop_ro("id", &Communicator::id)
      .def_prop_ro("cache_bytes", &Communicator::cache_bytes)
      .def_prop_ro("by_tree", [](const Communicator&) { return true; })
      .def_prop_ro("pids", &Communicator::pids)
      .def("rename", &Communicator::rename)
      .def(nb::init<int, int>(), "rank"_a, "size"_a)
      .def("await_words", &Communicator::await_words)
      .def("trouble", &Communicator::trouble)
      .def("has_message", &Communicator::has_message);
  add_verbs(communicator);
  communicator.def("close", &Communicator::close)
      .def("abort", &Communicator::abort)
      .def("make_block", &Communicator::make_block)
      .def("drop_block", &Communicator::drop_block, "offset"_a, "rank"_a, "reason"_any)
      .def("split", &Communicator::split)
      .def("agree", &Communicator::agree)
      .def("adopt", &Communicator::adopt)
      .def("estate", &Communicator::estate)
      .def("offset_of", &Communicator::offset_of)
      .def("peer_bytes", &Communicator::peer_bytes);

  nb::class_<KeptBinding>(m, "Kept")
      .def(nb::init<const std::string&, nb::handle>(), "name"_a, "tensor"_any)
      .def("begin", &KeptBinding::begin)
      .def("end", &KeptBinding::end)
      .def("leave", &KeptBinding::leave)
      .def("drop", &KeptBinding::drop);

  nb::class_<Estate>(m, "Estate")
      .def("is_final", &Estate::is_final)
      .def_prop_ro("pid", &Estate::pid)
      .def("read", &Estate::read);

  nb::class_<ListenerBinding>(m, "Listener")
      .def(nb::init<>())
      .def_prop_ro("name", &ListenerBinding::name)
      .def("join", &ListenerBinding::join, "rank"_a, "size"_a, "group"_a, "nonce"_a, "id"_a, "timeout_s"_a, "names"_a,
           "limit_s"_a = nb::none());
}

}  // namespace
}  // namespace unisono

NB_MODULE(_core, m) {
  unisono::python_interrupted = unisono::check_python_signals;
  unisono::program_threads = unisono::count_python_threads;
  unisono::warn = unisono::warn_program;
  unisono::add_functions(m);
  unisono::add_memory(m);
  unisono::add_classes(m);
#if defined(UNISONO_FAULTS)  // for tests only
  m.def("inject_fault", &unisono::inject_fault, "point"_a, "action"_a, "nth"_a = 1);
  m.def("switch_off", &unisono::switch_off, "defence"_a);
#endif
}
