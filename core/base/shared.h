// The words that processes share: flags, lines, and copies of what may change while it is read.
//
// A *flag* is a 64-bit number in shared memory with one writer. Its store(release) pairs with a load(acquire) of the
// reader, so whoever saw the flag sees all that was written before it. No word is read
// and changed in one step by two processes.
// A *line* is 128 bytes, two cache lines, so that flags of different writers never share what processors exchange.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace unisono {

constexpr size_t kLineBytes = 128;

using Flag = std::atomic<uint64_t>;
static_assert(Flag::is_always_lock_free && sizeof(Flag) == sizeof(uint64_t));

// For what may be written while it is read: the reader copies it, then looks whether it was. Whole words, relaxed; the
// fences of both sides order them.
inline void copy_words(void* to, const void* from, size_t bytes) {
  for (size_t i = 0; i < bytes / sizeof(uint64_t); i++)
    __atomic_store_n(static_cast<uint64_t*>(to) + i,
                     __atomic_load_n(static_cast<const uint64_t*>(from) + i, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
}

inline void fence([[maybe_unused]] std::memory_order order) {
#if !defined(__SANITIZE_THREAD__)  // which knows no fences
  std::atomic_thread_fence(order);
#endif
}

}  // namespace unisono
