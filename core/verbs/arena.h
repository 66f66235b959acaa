// Memory for staged sends, taken from front to end and then from the front again: see the ring in control.h.
#pragma once

#include <atomic>
#include <deque>

#include "group/group.h"

namespace unisono {

class Arena {
 public:
  // `user` asks for the ring, and keeps it; see let_go.
  Arena(Group& group, Scratch::User& user) : g_(group), heap_(group.heap()), user_(user) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  std::byte* take(size_t bytes, Failure& failure);  // from the heap where the ring has no room; null: none there either
  void give(std::byte* at);
  void leave(std::byte* at);  // as give, but somebody may still read it: it stays as long as the group
  // True: nothing of the ring is in use, and it is forgotten.
  bool let_go();
  uint64_t uses() const { return uses_.load(std::memory_order_relaxed); }

 private:
  struct Range {
    size_t begin, end;
    bool used;
  };
  void drop_unused();
  bool owns(const std::byte* at) const { return base_ && at >= base_ && at < base_ + kRingBytes; }
  Group& g_;
  Heap& heap_;
  Scratch::User& user_;
  std::byte* base_ = nullptr;  // lent
  // Counted by whoever has the messages' lock, read without it, relaxed: it says only whether there was a use.
  std::atomic<uint64_t> uses_{0};
  size_t next_ = 0;
  std::deque<Range> ranges_;  // in the order in which they were taken
};

}  // namespace unisono
