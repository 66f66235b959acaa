// The clock of all deadlines and waits.
#pragma once

#include <time.h>

#include <cstdint>

namespace unisono {

inline int64_t now_ns() {  // monotonic
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000 + t.tv_nsec;
}

}  // namespace unisono
