// How to write what another rank is going to read: through this processor's caches, or past them.
//
// Which is faster depends on where the two ranks run, can change any time and is invisible in a virtual machine.
// Measured on Zen, GB/s of writing and of reading what was written: two threads of one core 44 and 43 through the
// caches; two cores of one last-level cache 5 to 8 and 34, for a line that the other has read must be taken away from
// it before each store, but 25 and 17 past them; cores without a common cache 1 to 3 for either, past them 8.
// So the gauge tries. For each verb and size (in powers of two) it keeps what a byte has cost lately in either way,
// takes the cheaper one, and the other one every 64th time. What counts is the time this rank spent on copying and
// reducing, never on waiting. It is about speed only, so ranks need not agree; since all make the same calls, they
// mostly try the same way at the same time.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "base/types.h"

namespace unisono {

class StageGauge {
 public:
  static constexpr size_t kLeast = 4 << 10;  // less is written through the caches

  bool past_caches(Verb verb, size_t bytes) {
    Cell& cell = cell_of(verb, bytes);
    const uint32_t n = cell.calls++;
    if (n < 4) return n & 1;
    const bool cheaper = cell.cost[1] < cell.cost[0];
    return n % 64 == 0 ? !cheaper : cheaper;
  }

  void note(Verb verb, size_t bytes, bool past_caches, int64_t ns) {
    const float found = static_cast<float>(ns) / static_cast<float>(bytes);
    float& cost = cell_of(verb, bytes).cost[past_caches];
    // Noise only adds: believe what is lower at once, what is higher slowly.
    cost = cost == 0 || found < cost ? found : cost + (found - cost) / 8;
  }

 private:
  struct Cell {
    uint32_t calls = 0;
    float cost[2] = {};  // ns per byte
  };
  Cell& cell_of(Verb verb, size_t bytes) {
    const auto size = static_cast<size_t>(std::bit_width(bytes));
    return cells_[static_cast<size_t>(verb)][size < kSizes ? size : kSizes - 1];
  }
  static constexpr size_t kSizes = 40;
  std::array<std::array<Cell, kSizes>, static_cast<size_t>(Verb::count_)> cells_{};
};

}  // namespace unisono
