// See join.h.
#include "group/join.h"

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

#include "base/cpu.h"
#include "group/retire.h"
#include "group/wait.h"

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
  return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(sizeof hello);
}

enum class Heard : uint8_t { nothing, hello, other };

// One hello and one descriptor, or anything else; a hang-up is something else.
Heard receive_hello(int socket, Hello& hello, Fd& memory) {
  iovec data{&hello, sizeof hello};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 4)];
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (n < 0) return errno == EAGAIN || errno == EINTR ? Heard::nothing : Heard::other;
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
    return Heard::other;
  memory = std::move(fds[0]);
  return Heard::hello;
}

bool same_user(int socket, pid_t& pid) {
  ucred who{};
  socklen_t length = sizeof who;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &length) != 0) return false;
  pid = who.pid;
  return who.uid == geteuid();
}

std::string rank_words(int r) {
  return "rank " + std::to_string(r);
}

constexpr size_t kMostStrangers = 64;  // connections that have not said anything yet, beyond one per rank
constexpr int kMostAccepted = 1024;    // in one turn, so that a flood cannot keep a rank from its deadline

// One try to join: whom this rank has met, and the connections on the way to the others. Steps return false with
// `failure_` filled.
class Joining {
 public:
  Joining(int door, std::shared_ptr<Heap> heap, GroupFacts facts, const Token& nonce,
          const std::vector<std::string>& names, std::byte* block)
      : door_(door),
        heap_(std::move(heap)),
        facts_(std::move(facts)),
        names_(names),
        peers_(static_cast<size_t>(facts_.size)),
        hellos_(static_cast<size_t>(facts_.size)),
        missing_(facts_.size - 1) {
    Hello& mine = hellos_[static_cast<size_t>(facts_.rank)];
    mine.magic = kHelloMagic;
    mine.layout = kLayoutVersion;
    mine.nonce = nonce;
    mine.token = heap_->token();
    mine.capacity = heap_->capacity();
    mine.block = static_cast<uint64_t>(block - heap_->base());
    mine.rank = facts_.rank;
    mine.size = facts_.size;
    mine.pid = getpid();
    mine.isa = static_cast<uint32_t>(current_isa());
    mine.cache_bytes = last_cache_bytes();
    mine.quota = cgroup_quota();
    read_affinity(mine.affinity);
    peers_[static_cast<size_t>(facts_.rank)] = {
        heap_->base(), heap_->capacity(), heap_->mapping(), Block(block, facts_.size), nullptr, getpid()};
    for (int r = 0; r < facts_.rank; r++) to_call_.push_back(r);
  }

  bool meet_all(int64_t deadline_ns) {
    for (;;) {
      if (!call_lower_ranks() || !hear_known() || !let_in() || !watch_joined()) return false;
      if (missing_ == 0) return true;
      if (python_interrupted && python_interrupted()) {
        fail(failure_, Code::interrupted, "interrupted while joining");
        return false;
      }
      if (now_ns() > deadline_ns) return too_late();
      std::vector<pollfd> fds{{door_, POLLIN, 0}};
      for (const Knock& k : knocks_) fds.push_back({k.socket.get(), POLLIN, 0});
      poll(fds.data(), fds.size(), to_call_.empty() ? 20 : 2);
    }
  }

  std::shared_ptr<Engine> make_engine() {
    // From the same hellos every rank draws the same conclusions.
    std::bitset<1024> processors;
    double quota = INFINITY;
    size_t cache = SIZE_MAX;
    auto isa = current_isa();
    for (const Hello& h : hellos_) {
      for (size_t bit = 0; bit < 1024; bit++)
        if (h.affinity[bit / 8] >> bit % 8 & 1) processors.set(bit);
      quota = std::min(quota, h.quota);
      cache = std::min<size_t>(cache, h.cache_bytes);
      isa = std::min(isa, static_cast<Isa>(h.isa));
    }
    set_isa(isa);
    facts_.cache_bytes = cache;
    facts_.crowded = static_cast<double>(facts_.size) > std::min(static_cast<double>(processors.count()), quota);
    return Engine::open(std::make_unique<Group>(facts_, heap_, std::move(peers_)));
  }

  // Tells whoever has this rank's hello. The block goes the way of a closed group's: it stays until they have left.
  Failure give_up() {
    Failure told = failure_;
    if (failure_.code != Code::aborted)
      fail(told, Code::aborted, rank_words(facts_.rank) + " could not join: " + failure_.text, {facts_.rank});
    for (Knock& k : knocks_) {
      if (k.rank < 0 || !k.socket) continue;  // a stranger, or met, or closed
      Hello unread;
      Fd memory;
      receive_hello(k.socket.get(), unread, memory);  // a link must be silent
      peers_[static_cast<size_t>(k.rank)].link = std::make_shared<Link>(std::move(k.socket), k.pid);
    }
    const Peer self = peers_[static_cast<size_t>(facts_.rank)];
    for (Peer& peer : peers_)
      if (!peer.heap_base) {  // not met: this rank stands in for it, so that every entry can be read
        auto link = std::move(peer.link);
        peer = self;
        peer.met = false;
        peer.link = std::move(link);
      }
    auto engine = Engine::open(std::make_unique<Group>(facts_, heap_, std::move(peers_)));
    engine->group().abort(told);
    engine->close(told.text);
    return failure_;
  }

 private:
  struct Knock {  // a connection whose hello has not come yet
    Fd socket;
    int rank;  // -1: accepted, not known yet
    pid_t pid;
  };

  const Hello& mine() const { return hellos_[static_cast<size_t>(facts_.rank)]; }

  // A queue full of strangers is no reason to wait inside of connect: those ranks are called again next turn.
  bool call_lower_ranks() {
    std::vector<int> again;
    for (int r : to_call_) {
      Fd s(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      if (!s) return failed(Code::system, system_error("cannot open a Unix socket"), {});
      socklen_t length;
      sockaddr_un address = address_of(names_[static_cast<size_t>(r)], length);
      if (connect(s.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
        if (errno == EAGAIN || errno == EINTR) {
          again.push_back(r);
          continue;
        }
        Code code = errno == ECONNREFUSED ? Code::peer_lost : Code::system;
        std::string what =
            "cannot reach " + rank_words(r) + " (on another host, in another network namespace, or gone)";
        return failed(code, system_error(what.c_str()), {r});
      }
      pid_t pid;
      if (!same_user(s.get(), pid) || !send_hello(s.get(), mine(), heap_->fd()))
        return failed(Code::system, rank_words(r) + " runs under another user, or closed the connection", {r});
      knocks_.push_back({std::move(s), r, pid});
    }
    to_call_ = std::move(again);
    return true;
  }

  bool hear_known() {
    for (Knock& k : knocks_)
      if (!hear(k)) return false;
    std::erase_if(knocks_, [](const Knock& k) { return !k.socket; });
    return true;
  }

  bool let_in() {
    for (int i = 0; i < kMostAccepted; i++) {
      Knock k{Fd(accept4(door_, nullptr, nullptr, SOCK_CLOEXEC)), -1, 0};
      if (!k.socket) {
        if (errno == EMFILE || errno == ENFILE)
          return failed(Code::system, system_error("cannot accept a connection"), {});
        return true;
      }
      if (!same_user(k.socket.get(), k.pid)) continue;
      if (!hear(k)) return false;
      if (!k.socket) continue;
      auto is_unknown = [](const Knock& other) { return other.rank < 0; };
      knocks_.push_back(std::move(k));
      // A rank speaks as soon as it is connected; the longest silence belongs to a stranger.
      if (static_cast<size_t>(std::count_if(knocks_.begin(), knocks_.end(), is_unknown)) >
          names_.size() + kMostStrangers)
        knocks_.erase(std::find_if(knocks_.begin(), knocks_.end(), is_unknown));
    }
    return true;
  }

  // Takes what has come over a connection, if anything: a rank's hello makes it a peer, all else ends the connection.
  bool hear(Knock& k) {
    Hello hello;
    Fd memory;
    const Heard heard = receive_hello(k.socket.get(), hello, memory);
    if (heard == Heard::nothing) return true;
    bool known = heard == Heard::hello && hello.magic == kHelloMagic && hello.nonce == mine().nonce;
    if (known && hello.layout != kLayoutVersion)
      return failed(Code::system,
                    "another rank runs a different version of unisono (memory layout " + std::to_string(hello.layout) +
                        ", here " + std::to_string(kLayoutVersion) + ")",
                    {});
    known = known && hello.size == facts_.size && hello.rank >= 0 && hello.rank < facts_.size &&
            (k.rank < 0 ? hello.rank > facts_.rank : hello.rank == k.rank) &&
            !peers_[static_cast<size_t>(hello.rank)].heap_base && hello.block % kLineBytes == 0 &&
            hello.block <= hello.capacity && Block::bytes(facts_.size) <= hello.capacity - hello.block;
    std::shared_ptr<Mapping> mapping;
    if (known) {
      mapping = map_peer(hello.token, std::move(memory), hello.capacity, failure_);
      if (!mapping) return failed(failure_.code, rank_words(hello.rank) + ": " + failure_.text, {hello.rank});
      if (k.rank < 0) known = send_hello(k.socket.get(), mine(), heap_->fd());
    }
    Fd socket = std::move(k.socket);
    if (!known)
      return k.rank < 0 ||
             failed(Code::peer_lost, rank_words(k.rank) + " closed the connection while joining", {k.rank});
    auto link = std::make_shared<Link>(std::move(socket), k.pid);
    const Block block(mapping->base() + hello.block, facts_.size);
    hellos_[static_cast<size_t>(hello.rank)] = hello;
    peers_[static_cast<size_t>(hello.rank)] = {mapping->base(), mapping->capacity(), mapping, block, link, k.pid};
    missing_--;
    return true;
  }

  // Those that this rank has met may give up or die while it waits for others.
  bool watch_joined() {
    for (int r = 0; r < facts_.size; r++) {
      const Peer& peer = peers_[static_cast<size_t>(r)];
      if (!peer.link) continue;
      const AbortLine& line = peer.block.abort();
      if (line.code.load(std::memory_order_acquire))  // pairs with Group::abort's release
        return failed(Code::aborted, text_in(line.text), {r});
      if (state_of(peer, member_of(peer)) == PeerState::died)
        return failed(Code::peer_lost,
                      rank_words(r) + " (pid " + std::to_string(peer.pid) + ") died while others were joining", {r});
    }
    return true;
  }

  bool too_late() {
    std::vector<int> late;
    std::string text = "ranks that have not joined:";
    for (int r = 0; r < facts_.size; r++)
      if (!peers_[static_cast<size_t>(r)].heap_base) {
        late.push_back(r);
        text += ' ';
        text += std::to_string(r);
      }
    return failed(Code::timeout, text, late);
  }

  bool failed(Code code, std::string text, std::vector<int> about) {
    fail(failure_, code, std::move(text), std::move(about));
    return false;
  }

  const int door_;
  std::shared_ptr<Heap> heap_;
  GroupFacts facts_;
  const std::vector<std::string>& names_;
  std::vector<Peer> peers_;  // by rank; no heap_base: not met yet
  std::vector<Hello> hellos_;
  int missing_;
  std::vector<int> to_call_;
  std::vector<Knock> knocks_;
  Failure failure_;
};

}  // namespace

std::unique_ptr<Doorway> Doorway::open(Failure& failure) {
  Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  Token t = random_token();
  char name[64];
  std::snprintf(name, sizeof name, "unisono-%016lx%016lx", static_cast<unsigned long>(t.a),
                static_cast<unsigned long>(t.b));
  socklen_t length;
  sockaddr_un address = address_of(name, length);
  if (!fd || bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(fd.get(), 1024) != 0) {
    fail(failure, Code::system, system_error("cannot open a Unix socket"));
    return nullptr;
  }
  return std::unique_ptr<Doorway>(new Doorway(std::move(fd), name));
}

std::shared_ptr<Engine> Doorway::join(std::shared_ptr<Heap> heap, GroupFacts facts, const Token& nonce,
                                      const std::vector<std::string>& names, int64_t limit_ns, Failure& failure) {
  const int64_t deadline = now_ns() + limit_ns;
  const Fd door = std::move(socket_);  // closed at the end: whoever still stands in its queue must not wait for us
  if (!door) {
    fail(failure, Code::invalid, "a doorway serves one join");
    return nullptr;
  }
  sweep_retired();
  std::byte* block = Group::make_block(*heap, facts.size, failure);
  if (!block) return nullptr;
  Joining joining(door.get(), std::move(heap), std::move(facts), nonce, names, block);
  if (joining.meet_all(deadline)) return joining.make_engine();
  failure = joining.give_up();
  return nullptr;
}

std::shared_ptr<Engine> split(Group& parent, const std::vector<int>& members, const std::vector<size_t>& blocks,
                              GroupFacts facts, Failure& failure) {
  std::vector<Peer> peers;
  for (size_t i = 0; i < members.size(); i++) {
    Peer peer = parent.peer(members[i]);
    if (blocks[i] % kLineBytes || blocks[i] > peer.heap_capacity ||
        Block::bytes(facts.size) > peer.heap_capacity - blocks[i]) {
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
