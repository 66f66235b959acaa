// See arena.h.
#include "verbs/arena.h"

namespace unisono {
namespace {

// Short messages use the same pages again soon, so that they are still in a cache.
constexpr size_t kShort = 64 << 10, kShortRoom = 512 << 10;

}  // namespace

bool Arena::let_go() {
  drop_unused();
  if (!base_ || !ranges_.empty()) return false;
  base_ = nullptr;
  return true;
}

void Arena::drop_unused() {
  while (!ranges_.empty() && !ranges_.front().used) ranges_.pop_front();
}

std::byte* Arena::take(size_t bytes, Failure& failure) {
  uses_.fetch_add(1, std::memory_order_relaxed);
  if (!base_) base_ = heap_.scratch().take(user_);
  drop_unused();
  const size_t size = (bytes + 4095) / 4096 * 4096;
  size_t at = ranges_.empty() ? next_ : ranges_.back().end;
  if (at + size > (size <= kShort ? kShortRoom : kRingBytes)) at = 0;
  // Free is what lies behind the youngest range and before the oldest one.
  bool fits = base_ && size <= kRingBytes;
  for (const Range& r : ranges_) fits = fits && (at + size <= r.begin || at >= r.end);
  if (!fits) return static_cast<std::byte*>(heap_.allocate(bytes, failure));
  ranges_.push_back({at, at + size, true});
  next_ = at + size;
  return base_ + at;
}

void Arena::give(std::byte* at) {
  if (!owns(at)) return heap_.release(at);
  for (Range& r : ranges_)
    if (base_ + r.begin == at) r.used = false;
}

void Arena::leave(std::byte* at) {
  if (!owns(at)) g_.keep(HeapMemory(at, HeapRelease{&heap_}));
}

}  // namespace unisono
