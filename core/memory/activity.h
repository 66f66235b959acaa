// What the threads of a process wait for, in any of its groups, told in its heap: a peer whose time runs out can say
// what the rank it waits for is doing, tools can show who waits for whom, and a cycle of waiting can be found.
//
// A page of lines in the heap's recorder (recorder.h), one per waiting thread. Each is a sequence lock: `stamp` is odd
// while the line is written, even and not 0 while there is something to read. A reader copies the line between two
// looks at the stamp and believes it only if both were the same even number.
#pragma once

#include <atomic>
#include <cstddef>
#include <type_traits>
#include <vector>

#include "base/shared.h"
#include "base/types.h"

namespace unisono {

// What a wait needs so that it can end.
enum class WaitFor : uint8_t {
  callers,  // of a collective: that ranks make the same call
  data,     // of a collective that all ranks have called: nothing but time
  message,  // that a rank sends, or receives
  ticket,   // a thread waits for an asynchronous call, which has a line of its own while it waits
  count_
};

constexpr size_t kSiteBytes = 56;

struct Waiting {
  int64_t since_ns;
  uint64_t seq;
  int64_t tag;  // of a message
  uint64_t group_id;
  uint64_t owed[4];  // a bit for every rank of the group that is waited for
  int32_t peer;      // of a message; -1: anyone, or a collective
  Verb verb;
  WaitFor what;
  // A thread of the program waits here until the call is over, however long that takes: it can do nothing else.
  uint8_t blocks;
  uint8_t unused;
  char site[kSiteBytes];  // where in the program the call was made: "train.py:88"
  char group[96];

  bool owes(int r) const { return r >= 0 && r < 256 && (owed[r / 64] >> r % 64 & 1); }
};
// For copy_words, and so that two can be compared as bytes.
static_assert(std::has_unique_object_representations_v<Waiting> && sizeof(Waiting) % sizeof(uint64_t) == 0);

struct alignas(kLineBytes) Activity {
  // Written by begin and end, read by read_activities. Odd is ordered before the words by a release fence, even after
  // them by a release store; the reader's acquire load and acquire fence are their partners.
  Flag stamp;
  // How many threads of the process could make calls (0 where this one's wait blocks none), and when that was counted
  // and the wait not over: milliseconds << 8 | threads. 0: not yet. Stored with release by count_threads, loaded with
  // acquire by read_activities: the threads were counted while the line said what it says.
  Flag counted;
  Flag proven;  // not 0 once this wait was found to be part of a deadlock; released by prove, acquired by
                // read_activities
  Waiting what;
};
static_assert(sizeof(Activity) == 2 * kLineBytes);

constexpr size_t kActivities = 16;

// This process's own lines.
class Activities {
 public:
  void place(std::byte* lines) { lines_ = reinterpret_cast<Activity*>(lines); }
  // The number of the line taken, for the others; -1 if as many threads wait already: then this one is not told.
  int begin(const Waiting& what);
  void change(int number, const Waiting& what);
  void count_threads(int number, int64_t now_ns, int threads);
  void prove(int number);
  void end(int number);

 private:
  void write(Activity& line, const Waiting& what);
  Activity* lines_ = nullptr;
  // A bit for each line in use. Taken with acquire, given back with release: the next user of a line continues from the
  // stamp the last one left.
  std::atomic<uint32_t> used_{0};
};

struct ReadWaiting {
  Waiting what;
  uint64_t stamp;  // the same number later: the same wait, with nothing changed
  int64_t counted_ms;
  int threads;  // 0: not known
  bool proven;
};
// What the threads of the process whose recorder lies there wait for.
std::vector<ReadWaiting> read_activities(const std::byte* lines);

}  // namespace unisono
