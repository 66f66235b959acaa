// What every rank says about the call that runs, and whether it fits together.
//
// Steps: `describe` writes this rank's request and says where its input has to be copied to; `publish` releases it;
// when every rank has published, `check` copies all requests and compares them: all agree, or every rank returns
// `mismatch` and nothing has moved (check.cc).
// Invariant: peers' requests are copied once, and only the copies are checked and used, because a peer that breaks, or
// wants to, can change the originals at any time. All that ranks decide alike is decided from these copies.
// Memory order: a request and its table are written before the descriptor's `seq` is released and read after it was
// acquired; a rank writes call s + 2 into the same lines only when it knows that all have done with s (control.h).
#pragma once

#include <array>
#include <utility>
#include <vector>

#include "group/wait.h"

namespace unisono {

class Requests {
 public:
  Requests(Group& group, Waiter& waiter);

  // Where the input of this rank must be before its request is published; null: where it is.
  struct Input {
    std::byte* holder;
    size_t bytes;
  };
  Input describe(const Call& call);
  void publish(const Call& call);
  // After every rank has published.
  Code check(Call& call);

  const Request& of(int r) const { return requests_[static_cast<size_t>(r)]; }
  const Request& mine() const { return of(g_.rank()); }
  // What rank r said about its part for, or from, rank j; zeros if it published no table.
  const TableEntry& entry(int r, int j) const { return tables_[static_cast<size_t>(r * g_.size() + j)]; }
  std::byte* ring(int r) const { return rings_[static_cast<size_t>(r)]; }  // null: none, or an impossible one

  // No rank's input is read where it is, so every rank can serve itself and nobody writes for another.
  bool all_buffered() const;

  // How long this rank's tensors are, in bytes, and whether one of them is not in the heap; of outputs the longest of
  // all ranks as far as this one knows.
  struct Extent {
    size_t longest = 0, output = 0;
    bool hidden = false;
  };
  Extent extent(const Call& call) const;
  // What rank 0 has said before about how a call of this kind moves, with kTold; 0: nothing.
  uint8_t advice(const Call& call) const;
  // Whether tensors of this call are faster read where they are, as far as was measured before the first of its kind.
  bool is_better_read(const Call& call) const;
  // This rank can read all others' own memory.
  bool can_read_all() const { return g_.reads_all(); }
  // Everybody can read the tensors of this call in everybody's own memory.
  bool all_read() const;

  // What peers were told to write into: what of it is this rank's, and whether there is anything at all.
  struct Exposed {
    std::vector<std::pair<std::byte*, size_t>> own;
    bool any = false;
  };
  Exposed exposed(const Call& call) const;

  // The call is over here: this rank reads and writes nothing of it any more, and has said so.
  void end_call(const Call& call) {
    if (own().has_ring) g_.ring().end(call.seq);
  }

  // A call has used so many pieces of this rank's ring.
  void end_pieces(size_t piece_bytes, uint64_t pieces) {
    turn_ = (turn_ / piece_bytes + pieces) * piece_bytes % kRingBytes;
    slot_begin_ = slot_end_ = 0;  // all ranks have left the calls before
  }

 private:
  Request& own() { return requests_[static_cast<size_t>(g_.rank())]; }
  TableEntry* table(int r) { return &tables_[static_cast<size_t>(r * g_.size())]; }
  size_t input_bytes(const Call& call) const;
  size_t sum_of_parts(const Part* parts) const;
  std::byte* place_input(const Call& call, Request& d, size_t bytes);
  std::byte* take_ring(Request& d, size_t bytes);
  void place_output(const Call& call, Request& d) const;
  bool needs_table(const Call& call, const Request& d) const;
  void fill_table(const Call& call);
  bool needs_ring(const Call& call, size_t bytes) const;
  std::byte* find_ring(int r) const;
  size_t longest_of(const Call& call, size_t input_bytes) const;
  bool wants_read(const Call& call) const;
  bool may_be_read(const Call& call, size_t bytes);
  bool is_known_readable(const std::byte* at, size_t bytes);
  uint8_t& remembered(const Call& call);

  // check.cc
  void copy_requests(const Call& call);
  bool agree(const Request& a, const Request& b) const;
  Code compare_requests(Call& call);
  Code compare_counts(Call& call);
  bool can_hold(const Call& call, int r, size_t count) const;
  size_t input_count(const Call& call, int r, size_t all_parts) const;
  std::vector<int> odd_ones() const;
  std::vector<int> odd_counts(const Call& call, const std::vector<int>& wrong) const;
  Code disagree(Call& call, const char* what, std::vector<int> who);
  Code impossible(Call& call, int r);

  Group& g_;
  Waiter& waiter_;
  // By rank; of this rank kept here and not only in its block, because peers can write to the block.
  std::vector<Request> requests_;
  std::vector<TableEntry> tables_;  // rank by rank
  std::vector<std::byte*> rings_;
  std::array<std::array<uint8_t, 64>, static_cast<size_t>(Verb::count_)> next_ways_{};  // by verb and size
  // Tensors that others were found to be able to read, a short while ago.
  struct Readable {
    const std::byte* at = nullptr;
    size_t bytes = 0;
    int64_t until_ns = 0;
  };
  std::array<Readable, 16> readable_{};
  std::byte* ring_ = nullptr;             // this rank's own, if the call has one
  size_t turn_ = 0;                       // where the next call begins in it
  size_t slot_begin_ = 0, slot_end_ = 0;  // of the last call that has held its input in it
};

}  // namespace unisono
