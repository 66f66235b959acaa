// Sleeping on a flag in shared memory, and waking those who do.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <bit>
#include <climits>

#include "base/shared.h"

namespace unisono {

// The half of a flag that changes; futexes are 32 bits wide.
inline uint32_t* low_half(const Flag& flag) {
  auto* words = reinterpret_cast<uint32_t*>(const_cast<Flag*>(&flag));
  return std::endian::native == std::endian::little ? words : words + 1;
}

// Returns at once if the flag is not `seen` any more; else after a wake-up, a signal or `most_ns` (below a second).
inline void sleep_on(const Flag& flag, uint64_t seen, int64_t most_ns) {
  const timespec t{0, most_ns};
  syscall(SYS_futex, low_half(flag), FUTEX_WAIT, static_cast<uint32_t>(seen), &t, nullptr, 0);
}

inline void wake_all_on(const Flag& flag) {
  syscall(SYS_futex, low_half(flag), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace unisono
