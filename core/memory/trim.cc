// See trim.h.
#include "memory/trim.h"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "base/fork.h"
#include "base/thread.h"
#include "memory/heap.h"
#include "memory/limits.h"
#include "memory/scratch.h"

namespace unisono {
namespace {

constexpr size_t kTrimStep = 2 << 20;       // given back at a time, so that nobody waits long for the lock
constexpr size_t kShort = size_t{1} << 30;  // with less than this left in the machine, all that is cold goes at once
constexpr int kNobody = -1;
// The fork generation of the process that has the thread: a forked child has none. Whoever frees memory looks here
// afterwards; the thread says that it ends, and then looks once more. The heap's lock, which both take in between,
// orders the two, so one of them sees the other.
std::atomic<int> trimmer{kNobody};

void trim_until_done() {
  const int self = fork_generation();
  for (;;) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    if (Heap::trim_all()) continue;
    trimmer.store(kNobody);
    if (!Heap::any_to_trim() || trimmer.exchange(self) == self) return;
  }
}

}  // namespace

void start_trimming() {
  const int self = fork_generation();
  if (trimmer.load() == self || trimmer.exchange(self) == self) return;
  // If there is no thread to be had, whoever frees memory next tries again.
  if (!start_detached("unisono-trim", trim_until_done)) trimmer.store(kNobody);
}

bool Heap::trim_all() {
  {
    std::lock_guard lock(heaps_mutex_);
    for (Heap* heap : heaps_) heap->trim();
  }
  return any_to_trim();
}

bool Heap::any_to_trim() {
  std::lock_guard lock(heaps_mutex_);
  return std::any_of(heaps_.begin(), heaps_.end(), [](Heap* heap) { return heap->may_be_trimmed(); });
}

bool Heap::may_be_trimmed() {
  if (scratch_->is_lent()) return true;
  std::lock_guard lock(mutex_);
  return spare_bytes_ + pages_.total - holes_.total > kTrimKeep;
}

void Heap::trim() {
  scratch_->collect();
  const size_t most = memory_available() < kShort ? SIZE_MAX : kTrimBytes;
  for (size_t given = 0; given < most && give_back(kTrimStep); given += kTrimStep) {
  }
  std::lock_guard lock(mutex_);
  drop_spares();  // what is needed again soon becomes a spare again
  cold_ = unused();
}

// Free ranges that are reserved.
Ranges Heap::unused() const {
  Ranges found = pages_;
  for (auto [offset, bytes] : holes_.by_place) found.remove(offset, bytes);
  return found;
}

// Before `more` bytes are reserved: if much is free, and none of it in one piece that is large enough, as much as that
// goes back first. So what the heap holds stays near what is in use, however it is cut up.
void Heap::limit_unused(size_t more) {
  const size_t allowed = in_use() / 2 + kTrimKeep;
  if (pages_.total <= allowed) return;
  const Ranges free = unused();
  if (free.total <= allowed) return;
  size_t left = std::min(more, free.total - allowed) / kPage * kPage;  // only whole pages go
  for (auto [offset, bytes] : free.by_place) {                         // from the beginning: what is at the end grows
    const size_t part = std::min(left, bytes);
    if (part == 0) return;
    cold_.remove(offset, part);
    if (punch(offset, part)) left -= part;
  }
}

size_t Heap::trim_now() {
  scratch_->collect();
  std::lock_guard lock(mutex_);
  return give_all_back();
}

// Some of what has been free since the last trim. False: there is no more of that.
bool Heap::give_back(size_t most) {
  std::lock_guard lock(mutex_);
  if (cold_.total <= kTrimKeep) return false;
  auto [begin, length] = *cold_.by_place.rbegin();  // at the end, since others are taken first
  const size_t bytes = std::min({most, length, cold_.total - kTrimKeep}), offset = begin + length - bytes;
  cold_.remove(offset, bytes);
  punch(offset, bytes);
  return true;
}

// All free pages, at once; their bytes.
size_t Heap::give_all_back() {
  drop_spares();
  const Ranges free = unused();
  cold_ = {};
  size_t given = 0;
  for (auto [offset, bytes] : free.by_place)
    if (punch(offset, bytes)) given += bytes;
  return given;
}

// Gives free pages back to the system.
bool Heap::punch(size_t offset, size_t bytes) {
  if (fallocate(fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                static_cast<off_t>(bytes)) != 0)
    return false;
  holes_.insert(offset, bytes);
  mapping_->forget_populated(offset, bytes);
  return true;
}

}  // namespace unisono
