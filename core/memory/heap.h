// This process's own shared memory: one sparse memfd, and an allocator that hands out pieces of it.
//
// Steps of an allocation: round the size up to its class; if it is small, take one that was given back lately; else
// take the best-fitting free range; if none fits, extend the used part of the file, first asking whether the machine
// and its cgroup have the memory, then reserving it with fallocate. What has been free for a while is given back to the
// system (trim.h), and reserved again when it is taken. Invariant: every byte that is handed out has been reserved, so
// touching it can never end in SIGBUS. Allocation is local: no other rank takes part or is told.
// What takes a page or more has its pages for itself, so that they can be taken away from the peers (`detach`) without
// touching anything else; smaller blocks are cut from runs of pages of their own.
//
// A forked child keeps the tensors of its parent, as they were when it was forked: what is in use is copied then,
// before either of the two goes on. Where that is more than set_fork_copy_max allows or than there is memory for, and
// in the heaps of peers, the child sees what their owners write later, on every page it has not written itself. Its own
// writes stay its own in any case. What it allocates goes to a new heap.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/fork.h"
#include "base/pages.h"
#include "base/shared.h"
#include "memory/activity.h"
#include "memory/limits.h"
#include "memory/ranges.h"
#include "memory/region.h"

namespace unisono {

class Scratch;

class Heap {
 public:
  static std::shared_ptr<Heap> create(Failure& failure);
  ~Heap();

  // Null with `failure` filled when memory is short. Aligned to 128 bytes. Size 0 gets an address of its own too.
  void* allocate(size_t bytes, Failure& failure);
  void release(void* p);  // in a forked child: nothing, the memory is the parent's
  // Makes [p, p + bytes) of a live allocation private to this process, page by page, with what it holds: a peer that
  // still writes there writes into the old pages, which nobody sees. The allocation is never handed out again. False:
  // nothing of this heap, or the system refused. Other threads may write into the same pages meanwhile.
  bool detach(const void* p, size_t bytes);
  bool is_detached(const void* p, size_t bytes);
  uint64_t detachments() const { return detachments_.load(std::memory_order_acquire); }

  // Lines of 128 bytes that stay lines for ever, so that a peer may look at one at any time.
  std::byte* take_line(Failure& failure);
  void give_line(std::byte* line);

  // Says what a thread of this process waits for, where peers can read it; `end_activity` takes the number back.
  int begin_activity(const Waiting& what) { return activities_.begin(base(), what); }
  void end_activity(int number) { activities_.end(base(), number); }

  std::byte* base() const { return mapping_->base(); }
  size_t capacity() const { return mapping_->capacity(); }
  const Token& token() const { return token_; }
  int fd() const { return mapping_->fd(); }  // -1 in a forked child
  bool holds(const void* p) const { return mapping_->holds(p); }
  bool is_of_parent() const { return generation_ != fork_generation(); }  // this process is a forked child
  std::shared_ptr<Mapping> mapping() const { return mapping_; }

  Scratch& scratch() { return *scratch_; }  // memory that users of this heap share

  struct Usage {
    size_t in_use, reserved, quarantined, resident, capacity;
  };
  Usage usage();

  // Of all heaps of this process, for trim.h. True: there may be more to give back later.
  static bool trim_all();
  static bool any_to_trim();

  static size_t size_class(size_t bytes);

  // Steps of fork.h: no heap changes while its process is forked.
  static void before_fork();
  static void after_fork_in_parent();
  static void after_fork_in_child();

 private:
  Heap() = default;
  bool grow(size_t bytes, Failure& failure);
  bool reserve(size_t offset, size_t bytes, Failure& failure);
  bool fill_holes(size_t offset, size_t bytes, Failure& failure);
  bool grow_tail(size_t bytes, size_t& offset, Failure& failure);
  void trim();
  bool give_back(size_t most);
  bool may_be_trimmed();
  bool take_pages(size_t bytes, size_t& offset, Failure& failure);
  bool take_small(size_t bytes, size_t& offset, Failure& failure);
  void give_small(size_t offset, size_t bytes);
  std::map<size_t, size_t>::iterator find_live(const void* p);
  bool is_detached_locked(size_t offset, size_t bytes) const;

  std::mutex mutex_;
  std::shared_ptr<Mapping> mapping_;
  Token token_;
  int generation_ = fork_generation();
  size_t top_ = 0;  // everything below is reserved, but for the holes
  size_t in_use_ = 0;
  size_t quarantined_ = 0;
  // Where in its first page a block of pages begins. It differs from heap to heap, so that the same tensor of different
  // ranks falls into different sets of the caches, and stores to one do not look like stores to the other.
  size_t color_ = 0;
  Ranges pages_, small_;
  Ranges holes_;                   // of pages_: given back to the system
  Ranges cold_;                    // of pages_: reserved, and free since the last trim
  std::map<size_t, size_t> live_;  // offset -> bytes of what is handed out
  // Small blocks given back, by size in units of kAlign, to be handed out again without a search or an allocation.
  std::array<std::vector<std::map<size_t, size_t>::node_type>, 32> spare_;
  std::map<size_t, size_t> detached_;  // offset -> bytes, in whole pages
  // Raised by detach with release before it takes a page away, read with acquire without the lock: whoever finds the
  // number it knows may use the memory; whoever finds another one asks under the lock which pages are gone.
  std::atomic<uint64_t> detachments_{0};
  std::vector<std::byte*> lines_;  // free ones
  Activities activities_;
  Pages copy_;  // while this process is forked: the first top_ bytes, as far as they are in use
  std::unique_ptr<Scratch> scratch_;
};

// Memory of a heap that is given back with its owner, which the heap must outlive.
struct HeapRelease {
  Heap* heap = nullptr;
  void operator()(std::byte* p) const { heap->release(p); }
};
using HeapMemory = std::unique_ptr<std::byte, HeapRelease>;
inline HeapMemory take_memory(Heap& heap, size_t bytes, Failure& failure) {
  return {static_cast<std::byte*>(heap.allocate(bytes, failure)), HeapRelease{&heap}};
}

// The heap that tensors of this process are made in; a forked child starts one of its own.
std::shared_ptr<Heap> process_heap(Failure& failure);

// Whether peers can reach this memory: it lies in a heap, and was not taken away from them (Heap::detach).
bool is_reachable(const void* p, size_t bytes);

// The most bytes in use that are copied for a forked child.
void set_fork_copy_max(size_t bytes);

}  // namespace unisono
