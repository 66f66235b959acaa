// What a rank reads of a peer that has gone mad: hellos at its socket, and everything outside of calls that lies in the
// peer's heap, namely the recorder, waits, kept tensors, abort lines, offers and verdicts of survivors. The sound rank
// may get any error and any words, but it must come back, with memory of its own untouched; the address and
// undefined-behaviour sanitizers watch it. A line says which seed ran: UNISONO_FUZZ_SEED repeats it, and
// UNISONO_FUZZ_SECONDS makes it go on for longer.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "engine/engine.h"
#include "group/deadlock.h"
#include "group/hello.h"
#include "group/join.h"
#include "group/retire.h"
#include "group/shrink.h"
#include "memory/dump.h"
#include "memory/kept.h"

using namespace unisono;

namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr Token kNonce{7, 8};
using Dice = std::mt19937_64;

uint64_t setting(const char* name, uint64_t otherwise) {
  const char* said = std::getenv(name);
  return said ? std::strtoull(said, nullptr, 10) : otherwise;
}

void expect(bool ok, const char* what) {
  if (!ok) std::printf("FAILED: %s\n", what), std::exit(1);
}

uint64_t any_number(Dice& dice) {
  switch (dice() % 6) {
    case 0:
      return dice() % 300;
    case 1:
      return dice() % (64 << 20);
    case 2:
      return ~uint64_t{0} - dice() % 300;
    case 3:
      return uint64_t{1} << dice() % 64;
    case 4:
      return (uint64_t{1} << 63) - dice() % 3;
    default:
      return dice();
  }
}

// -- the handshake

Fd memfd(size_t bytes, bool sealed) {
  Fd fd(memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  expect(fd && ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0, "a memfd");
  if (sealed) fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  return fd;
}

// A hello as this rank would say it, with some of it changed. It may know the nonce: then it is a rank that is broken.
Hello wrong_hello(const Heap& heap, int rank, Dice& dice) {
  Hello hello = hello_of(heap, heap.base() + 4096, rank, 2, kNonce);
  if (dice() % 3 == 0) hello.nonce = {dice(), dice()};
  auto* words = reinterpret_cast<uint64_t*>(&hello);
  for (uint64_t i = dice() % 4; i > 0; i--) words[dice() % (sizeof hello / sizeof(uint64_t))] = any_number(dice);
  return hello;
}

// Connects again and again, says it is `rank` and stays a while, often without ever saying anything.
void knock(const std::string& name, const Heap& heap, int rank, Dice dice, const std::atomic<bool>& stop) {
  std::vector<Fd> open;
  while (!stop.load(std::memory_order_relaxed)) {
    Fd s = open_socket();
    socklen_t length;
    sockaddr_un address = address_of(name, length);
    if (connect(s.get(), reinterpret_cast<sockaddr*>(&address), length) == 0) {
      const Hello hello = wrong_hello(heap, rank, dice);
      switch (dice() % 6) {
        case 0:
          break;  // half open
        case 1:
          send(s.get(), &hello, dice() % (sizeof hello + 1), MSG_NOSIGNAL | MSG_DONTWAIT);
          break;
        case 2:
          send_hello(s.get(), hello, STDERR_FILENO);
          break;
        case 3:
          send_hello(s.get(), hello, memfd(dice() % 2 ? heap.capacity() : 4096, dice() % 2).get());
          break;
        default:
          send_hello(s.get(), hello, heap.fd());
      }
      open.push_back(std::move(s));
    }
    if (open.size() > dice() % 100) open.clear();
    usleep(100);
  }
}

// With a broken rank that knows the nonce the group may fail, but not hang or crash; with strangers only it forms.
void fuzz_handshake(Dice& dice) {
  Failure failure;
  std::shared_ptr<Heap> heaps[2] = {Heap::create(failure), Heap::create(failure)};
  auto foreign = Heap::create(failure);
  std::unique_ptr<Listener> listeners[2] = {Listener::open(failure), Listener::open(failure)};
  const std::vector<std::string> names{listeners[0]->name(), listeners[1]->name()};
  const int at = static_cast<int>(dice() % 2);  // whose socket
  std::atomic<bool> stop{false};
  std::vector<std::thread> strangers;
  for (int i = 0; i < 2; i++)
    strangers.emplace_back([&, seed = dice()] { knock(names[at], *foreign, 1 - at, Dice(seed), stop); });
  std::unique_ptr<Group> made[2];
  const int64_t began = now_ns(), limit = kSecond / 2;
  std::thread second([&] {
    Failure own;
    made[1] = listeners[1]->join(heaps[1], {1, 2, "fuzz", 1, kSecond}, kNonce, names, limit, own);
  });
  made[0] = listeners[0]->join(heaps[0], {0, 2, "fuzz", 1, kSecond}, kNonce, names, limit, failure);
  second.join();
  expect(now_ns() - began < 30 * kSecond, "joining took no longer than its limit");
  stop.store(true);
  for (auto& t : strangers) t.join();
  for (auto& group : made)
    if (group) group->close("the end"), retire(std::move(group));
  sweep_retired();
}

void knock_silently(const std::string& name, const std::atomic<bool>& stop) {
  std::vector<Fd> open;
  while (!stop.load(std::memory_order_relaxed) && open.size() < 2000) {
    open.push_back(open_socket());
    socklen_t length;
    sockaddr_un address = address_of(name, length);
    if (connect(open.back().get(), reinterpret_cast<sockaddr*>(&address), length) != 0) open.pop_back(), usleep(500);
  }
  while (!stop.load(std::memory_order_relaxed)) usleep(1000);
}

// Connections that are never used further cannot keep a group from forming.
void test_half_open_connections() {
  Failure failure;
  std::shared_ptr<Heap> heaps[2] = {Heap::create(failure), Heap::create(failure)};
  std::unique_ptr<Listener> listeners[2] = {Listener::open(failure), Listener::open(failure)};
  const std::vector<std::string> names{listeners[0]->name(), listeners[1]->name()};
  std::atomic<bool> stop{false};
  std::thread stranger([&] { knock_silently(names[0], stop); });
  std::unique_ptr<Group> made[2];
  std::thread second([&] {
    Failure own;
    usleep(200'000);  // the strangers come first
    made[1] = listeners[1]->join(heaps[1], {1, 2, "fuzz", 1, kSecond}, kNonce, names, 60 * kSecond, own);
    if (!made[1]) std::printf("%s\n", own.text.c_str());
  });
  made[0] = listeners[0]->join(heaps[0], {0, 2, "fuzz", 1, kSecond}, kNonce, names, 60 * kSecond, failure);
  second.join();
  stop.store(true);
  stranger.join();
  if (!made[0]) std::printf("%s\n", failure.text.c_str());
  expect(made[0] && made[1], "the group forms beside half-open connections");
  for (auto& group : made) group->close("the end"), retire(std::move(group));
  sweep_retired();
}

// -- a peer's heap

struct World {  // two ranks in one process; the hostile one, rank 0 or 1, only writes what the dice say
  std::shared_ptr<Heap> heaps[2];
  std::byte* blocks[2];
  const int hostile, sound;

  explicit World(Dice& dice) : hostile(static_cast<int>(dice() % 2)), sound(1 - hostile) {
    Failure failure;
    for (auto& heap : heaps) heap = Heap::create(failure);
  }
  std::unique_ptr<Group> join(int64_t timeout_ns) {
    Failure failure;
    std::vector<Peer> peers;
    for (int r = 0; r < 2; r++) {
      blocks[r] = make_block(*heaps[r], 2, failure).release();
      expect(blocks[r] != nullptr, failure.text.c_str());
      peers.push_back({heaps[r]->base(), heaps[r]->capacity(), heaps[r]->mapping(), Block(blocks[r], 2), nullptr, 0});
    }
    return std::make_unique<Group>(GroupFacts{sound, 2, "fuzz", 77, timeout_ns, true}, heaps[sound], std::move(peers));
  }
  Heap& hostile_heap() { return *heaps[hostile]; }
  Block hostile_block() { return Block(blocks[hostile], 2); }
  void forget_hostile_block() { BlockRelease{&hostile_heap()}(blocks[hostile]); }
};

// Fills a sound record: groups, operations with counts, waits and kept tensors. Then changes words of it at random.
void fill_record(Heap& heap, Dice& dice) {
  Recorder& recorder = heap.recorder();
  GroupWords words{};
  words.id = 77;
  words.rank = static_cast<int>(dice() % 2);
  words.size = 2;
  std::snprintf(words.name, sizeof words.name, "fuzz");
  const auto group = recorder.open_group(words);
  char site[kSiteBytes] = "fuzz.py:1";
  for (uint64_t i = 0; i < 5; i++) {
    recorder.begin({Verb::all_reduce, DType::f32, RedOp::sum, false, -1, i, 10, 0, group.reference, site})
        .end(true, true);
    recorder.begin({Verb::all_to_all, DType::f32, RedOp::none, true, -1, i, 10, 0, group.reference, nullptr}, 2, 2,
                   [](size_t k) { return k; });
  }
  Waiting waiting{};
  waiting.group_id = 77;
  waiting.owed[0] = 3;
  waiting.verb = Verb::all_reduce;
  waiting.blocks = 1;
  recorder.activities().count_threads(recorder.activities().begin(waiting), now_ns(), 1);
  Failure failure;
  void* data = heap.allocate(4096, failure);
  KeptTensor kept{"state", static_cast<size_t>(static_cast<std::byte*>(data) - heap.base()), 400, DType::f32, {10, 10}};
  heap.keeping().add(kept, failure);
}

void scribble(std::byte* base, size_t from, size_t to, Dice& dice, int times) {
  auto* words = reinterpret_cast<uint64_t*>(base);
  const size_t first = from / sizeof(uint64_t), count = (to - from) / sizeof(uint64_t);
  for (int i = 0; i < times; i++) __atomic_store_n(&words[first + dice() % count], any_number(dice), __ATOMIC_RELAXED);
}

// Behind the header, which is compared when a heap is mapped.
void scribble_on_record(Heap& heap, Dice& dice) {
  std::byte* base = heap.base();
  using L = RecorderLayout;
  const size_t head = std::min<size_t>(sizeof(RecorderHeader), 64);
  scribble(base, kRecorderAt, kRecorderAt + head, dice, static_cast<int>(dice() % 3));
  scribble(base, L::activities, L::activities + 2 * sizeof(Activity), dice, static_cast<int>(dice() % 10));
  scribble(base, L::groups, L::groups + 2 * sizeof(GroupRecord), dice, static_cast<int>(dice() % 40));
  scribble(base, L::operations, L::operations + 10 * sizeof(Operation), dice, static_cast<int>(dice() % 40));
  scribble(base, L::splits, L::splits + 256, dice, static_cast<int>(dice() % 10));
  scribble(base, kKeptAt, kKeptAt + 8, dice, dice() % 4 == 0);
}

void fuzz_record(Dice& dice) {
  World world(dice);
  fill_record(world.hostile_heap(), dice);
  Failure failure;
  const KeptTensor kept{"another", 4096 + 65536, 8, DType::f64, {1}};
  world.hostile_heap().keeping().add(kept, failure);
  const uint64_t page = *reinterpret_cast<uint64_t*>(world.hostile_heap().base() + kKeptAt);
  for (int turn = 0; turn < 200; turn++) {
    scribble_on_record(world.hostile_heap(), dice);
    scribble(world.hostile_heap().base(), page, page + sizeof(KeptPage), dice, static_cast<int>(dice() % 20));
    const std::string json = record_as_json(world.hostile_heap().base(), "fuzz");
    expect(json.size() > 100 && json.back() == '}', "a whole record");
    for (const KeptTensor& t : read_kept(world.hostile_heap().base(), world.hostile_heap().capacity())) {
      expect(t.offset + t.bytes <= world.hostile_heap().capacity(), "a kept tensor inside of its heap");
      size_t bytes = dtype_bytes(t.dtype);
      for (int64_t n : t.shape) bytes *= static_cast<size_t>(n);
      expect(bytes == t.bytes && t.offset % dtype_bytes(t.dtype) == 0, "a kept tensor of its shape's size");
    }
    std::byte* made = make_block(*world.heaps[world.sound], 2, failure).release();
    const Block block(made, 2);
    const uint64_t membership = block.membership_offset();
    block.membership_offset() = any_number(dice);
    const auto* line = reinterpret_cast<std::byte*>(membership_of(block, made, 1 << 20));
    expect(!line || (line >= made && line + sizeof(Membership) <= made + (1 << 20)), "a membership inside of its heap");
    block.membership_offset() = membership;
    BlockRelease{world.heaps[world.sound].get()}(made);
    if (turn % 20 == 0)  // sound again, so that later turns get further than the first check
      *reinterpret_cast<uint64_t*>(world.hostile_heap().base() + kKeptAt) = page;
  }
}

// A thread that changes what the sound rank reads, while it reads.
template <class Change>
class Enemy {
 public:
  Enemy(Change change, uint64_t seed)
      : thread_([this, change, dice = Dice(seed)]() mutable {
          while (!stop_.load(std::memory_order_relaxed)) change(dice);
        }) {}
  ~Enemy() {
    stop_.store(true);
    thread_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// Waits beside a peer whose record, abort line and membership change: time-outs, warnings and the search for deadlocks
// read them.
void fuzz_waits(Dice& dice) {
  World world(dice);
  fill_record(world.hostile_heap(), dice);
  auto engine = Engine::open(world.join(2'000'000 + static_cast<int64_t>(dice() % 5) * kSecond / 20));
  {
    const Block block = world.hostile_block();
    const bool aborts = dice() % 2;
    Enemy enemy(
        [&, aborts](Dice& own) {
          scribble_on_record(world.hostile_heap(), own);
          usleep(20);
          if (own() % 64 || !aborts) return;
          AbortLine& line = block.abort();
          auto* words = reinterpret_cast<std::byte*>(&line);
          scribble(words, 8, sizeof line, own, 30);
          line.code.store(any_number(own), std::memory_order_release);
        },
        dice());
    Call call;
    call.verb = Verb::barrier;
    engine->run(call);
    DeadlockFinder finder(engine->group());
    for (int i = 0; i < 20; i++) finder.look(call.seq, WaitFor::callers, now_ns() + i * kSecond);
  }
  world.forget_hostile_block();
  engine.reset();
}

// A peer that makes and takes back offers and verdicts while the sound rank shrinks the group.
void fuzz_shrink(Dice& dice) {
  World world(dice);
  auto group = world.join(kSecond);
  {
    const Block block = world.hostile_block();
    Enemy enemy(
        [&](Dice& own) {
          auto* offer = reinterpret_cast<std::byte*>(&block.offer());
          auto* verdict = reinterpret_cast<std::byte*>(&block.verdict());
          scribble(offer, 8, sizeof(Offer), own, 4);
          scribble(verdict, 8, sizeof(Verdict), own, 2);
          block.verdict().members[0] = own() % 2 ? 3 : any_number(own);
          block.offer().attempt.store(own() % 3, std::memory_order_release);
          block.verdict().attempt.store(own() % 3, std::memory_order_release);
          usleep(10);
        },
        dice());
    Failure failure;
    if (agree(*group, dice() % 2 ? std::vector<int>{} : std::vector<int>{world.hostile}, kSecond / 20, failure) ==
        Code::ok) {
      offered_numbers(*group);
      auto smaller = make_survivors(*group, {.name = "smaller", .id = 78, .timeout_ns = kSecond / 100}, failure);
      if (smaller) smaller->close("the end"), retire(std::move(smaller));
    }
  }
  world.forget_hostile_block();
  group->close("the end");
  retire(std::move(group));
  sweep_retired();
}

}  // namespace

int main() {
  set_heap_capacity(size_t{64} << 20);
  const uint64_t seed = setting("UNISONO_FUZZ_SEED", random_token().a % 1'000'000);
  const int64_t seconds = static_cast<int64_t>(setting("UNISONO_FUZZ_SECONDS", 8));
  std::printf("UNISONO_FUZZ_SEED=%lu\n", static_cast<unsigned long>(seed));
  std::fflush(stdout);
  test_half_open_connections();
  void (*const kinds[])(Dice&) = {fuzz_handshake, fuzz_record, fuzz_waits, fuzz_shrink};
  Dice dice(seed);
  int rounds = 0;
  for (const int64_t until = now_ns() + seconds * kSecond; now_ns() < until; rounds++)
    kinds[static_cast<size_t>(rounds) % std::size(kinds)](dice);
  std::printf("%d rounds passed\n", rounds);
  return 0;
}
