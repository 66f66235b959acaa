// How the least traffic is done.
//
// Vocabulary: a *strip* is a byte range with its sources and sinks (loops.h). A *way* is a list of
// strips per thread and a kind of store. Opening a yardstick lays out the memory, builds every way of the
// verb, times them in turn and keeps the one with the least median.
//
// Steps of a round: the caller wakes the threads through a condition variable; they meet in a flag barrier;
// thread 0 reads the clock, all do barrier, strips, barrier `calls` times, thread 0 reads the clock again.
//
// Memory order: each thread stores its own epoch (release) and loads the others' (acquire), so what was
// stored before a barrier is seen after it. move_strips() fences streaming stores before it returns.
#include "yardstick/yardstick.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "yardstick/loops.h"

namespace unisono {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kPage = 4096;
constexpr size_t kLine = 64;              // threads' ranges are cut here
constexpr int kSpinsBeforeYield = 20000;  // only reached when somebody else holds the CPU
constexpr double kTrialSeconds = 0.4;     // for choosing between the ways
constexpr double kTrialRound = 300e-6;    // small messages repeat calls up to this length

struct Way {
  const char* name;
  Store store;
  std::vector<std::vector<Strip>> strips;  // by thread
};

// ---- memory ---------------------------------------------------------------------------------------------

class Region {
 public:
  explicit Region(size_t bytes) : bytes_(std::max(bytes, kPage)) {
    const int fd = memfd_create("unisono-yardstick", MFD_CLOEXEC);
    if (fd < 0) throw std::system_error(errno, std::generic_category(), "yardstick: memfd_create");
    const bool reserved =
        ftruncate(fd, static_cast<off_t>(bytes_)) == 0 && fallocate(fd, 0, 0, static_cast<off_t>(bytes_)) == 0;
    void* base =
        reserved ? mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0) : MAP_FAILED;
    close(fd);
    if (base == MAP_FAILED) throw std::bad_alloc();
    base_ = next_ = static_cast<char*>(base);
  }
  ~Region() { munmap(base_, bytes_); }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  char* take(size_t bytes) {
    char* mine = next_;
    next_ += pages(bytes);
    return mine;
  }
  static size_t pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

 private:
  size_t bytes_;
  char* base_;
  char* next_;
};

// What the verb needs: per rank an input and an output of these sizes (0: none, it works in place).
struct Shape {
  size_t whole;                // the size column
  std::vector<size_t> bounds;  // bytes; rank r's chunk is bounds[r] .. bounds[r + 1]
  std::vector<size_t> in, out;
  size_t chunk(size_t r) const { return bounds[r + 1] - bounds[r]; }
};

Shape shape_of(Verb verb, size_t bytes, const std::vector<double>& splits, size_t ranks) {
  Shape shape{bytes / kElement * kElement, {0}, {}, {}};
  const size_t elements = shape.whole / kElement;
  double total = 0, so_far = 0;
  for (double weight : splits) total += weight;
  for (size_t r = 0; r < ranks; ++r) {
    so_far += splits.empty() ? 1.0 : splits[r];
    const double share = so_far / (splits.empty() ? static_cast<double>(ranks) : total);
    shape.bounds.push_back(static_cast<size_t>(std::llround(static_cast<double>(elements) * share)) * kElement);
  }
  for (size_t r = 0; r < ranks; ++r) {
    const size_t chunk = shape.chunk(r), whole = shape.whole;
    size_t in = 0, out = 0;
    switch (verb) {
      case Verb::all_reduce:
      case Verb::reduce:
      case Verb::broadcast:
        in = whole;
        break;
      case Verb::all_gather:
        in = chunk, out = whole;
        break;
      case Verb::reduce_scatter:
        in = whole, out = chunk;
        break;
      case Verb::gather:
        in = chunk, out = r == 0 ? whole : 0;
        break;
      case Verb::scatter:
        in = r == 0 ? whole : 0, out = chunk;
        break;
      case Verb::all_to_all:
        in = whole, out = ranks * chunk;
        break;
      default:
        break;
    }
    shape.in.push_back(in);
    shape.out.push_back(out);
  }
  return shape;
}

// ---- who moves what -------------------------------------------------------------------------------------

// Cuts the work into equal byte ranges, one per thread, whoever owns the chunks.
std::vector<std::vector<Strip>> cut(const std::vector<Strip>& work, size_t threads) {
  size_t total = 0;
  for (const Strip& s : work) total += s.bytes;
  std::vector<std::vector<Strip>> parts(threads);
  size_t start = 0;  // of this strip in the whole
  for (const Strip& s : work) {
    for (size_t t = 0; t < threads; ++t) {
      const size_t first = total * t / threads / kLine * kLine;
      const size_t last = t + 1 == threads ? total : total * (t + 1) / threads / kLine * kLine;
      const size_t from = std::max(first, start), to = std::min(last, start + s.bytes);
      if (from >= to) continue;
      Strip mine{s.src, s.dst, to - from};
      for (const char*& src : mine.src) src += from - start;
      for (char*& dst : mine.dst) dst += from - start;
      parts[t].push_back(std::move(mine));
    }
    start += s.bytes;
  }
  return parts;
}

struct Buffers {
  std::vector<char*> in, out;
};

// The strips with every input byte loaded once.
std::vector<Strip> strips_of(Verb verb, const Shape& shape, const Buffers& at) {
  const size_t ranks = at.in.size();
  const std::vector<const char*> inputs(at.in.begin(), at.in.end());
  std::vector<Strip> work;
  switch (verb) {
    case Verb::all_reduce:
      work.push_back({inputs, at.in, shape.whole});
      break;
    case Verb::reduce:
      work.push_back({inputs, {at.in[0]}, shape.whole});
      break;
    case Verb::broadcast:
      if (ranks > 1) work.push_back({{at.in[0]}, {at.in.begin() + 1, at.in.end()}, shape.whole});
      break;
    case Verb::all_gather:
    case Verb::reduce_scatter:
    case Verb::gather:
    case Verb::scatter:
      for (size_t r = 0; r < ranks; ++r) {
        Strip s{{}, {}, shape.chunk(r)};
        const size_t offset = shape.bounds[r];
        if (verb == Verb::reduce_scatter)
          for (const char* in : inputs) s.src.push_back(in + offset);
        else
          s.src.push_back(verb == Verb::scatter ? at.in[0] + offset : at.in[r]);
        if (verb == Verb::all_gather)
          for (char* out : at.out) s.dst.push_back(out + offset);
        else
          s.dst.push_back(verb == Verb::gather ? at.out[0] + offset : at.out[r]);
        work.push_back(std::move(s));
      }
      break;
    case Verb::all_to_all:
      for (size_t to = 0; to < ranks; ++to)
        for (size_t from = 0; from < ranks; ++from)
          work.push_back({{at.in[from] + shape.bounds[to]}, {at.out[to] + from * shape.chunk(to)}, shape.chunk(to)});
      break;
    default:
      break;
  }
  return work;
}

// Every sink filled on its own: more loads (from cache, when threads keep pace), fewer streams at a time.
std::vector<Strip> one_sink_each(const std::vector<Strip>& work) {
  std::vector<Strip> single;
  size_t most = 0;
  for (const Strip& s : work) most = std::max(most, s.dst.size());
  for (size_t sink = 0; sink < most; ++sink)
    for (const Strip& s : work)
      if (sink < s.dst.size()) single.push_back({s.src, {s.dst[sink]}, s.bytes});
  return single;
}

std::vector<Way> ways_of(Verb verb, const Shape& shape, const Buffers& at, size_t threads) {
  const std::vector<Strip> work = strips_of(verb, shape, at);
  if (work.empty()) return {{"flags", Store::cached, std::vector<std::vector<Strip>>(threads)}};
  std::vector<Way> ways{{"cached", Store::cached, cut(work, threads)},
                        {"streaming", Store::streaming, cut(work, threads)}};
  const bool adds = work[0].src.size() > 1;
  if (!adds) {
    const std::vector<Strip> pulled = one_sink_each(work);
    if (pulled.size() > work.size()) {
      ways.push_back({"cached pull", Store::cached, cut(pulled, threads)});
      ways.push_back({"streaming pull", Store::streaming, cut(pulled, threads)});
    }
    ways.push_back({"string pull", Store::string_move, cut(pulled, threads)});
  }
  return ways;
}

std::vector<int> usable_cpus() {
  cpu_set_t set;
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  return cpus;
}

struct alignas(128) Flag {
  std::atomic<uint64_t> epoch{0};  // written by its thread alone, read by all others in meet()
};

}  // namespace

// ---- threads --------------------------------------------------------------------------------------------

struct Yardstick::State {
  Shape shape;
  Region region;
  Buffers at;
  std::vector<Way> ways;
  size_t chosen = 0;
  std::vector<Flag> flags;
  const bool two_barriers;  // the verb `barrier` is one

  std::mutex mutex;  // guards what follows
  std::condition_variable wake, finished;
  uint64_t rounds_asked = 0;
  size_t busy = 0;
  bool closing = false;
  const Way* way = nullptr;
  int calls = 0, warmup = 0;
  double seconds = 0;

  std::vector<std::thread> threads;  // last: they use all of the above

  static size_t region_bytes(const Shape& shape) {
    size_t total = 0;
    for (size_t bytes : shape.in) total += Region::pages(bytes);
    for (size_t bytes : shape.out) total += Region::pages(bytes);
    return total;
  }

  State(Verb verb, Shape wanted, size_t thread_count)
      : shape(std::move(wanted)),
        region(region_bytes(shape)),
        flags(thread_count),
        two_barriers(verb != Verb::barrier) {
    for (size_t r = 0; r < shape.in.size(); ++r) {
      at.in.push_back(region.take(shape.in[r]));
      at.out.push_back(region.take(shape.out[r]));
    }
    ways = ways_of(verb, shape, at, thread_count);
    const std::vector<int> cpus = usable_cpus();
    try {
      for (size_t t = 0; t < thread_count; ++t) threads.emplace_back([this, t] { serve(t); });
    } catch (...) {
      stop();
      throw;
    }
    for (size_t t = 0; t < thread_count && thread_count <= cpus.size(); ++t) {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(cpus[t], &set);
      (void)pthread_setaffinity_np(threads[t].native_handle(), sizeof set, &set);  // unpinned works too
    }
  }

  void stop() {
    {
      const std::lock_guard<std::mutex> hold(mutex);
      closing = true;
    }
    wake.notify_all();
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }

  void meet(size_t me, uint64_t& epoch) {
    flags[me].epoch.store(++epoch,
                          std::memory_order_release);  // partner: the load below in every other thread
    for (size_t other = 0; other < flags.size(); ++other) {
      for (int spins = 0; flags[other].epoch.load(std::memory_order_acquire) < epoch; ++spins) {
        if (spins < kSpinsBeforeYield)
          relax();
        else
          sched_yield();
      }
    }
  }

  void call(size_t me, const Way& how, uint64_t& epoch) {
    meet(me, epoch);
    if (!two_barriers) return;
    move_strips(how.strips[me], how.store);
    meet(me, epoch);
  }

  void serve(size_t me) {
    uint64_t epoch = 0, done = 0;
    std::unique_lock<std::mutex> hold(mutex);
    for (;;) {
      wake.wait(hold, [&] { return closing || rounds_asked > done; });
      if (closing) return;
      ++done;
      const Way& how = *way;
      const int timed = calls, untimed = warmup;
      hold.unlock();
      for (int i = 0; i < untimed; ++i) call(me, how, epoch);
      meet(me, epoch);
      const Clock::time_point start = Clock::now();
      for (int i = 0; i < timed; ++i) call(me, how, epoch);
      const Clock::time_point end = Clock::now();
      hold.lock();
      if (me == 0) seconds = std::chrono::duration<double>(end - start).count() / timed;
      if (--busy == 0) finished.notify_one();
    }
  }

  double run(const Way& how, int timed, int untimed) {
    std::unique_lock<std::mutex> hold(mutex);
    way = &how;
    calls = std::max(timed, 1);
    warmup = std::max(untimed, 0);
    busy = threads.size();
    ++rounds_asked;
    wake.notify_all();
    finished.wait(hold, [&] { return busy == 0; });
    return seconds;
  }

  // Times all ways in turn, so that noise hits them alike, and keeps the one with the least median.
  void choose() {
    if (ways.size() < 2) return;
    const double once = run(ways[0], 1, 1);
    const int repeat = static_cast<int>(std::clamp(kTrialRound / std::max(once, 1e-8), 1.0, 1000.0));
    std::vector<std::vector<double>> times(ways.size());
    const Clock::time_point start = Clock::now();
    const auto spent = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
    for (int trial = 0; trial < 3 || (trial < 15 && spent() < kTrialSeconds); ++trial)
      for (size_t w = 0; w < ways.size(); ++w) times[w].push_back(run(ways[w], repeat, 1));
    double least = 0;
    for (size_t w = 0; w < ways.size(); ++w) {
      std::vector<double>& mine = times[w];
      std::nth_element(mine.begin(), mine.begin() + mine.size() / 2, mine.end());
      const double median = mine[mine.size() / 2];
      if (w == 0 || median < least) chosen = w, least = median;
    }
  }
};

Yardstick::Yardstick(Verb verb, size_t bytes, const std::vector<double>& splits, int ranks) {
  if (verb >= Verb::send) throw std::invalid_argument("yardstick: no limit is known for this verb");
  if (ranks < 1) throw std::invalid_argument("yardstick: expected at least 1 rank");
  const size_t count = static_cast<size_t>(ranks);
  double total = 0;
  for (double weight : splits) {
    if (!(weight >= 0)) throw std::invalid_argument("yardstick: expected splits >= 0");
    total += weight;
  }
  if (!splits.empty() && (splits.size() != count || total <= 0))
    throw std::invalid_argument("yardstick: expected one split per rank, not all of them 0");
  const size_t cpus = std::max<size_t>(usable_cpus().size(), 1);
  state_ = std::make_unique<State>(verb, shape_of(verb, bytes, splits, count), std::min(count, cpus));
  state_->choose();
}

Yardstick::~Yardstick() {
  if (state_) state_->stop();
}

double Yardstick::round(int calls, int warmup) {
  return state_->run(state_->ways[state_->chosen], calls, warmup);
}

const char* Yardstick::variant() const {
  return state_->ways[state_->chosen].name;
}

int Yardstick::threads() const {
  return static_cast<int>(state_->threads.size());
}

}  // namespace unisono
