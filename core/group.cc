// See group.h: the life of a group, and the steps of a call that do not depend on the verb.
#include "group.h"

#include <unistd.h>

#include <algorithm>

#include "mover.h"
#include "wait.h"

namespace unisono {
namespace {

// Small inputs travel in a slot: one round, and no rank waits for another to leave. All-reduce reads every slot on
// every rank, so its limit shrinks with the number of ranks; in a reduce-scatter those with small parts would idle.
size_t slot_limit(Verb verb, int size, bool in_ring) {
  const size_t most = in_ring ? kRingSlotBytes : kSlotBytes;
  if (verb == Verb::all_reduce || verb == Verb::reduce || verb == Verb::matmul_reduce)
    return std::clamp<size_t>((in_ring ? 256 << 10 : 128 << 10) / static_cast<size_t>(size), 2048, most);
  return verb == Verb::reduce_scatter ? kSlotBytes : most;
}

// From here on a tensor in the heap is read where it is: a second round costs less than copying it into the slot and
// moving all of it between cores.
constexpr size_t kDirectFrom = 4 << 10;

uint64_t hash_counts(const Part* parts, int size) {
  uint64_t h = 0xcbf29ce484222325;
  for (int r = 0; r < size; r++) {
    h = (h ^ parts[r].count) * 0x9e3779b97f4a7c15;
    h ^= h >> 29;
  }
  return h;
}

bool gives_input(const Call& call, int rank) {
  switch (call.verb) {
    case Verb::barrier:
      return false;
    case Verb::broadcast:
    case Verb::scatter:
      return call.root == rank;
    default:
      return true;
  }
}

// The bytes of the descriptor that must be equal on all ranks: verb, dtype, op and root.
constexpr uint64_t kKeyMask = 0xffff000000ffffff;
uint64_t key_of(const Descriptor& d) {
  uint64_t key;
  std::memcpy(&key, &d.verb, sizeof key);
  return key & kKeyMask;
}

}  // namespace

Group::Group(GroupFacts facts, std::shared_ptr<Heap> heap, std::vector<Peer> peers)
    : facts_(std::move(facts)),
      heap_(std::move(heap)),
      peers_(std::move(peers)),
      mine_(peers_[static_cast<size_t>(facts_.rank)].block),
      generation_(fork_generation()) {}

Group::~Group() {
  if (generation_ != fork_generation()) return;
  close("the group was dropped");
}

std::byte* Group::make_block(Heap& heap, int size, Failure& failure) {
  auto* base = static_cast<std::byte*>(heap.allocate(Block::bytes(size), failure));
  if (!base) return nullptr;
  Block block(base, size);
  // Slots and stages need no initial value; everything before them starts at zero.
  std::memset(static_cast<void*>(base), 0, static_cast<size_t>(block.slot(0) - base));
  return base;
}

void Group::release_block() {
  if (uint64_t ring = mine_.ring_offset().load(std::memory_order_relaxed)) heap_->release(heap_->base() + ring);
  for (std::byte* at : left_) heap_->release(at);
  heap_->release(mine_.base());
}

Place Group::locate(const void* p, size_t bytes) const {
  const auto* at = static_cast<const std::byte*>(p);
  if (heap_->holds(at) && bytes <= heap_->capacity() - static_cast<size_t>(at - heap_->base()))
    return Place::at(facts_.rank, static_cast<size_t>(at - heap_->base()));
  if (!in_region(p)) return {};
  for (int r = 0; r < facts_.size; r++) {
    size_t offset = static_cast<size_t>(at - peer(r).heap_base);
    if (offset < peer(r).heap_capacity && bytes <= peer(r).heap_capacity - offset) return Place::at(r, offset);
  }
  return {};
}

std::byte* Group::resolve(Place place, size_t bytes) const {
  if (!place || place.rank() >= facts_.size) return nullptr;
  const Peer& owner = peer(place.rank());
  if (place.offset() > owner.heap_capacity || bytes > owner.heap_capacity - place.offset()) return nullptr;
  std::byte* at = owner.heap_base + place.offset();
  if (bytes >= (1 << 20) && owner.mapping) owner.mapping->populate(at, bytes);
  return at;
}

bool Group::usable(Failure& failure) {
  if (generation_ != fork_generation()) {
    fail(failure, Code::forked, "the group belongs to the parent of this process; make a new one after fork");
    return false;
  }
  if (!stopped_.load(std::memory_order_acquire)) return true;
  std::lock_guard lock(state_mutex_);
  failure = first_cause_;
  failure.first_cause = true;
  return false;
}

Code Group::quote_first_cause(Call& call) {
  Failure cause;
  usable(cause);
  cause.verb = call.verb;
  cause.seq = call.seq;
  call.failure = cause;
  return cause.code;
}

void Group::abort(Failure cause) {
  {
    std::lock_guard lock(state_mutex_);
    if (stopped_.load(std::memory_order_relaxed)) return;
    first_cause_ = cause;
    stopped_.store(true, std::memory_order_release);
  }
  AbortLine& line = mine_.abort();
  std::fill(std::begin(line.peers), std::end(line.peers), -1);
  for (size_t i = 0; i < std::min<size_t>(cause.peers.size(), std::size(line.peers)); i++)
    line.peers[i] = cause.peers[i];
  line.seq = cause.seq;
  std::strncpy(line.text, cause.text.c_str(), sizeof line.text - 1);
  line.code.store(static_cast<uint64_t>(cause.code), std::memory_order_release);  // pairs with Group::health
  for (uint64_t s : {seq_, seq_ + 1}) wake(mine_.descriptor(s).seq);
  for (int p = 1; p < static_cast<int>(Phase::count_); p++) wake(mine_.flag(static_cast<Phase>(p)));
}

Code Group::break_with(Call& call, Code code, std::string text, std::vector<int> peers) {
  fail(call.failure, code, std::move(text), std::move(peers));
  call.failure.verb = call.verb;
  call.failure.seq = call.seq;
  abort(call.failure);
  return code;
}

void Group::close(const std::string& reason) {
  {
    std::lock_guard lock(state_mutex_);
    if (closed_) return;
    closed_ = true;  // a broken group keeps its first cause
    if (!stopped_.load(std::memory_order_relaxed)) {
      fail(first_cause_, Code::closed, "the group was closed on this rank");
      stopped_.store(true, std::memory_order_release);
    }
  }
  for (const Peer& p : peers_)
    if (p.link) p.link->say_left(facts_.id, reason);
}

Code Group::lost(Call& call, std::vector<int> gone) {
  // Others may have been killed in the same moment: give that a moment, and look at processes, not only at sockets.
  usleep(1000);
  for (int r = 0; r < facts_.size; r++)
    if (r != facts_.rank && peer(r).link && std::find(gone.begin(), gone.end(), r) == gone.end() &&
        (peer(r).link->look(facts_.id) == Link::State::died || is_dying(peer(r).pid)))
      gone.push_back(r);
  std::sort(gone.begin(), gone.end());
  std::string text;
  for (int r : gone) {
    std::string reason;
    bool left = peer(r).link && peer(r).link->look(facts_.id, &reason) == Link::State::left;
    if (!text.empty()) text += ", ";
    text += "rank " + std::to_string(r) + (left ? " left" : " died") + " (pid " + std::to_string(peer(r).pid) + ")";
    if (left && !reason.empty()) text += ": " + reason;
  }
  return break_with(call, Code::peer_lost, text, gone);
}

Code Group::timed_out(Call& call, const std::vector<int>& late) {
  char seconds[32];
  int64_t limit = call.timeout_ns ? call.timeout_ns : facts_.timeout_ns;
  std::snprintf(seconds, sizeof seconds, "%.3g s", static_cast<double>(limit) / 1e9);
  std::string text = std::string("Timed out waiting ") + seconds;  // torch's words
  std::vector<std::string> lines;
  for (int r : late) {
    std::string state = peer(r).pid ? process_state(peer(r).pid) : "unknown";
    const Block& block = peer(r).block;
    const Descriptor& a = block.descriptor(0);
    const Descriptor& b = block.descriptor(1);
    const Descriptor& last = a.seq.load(std::memory_order_acquire) > b.seq.load(std::memory_order_acquire) ? a : b;
    uint64_t at = last.seq.load(std::memory_order_relaxed);
    if (lines.empty()) text += ": rank " + std::to_string(r) + " is " + state;
    lines.push_back("rank " + std::to_string(r) + "   pid " + std::to_string(peer(r).pid) + "   " + state +
                    "   last call " + (at ? std::string(verb_name(last.verb)) + " #" + std::to_string(at) : "none"));
  }
  Code code = break_with(call, Code::timeout, text, late);
  call.failure.lines = lines;
  return code;
}

bool Group::make_ring() {
  Failure none;  // without the memory, slots and stage in the block do it
  auto* at = static_cast<std::byte*>(heap_->allocate(kRingBytes, none));
  if (!at) return false;
  mine_.ring_offset().store(static_cast<uint64_t>(at - heap_->base()), std::memory_order_relaxed);
  return true;
}

std::byte* Group::ring_of(int r) const {
  size_t offset = peer(r).block.ring_offset().load(std::memory_order_relaxed);  // published with the descriptor
  return offset == 0 ? nullptr : resolve(Place::at(r, offset), kRingBytes);
}

void Group::ask_gauge(Call& call, size_t bytes) {
  call.gauged = bytes >= StageGauge::kLeast ? bytes : 0;
  call.past_caches = call.gauged && gauge_.past_caches(call.verb, bytes);
  call.worked_ns = 0;
}

void Group::describe(Call& call, Descriptor& d) {
  const size_t element = dtype_bytes(call.dtype);
  const int size = facts_.size;
  d.verb = call.verb;
  d.dtype = call.dtype;
  d.op = call.op;
  d.root = static_cast<int16_t>(call.root);
  d.has_table = 0;
  d.has_ring = mine_.ring_offset().load(std::memory_order_relaxed) != 0;
  d.turn = turn_;
  d.input = Holder::inlined;
  d.count = call.count;
  call.gauged = 0;
  call.past_caches = false;
  if (call.verb == Verb::all_gather) d.count = hash_counts(call.out_parts, size);
  if (call.verb == Verb::reduce_scatter) d.count = hash_counts(call.in_parts, size);
  if (call.op == RedOp::premul_sum) d.factor = call.factor;
  if (call.finish) d.counts_hash = call.finish->hash;

  size_t bytes = 0;
  if (gives_input(call, facts_.rank)) {
    if (call.in_parts)
      for (int r = 0; r < size; r++) bytes += call.in_parts[r].count * element;
    else
      bytes = call.count * element;
  }
  const std::byte* probe = call.in_parts ? call.in_parts[0].ptr : call.in;
  if (bytes > (facts_.crowded ? kCrowdedRingFrom : kRingFrom) && !d.has_ring && !heap_->holds(probe))
    d.has_ring = make_ring();
  std::byte* held = nullptr;
  if (bytes <= kInlineBytes) {
    held = d.payload;
  } else if (bytes <= slot_limit(call.verb, size, d.has_ring) &&
             !(bytes > kDirectFrom && !facts_.crowded && heap_->holds(probe))) {
    const bool in_ring = d.has_ring && bytes > kRingFrom;
    const bool is_kept = call.root == facts_.rank && (call.verb == Verb::reduce || call.verb == Verb::gather);
    if (is_kept)
      d.input = Holder::kept;
    else
      d.input = in_ring ? Holder::ring : Holder::slot;
    if (is_kept) {
      d.in = {};
    } else if (in_ring) {
      if (turn_ > kRingBytes - bytes) d.turn = turn_ = 0;
      held = ring_of(facts_.rank) + turn_;
      turn_ += (bytes + 4095) / 4096 * 4096;
      staged_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    } else {
      held = mine_.slot(call.seq);
    }
  } else {
    d.input = Holder::place;
    d.in = call.in_parts ? Place{} : locate(call.in, bytes);
  }
  if (held && bytes) {
    ask_gauge(call, bytes);
    const auto copy = call.past_caches ? copy_stream : copy_bytes;
    int64_t began = call.gauged ? now_ns() : 0;
    if (!call.in_parts) {
      copy(held, call.in, bytes);
    } else {
      for (int r = 0; r < size; r++) {
        size_t n = call.in_parts[r].count * element;
        copy(held, call.in_parts[r].ptr, n);
        held += n;
      }
    }
    if (call.gauged) call.worked_ns = now_ns() - began;
  }
  d.out = {};
  bool counts_unknown = call.verb == Verb::all_to_all || call.verb == Verb::gather || call.verb == Verb::scatter;
  if (!call.out_parts && call.out && call.verb != Verb::barrier &&
      (d.input == Holder::place || counts_unknown || call.finish || call.verb == Verb::broadcast))
    d.out =
        locate(call.out, call.finish ? call.finish->out_count * dtype_bytes(call.finish->out) : call.count * element);
  if (call.finish) d.residual = locate(call.finish->residual, call.finish->out_count * dtype_bytes(call.finish->out));
  // A rank that gathers little from itself may get much from others, who then help to write it.
  auto gets_much = [&] {
    for (int r = 0; r < size; r++)
      if (call.out_parts[r].count * element > kDirectFrom) return true;
    return false;
  };
  if ((call.in_parts || call.out_parts) &&
      (d.input == Holder::place || counts_unknown || (call.verb == Verb::all_gather && gets_much()))) {
    TableEntry* table = mine_.table(call.seq);
    d.has_table = 1;
    for (int r = 0; r < size; r++) {
      Part in = call.in_parts ? call.in_parts[r] : Part{nullptr, 0};
      Part out = call.out_parts ? call.out_parts[r] : Part{nullptr, 0};
      table[r] = {in.count ? locate(in.ptr, in.count * element) : Place{},
                  out.count ? locate(out.ptr, out.count * element) : Place{}, in.count, out.count};
    }
  }
}

Code Group::check(Call& call) {
  const Descriptor& mine = mine_.descriptor(call.seq);
  const int size = facts_.size;
  uint64_t key = key_of(mine);
  bool sums_differ = call.verb == Verb::all_to_all || call.verb == Verb::gather || call.verb == Verb::scatter;
  for (int r = 0; r < size; r++) {
    const Descriptor& d = peer(r).block.descriptor(call.seq);
    const bool alike = call.verb != Verb::matmul_reduce || d.counts_hash == mine.counts_hash;
    if (key_of(d) == key && alike && (sums_differ || d.count == mine.count)) continue;
    if (d.verb != mine.verb) return disagree(call, "the operation");
    if (d.dtype != mine.dtype) return disagree(call, "dtype");
    if (d.op != mine.op) return disagree(call, "the reduce operation");
    if (d.root != mine.root) return disagree(call, "the root");
    if (!alike) return disagree(call, "the shapes or options");
    bool hashed = call.verb == Verb::all_gather || call.verb == Verb::reduce_scatter;
    return disagree(call, hashed ? "the counts" : "the number of elements");
  }
  auto holds = [&](int r, size_t count) {
    const Descriptor& d = peer(r).block.descriptor(call.seq);
    const bool may_keep = r == call.root && (call.verb == Verb::reduce || call.verb == Verb::gather);
    if (d.input > Holder::kept || (d.input == Holder::kept && !may_keep)) return false;
    size_t most = d.input == Holder::place || d.input == Holder::kept ? SIZE_MAX
                  : d.input == Holder::inlined                        ? kInlineBytes
                                                                      : kSlotBytes;
    if (d.input == Holder::ring) most = ring_of(r) ? kRingBytes - std::min(d.turn, kRingBytes) : 0;
    return count <= most / dtype_bytes(call.dtype);
  };
  auto impossible = [&](int r) {
    return break_with(call, Code::system, "rank " + std::to_string(r) + " published an impossible descriptor", {r});
  };
  if (!sums_differ) {
    size_t all = 0;
    for (int r = 0; call.in_parts && r < size; r++) all += call.in_parts[r].count;
    for (int r = 0; r < size; r++) {
      size_t count = call.verb == Verb::all_gather       ? call.out_parts[r].count
                     : call.verb == Verb::reduce_scatter ? all
                     : call.verb == Verb::barrier || (call.verb == Verb::broadcast && r != call.root) ? 0
                                                                                                      : call.count;
      if (!holds(r, count)) return impossible(r);
    }
    return Code::ok;
  }
  auto entry = [&](int r, int j) -> const TableEntry& { return peer(r).block.table(call.seq)[j]; };
  for (int r = 0; r < size; r++) {
    const Descriptor& d = peer(r).block.descriptor(call.seq);
    if (call.verb == Verb::gather && entry(call.root, r).out_count != d.count) return disagree(call, "the counts");
    if (call.verb == Verb::scatter && entry(call.root, r).in_count != d.count) return disagree(call, "the counts");
    if (call.verb == Verb::all_to_all)
      for (int j = 0; j < size; j++)
        if (entry(r, j).in_count != entry(j, r).out_count) return disagree(call, "the counts");
  }
  for (int r = 0; r < size; r++) {
    size_t count = call.verb == Verb::gather ? peer(r).block.descriptor(call.seq).count : 0;
    for (int j = 0; (call.verb == Verb::all_to_all || (call.verb == Verb::scatter && r == call.root)) && j < size; j++)
      count += entry(r, j).in_count;
    if (!holds(r, count)) return impossible(r);
  }
  return Code::ok;
}

Code Group::disagree(Call& call, const char* what) {
  std::string words = call.describe ? call.describe() : std::string();
  if (words.empty())
    words = std::string(verb_name(call.verb)) + " " + dtype_name(call.dtype) + " " + std::to_string(call.count);
  char* note = mine_.note();
  std::strncpy(note, words.c_str(), kNoteBytes - 1);
  note[kNoteBytes - 1] = 0;
  publish(mine_.flag(Phase::note), call.seq);
  int64_t deadline = call.deadline_ns;
  call.deadline_ns = now_ns() + 5'000'000'000;
  Code code = await(call, Phase::note, call.seq);
  call.deadline_ns = deadline;
  if (code != Code::ok) return code;
  fail(call.failure, Code::mismatch, std::string("ranks disagree on ") + what);
  call.failure.verb = call.verb;
  call.failure.seq = call.seq;
  for (int r = 0; r < facts_.size; r++) {
    const char* text = peer(r).block.note();
    call.failure.lines.emplace_back(text, strnlen(text, kNoteBytes));
    if (r != facts_.rank && call.failure.lines.back() != words) call.failure.peers.push_back(r);
  }
  return Code::mismatch;
}

Code Group::run(Call& call) {
  if (stopped_.load(std::memory_order_acquire) || generation_ != fork_generation()) {
    call.seq = seq_ + 1;
    return quote_first_cause(call);
  }
  call.seq = ++seq_;
  if (facts_.size == 1) return Mover(*this, call).run_alone();
  // A rank that comes after others have given up must not be served by what they left behind.
  for (const Peer& p : peers_)
    if (p.block.abort().code.load(std::memory_order_acquire))
      if (Code code = health(call, [](int) { return true; }); code != Code::ok) return code;
  if (!facts_.crowded) note_processor();
  call.deadline_ns = 0;  // set by the first wait that is not over at once
  Descriptor& mine = mine_.descriptor(call.seq);
  describe(call, mine);
  publish(mine.seq, call.seq);
  Code code = await(call, Phase::descriptor, call.seq);
  if (code == Code::ok) code = check(call);
  if (code == Code::mismatch) return code;
  if (code == Code::ok) code = Mover(*this, call).run();
  // Closed while it ran: peers may have taken this rank for gone and used its inputs' memory for something else.
  if (code == Code::ok && stopped_.load(std::memory_order_acquire)) code = quote_first_cause(call);
  if (code != Code::ok) {
    // A peer that was given up may still be on its way into these tensors.
    for (const std::byte* p : {call.in, call.out}) heap_->quarantine(p);
    for (const Part* parts : {call.in_parts, call.out_parts})
      for (int r = 0; parts && r < facts_.size; r++)
        if (parts[r].count) heap_->quarantine(parts[r].ptr);
  }
  return code;
}

}  // namespace unisono
