// See group.h.
#include "group/group.h"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "group/futex.h"
#include "group/reach.h"
#include "memory/dump.h"

namespace unisono {

Group::Group(GroupFacts facts, std::shared_ptr<Heap> heap, std::vector<Peer> peers)
    : facts_(std::move(facts)),
      heap_(std::move(heap)),
      peers_(std::move(peers)),
      mine_(peers_[static_cast<size_t>(facts_.rank)].block),
      generation_(fork_generation()),
      block_(mine_.base(), BlockRelease{heap_.get()}) {
  // For a peer that withdraws from a call (verbs/collectives.cc): its fence reaches this process too.
  syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0);
  for (const Peer& p : peers_) members_.push_back(member_of(p));
  reads_all_ = std::all_of(peers_.begin(), peers_.end(), can_read);
  mine_.reads_all().store(reads_all_, std::memory_order_relaxed);
  record_members();
}

void Group::record_members() {
  static_assert(kMostRanks <= static_cast<int>(kMostRecordedRanks));
  GroupWords words{};
  words.id = facts_.id;
  words.opened_ns = now_ns();
  words.rank = facts_.rank;
  words.size = facts_.size;
  copy_text(words.name, sizeof words.name, facts_.name);
  for (size_t r = 0; r < peers_.size(); r++) {
    if (!peers_[r].met) continue;
    words.tokens[r] = read_token(peers_[r].heap_base).a;
    words.pids[r] = peers_[r].pid;
  }
  recorded_ = heap_->recorder().open_group(words);
}

Group::~Group() {
  if (!is_of_parent()) close("the group was dropped");
}

void Group::keep(HeapMemory memory) {
  std::lock_guard lock(state_mutex_);
  kept_.push_back(std::move(memory));
}

void Group::keep(BlockMemory block) {
  std::lock_guard lock(state_mutex_);
  kept_blocks_.push_back(std::move(block));
}

bool Group::all_left() const {
  for (int r = 0; r < facts_.size; r++)
    if (r != facts_.rank && state_of(r) == PeerState::alive) return false;
  return true;
}

bool Group::all_came() const {
  for (const Member& m : members_)
    if (m.line && m.line->use.load(std::memory_order_acquire) != m.use) return false;
  return true;
}

uint64_t Group::begin_call() {
  const uint64_t seq = this->seq() + 1;
  seq_.store(seq, std::memory_order_relaxed);
  return seq;
}

Place Group::locate(const void* p, size_t bytes) const {
  const auto* at = static_cast<const std::byte*>(p);
  if (heap_->holds(at)) {
    if (bytes > heap_->capacity() - static_cast<size_t>(at - heap_->base()) || heap_->is_detached(p, bytes))
      return Place::hidden(p);
    const auto offset = static_cast<size_t>(at - heap_->base());
    if (bytes) heap_->note_use(offset, bytes);
    return Place::at(facts_.rank, offset);
  }
  if (!in_region(p)) return Place::hidden(p);
  for (int r = 0; r < facts_.size; r++) {
    size_t offset = static_cast<size_t>(at - peer(r).heap_base);
    if (offset < peer(r).heap_capacity && bytes <= peer(r).heap_capacity - offset) return Place::at(r, offset);
  }
  return Place::hidden(p);
}

std::byte* Group::resolve(Place place, size_t bytes) const {
  if (!place || place.rank() >= facts_.size) return nullptr;
  const Peer& owner = peer(place.rank());
  if (place.offset() > owner.heap_capacity || bytes > owner.heap_capacity - place.offset()) return nullptr;
  std::byte* at = owner.heap_base + place.offset();
  if (bytes >= (1 << 20) && owner.mapping) owner.mapping->populate(at, bytes);
  return at;
}

void Group::wake(const Flag& flag) const {
  for (const Peer& p : peers_)
    if (p.block.base() != mine_.base() && p.block.asleep().load(std::memory_order_relaxed)) return wake_all_on(flag);
}

void Group::wake_listeners() const {
  mine_.rings().fetch_add(1, std::memory_order_relaxed);  // by any thread of this process
  wake_all_on(mine_.rings());
}

bool Group::usable(Failure& failure) {
  if (is_of_parent()) {
    fail(failure, Code::forked, "the group belongs to the parent of this process; make a new one after fork");
    return false;
  }
  if (!stopped()) return true;
  std::lock_guard lock(state_mutex_);
  failure = first_cause_;
  failure.first_cause = true;
  return false;
}

bool Group::given_up() const {
  if (!is_up(Defence::withdrawal)) return false;
  if (stopped()) return true;
  for (const Peer& p : peers_)
    if (p.block.abort().code.load(std::memory_order_acquire)) return true;
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

void Group::abort(const Failure& cause) {
  if (is_of_parent()) return;
  {
    std::lock_guard lock(state_mutex_);
    if (stopped_.load(std::memory_order_relaxed)) return;
    first_cause_ = cause;
    stopped_.store(true, std::memory_order_release);
  }
  write_abort(mine_.abort(), cause);
  for (uint64_t s : {0, 1}) wake(mine_.descriptor(s).seq);
  for (int p = 1; p < static_cast<int>(Phase::count_); p++) wake(mine_.flag(static_cast<Phase>(p)));
  if (has_trace_folder()) dump_records(cause);
}

// Each rank its own, and those of the ranks to blame, which may not be able to. All survivors write the latter, though
// one would do: each may be ended by its launcher before it has noticed anything, since that ends all as soon as one
// has failed.
void Group::dump_records(const Failure& cause) const {
  const std::string why = std::string(verb_name(cause.verb)) + " #" + std::to_string(cause.seq) + " in group \"" +
                          facts_.name + "\": " + cause.text;
  dump_record(heap_->base(), why);
  for (int r : cause.peers)
    if (r >= 0 && r < facts_.size && r != facts_.rank && peer(r).met) dump_record(peer(r).heap_base, why);
}

Code Group::break_with(Call& call, Code code, std::string text, std::vector<int> peers) {
  fail(call.failure, code, std::move(text), std::move(peers));
  call.failure.verb = call.verb;
  call.failure.seq = call.seq;
  abort(call.failure);
  return code;
}

void Group::close(const std::string& reason) {
  std::byte* offered = nullptr;
  {
    std::lock_guard lock(state_mutex_);
    if (closed_) return;
    closed_ = true;  // a broken group keeps its first cause
    offered = survival_.block.get();
    if (!stopped_.load(std::memory_order_relaxed)) {
      fail(first_cause_, Code::closed, "the group was closed on this rank");
      stopped_.store(true, std::memory_order_release);
    }
  }
  heap_->recorder().close_group(recorded_);
  leave_block(mine_, *heap_, reason);
  if (offered) leave_block(Block(offered, 1), *heap_, reason);  // nor does it come to the smaller group
}

bool Group::write_unless_closed(FunctionRef<void()> write) {
  std::lock_guard lock(state_mutex_);
  if (!closed_) write();
  return !closed_;
}

}  // namespace unisono
