// A group as Python calls it.
//
// Every verb has the same steps: collect pointers and counts from the tensors, release the GIL, run, and turn a Failure
// into an exception. Errors in arguments are raised before anything is published, so the group stays usable.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "group/join.h"
#include "group/retire.h"
#include "kernels/epilogue.h"
#include "python/arguments.h"
#include "python/pending.h"
#include "python/tensors.h"

namespace unisono {

class Communicator {
 public:
  explicit Communicator(std::shared_ptr<Engine> engine)
      : engine_(std::move(engine)),
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
    Epilogue finish;
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
    if (!epilogue_exists(in.dtype, out.dtype, static_cast<RedOp>(op)))
      throw nb::type_error("argument 'output' has no such reduction of 'products'");
    auto hidden = [&](const std::byte* data, size_t n) {
      return n && (!group().heap().holds(data) || group().heap().is_detached(data, n));
    };
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
    call.epilogue = &finish;
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
  uint64_t staged_bytes() { return engine_->staged_bytes(); }
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
    sweep_retired();
    std::byte* block = unisono::make_block(group().heap(), size, failure).release();
    if (!block) raise(failure, name(), rank_);
    return static_cast<uint64_t>(block - group().heap().base());
  }
  // Takes such a block back. If peers may have heard of it, `reason` tells them that this rank will not come, and the
  // memory goes with this group's.
  void drop_block(uint64_t offset, int rank, nb::handle reason) {
    BlockMemory block(group().heap().base() + offset, BlockRelease{&group().heap()});
    if (reason.is_none()) return;
    refuse_block(block.get(), rank, nb::cast<std::string>(reason));
    group().keep(std::move(block));
  }
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
    auto engine = Engine::open(unisono::split(group(), members, blocks, facts, failure));
    if (!engine) raise(failure, name(), rank_);
    return std::make_unique<Communicator>(std::move(engine));
  }

  // Where a heap tensor of this rank lies, and a tensor of bytes over another rank's heap.
  uint64_t offset_of(nb::handle tensor) {
    View v = view_tensor(tensor, "tensor");
    if (!group().heap().holds(v.data) || group().heap().is_detached(v.data, v.bytes()))
      throw nb::value_error("argument 'tensor' is not in this process's shared memory");
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
    call.tag = tag;
    call.correspondent = peer;
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

}  // namespace unisono
