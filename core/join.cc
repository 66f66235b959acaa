// See join.h.
#include "join.h"

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <bitset>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <fstream>

#include "mover.h"
#include "reduce.h"
#include "retire.h"
#include "wait.h"

namespace unisono {
namespace {

constexpr uint64_t kHelloMagic = 0x6f6e6f73696e75;  // "unisono"

struct Hello {
  uint64_t magic;
  uint64_t layout;
  Token nonce;
  Token token;
  uint64_t capacity;
  uint64_t block;  // offset in the heap
  int32_t rank;
  int32_t size;
  int32_t pid;
  uint32_t isa;
  uint64_t cache_bytes;
  double quota;           // processors the cgroup allows; infinity without a limit
  uint8_t affinity[128];  // one bit per processor this rank may run on
};

double cgroup_quota() {
  double quota = INFINITY;
  std::ifstream v2("/sys/fs/cgroup/cpu.max");
  std::string limit;
  double period = 0;
  if (v2 >> limit >> period && limit != "max" && period > 0) quota = std::stod(limit) / period;
  std::ifstream q("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), p("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  double us = 0;
  if (q >> us && p >> period && us > 0 && period > 0) quota = std::min(quota, us / period);
  return quota;
}

void read_affinity(uint8_t (&mask)[128]) {
  std::memset(mask, 0, sizeof mask);
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof set, &set);
  for (int cpu = 0; cpu < CPU_SETSIZE && cpu < 1024; cpu++)
    if (CPU_ISSET(cpu, &set)) mask[cpu / 8] = static_cast<uint8_t>(mask[cpu / 8] | 1 << cpu % 8);
}

sockaddr_un address_of(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  size_t n = std::min(name.size(), sizeof address.sun_path - 2);
  std::memcpy(address.sun_path + 1, name.data(), n);  // a leading zero: abstract, no file
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + n);
  return address;
}

bool send_hello(int socket, const Hello& hello, int fd) {
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
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  return sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof hello);
}

// One hello and one descriptor; -1 if what came was anything else.
int receive_hello(int socket, Hello& hello) {
  iovec data{&hello, sizeof hello};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 4)];
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  std::vector<int> fds;
  if (n >= 0)
    for (cmsghdr* h = CMSG_FIRSTHDR(&message); h; h = CMSG_NXTHDR(&message, h))
      if (h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS) {
        size_t count = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
          int fd;
          std::memcpy(&fd, CMSG_DATA(h) + i * sizeof(int), sizeof fd);
          fds.push_back(fd);
        }
      }
  bool good =
      n == static_cast<ssize_t>(sizeof hello) && fds.size() == 1 && !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC));
  if (good) return fds[0];
  for (int fd : fds) close(fd);
  return -1;
}

bool same_user(int socket, pid_t& pid) {
  ucred who{};
  socklen_t length = sizeof who;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &length) != 0) return false;
  pid = who.pid;
  return who.uid == geteuid();
}

struct Knock {  // a connection whose hello has not come yet
  int socket;
  int rank;  // -1: accepted, not known yet
};

}  // namespace

std::unique_ptr<Doorway> Doorway::open(Failure& failure) {
  int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  Token t = random_token();
  char name[64];
  std::snprintf(name, sizeof name, "unisono-%016lx%016lx", static_cast<unsigned long>(t.a),
                static_cast<unsigned long>(t.b));
  socklen_t length;
  sockaddr_un address = address_of(name, length);
  if (fd < 0 || bind(fd, reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(fd, 1024) != 0) {
    fail(failure, Code::system, system_error("cannot open a Unix socket"));
    if (fd >= 0) ::close(fd);
    return nullptr;
  }
  return std::unique_ptr<Doorway>(new Doorway(fd, name));
}

Doorway::~Doorway() {
  ::close(socket_);
}

std::shared_ptr<Engine> Doorway::join(std::shared_ptr<Heap> heap, GroupFacts facts, const Token& nonce,
                                      const std::vector<std::string>& names, Failure& failure) {
  const int size = facts.size, me = facts.rank;
  sweep_retired();
  std::byte* block = Group::make_block(*heap, size, failure);
  if (!block) return nullptr;
  Hello mine{};
  mine.magic = kHelloMagic;
  mine.layout = kLayoutVersion;
  mine.nonce = nonce;
  mine.token = heap->token();
  mine.capacity = heap->capacity();
  mine.block = static_cast<uint64_t>(block - heap->base());
  mine.rank = me;
  mine.size = size;
  mine.pid = getpid();
  mine.isa = static_cast<uint32_t>(current_isa());
  mine.cache_bytes = last_cache_bytes();
  mine.quota = cgroup_quota();
  read_affinity(mine.affinity);

  std::vector<Peer> peers(static_cast<size_t>(size));
  std::vector<Hello> hellos(static_cast<size_t>(size));
  hellos[static_cast<size_t>(me)] = mine;
  peers[static_cast<size_t>(me)] = {heap->base(),       heap->capacity(), heap->mapping(),
                                    Block(block, size), nullptr,          getpid()};
  std::vector<Knock> knocks;
  int missing = size - 1;
  auto give_up = [&]() -> std::shared_ptr<Engine> {
    for (const Knock& k : knocks) ::close(k.socket);
    Group::drop_block(*heap, block);
    return nullptr;
  };

  for (int r = 0; r < me; r++) {
    int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    socklen_t length;
    sockaddr_un address = address_of(names[static_cast<size_t>(r)], length);
    pid_t pid;
    if (s < 0 || connect(s, reinterpret_cast<sockaddr*>(&address), length) != 0) {
      int error = errno;
      if (s >= 0) ::close(s);
      errno = error;
      fail(failure, error == ECONNREFUSED ? Code::peer_lost : Code::system,
           system_error(
               ("cannot reach rank " + std::to_string(r) + " (on another host, in another network namespace, or gone)")
                   .c_str()),
           {r});
      return give_up();
    }
    if (!same_user(s, pid) || !send_hello(s, mine, heap->fd())) {
      ::close(s);
      fail(failure, Code::system, "rank " + std::to_string(r) + " runs under another user, or closed the connection",
           {r});
      return give_up();
    }
    knocks.push_back({s, r});
  }

  const int64_t deadline = now_ns() + facts.timeout_ns;
  while (missing > 0) {
    std::vector<pollfd> fds{{socket_, POLLIN, 0}};
    for (const Knock& k : knocks) fds.push_back({k.socket, POLLIN, 0});
    int ready = poll(fds.data(), fds.size(), 20);
    if (python_interrupted && python_interrupted()) {
      fail(failure, Code::interrupted, "interrupted while joining");
      return give_up();
    }
    if (now_ns() > deadline) {
      std::vector<int> late;
      for (int r = 0; r < size; r++)
        if (!peers[static_cast<size_t>(r)].heap_base) late.push_back(r);
      std::string text = "ranks that have not joined:";
      for (int r : late) text += " " + std::to_string(r);
      fail(failure, Code::timeout, text, late);
      return give_up();
    }
    if (ready <= 0) continue;
    std::vector<Knock> waiting;
    for (size_t i = 0; i < knocks.size(); i++) {
      Knock k = knocks[i];
      if (!fds[i + 1].revents) {
        waiting.push_back(k);
        continue;
      }
      Hello hello;
      int fd = receive_hello(k.socket, hello);
      pid_t pid = 0;
      bool known = fd >= 0 && hello.magic == kHelloMagic && hello.nonce == nonce && same_user(k.socket, pid);
      if (known && hello.layout != kLayoutVersion) {
        fail(failure, Code::system,
             "another rank runs a different version of unisono (memory layout " + std::to_string(hello.layout) +
                 ", here " + std::to_string(kLayoutVersion) + ")");
        ::close(fd);
        ::close(k.socket);
        knocks.erase(knocks.begin(), knocks.begin() + static_cast<ptrdiff_t>(i) + 1);
        knocks.insert(knocks.end(), waiting.begin(), waiting.end());
        return give_up();
      }
      known = known && hello.size == size && hello.rank >= 0 && hello.rank < size && hello.rank != me &&
              (k.rank == -1 ? hello.rank > me : hello.rank == k.rank) &&
              !peers[static_cast<size_t>(hello.rank)].heap_base && hello.block <= hello.capacity &&
              Block::bytes(size) <= hello.capacity - hello.block;
      std::shared_ptr<Mapping> mapping;
      if (known) mapping = map_peer(hello.token, fd, hello.capacity, failure);
      if (known && mapping && k.rank == -1) known = send_hello(k.socket, mine, heap->fd());
      if (fd >= 0) ::close(fd);
      if (!known || !mapping) {
        ::close(k.socket);
        if (k.rank >= 0 || (known && !mapping)) {  // a rank we need, not a stranger
          if (failure.code == Code::ok)
            fail(failure, Code::peer_lost, "rank " + std::to_string(k.rank) + " closed the connection while joining",
                 {k.rank});
          knocks.erase(knocks.begin(), knocks.begin() + static_cast<ptrdiff_t>(i) + 1);
          knocks.insert(knocks.end(), waiting.begin(), waiting.end());
          return give_up();
        }
        continue;
      }
      hellos[static_cast<size_t>(hello.rank)] = hello;
      peers[static_cast<size_t>(hello.rank)] = {mapping->base(),
                                                mapping->capacity(),
                                                mapping,
                                                Block(mapping->base() + hello.block, size),
                                                std::make_shared<Link>(k.socket, pid),
                                                pid};
      missing--;
    }
    knocks = std::move(waiting);
    if (fds[0].revents) {
      int s = accept4(socket_, nullptr, nullptr, SOCK_CLOEXEC);
      pid_t pid;
      if (s >= 0 && !same_user(s, pid)) {
        ::close(s);
        s = -1;
      }
      if (s >= 0) knocks.push_back({s, -1});
    }
  }
  for (const Knock& k : knocks) ::close(k.socket);  // strangers that never spoke

  // From the same hellos every rank draws the same conclusions.
  std::bitset<1024> processors;
  double quota = INFINITY;
  size_t cache = SIZE_MAX;
  auto isa = current_isa();
  for (const Hello& h : hellos) {
    for (size_t bit = 0; bit < 1024; bit++)
      if (h.affinity[bit / 8] >> bit % 8 & 1) processors.set(bit);
    quota = std::min(quota, h.quota);
    cache = std::min<size_t>(cache, h.cache_bytes);
    isa = std::min(isa, static_cast<Isa>(h.isa));
  }
  set_isa(isa);
  facts.cache_bytes = cache;
  facts.crowded = static_cast<double>(size) > std::min(static_cast<double>(processors.count()), quota);
  return Engine::open(std::make_unique<Group>(std::move(facts), std::move(heap), std::move(peers)));
}

std::shared_ptr<Engine> split(Group& parent, const std::vector<int>& members, const std::vector<size_t>& blocks,
                              GroupFacts facts, Failure& failure) {
  std::vector<Peer> peers;
  for (size_t i = 0; i < members.size(); i++) {
    Peer peer = parent.peer(members[i]);
    if (blocks[i] > peer.heap_capacity || Block::bytes(facts.size) > peer.heap_capacity - blocks[i]) {
      fail(failure, Code::system, "rank " + std::to_string(members[i]) + " published an impossible block",
           {members[i]});
      return nullptr;
    }
    peer.block = Block(peer.heap_base + blocks[i], facts.size);
    peers.push_back(std::move(peer));
  }
  return Engine::open(std::make_unique<Group>(std::move(facts), parent.heap_ptr(), std::move(peers)));
}

}  // namespace unisono
