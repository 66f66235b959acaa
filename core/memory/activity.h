// What the threads of a process wait for, in any of its groups, told in its heap: a peer whose time runs out can say
// what the rank it waits for is doing.
//
// A few lines in the heap's first page, one per waiting thread. Each is a sequence lock: `stamp` is odd while the line
// is written, even and not 0 while there is something to read. A reader copies the line between two looks at the stamp
// and believes it only if both were the same even number.
#pragma once

#include <atomic>
#include <cstddef>
#include <type_traits>
#include <vector>

#include "base/shared.h"
#include "base/types.h"

namespace unisono {

struct Waiting {
  int64_t since_ns;
  uint64_t seq;
  int64_t tag;   // of a message
  int32_t peer;  // of a message; -1: anyone, or a collective
  Verb verb;
  char group[83];
};
static_assert(std::is_trivially_copyable_v<Waiting> && sizeof(Waiting) % sizeof(uint64_t) == 0);  // for copy_words

struct alignas(kLineBytes) Activity {
  // Written by begin and end, read by read_activities. Odd is ordered before the words by a release fence, even after
  // them by a release store; the reader's acquire load and acquire fence are their partners.
  Flag stamp;
  Waiting what;
};
static_assert(sizeof(Activity) == kLineBytes);

constexpr size_t kActivities = 16;
constexpr size_t kActivitiesAt = 1024;  // in the heap's first page
static_assert(kActivitiesAt % kLineBytes == 0 && kActivitiesAt + kActivities * sizeof(Activity) <= 4096);

// This process's own lines.
class Activities {
 public:
  // The number of the line taken, for `end`; -1 if as many threads wait already: then this one is not told.
  int begin(std::byte* heap_base, const Waiting& what);
  void end(std::byte* heap_base, int number);

 private:
  // A bit for each line in use. Taken with acquire, given back with release: the next user of a line continues from the
  // stamp the last one left.
  std::atomic<uint32_t> used_{0};
};

// What the threads of the process whose heap lies at `heap_base` wait for.
std::vector<Waiting> read_activities(const std::byte* heap_base);

}  // namespace unisono
