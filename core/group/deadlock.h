// Finds out, while a call waits, that it can never end: ranks wait for each other in a cycle over several groups.
//
// Vocabulary. The *program* of a process is all its threads that can make calls. A *lane* is the order of collectives
// of one process in one group. What waits is told in the heaps (memory/activity.h), and from that alone follows:
//   a collective that waits for callers is stuck if the lane of one rank it waits for is stuck;
//   a lane is stuck if the call it waits in is, or, with no call begun or queued, if the program is: nobody will call;
//   a message is stuck if the program of the rank it waits for is (of all ranks, if any may send), and that rank has no
//   message under way that is not waited for;
//   a program is stuck if as many of its threads as there are wait in calls without a limit of their own, all stuck.
// Everything is taken for stuck and what is not is struck out until nothing changes; what is left supports itself.
// Invariant: no false alarm. What is not known counts as "not stuck": a process that is not mapped here, a thread that
// is not in a call, a handler that runs, a call whose data moves. The states of several processes are not read in one
// moment, and a thread that says it waits may not yet have seen that it need not. So they are read again later, and if
// no stamp and no counter has changed and every wait was confirmed and every thread counted in between, then all of
// them held at once, at the end of the first look. A proof is held back until the other processes have found theirs,
// since a rank that raises leaves the cycle.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "group/group.h"

namespace unisono {

constexpr int64_t kDeadlockAfter = 250'000'000;  // waits that are shorter are not looked at

class DeadlockFinder {
 public:
  explicit DeadlockFinder(Group& group) : g_(group) {}

  // Called now and then by the wait for call `seq`; true once the deadlock is proven.
  bool look(uint64_t seq, WaitFor what, int64_t now);
  bool is_proven() const { return proven_ns_ != 0; }
  // Afterwards: have all others in it proven it too, or had the time to?
  bool all_know(int64_t now);

  struct Words {
    std::string text;
    std::vector<std::string> lines;
    std::vector<int> peers;  // those of this group that are waited for
  };
  Words words() const { return words_; }

 private:
  class Picture;

  Group& g_;
  int64_t next_ns_ = 0;
  int64_t first_ms_ = 0;               // when the present picture was first seen
  std::vector<uint64_t> signature_;    // of that picture
  int64_t proven_ns_ = 0;              // 0: not yet
  std::map<uint64_t, uint64_t> open_;  // processes that have not said so yet, with the stamp of their wait
  Words words_;
};

}  // namespace unisono
