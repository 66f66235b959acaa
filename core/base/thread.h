// Starting threads that nobody joins.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <system_error>
#include <thread>

namespace unisono {

// Runs `body` in a thread of its own, named `name` and without signals, which belong to Python's main thread. False if
// there is no thread to be had.
inline bool start_detached(const char* name, void (*body)()) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  bool started = true;
  try {
    std::thread thread(body);
    pthread_setname_np(thread.native_handle(), name);
    thread.detach();
  } catch (const std::system_error&) {
    started = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

}  // namespace unisono
