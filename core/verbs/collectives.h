// How a collective call runs in a group. The steps of every call (`run`):
//   1. describe   write this rank's descriptor; a small input goes into the line itself or into a slot
//   2. publish    release the descriptor's sequence number
//   3. meet       await every rank's descriptor of the same number
//   4. check      copy them; all agree, or every rank returns `mismatch` and nothing has moved
//   5. move       copy (copy.cc), reduce (reduce.cc) or both with an epilogue (fused.cc); all decisions come from
//                 descriptors, so that every rank takes the same path
//   6. leave      if peers read or wrote user memory directly: await that all have done so
//   7. withdraw   of a call that failed: nobody writes into this rank's tensors any more when its caller gets the error
// One call runs at a time in a group; engine.h puts calls in order.
#pragma once

#include <atomic>
#include <vector>

#include "group/requests.h"
#include "verbs/gauge.h"

namespace unisono {

// What the calls of a group know from earlier ones about moving pieces.
struct Staging {
  Gauge slots;          // how this rank writes short inputs into slots: its own affair
  Gauge ways;           // how the bytes of longer calls move: rank 0's decides
  uint64_t pieces = 0;  // staged pieces of all calls so far; equal on all ranks between calls
  // Bytes that had to be copied to where peers can read them, or were read from a peer's own memory; and the latter
  // alone. Counted by whoever runs a call, read by others, relaxed.
  std::atomic<uint64_t> bytes{0}, single{0};
  std::vector<std::byte> read;  // blocks, on cache lines, of what this rank has read from each other
  std::byte* read_block(size_t r, size_t block_bytes) {
    return read.data() + (64 - reinterpret_cast<uintptr_t>(read.data()) % 64) + r * block_bytes;
  }

  // Of the call that runs, if its input was put into a slot: what `slots` said, and how long it took.
  struct Slot {
    Gauge::Key key;
    Gauge::Plan plan;
    int64_t put_ns = 0;
  } slot;
};

class Collectives {
 public:
  Collectives(Group& group, Waiter& waiter) : g_(group), waiter_(waiter), requests_(group, waiter) {}
  Code run(Call& call);  // one thread at a time
  uint64_t staged_bytes() const { return staging_.bytes.load(std::memory_order_relaxed); }
  uint64_t single_copy_bytes() const { return staging_.single.load(std::memory_order_relaxed); }

 private:
  void record(const Call& call);
  Code run_recorded(Call& call);
  Code meet_and_move(Call& call, bool& checked);
  void find_tuning();
  void choose_way(Call& call);
  Ways ways_of(const Call& call, const Requests::Extent& extent) const;
  void put_input(Call& call, Requests::Input input);
  bool lost_an_output(const Call& call);
  void withdraw(Call& call, bool checked);
  bool may_write(int r, uint64_t seq) const;

  Group& g_;
  Waiter& waiter_;
  Requests requests_;
  Staging staging_;
  Recorded recorded_;  // the call that runs
  bool is_recorded_ = false;
  size_t bytes_ = 0;  // of it
};

}  // namespace unisono
