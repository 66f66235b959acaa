// A thread's turns on the processor: short ones begin sooner.
//
// Linux 6.12 and newer lets a thread that wants short time slices interrupt one with a long slice when it wakes up. Its
// share of the processor stays what it was. Older kernels ignore it.
#pragma once

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace unisono {

// Between two looks at a flag that will change soon.
inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// This thread asks for short turns until the end of the scope, or for good by `keep`.
class ShortTurns {
 public:
  ShortTurns() { asks_ = ask(kShortest); }
  ~ShortTurns() {
    if (asks_) ask(before_ns_);
  }
  ShortTurns(const ShortTurns&) = delete;
  ShortTurns& operator=(const ShortTurns&) = delete;
  void keep() { asks_ = false; }

 private:
  static constexpr uint64_t kShortest = 100'000;  // ns; there is nothing shorter
  // All else stays as it is now: somebody may have given the thread another priority meanwhile.
  bool ask(uint64_t turn_ns) {
    struct {  // of sched_setattr(2)
      uint32_t size, policy;
      uint64_t flags;
      int32_t nice;
      uint32_t priority;
      uint64_t runtime, deadline, period;
    } now{};
    if (syscall(SYS_sched_getattr, 0, &now, sizeof now, 0) != 0 || now.policy != SCHED_OTHER) return false;
    before_ns_ = now.runtime;
    now.runtime = turn_ns;
    return syscall(SYS_sched_setattr, 0, &now, 0) == 0;
  }
  uint64_t before_ns_ = 0;
  bool asks_ = false;
};

}  // namespace unisono
