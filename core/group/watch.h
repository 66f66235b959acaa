// The death watch: one socket per peer process, kept open from the handshake on.
//
// The kernel closes a dead process's sockets, so a hang-up is the earliest and surest sign of death. Nothing is ever
// sent: a rank that leaves on purpose says so in shared memory (Membership in control.h). Links are shared by a group
// and the groups split from it.
#pragma once

#include <sys/types.h>

#include <mutex>
#include <string>

#include "base/fd.h"

namespace unisono {

class Link {
 public:
  explicit Link(Fd socket);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  bool hung_up();  // looks without waiting
  void close_in_child();

 private:
  std::mutex mutex_;
  Fd socket_;  // none in a forked child
  bool hung_up_ = false;
};

// True once a process is dead or can only die: exiting, or with SIGKILL waiting for it. Its sockets may still be open.
bool is_dying(pid_t pid);

// "signal 9" or "exit code 1" of a process that has died and that its parent has not asked for yet; empty: not known.
std::string exit_words(pid_t pid);

// "running", "stopped", "gone", ...: what the kernel says about a process.
std::string process_state(pid_t pid);

}  // namespace unisono
