// Ranks as threads of one process, so that the sanitizers see both ends of every flag: random programs of collectives
// and messages on heap and ordinary memory, checked against what they must give; asynchronous calls; giving up.
//
// Thread ranks share mappings (a peer's heap is read at the address its owner uses), otherwise a race between two
// mappings of the same page would be invisible. There are no sockets here: deaths are tested with real processes.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <random>
#include <thread>

#include "base/tuning.h"
#include "engine/engine.h"
#include "kernels/reduce.h"

using namespace unisono;

namespace {

std::atomic<int> failed{0}, passed{0};

void expect(bool ok, const char* what, int rank, size_t detail = 0) {
  (ok ? passed : failed)++;
  if (!ok) std::fprintf(stderr, "FAILED rank %d: %s (%zu)\n", rank, what, detail);
}

struct Rank {
  std::shared_ptr<Heap> heap;
  std::byte* block = nullptr;
};

std::vector<Rank> make_ranks(int size) {
  std::vector<Rank> ranks(static_cast<size_t>(size));
  Failure failure;
  for (Rank& r : ranks) {
    r.heap = Heap::create(failure);
    if (!r.heap) std::fprintf(stderr, "%s\n", failure.text.c_str()), std::exit(1);
  }
  return ranks;
}

// Another group of the same ranks.
std::vector<std::shared_ptr<Engine>> make_engines(std::vector<Rank>& ranks, bool crowded, int64_t timeout_ns) {
  const int size = static_cast<int>(ranks.size());
  Failure failure;
  for (Rank& r : ranks) r.block = make_block(*r.heap, size, failure).release();
  std::vector<std::shared_ptr<Engine>> engines;
  for (int r = 0; r < size; r++) {
    std::vector<Peer> peers;
    for (const Rank& p : ranks)
      peers.push_back({p.heap->base(), p.heap->capacity(), p.heap->mapping(), Block(p.block, size), nullptr, getpid()});
    GroupFacts facts{r, size, "threads", 1, timeout_ns, crowded};
    engines.push_back(
        Engine::open(std::make_unique<Group>(facts, ranks[static_cast<size_t>(r)].heap, std::move(peers))));
  }
  return engines;
}

std::vector<std::shared_ptr<Engine>> make_engines(int size, bool crowded, int64_t timeout_ns = 60'000'000'000) {
  std::vector<Rank> ranks = make_ranks(size);
  return make_engines(ranks, crowded, timeout_ns);
}

template <class F>
void on_all_ranks(std::vector<std::shared_ptr<Engine>>& engines, F f) {
  std::vector<std::thread> threads;
  for (size_t r = 0; r < engines.size(); r++) threads.emplace_back([&, r] { f(*engines[r], static_cast<int>(r)); });
  for (auto& t : threads) t.join();
}

// Memory of `count` floats, in the heap or not, with a guard behind it.
class Floats {
 public:
  Floats(Heap& heap, size_t count, bool shared) : heap_(shared ? &heap : nullptr), count_(count) {
    Failure failure;
    size_t bytes = (count + 1) * sizeof(float);
    at_ = static_cast<float*>(shared ? heap.allocate(bytes, failure) : std::malloc(bytes));
    at_[count] = kGuard;
  }
  ~Floats() { heap_ ? heap_->release(at_) : std::free(at_); }
  Floats(const Floats&) = delete;
  float& operator[](size_t i) { return at_[i]; }
  std::byte* bytes() { return reinterpret_cast<std::byte*>(at_); }
  bool guarded() const { return at_[count_] == kGuard; }

 private:
  static constexpr float kGuard = -12345;
  Heap* heap_;
  size_t count_;
  float* at_;
};

float value(int rank, size_t i) {
  return static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13) % 97);
}

std::vector<Part> cut(Floats& whole, const std::vector<size_t>& counts) {
  std::vector<Part> parts;
  size_t at = 0;
  for (size_t n : counts) {
    parts.push_back({whole.bytes() + at * sizeof(float), n});
    at += n;
  }
  return parts;
}

void one_call(Engine& engine, int me, std::mt19937& dice, bool async) {
  const int size = engine.group().size();
  const auto ranks = static_cast<size_t>(size);
  static const size_t sizes[] = {0, 1, 9, 10, 11, 500, 1024, 1025, 16384, 16385, 40000, 90000, 250'000, 1'100'000};
  Verb verb = static_cast<Verb>(dice() % 9);
  size_t n = sizes[dice() % std::size(sizes)];
  int root = static_cast<int>(dice() % ranks);
  uint32_t in_kinds = dice(), out_kinds = dice();
  bool in_place = dice() % 3 == 0;
  bool in_shared = in_kinds % 3 == 0 ? true : in_kinds % 3 == 1 ? false : in_kinds >> (4 + me) & 1;
  bool out_shared = out_kinds % 3 == 0 ? true : out_kinds % 3 == 1 ? false : out_kinds >> (4 + me) & 1;
  std::vector<size_t> counts(ranks);
  for (size_t& c : counts) c = dice() % 4 == 0 ? 0 : dice() % (n + 1);
  size_t total = 0;
  for (size_t c : counts) total += c;

  auto ticket = std::make_shared<Ticket>();
  Call& call = ticket->call;
  call.verb = verb;
  call.dtype = DType::f32;
  bool reducing = verb == Verb::all_reduce || verb == Verb::reduce || verb == Verb::reduce_scatter;
  call.op = reducing ? RedOp::sum : RedOp::none;
  bool rooted = verb == Verb::reduce || verb == Verb::broadcast || verb == Verb::gather || verb == Verb::scatter;
  call.root = rooted ? root : -1;
  Heap& heap = engine.group().heap();
  size_t in_count = n, out_count = n;
  const auto self = static_cast<size_t>(me);
  switch (verb) {
    case Verb::all_gather:
    case Verb::gather:
      in_count = counts[self], out_count = total;
      break;
    case Verb::reduce_scatter:
    case Verb::scatter:
      in_count = total, out_count = counts[self];
      break;
    case Verb::all_to_all:
      in_count = out_count = n * ranks;
      break;
    default:
      break;
  }
  Floats in(heap, in_count, in_shared), out(heap, out_count, out_shared);
  for (size_t i = 0; i < in_count; i++) in[i] = value(me, i);
  for (size_t i = 0; i < out_count; i++) out[i] = -1;
  Floats* result = &out;
  std::vector<size_t> equal(ranks, n);
  switch (verb) {
    case Verb::barrier:
      break;
    case Verb::all_reduce:
    case Verb::reduce:
    case Verb::broadcast:
      call.count = n;
      call.in = in.bytes();
      call.out = out.bytes();
      if (verb == Verb::broadcast || in_place) call.out = in.bytes(), result = &in;
      if (verb == Verb::reduce && me != root) call.out = nullptr;
      break;
    case Verb::all_gather:
    case Verb::gather:
      call.count = in_count;
      call.in = in.bytes();
      if (verb == Verb::all_gather || me == root) ticket->out_parts = cut(out, counts);
      break;
    case Verb::reduce_scatter:
    case Verb::scatter:
      call.count = out_count;
      call.out = out.bytes();
      if (verb == Verb::reduce_scatter || me == root) ticket->in_parts = cut(in, counts);
      break;
    default:
      ticket->in_parts = cut(in, equal);
      ticket->out_parts = cut(out, equal);
  }
  call.in_parts = ticket->in_parts.empty() ? nullptr : ticket->in_parts.data();
  call.out_parts = ticket->out_parts.empty() ? nullptr : ticket->out_parts.data();
  Code code;
  if (async) {
    bool interrupted;
    engine.submit(ticket);
    engine.wait(*ticket, 0, false, interrupted);
    code = ticket->code;
  } else {
    code = engine.run(call);
  }
  expect(code == Code::ok, call.failure.text.c_str(), me, static_cast<size_t>(verb));

  bool right = in.guarded() && out.guarded();
  size_t begin = 0;
  for (size_t r = 0; r < self; r++) begin += counts[r];
  auto sum = [&](size_t i) {
    float s = 0;
    for (int r = 0; r < size; r++) s += value(r, i);
    return s;
  };
  switch (verb) {
    case Verb::barrier:
      break;
    case Verb::all_reduce:
    case Verb::reduce:
      for (size_t i = 0; i < n && (verb == Verb::all_reduce || me == root); i++) right &= (*result)[i] == sum(i);
      break;
    case Verb::broadcast:
      for (size_t i = 0; i < n; i++) right &= in[i] == value(root, i);
      break;
    case Verb::all_gather:
    case Verb::gather: {
      size_t at = 0;
      for (int r = 0; r < size; r++)
        for (size_t i = 0; i < counts[static_cast<size_t>(r)]; i++, at++)
          if (verb == Verb::all_gather || me == root) right &= out[at] == value(r, i);
      break;
    }
    case Verb::reduce_scatter:
      for (size_t i = 0; i < out_count; i++) right &= out[i] == sum(begin + i);
      break;
    case Verb::scatter:
      for (size_t i = 0; i < out_count; i++) right &= out[i] == value(root, begin + i);
      break;
    default:
      for (int r = 0; r < size; r++)
        for (size_t i = 0; i < n; i++) right &= out[static_cast<size_t>(r) * n + i] == value(r, self * n + i);
  }
  expect(right, verb_name(verb), me, n);
}

void test_programs(int size, bool crowded, int calls, Tuning tuning) {
  set_tuning(tuning);
  auto engines = make_engines(size, crowded);
  on_all_ranks(engines, [&](Engine& engine, int me) {
    std::mt19937 dice(static_cast<uint32_t>(size * 1000 + calls));  // the same program on every rank
    for (int i = 0; i < calls; i++) one_call(engine, me, dice, i % 3 == 2);
  });
}

// Many calls in flight, waited for in reverse; messages cross at the same time.
void test_in_flight(int size) {
  auto engines = make_engines(size, false);
  on_all_ranks(engines, [&](Engine& engine, int me) {
    Heap& heap = engine.group().heap();
    std::vector<std::unique_ptr<Floats>> data;
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (size_t i = 0; i < 20; i++) {
      size_t n = i % 4 ? i * 50 : 60000;
      data.push_back(std::make_unique<Floats>(heap, n, i % 2));
      for (size_t k = 0; k < n; k++) (*data.back())[k] = value(me, k);
      auto ticket = std::make_shared<Ticket>();
      ticket->call.verb = Verb::all_reduce;
      ticket->call.dtype = DType::f32;
      ticket->call.op = RedOp::sum;
      ticket->call.count = n;
      ticket->call.in = ticket->call.out = data.back()->bytes();
      tickets.push_back(ticket);
      engine.submit(ticket);
    }
    std::vector<std::shared_ptr<Ticket>> messages;
    std::vector<std::unique_ptr<Floats>> payloads;
    for (int64_t tag = 0; tag < 24; tag++)
      for (bool sending : {true, false}) {
        size_t n = tag % 3 == 0 ? 5 : tag % 3 == 1 ? 3000 : 150000;
        payloads.push_back(std::make_unique<Floats>(heap, n, tag % 2));
        for (size_t k = 0; k < n; k++) (*payloads.back())[k] = sending ? value(me, k) + static_cast<float>(tag) : 0;
        auto message = std::make_shared<Message>();
        message->sending = sending;
        message->peer = sending ? (me + 1) % size : (me + size - 1) % size;
        message->tag = sending ? tag : 23 - tag;  // received in another order than sent
        if (!sending) {
          size_t m = message->tag % 3 == 0 ? 5 : message->tag % 3 == 1 ? 3000 : 150000;
          payloads.back() = std::make_unique<Floats>(heap, m, tag % 2);
          n = m;
        }
        message->data = payloads.back()->bytes();
        message->bytes = n * sizeof(float);
        message->dtype = DType::f32;
        auto ticket = std::make_shared<Ticket>();
        ticket->call.verb = sending ? Verb::send : Verb::recv;
        ticket->message = message;
        messages.push_back(ticket);
        engine.submit(ticket);
      }
    bool interrupted;
    for (size_t i = tickets.size(); i-- > 0;) {
      engine.wait(*tickets[i], 0, false, interrupted);
      expect(tickets[i]->code == Code::ok, "in flight", me, i);
      bool right = data[i]->guarded();
      for (size_t k = 0; k < tickets[i]->call.count; k++) {
        float s = 0;
        for (int r = 0; r < size; r++) s += value(r, k);
        right &= (*data[i])[k] == s;
      }
      expect(right, "in flight, values", me, i);
    }
    for (size_t i = 0; i < messages.size(); i++) {
      engine.wait(*messages[i], 0, false, interrupted);
      expect(messages[i]->code == Code::ok, messages[i]->call.failure.text.c_str(), me, i);
      const Message& m = *messages[i]->message;
      if (m.sending) continue;
      bool right = payloads[i]->guarded();
      for (size_t k = 0; k < m.bytes / sizeof(float); k++)
        right &= (*payloads[i])[k] == value((me + size - 1) % size, k) + static_cast<float>(m.tag);
      expect(right, "message", me, i);
    }
  });
}

// A callback that waits, not by Engine::wait but by a condition of its own, for a call asked for in that callback, and
// so on; then one that waits for a call asked for before it ran.
void test_callbacks_that_wait(int size) {
  auto engines = make_engines(size, size > 2);
  on_all_ranks(engines, [&](Engine& engine, int me) {
    auto barrier = [&](std::function<void()> on_done) {
      auto ticket = std::make_shared<Ticket>();
      ticket->call.verb = Verb::barrier;
      ticket->on_done = std::move(on_done);
      engine.submit(ticket);
      return ticket;
    };
    for (int depth : {1, 3, 2, 1}) {
      std::function<void(int)> nest = [&](int left) {
        std::promise<void> over;
        barrier([&] {
          if (left) nest(left - 1);
          over.set_value();
        });
        expect(over.get_future().wait_for(std::chrono::seconds(20)) == std::future_status::ready, "nested", me, left);
      };
      nest(depth);
      std::this_thread::sleep_for(std::chrono::milliseconds(150));  // spare threads end
    }
    std::promise<void> second, both;
    barrier([&] {
      expect(second.get_future().wait_for(std::chrono::seconds(20)) == std::future_status::ready, "earlier", me);
      both.set_value();
    });
    barrier([&] { second.set_value(); });
    expect(both.get_future().wait_for(std::chrono::seconds(40)) == std::future_status::ready, "both", me);
  });
}

// Calls and messages are asked for while the group closes: every ticket ends, once, and nobody writes to it twice.
void test_submit_against_close(int rounds) {
  for (int round = 0; round < rounds; round++) {
    auto engines = make_engines(2, true);
    on_all_ranks(engines, [&](Engine& engine, int me) {
      std::vector<std::thread> threads;
      std::atomic<int> ended{0};
      constexpr int kThreads = 3, kCalls = 20;
      std::vector<std::vector<std::shared_ptr<Ticket>>> tickets(kThreads);
      for (int t = 0; t < kThreads; t++)
        threads.emplace_back([&, t] {
          for (int i = 0; i < kCalls; i++) {
            auto ticket = std::make_shared<Ticket>();
            ticket->call.verb = Verb::barrier;
            if (i % 3 == 2) {
              ticket->call.verb = Verb::recv;
              ticket->message = std::make_shared<Message>();
              ticket->message->peer = 1 - me;
            }
            ticket->on_done = [&] { ended++; };
            tickets[static_cast<size_t>(t)].push_back(ticket);
            engine.submit(ticket);
          }
        });
      if (round % 2) std::this_thread::yield();
      engine.close("enough");
      for (auto& thread : threads) thread.join();
      bool interrupted;
      for (auto& list : tickets)
        for (auto& ticket : list) engine.wait(*ticket, 0, false, interrupted);
      for (int i = 0; i < 2000 && ended != kThreads * kCalls; i++)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));  // a callback may still be on its way
      expect(ended == kThreads * kCalls, "callbacks", me, static_cast<size_t>(ended));
    });
  }
}

// The last user of an engine lets go of it in a callback of its own progress thread.
void test_callback_that_drops_the_engine() {
  for (int round = 0; round < 20; round++) {
    auto engines = make_engines(1, false);
    std::promise<void> alone, over;
    auto ticket = std::make_shared<Ticket>();
    ticket->on_done = [&over, last = engines[0], go = alone.get_future().share()]() mutable {
      go.wait();
      last.reset();
      over.set_value();
    };
    engines[0]->submit(ticket);
    engines.clear();
    alone.set_value();
    expect(over.get_future().wait_for(std::chrono::seconds(20)) == std::future_status::ready, "dropped", 0);
  }
}

// Adds up and sends on ordinary memory, which goes through a ring, and checks each value.
void use_rings(Engine& engine, int me, int rounds) {
  const int size = engine.group().size();
  for (int round = 0; round < rounds; round++) {
    const size_t n = round % 3 == 0 ? 200'000 : 9'000;  // in pieces; in one
    Floats data(engine.group().heap(), n, false), got(engine.group().heap(), n, false);
    for (size_t i = 0; i < n; i++) data[i] = value(me, i + static_cast<size_t>(round));
    Call call;
    call.verb = Verb::all_reduce;
    call.dtype = DType::f32;
    call.op = RedOp::sum;
    call.count = n;
    call.in = data.bytes();
    call.out = got.bytes();
    expect(engine.run(call) == Code::ok, "all_reduce", me);
    size_t wrong = 0;
    for (size_t i = 0; i < n; i++) {
      float sum = 0;
      for (int r = 0; r < size; r++) sum += value(r, i + static_cast<size_t>(round));
      wrong += got[i] != sum;
    }
    expect(wrong == 0, "a ring that others use too", me, wrong);
    Call each;
    auto message = std::make_shared<Message>();
    message->sending = me == 0;
    message->peer = 1 - me;
    message->dtype = DType::f32;
    message->bytes = n * sizeof(float);
    message->data = me == 0 ? data.bytes() : got.bytes();
    each.verb = me == 0 ? Verb::send : Verb::recv;
    expect(engine.run(each, message) == Code::ok, "a message", me);
    for (size_t i = wrong = 0; me == 1 && i < n; i++) wrong += got[i] != value(0, i + static_cast<size_t>(round));
    expect(wrong == 0, "a message through a ring that others use too", me, wrong);
  }
}

// More groups than rings, all at work, while somebody takes back whatever is not in use at that moment.
void test_shared_rings(int groups, int rounds) {
  std::vector<Rank> ranks = make_ranks(2);
  std::vector<std::vector<std::shared_ptr<Engine>>> engines;
  for (int i = 0; i < groups; i++) engines.push_back(make_engines(ranks, false, 60'000'000'000));
  std::atomic<bool> stop{false};
  std::thread trimmer([&] {
    while (!stop) Heap::trim_all(), std::this_thread::yield();
  });
  std::vector<std::thread> threads;
  for (auto& group : engines)
    for (int r = 0; r < 2; r++)
      threads.emplace_back([&group, r, rounds] { use_rings(*group[static_cast<size_t>(r)], r, rounds); });
  for (auto& t : threads) t.join();
  stop = true;
  trimmer.join();
  for (int i = 0; i < 3; i++) Heap::trim_all();
  for (int r = 0; r < 2; r++) {
    const size_t held = ranks[static_cast<size_t>(r)].heap->usage().in_use;
    expect(held < static_cast<size_t>(groups) << 20, "idle groups have no ring", r, held);
  }
}

void test_giving_up(int size) {
  auto engines = make_engines(size, false);
  std::atomic<int> through{0};
  on_all_ranks(engines, [&](Engine& engine, int me) {
    Call call;
    expect(engine.run(call) == Code::ok, "barrier before", me);
    through++;
    if (me == 0) {
      while (through != size) std::this_thread::yield();  // giving up may also end a call that is almost over
      Failure cause;
      fail(cause, Code::aborted, "enough", {0});
      engine.group().abort(cause);
      return;
    }
    Call next;
    expect(engine.run(next) == Code::aborted && next.failure.text.rfind("enough", 0) == 0, "giving up", me);
    expect(engine.run(next) == Code::aborted && next.failure.first_cause, "quoted", me);
  });
}

void test_mismatch_and_timeout(int size) {
  auto engines = make_engines(size, false, 300'000'000);
  on_all_ranks(engines, [&](Engine& engine, int me) {
    Floats data(engine.group().heap(), 100, true);
    Call call;
    call.verb = Verb::broadcast;
    call.dtype = DType::f32;
    call.root = 0;
    call.count = me == 1 ? 99 : 100;
    call.in = call.out = data.bytes();
    expect(engine.run(call) == Code::mismatch && call.failure.lines.size() == static_cast<size_t>(size), "mismatch",
           me);
    Call barrier;
    expect(engine.run(barrier) == Code::ok, "usable after a mismatch", me);
    if (me == 0) return;  // never comes to the next one
    Call late;
    expect(engine.run(late) == Code::timeout, "timeout", me);
  });
}

}  // namespace

int main() {
  set_heap_capacity(size_t{64} << 20);
  for (const Tuning tuning : {kDefaultTuning, Tuning{13, 13, 16, 19}}) {
    for (int size : {1, 2, 3, 5}) test_programs(size, size > 2, 60, tuning);
    for (int size : {3, 4}) test_programs(size, false, 60, tuning);  // rings from small sizes on
  }
  test_in_flight(2);
  test_in_flight(3);
  test_callbacks_that_wait(2);
  test_callbacks_that_wait(3);
  test_submit_against_close(40);
  test_callback_that_drops_the_engine();
  test_shared_rings(6, 30);
  test_giving_up(3);
  test_mismatch_and_timeout(3);
  std::printf("%d passed, %d failed\n", passed.load(), failed.load());
  return failed.load() != 0;
}
