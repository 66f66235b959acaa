// See hello.h.
#include "group/hello.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <vector>

#include "base/cpu.h"
#include "memory/limits.h"

namespace unisono {
namespace {

void read_affinity(uint8_t (&mask)[128]) {
  std::memset(mask, 0, sizeof mask);
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof set, &set);
  for (int cpu = 0; cpu < CPU_SETSIZE && cpu < 1024; cpu++)
    if (CPU_ISSET(cpu, &set)) mask[cpu / 8] = static_cast<uint8_t>(mask[cpu / 8] | 1 << cpu % 8);
}

}  // namespace

Hello hello_of(const Heap& heap, const std::byte* block, int rank, int size, const Token& nonce) {
  Hello hello{};
  hello.magic = Hello::kMagic;
  hello.layout = kLayoutVersion;
  hello.nonce = nonce;
  hello.token = heap.token();
  hello.capacity = heap.capacity();
  hello.block = static_cast<uint64_t>(block - heap.base());
  hello.rank = rank;
  hello.size = size;
  hello.isa = static_cast<uint64_t>(current_isa());
  hello.cache_bytes = last_cache_bytes();
  hello.quota = processors_allowed();
  read_affinity(hello.affinity);
  return hello;
}

sockaddr_un address_of(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  size_t n = std::min(name.size(), sizeof address.sun_path - 2);
  std::memcpy(address.sun_path + 1, name.data(), n);  // a leading zero: abstract, no file
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + n);
  return address;
}

Fd open_socket() {
  return Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

bool send_hello(int socket, const Hello& hello, int heap_fd) {
  iovec data{const_cast<Hello*>(&hello), sizeof hello};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &heap_fd, sizeof heap_fd);
  return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(sizeof hello);
}

Received receive_hello(int socket, Hello& hello, Fd& memory) {
  iovec data{&hello, sizeof hello};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 4)];
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (n < 0) return errno == EAGAIN || errno == EINTR ? Received::nothing : Received::other;
  std::vector<Fd> fds;
  for (cmsghdr* h = CMSG_FIRSTHDR(&message); h; h = CMSG_NXTHDR(&message, h))
    if (h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS) {
      size_t count = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < count; i++) {
        int fd;
        std::memcpy(&fd, CMSG_DATA(h) + i * sizeof(int), sizeof fd);
        fds.emplace_back(fd);
      }
    }
  if (n != static_cast<ssize_t>(sizeof hello) || fds.size() != 1 || message.msg_flags & (MSG_TRUNC | MSG_CTRUNC))
    return Received::other;
  memory = std::move(fds[0]);
  return Received::hello;
}

bool same_user(int socket, pid_t& pid) {
  ucred who{};
  socklen_t length = sizeof who;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &length) != 0) return false;
  pid = who.pid;
  return who.uid == geteuid();
}

}  // namespace unisono
