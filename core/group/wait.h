// The one waiting loop of the core, for flags of a call (`await`) and for anything else (`await_until`).
//
// Steps: spin while an answer is likely within microseconds; then give the processor away with sched_yield; then
// sleep on the flag with a futex, a few milliseconds at most. Yielding is quick between ranks that wait for each other,
// but to somebody who computes (a data loader, another job) it gives a whole time slice, or several: Linux 6.18 takes
// what is left of the own slice away besides. A sleeper that is woken comes before him. So a yield that took long is
// remembered, and for a while there are none: waits go to sleep at once.
// Between rests, about every millisecond, look at the group's health (health.cc).
// Ranks that wait for each other on one processor while another idles are as slow as the scheduler's clock, and the
// scheduler may leave them there for long. So a waiting rank says where it runs, and where there are more than a fair
// share one moves. With more ranks than processors a yield is for ranks that are waited for and need this processor; if
// they all run elsewhere, spinning sees them sooner.
// Invariant: no wait lasts longer than its deadline, or goes on when a rank it needs is gone.
// Memory order: a flag is loaded with acquire and pairs with Group::publish. A sleeper marks itself in its own `asleep`
// word; whoever publishes looks there and wakes. That look is not ordered after the publishing store, so a wake-up can
// be missed: the bounded sleep covers it, and the fast path needs no fence. Whoever waits for a message may be waiting
// for anyone, and for another thread that moves it: he sleeps on the `rings` of all ranks (MessageSleep).
#pragma once

#include <atomic>
#include <functional>

#include "base/function_ref.h"
#include "group/futex.h"
#include "group/group.h"
#include "memory/activity.h"

namespace unisono {

// sched_yield, and whether lately one has taken long: then somebody who computes shares this process's processors.
void give_way();
bool has_busy_neighbours();

// Set once by the bindings: true when a Python signal handler raised.
extern bool (*python_interrupted)();
// How long to spin before giving way, where there are processors for all ranks.
extern int64_t spin_ns;

// Set once by the bindings: how many threads of the program could make calls, and a warning for its log. `now`: this
// thread may take the interpreter's lock.
extern int (*program_threads)();
extern void (*warn)(std::string text, bool now);

class Waiter;

// This thread's line among the activities (memory/activity.h), once its wait has lasted so long that others may want to
// know of it.
class WaitLine {
 public:
  explicit WaitLine(Recorder& recorder) : lines_(recorder.activities()) {}
  ~WaitLine() { end(); }
  WaitLine(const WaitLine&) = delete;
  WaitLine& operator=(const WaitLine&) = delete;
  bool is_due(int64_t now) const { return now >= next_ns_; }  // for another `tell`
  // What waited had not come yet at `now`, or later.
  void tell(const Waiting& what, int64_t now);
  void prove() { lines_.prove(number_); }
  void end();

 private:
  Activities& lines_;
  int number_ = -1;
  bool told_ = false;
  Waiting what_{};
  int64_t next_ns_ = 0;
  int64_t counted_ns_ = 0;
};

// Sleeps until a message has moved, in three steps: say so, look once more, sleep.
class MessageSleep {
 public:
  explicit MessageSleep(Waiter& waiter) : waiter_(waiter) {}
  ~MessageSleep();
  MessageSleep(const MessageSleep&) = delete;
  MessageSleep& operator=(const MessageSleep&) = delete;
  // False: has only begun to listen. Nobody rings for what came before, so the caller must look once more; then it
  // sleeps here until somebody rings, `most_ns` at most.
  bool sleep(int64_t most_ns);

 private:
  void look();  // at all rings
  Waiter& waiter_;
  bool listens_ = false;
  std::vector<Watched> rings_;
};

class Waiter {
 public:
  // Whether a peer still has something to do, so that its death matters.
  using Owes = FunctionRef<bool(int)>;

  explicit Waiter(Group& group) : g_(group), share_(ranks_per_processor(group.peers())) {}

  // Wait until the flags of all peers (or those marked in `who`) have reached `target`.
  Code await(Call& call, Phase phase, uint64_t target, const uint8_t* who = nullptr);
  Code await_rank(Call& call, Phase phase, uint64_t target, int r);
  // Returns ok when `ready()`, which moves messages, else the reason to stop. `at_ease`: others are to move them first.
  Code await_until(Call& call, FunctionRef<bool()> ready, Owes owes, bool at_ease = false);

  // Has anybody given up, died or left while it owed something; has the deadline passed; did Python get a signal?
  Code health(Call& call, Owes owes);

  // The time limit of a call, in nanoseconds.
  int64_t limit_of(const Call& call) const { return call.timeout_ns ? call.timeout_ns : g_.facts().timeout_ns; }

  // What others are told about a wait.
  Waiting words_of(const Call& call, WaitFor what, int64_t since_ns, Owes owes) const;

  // Says where this thread runs.
  uint32_t note_processor();

  // Called now and then while a call of this group waits, so that messages in flight do not wait with it.
  std::function<void()> meanwhile;

 private:
  struct Patience;  // how long the present wait has lasted, and what to do next
  Code await_slow(Call& call, Phase phase, uint64_t target, int r, const uint8_t* who);
  bool rest(Call& call, Patience& patience, const Flag* flag, uint64_t seen);  // true: look at health now
  bool sleep(const Call& call, Patience& patience, const Flag* flag, uint64_t seen, int64_t now);
  Code look(Call& call, Patience& patience, int64_t now);
  bool owes_here(Owes owes);
  void part_ways();  // more ranks than its share on one processor: one of them moves
  void set_deadline(Call& call, int64_t now) const { call.deadline_ns = now + limit_of(call); }

  // health.cc
  Code heed_aborts(Call& call, Owes owes);
  Code lost(Call& call, std::vector<int> gone);
  Code timed_out(Call& call, Owes owes);
  void warn_if_late(Call& call, Owes owes, int64_t now) const;
  std::vector<int> late_ranks(Owes owes) const;
  std::string where_is(int r) const;
  std::string where_was(int r, bool left) const;
  std::string last_call(int r, bool with_state = false) const;
  std::string waits_of(int r) const;
  Code look_for_deadlock(Call& call, Patience& patience, int64_t now);

  friend class MessageSleep;
  Group& g_;
  const size_t share_;  // ranks on a processor, if all have as many
  std::mutex listeners_mutex_;
  int listeners_ = 0;
  // When a thread of this group last moved to another processor; relaxed, since it only keeps moves apart.
  std::atomic<int64_t> moved_ns_{0};
};

}  // namespace unisono
