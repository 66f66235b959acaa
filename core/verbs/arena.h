// Memory for staged sends, taken from front to end and then from the front again: see the ring in control.h.
#pragma once

#include <deque>

#include "group/group.h"

namespace unisono {

class Arena {
 public:
  explicit Arena(Group& group) : g_(group), heap_(group.heap()) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  std::byte* take(size_t bytes, Failure& failure);  // from the heap where the ring has no room; null: none there either
  void give(std::byte* at);
  void leave(std::byte* at);  // as give, but somebody may still read it: it stays as long as the group

 private:
  struct Range {
    size_t begin, end;
    bool used;
  };
  bool owns(const std::byte* at) const { return base_ && at >= base_ && at < base_ + kRingBytes; }
  Group& g_;
  Heap& heap_;
  std::byte* base_ = nullptr;  // kept by the group
  size_t next_ = 0;
  std::deque<Range> ranges_;  // in the order in which they were taken
};

}  // namespace unisono
