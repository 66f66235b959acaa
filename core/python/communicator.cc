// See communicator.h. A synchronous collective allocates nothing here: what was collected lies on the stack, and the
// words for a mismatch are only put together when there is one.
#include "python/communicator.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels/epilogue.h"
#include "python/gradients.h"
#include "python/handles.h"
#include "python/sites.h"
#include "python/tensors.h"

namespace unisono {

// What a verb has read from its arguments.
struct Communicator::Collected {
  explicit Collected(Verb verb) { call.verb = verb; }
  Call call;
  Parts in, out;            // of multi-part tensors
  nb::handle tensors[2]{};  // what a mismatch shows of this rank; borrowed
};

// A new output, and the input as the verbs take it; all empty unless a verb was asked to make its output.
struct Communicator::Made {
  nb::object output, input;
  nb::handle without;  // on a rank that gets no result: the input
  Views views;
  bool are_viewed = false;
  View view_in(nb::handle tensor, const char* argument) const {
    return are_viewed ? views.in : view_tensor(tensor, argument);
  }
  View view_out(nb::handle tensor, const char* argument) const {
    return are_viewed ? views.out : view_tensor(tensor, argument);
  }
  const View* in() const { return are_viewed ? &views.in : nullptr; }
  const View* out() const { return are_viewed ? &views.out : nullptr; }
  // Where the result of a verb goes that may be in place.
  std::byte* target(nb::handle out, const View& in) const {
    return are_viewed ? views.out.data : out.is_none() ? in.data : matching_output(out, in);
  }
  // What the verb returns: the new output, a 0 where there is none, or the handle that has it.
  nb::object result(nb::object ran, bool async_op) {
    if (async_op) return ran;
    return without.is_valid() ? zero_of(without) : output.is_valid() ? std::move(output) : std::move(ran);
  }
};

namespace {

// The interpreter's lock while a short call runs. To give it up and take it again costs a tenth of such a call, so it
// is given up only when the call begins to wait.
class InterpreterLease final : public Lease {
 public:
  InterpreterLease() = default;
  ~InterpreterLease() {
    if (thread_) PyEval_RestoreThread(thread_);
  }
  InterpreterLease(const InterpreterLease&) = delete;
  InterpreterLease& operator=(const InterpreterLease&) = delete;
  void end() override {
    if (!thread_) thread_ = PyEval_SaveThread();
  }

 private:
  PyThreadState* thread_ = nullptr;
};

// Bytes of all tensors of a call, or of a message, that asks for no lock on its way but that of its group, and only if
// that is free.
constexpr size_t kShortCall = 2 << 10, kShortMessage = sizeof(MailboxEntry::payload);

bool is_short(const Call& call, size_t parts) {
  size_t count = call.count;
  for (const Part* p : {call.in_parts, call.out_parts})
    for (size_t r = 0; p && r < parts; r++) count += p[r].count;
  return count * dtype_bytes(call.dtype) <= kShortCall;
}

std::string site_words(const Call& call) {
  return call.site ? call.site : "";
}

// "all_gather  root 1  out parts of [2, 3]  ": what the numbers of a call say.
std::string call_words(const Call& call, int size) {
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

bool is_list(nb::handle object) {
  return PyList_Check(object.ptr()) || PyTuple_Check(object.ptr());
}

bool is_list_of_shapes(nb::handle object) {
  return is_list(object) && PySequence_Size(object.ptr()) > 0 && is_list(item_of(object, 0));
}

std::string argument_words(nb::handle object) {
  if (!object.is_valid()) return "";
  if (is_list(object) && nb::len(object)) return "list of " + std::to_string(nb::len(object));
  return tensor_words(object);
}

// Keeps the tensors of an asynchronous call alive. Of a list every tensor, since the user may change the list
// meanwhile.
nb::list keep(std::initializer_list<nb::handle> objects) {
  nb::list kept;
  for (nb::handle object : objects) {
    if (!object.is_valid() || object.is_none()) continue;
    nb::object held = is_list(object) ? nb::steal(PySequence_Tuple(object.ptr())) : nb::borrow(object);
    if (!held.is_valid()) nb::raise_python_error();
    kept.append(held);
  }
  return kept;
}

void copy_bytes(std::byte* to, const View& from) {
  nb::gil_scoped_release release;
  std::memcpy(to, from.data, from.bytes());
}

}  // namespace

Communicator::Communicator(std::shared_ptr<Engine> engine)
    : engine_(std::move(engine)),
      size_(engine_->group().size()),
      rank_(engine_->group().rank()),
      arguments_(rank_, size_) {}

Communicator::Communicator(int rank, int size) : size_(size), rank_(rank), arguments_(rank, size) {}

// The last holder of an engine joins its thread, which may need the GIL for a callback.
Communicator::~Communicator() {
  nb::gil_scoped_release release;
  engine_.reset();
}

// -- verbs

nb::object Communicator::barrier(nb::handle timeout_s, bool async_op) {
  Collected c(Verb::barrier);
  return run(c, timeout_s, async_op, nb::none());
}

nb::object Communicator::all_reduce(nb::handle tensor, nb::handle out, nb::handle op, nb::handle factor,
                                    nb::handle timeout_s, bool async_op) {
  Collected c(Verb::all_reduce);
  const OpAndFactor reduction = read_op(op, factor);
  Made made = make_output(out, tensor);
  const View in = made.view_in(tensor, "tensor");
  set_reduction(c.call, tensor, in.dtype, reduction);
  c.call.count = in.count;
  c.call.in = in.data;
  c.call.out = made.target(out, in);
  c.tensors[0] = tensor;
  return made.result(run(c, timeout_s, async_op, out.is_none() ? tensor : out), async_op);
}

nb::object Communicator::reduce(nb::handle tensor, nb::handle root, nb::handle out, nb::handle op, nb::handle factor,
                                nb::handle timeout_s, bool async_op) {
  Collected c(Verb::reduce);
  const OpAndFactor reduction = read_op(op, factor);
  c.call.root = arguments_.rank_in_group(root, "root");
  Made made = make_output(out, tensor, {}, rank_ == c.call.root);
  const View in = made.view_in(tensor, "tensor");
  set_reduction(c.call, tensor, in.dtype, reduction);
  c.call.count = in.count;
  c.call.in = in.data;
  if (rank_ == c.call.root) c.call.out = made.target(out, in);
  c.tensors[0] = tensor;
  return made.result(run(c, timeout_s, async_op, out.is_none() ? tensor : out), async_op);
}

nb::object Communicator::broadcast(nb::handle tensor, nb::handle root, nb::handle out, nb::handle timeout_s,
                                   bool async_op) {
  Collected c(Verb::broadcast);
  c.call.root = arguments_.rank_in_group(root, "root");
  Made made = make_output(out, tensor);
  const View in = made.view_in(tensor, "tensor");
  std::byte* target = made.target(out, in);
  c.call.dtype = in.dtype;
  c.call.count = in.count;
  c.call.in = c.call.out = target;
  c.tensors[0] = tensor;
  // The root's own copy: while the others read the tensor, if they can; else first, and they read the copy.
  const bool copies = engine_ && rank_ == c.call.root && target != in.data && in.count;
  const bool copies_after = copies && !async_op && is_reachable(in.data, in.bytes());
  if (copies_after) c.call.in = c.call.out = in.data;
  if (copies && !copies_after) copy_bytes(target, in);
  nb::object ran = run(c, timeout_s, async_op, out.is_none() ? tensor : out);
  if (copies_after) copy_bytes(target, in);
  return made.result(std::move(ran), async_op);
}

nb::object Communicator::all_gather(nb::handle output, nb::handle input, nb::handle counts, nb::handle timeout_s,
                                    bool async_op) {
  Collected c(Verb::all_gather);
  Made made = make_output(output, input, {.times = size_});
  const View in = made.view_in(input, "input");
  arguments_.read_parts(c.out, output, "output", counts, "counts", made.out());
  arguments_.check_single_part(in, "input", c.out, "output");
  c.call.dtype = in.dtype;
  c.call.count = in.count;
  c.call.in = in.data;
  c.tensors[0] = output;
  c.tensors[1] = input;
  return made.result(run(c, timeout_s, async_op, output), async_op);
}

nb::object Communicator::reduce_scatter(nb::handle output, nb::handle input, nb::handle counts, nb::handle op,
                                        nb::handle factor, nb::handle timeout_s, bool async_op) {
  Collected c(Verb::reduce_scatter);
  const OpAndFactor reduction = read_op(op, factor);
  Made made = make_output(output, input, {.times = 1, .parts = size_});
  const View out = made.view_out(output, "output");
  arguments_.read_parts(c.in, input, "input", counts, "counts", made.in());
  arguments_.check_single_part(out, "output", c.in, "input");
  set_reduction(c.call, output, out.dtype, reduction);
  c.call.count = out.count;
  c.call.out = out.data;
  c.tensors[0] = output;
  c.tensors[1] = input;
  return made.result(run(c, timeout_s, async_op, output), async_op);
}

nb::object Communicator::gather(nb::handle output, nb::handle input, nb::handle root, nb::handle counts,
                                nb::handle timeout_s, bool async_op) {
  Collected c(Verb::gather);
  c.call.root = arguments_.rank_in_group(root, "root");
  Made made = make_output(output, input, {.times = size_}, rank_ == c.call.root);
  const View in = made.view_in(input, "input");
  c.call.dtype = in.dtype;
  c.call.count = in.count;
  c.call.in = in.data;
  if (rank_ == c.call.root) {
    arguments_.read_parts(c.out, output, "output", counts, "counts", made.out());
    arguments_.check_single_part(in, "input", c.out, "output");
  }
  c.tensors[0] = output;
  c.tensors[1] = input;
  return made.result(run(c, timeout_s, async_op, output), async_op);
}

nb::object Communicator::scatter(nb::handle output, nb::handle input, nb::handle root, nb::handle counts,
                                 nb::handle timeout_s, bool async_op) {
  Collected c(Verb::scatter);
  Made made = make_output(output, input, {.times = 1, .parts = size_});
  const View out = made.view_out(output, "output");
  c.call.dtype = out.dtype;
  c.call.root = arguments_.rank_in_group(root, "root");
  c.call.count = out.count;
  c.call.out = out.data;
  if (rank_ == c.call.root) {
    arguments_.read_parts(c.in, input, "input", counts, "counts", made.in());
    arguments_.check_single_part(out, "output", c.in, "input");
  }
  c.tensors[0] = output;
  c.tensors[1] = input;
  return made.result(run(c, timeout_s, async_op, output), async_op);
}

nb::object Communicator::all_to_all(nb::handle output, nb::handle input, nb::handle output_counts,
                                    nb::handle input_counts, nb::handle timeout_s, bool async_op) {
  Collected c(Verb::all_to_all);
  Made made = is_list_of_shapes(output) ? make_outputs(output, input) : make_output(output, input);
  arguments_.read_parts(c.out, output, "output", output_counts, "output_counts", made.out());
  arguments_.read_parts(c.in, input, "input", input_counts, "input_counts", made.in());
  arguments_.check_exchange(c.out, c.in);
  c.call.dtype = c.in.dtype;
  c.tensors[0] = output;
  c.tensors[1] = input;
  return made.result(run(c, timeout_s, async_op, output), async_op);
}

nb::object Communicator::send(nb::handle tensor, nb::handle dst, nb::handle tag, nb::handle timeout_s, bool async_op) {
  return exchange_message(Verb::send, tensor, partner(dst, "dst", async_op), tag, timeout_s, async_op);
}

nb::object Communicator::recv(nb::handle tensor, nb::handle src, nb::handle tag, nb::handle timeout_s, bool async_op) {
  const int from = src.is_none() ? -1 : partner(src, "src", async_op);
  return exchange_message(Verb::recv, tensor, from, tag, timeout_s, async_op);
}

void Communicator::matmul_reduce(nb::handle products, nb::handle output, nb::handle op, double scale,
                                 nb::handle residual, std::optional<std::vector<size_t>> counts, uint64_t hash,
                                 nb::handle words, nb::handle timeout_s) {
  const RedOp reduction = read_op(op, nb::none()).op;
  const View in = view_tensor(products, "products"), out = view_tensor(output, "output");
  const View extra = residual.is_none() ? View() : view_tensor(residual, "residual");
  size_t wanted = in.count;
  if (counts) {
    const auto all = std::accumulate(counts->begin(), counts->end(), size_t{0});
    if (all != in.count)
      refuse({.rule = Rule::counts_sum,
              .argument = "counts",
              .expected = nb::int_(in.count),
              .got = nb::cast(*counts),
              .other = "products"});
    wanted = 0;
    for (auto i = static_cast<size_t>(rank_); i < counts->size(); i += static_cast<size_t>(size_))
      wanted += (*counts)[i];
  }
  if (wanted != out.count)
    refuse(
        {.rule = Rule::own_elements, .argument = "output", .expected = nb::int_(wanted), .got = nb::int_(out.count)});
  if (!residual.is_none() && (extra.count != out.count || extra.dtype != out.dtype))
    refuse({.rule = Rule::like, .argument = "residual", .other = "output"});
  if (!epilogue_exists(in.dtype, out.dtype, reduction)) refuse_reduction(reduction, output);
  if (!engine_) return;
  if (size_ > 1) {
    expect_shared(in, "products");
    expect_shared(out, "output");
    if (counts) expect_shared(extra, "residual");
  }
  Epilogue epilogue;
  epilogue.out = out.dtype;
  epilogue.scale = scale;
  epilogue.out_count = out.count;
  epilogue.hash = hash;
  epilogue.has_residual = !residual.is_none();
  epilogue.residual = extra.data;
  epilogue.counts = counts ? counts->data() : nullptr;
  epilogue.spans = counts ? counts->size() : 0;
  Call call;
  call.verb = Verb::matmul_reduce;
  call.dtype = in.dtype;
  call.op = reduction;
  call.count = in.count;
  call.in = in.data;
  call.out = out.data;
  call.epilogue = &epilogue;
  call.timeout_ns = call_timeout_ns(timeout_s);
  call.site = find_call_site();
  call.describe = [words, &call] {
    nb::gil_scoped_acquire gil;
    return nb::cast<std::string>(words()) + "   " + site_words(call);
  };
  run_now(call);
}

// -- steps of a verb

// An output that is a number stands for a new tensor of so many rows, -1 for as many as the verb gives. The input may
// then have gaps or be a lazy view, and is copied if so. Puts what was made in the place of both arguments.
Communicator::Made Communicator::make_output(nb::handle& output, nb::handle& input, NewRows rows, bool wanted) {
  Made made;
  if (!PyLong_CheckExact(output.ptr())) return made;
  rows.number = PyLong_AsLongLong(output.ptr());  // too large a number is -1, and an error
  if (PyErr_Occurred()) nb::raise_python_error();
  output = nb::none();
  Failure failure;
  if (wanted) made.output = make_like(input, rows, failure, &made.views);
  if (wanted ? made.output.is_valid() && made.output.is_none() : !is_plain(input)) {
    made.input = plain_copy(input);
    input = made.input;
    if (wanted) made.output = make_like(input, rows, failure, &made.views);
  }
  if (!wanted) return made.without = input, made;
  if (!made.output.is_valid()) raise(failure);
  made.are_viewed = !made.output.is_none();
  output = made.output;
  return made;
}

// The same of lists: a shape for each new tensor, and inputs that may have gaps.
Communicator::Made Communicator::make_outputs(nb::handle& outputs, nb::handle& inputs) {
  Made made;
  made.input = nb::steal(PySequence_List(inputs.ptr()));
  made.output = nb::steal(PyTuple_New(PySequence_Size(outputs.ptr())));
  if (!made.input.is_valid() || !made.output.is_valid()) nb::raise_python_error();
  const auto length = static_cast<Py_ssize_t>(nb::len(made.input));
  for (Py_ssize_t i = 0; i < length; i++)
    if (nb::object input = item_of(made.input, i); !is_plain(input))
      PyList_SetItem(made.input.ptr(), i, plain_copy(input).release().ptr());
  if (length != size_)
    refuse({.rule = Rule::list_length, .argument = "input", .expected = nb::int_(size_), .got = nb::int_(length)});
  Failure failure;
  for (Py_ssize_t i = 0; i < PyTuple_Size(made.output.ptr()); i++) {
    nb::object shape = item_of(outputs, i);
    int64_t sizes[kMostDims];
    const auto dims = static_cast<size_t>(PySequence_Size(shape.ptr()));  // -1, so too large, if it is no sequence
    if (dims > kMostDims) refuse({.rule = Rule::shape, .argument = "output", .got = shape});
    for (size_t d = 0; d < dims; d++) sizes[d] = not_negative(item_of(shape, static_cast<Py_ssize_t>(d)), "output");
    nb::object tensor = make_shaped(item_of(made.input, 0), sizes, dims, failure);
    if (!tensor.is_valid()) raise(failure);
    PyTuple_SetItem(made.output.ptr(), i, tensor.release().ptr());
  }
  outputs = made.output;
  inputs = made.input;
  return made;
}

nb::object Communicator::run(Collected& c, nb::handle timeout_s, bool async_op, nb::handle outputs) {
  c.call.timeout_ns = call_timeout_ns(timeout_s);
  const bool has_input = c.tensors[1].is_valid(), in_place = !has_input && (!c.call.out || c.call.out == c.call.in);
  warn_if_gradient_is_cut(c.tensors[has_input], in_place, c.call.verb);
  if (!engine_) return nb::none();
  c.call.in_parts = c.in.data();
  c.call.out_parts = c.out.data();
  c.call.site = records_calls.load(std::memory_order_relaxed) ? find_call_site() : nullptr;
  auto describe = [&c, size = size_] {
    std::string words = argument_words(c.tensors[0]), more = argument_words(c.tensors[1]);
    if (!words.empty() && !more.empty()) words += ", ";
    return call_words(c.call, size) + words + more + "   " + site_words(c.call);
  };
  if (!async_op) {
    c.call.describe = [describe] {
      nb::gil_scoped_acquire gil;
      return describe();
    };
    run_now(c.call);
    return nb::none();
  }
  nb::list kept = keep({c.tensors[0], c.tensors[1], outputs});
  auto ticket = std::make_shared<Ticket>();
  if (c.in.data()) ticket->in_parts.assign(c.in.begin(), c.in.end());
  if (c.out.data()) ticket->out_parts.assign(c.out.begin(), c.out.end());
  c.call.describe = [words = describe()] { return words; };
  c.call.asynchronous = true;
  ticket->call = std::move(c.call);
  if (c.in.data()) ticket->call.in_parts = ticket->in_parts.data();
  if (c.out.data()) ticket->call.out_parts = ticket->out_parts.data();
  return start(std::move(ticket), std::move(kept), outputs);
}

void Communicator::run_now(Call& call) {
  call.may_interrupt = true;
  Code code;
  {
    InterpreterLease lease;
    call.lease = &lease;
    if (call.epilogue || !is_short(call, static_cast<size_t>(size_))) lease.end();
    code = engine_->run(call);
  }
  if (code != Code::ok) raise(call.failure);
}

nb::object Communicator::start(std::shared_ptr<Ticket> ticket, nb::list kept, nb::handle outputs) {
  const Verb verb = ticket->call.verb;
  Pending::reap();
  {
    nb::gil_scoped_release release;
    engine_->submit(ticket);
  }
  auto pending = std::make_unique<Pending>(engine_, std::move(ticket), std::move(kept));
  return make_handle(nb::cast(std::move(pending)), verb, outputs);
}

nb::object Communicator::exchange_message(Verb verb, nb::handle tensor, int peer, nb::handle tag, nb::handle timeout_s,
                                          bool async_op) {
  auto message = std::make_shared<Message>();
  Call call;
  call.verb = verb;
  call.correspondent = message->peer = peer;
  call.tag = message->tag = whole_number(tag, "tag");
  const View view = view_tensor(tensor, "tensor");
  message->sending = verb == Verb::send;
  if (message->sending) warn_if_gradient_is_cut(tensor, false, verb);
  message->data = view.data;
  message->bytes = view.bytes();
  message->dtype = view.dtype;
  message->asynchronous = async_op;
  call.site = message->site = find_call_site();
  call.timeout_ns = call_timeout_ns(timeout_s);
  if (!engine_) return nb::none();
  if (async_op) return start_message(call, std::move(message), tensor);
  call.may_interrupt = true;
  Code code;
  {
    InterpreterLease lease;
    call.lease = &lease;
    if (message->bytes > kShortMessage) lease.end();
    code = engine_->run(call, message);
  }
  if (code != Code::ok) raise(call.failure);
  return verb == Verb::recv ? nb::cast(message->source) : nb::none();
}

// One that is over at once needs no ticket: nobody has to follow it. For any other than a short send, which is copied,
// all that may fail is done before it begins: from then on others may write to the tensor.
nb::object Communicator::start_message(Call& call, std::shared_ptr<Message> message, nb::handle tensor) {
  std::shared_ptr<Ticket> ticket;
  nb::object kept;
  auto prepare = [&] {
    if (!ticket) ticket = std::make_shared<Ticket>();
    if (!kept.is_valid()) kept = keep({tensor});
  };
  if (!message->sending || message->bytes > kShortMessage) prepare();
  bool over = false;
  if (Failure cause; group().usable(cause)) {
    InterpreterLease lease;
    call.lease = &lease;
    if (message->bytes > kShortMessage) lease.end();
    over = engine_->post(call, message);
    call.lease = nullptr;
  }
  if (over && message->failure.code == Code::ok) return finished_handle(call.verb, message->source, tensor);
  prepare();
  ticket->call = std::move(call);
  ticket->message = std::move(message);
  return start(std::move(ticket), nb::borrow<nb::list>(kept), tensor);
}

// A rank may write to itself, as long as it does not wait before it reads.
int Communicator::partner(nb::handle peer, const char* argument, bool async_op) const {
  return async_op ? arguments_.rank_in_group(peer, argument) : arguments_.another_rank(peer, argument);
}

}  // namespace unisono
