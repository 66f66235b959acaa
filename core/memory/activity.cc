// See activity.h.
#include "memory/activity.h"

#include <algorithm>
#include <bit>

namespace unisono {

int Activities::begin(const Waiting& what) {
  uint32_t used = used_.load(std::memory_order_relaxed);
  int number;
  do {
    number = std::countr_one(used);
    if (static_cast<size_t>(number) >= kActivities) return -1;
  } while (!used_.compare_exchange_weak(used, used | 1u << number, std::memory_order_acquire));
  lines_[number].counted.store(0, std::memory_order_relaxed);
  lines_[number].proven.store(0, std::memory_order_relaxed);
  write(lines_[number], what);
  return number;
}

void Activities::change(int number, const Waiting& what) {
  if (number >= 0) write(lines_[number], what);
}

void Activities::write(Activity& line, const Waiting& what) {
  const uint64_t stamp = line.stamp.load(std::memory_order_relaxed);
  line.stamp.store(stamp | 1, std::memory_order_relaxed);
  fence(std::memory_order_release);  // pairs with the fence in read_activities: odd before the rest
  copy_words(&line.what, &what, sizeof what);
  line.stamp.store((stamp | 1) + 1, std::memory_order_release);
}

void Activities::count_threads(int number, int64_t now_ns, int threads) {
  if (number < 0) return;
  const auto milliseconds = static_cast<uint64_t>(now_ns / 1'000'000);
  lines_[number].counted.store(milliseconds << 8 | static_cast<uint64_t>(std::clamp(threads, 0, 255)),
                               std::memory_order_release);
}

void Activities::prove(int number) {
  if (number >= 0) lines_[number].proven.store(1, std::memory_order_release);
}

void Activities::end(int number) {
  if (number < 0) return;
  Activity& line = lines_[number];
  line.stamp.store(line.stamp.load(std::memory_order_relaxed) | 1, std::memory_order_relaxed);
  used_.fetch_and(~(1u << number), std::memory_order_release);
}

std::vector<ReadWaiting> read_activities(const std::byte* lines) {
  std::vector<ReadWaiting> found;
  for (size_t i = 0; i < kActivities; i++) {
    const Activity& line = reinterpret_cast<const Activity*>(lines)[i];
    const uint64_t before = line.stamp.load(std::memory_order_acquire);
    ReadWaiting read;
    const uint64_t counted = line.counted.load(std::memory_order_acquire);
    read.proven = line.proven.load(std::memory_order_acquire) != 0;
    copy_words(&read.what, &line.what, sizeof read.what);
    fence(std::memory_order_acquire);
    if (before == 0 || before % 2 || line.stamp.load(std::memory_order_relaxed) != before) continue;
    read.stamp = before;
    read.counted_ms = static_cast<int64_t>(counted >> 8);
    read.threads = static_cast<int>(counted & 255);
    read.what.group[sizeof read.what.group - 1] = 0;
    read.what.site[sizeof read.what.site - 1] = 0;
    if (read.what.verb >= Verb::count_ || read.what.what >= WaitFor::count_) continue;  // written by no version of ours
    found.push_back(read);
  }
  return found;
}

}  // namespace unisono
