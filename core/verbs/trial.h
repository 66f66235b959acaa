// A short measurement of how ordinary tensors move fastest on this kind of machine (base/tuning.h).
//
// Two threads of this process stand for two ranks that exchange so many bytes, in both ways a call can take: through
// rings, with pieces of several lengths, and by reading each other's memory where it is. Reading is the kernel's work
// and costs the same within a process as between two. Ways that are compared take turns, since a machine may change its
// speed meanwhile, and the least of a few rounds counts. It takes less than 100 ms.
#pragma once

#include <string>
#include <vector>

#include "base/tuning.h"

namespace unisono {

struct Trial {
  struct Time {
    std::string way;
    size_t bytes;
    double us;
  };
  Tuning tuning;             // unknown: there was no second processor or no memory
  bool is_complete = false;  // there was time for all of it: worth keeping
  std::vector<Time> times;   // of both ways
};

Trial measure_tuning();

}  // namespace unisono
