// Sleeping on a flag in shared memory, and waking those who do.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
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

// A flag and what it was, in the words of futex_waitv(2).
struct Watched {
  uint64_t seen;
  uint64_t address;
  uint32_t flags = 2;  // 32 bits wide, shared between processes
  uint32_t reserved = 0;
  Watched(const Flag& flag, uint64_t seen)
      : seen(static_cast<uint32_t>(seen)), address(reinterpret_cast<uint64_t>(low_half(flag))) {}
};
constexpr size_t kMostWatched = 128;

// As `sleep_on`, on several flags. False: this system cannot (Linux before 5.16, or a sandbox).
inline bool sleep_on_any(const Watched* flags, size_t count, int64_t until_ns) {
  constexpr long kFutexWaitv = 449;  // on all architectures
  const timespec until{until_ns / 1'000'000'000, until_ns % 1'000'000'000};
  return syscall(kFutexWaitv, flags, count, 0, &until, CLOCK_MONOTONIC) >= 0 || errno == EAGAIN || errno == EINTR ||
         errno == ETIMEDOUT;
}

inline void wake_all_on(const Flag& flag) {
  syscall(SYS_futex, low_half(flag), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace unisono
