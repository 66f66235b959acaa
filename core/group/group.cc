// See group.h: the life of a group, and the steps of a call that do not depend on the verb.
#include "group/group.h"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "group/wait.h"
#include "verbs/mover.h"

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

// Where each rank's number of elements is its own affair.
bool counts_differ(Verb verb) {
  return verb == Verb::all_to_all || verb == Verb::gather || verb == Verb::scatter;
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

// The bytes of a request that must be equal on all ranks: verb, dtype, op and root.
constexpr uint64_t kKeyMask = 0xffff000000ffffff;
static_assert(offsetof(Request, verb) == 0 && offsetof(Request, dtype) == 1 && offsetof(Request, op) == 2 &&
              offsetof(Request, root) == 6);
uint64_t key_of(const Request& d) {
  uint64_t key;
  std::memcpy(&key, &d.verb, sizeof key);
  return key & kKeyMask;
}

// Counts beyond any memory, so that sums over all ranks cannot wrap.
constexpr uint64_t kMostElements = uint64_t{1} << 48;

// How long a rank that failed waits for peers inside the same call to see it and get out.
constexpr int64_t kWithdrawFor = 20'000'000;

// Copies shared memory that somebody may be changing; the compiler may not look at the original again.
void copy_once(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
  asm volatile("" ::: "memory");
}

// Every thread of every process that has made a group sees what this one wrote before; the fast path needs no fence.
void fence_everybody() {
  if (syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0) != 0) usleep(1000);  // write buffers drain in less
}

Membership* membership_of(const Block& block, std::byte* heap_base, size_t capacity) {
  const uint64_t offset = block.membership_offset();
  if (offset == 0 || offset % kLineBytes || offset > capacity - sizeof(Membership)) return nullptr;
  return reinterpret_cast<Membership*>(heap_base + offset);
}

}  // namespace

Member member_of(const Peer& peer) {
  if (!peer.met) return {};
  return {membership_of(peer.block, peer.heap_base, peer.heap_capacity), peer.block.membership_use()};
}

PeerState state_of(const Peer& peer, const Member& member, std::string* reason) {
  const auto& [line, use] = member;
  if (line && line->use.load(std::memory_order_acquire) != use) return PeerState::left;
  if (line && line->left.load(std::memory_order_acquire) == use) {  // pairs with Group::close
    if (reason) {
      alignas(uint64_t) char words[sizeof line->reason];
      copy_words(words, line->reason, sizeof words);
      fence(std::memory_order_acquire);
      if (line->use.load(std::memory_order_relaxed) == use) *reason = text_in(words);
    }
    return PeerState::left;
  }
  if (!line && !peer.link) return PeerState::left;
  return peer.link && peer.link->hung_up() ? PeerState::died : PeerState::alive;
}

Group::Group(GroupFacts facts, std::shared_ptr<Heap> heap, std::vector<Peer> peers)
    : facts_(std::move(facts)),
      heap_(std::move(heap)),
      peers_(std::move(peers)),
      mine_(peers_[static_cast<size_t>(facts_.rank)].block),
      generation_(fork_generation()),
      requests_(peers_.size()),
      tables_(peers_.size() * peers_.size()),
      rings_(peers_.size()) {
  syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0);  // for withdraw, in a peer
  for (const Peer& p : peers_) members_.push_back(member_of(p));
}

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
  auto* line = reinterpret_cast<Membership*>(heap.take_line(failure));
  if (!line) {
    heap.release(base);
    return nullptr;
  }
  block.membership_offset() = static_cast<uint64_t>(reinterpret_cast<std::byte*>(line) - heap.base());
  block.membership_use() = line->use.load(std::memory_order_relaxed) + 1;
  line->use.store(block.membership_use(), std::memory_order_release);
  return base;
}

void Group::drop_block(Heap& heap, std::byte* base) {
  // Peers can write to the block, so even what this process wrote there is looked at before it is used.
  if (Membership* line = membership_of(Block(base, 1), heap.base(), heap.capacity())) {
    line->use.store(Block(base, 1).membership_use() + 1, std::memory_order_release);  // whoever still looks: it is over
    heap.give_line(reinterpret_cast<std::byte*>(line));
  }
  heap.release(base);
}

void Group::refuse_block(std::byte* base, int rank, const std::string& reason) {
  AbortLine& line = Block(base, 1).abort();
  std::fill(std::begin(line.peers), std::end(line.peers), -1);
  line.peers[0] = rank;
  copy_text(line.text, sizeof line.text, reason);
  line.code.store(static_cast<uint64_t>(Code::aborted), std::memory_order_release);  // pairs with Group::health
}

void Group::release_block() {
  if (ring_) heap_->release(ring_);
  for (std::byte* at : left_) heap_->release(at);
  for (std::byte* block : left_blocks_) drop_block(*heap_, block);
  drop_block(*heap_, mine_.base());
}

bool Group::all_left() const {
  for (int r = 0; r < facts_.size; r++)
    if (r != facts_.rank && state_of(r) == PeerState::alive) return false;
  return true;
}

Place Group::locate(const void* p, size_t bytes) const {
  const auto* at = static_cast<const std::byte*>(p);
  if (heap_->holds(at)) {
    if (bytes > heap_->capacity() - static_cast<size_t>(at - heap_->base()) || heap_->is_detached(p, bytes)) return {};
    return Place::at(facts_.rank, static_cast<size_t>(at - heap_->base()));
  }
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
  if (generation_ != fork_generation()) return;  // the parent's
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
  copy_text(line.text, sizeof line.text, cause.text);
  line.code.store(static_cast<uint64_t>(cause.code), std::memory_order_release);  // pairs with Group::health
  for (uint64_t s : {0, 1}) wake(mine_.descriptor(s).seq);
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
  Membership* line = membership_of(mine_, heap_->base(), heap_->capacity());
  if (!line) return;
  alignas(uint64_t) char words[sizeof line->reason];
  copy_text(words, sizeof words, reason);
  copy_words(line->reason, words, sizeof words);
  line->left.store(mine_.membership_use(), std::memory_order_release);  // pairs with state_of
}

Code Group::lost(Call& call, std::vector<int> gone) {
  // Others may have been killed in the same moment: give that a moment, and look at processes, not only at sockets.
  usleep(1000);
  for (int r = 0; r < facts_.size; r++)
    if (r != facts_.rank && peer(r).link && std::find(gone.begin(), gone.end(), r) == gone.end() &&
        (peer(r).link->hung_up() || is_dying(peer(r).pid)))
      gone.push_back(r);
  std::sort(gone.begin(), gone.end());
  std::string text;
  for (int r : gone) {
    std::string reason;
    bool left = state_of(r, &reason) == PeerState::left;
    if (!text.empty()) text += ", ";
    text += "rank " + std::to_string(r) + (left ? " left" : " died") + " (pid " + std::to_string(peer(r).pid) + ")";
    if (left && !reason.empty()) text += ": " + reason;
  }
  return break_with(call, Code::peer_lost, text, gone);
}

std::string Group::last_call(int r) const {
  const Descriptor* last = nullptr;
  uint64_t at = 0;
  for (uint64_t s : {0, 1}) {
    const Descriptor& d = peer(r).block.descriptor(s);
    if (uint64_t seq = d.seq.load(std::memory_order_acquire); seq > at) at = seq, last = &d;
  }
  return last ? std::string(verb_name(last->said.verb)) + " #" + std::to_string(at) : "none";
}

// What the threads of rank r wait for, in this group or in another.
std::string Group::waits_of(int r) const {
  std::string words;
  for (const Waiting& w : read_activities(peer(r).heap_base)) {
    words += words.empty() ? "   now in " : ", ";
    words += verb_name(w.verb);
    if (w.verb == Verb::send || w.verb == Verb::recv) {
      words += w.verb == Verb::send ? " to " : " from ";
      words += w.peer < 0 ? "anyone" : "rank " + std::to_string(w.peer);
      if (w.tag) words += " (tag " + std::to_string(w.tag) + ")";
    } else {
      words += " #" + std::to_string(w.seq);
    }
    if (facts_.name != w.group) words += std::string(" of group \"") + w.group + "\"";
  }
  return words.empty() ? "   in no call" : words;
}

Code Group::timed_out(Call& call, const std::vector<int>& late) {
  char seconds[32];
  int64_t limit = call.timeout_ns ? call.timeout_ns : facts_.timeout_ns;
  std::snprintf(seconds, sizeof seconds, "%.3g s", static_cast<double>(limit) / 1e9);
  std::string text = std::string("Timed out waiting ") + seconds;  // torch's words
  std::vector<std::string> lines;
  for (int r : late) {
    std::string state = peer(r).pid ? process_state(peer(r).pid) : "unknown";
    if (lines.empty()) text += ": rank " + std::to_string(r) + " is " + state;
    lines.push_back("rank " + std::to_string(r) + "   pid " + std::to_string(peer(r).pid) + "   " + state +
                    "   last call " + last_call(r) + waits_of(r));
  }
  Code code = break_with(call, Code::timeout, text, late);
  call.failure.lines = lines;
  return code;
}

bool Group::make_ring() {
  Failure none;  // without the memory, slots and stage in the block do it
  auto* at = static_cast<std::byte*>(heap_->allocate(kRingBytes, none));
  if (!at) return false;
  ring_ = at;
  mine_.ring_offset().store(static_cast<uint64_t>(at - heap_->base()), std::memory_order_relaxed);
  return true;
}

std::byte* Group::find_ring(int r) const {
  size_t offset = peer(r).block.ring_offset().load(std::memory_order_relaxed);  // published with the descriptor
  return offset == 0 ? nullptr : resolve(Place::at(r, offset), kRingBytes);
}

void Group::ask_gauge(Call& call, size_t bytes) {
  call.gauged = bytes >= StageGauge::kLeast ? bytes : 0;
  call.past_caches = call.gauged && gauge_.past_caches(call.verb, bytes);
  call.worked_ns = 0;
}

void Group::describe(Call& call, Request& d) {
  const size_t element = dtype_bytes(call.dtype);
  const int size = facts_.size;
  d.verb = call.verb;
  d.dtype = call.dtype;
  d.op = call.op;
  d.root = static_cast<int16_t>(call.root);
  d.has_table = 0;
  d.has_ring = ring_ != nullptr;
  d.turn = turn_;
  d.few_pieces = facts_.crowded || has_busy_neighbours();
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
      held = ring_ + turn_;
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
  const bool counts_unknown = counts_differ(call.verb);
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
    TableEntry* table = &tables_[static_cast<size_t>(facts_.rank) * peers_.size()];
    d.has_table = 1;
    for (int r = 0; r < size; r++) {
      Part in = call.in_parts ? call.in_parts[r] : Part{nullptr, 0};
      Part out = call.out_parts ? call.out_parts[r] : Part{nullptr, 0};
      table[r] = {in.count ? locate(in.ptr, in.count * element) : Place{},
                  out.count ? locate(out.ptr, out.count * element) : Place{}, in.count, out.count};
    }
  }
}

void Group::copy_requests(const Call& call) {
  bool small = call.op != RedOp::premul_sum && call.verb != Verb::matmul_reduce;
  for (int r = 0; r < facts_.size; r++) {
    Request& d = requests_[static_cast<size_t>(r)];
    if (r != facts_.rank) copy_once(&d, &peer(r).block.descriptor(call.seq).said, kSmallRequestBytes);
    small = small && d.input == Holder::inlined && !d.has_table;
  }
  if (small) return;
  const auto ranks = static_cast<size_t>(facts_.size);
  for (int r = 0; r < facts_.size; r++) {
    Request& d = requests_[static_cast<size_t>(r)];
    const Block& block = peer(r).block;
    const bool own = r == facts_.rank;  // what this rank said itself is here already
    if (!own) copy_once(&d.counts_hash, &block.descriptor(call.seq).said.counts_hash, sizeof d - kSmallRequestBytes);
    TableEntry* table = &tables_[static_cast<size_t>(r) * ranks];
    if (!d.has_table)
      std::fill_n(table, ranks, TableEntry{});
    else if (!own)
      copy_once(table, block.table(call.seq), ranks * sizeof *table);
    rings_[static_cast<size_t>(r)] = own ? ring_ : d.has_ring ? find_ring(r) : nullptr;
  }
}

// The ranks that said something else than most did.
std::vector<int> Group::odd_ones() const {
  auto same = [&](const Request& a, const Request& b) {
    return key_of(a) == key_of(b) && (a.verb != Verb::matmul_reduce || a.counts_hash == b.counts_hash) &&
           (counts_differ(a.verb) || a.count == b.count);
  };
  size_t best = 0, votes = 0;
  for (size_t r = 0; r < requests_.size(); r++) {
    auto n = static_cast<size_t>(
        std::count_if(requests_.begin(), requests_.end(), [&](const Request& d) { return same(d, requests_[r]); }));
    if (n > votes) best = r, votes = n;
  }
  std::vector<int> odd;
  for (size_t r = 0; r < requests_.size(); r++)
    if (!same(requests_[r], requests_[best])) odd.push_back(static_cast<int>(r));
  return odd;
}

Code Group::check(Call& call) {
  copy_requests(call);
  // A rank that could not come to this group after all may have used its block for something else.
  for (const Member& m : members_)
    if (m.line && m.line->use.load(std::memory_order_acquire) != m.use) return health(call, [](int) { return true; });
  const Request& mine = requests_[static_cast<size_t>(facts_.rank)];
  const int size = facts_.size;
  const uint64_t key = key_of(mine);
  for (const Request& d : requests_) {
    const bool alike = call.verb != Verb::matmul_reduce || d.counts_hash == mine.counts_hash;
    if (key_of(d) == key && alike && (counts_differ(call.verb) || d.count == mine.count)) continue;
    if (d.verb != mine.verb) return disagree(call, "the operation", odd_ones());
    if (d.dtype != mine.dtype) return disagree(call, "dtype", odd_ones());
    if (d.op != mine.op) return disagree(call, "the reduce operation", odd_ones());
    if (d.root != mine.root) return disagree(call, "the root", odd_ones());
    if (!alike) return disagree(call, "the shapes or options", odd_ones());
    bool hashed = call.verb == Verb::all_gather || call.verb == Verb::reduce_scatter;
    return disagree(call, hashed ? "the counts" : "the number of elements", odd_ones());
  }
  if (counts_differ(call.verb))
    if (Code code = check_counts(call); code != Code::ok) return code;
  size_t all = 0;
  for (int r = 0; call.in_parts && r < size; r++) all += call.in_parts[r].count;
  for (int r = 0; r < size; r++) {
    const TableEntry* table = &tables_[static_cast<size_t>(r) * static_cast<size_t>(size)];
    const Request& d = requests_[static_cast<size_t>(r)];
    size_t count = call.count;
    switch (call.verb) {
      case Verb::barrier:
        count = 0;
        break;
      case Verb::broadcast:
        if (r != call.root) count = 0;
        break;
      case Verb::all_gather:
        count = call.out_parts[r].count;
        break;
      case Verb::reduce_scatter:
        count = all;
        break;
      case Verb::gather:
        count = d.count;
        break;
      case Verb::scatter:
      case Verb::all_to_all:
        count = 0;
        for (int j = 0; j < size && (call.verb == Verb::all_to_all || r == call.root); j++) count += table[j].in_count;
        break;
      default:
        break;
    }
    if (!can_hold(call, r, count))
      return break_with(call, Code::system, "rank " + std::to_string(r) + " published an impossible descriptor", {r});
  }
  return Code::ok;
}

// Whether the input of rank r, of so many elements, can be where its request says.
bool Group::can_hold(const Call& call, int r, size_t count) const {
  const Request& d = requests_[static_cast<size_t>(r)];
  size_t most = 0;
  switch (d.input) {
    case Holder::kept:
      if (r != call.root || (call.verb != Verb::reduce && call.verb != Verb::gather)) return false;
      [[fallthrough]];
    case Holder::place:
      return true;  // checked when it is resolved
    case Holder::inlined:
      most = kInlineBytes;
      break;
    case Holder::slot:
      most = kSlotBytes;
      break;
    case Holder::ring:
      most = rings_[static_cast<size_t>(r)] ? kRingBytes - std::min<size_t>(d.turn, kRingBytes) : 0;
      break;
    default:
      return false;
  }
  return count <= most / dtype_bytes(call.dtype);
}

// Gather, scatter, all_to_all: what each rank sends is what the other expects.
Code Group::check_counts(Call& call) {
  const int size = facts_.size;
  auto entry = [&](int r, int j) -> const TableEntry& {
    return tables_[static_cast<size_t>(r) * static_cast<size_t>(size) + static_cast<size_t>(j)];
  };
  std::vector<int> wrong(static_cast<size_t>(size));  // by rank: how many of its partners expect something else
  auto compare = [&](int a, int b, uint64_t said, uint64_t expected) {
    if (said == expected) return;
    wrong[static_cast<size_t>(a)]++;
    if (a != b) wrong[static_cast<size_t>(b)]++;
  };
  for (int r = 0; r < size; r++) {
    const uint64_t count = requests_[static_cast<size_t>(r)].count;
    bool possible = count <= kMostElements;
    for (int j = 0; j < size; j++)
      possible = possible && entry(r, j).in_count <= kMostElements && entry(r, j).out_count <= kMostElements;
    if (!possible)
      return break_with(call, Code::system, "rank " + std::to_string(r) + " published an impossible descriptor", {r});
    if (call.verb == Verb::gather) compare(call.root, r, count, entry(call.root, r).out_count);
    if (call.verb == Verb::scatter) compare(call.root, r, count, entry(call.root, r).in_count);
    for (int j = 0; call.verb == Verb::all_to_all && j < size; j++)
      compare(r, j, entry(r, j).in_count, entry(j, r).out_count);
  }
  const int most = *std::max_element(wrong.begin(), wrong.end());
  if (most == 0) return Code::ok;
  const bool rooted = call.verb != Verb::all_to_all;
  std::vector<int> who;
  for (int r = 0; r < size; r++)
    if (rooted ? r != call.root && wrong[static_cast<size_t>(r)] : wrong[static_cast<size_t>(r)] == most)
      who.push_back(r);
  // A root that fits none of several others is the odd one itself.
  if (rooted && (who.empty() || (size > 2 && static_cast<int>(who.size()) == size - 1))) who = {call.root};
  return disagree(call, "the counts", std::move(who));
}

Code Group::disagree(Call& call, const char* what, std::vector<int> who) {
  std::string words = call.describe ? call.describe() : std::string();
  if (words.empty())
    words = std::string(verb_name(call.verb)) + " " + dtype_name(call.dtype) + " " + std::to_string(call.count);
  copy_text(mine_.note(), kNoteBytes, words);
  publish(mine_.flag(Phase::note), call.seq);
  int64_t deadline = call.deadline_ns;
  call.deadline_ns = now_ns() + 5'000'000'000;
  Code code = await(call, Phase::note, call.seq);
  call.deadline_ns = deadline;
  if (code != Code::ok) return code;
  fail(call.failure, Code::mismatch, std::string("ranks disagree on ") + what, std::move(who));
  call.failure.verb = call.verb;
  call.failure.seq = call.seq;
  for (int r = 0; r < facts_.size; r++) {
    char text[kNoteBytes];
    copy_once(text, peer(r).block.note(), kNoteBytes);
    call.failure.lines.emplace_back(text, strnlen(text, kNoteBytes));
  }
  return Code::mismatch;
}

Code Group::run(Call& call) {
  if (stopped_.load(std::memory_order_acquire) || generation_ != fork_generation()) {
    call.seq = seq() + 1;
    return quote_first_cause(call);
  }
  call.seq = seq() + 1;
  seq_.store(call.seq, std::memory_order_relaxed);
  if (facts_.size == 1) return Mover(*this, call).run_alone();
  // A rank that comes after others have given up must not be served by what they left behind.
  if (given_up())
    if (Code code = health(call, [](int) { return true; }); code != Code::ok) return code;
  if (!facts_.crowded) note_processor();
  call.deadline_ns = 0;  // set by the first wait that is not over at once
  Descriptor& mine = mine_.descriptor(call.seq);
  Request& own = requests_[static_cast<size_t>(facts_.rank)];  // kept here: peers can write to the block
  const uint64_t detachments = heap_->detachments();
  describe(call, own);
  if (own.has_table)
    std::memcpy(mine_.table(call.seq), &tables_[static_cast<size_t>(facts_.rank) * peers_.size()],
                peers_.size() * sizeof(TableEntry));
  mine.said = own;
  publish(mine.seq, call.seq);
  Code code = await(call, Phase::descriptor, call.seq);
  bool checked = false;
  if (code == Code::ok) checked = (code = check(call)) == Code::ok;
  if (code == Code::mismatch) {
    publish(mine_.flag(Phase::withdrawn), call.seq);
    return code;
  }
  if (code == Code::ok) code = Mover(*this, call).run();
  // Closed while it ran: peers may have taken this rank for gone and used its inputs' memory for something else.
  if (code == Code::ok && stopped_.load(std::memory_order_acquire)) code = quote_first_cause(call);
  if (code == Code::ok && heap_->detachments() != detachments)
    for (auto [at, bytes] : exposed(call))
      if (heap_->is_detached(at, bytes))
        code = break_with(call, Code::system, "a failure in another group made an output of this call private", {});
  if (code != Code::ok) withdraw(call, checked);
  return code;
}

// What peers were told to write into, as far as it is this rank's.
std::vector<std::pair<std::byte*, size_t>> Group::exposed(const Call& call, bool* any) const {
  std::vector<std::pair<std::byte*, size_t>> found;
  const Request& said = requests_[static_cast<size_t>(facts_.rank)];
  auto add = [&](Place place, size_t bytes) {
    if (!place || !bytes) return;
    if (any) *any = true;
    if (place.rank() == facts_.rank) found.emplace_back(heap_->base() + place.offset(), bytes);
  };
  add(said.out,
      call.finish ? call.finish->out_count * dtype_bytes(call.finish->out) : call.count * dtype_bytes(call.dtype));
  for (size_t r = 0; said.has_table && r < peers_.size(); r++) {
    const TableEntry& entry = tables_[static_cast<size_t>(facts_.rank) * peers_.size() + r];
    add(entry.out, entry.out_count * dtype_bytes(call.dtype));
  }
  return found;
}

// Whoever has not seen this rank's descriptor must not find it later: it is taken back. Whoever has may be writing; it
// looks for failures before each piece, and says when it is out. A peer that does not say so in time was stopped, or
// cannot run: its hands are tied by giving the exposed tensors new memory. Only a hang-up excuses it, since then no
// thread of it is left; one that says it has left may have another thread that is still at work.
void Group::withdraw(Call& call, bool checked) {
  publish(mine_.flag(Phase::withdrawn), call.seq);
  auto is_place = [](const Request& d) { return d.input == Holder::place; };
  if (checked && std::none_of(requests_.begin(), requests_.end(), is_place)) return;  // everybody serves itself
  bool any = false;
  const auto tensors = exposed(call, &any);
  if (!any) return;
  mine_.descriptor(call.seq).seq.store(0, std::memory_order_release);
  fence_everybody();  // from here on, who has not published its own descriptor cannot have seen ours
  auto may_write = [&](int r) {
    auto reached = [&](Phase phase) { return flag_of(r, phase, call.seq).load(std::memory_order_acquire) >= call.seq; };
    return r != facts_.rank && reached(Phase::descriptor) && !reached(Phase::exit) && !reached(Phase::withdrawn) &&
           !(peer(r).link && peer(r).link->hung_up());
  };
  const int64_t until = now_ns() + kWithdrawFor;
  for (int r = 0; r < facts_.size; r++)
    while (may_write(r)) {
      if (now_ns() < until) {
        usleep(200);
        continue;
      }
      bool safe = true;
      for (auto [at, bytes] : tensors) safe = heap_->detach(at, bytes) && safe;
      if (!safe) call.failure.text += "; rank " + std::to_string(r) + " may still write into this call's tensors";
      return;
    }
}

}  // namespace unisono
