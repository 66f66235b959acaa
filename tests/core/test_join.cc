// Ranks as threads that join through real sockets: all of them, or some while others give up. Under the sanitizers, and
// whatever happens, every control block comes back to its heap once all have left.
#include <chrono>
#include <cstdio>
#include <functional>
#include <thread>

#include "engine/engine.h"
#include "group/join.h"
#include "group/retire.h"

using namespace unisono;

namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr Token kNonce{7, 8};
std::atomic<int> failed{0}, passed{0};

void expect(bool ok, const char* what, int rank) {
  (ok ? passed : failed)++;
  if (!ok) std::fprintf(stderr, "FAILED rank %d: %s\n", rank, what);
}

struct Outcome {
  std::shared_ptr<Engine> engine;
  Failure failure;
};

struct World {
  explicit World(int size) {
    Failure failure;
    for (int r = 0; r < size; r++) {
      heaps.push_back(Heap::create(failure));
      listeners.push_back(Listener::open(failure));
      names.push_back(listeners.back()->name());
      before.push_back(heaps.back()->usage().in_use);
    }
  }

  // `change` may give a rank other names or another limit; `then` is what each does next, while others still join.
  std::vector<Outcome> join(
      std::function<void(int, std::vector<std::string>&, int64_t&)> change,
      std::function<void(int, Outcome&)> then = [](int, Outcome&) {}) {
    std::vector<Outcome> outcomes(heaps.size());
    std::vector<std::thread> threads;
    for (size_t r = 0; r < heaps.size(); r++)
      threads.emplace_back([&, r] {
        std::vector<std::string> known = names;
        int64_t limit_ns = 60 * kSecond;
        GroupFacts facts{static_cast<int>(r), static_cast<int>(heaps.size()), "threads", 5, 60 * kSecond};
        change(static_cast<int>(r), known, limit_ns);
        outcomes[r].engine =
            Engine::open(listeners[r]->join(heaps[r], facts, kNonce, known, limit_ns, outcomes[r].failure));
        then(static_cast<int>(r), outcomes[r]);
      });
    for (auto& t : threads) t.join();
    return outcomes;
  }

  // The background sweep may hold a group that is over and not yet destroyed, so a look of our own does not suffice.
  void expect_all_given_back(std::vector<Outcome> outcomes) {
    outcomes.clear();
    sweep_retired();
    for (size_t r = 0; r < heaps.size(); r++) {
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
      while (heaps[r]->usage().in_use != before[r] && std::chrono::steady_clock::now() < deadline)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      expect(heaps[r]->usage().in_use == before[r], "its block came back", static_cast<int>(r));
    }
  }

  std::vector<std::shared_ptr<Heap>> heaps;
  std::vector<std::unique_ptr<Listener>> listeners;
  std::vector<std::string> names;
  std::vector<size_t> before;
};

Failure barrier(Engine& engine) {
  Call call;
  call.verb = Verb::barrier;
  engine.run(call);
  return call.failure;
}

void test_all_join() {
  World world(4);
  auto outcomes = world.join([](int, auto&, auto&) {});
  std::vector<std::thread> threads;
  for (size_t r = 0; r < outcomes.size(); r++)
    threads.emplace_back([&, r] {
      const int rank = static_cast<int>(r);
      expect(outcomes[r].engine != nullptr, "joined", rank);
      if (outcomes[r].engine) expect(barrier(*outcomes[r].engine).code == Code::ok, "a barrier", rank);
    });
  for (auto& t : threads) t.join();
  world.expect_all_given_back(std::move(outcomes));
}

// Rank 2 reaches rank 0 only. Rank 0 may have its group by then, or not; in its first call it is told, and tells rank
// 1, which would wait for rank 2 until its limit.
void test_one_cannot_join() {
  for (int turn = 0; turn < 20; turn++) {
    World world(3);
    Failure first;
    auto outcomes = world.join(
        [](int rank, std::vector<std::string>& names, int64_t&) {
          if (rank == 2) names[1] = "unisono-test-nobody";
        },
        [&](int rank, Outcome& outcome) {
          if (rank == 0) first = outcome.engine ? barrier(*outcome.engine) : outcome.failure;
        });
    expect(outcomes[2].failure.code == Code::peer_lost && outcomes[2].failure.peers == std::vector<int>{1},
           "could not reach rank 1", 2);
    const Code second = outcomes[1].failure.code;  // lost, if it came when rank 0 had given up
    expect(second == Code::aborted || second == Code::peer_lost, "learnt it of rank 0", 1);
    expect(first.code == Code::aborted && first.text.find("could not join") != std::string::npos, first.text.c_str(),
           0);
    if (outcomes[0].engine) expect(world.heaps[2]->usage().in_use > world.before[2], "kept its block for rank 0", 2);
    world.expect_all_given_back(std::move(outcomes));
  }
}

void test_nobody_comes() {
  World world(3);
  auto outcomes = world.join([](int, std::vector<std::string>& names, int64_t& limit_ns) {
    static auto silent = [] {
      Failure failure;
      return Listener::open(failure);
    }();
    for (std::string& name : names) name = silent->name();
    limit_ns = kSecond / 10;
  });
  for (int r = 0; r < 3; r++) expect(outcomes[static_cast<size_t>(r)].failure.code == Code::timeout, "timed out", r);
  outcomes.clear();
}

}  // namespace

int main() {
  set_heap_capacity(size_t{1} << 26);
  test_all_join();
  test_one_cannot_join();
  test_nobody_comes();
  std::printf("%d passed, %d failed\n", passed.load(), failed.load());
  return failed != 0;
}
