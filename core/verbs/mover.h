// Step 5 of a call: how the bytes of one call move, once every rank has seen every descriptor.
//
// Vocabulary. An input is *visible* to a rank that can read it where it is: its own, one in a heap, or one held in a
// line or slot. An output is visible to a rank that can write it where it is: its own, or one in a heap whose place was
// published. A call is *buffered* when all inputs are held where all ranks see them (lines, slots, the ring, or kept by
// the root): then every rank serves itself and nobody waits again. Otherwise the work is cut by bytes between all
// ranks, whoever's tensors they are, and what is visible to neither side goes through the stage in pieces.
#pragma once

#include "kernels/reduce.h"
#include "verbs/collectives.h"

namespace unisono {

constexpr size_t kWorkBlock = 512 << 10;  // bytes between two looks

class Mover {
 public:
  Mover(Group& group, Waiter& waiter, Requests& requests, Staging& staging, Call& call)
      : g_(group),
        waiter_(waiter),
        requests_(requests),
        staging_(staging),
        c_(call),
        size_(group.size()),
        me_(group.rank()) {}
  Code run();
  Code run_alone();  // one rank: no descriptors, no peers

 private:
  // What a rank published, or holds itself. Part j of a single-part tensor is the tensor.
  const std::byte* input(int r, int j, size_t count) const;
  std::byte* output(int r, int j, size_t count) const;
  Place input_place(int r, int j) const;  // of one that is not held
  const Request& request(int r) const { return requests_.of(r); }
  const TableEntry& entry(int r, int j) const { return requests_.entry(r, j); }
  bool buffered(int r) const { return request(r).input != Holder::place; }
  // Whether the input is held in a line or slot, where all ranks see it.
  bool held(int r) const { return buffered(r) && request(r).input != Holder::kept; }
  size_t bytes(size_t count) const { return count * element_; }
  bool goes(uint8_t way) const { return request(0).way & way; }
  // For a message of so many bytes, and pieces of at least so many. False: a rank published an impossible stage.
  bool find_stages(size_t message, size_t least = 0, bool few = false);
  size_t longest_piece() const;  // in a ring
  void end_stages(uint64_t pieces);
  const Stage& stage(size_t r) const { return stages_[r]; }
  Code leave();  // step 6
  void end_buffered();
  // Before the next block of long work, after so many bytes of it: has anything happened? A rank that was given up
  // must see it before it writes to the others' tensors again (Collectives::withdraw).
  Code look(size_t bytes);
  // Reads what rank r has in its own memory (reach.h).
  Code read_hidden(int r, std::byte* to, uint64_t address, size_t bytes);
  Code all_are_there();

  // copy.cc: broadcast, all_gather, gather, scatter, all_to_all
  Code copy_buffered();
  Code copy_shared();
  bool all_see_all(size_t& total) const;
  Code copy_to_all(size_t total);
  Code copy_range_to_all(int from, size_t begin, size_t end);
  struct CopyPlan;
  class StagedCopy;
  CopyPlan plan_copies() const;
  void deal_out(CopyPlan& plan) const;
  Code copy_own(const CopyPlan& plan);
  Code copy_dealt(const CopyPlan& plan);
  bool is_same_for_all() const {
    return c_.verb == Verb::broadcast || c_.verb == Verb::all_gather || c_.verb == Verb::gather;
  }
  bool keeps_own_while_staging(const std::vector<size_t>& staged) const;
  bool is_hidden(int from, int to) const;
  Place source_place(int from, int to) const;
  Place target_place(int from, int to) const;
  size_t segment(int from, int to) const;                   // elements that go from one rank to another
  const std::byte* segment_source(int from, int to) const;  // null: not visible here
  std::byte* segment_target(int from, int to) const;
  Code copy_block(std::byte* to, const std::byte* from, size_t bytes);

  // reduce.cc: all_reduce, reduce, reduce_scatter
  struct Span;
  class SharedReduction;
  Code reduce_buffered();
  Code reduce_shared();

  // fused.cc: matmul_reduce
  struct Share;
  std::vector<Share> spans() const;
  Code fused_alone();
  Code fused_buffered();
  Code fused_shared();

  Group& g_;
  Waiter& waiter_;
  Requests& requests_;
  Staging& staging_;
  Call& c_;
  const int size_;
  const int me_;
  const size_t element_ = dtype_bytes(c_.dtype);
  std::vector<Stage> stages_;
  size_t piece_ = 0;    // bytes of a piece
  uint64_t depth_ = 0;  // pieces that every stage can hold, going in or coming out
  size_t since_ = 0;    // bytes moved since the last thorough look
};

}  // namespace unisono
