// The clock of all deadlines and waits.
#pragma once

#include <time.h>

#include <cstdint>

namespace unisono {

// The sum of two times of which one was read from another process's memory and may be anything: wraps around.
constexpr int64_t wrapped_sum(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
constexpr int64_t wrapped_difference(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}

inline int64_t now_ns() {  // monotonic
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000 + t.tv_nsec;
}

}  // namespace unisono
