// The one waiting function of the core, for flags of a call (Group::await) and for letters (Group::await_until).
//
// Steps: spin while an answer is likely within microseconds; then give the processor away with sched_yield; then
// sleep on the flag with a futex, a few milliseconds at most. Yielding is quick between ranks that wait for each other,
// but to somebody who computes (a data loader, another job) it gives a whole time slice, whereas a sleeper that is
// woken comes before him. So a yield that took long is remembered, and for a while waits go to sleep almost at once.
// Between rests, about every millisecond, look at the group's health: has anybody given up, died or left while it still
// owed something, has the deadline passed, has a Python signal handler raised? A sleeper marks itself in its own
// `asleep` line; whoever publishes a flag looks there and wakes. That look is not ordered after the publishing store,
// so a wake-up can be missed: the bounded sleep covers it, and the fast path needs no fence. Ranks that wait for each
// other on one processor while another idles are as slow as the scheduler's clock, and the scheduler may leave them
// there for long. So a waiting rank says where it runs, and of two in one place one moves.
#pragma once

#include <sched.h>

#include "group/group.h"

namespace unisono {

// sched_yield, and whether lately one has taken long: then somebody who computes shares this process's processors.
void give_way();
bool has_busy_neighbours();

struct Group::Patience {
  explicit Patience(Heap& h) : heap(h) {}
  ~Patience() { heap.end_activity(activity); }
  Patience(const Patience&) = delete;
  Patience& operator=(const Patience&) = delete;
  Heap& heap;
  int activity = -1;  // its number, once the wait has lasted so long that peers may want to know of it
  bool told = false;
  int64_t begin_ns = 0;
  int64_t last_look_ns = 0;
  int64_t sleep_ns = 1'000'000;
  int turns = 0;
};

template <class Owes>
Code Group::health(Call& call, Owes owes) {
  if (stopped_.load(std::memory_order_acquire)) return quote_first_cause(call);
  std::vector<int> gone;
  for (int r = 0; r < size(); r++) {
    if (r == rank()) continue;
    const AbortLine& line = peer(r).block.abort();
    uint64_t code = line.code.load(std::memory_order_acquire);  // pairs with Group::abort's release
    if (code && code < static_cast<uint64_t>(Code::count_) && (line.seq <= call.seq || owes(r))) {
      std::vector<int> about;
      int32_t named[std::size(line.peers)];
      std::memcpy(named, line.peers, sizeof named);
      for (int p : named)
        if (p >= 0 && p < size()) about.push_back(p);
      if (about.empty()) about.push_back(r);
      if (static_cast<Code>(code) == Code::peer_lost) return lost(call, about);
      std::string words = text_in(line.text);
      Code kind = static_cast<Code>(code) == Code::interrupted ? Code::aborted : static_cast<Code>(code);
      if (words.find("(reported by") == std::string::npos) words += " (reported by rank " + std::to_string(r) + ")";
      return break_with(call, kind, words, about);
    }
    if (owes(r) && state_of(r) != PeerState::alive && owes(r)) gone.push_back(r);
  }
  if (!gone.empty()) return lost(call, gone);
  if (int64_t now = now_ns(); call.deadline_ns == 0) {
    set_deadline(call, now);
  } else if (now > call.deadline_ns) {
    std::vector<int> late;
    for (int r = 0; r < size(); r++)
      if (r != rank() && owes(r)) late.push_back(r);
    return timed_out(call, late);
  }
  if (call.may_interrupt && python_interrupted && python_interrupted())
    return break_with(call, Code::interrupted, "rank " + std::to_string(rank()) + " was interrupted", {rank()});
  return Code::ok;
}

template <class Ready, class Owes>
Code Group::await_until(Call& call, Ready ready, Owes owes, const Flag* sleep_on, uint64_t seen) {
  Patience patience(*heap_);
  while (!ready()) {
    if (!rest(call, patience, sleep_on, seen)) continue;
    if (Code code = health(call, owes); code != Code::ok) return code;
  }
  return Code::ok;
}

}  // namespace unisono
