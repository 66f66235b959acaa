// See wait.h.
#include "group/wait.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <climits>

namespace unisono {

bool (*python_interrupted)() = nullptr;
int64_t spin_ns = 2'000;

namespace {

constexpr int kFirstLooks = 100;  // a few microseconds: the usual answer of a rank that is on its way
constexpr int64_t kMoveEvery = 2'000'000;
constexpr int64_t kLookEvery = 1'000'000;
constexpr int64_t kYieldFor = 3'000'000;   // then sleep: a wake-up costs 50 to 100 us, a busy core costs more
constexpr int64_t kYieldBriefly = 20'000;  // the same beside busy neighbours
constexpr int64_t kLongYield = 400'000;    // ranks that wait for each other give way much sooner
constexpr int64_t kRememberFor = 100'000'000;
constexpr int64_t kLongestSleep = 8'000'000;  // bounds a missed wake-up and the detection of a death

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// The half of a flag that changes; futexes are 32 bits wide.
uint32_t* low_half(const Flag& flag) {
  auto* words = reinterpret_cast<uint32_t*>(const_cast<Flag*>(&flag));
  return std::endian::native == std::endian::little ? words : words + 1;
}

std::atomic<int64_t> busy_until{0};  // of this process; a hint, so relaxed

}  // namespace

void give_way() {
  const int64_t before = now_ns();
  sched_yield();
  const int64_t after = now_ns();
  if (after - before > kLongYield) busy_until.store(after + kRememberFor, std::memory_order_relaxed);
}

bool has_busy_neighbours() {
  const int64_t until = busy_until.load(std::memory_order_relaxed);
  return until && now_ns() < until;
}

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000 + t.tv_nsec;
}

void Group::wake(Flag& flag) {
  for (const Peer& p : peers_)
    if (p.block.base() != mine_.base() && p.block.asleep().load(std::memory_order_relaxed)) {
      syscall(SYS_futex, low_half(flag), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
      return;
    }
}

void Group::publish(Flag& flag, uint64_t value) {
  flag.store(value, std::memory_order_release);  // pairs with the acquire in await, await_slow and await_until
  wake(flag);
}

uint32_t Group::note_processor() {
  auto here = static_cast<uint32_t>(sched_getcpu() + 1);
  if (mine_.processor().load(std::memory_order_relaxed) != here)
    mine_.processor().store(here, std::memory_order_relaxed);
  return here;
}

void Group::part_ways() {
  uint32_t here = note_processor();
  if (here == 0 || here > CPU_SETSIZE) return;
  bool shared = false;
  for (int r = 0; r < facts_.rank && !shared; r++)
    shared = peer(r).block.processor().load(std::memory_order_relaxed) == here;
  if (!shared) return;
  int64_t now = now_ns();
  if (now - moved_ns_ < kMoveEvery) return;
  moved_ns_ = now;
  cpu_set_t allowed, elsewhere;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  elsewhere = allowed;
  for (const Peer& p : peers_)
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

bool Group::given_up() const {
  if (stopped_.load(std::memory_order_acquire)) return true;
  for (const Peer& p : peers_)
    if (p.block.abort().code.load(std::memory_order_acquire)) return true;
  return false;
}

void Group::tell_waiting(const Call& call, Patience& patience) {
  patience.told = true;
  Waiting what{patience.begin_ns, call.seq, call.tag, static_cast<int32_t>(call.correspondent), call.verb, {}};
  copy_text(what.group, sizeof what.group, facts_.name);
  patience.activity = heap_->begin_activity(what);
}

bool Group::rest(Call& call, Patience& patience, const Flag* sleep_on, uint64_t seen) {
  if (patience.begin_ns == 0) {
    patience.begin_ns = patience.last_look_ns = now_ns();
    if (call.deadline_ns == 0) set_deadline(call, patience.begin_ns);
  }
  if (!facts_.crowded && patience.turns++ == 0) part_ways();
  if (meanwhile) meanwhile();
  int64_t now = now_ns();
  int64_t waited = now - patience.begin_ns;
  if (!facts_.crowded && waited < spin_ns) {
    for (int i = 0; i < 8; i++) pause_cpu();
  } else if (const int64_t yield_for = has_busy_neighbours() ? kYieldBriefly : kYieldFor;
             waited < yield_for || !sleep_on) {
    if (waited < yield_for) {
      give_way();
    } else {  // nothing to sleep on: a letter may come from anyone
      timespec nap{0, 200'000};
      nanosleep(&nap, nullptr);
    }
  } else {
    int64_t most = std::clamp<int64_t>(call.deadline_ns - now, 0, patience.sleep_ns);
    timespec t{0, most};
    if (!patience.told) tell_waiting(call, patience);
    mine_.asleep().store(1, std::memory_order_relaxed);
    syscall(SYS_futex, low_half(*sleep_on), FUTEX_WAIT, static_cast<uint32_t>(seen), &t, nullptr, 0);
    mine_.asleep().store(0, std::memory_order_relaxed);
    patience.sleep_ns = std::min(patience.sleep_ns * 2, kLongestSleep);
    patience.last_look_ns = now_ns();
    return true;
  }
  if (now - patience.last_look_ns < kLookEvery) return false;
  if (!patience.told) tell_waiting(call, patience);
  patience.last_look_ns = now;
  return true;
}

Code Group::await(Call& call, Phase phase, uint64_t target, const uint8_t* who) {
  for (int r = 0; r < facts_.size; r++) {
    if (r == facts_.rank || (who && !who[r])) continue;
    if (flag_of(r, phase, target).load(std::memory_order_acquire) >= target) continue;
    if (Code code = await_slow(call, phase, target, r, who); code != Code::ok) return code;
  }
  return Code::ok;
}

Code Group::await_slow(Call& call, Phase phase, uint64_t target, int r, const uint8_t* who) {
  Flag& flag = flag_of(r, phase, target);
  auto owes = [&](int p) {
    return (!who || who[p]) && flag_of(p, phase, target).load(std::memory_order_acquire) < target;
  };
  if (!facts_.crowded)
    for (int i = 0; i < kFirstLooks; i++) {
      if (flag.load(std::memory_order_acquire) >= target) return Code::ok;
      pause_cpu();
    }
  Patience patience(*heap_);
  for (;;) {
    uint64_t seen = flag.load(std::memory_order_acquire);
    if (seen >= target) return Code::ok;
    if (!rest(call, patience, &flag, seen)) continue;
    if (Code code = health(call, owes); code != Code::ok) return code;
  }
}

}  // namespace unisono
