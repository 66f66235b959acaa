// See activity.h.
#include "memory/activity.h"

#include <bit>

namespace unisono {

int Activities::begin(std::byte* heap_base, const Waiting& what) {
  uint32_t used = used_.load(std::memory_order_relaxed);
  int number;
  do {
    number = std::countr_one(used);
    if (static_cast<size_t>(number) >= kActivities) return -1;
  } while (!used_.compare_exchange_weak(used, used | 1u << number, std::memory_order_acquire));
  Activity& line = reinterpret_cast<Activity*>(heap_base + kActivitiesAt)[number];
  const uint64_t stamp = line.stamp.load(std::memory_order_relaxed);
  line.stamp.store(stamp | 1, std::memory_order_relaxed);
  fence(std::memory_order_release);  // pairs with the fence in read_activities: odd before the rest
  copy_words(&line.what, &what, sizeof what);
  line.stamp.store((stamp | 1) + 1, std::memory_order_release);
  return number;
}

void Activities::end(std::byte* heap_base, int number) {
  if (number < 0) return;
  Activity& line = reinterpret_cast<Activity*>(heap_base + kActivitiesAt)[number];
  line.stamp.store(line.stamp.load(std::memory_order_relaxed) | 1, std::memory_order_relaxed);
  used_.fetch_and(~(1u << number), std::memory_order_release);
}

std::vector<Waiting> read_activities(const std::byte* heap_base) {
  std::vector<Waiting> found;
  for (size_t i = 0; i < kActivities; i++) {
    const Activity& line = reinterpret_cast<const Activity*>(heap_base + kActivitiesAt)[i];
    const uint64_t before = line.stamp.load(std::memory_order_acquire);
    Waiting what;
    copy_words(&what, &line.what, sizeof what);
    fence(std::memory_order_acquire);
    if (before == 0 || before % 2 || line.stamp.load(std::memory_order_relaxed) != before) continue;
    what.group[sizeof what.group - 1] = 0;
    found.push_back(what);
  }
  return found;
}

}  // namespace unisono
