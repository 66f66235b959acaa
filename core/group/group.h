// A group of ranks on one host: who is in it, and its life.
//
// Steps: ranks meet (join.h) or are split from a larger group, and each makes a Group of what it knows of the others.
// Calls run in it (verbs/collectives.h, verbs/messages.h) until the group is broken on all ranks (`abort`) or left by
// this one (`close`). A closed group is retired (retire.h): it is destroyed when no peer reads its memory any more.
// Invariant: the first cause is written once, under the state mutex and before `stopped_`; every later call returns it.
// Memory order: what peers must see is written before a flag of this rank's block or membership is stored with release;
// their loads with acquire are named where the flags are declared (control.h).
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/faults.h"
#include "base/function_ref.h"
#include "group/call.h"
#include "group/control.h"
#include "group/peer.h"
#include "group/ring.h"

namespace unisono {

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
  // Takes over this rank's own block, `peers[facts.rank].block`, which make_block has made.
  Group(GroupFacts facts, std::shared_ptr<Heap> heap, std::vector<Peer> peers);
  // Gives the block, and what was kept with it, back to the heap: no peer may be reading them any more.
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Memory that a peer may read as long as it reads the group's block, so it is given back together with that.
  void keep(HeapMemory memory);
  // The same for the block of a group that was to be split from this one, and of which peers may have heard.
  void keep(BlockMemory block);

  // Give the group up on all ranks. Later calls return the first cause.
  void abort(const Failure& cause);
  // Leave: peers learn it; calls return `closed`. Waiting calls of other threads end with `closed` too.
  void close(const std::string& reason);
  bool usable(Failure& failure);                                             // false: with the first cause
  bool stopped() const { return stopped_.load(std::memory_order_acquire); }  // broken or closed
  bool is_of_parent() const {                                                // this process is a forked child
    return generation_ != fork_generation() && is_up(Defence::forks);
  }
  // A cheap look, for between two pieces of work: has this rank or another given the group up?
  bool given_up() const;
  // Ends a call, and the group with it.
  Code break_with(Call& call, Code code, std::string text, std::vector<int> peers);
  // Ends a call with what has ended the group.
  Code quote_first_cause(Call& call);

  // For shrink.h. What `write` tells the peers stands before the word that this rank has left. False: it has left.
  bool write_unless_closed(FunctionRef<void()> write);
  struct Survival {
    std::mutex mutex;          // held by the one thread that shrinks
    uint64_t attempts = 0;     // that are over
    std::vector<int> members;  // of the last one
    BlockMemory block;         // offered for the smaller group; changed under the state mutex only
    uint64_t offered = 0;      // the attempt of the last offer
    uint64_t random = 0;       // what that said: the same if it is made once more
  };
  Survival& survival() { return survival_; }

  PeerState state_of(int r, std::string* reason = nullptr) const {
    return unisono::state_of(peer(r), members_[static_cast<size_t>(r)], reason);
  }
  bool all_left() const;  // no peer is here any more
  // Whether every rank is the one this group was made with. A rank that could not come after all may have used its
  // block for something else since.
  bool all_came() const;

  const GroupFacts& facts() const { return facts_; }
  void rename(const std::string& name) {  // before calls are under way
    facts_.name = name;
    heap_->recorder().rename(recorded_, name);
  }
  int rank() const { return facts_.rank; }
  int size() const { return facts_.size; }
  Heap& heap() { return *heap_; }
  const Heap& heap() const { return *heap_; }
  const std::shared_ptr<Heap>& heap_ptr() const { return heap_; }
  const Peer& peer(int r) const { return peers_[static_cast<size_t>(r)]; }
  const std::vector<Peer>& peers() const { return peers_; }
  const Block& mine() const { return mine_; }
  Ring& ring() { return ring_; }
  bool reads_all() const { return reads_all_; }  // all peers' own memory: reach.h
  const Recorder::OpenGroup& recorded() const { return recorded_; }

  // The number of the last call that began here.
  uint64_t seq() const { return seq_.load(std::memory_order_relaxed); }
  uint64_t begin_call();  // one thread at a time

  // Where local memory is, in every rank's words; hidden if a peer could not reach all of it.
  Place locate(const void* p, size_t bytes) const;
  // The address of a peer's place in this process; null for none, or when it lies outside of that heap.
  std::byte* resolve(Place place, size_t bytes) const;

  // Releases a flag of this rank's block and wakes peers that sleep on it.
  void publish(Flag& flag, uint64_t value) {
    reach_phase(flag);
    flag.store(value, std::memory_order_release);
    wake(flag);
  }
  // The same for a flag that only the messages with rank r look at.
  void publish_to(int r, Flag& flag, uint64_t value) {
    reach_phase(flag);
    flag.store(value, std::memory_order_release);
    if (peer(r).block.listening().load(std::memory_order_relaxed)) wake_listeners();
  }
  // Wakes whoever listens to this rank (wait.h): peers, or other threads of this process.
  void wake_listeners() const;
  void wake_own_listeners() const {
    if (mine_.listening().load(std::memory_order_relaxed)) wake_listeners();
  }
  Flag& flag_of(int r, Phase phase, uint64_t target) const {
    const Block& block = peers_[static_cast<size_t>(r)].block;
    return phase == Phase::descriptor ? block.descriptor(target).seq : block.flag(phase);
  }
  bool has_reached(int r, Phase phase, uint64_t target) const {
    return flag_of(r, phase, target).load(std::memory_order_acquire) >= target;
  }

 private:
  // For tests only: a fault may strike before a flag is released.
  void reach_phase([[maybe_unused]] const Flag& flag) const {
#if defined(UNISONO_FAULTS)
    constexpr const char* names[] = {"descriptor", "exit", "staged", "reduced", "copied", "note", "withdrawn"};
    static_assert(std::size(names) == static_cast<size_t>(Phase::count_));
    for (size_t i = 1; i < std::size(names); i++)
      if (&flag == &mine_.flag(static_cast<Phase>(i))) return reach(names[i]);
    const bool is_descriptor = &flag == &mine_.descriptor(0).seq || &flag == &mine_.descriptor(1).seq;
    reach(is_descriptor ? names[0] : "message");
#endif
  }
  void wake(const Flag& flag) const;
  void record_members();
  void dump_records(const Failure& cause) const;

  GroupFacts facts_;
  std::shared_ptr<Heap> heap_;
  std::vector<Peer> peers_;
  Block mine_;
  std::vector<Member> members_;
  const int generation_;
  BlockMemory block_;
  std::vector<HeapMemory> kept_;
  std::vector<BlockMemory> kept_blocks_;
  // Written by whoever runs a call, one at a time; read relaxed by other threads, for words in errors only.
  std::atomic<uint64_t> seq_{0};

  std::mutex state_mutex_;  // guards first_cause_, closed_ and what is kept
  // Broken or closed. Stored with release by abort and close after first_cause_; loaded with acquire by every call.
  std::atomic<bool> stopped_{false};
  Failure first_cause_;
  bool closed_ = false;
  Survival survival_;
  Ring ring_{*this};
  bool reads_all_ = false;
  Recorder::OpenGroup recorded_;
};

}  // namespace unisono
