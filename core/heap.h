// This process's own shared memory: one sparse memfd, and an allocator that hands out pieces of it.
//
// Steps of an allocation: round the size up to its class; if it is small, take one that was given back lately; else
// take the best-fitting free range; if none fits, extend the used part of the file, first asking whether the machine
// and its cgroup have the memory, then reserving it with fallocate. Invariant: every byte ever handed out has been
// reserved, so touching it can never end in SIGBUS. Allocation is local: no other rank takes part or is told.
//
// A forked child keeps the tensors of its parent, as they were when it was forked: what is in use is copied then,
// before either of the two goes on. Where that is more than set_fork_copy_max allows or than there is memory for, and
// in the heaps of peers, the child sees what their owners write later, on every page it has not written itself. Its own
// writes stay its own in any case. What it allocates goes to a new heap.
#pragma once

#include <array>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "fork.h"
#include "region.h"

namespace unisono {

class Heap {
 public:
  static std::shared_ptr<Heap> create(Failure& failure);
  ~Heap();

  // Null with `failure` filled when memory is short. Aligned to 128 bytes. Size 0 gets an address of its own too.
  void* allocate(size_t bytes, Failure& failure);
  void release(void* p);  // in a forked child: nothing, the memory is the parent's
  // Never hand this allocation out again: a peer that was given up may still write into it.
  void quarantine(const void* p);

  std::byte* base() const { return mapping_->base(); }
  size_t capacity() const { return mapping_->capacity(); }
  const Token& token() const { return token_; }
  int fd() const { return fd_; }
  bool holds(const void* p) const { return mapping_->holds(p); }
  std::shared_ptr<Mapping> mapping() const { return mapping_; }

  struct Usage {
    size_t in_use, reserved, quarantined, capacity;
  };
  Usage usage();

  static size_t size_class(size_t bytes);

  // Steps of fork.h: no heap changes while its process is forked.
  static void before_fork();
  static void after_fork_in_parent();
  static void after_fork_in_child();

 private:
  Heap() = default;
  bool grow(size_t bytes, Failure& failure);
  void insert_free(size_t offset, size_t bytes);
  void erase_free(std::map<size_t, size_t>::iterator range);

  std::mutex mutex_;
  std::shared_ptr<Mapping> mapping_;
  Token token_;
  int fd_ = -1;
  int generation_ = fork_generation();
  size_t top_ = 0;  // everything below is reserved
  size_t in_use_ = 0;
  size_t quarantined_ = 0;
  std::map<size_t, size_t> free_;                // offset -> bytes, no two adjacent
  std::set<std::pair<size_t, size_t>> by_size_;  // (bytes, offset) of the same ranges
  std::map<size_t, size_t> live_;                // offset -> bytes of what is handed out
  // Small blocks given back, by size in units of kAlign, to be handed out again without a search or an allocation.
  std::array<std::vector<std::map<size_t, size_t>::node_type>, 33> spare_;
  std::set<size_t> kept_;      // quarantined offsets
  std::byte* copy_ = nullptr;  // while this process is forked: the first top_ bytes, as far as they are in use
};

// The heap that tensors of this process are made in; a forked child starts one of its own.
std::shared_ptr<Heap> process_heap(Failure& failure);

// The most bytes in use that are copied for a forked child.
void set_fork_copy_max(size_t bytes);

// Bytes this process may still take without being refused or killed: least of MemAvailable and every cgroup
// limit above it. SIZE_MAX where nothing says.
size_t memory_available();

}  // namespace unisono
