// See trim.h.
#include "memory/trim.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <system_error>
#include <thread>

#include "base/fork.h"
#include "memory/heap.h"

namespace unisono {
namespace {

constexpr int kNobody = -1;
// The fork generation of the process that has the thread: a forked child has none. Whoever frees memory looks here
// afterwards; the thread says that it ends, and then looks once more. The heap's lock, which both take in between,
// orders the two, so one of them sees the other.
std::atomic<int> trimmer{kNobody};

void trim_until_done() {
  const int self = fork_generation();
  for (;;) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    if (Heap::trim_all()) continue;
    trimmer.store(kNobody);
    if (!Heap::any_to_trim() || trimmer.exchange(self) == self) return;
  }
}

}  // namespace

void start_trimming() {
  const int self = fork_generation();
  if (trimmer.load() == self || trimmer.exchange(self) == self) return;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals belong to Python's main thread
  try {
    std::thread thread(trim_until_done);
    pthread_setname_np(thread.native_handle(), "unisono-trim");
    thread.detach();
  } catch (const std::system_error&) {  // no thread to be had: whoever frees memory next tries again
    trimmer.store(kNobody);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace unisono
