// See trial.h.
#include "verbs/trial.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <memory>
#include <new>
#include <system_error>
#include <thread>

#include "base/clock.h"
#include "base/shared.h"
#include "group/reach.h"
#include "kernels/reduce.h"

namespace unisono {
namespace {

// Bytes of an exchange.
constexpr size_t kLongest = 8 << 20;  // leaves most caches
constexpr size_t kLong = 1 << 20;
constexpr size_t kShorter[] = {256 << 10, 128 << 10, 64 << 10, 32 << 10};
constexpr size_t kRingTrial = 1 << 20;                                    // of one through rings of several lengths
constexpr size_t kRingRoom = 4 << 20;                                     // as Scratch::kBytes
constexpr int kRounds = 8, kLongestRounds = 4;                            // the first warms up
constexpr double kClearly = 0.95;                                         // of the usual way's time: then another wins
constexpr int64_t kBudget = 80'000'000;                                   // ns: on a busy machine the rest is left out
constexpr uint8_t kPieces[] = {16, 17, 18}, kRings[] = {19, 20, 21, 22};  // powers of two

// One way of exchanging `bytes`.
struct Way {
  bool reduces;
  bool single;
  size_t bytes;
  Tuning tuning;
};

class Exchange {
 public:
  Exchange() {
    for (Side& s : sides_)
      for (auto* memory : {&s.in, &s.out, &s.ring}) {
        const size_t bytes = memory == &s.ring ? kRingRoom : kLongest;
        memory->reset(new (std::nothrow) std::byte[bytes]);
        if (!*memory) return;
        std::memset(memory->get(), 1, bytes);
      }
    is_ready_ = true;
  }
  ~Exchange() {
    if (!partner_.joinable()) return;
    is_over_.store(true, std::memory_order_relaxed);
    meet(0);
    partner_.join();
  }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Starts the other side, without signals, which belong to Python's main thread.
  bool start() {
    if (!is_ready_) return false;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      partner_ = std::thread([this] { serve(); });
    } catch (const std::system_error&) {
      is_ready_ = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return is_ready_;
  }

  // Of each way the least time of a few rounds, in microseconds. They take turns. Nothing if there was no time.
  std::vector<double> measure(const std::vector<Way>& ways, int rounds) {
    std::vector<double> least(ways.size());
    for (int round = 0; round < rounds; round++)
      for (size_t i = 0; i < ways.size(); i++) {
        if (now_ns() > until_) return {};
        way_ = ways[i];
        meet(0);  // the other side knows the way now
        touch(0);
        meet(0);
        const int64_t began = now_ns();
        if (!run(0)) is_refused_.store(true, std::memory_order_relaxed);
        meet(0);
        const double us = static_cast<double>(now_ns() - began) / 1e3;
        if (round == 1 || (round > 1 && us < least[i])) least[i] = us;
      }
    return least;
  }
  bool is_refused() const { return is_refused_.load(std::memory_order_relaxed); }  // the kernel reads for nobody

 private:
  struct Side {
    std::unique_ptr<std::byte[]> in, out, ring;
    alignas(kLineBytes) Flag met{0};      // how often this side has come to `meet`: released there, acquired there
    alignas(kLineBytes) Flag filled{0};   // pieces put into the ring in all rounds: released and acquired in `run`
    alignas(kLineBytes) Flag reduced{0};  // the same of results
    alignas(kLineBytes) Flag copied{0};   // and of results taken from the other side
    size_t turn = 0;                      // where in the ring the next round begins
  };

  void serve() {
    for (;;) {
      meet(1);
      if (is_over_.load(std::memory_order_relaxed)) return;  // ordered by the flags of `meet`, as is `way_`
      touch(1);
      meet(1);
      if (!run(1)) is_refused_.store(true, std::memory_order_relaxed);
      meet(1);
    }
  }

  // Both sides must be able to run even where they share a processor.
  static void await(const Flag& flag, uint64_t target) {
    for (int turn = 0; flag.load(std::memory_order_acquire) < target; turn++)
      if (turn > 1000) sched_yield();
  }

  void meet(int side) {
    const uint64_t n = sides_[side].met.load(std::memory_order_relaxed) + 1;
    sides_[side].met.store(n, std::memory_order_release);
    await(sides_[1 - side].met, n);
  }

  // A tensor that is to be sent was mostly written lately.
  void touch(int side) {
    for (size_t i = 0; i < way_.bytes; i += 64) sides_[side].in[i] ^= std::byte{1};
  }

  bool run(int side) {
    if (way_.reduces) return run_reduction(side);
    if (!way_.single) return run_staged(side);
    const auto address = reinterpret_cast<uint64_t>(sides_[1 - side].in.get());
    return read_memory(getpid(), sides_[side].out.get(), address, way_.bytes) == 0;
  }

  // As Mover::StagedCopy does it.
  bool run_staged(int side) {
    Side &mine = sides_[side], &other = sides_[1 - side];
    const size_t piece =
        std::clamp<size_t>(std::bit_floor(way_.bytes / 4 | 1), 32 << 10, size_t{1} << way_.tuning.piece);
    const size_t ring = size_t{1} << way_.tuning.ring, pieces = (way_.bytes + piece - 1) / piece;
    const uint64_t before = mine.filled.load(std::memory_order_relaxed);
    const auto copy_out = way_.bytes < kLongest ? copy_bytes : copy_stream;
    const size_t first = mine.turn / piece * piece;  // the same on both sides
    for (size_t p = 0; p <= pieces; p++) {
      if (p < pieces) {
        const size_t at = p * piece, n = std::min(piece, way_.bytes - at);
        copy_over(mine.ring.get() + (first + at) % ring, mine.in.get() + at, n);
        mine.filled.store(before + p + 1, std::memory_order_release);
      }
      if (p == 0) continue;
      const size_t at = (p - 1) * piece, n = std::min(piece, way_.bytes - at);
      await(other.filled, before + p);
      copy_out(mine.out.get() + at, other.ring.get() + (first + at) % ring, n);
    }
    mine.turn = (first + pieces * piece) % ring;
    return true;
  }

  // As Mover::SharedReduction does it: each side reduces a half, in place, and gets the other one.
  bool run_reduction(int side) {
    Side &mine = sides_[side], &other = sides_[1 - side];
    const size_t half = way_.bytes / 2, ring = (size_t{1} << way_.tuning.ring) / 2;
    const size_t piece = std::min({half, size_t{1} << way_.tuning.piece, ring / 2});
    const size_t here = side ? half : 0;  // where the half begins that this side reduces
    std::byte *own = mine.in.get() + here, *others = mine.in.get() + (half - here);
    const std::byte* theirs = other.in.get() + here;
    const uint64_t filled = mine.filled.load(std::memory_order_relaxed);
    const uint64_t reduced = mine.reduced.load(std::memory_order_relaxed);
    const uint64_t copied = mine.copied.load(std::memory_order_relaxed);
    const size_t first = mine.turn % ring / piece * piece, pieces = half / piece, slots = ring / piece;
    bool could = true;
    for (size_t p = 0; p < pieces + 2; p++) {
      auto at = [&](size_t q) { return (first + q * piece) % ring; };
      if (p < pieces && !way_.single) {
        if (p >= slots) await(other.reduced, reduced + p - slots + 1);
        copy_over(mine.ring.get() + at(p), others + p * piece, piece);
        mine.filled.store(filled + p + 1, std::memory_order_release);
      }
      if (p >= 1 && p - 1 < pieces) {
        const size_t q = p - 1;
        const std::byte* block = other.ring.get() + at(q);
        if (way_.single) {
          block = mine.out.get();
          could = read_memory(getpid(), mine.out.get(), reinterpret_cast<uint64_t>(theirs + q * piece), piece) == 0;
        } else {
          await(other.filled, filled + q + 1);
        }
        if (q >= slots) await(other.copied, copied + q - slots + 1);
        const void* src[] = {own + q * piece, block};
        void* dst[] = {own + q * piece, mine.ring.get() + ring + at(q)};
        reduce({DType::i32, RedOp::bxor, piece / 4, src, 2, dst, 2, nullptr, false});
        mine.reduced.store(reduced + q + 1, std::memory_order_release);
      }
      if (p >= 2) {
        await(other.reduced, reduced + p - 1);
        copy_bytes(others + (p - 2) * piece, other.ring.get() + ring + at(p - 2), piece);
        mine.copied.store(copied + p - 1, std::memory_order_release);
      }
    }
    mine.turn = (first + half) % ring;
    return could;
  }

  Side sides_[2];
  const int64_t until_ = now_ns() + kBudget;
  Way way_{};  // written by side 0 before it meets the other, read behind that
  bool is_ready_ = false;
  // Said by either side, read by side 0 at the end; relaxed, since `meet` orders them.
  std::atomic<bool> is_over_{false}, is_refused_{false};
  std::thread partner_;
};

Tuning best_ring(Exchange& exchange, std::vector<Trial::Time>& times) {
  std::vector<Way> ways;
  for (uint8_t ring : kRings)
    for (uint8_t piece : kPieces)
      if (ring >= piece + 2) {
        Tuning tuning = kDefaultTuning;
        tuning.piece = piece, tuning.ring = ring;
        ways.push_back({true, false, kRingTrial, tuning});
      }
  const std::vector<double> us = exchange.measure(ways, kRounds);
  if (us.empty()) return {};
  for (size_t i = 0; i < ways.size(); i++)
    times.push_back({"all_reduce, ring of " + std::to_string((1 << ways[i].tuning.ring) >> 10) + " KiB, pieces of " +
                         std::to_string((1 << ways[i].tuning.piece) >> 10) + " KiB",
                     kRingTrial, us[i]});
  const auto best = static_cast<size_t>(std::min_element(us.begin(), us.end()) - us.begin());
  for (size_t i = 0; i < ways.size(); i++)
    if (ways[i].tuning == kDefaultTuning && us[best] > kClearly * us[i]) return kDefaultTuning;
  return ways[best].tuning;
}

// The sizes around a long exchange at which reading is clearly faster than the ring; never if it is not at that one.
Tuning::Span best_span(Exchange& exchange, Trial& trial, bool reduces) {
  auto wins = [&](size_t size) {
    if (!trial.is_complete || exchange.is_refused()) return false;
    const Tuning& ring = trial.tuning;
    const auto us = exchange.measure({{reduces, false, size, ring}, {reduces, true, size, ring}},
                                     size == kLongest ? kLongestRounds : kRounds);
    if (us.empty()) return trial.is_complete = false;
    const std::string verb = reduces ? "all_reduce" : "exchange";
    trial.times.push_back({verb + " by ring", size, us[0]});
    trial.times.push_back({verb + " by single copy", size, us[1]});
    return us[1] < kClearly * us[0] && !exchange.is_refused();
  };
  // A reduction reads one rank's share at a time.
  auto log = [&](size_t size) { return static_cast<uint8_t>(std::bit_width(reduces ? size / 2 : size) - 1); };
  Tuning::Span span = {Tuning::kNever, Tuning::kNever};
  if (!wins(kLong)) return span;
  span.from = log(kLong);
  for (size_t size : kShorter) {
    if (!wins(size)) break;
    span.from = log(size);
  }
  if (!wins(kLongest)) span.below = static_cast<uint8_t>(log(kLongest) - 1);  // somewhere between the two
  return exchange.is_refused() ? Tuning::Span{Tuning::kNever, Tuning::kNever} : span;
}

bool has_two_processors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) >= 2;
}

}  // namespace

Trial measure_tuning() {
  Trial trial;
  auto exchange = has_two_processors() ? std::make_unique<Exchange>() : nullptr;
  if (!exchange || !exchange->start()) return trial;

  // The ring first: it is what reading is compared with.
  trial.tuning = best_ring(*exchange, trial.times);
  trial.is_complete = trial.tuning.is_known();
  if (!trial.is_complete) return trial;
  const Tuning::Span copies = best_span(*exchange, trial, false), reductions = best_span(*exchange, trial, true);
  trial.tuning.copies = copies, trial.tuning.reductions = reductions;
  return trial;
}

}  // namespace unisono
