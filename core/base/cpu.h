// What this processor can do: its vector instructions and its last-level cache.
//
// Below the kernels, because ranks compare these when they join: all of a group use the instruction set that all have.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace unisono {

enum class Isa : uint8_t { scalar, avx2, avx512, avx512_bf16 };  // each has those before it

Isa best_isa();         // of this CPU (and operating system)
bool set_isa(Isa isa);  // for tests and for groups whose CPUs differ; false if this CPU lacks it
const char* isa_name(Isa isa);

namespace detail {
// Written by set_isa, read by current_isa, both relaxed: the number publishes nothing, the kernel tables are constant.
constexpr int kNoIsa = -1;
extern std::atomic<int> chosen_isa;
}  // namespace detail

bool is_intel();

// x86's string instruction moves long strings at full speed: since 2013 at Intel, since 2020 at AMD.
bool has_fast_strings();

// What kernels and copies use; starts as best_isa().
inline Isa current_isa() {
  const int chosen = detail::chosen_isa.load(std::memory_order_relaxed);
  return chosen == detail::kNoIsa ? best_isa() : static_cast<Isa>(chosen);
}

// The bytes of the last-level cache that this processor shares, not what sysconf adds up over a whole socket.
size_t last_cache_bytes();

}  // namespace unisono
