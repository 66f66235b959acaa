// A group of ranks on one host, and how a collective call runs in it.
//
// The steps of every call (Group::run):
//   1. describe   write this rank's descriptor; a small input goes into the line itself or into a slot
//   2. publish    release the descriptor's sequence number
//   3. meet       await every rank's descriptor of the same number
//   4. check      copy them; all agree, or every rank returns `mismatch` and nothing has moved
//   5. move       copy (copy_verbs.cc) or reduce (reduce_verbs.cc); all decisions come from descriptors, so that
//                 every rank takes the same path
//   6. leave      if peers read or wrote user memory directly: await that all have finished
//   7. withdraw   of a call that failed: nobody writes into this rank's tensors any more when its caller gets the error
// One call runs at a time in a group; engine.h puts asynchronous calls in order.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/status.h"
#include "group/control.h"
#include "group/gauge.h"
#include "group/watch.h"
#include "memory/heap.h"

namespace unisono {

int64_t now_ns();  // monotonic clock

struct Part {
  std::byte* ptr;
  size_t count;
};

// What matmul_reduce does beyond a reduction; see fused_verbs.cc.
struct Finish {
  DType out = DType::f32;
  double scale = 1;
  bool has_residual = false;            // the same on all ranks; where a rank gets nothing it is null
  const std::byte* residual = nullptr;  // as many elements as the output; in the heap if there are counts
  size_t out_count = 0;                 // elements of this rank's output
  const size_t* counts = nullptr;       // elements for every output and rank; null: all of them for everybody
  size_t spans = 0;                     // how many counts
  uint64_t hash = 0;                    // of all that must be equal on all ranks and has no field of its own
};

// One call as the caller sees it. Multi-part tensors (one part per rank) are given by in_parts / out_parts.
struct Call {
  Verb verb = Verb::barrier;
  DType dtype = DType::u8;
  RedOp op = RedOp::none;
  int root = -1;
  double factor = 1;
  size_t count = 0;          // elements: of the whole (all_reduce, reduce, broadcast), else of my single part
  std::byte* in = nullptr;   // single-part input
  std::byte* out = nullptr;  // single-part output
  const Part* in_parts = nullptr;
  const Part* out_parts = nullptr;
  const Finish* finish = nullptr;         // matmul_reduce only
  int64_t timeout_ns = 0;                 // 0: the group's
  bool may_interrupt = false;             // called from Python: look at its signals while waiting
  std::function<std::string()> describe;  // words for a mismatch; called without locks held

  int64_t tag = 0;         // of a message
  int correspondent = -1;  // of a message; -1: anyone
  uint64_t seq = 0;
  int64_t deadline_ns = 0;
  size_t gauged = 0;         // bytes of the call if the gauge has been asked about it, and its answer
  bool past_caches = false;  // how this rank writes what others read
  int64_t worked_ns = 0;     // on copying and reducing, for the gauge
  Failure failure;
};

// What a rank knows of another (or itself, in its own entry).
struct Peer {
  std::byte* heap_base = nullptr;
  size_t heap_capacity = 0;
  std::shared_ptr<Mapping> mapping;
  Block block;
  std::shared_ptr<Link> link;  // null for this rank itself, and for ranks that are threads
  pid_t pid = 0;
  bool met = true;  // false: only the link is its own; another's memory stands in for what was never mapped
};

enum class PeerState : uint8_t { alive, left, died };

// A rank's line among its heap's memberships, and which of the line's users a group is.
struct Member {
  const Membership* line = nullptr;  // null: unknown, or an impossible one; then only the link tells
  uint64_t use = 0;
};
Member member_of(const Peer& peer);
PeerState state_of(const Peer& peer, const Member& member, std::string* reason = nullptr);

struct GroupFacts {
  int rank = 0;
  int size = 1;
  std::string name;
  uint64_t id = 0;
  int64_t timeout_ns = 300'000'000'000;
  bool crowded = false;          // more ranks than processors: give way instead of spinning
  size_t cache_bytes = 8 << 20;  // the smallest last-level cache of any rank
};

class Group {
 public:
  // `peers[facts.rank].block` is this rank's own block, made by `make_block`.
  Group(GroupFacts facts, std::shared_ptr<Heap> heap, std::vector<Peer> peers);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  static std::byte* make_block(Heap& heap, int size, Failure& failure);
  static void drop_block(Heap& heap, std::byte* block);  // one that no peer reads, or reads any more
  // Tells the peers of a block that its rank will not come to their group after all.
  static void refuse_block(std::byte* block, int rank, const std::string& reason);
  // Gives the block and the ring back to the heap; no peer may be reading them any more.
  void release_block();
  void release_later(std::byte* at) { left_.push_back(at); }  // memory of the heap, together with the block
  // The same for the block of a group that was to be split from this one, and of which peers may have heard.
  void drop_block_later(std::byte* block) { left_blocks_.push_back(block); }

  Code run(Call& call);  // the caller holds run_mutex
  std::mutex run_mutex;

  // Give the group up on all ranks. Later calls return the first cause.
  void abort(Failure cause);
  // Leave: peers learn it; calls return `closed`. Waiting calls of other threads end with `closed` too.
  void close(const std::string& reason);
  // Whether a peer is still in the group, and the words of one that left.
  PeerState state_of(int r, std::string* reason = nullptr) const {
    return unisono::state_of(peer(r), members_[static_cast<size_t>(r)], reason);
  }
  bool all_left() const;  // no peer is here any more
  bool usable(Failure& failure);
  bool stopped() const { return stopped_.load(std::memory_order_acquire); }  // broken or closed

  const GroupFacts& facts() const { return facts_; }
  void rename(const std::string& name) { facts_.name = name; }  // before calls are under way
  int rank() const { return facts_.rank; }
  int size() const { return facts_.size; }
  Heap& heap() { return *heap_; }
  const std::shared_ptr<Heap>& heap_ptr() const { return heap_; }
  const Peer& peer(int r) const { return peers_[static_cast<size_t>(r)]; }
  uint64_t staged_bytes() const { return staged_bytes_.load(std::memory_order_relaxed); }
  uint64_t seq() const { return seq_.load(std::memory_order_relaxed); }

  // Where local memory is, in every rank's words; nothing if a peer could not reach all of it.
  Place locate(const void* p, size_t bytes) const;
  // The address of a peer's place in this process; null for none, or when it lies outside of that heap.
  std::byte* resolve(Place place, size_t bytes) const;

  // The one waiting loop for anything but flags of a call: returns ok when `ready()`, else the reason to stop.
  // `owes(r)` says whether peer r still has something to do, so that its death matters.
  template <class Ready, class Owes>
  Code await_until(Call& call, Ready ready, Owes owes, const Flag* sleep_on = nullptr, uint64_t seen = 0);

  // Has anybody given up, died or left while it owed something; has the deadline passed; did Python get a signal?
  template <class Owes>
  Code health(Call& call, Owes owes);
  // A cheap look, for between two pieces of work: is there anything that `health` has to look into?
  bool given_up() const;

  // Called now and then while a call of this group waits, so that messages in flight do not wait with it.
  std::function<void()> meanwhile;

  // Release a flag of this rank's block and wake peers that sleep on it.
  void publish(Flag& flag, uint64_t value);
  void wake(Flag& flag);

 private:
  friend class Mover;
  Flag& flag_of(int r, Phase phase, uint64_t target) const {
    const Block& block = peers_[static_cast<size_t>(r)].block;
    return phase == Phase::descriptor ? block.descriptor(target).seq : block.flag(phase);
  }
  // Wait until the flags of all peers (or those marked in `who`) have reached `target`.
  Code await(Call& call, Phase phase, uint64_t target, const uint8_t* who = nullptr);
  Code await_slow(Call& call, Phase phase, uint64_t target, int r, const uint8_t* who);

  uint32_t note_processor();
  void part_ways();  // two ranks on one processor while others are idle: one of them moves
  int64_t moved_ns_ = 0;

  struct Patience;  // how long the present wait has lasted, and what to do next
  bool rest(Call& call, Patience& patience, const Flag* sleep_on, uint64_t seen);  // true: look at health now
  void tell_waiting(const Call& call, Patience& patience);
  void set_deadline(Call& call, int64_t now) const {
    call.deadline_ns = now + (call.timeout_ns ? call.timeout_ns : facts_.timeout_ns);
  }
  Code lost(Call& call, std::vector<int> peers);
  Code timed_out(Call& call, const std::vector<int>& late);
  Code break_with(Call& call, Code code, std::string text, std::vector<int> peers);
  Code quote_first_cause(Call& call);

  bool make_ring();
  std::byte* find_ring(int r) const;  // null: none, or an impossible one
  void ask_gauge(Call& call, size_t bytes);
  void describe(Call& call, Request& mine);
  void copy_requests(const Call& call);
  Code check(Call& call);
  Code check_counts(Call& call);
  Code disagree(Call& call, const char* what, std::vector<int> who);
  std::vector<int> odd_ones() const;
  void withdraw(Call& call, bool checked);
  bool can_hold(const Call& call, int r, size_t count) const;
  std::string last_call(int r) const;
  std::string waits_of(int r) const;
  std::vector<std::pair<std::byte*, size_t>> exposed(const Call& call, bool* any = nullptr) const;

  GroupFacts facts_;
  std::shared_ptr<Heap> heap_;
  std::vector<Peer> peers_;
  Block mine_;
  std::vector<Member> members_;
  int generation_;
  std::atomic<uint64_t> seq_{0};  // changed by whoever runs a call; others read it for messages
  // What every rank published for the call that runs, copied once: see Request.
  std::vector<Request> requests_;
  std::vector<TableEntry> tables_;  // rank by rank
  std::vector<std::byte*> rings_;
  uint64_t pieces_ = 0;  // staged pieces of all calls so far; equal on all ranks between calls
  std::atomic<uint64_t> staged_bytes_{0};
  StageGauge gauge_;
  std::vector<std::byte*> left_, left_blocks_;
  std::byte* ring_ = nullptr;  // this rank's own
  size_t turn_ = 0;            // where the next call begins in it

  std::mutex state_mutex_;
  std::atomic<bool> stopped_{false};  // broken or closed: see first_cause_
  Failure first_cause_;
  bool closed_ = false;
};

// Set once by the bindings: true when a Python signal handler raised.
extern bool (*python_interrupted)();
// How long to spin before giving way, where there are processors for all ranks.
extern int64_t spin_ns;

}  // namespace unisono
