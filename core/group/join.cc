// See join.h.
#include "group/join.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "base/cpu.h"
#include "base/faults.h"
#include "group/hello.h"
#include "group/retire.h"
#include "group/wait.h"

namespace unisono {
namespace {

std::string rank_words(int r) {
  return "rank " + std::to_string(r);
}

constexpr size_t kMostStrangers = 64;  // connections that have not said anything yet, beyond one per rank
constexpr int kMostAccepted = 1024;    // in one turn, so that a flood cannot keep a rank from its deadline

// One try to join: whom this rank has met, and the connections on the way to the others. Steps return false with
// `failure_` filled.
class Joining {
 public:
  Joining(int listener, std::shared_ptr<Heap> heap, GroupFacts facts, const Token& nonce,
          const std::vector<std::string>& names, BlockMemory block)
      : listener_(listener),
        heap_(std::move(heap)),
        facts_(std::move(facts)),
        names_(names),
        peers_(static_cast<size_t>(facts_.size)),
        hellos_(static_cast<size_t>(facts_.size)),
        missing_(facts_.size - 1),
        block_(std::move(block)) {
    hellos_[static_cast<size_t>(facts_.rank)] = hello_of(*heap_, block_.get(), facts_.rank, facts_.size, nonce);
    peers_[static_cast<size_t>(facts_.rank)] = {
        heap_->base(), heap_->capacity(), heap_->mapping(), Block(block_.get(), facts_.size), nullptr, getpid()};
    for (int r = 0; r < facts_.rank; r++) to_connect_.push_back(r);
  }

  bool meet_all(int64_t deadline_ns) {
    for (;;) {
      if (!connect_lower_ranks() || !hear_connected() || !accept_new() || !watch_joined()) return false;
      if (missing_ == 0) return true;
      if (python_interrupted && python_interrupted()) {
        fail(failure_, Code::interrupted, "interrupted while joining");
        return false;
      }
      if (now_ns() > deadline_ns && is_up(Defence::deadlines)) return too_late();
      std::vector<pollfd> fds{{listener_, POLLIN, 0}};
      for (const Connection& c : connections_) fds.push_back({c.socket.get(), POLLIN, 0});
      poll(fds.data(), fds.size(), to_connect_.empty() ? 20 : 2);
    }
  }

  std::unique_ptr<Group> make_group() {
    agree_on_facts();
    return take_group();
  }

  // Tells whoever has this rank's hello. The block goes the way of a closed group's: it stays until they have left.
  Failure give_up() {
    Failure told = failure_;
    if (failure_.code != Code::aborted)
      fail(told, Code::aborted, rank_words(facts_.rank) + " could not join: " + failure_.text, {facts_.rank});
    for (Connection& c : connections_) {
      if (c.rank < 0 || !c.socket) continue;  // a stranger, or met, or closed
      Hello unread;
      Fd memory;
      receive_hello(c.socket.get(), unread, memory);  // a link must be silent
      peers_[static_cast<size_t>(c.rank)].link = std::make_shared<Link>(std::move(c.socket));
    }
    const Peer self = peers_[static_cast<size_t>(facts_.rank)];
    for (Peer& peer : peers_)
      if (!peer.heap_base) {  // not met: this rank stands in for it, so that every entry can be read
        auto link = std::move(peer.link);
        peer = self;
        peer.met = false;
        peer.link = std::move(link);
      }
    std::unique_ptr<Group> group = take_group();
    group->abort(told);
    group->close(told.text);
    retire(std::move(group));
    sweep_retired();
    return failure_;
  }

 private:
  struct Connection {  // whose hello has not come yet
    Fd socket;
    int rank;  // -1: accepted, not known yet
    pid_t pid;
  };

  const Hello& mine() const { return hellos_[static_cast<size_t>(facts_.rank)]; }

  // The block goes to the group.
  std::unique_ptr<Group> take_group() {
    auto group = std::make_unique<Group>(facts_, heap_, std::move(peers_));
    (void)block_.release();
    return group;
  }

  void agree_on_facts() {
    // From the same hellos every rank draws the same conclusions.
    size_t cache = SIZE_MAX;
    auto isa = current_isa();
    for (size_t r = 0; r < hellos_.size(); r++) {
      const Hello& h = hellos_[r];
      for (size_t bit = 0; bit < 1024; bit++)
        if (h.affinity[bit / 8] >> bit % 8 & 1) peers_[r].processors.set(bit);
      peers_[r].quota = h.quota;
      cache = std::min<size_t>(cache, h.cache_bytes);
      isa = std::min(isa, static_cast<Isa>(h.isa));
    }
    set_isa(isa);
    facts_.cache_bytes = cache;
    facts_.crowded = are_crowded(peers_);
  }

  // A queue full of strangers is no reason to wait inside of connect: those ranks are called again next turn.
  bool connect_lower_ranks() {
    std::vector<int> again;
    for (int r : to_connect_) {
      Fd s = open_socket();
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
      if (!same_user(s.get(), pid)) return failed(Code::system, rank_words(r) + " runs under another user", {r});
      if (!send_hello(s.get(), mine(), heap_->fd())) {
        if (errno == EPIPE || errno == ECONNRESET)  // it has given up, or died, since it was connected
          return failed(Code::peer_lost, rank_words(r) + " closed the connection while joining", {r});
        return failed(Code::system, system_error(("cannot greet " + rank_words(r)).c_str()), {r});
      }
      connections_.push_back({std::move(s), r, pid});
    }
    to_connect_ = std::move(again);
    return true;
  }

  bool hear_connected() {
    for (Connection& c : connections_)
      if (!hear(c)) return false;
    std::erase_if(connections_, [](const Connection& c) { return !c.socket; });
    return true;
  }

  bool accept_new() {
    for (int i = 0; i < kMostAccepted; i++) {
      Connection c{Fd(accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC)), -1, 0};
      if (!c.socket) {
        if (errno == EMFILE || errno == ENFILE)
          return failed(Code::system, system_error("cannot accept a connection"), {});
        return true;
      }
      if (!same_user(c.socket.get(), c.pid)) continue;
      if (!hear(c)) return false;
      if (!c.socket) continue;
      auto is_unknown = [](const Connection& other) { return other.rank < 0; };
      connections_.push_back(std::move(c));
      // A rank speaks as soon as it is connected; the longest silence belongs to a stranger.
      if (static_cast<size_t>(std::count_if(connections_.begin(), connections_.end(), is_unknown)) >
          names_.size() + kMostStrangers)
        connections_.erase(std::find_if(connections_.begin(), connections_.end(), is_unknown));
    }
    return true;
  }

  // Takes what has come over a connection, if anything: a rank's hello makes it a peer, all else ends the connection.
  bool hear(Connection& c) {
    Hello hello;
    Fd memory;
    reach("joining");
    const Received received = receive_hello(c.socket.get(), hello, memory);
    if (received == Received::nothing) return true;
    bool known = received == Received::hello && hello.magic == Hello::kMagic && hello.nonce == mine().nonce;
    if (known && hello.layout != kLayoutVersion)
      return failed(Code::system,
                    "another rank runs a different version of unisono (memory layout " + std::to_string(hello.layout) +
                        ", here " + std::to_string(kLayoutVersion) + ")",
                    {});
    known = known && hello.size == facts_.size && hello.rank >= 0 && hello.rank < facts_.size &&
            (c.rank < 0 ? hello.rank > facts_.rank : hello.rank == c.rank) &&
            !peers_[static_cast<size_t>(hello.rank)].heap_base && hello.block % kLineBytes == 0 &&
            hello.block <= hello.capacity && Block::bytes(facts_.size) <= hello.capacity - hello.block;
    std::shared_ptr<Mapping> mapping;
    if (known) {
      mapping = map_peer(hello.token, std::move(memory), hello.capacity, failure_);
      if (!mapping) return failed(failure_.code, rank_words(hello.rank) + ": " + failure_.text, {hello.rank});
      if (c.rank < 0) known = send_hello(c.socket.get(), mine(), heap_->fd());
    }
    Fd socket = std::move(c.socket);
    if (!known)
      return (c.rank < 0 && is_up(Defence::strangers)) ||
             failed(Code::peer_lost, rank_words(c.rank) + " closed the connection while joining", {c.rank});
    auto link = std::make_shared<Link>(std::move(socket));
    const Block block(mapping->base() + hello.block, facts_.size);
    hellos_[static_cast<size_t>(hello.rank)] = hello;
    peers_[static_cast<size_t>(hello.rank)] = {mapping->base(), mapping->capacity(), mapping, block, link, c.pid};
    missing_--;
    return true;
  }

  // Those that this rank has met may give up or die while it waits for others.
  bool watch_joined() {
    for (int r = 0; r < facts_.size; r++) {
      const Peer& peer = peers_[static_cast<size_t>(r)];
      if (!peer.link) continue;
      const AbortLine& line = peer.block.abort();
      if (line.code.load(std::memory_order_acquire)) return failed(Code::aborted, text_in(line.text), {r});
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

  const int listener_;
  std::shared_ptr<Heap> heap_;
  GroupFacts facts_;
  const std::vector<std::string>& names_;
  std::vector<Peer> peers_;  // by rank; no heap_base: not met yet
  std::vector<Hello> hellos_;
  int missing_;
  std::vector<int> to_connect_;
  std::vector<Connection> connections_;
  BlockMemory block_;  // this rank's own, until a group has it
  Failure failure_;
};

}  // namespace

std::unique_ptr<Listener> Listener::open(Failure& failure) {
  Fd fd = open_socket();
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
  return std::unique_ptr<Listener>(new Listener(std::move(fd), name));
}

std::unique_ptr<Group> Listener::join(std::shared_ptr<Heap> heap, GroupFacts facts, const Token& nonce,
                                      const std::vector<std::string>& names, int64_t limit_ns, Failure& failure) {
  const int64_t deadline = now_ns() + limit_ns;
  const Fd listener = std::move(socket_);  // closed at the end: whoever is still in its queue must not wait for us
  if (!listener) {
    fail(failure, Code::invalid, "a listener serves one join");
    return nullptr;
  }
  sweep_retired();
  BlockMemory block = make_block(*heap, facts.size, failure);
  if (!block) return nullptr;
  Joining joining(listener.get(), std::move(heap), std::move(facts), nonce, names, std::move(block));
  if (joining.meet_all(deadline)) return joining.make_group();
  failure = joining.give_up();
  return nullptr;
}

std::unique_ptr<Group> split(Group& parent, const std::vector<int>& members, const std::vector<size_t>& blocks,
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
  return std::make_unique<Group>(std::move(facts), parent.heap_ptr(), std::move(peers));
}

}  // namespace unisono
