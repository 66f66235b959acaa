// The Python module unisono._core: the only file that knows both Python's objects and the core.
//
// Every verb has the same steps: collect pointers and counts from the tensors, release the GIL, run, and turn a Failure
// into an exception. Numbers of enums come from the tables at the end. Errors in arguments are raised before anything
// is published, so the group stays usable.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "arguments.h"
#include "finish.h"
#include "gemm.h"
#include "join.h"
#include "reduce.h"
#include "tensors.h"
#include "yardstick.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace unisono {
namespace {

struct Hooks {
  nb::object make_error;  // (code, verb, seq, group, rank, peers, text, lines, first_cause) -> exception
  nb::object call_site;   // () -> "train.py:88"
};
Hooks& hooks = *new Hooks;  // never destroyed: threads may outlive the interpreter's objects

bool check_python_signals() {
  PyGILState_STATE state = PyGILState_Ensure();
  bool raised = PyErr_CheckSignals() != 0;  // leaves the exception set in this thread
  PyGILState_Release(state);
  return raised;
}

nb::object error_of(const Failure& f, const std::string& group, int rank) {
  return hooks.make_error(static_cast<int>(f.code), verb_name(f.verb), f.seq, group, rank, nb::cast(f.peers), f.text,
                          nb::cast(f.lines), f.first_cause);
}

[[noreturn]] void raise(const Failure& f, const std::string& group, int rank) {
  if (PyErr_Occurred()) nb::raise_python_error();  // a signal handler raised
  nb::object error = error_of(f, group, rank);
  PyErr_SetObject(reinterpret_cast<PyObject*>(error.type().ptr()), error.ptr());
  nb::raise_python_error();
}

int64_t nanoseconds(double seconds) {
  return static_cast<int64_t>(std::min(seconds, 9e9) * 1e9);
}

// An asynchronous call: the ticket, and the Python objects that must live until it is done.
class Pending {
 public:
  Pending(std::shared_ptr<Engine> engine, std::shared_ptr<Ticket> ticket, nb::list keep)
      : engine_(std::move(engine)), ticket_(std::move(ticket)), keep_(std::move(keep)) {}
  ~Pending() {
    // Dropped without waiting: the tensors stay until the call is over.
    if (!ticket_->done.load(std::memory_order_acquire)) orphans().emplace_back(ticket_, keep_.release().ptr());
    nb::gil_scoped_release release;  // as in ~Communicator
    engine_.reset();
  }
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;

  // With the GIL held: gives back what finished calls without a handle kept alive.
  static void bury() {
    auto& list = orphans();
    for (size_t i = 0; i < list.size();) {
      if (!list[i].first->done.load(std::memory_order_acquire)) {
        i++;
        continue;
      }
      PyObject* kept = list[i].second;
      list[i] = std::move(list.back());
      list.pop_back();
      Py_DECREF(kept);
    }
  }

  bool done() const { return ticket_->done.load(std::memory_order_acquire); }
  bool wait(double timeout_s) {
    bool over, interrupted = false;
    {
      nb::gil_scoped_release release;
      over = engine_->wait(*ticket_, nanoseconds(timeout_s), true, interrupted);
    }
    if (PyErr_Occurred()) nb::raise_python_error();  // a signal handler raised while waiting
    if (over) keep_.clear();
    return over;
  }
  nb::object error() const {
    if (!done() || ticket_->code == Code::ok) return nb::none();
    return error_of(ticket_->call.failure, engine_->group().facts().name, engine_->group().rank());
  }
  // Calls `callback` once the call is over, in whatever thread ends it.
  void on_done(nb::object callback) {
    PyObject* held = callback.release().ptr();
    nb::gil_scoped_release release;
    engine_->when_done(*ticket_, [held] {
      nb::gil_scoped_acquire gil;
      nb::object callback = nb::steal(held);
      try {
        callback();
      } catch (nb::python_error& error) {
        error.discard_as_unraisable("a callback of unisono");
      }
    });
  }
  int source() const { return ticket_->message ? ticket_->message->source : -1; }
  uint64_t seq() const { return ticket_->call.seq; }

 private:
  static std::vector<std::pair<std::shared_ptr<Ticket>, PyObject*>>& orphans() {
    static auto& list = *new std::vector<std::pair<std::shared_ptr<Ticket>, PyObject*>>;
    return list;
  }
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Ticket> ticket_;
  nb::list keep_;
};

class Communicator {
 public:
  explicit Communicator(std::unique_ptr<Engine> engine)
      : engine_(engine.release(), Engine::drop),
        size_(engine_->group().size()),
        rank_(engine_->group().rank()),
        arguments_(rank_, size_) {}

  // The last holder of an engine joins its thread; that must not happen with the GIL held.
  ~Communicator() {
    nb::gil_scoped_release release;
    engine_.reset();
  }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  Group& group() { return engine_->group(); }
  const std::string& name() { return group().facts().name; }

  void rename(const std::string& name) { group().rename(name); }

  nb::object barrier(double timeout_s, bool async) {
    Call call;
    call.verb = Verb::barrier;
    if (!async) return now(call, {}, timeout_s);
    return finish(call, {}, {}, nb::list(), timeout_s, async);
  }

  nb::object all_reduce(nb::handle tensor, nb::handle out, int op, double factor, double timeout_s, bool async) {
    Call call;
    View in = view_tensor(tensor, "tensor");
    call.verb = Verb::all_reduce;
    set_reduction(call, tensor, in.dtype, op, factor);
    call.count = in.count;
    call.in = in.data;
    call.out = out.is_none() ? in.data : matching_output(out, in);
    if (!async) return now(call, tensor, timeout_s);
    return finish(call, {}, {}, keep(tensor, out), timeout_s, async);
  }

  // The result in a new heap tensor, or None if the tensor has to be made contiguous or resolved first.
  nb::object all_reduced(nb::handle tensor, int op) {
    Call call;
    Twin twin = make_twin(tensor, call.failure);
    if (!twin.made.is_valid()) raise(call.failure, name(), rank_);
    if (twin.made.is_none()) return twin.made;
    call.verb = Verb::all_reduce;
    set_reduction(call, tensor, twin.view.dtype, op, 1.0);
    call.count = twin.view.count;
    call.in = twin.view.data;
    call.out = twin.at;
    now(call, tensor, 0);
    return std::move(twin.made);
  }

  nb::object reduce(nb::handle tensor, nb::handle root, nb::handle out, int op, double factor, double timeout_s,
                    bool async) {
    Call call;
    View in = view_tensor(tensor, "tensor");
    call.verb = Verb::reduce;
    set_reduction(call, tensor, in.dtype, op, factor);
    call.root = arguments_.rank_in_group(root, "root");
    call.count = in.count;
    call.in = in.data;
    if (rank_ == call.root) call.out = out.is_none() ? in.data : matching_output(out, in);
    return finish(call, {}, {}, keep(tensor, out), timeout_s, async);
  }

  nb::object broadcast(nb::handle tensor, nb::handle root, double timeout_s, bool async) {
    Call call;
    View in = view_tensor(tensor, "tensor");
    call.verb = Verb::broadcast;
    call.dtype = in.dtype;
    call.root = arguments_.rank_in_group(root, "root");
    call.count = in.count;
    call.in = call.out = in.data;
    return finish(call, {}, {}, keep(tensor), timeout_s, async);
  }

  nb::object all_gather(nb::handle output, nb::handle input, nb::handle counts, double timeout_s, bool async) {
    Call call;
    View in = view_tensor(input, "input");
    Parts out = arguments_.parts(output, "output", counts, "counts");
    arguments_.fits(in, "input", out, "output");
    call.verb = Verb::all_gather;
    call.dtype = in.dtype;
    call.count = in.count;
    call.in = in.data;
    return finish(call, {}, std::move(out.parts), keep(output, input), timeout_s, async);
  }

  nb::object reduce_scatter(nb::handle output, nb::handle input, nb::handle counts, int op, double factor,
                            double timeout_s, bool async) {
    Call call;
    View out = view_tensor(output, "output");
    Parts in = arguments_.parts(input, "input", counts, "counts");
    arguments_.fits(out, "output", in, "input");
    call.verb = Verb::reduce_scatter;
    set_reduction(call, output, out.dtype, op, factor);
    call.count = out.count;
    call.out = out.data;
    return finish(call, std::move(in.parts), {}, keep(output, input), timeout_s, async);
  }

  nb::object gather(nb::handle output, nb::handle input, nb::handle root, nb::handle counts, double timeout_s,
                    bool async) {
    Call call;
    View in = view_tensor(input, "input");
    call.verb = Verb::gather;
    call.dtype = in.dtype;
    call.root = arguments_.rank_in_group(root, "root");
    call.count = in.count;
    call.in = in.data;
    Parts out;
    if (rank_ == call.root) {
      out = arguments_.parts(output, "output", counts, "counts");
      arguments_.fits(in, "input", out, "output");
    }
    return finish(call, {}, std::move(out.parts), keep(output, input), timeout_s, async);
  }

  nb::object scatter(nb::handle output, nb::handle input, nb::handle root, nb::handle counts, double timeout_s,
                     bool async) {
    Call call;
    View out = view_tensor(output, "output");
    call.verb = Verb::scatter;
    call.dtype = out.dtype;
    call.root = arguments_.rank_in_group(root, "root");
    call.count = out.count;
    call.out = out.data;
    Parts in;
    if (rank_ == call.root) {
      in = arguments_.parts(input, "input", counts, "counts");
      arguments_.fits(out, "output", in, "input");
    }
    return finish(call, std::move(in.parts), {}, keep(output, input), timeout_s, async);
  }

  nb::object all_to_all(nb::handle output, nb::handle input, nb::handle output_counts, nb::handle input_counts,
                        double timeout_s, bool async) {
    Call call;
    Parts out = arguments_.parts(output, "output", output_counts, "output_counts");
    Parts in = arguments_.parts(input, "input", input_counts, "input_counts");
    arguments_.fit(out, in);
    call.verb = Verb::all_to_all;
    call.dtype = in.dtype;
    return finish(call, std::move(in.parts), std::move(out.parts), keep(output, input), timeout_s, async);
  }

  // `words` say what differs in a mismatch; everything that must be equal on all ranks and is not checked by number is
  // in `hash`.
  nb::object matmul_reduce(nb::handle products, nb::handle output, int op, double scale, nb::handle residual,
                           std::optional<std::vector<size_t>> counts, uint64_t hash, nb::handle words,
                           double timeout_s) {
    View in = view_tensor(products, "products"), out = view_tensor(output, "output");
    Finish finish;
    finish.out = out.dtype;
    finish.scale = scale;
    finish.out_count = out.count;
    finish.hash = hash;
    View extra = residual.is_none() ? View() : view_tensor(residual, "residual");
    finish.has_residual = !residual.is_none();
    finish.residual = extra.data;
    size_t wanted = in.count;
    if (counts) {
      finish.counts = counts->data();
      finish.spans = counts->size();
      size_t all = 0;
      wanted = 0;
      for (size_t i = 0; i < counts->size(); i++) {
        all += (*counts)[i];
        if (i % static_cast<size_t>(size_) == static_cast<size_t>(rank_)) wanted += (*counts)[i];
      }
      if (all != in.count) throw nb::value_error("argument 'counts' must add up to the number of products");
    }
    if (wanted != out.count || (finish.has_residual && (extra.count != out.count || extra.dtype != out.dtype)))
      throw nb::value_error(
          "arguments 'output' and 'residual' must be of one dtype and have the elements this rank gets");
    if (!finishing_exists(in.dtype, out.dtype, static_cast<RedOp>(op)))
      throw nb::type_error("argument 'output' has no such reduction of 'products'");
    auto hidden = [&](const std::byte* data, size_t n) { return n && !group().heap().holds(data); };
    if (size_ > 1 &&
        (hidden(in.data, in.count) || hidden(out.data, out.count) || (counts && hidden(extra.data, extra.count))))
      throw nb::value_error("arguments 'products', 'output' and 'residual' must be in shared memory");
    Call call;
    call.verb = Verb::matmul_reduce;
    call.dtype = in.dtype;
    call.op = static_cast<RedOp>(op);
    call.count = in.count;
    call.in = in.data;
    call.out = out.data;
    call.finish = &finish;
    call.timeout_ns = call_timeout_ns(timeout_s);
    call.may_interrupt = true;
    call.describe = [&] {
      nb::gil_scoped_acquire gil;
      return nb::cast<std::string>(words()) + "   " + site();
    };
    Code code;
    {
      nb::gil_scoped_release release;
      code = engine_->run(call);
    }
    if (code != Code::ok) raise(call.failure, name(), rank_);
    return nb::none();
  }

  nb::object send(nb::handle tensor, nb::handle peer, nb::handle tag, double timeout_s, bool async) {
    return mail(tensor, correspondent(peer, "dst", async), whole_number(tag, "tag"), timeout_s, async, true);
  }
  nb::object recv(nb::handle tensor, nb::handle peer, nb::handle tag, double timeout_s, bool async) {
    int from = peer.is_none() ? -1 : correspondent(peer, "src", async);
    return mail(tensor, from, whole_number(tag, "tag"), timeout_s, async, false);
  }

  void close(const std::string& reason, double linger_s) {
    nb::gil_scoped_release release;
    engine_->close(reason, nanoseconds(linger_s));
  }
  void abort(const std::string& reason) {
    Failure cause;
    fail(cause, Code::aborted, reason, {rank_});
    cause.seq = group().seq();
    group().abort(cause);
  }
  uint64_t staged_bytes() { return group().staged_bytes(); }
  uint64_t calls() { return group().seq(); }
  bool crowded() { return group().facts().crowded; }
  uint64_t id() { return group().facts().id; }
  size_t cache_bytes() { return group().facts().cache_bytes; }
  std::vector<int> pids() {
    std::vector<int> pids;
    for (int r = 0; r < size_; r++) pids.push_back(group().peer(r).pid);
    return pids;
  }

  // For split: a block in this heap for a group of `size` ranks, by its offset.
  uint64_t make_block(int size) {
    Failure failure;
    if (!group().usable(failure)) raise(failure, name(), rank_);
    sweep_retired_blocks();
    std::byte* block = Group::make_block(group().heap(), size, failure);
    if (!block) raise(failure, name(), rank_);
    return static_cast<uint64_t>(block - group().heap().base());
  }
  void drop_block(uint64_t offset) { group().heap().release(group().heap().base() + offset); }
  std::unique_ptr<Communicator> split(const std::vector<int>& members, const std::vector<size_t>& blocks, int rank,
                                      const std::string& child, uint64_t id, double timeout_s) {
    Failure failure;
    GroupFacts facts{rank,
                     static_cast<int>(members.size()),
                     child,
                     id,
                     nanoseconds(timeout_s),
                     group().facts().crowded,
                     group().facts().cache_bytes};
    auto engine = unisono::split(group(), members, blocks, facts, failure);
    if (!engine) raise(failure, name(), rank_);
    return std::make_unique<Communicator>(std::move(engine));
  }

  // Where a heap tensor of this rank lies, and a tensor of bytes over another rank's heap.
  uint64_t offset_of(nb::handle tensor) {
    View v = view_tensor(tensor, "tensor");
    if (!group().heap().holds(v.data)) throw nb::value_error("argument 'tensor' is not in this process's heap");
    return static_cast<uint64_t>(v.data - group().heap().base());
  }
  nb::object peer_bytes(nb::handle who, uint64_t offset, uint64_t bytes) {
    int rank = arguments_.rank_in_group(who, "rank");
    const Peer& peer = group().peer(rank);
    std::byte* at = group().resolve(Place::at(rank, offset), bytes);
    if (!at) throw nb::value_error("the place lies outside of that rank's heap");
    return wrap_bytes(at, bytes, peer.mapping);
  }

 private:
  template <class... T>
  static nb::list keep(T... objects) {
    nb::list list;
    (list.append(objects), ...);
    return list;
  }

  // The short way of a synchronous call on one tensor: no list, no ticket.
  nb::object now(Call& call, nb::handle tensor, double timeout_s) {
    call.timeout_ns = call_timeout_ns(timeout_s);
    call.may_interrupt = true;
    call.describe = [&call, tensor] {
      nb::gil_scoped_acquire gil;
      return call_words(call, 0) + (tensor ? tensor_words(tensor) : "") + "   " + site();
    };
    Code code;
    {
      nb::gil_scoped_release release;
      code = engine_->run(call);
    }
    if (code != Code::ok) raise(call.failure, name(), rank_);
    return nb::none();
  }

  static std::string list_words(const nb::list& tensors) {
    std::string words;
    for (nb::handle item : tensors) {
      nb::handle one = item;
      if ((PyList_Check(item.ptr()) || PyTuple_Check(item.ptr())) && nb::len(item)) {
        if (!words.empty()) words += ", ";
        words += "list of " + std::to_string(nb::len(item));
        continue;
      }
      std::string w = tensor_words(one);
      if (!w.empty()) words += (words.empty() ? "" : ", ") + w;
    }
    return words;
  }

  nb::object finish(Call& call, std::vector<Part> in_parts, std::vector<Part> out_parts, nb::list tensors,
                    double timeout_s, bool async) {
    call.timeout_ns = call_timeout_ns(timeout_s);
    if (!async) {
      call.in_parts = in_parts.empty() ? nullptr : in_parts.data();
      call.out_parts = out_parts.empty() ? nullptr : out_parts.data();
      call.may_interrupt = true;
      call.describe = [&] {
        nb::gil_scoped_acquire gil;
        return call_words(call, size_) + list_words(tensors) + "   " + site();
      };
      Code code;
      {
        nb::gil_scoped_release release;
        code = engine_->run(call);
      }
      if (code != Code::ok) raise(call.failure, name(), rank_);
      return nb::none();
    }
    auto ticket = std::make_shared<Ticket>();
    ticket->in_parts = std::move(in_parts);
    ticket->out_parts = std::move(out_parts);
    ticket->call = std::move(call);
    ticket->call.in_parts = ticket->in_parts.empty() ? nullptr : ticket->in_parts.data();
    ticket->call.out_parts = ticket->out_parts.empty() ? nullptr : ticket->out_parts.data();
    std::string words = call_words(ticket->call, size_) + list_words(tensors) + "   " + site();
    ticket->call.describe = [words] { return words; };
    return start(ticket, tensors);
  }

  static std::string site() {
    try {
      return nb::cast<std::string>(hooks.call_site());
    } catch (...) {
      PyErr_Clear();
      return "";
    }
  }

  static std::string call_words(const Call& call, int size) {
    std::string words = std::string(verb_name(call.verb)) + "  ";
    if (call.op != RedOp::none) words += std::string(redop_name(call.op)) + "  ";
    if (call.root >= 0) words += "root " + std::to_string(call.root) + "  ";
    for (const Part* parts : {call.in_parts, call.out_parts}) {
      if (!parts) continue;
      constexpr int most = 16;
      words += parts == call.in_parts ? "in parts of [" : "out parts of [";
      for (int r = 0; r < std::min(size, most); r++) words += (r ? ", " : "") + std::to_string(parts[r].count);
      words += size > most ? ", ...]  " : "]  ";
    }
    return words;
  }

  nb::object start(std::shared_ptr<Ticket> ticket, nb::list tensors) {
    Pending::bury();
    {
      nb::gil_scoped_release release;
      engine_->submit(ticket);
    }
    return nb::cast(std::make_unique<Pending>(engine_, ticket, std::move(tensors)));
  }

  // A rank may write to itself, as long as it does not wait before it reads.
  int correspondent(nb::handle peer, const char* argument, bool async) const {
    return async ? arguments_.rank_in_group(peer, argument) : arguments_.another_rank(peer, argument);
  }

  nb::object mail(nb::handle tensor, int peer, int64_t tag, double timeout_s, bool async, bool sending) {
    View v = view_tensor(tensor, "tensor");
    auto message = std::make_shared<Message>();
    message->sending = sending;
    message->peer = peer;
    message->tag = tag;
    message->data = v.data;
    message->bytes = v.bytes();
    message->dtype = v.dtype;
    Call call;
    call.verb = sending ? Verb::send : Verb::recv;
    call.timeout_ns = call_timeout_ns(timeout_s);
    if (async) {
      auto ticket = std::make_shared<Ticket>();
      ticket->call = std::move(call);
      ticket->message = message;
      return start(ticket, keep(tensor));
    }
    call.may_interrupt = true;
    Code code;
    {
      nb::gil_scoped_release release;
      code = engine_->run(call, message);
    }
    if (code != Code::ok) raise(call.failure, name(), rank_);
    return nb::cast(message->source);
  }

  std::shared_ptr<Engine> engine_;
  int size_;
  int rank_;
  Arguments arguments_;
};

class Door {
 public:
  Door() {
    Failure failure;
    heap_ = process_heap(failure);
    if (heap_) door_ = Doorway::open(failure);
    if (!door_) raise(failure, "", -1);
  }
  const std::string& name() const { return door_->name(); }
  std::unique_ptr<Communicator> join(int rank, int size, const std::string& group, nb::bytes nonce, uint64_t id,
                                     double timeout_s, const std::vector<std::string>& names) {
    Token token;
    if (nonce.size() != sizeof token || names.size() != static_cast<size_t>(size) || size > kMostRanks)
      throw nb::value_error(
          ("a group has 1 to " + std::to_string(kMostRanks) + " ranks, a name for each and a nonce of 16 bytes")
              .c_str());
    std::memcpy(&token, nonce.c_str(), sizeof token);
    Failure failure;
    GroupFacts facts{rank, size, group, id, nanoseconds(timeout_s)};
    std::unique_ptr<Engine> engine;
    {
      nb::gil_scoped_release release;
      engine = door_->join(heap_, facts, token, names, failure);
    }
    if (!engine) raise(failure, group, rank);
    return std::make_unique<Communicator>(std::move(engine));
  }

 private:
  std::shared_ptr<Heap> heap_;
  std::unique_ptr<Doorway> door_;
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

  m.def("setup",
        [](nb::handle tensor_type, nb::object make_error, nb::object call_site, uint64_t heap_max, int64_t spin_us) {
          learn_tensor_type(tensor_type);
          hooks = {std::move(make_error), std::move(call_site)};
          if (heap_max) set_heap_capacity(heap_max);
          if (spin_us >= 0) spin_ns = spin_us * 1000;
        });
  m.def("empty", &unisono::empty);
  m.def("empty_like", &unisono::empty_like);
  m.def("is_shared", [](nb::handle t) { return in_region(view_tensor(t, "tensor").data); });
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
      .def("drop_block", &Communicator::drop_block)
      .def("split", &Communicator::split)
      .def("offset_of", &Communicator::offset_of)
      .def("peer_bytes", &Communicator::peer_bytes);

  nb::class_<Door>(m, "Door").def(nb::init<>()).def_prop_ro("name", &Door::name).def("join", &Door::join);

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
