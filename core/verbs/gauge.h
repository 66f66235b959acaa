// Which of a few ways to move bytes is fastest here and now: it tries them while calls run.
//
// Stores can go through this processor's caches or past them; tensors outside of the heap can go through a ring or be
// read where they are. What is faster depends on where ranks run, on what they did to their tensors before, on how much
// of a shared cache others leave to this machine, and on the processor; it can change any time and is invisible in a
// virtual machine. Measured, GB/s: on Zen writing what another rank reads, and reading it: two threads of one core 44
// and 43 through the caches; two cores of one last-level cache 5 to 8 and 34, for a line that the other has read must
// be taken away from it before each store, but 25 and 17 past them. On a Xeon with 260 MiB of such cache an all_gather
// of 64 MiB in the heap takes 9.2 ms through the caches, 4.1 past them.
// A way is a set of bits (control.h). For each verb, kind of tensors and size (in powers of two) the gauge keeps what a
// byte has cost lately in each way, takes the cheapest, and now and then another one. It is about speed only: results
// have the same bits in every way.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "base/types.h"
#include "group/control.h"
#include "kernels/reduce.h"

namespace unisono {

// How slots and stages are filled, and outputs written.
inline auto copy_to_stage(uint8_t way) {
  return way & kByStrings ? copy_over : way & kStagePastCaches ? copy_stream : copy_bytes;
}
inline auto copy_to_output(uint8_t way) {
  return way & kOutputsPastCaches ? copy_stream : way & kByStrings ? copy_over : copy_bytes;
}

// At most so many ways for one call; the first is taken while nothing is known.
struct Ways {
  uint8_t list[8];
  size_t count = 0;
  void add(uint8_t way) {
    if (!has(way)) list[count++] = way;
  }
  bool has(uint8_t way) const { return std::find(list, list + count, way) != list + count; }
};

class Gauge {
 public:
  struct Key {
    Verb verb;
    bool hidden;  // the tensors are not in the heap
    size_t bytes;
  };
  struct Plan {
    uint8_t way = 0;
    bool is_timed = false;  // whoever asked should `note` how long it took; a look at the clock is dear in short calls
    uint8_t next = 0;       // the way of the next call of this kind
  };

  Plan plan(const Key& key, const Ways& ways) {
    Cell& cell = cell_of(key);
    const bool is_planned = cell.calls && ways.has(cell.next);
    Plan plan{is_planned ? cell.next : ways.list[0], cell.calls == 0 || (is_planned && cell.is_next_timed), 0};
    decide_next(cell, ways, ++cell.calls);
    plan.next = cell.next;
    return plan;
  }

  void note(const Key& key, uint8_t way, int64_t ns) {
    const float found = static_cast<float>(ns) / static_cast<float>(key.bytes);
    float& cost = cell_of(key).cost[way];
    // Noise only adds: believe what is lower at once, what is higher slowly.
    cost = cost == 0 || found < cost ? found : cost + (found - cost) / 8;
  }

 private:
  // A way is tried several times in a row: the first call after another way finds other things in the caches.
  static constexpr uint32_t kInRow = 3, kTryEvery = 128, kTimeEvery = 8;
  struct Cell {
    uint32_t calls = 0;
    uint8_t next = 0;
    bool is_next_timed = false;
    float cost[16] = {};  // by way, ns per byte
  };

  static void decide_next(Cell& cell, const Ways& ways, uint32_t n) {
    const auto count = static_cast<uint32_t>(ways.count);
    if (n < kInRow * count) {
      cell.next = ways.list[n / kInRow];
      cell.is_next_timed = true;
      return;
    }
    cell.next = *std::min_element(ways.list, ways.list + ways.count,
                                  [&](uint8_t a, uint8_t b) { return cell.cost[a] < cell.cost[b]; });
    cell.is_next_timed = n % kTimeEvery == 0;
    if (n % kTryEvery >= kInRow) return;
    const uint32_t turn = n / kTryEvery;
    const uint8_t other = ways.list[turn % count];
    // What costs much more is tried again seldom.
    if (cell.cost[other] > 1.5F * cell.cost[cell.next] && turn / count % 8) return;
    cell.next = other;
    cell.is_next_timed = true;
  }

  Cell& cell_of(const Key& key) {
    const auto size = static_cast<size_t>(std::bit_width(key.bytes));
    return cells_[static_cast<size_t>(key.verb)][key.hidden][size < kSizes ? size : kSizes - 1];
  }
  static constexpr size_t kSizes = 40;
  std::array<std::array<std::array<Cell, kSizes>, 2>, static_cast<size_t>(Verb::count_)> cells_{};
};

}  // namespace unisono
