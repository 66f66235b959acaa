// How memory is taken away from the peers; see Heap::detach.
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>

#include "memory/heap.h"

namespace unisono {
namespace {

constexpr size_t kDetachStep = 2 << 20;

}  // namespace

bool Heap::detach(const void* p, size_t bytes) {
  std::lock_guard lock(mutex_);
  auto live = find_live(p);
  const auto at = static_cast<size_t>(static_cast<const std::byte*>(p) - base());
  if (bytes == 0 || live == live_.end() || bytes > live->first + live->second.bytes - at) return false;
  detachments_.fetch_add(1);  // before the first page: who asks then waits for the lock
  return take_away(at, bytes);
}

bool Heap::take_away(size_t at, size_t bytes) {
  const size_t end = round_up(at + bytes, kPage);
  keeping_.forget(at / kPage * kPage, end - at / kPage * kPage);
  // In steps, so that the memory needed twice stays small; around what is private already.
  for (size_t begin = at / kPage * kPage, length; begin < end; begin += length) {
    auto next = detached_.upper_bound(begin);
    if (next != detached_.begin() && std::prev(next)->first + std::prev(next)->second > begin) {
      length = std::prev(next)->first + std::prev(next)->second - begin;
      continue;
    }
    length = std::min({kDetachStep, end - begin, next == detached_.end() ? SIZE_MAX : next->first - begin});
    // A private mapping of the same pages: they look the same until they are written. The write below, which changes
    // nothing, has the kernel copy each of them; a write of another thread comes before or after that, never in
    // between.
    if (mmap(base() + begin, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd(),
             static_cast<off_t>(begin)) == MAP_FAILED)
      return false;
    madvise(base() + begin, length, MADV_DONTDUMP);
    for (size_t page = begin; page < begin + length; page += kPage)
      reinterpret_cast<std::atomic<uint64_t>*>(base() + page)->fetch_add(0, std::memory_order_relaxed);
    detached_[begin] = length;
    mapping_->leave_private(begin, length);
    // The old pages go; who still writes there gets new ones. But not the first and the last, where something else may
    // be that peers read just now.
    const size_t inside = std::max(begin, round_up(at, kPage));
    const size_t outside = std::min(begin + length, (at + bytes) / kPage * kPage);
    if (inside < outside)
      fallocate(fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(inside),
                static_cast<off_t>(outside - inside));
  }
  return true;
}

bool Heap::is_detached_locked(size_t offset, size_t bytes) const {
  auto next = detached_.lower_bound(offset + std::max<size_t>(bytes, 1));
  if (next == detached_.begin()) return false;
  --next;
  return next->first + next->second > offset;
}

bool Heap::is_detached(const void* p, size_t bytes) {
  if (detachments() == 0 || !holds(p)) return false;
  std::lock_guard lock(mutex_);
  return is_detached_locked(static_cast<size_t>(static_cast<const std::byte*>(p) - base()), bytes);
}

}  // namespace unisono
