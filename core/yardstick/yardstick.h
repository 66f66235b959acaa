// The limit every benchmark row is measured against: the least memory traffic an operation needs.
//
// Plain threads, one per rank but never more than there are CPUs, pinned when the system allows it, do the
// loads, additions and stores of one float32 SUM (or the copies) on memory of the same kind as the heap: a
// shared memfd in 4 KiB pages, touched beforehand. A call is flag barrier, traffic, flag barrier. Nothing is
// checked, described, waited for in the kernel or written twice.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/types.h"

namespace unisono {

class Yardstick {
 public:
  // `bytes` is the size of the whole buffer, as in the benchmark's size column: what every rank reduces or
  // broadcasts, the gathered or scattered whole, one rank's input of an all_to_all. `splits` are weights (or
  // counts), one per rank, empty for equal ones; the root of rooted verbs is rank 0. Several ways of doing
  // the same traffic (cached and non-temporal stores, pushing and pulling) are tried here; the fastest stays.
  // Throws std::invalid_argument for a verb without a yardstick (send, recv) or splits that do not fit, and
  // std::bad_alloc or std::system_error when memory or threads are short.
  Yardstick(Verb verb, size_t bytes, const std::vector<double>& splits, int ranks);
  ~Yardstick();
  Yardstick(const Yardstick&) = delete;
  Yardstick& operator=(const Yardstick&) = delete;

  // Seconds per call over `calls` calls in a row, after `warmup` untimed ones. Its threads sleep between
  // rounds. Blocks: release the GIL around it. One caller at a time.
  double round(int calls = 1, int warmup = 1);

  const char* variant() const;  // the way that was fastest: "cached", "streaming pull", ...
  int threads() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace unisono
