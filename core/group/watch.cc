// See watch.h. Every live link is in one registry, so that a forked child can drop its copies of the sockets: while a
// child holds one, the death of its parent would show no hang-up.
#include "group/watch.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <vector>

#include "base/fork.h"

namespace unisono {
namespace {

std::vector<Link*>& registry = *new std::vector<Link*>;  // never destroyed: links may outlive static objects
ForkMutex registry_mutex(ForkOrder::links, [] {
  for (Link* link : registry) link->close_in_child();
  registry.clear();
});

}  // namespace

Link::Link(Fd socket) : socket_(std::move(socket)) {
  std::lock_guard lock(registry_mutex);
  registry.push_back(this);
}

Link::~Link() {
  std::lock_guard lock(registry_mutex);
  registry.erase(std::remove(registry.begin(), registry.end(), this), registry.end());
}

void Link::close_in_child() {
  socket_.reset();
}

bool Link::hung_up() {
  std::lock_guard lock(mutex_);
  char none;
  ssize_t n = 1;
  while (!hung_up_ && socket_ && n > 0) {  // a hello that came too late for its join is read and forgotten
    n = recv(socket_.get(), &none, sizeof none, MSG_DONTWAIT);
    hung_up_ = n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
  }
  return hung_up_ || !socket_;
}

bool is_dying(pid_t pid) {
  constexpr unsigned long exiting = 0x4;  // PF_EXITING among the kernel's flags
  if (pid <= 0) return false;
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(stat, line)) return errno == ENOENT || errno == ESRCH;
  char state = 0;
  unsigned long flags = 0;
  size_t end = line.rfind(')');
  if (end == std::string::npos ||
      std::sscanf(line.c_str() + end + 1, " %c %*d %*d %*d %*d %*d %lu", &state, &flags) != 2)
    return false;
  if (state == 'Z' || state == 'X' || flags & exiting) return true;
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  while (std::getline(status, line))
    if (line.rfind("ShdPnd:", 0) == 0 || line.rfind("SigPnd:", 0) == 0)
      if (std::strtoull(line.c_str() + 7, nullptr, 16) & 0x100) return true;
  return false;
}

std::string exit_words(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (pid <= 0 || !std::getline(file, line)) return "";
  const size_t end = line.rfind(')'), last = line.rfind(' ');  // the last field is what its parent will get
  if (end == std::string::npos || end + 2 >= line.size() || last == std::string::npos) return "";
  const unsigned long status = std::strtoul(line.c_str() + last, nullptr, 10);
  const bool dead = line[end + 2] == 'Z' || line[end + 2] == 'X';
  // Set before the connections of an ending process are closed, so it is there though the process may not be dead yet.
  if (status & 0x7f) return "signal " + std::to_string(status & 0x7f);
  return dead || status ? "exit code " + std::to_string(status >> 8 & 0xff) : "";
}

std::string process_state(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return "gone";
  size_t end = line.rfind(')');
  switch (end == std::string::npos || end + 2 >= line.size() ? '?' : line[end + 2]) {
    case 'R':
      return "running";
    case 'S':
      return "sleeping";
    case 'D':
      return "waiting for a device";
    case 'T':
    case 't':
      return "stopped";
    case 'Z':
    case 'X':
      return "gone";
    default:
      return "unknown";
  }
}

}  // namespace unisono
