// This process's own shared memory: one sparse memfd, and an allocator that hands out pieces of it.
//
// Steps of an allocation: round the size up to its class; take a block of that size that was given back lately, if
// there is one; else take the best-fitting free range; if none fits, extend the used part of the file, first asking
// whether the machine and its cgroup have the memory, then reserving it with fallocate. What has been free for a while,
// or is much and cut up too small, goes back to the system (trim.h), and is reserved again when it is taken. Invariant:
// every byte that is handed out has been reserved, so touching it can never end in SIGBUS. Allocation is local: no
// other rank takes part or is told. What takes a page or more has its pages for itself, so that they can be taken away
// from the peers (`detach`) without touching anything else; smaller blocks are cut from runs of pages of their own.
//
// A forked child keeps the tensors of its parent, as they were when it was forked, and its writes stay its own
// (fork_copy.cc). Only in the heaps of peers does it see what their owners write later, on every page it has not
// written itself. What it allocates goes to a new heap.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/pages.h"
#include "base/shared.h"
#include "memory/kept.h"
#include "memory/limits.h"
#include "memory/ranges.h"
#include "memory/recorder.h"
#include "memory/region.h"

namespace unisono {

class Scratch;

class Heap {
 public:
  static std::shared_ptr<Heap> create(Failure& failure);
  ~Heap();

  // Null with `failure` filled when memory is short. Aligned to 128 bytes. Size 0 gets an address of its own too.
  void* allocate(size_t bytes, Failure& failure) { return allocate(bytes, false, failure); }
  // The same for a tensor: peers learn of its place in calls only, while there is a Told, so that it can be made
  // private at other times; unless it is pinned.
  void* allocate_tensor(size_t bytes, Failure& failure) { return allocate(bytes, true, failure); }
  void pin(const void* p);
  void note_use(size_t offset, size_t bytes) { mapping_->note_use(offset, bytes); }
  void release(void* p);  // in a forked child: nothing, the memory is the parent's
  // Makes [p, p + bytes) of a live allocation private to this process, page by page, with what it holds: a peer that
  // still writes there writes into the old pages, which nobody sees. The allocation is never handed out again. False:
  // nothing of this heap, or the system refused. Other threads may write into the same pages meanwhile.
  bool detach(const void* p, size_t bytes);
  bool is_detached(const void* p, size_t bytes);
  uint64_t detachments() const { return detachments_.load(std::memory_order_seq_cst); }

  // While there is one, a peer may be at a tensor of this process: made before the tensor's place is looked up, and
  // ended when the last peer has said that it is done.
  class Told {
   public:
    Told() = default;
    explicit Told(Heap& heap) : heap_(&heap) { heap.told_.fetch_add(1, std::memory_order_seq_cst); }
    Told(Told&& other) noexcept : heap_(std::exchange(other.heap_, nullptr)) {}
    Told& operator=(Told&& other) noexcept {
      std::swap(heap_, other.heap_);
      return *this;
    }
    ~Told() {
      if (heap_) heap_->told_.fetch_sub(1, std::memory_order_release);
    }

   private:
    Heap* heap_ = nullptr;
  };

  // Lines of 128 bytes that stay lines for ever, so that a peer may look at one at any time.
  std::byte* take_line(Failure& failure);
  void give_line(std::byte* line);

  // What this process does, where peers can read it.
  Recorder& recorder() { return recorder_; }

  std::byte* base() const { return mapping_->base(); }
  size_t capacity() const { return mapping_->capacity(); }
  const Token& token() const { return token_; }
  int fd() const { return mapping_->fd(); }  // -1 in a forked child
  bool holds(const void* p) const { return mapping_->holds(p); }
  bool is_of_parent() const { return generation_ != fork_generation(); }  // this process is a forked child
  std::shared_ptr<Mapping> mapping() const { return mapping_; }

  Scratch& scratch() { return *scratch_; }  // memory that users of this heap share
  Keeping& keeping() { return keeping_; }   // tensors that peers inherit

  size_t in_use() const { return in_use_.load(std::memory_order_relaxed); }
  struct Usage {
    size_t in_use, reserved, quarantined, resident, capacity;
  };
  Usage usage();

  // Gives every free page back to the system now; how many bytes that were.
  size_t trim_now();
  // Of all heaps of this process, for trim.h. True: there may be more to give back later.
  static bool trim_all();
  static bool any_to_trim();

  static size_t size_class(size_t bytes);

  // Steps of fork.h: no heap changes while its process is forked.
  static void before_fork();
  static void after_fork_in_parent();
  static void after_fork_in_child();

 private:
  static constexpr size_t kAlign = 128;  // a flag line, and two cache lines
  static constexpr size_t kPage = 4096;
  static constexpr size_t kSlack = 64 << 20;       // left to the rest of the system when memory is counted
  static constexpr size_t kSpareStep = 1 << 20;    // from four of them on, size classes differ by that much at least
  static constexpr size_t kSpareMost = 128 << 20;  // the largest block that is kept for the next allocation of its size

  struct Block {
    size_t bytes;
    bool is_tensor = false;   // see allocate_tensor
    bool spare = false;       // given back, and kept for the next allocation of its size
    bool is_private = false;  // made so for a fork, see fork_copy.cc
  };
  using Live = std::map<size_t, Block>;  // by offset

  static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

  Heap() = default;
  void* allocate(size_t bytes, bool is_tensor, Failure& failure);
  bool grow(size_t bytes, Failure& failure);
  bool reserve(size_t offset, size_t bytes, Failure& failure);
  bool fill_holes(size_t offset, size_t bytes, Failure& failure);
  bool grow_tail(size_t bytes, size_t& offset, Failure& failure);
  void trim();
  bool give_back(size_t most);
  size_t give_all_back();
  void limit_unused(size_t more);
  Ranges unused() const;
  bool punch(size_t offset, size_t bytes);
  bool may_be_trimmed();
  bool take_pages(size_t bytes, size_t& offset, Failure& failure);
  bool take_small(size_t bytes, size_t& offset, Failure& failure);
  void give_small(size_t offset, size_t bytes);
  bool take_anyhow(size_t bytes, size_t& offset, Failure& failure);
  std::vector<Live::iterator>* spares_of(size_t bytes);
  bool keep_spare(Live::iterator block);
  void drop_spares();
  void count_in_use(size_t more) { in_use_.store(in_use() + more, std::memory_order_relaxed); }
  Live::iterator find_live(const void* p);
  bool is_detached_locked(size_t offset, size_t bytes) const;
  bool take_away(size_t at, size_t bytes);
  // Of fork_copy.cc.
  size_t to_copy() const { return in_use() - private_bytes_; }
  void prepare_fork(size_t most);
  void leave_to_fork(size_t most);
  bool take_back(size_t offset, size_t bytes);

  static std::vector<Heap*>& heaps_;
  static ForkMutex heaps_mutex_;

  std::mutex mutex_;
  std::shared_ptr<Mapping> mapping_;
  Token token_;
  int generation_ = fork_generation();
  size_t top_ = 0;                  // everything below is reserved, but for the holes
  std::atomic<size_t> in_use_ = 0;  // changed under the lock; whoever reads it without wants a rough number
  size_t quarantined_ = 0;
  size_t private_bytes_ = 0;  // of in_use_: blocks that were made private for a fork
  // Where in its first page a block of pages begins. It differs from heap to heap, so that the same tensor of different
  // ranks falls into different sets of the caches, and stores to one do not look like stores to the other.
  size_t color_ = 0;
  Ranges pages_, small_;
  Ranges holes_;  // of pages_: given back to the system
  Ranges cold_;   // of pages_: reserved, and free since the last trim
  Live live_;     // what is handed out, and spares
  // Blocks given back, to be handed out again without a search; each list has blocks of one size, see spares_of.
  static constexpr size_t kSparePages = kPage / kAlign, kSpareSteps = kSparePages + 4 * kSpareStep / kPage;
  std::array<std::vector<Live::iterator>, kSpareSteps + kSpareMost / kSpareStep + 1> spares_;
  size_t spare_bytes_ = 0;             // of those of whole pages
  std::map<size_t, size_t> detached_;  // offset -> bytes, in whole pages
  // Raised by detach before it takes a page away, read without the lock: whoever finds the number it knows may use the
  // memory; whoever finds another one asks under the lock which pages are gone. Sequentially consistent, with told_.
  std::atomic<uint64_t> detachments_{0};
  std::atomic<int> told_{0};       // of Told; its partner is leave_to_fork
  std::vector<std::byte*> lines_;  // free ones
  Recorder recorder_;
  Pages copy_;  // while this process is forked: the first top_ bytes, as far as they are in use
  std::unique_ptr<Scratch> scratch_;
  Keeping keeping_{*this};
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
