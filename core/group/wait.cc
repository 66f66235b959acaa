// See wait.h.
#include "group/wait.h"

#include <sched.h>
#include <time.h>

#include <algorithm>

#include "group/futex.h"

namespace unisono {

bool (*python_interrupted)() = nullptr;
int64_t spin_ns = 2'000;

namespace {

constexpr int kFirstLooks = 100;  // a few microseconds: the usual answer of a rank that is on its way
constexpr int64_t kMoveEvery = 2'000'000;
constexpr int64_t kLookEvery = 1'000'000;
constexpr int64_t kYieldFor = 3'000'000;           // then sleep: a wake-up costs 50 to 100 us, a busy core costs more
constexpr int64_t kYieldBriefly = 20'000;          // the same beside busy neighbours
constexpr int64_t kLongYield = 400'000;            // ranks that wait for each other give way much sooner
constexpr int64_t kRememberFor = 2'000'000'000;    // to find out again costs a neighbour's turn
constexpr int64_t kRememberBriefly = 100'000'000;  // where there is nothing to sleep on, and a nap costs more
constexpr int64_t kLongestSleep = 8'000'000;       // bounds a missed wake-up and the detection of a death

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Written by give_way and read by has_busy_neighbours in any thread of this process, relaxed: a hint on its own.
std::atomic<int64_t> seen_busy{0};

bool was_busy_within(int64_t ns) {
  const int64_t seen = seen_busy.load(std::memory_order_relaxed);
  return seen && now_ns() < seen + ns;
}

}  // namespace

void give_way() {
  const int64_t before = now_ns();
  sched_yield();
  const int64_t after = now_ns();
  if (after - before > kLongYield) seen_busy.store(after, std::memory_order_relaxed);
}

bool has_busy_neighbours() {
  return was_busy_within(kRememberFor);
}

struct Waiter::Patience {
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

uint32_t Waiter::note_processor() {
  auto here = static_cast<uint32_t>(sched_getcpu() + 1);
  std::atomic<uint32_t>& said = g_.mine().processor();
  if (said.load(std::memory_order_relaxed) != here) said.store(here, std::memory_order_relaxed);
  return here;
}

void Waiter::part_ways() {
  uint32_t here = note_processor();
  if (here == 0 || here > CPU_SETSIZE) return;
  bool shared = false;
  for (int r = 0; r < g_.rank() && !shared; r++)
    shared = g_.peer(r).block.processor().load(std::memory_order_relaxed) == here;
  if (!shared) return;
  int64_t now = now_ns();
  if (now - moved_ns_.load(std::memory_order_relaxed) < kMoveEvery) return;
  moved_ns_.store(now, std::memory_order_relaxed);
  cpu_set_t allowed, elsewhere;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  elsewhere = allowed;
  for (const Peer& p : g_.peers())
    if (uint32_t m = p.block.processor().load(std::memory_order_relaxed); m && m <= CPU_SETSIZE)
      CPU_CLR(m - 1, &elsewhere);
  if (CPU_COUNT(&elsewhere) == 0) {
    elsewhere = allowed;
    CPU_CLR(here - 1, &elsewhere);
    if (CPU_COUNT(&elsewhere) == 0) return;
  }
  // The first call moves this thread at once; the second gives it back its freedom.
  if (sched_setaffinity(0, sizeof elsewhere, &elsewhere) == 0) sched_setaffinity(0, sizeof allowed, &allowed);
  note_processor();
}

void Waiter::tell_waiting(const Call& call, Patience& patience) {
  patience.told = true;
  Waiting what{patience.begin_ns, call.seq, call.tag, static_cast<int32_t>(call.correspondent), call.verb, {}};
  copy_text(what.group, sizeof what.group, g_.facts().name);
  patience.activity = patience.heap.begin_activity(what);
}

void Waiter::sleep(const Call& call, Patience& patience, const Flag& flag, uint64_t seen, int64_t now) {
  if (!patience.told) tell_waiting(call, patience);
  g_.mine().asleep().store(1, std::memory_order_relaxed);
  sleep_on(flag, seen, std::clamp<int64_t>(call.deadline_ns - now, 0, patience.sleep_ns));
  g_.mine().asleep().store(0, std::memory_order_relaxed);
  patience.sleep_ns = std::min(patience.sleep_ns * 2, kLongestSleep);
  patience.last_look_ns = now_ns();
}

bool Waiter::rest(Call& call, Patience& patience, const Flag* flag, uint64_t seen) {
  const bool crowded = g_.facts().crowded;
  if (patience.begin_ns == 0) {
    patience.begin_ns = patience.last_look_ns = now_ns();
    if (call.deadline_ns == 0) set_deadline(call, patience.begin_ns);
  }
  if (!crowded && patience.turns++ == 0) part_ways();
  if (meanwhile) meanwhile();
  const int64_t now = now_ns(), waited = now - patience.begin_ns;
  if (!crowded && waited < spin_ns) {
    for (int i = 0; i < 8; i++) pause_cpu();
  } else if (waited < (was_busy_within(flag ? kRememberFor : kRememberBriefly) ? kYieldBriefly : kYieldFor)) {
    give_way();
  } else if (flag) {
    sleep(call, patience, *flag, seen, now);
    return true;
  } else {  // nothing to sleep on: a message may come from anyone
    timespec nap{0, 200'000};
    nanosleep(&nap, nullptr);
  }
  if (now - patience.last_look_ns < kLookEvery) return false;
  if (!patience.told) tell_waiting(call, patience);
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
  Patience patience(g_.heap());
  for (;;) {
    uint64_t seen = flag.load(std::memory_order_acquire);
    if (seen >= target) return Code::ok;
    if (!rest(call, patience, &flag, seen)) continue;
    if (Code code = health(call, owes); code != Code::ok) return code;
  }
}

Code Waiter::await_until(Call& call, FunctionRef<bool()> ready, Owes owes) {
  Patience patience(g_.heap());
  while (!ready()) {
    if (!rest(call, patience, nullptr, 0)) continue;
    if (Code code = health(call, owes); code != Code::ok) return code;
  }
  return Code::ok;
}

}  // namespace unisono
