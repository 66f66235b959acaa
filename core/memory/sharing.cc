// See sharing.h.
#include "memory/sharing.h"

#include <atomic>
#include <cerrno>
#include <memory>
#include <new>

#include "base/clock.h"
#include "memory/heap.h"
#include "memory/imports.h"
#include "memory/region.h"

namespace unisono {
namespace {

constexpr size_t kMostAlignment = 4096;
constexpr size_t kHeapAlignment = 128;
constexpr int64_t kPause = 100'000'000;  // after the heap could not grow, before it is asked again

int share(void** out, size_t alignment, size_t bytes);
void give_back(void* p);

// Calls go through these before the entries are changed, so they are set by then; afterwards nothing writes them.
Import release{"free", reinterpret_cast<void*>(give_back)};
Import take{"posix_memalign", reinterpret_cast<void*>(share)};

// Numbers that publish nothing: relaxed.
std::atomic<size_t> least{SIZE_MAX}, most{SIZE_MAX};
std::atomic<int64_t> pause_until{0};
std::atomic<uint64_t> refusals{0};

// Written with release by whoever makes a heap, read with acquire. Never destroyed: its memory is freed by address, so
// nothing else keeps it.
std::atomic<Heap*> current{nullptr};

Heap* find_heap() {
  Heap* heap = current.load(std::memory_order_acquire);
  if (heap && !heap->is_of_parent()) return heap;
  Failure none;
  auto made = process_heap(none);
  if (!made) return nullptr;
  heap = (new std::shared_ptr<Heap>(std::move(made)))->get();  // NOLINT: kept for as long as the process lives
  current.store(heap, std::memory_order_release);
  return heap;
}

// Null: there is no room.
void* take_shared(size_t alignment, size_t bytes) {
  const int64_t until = pause_until.load(std::memory_order_relaxed);
  if (until != 0) {
    if (now_ns() < until) return nullptr;
    pause_until.store(0, std::memory_order_relaxed);
  }
  Heap* heap = find_heap();
  if (!heap) {
    pause_until.store(now_ns() + kPause, std::memory_order_relaxed);
    return nullptr;
  }
  const size_t room = most.load(std::memory_order_relaxed);
  if (bytes > room || heap->in_use() > room - bytes) return nullptr;
  const size_t extra = alignment > kHeapAlignment ? alignment : 0;
  if (bytes > heap->capacity()) return nullptr;
  Failure none;
  auto at = reinterpret_cast<uintptr_t>(heap->allocate_tensor(bytes + extra, none));
  if (!at) {
    pause_until.store(now_ns() + kPause, std::memory_order_relaxed);
    return nullptr;
  }
  return reinterpret_cast<void*>(extra ? (at + extra - 1) / extra * extra : at);
}

int share(void** out, size_t alignment, size_t bytes) {
  if (bytes >= least.load(std::memory_order_relaxed) && alignment <= kMostAlignment) {
    const int before = errno;
    void* p = nullptr;
    try {
      p = take_shared(alignment, bytes);
    } catch (const std::bad_alloc&) {  // no memory for the heap's own lists
    }
    errno = before;
    if (p) {
      *out = p;
      return 0;
    }
    refusals.fetch_add(1, std::memory_order_relaxed);
  }
  return reinterpret_cast<decltype(&share)>(take.original)(out, alignment, bytes);
}

void give_back(void* p) {
  if (!in_region(p)) return reinterpret_cast<decltype(&give_back)>(release.original)(p);
  const int before = errno;
  Heap* heap = current.load(std::memory_order_acquire);
  try {
    if (heap && heap->holds(p)) heap->release(p);
  } catch (const std::bad_alloc&) {  // no memory for the heap's own lists: the block is lost
  }
  errno = before;
}

}  // namespace

bool replace_allocator(const char* library, Failure& failure) {
  static bool done = false;  // guarded by Python's lock
  // free first: from the first shared allocation on, it must know what to do with it.
  if (!done) done = replace_imports(library, {&release, &take}, failure);
  return done;
}

void share_from(size_t min_bytes, size_t max_bytes) {
  most.store(max_bytes, std::memory_order_relaxed);
  least.store(min_bytes, std::memory_order_relaxed);
}

uint64_t share_refusals() {
  return refusals.load(std::memory_order_relaxed);
}

}  // namespace unisono
