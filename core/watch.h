// The death watch: one socket per peer process, kept open from the handshake on.
//
// The kernel closes a dead process's sockets, so a hang-up is the earliest and surest sign of death. A rank that
// leaves on purpose says so first, naming the group, so that "left" and "died" can be told apart. Links are shared
// by a group and the groups split from it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace unisono {

class Link {
 public:
  Link(int socket, pid_t pid);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  enum class State : uint8_t { alive, left, died };
  // Looks at the socket without waiting. `reason` gets the words of a peer that left.
  State look(uint64_t group, std::string* reason = nullptr);
  void say_left(uint64_t group, const std::string& reason);  // group 0: every group
  void close_in_child();
  pid_t pid() const { return pid_; }

 private:
  std::mutex mutex_;
  int socket_;
  pid_t pid_;
  bool hung_up_ = false;
  bool reset_ = false;
  std::vector<std::pair<uint64_t, std::string>> left_;
};

// True once a process is dead or can only die: exiting, or with SIGKILL waiting for it. Its sockets may still be open.
bool is_dying(pid_t pid);

// "running", "stopped", "gone", ...: what the kernel says about a process.
std::string process_state(pid_t pid);

}  // namespace unisono
