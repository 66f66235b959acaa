// See wait.h.
#include "group/wait.h"

#include <sched.h>
#include <time.h>

#include <algorithm>

#include "base/faults.h"
#include "base/turns.h"
#include "group/deadlock.h"
#include "group/futex.h"

namespace unisono {

bool (*python_interrupted)() = nullptr;
int (*program_threads)() = nullptr;
void (*warn)(std::string, bool) = nullptr;
int64_t spin_ns = 2'000;

namespace {

constexpr int kFirstLooks = 100;  // a few microseconds: the usual answer of a rank that is on its way
constexpr int64_t kMoveEvery = 2'000'000;
constexpr int64_t kSpinForOthers = 20'000;  // more ranks than processors: for those that run elsewhere
constexpr int64_t kLookEvery = 1'000'000;
constexpr int64_t kYieldFor = 3'000'000;  // then sleep: a wake-up costs 50 to 100 us, a busy core costs more
constexpr int64_t kLongYield = 400'000;   // ranks that wait for each other give way much sooner
// To find out again costs a neighbour's turn; but it may have been a rank of this group that came late, and where more
// ranks than processors wait for each other, sleeping costs several times as much as giving way. So it is remembered
// briefly, and twice as long each time that it is found again.
constexpr int64_t kRememberFirst = 2'000'000, kRememberLongest = 2'000'000'000;
constexpr int64_t kAgainWithin = 20'000'000;  // after it was forgotten: the next wait of a training step or so
constexpr int64_t kLongestSleep = 8'000'000;  // bounds a missed wake-up and the detection of a death
constexpr int64_t kTellEvery = 20'000'000;    // whether the same ranks are waited for as before
constexpr int64_t kCountAfter = 100'000'000, kCountEvery = 50'000'000;

// Written by give_way and read by has_busy_neighbours in any thread of this process, relaxed: hints. What a thread
// misses of another's costs one step of doubling.
std::atomic<int64_t> busy_until{0};
std::atomic<int64_t> remember_for{kRememberFirst};

thread_local bool has_short_turns = false;

// For good: a thread that calls again soon is woken sooner then, and waits less for its next turn when it has lost one.
// All that give way to each other on one processor need turns of the same length: the scheduler puts one with longer
// turns, when it gives way, behind many turns of the others.
void keep_short_turns() {
  if (has_short_turns) return;
  has_short_turns = true;
  ShortTurns().keep();
}

}  // namespace

void give_way() {
  keep_short_turns();
  const int64_t before = now_ns();
  sched_yield();
  const int64_t after = now_ns();
  const int64_t until = busy_until.load(std::memory_order_relaxed);
  if (after - before <= kLongYield || before < until) return;  // or another thread has met the same neighbour
  const int64_t last = remember_for.load(std::memory_order_relaxed);
  const bool again = before < until + kAgainWithin;
  const int64_t next = again ? std::min(2 * last, kRememberLongest) : kRememberFirst;
  remember_for.store(next, std::memory_order_relaxed);
  busy_until.store(after + next, std::memory_order_relaxed);
}

bool has_busy_neighbours() {
  return now_ns() < busy_until.load(std::memory_order_relaxed);
}

bool MessageSleep::sleep(int64_t most_ns) {
  Group& g = waiter_.g_;
  if (!listens_) {
    listens_ = true;
    std::lock_guard lock(waiter_.listeners_mutex_);
    waiter_.listeners_++;
    g.mine().listening().store(1, std::memory_order_relaxed);
    look();
    fence(std::memory_order_seq_cst);  // whoever does not see it yet has moved what the caller will find
    return false;
  }
  keep_short_turns();
  if (g.peers().size() > kMostWatched || !sleep_on_any(rings_.data(), rings_.size(), now_ns() + most_ns)) {
    const timespec nap{0, std::min<int64_t>(most_ns, 200'000)};
    nanosleep(&nap, nullptr);
  }
  look();
  return true;
}

void MessageSleep::look() {
  rings_.clear();
  for (const Peer& p : waiter_.g_.peers())
    rings_.emplace_back(p.block.rings(), p.block.rings().load(std::memory_order_relaxed));
  fence(std::memory_order_seq_cst);  // what the caller looks at from now on is no older
}

MessageSleep::~MessageSleep() {
  if (!listens_) return;
  std::lock_guard lock(waiter_.listeners_mutex_);
  if (--waiter_.listeners_ == 0) waiter_.g_.mine().listening().store(0, std::memory_order_relaxed);
}

struct Waiter::Patience {
  Patience(Waiter& waiter, WaitFor what, Owes owes)
      : what(what), owes(owes), line(waiter.g_.heap().recorder()), finder(waiter.g_), until_moved(waiter) {}
  WaitFor what;
  Owes owes;
  WaitLine line;
  DeadlockFinder finder;
  MessageSleep until_moved;
  int64_t begin_ns = 0;
  int64_t last_look_ns = 0;
  int64_t sleep_ns = 1'000'000;
  int turns = 0;
  bool at_ease = false;
};

uint32_t Waiter::note_processor() {
  auto here = static_cast<uint32_t>(sched_getcpu() + 1);
  std::atomic<uint32_t>& said = g_.mine().processor();
  if (said.load(std::memory_order_relaxed) != here) said.store(here, std::memory_order_relaxed);
  return here;
}

// Whether somebody who is waited for needs this thread's processor.
bool Waiter::owes_here(Owes owes) {
  const uint32_t here = note_processor();
  for (int r = 0; r < g_.size(); r++)
    if (r != g_.rank() && g_.peer(r).block.processor().load(std::memory_order_relaxed) == here && owes(r)) return true;
  return false;
}

void Waiter::part_ways() {
  const uint32_t here = note_processor();
  if (here == 0 || here > CPU_SETSIZE) return;
  auto ranks_on = [&](uint32_t processor, int below) {
    size_t n = 0;
    for (int r = 0; r < below; r++) n += g_.peer(r).block.processor().load(std::memory_order_relaxed) == processor;
    return n;
  };
  if (ranks_on(here, g_.rank()) < share_) return;
  int64_t now = now_ns();
  if (now - moved_ns_.load(std::memory_order_relaxed) < kMoveEvery) return;
  moved_ns_.store(now, std::memory_order_relaxed);
  cpu_set_t allowed, elsewhere;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  elsewhere = allowed;
  for (const Peer& p : g_.peers())
    if (uint32_t m = p.block.processor().load(std::memory_order_relaxed); m && m <= CPU_SETSIZE)
      if (ranks_on(m, g_.size()) >= share_) CPU_CLR(m - 1, &elsewhere);
  if (CPU_COUNT(&elsewhere) == 0) {
    if (g_.facts().crowded) return;
    elsewhere = allowed;
    CPU_CLR(here - 1, &elsewhere);
    if (CPU_COUNT(&elsewhere) == 0) return;
  }
  // The first call moves this thread at once; the second gives it back its freedom.
  if (sched_setaffinity(0, sizeof elsewhere, &elsewhere) == 0) sched_setaffinity(0, sizeof allowed, &allowed);
  note_processor();
}

void WaitLine::tell(const Waiting& what, int64_t now) {
  if (!told_)
    number_ = lines_.begin(what);
  else if (std::memcmp(&what, &what_, sizeof what) != 0)
    lines_.change(number_, what);
  told_ = true;
  what_ = what;
  next_ns_ = now + kTellEvery;
  // Only a wait that may be part of a deadlock is worth the interpreter's lock. To take it may last: what is said holds
  // for `now`, since meanwhile that may have come which this thread waits for.
  if (!what.blocks) return lines_.count_threads(number_, now, 0);
  if (!program_threads || now - what.since_ns < kCountAfter || now - counted_ns_ < kCountEvery) return;
  counted_ns_ = now;
  const int threads = program_threads();
  reach("counting");
  lines_.count_threads(number_, now, threads);
  reach("counting");
}

void WaitLine::end() {
  if (told_) lines_.end(number_);
  told_ = false;
  number_ = -1;
  next_ns_ = 0;
}

Waiting Waiter::words_of(const Call& call, WaitFor what, int64_t since_ns, Owes owes) const {
  Waiting words{};
  words.since_ns = since_ns;
  words.seq = call.seq;
  words.tag = call.tag;
  words.group_id = g_.facts().id;
  words.peer = static_cast<int32_t>(call.correspondent);
  words.verb = call.verb;
  words.what = what;
  words.blocks = call.may_interrupt;
  for (int r = 0; r < g_.size(); r++)
    if (r != g_.rank() && owes(r)) words.owed[r / 64] |= uint64_t{1} << r % 64;
  if (call.site) std::memcpy(words.site, call.site, sizeof words.site);
  copy_text(words.group, sizeof words.group, g_.facts().name);
  return words;
}

// False: before it sleeps, the caller must look once more.
bool Waiter::sleep(const Call& call, Patience& patience, const Flag* flag, uint64_t seen, int64_t now) {
  const auto most_ns = std::clamp<int64_t>(call.deadline_ns - now, 0, patience.sleep_ns);
  if (flag) {
    keep_short_turns();
    g_.mine().asleep().store(1, std::memory_order_relaxed);
    sleep_on(*flag, seen, most_ns);
    g_.mine().asleep().store(0, std::memory_order_relaxed);
  } else if (!patience.until_moved.sleep(most_ns)) {
    return false;
  }
  patience.sleep_ns = std::min(patience.sleep_ns * 2, kLongestSleep);
  patience.last_look_ns = now_ns();
  return true;
}

bool Waiter::rest(Call& call, Patience& patience, const Flag* flag, uint64_t seen) {
  const bool crowded = g_.facts().crowded;
  if (patience.begin_ns == 0) {
    patience.begin_ns = patience.last_look_ns = now_ns();
    if (call.deadline_ns == 0) set_deadline(call, patience.begin_ns);
  }
  if (patience.turns++ == 0 && !(crowded && has_busy_neighbours())) part_ways();
  if (meanwhile) meanwhile();
  const int64_t now = now_ns(), waited = now - patience.begin_ns;
  int64_t spin_for = spin_ns;
  if (crowded) {
    const bool spins = flag && waited < kSpinForOthers && !has_busy_neighbours() && !owes_here(patience.owes);
    spin_for = spins ? kSpinForOthers : 0;
  }
  if ((waited < spin_for && !patience.at_ease) || !is_up(Defence::rest)) {
    for (int i = 0; i < 8; i++) pause_cpu();
  } else if (waited < kYieldFor && !patience.at_ease && !has_busy_neighbours()) {
    give_way();
  } else if (sleep(call, patience, flag, seen, now)) {
    return true;
  }
  if (now - patience.last_look_ns < kLookEvery) return false;
  patience.last_look_ns = now;
  return true;
}

Code Waiter::await(Call& call, Phase phase, uint64_t target, const uint8_t* who) {
  for (int r = 0; r < g_.size(); r++) {
    if (r == g_.rank() || (who && !who[r]) || g_.has_reached(r, phase, target)) continue;
    if (Code code = await_slow(call, phase, target, r, who); code != Code::ok) return code;
  }
  return Code::ok;
}

Code Waiter::await_rank(Call& call, Phase phase, uint64_t target, int r) {
  return g_.has_reached(r, phase, target) ? Code::ok : await_slow(call, phase, target, r, nullptr);
}

Code Waiter::await_slow(Call& call, Phase phase, uint64_t target, int r, const uint8_t* who) {
  Flag& flag = g_.flag_of(r, phase, target);
  auto owes = [&](int p) { return (!who || who[p]) && !g_.has_reached(p, phase, target); };
  if (!g_.facts().crowded)
    for (int i = 0; i < kFirstLooks; i++) {
      if (flag.load(std::memory_order_acquire) >= target) return Code::ok;
      pause_cpu();
    }
  call.end_lease();
  Patience patience(*this, phase == Phase::descriptor ? WaitFor::callers : WaitFor::data, owes);
  for (;;) {
    uint64_t seen = flag.load(std::memory_order_acquire);
    if (seen >= target) return Code::ok;
    if (!rest(call, patience, &flag, seen)) continue;
    const int64_t now = now_ns();
    if (flag.load(std::memory_order_acquire) >= target) return Code::ok;
    if (Code code = look(call, patience, now); code != Code::ok) return code;
  }
}

Code Waiter::await_until(Call& call, FunctionRef<bool()> ready, Owes owes, bool at_ease) {
  if (ready()) return Code::ok;
  call.end_lease();
  Patience patience(*this, WaitFor::message, owes);
  patience.at_ease = at_ease;
  while (!ready()) {
    if (!rest(call, patience, nullptr, 0)) continue;
    const int64_t now = now_ns();
    if (ready()) break;
    if (Code code = look(call, patience, now); code != Code::ok) return code;
  }
  return Code::ok;
}

// Whether the wait, which was not over at `now`, may go on; and what it tells others.
Code Waiter::look(Call& call, Patience& patience, int64_t now) {
  // A deadlock that is proven comes first: whoever has raised it already is gone from the group.
  if (patience.finder.is_proven())
    if (Code code = look_for_deadlock(call, patience, now); code != Code::ok) return code;
  if (Code code = health(call, patience.owes); code != Code::ok) return code;
  if (patience.line.is_due(now))
    patience.line.tell(words_of(call, patience.what, patience.begin_ns, patience.owes), now);
  warn_if_late(call, patience.owes, now);
  return look_for_deadlock(call, patience, now);
}

Code Waiter::look_for_deadlock(Call& call, Patience& patience, int64_t now) {
  if (!is_up(Defence::cycles)) return Code::ok;
  if (patience.what == WaitFor::data || now - patience.begin_ns < kDeadlockAfter) return Code::ok;
  if (!patience.finder.look(call.seq, patience.what, now)) return Code::ok;
  patience.line.prove();
  if (!patience.finder.all_know(now)) return Code::ok;
  const DeadlockFinder::Words words = patience.finder.words();
  Code code = g_.break_with(call, Code::deadlock, words.text, words.peers);
  call.failure.lines = words.lines;
  return code;
}

}  // namespace unisono
