// See collectives.h.
#include "verbs/collectives.h"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "base/faults.h"
#include "verbs/mover.h"
#include "verbs/trial.h"

namespace unisono {
namespace {

// How long a rank that failed waits for peers inside the same call to see it and get out.
constexpr int64_t kWithdrawFor = 20'000'000;
constexpr int64_t kTrialLimit = 2'000'000'000;  // a call with a shorter time limit is no time to measure
constexpr size_t kTimedFrom = 4 << 10;          // bytes
constexpr size_t kShortCount = 256;             // elements
// Bytes from which on it is worth finding out how they move best: inputs in slots, all of a call, and what a rank gets.
constexpr size_t kGaugedFrom = 4 << 10, kStagedFrom = 64 << 10, kPastCachesFrom = 2 << 20;

// Every thread of every process that has made a group sees what this one wrote before; the fast path needs no fence.
void fence_everybody() {
  if (syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0) != 0) usleep(1000);  // write buffers drain in less
}

// Whether peers may read or write tensors of this call where they are: never those that fit into a request.
bool tells_places(const Call& call) {
  return call.in_parts || call.out_parts || call.epilogue || call.count * dtype_bytes(call.dtype) > kInlineBytes;
}

}  // namespace

Code Collectives::run(Call& call) {
  if (g_.stopped() || g_.is_of_parent()) {
    call.seq = g_.seq() + 1;
    return g_.quote_first_cause(call);
  }
  const Heap::Told told = tells_places(call) ? Heap::Told(g_.heap()) : Heap::Told();
  call.seq = g_.begin_call();
  if (!is_up(Defence::width)) call.count &= INT32_MAX;
  if (!is_up(Defence::empties) && call.count == 0 && call.verb == Verb::all_reduce) return Code::ok;
  // A short call is recorded while it waits for the others' requests, where that costs nothing.
  is_recorded_ = false;
  if (call.in_parts || call.out_parts || call.count >= kShortCount || g_.size() == 1) record(call);
  const Code code = run_recorded(call);
  record(call);
  // A look at the clock costs more than all else here: short calls that did not wait do without.
  recorded_.end(code == Code::ok, call.deadline_ns || bytes_ >= kTimedFrom);
  return code;
}

// What the flight recorder shows of a call, once.
void Collectives::record(const Call& call) {
  if (is_recorded_) return;
  is_recorded_ = true;
  if (!records_calls.load(std::memory_order_relaxed)) {
    recorded_ = {};
    bytes_ = 0;
    return;
  }
  const Recorder::OpenGroup& group = g_.recorded();
  const Operated what{call.verb, call.dtype, call.op,  call.asynchronous, call.root,
                      call.seq,  call.count, call.tag, group.reference,   call.site};
  const size_t in = call.in_parts ? g_.peers().size() : 0, out = call.out_parts ? g_.peers().size() : 0;
  size_t elements = 0;
  if (in || out) {
    size_t given = 0, got = 0;
    recorded_ = g_.heap().recorder().begin(what, in, out, [&](size_t i) {
      const size_t count = i < in ? call.in_parts[i].count : call.out_parts[i - in].count;
      (i < in ? given : got) += count;
      return count;
    });
    elements = std::max(given, got);
  } else {
    recorded_ = g_.heap().recorder().begin(what);
    elements = call.count;
  }
  bytes_ = elements * dtype_bytes(call.dtype);
  if (!group.record) return;
  auto add = [](Flag& counter, uint64_t n) {
    counter.store(counter.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  };
  add(group.record->calls, 1);
  add(group.record->bytes, bytes_);
}

Code Collectives::run_recorded(Call& call) {
  if (g_.size() == 1) return Mover(g_, waiter_, requests_, staging_, call).run_alone();
  // A rank that comes after others have given up must not be served by what they left behind.
  if (g_.given_up())
    if (Code code = waiter_.health(call, [](int) { return true; }); code != Code::ok) return code;
  waiter_.note_processor();
  const uint64_t detachments = g_.heap().detachments();
  bool checked = false;
  Code code = meet_and_move(call, checked);
  if (code != Code::ok) call.end_lease();  // what follows may take a while
  if (code == Code::mismatch) {
    g_.publish(g_.mine().flag(Phase::withdrawn), call.seq);
    requests_.end_call(call);
    return code;
  }
  // Closed while it ran: peers may have taken this rank for gone and used its inputs' memory for something else.
  fence(std::memory_order_acquire);  // keeps the look behind the reads of that memory
  if (code == Code::ok && g_.stopped()) code = g_.quote_first_cause(call);
  if (code == Code::ok && g_.heap().detachments() != detachments && lost_an_output(call))
    code = g_.break_with(call, Code::system, "a failure in another group made an output of this call private", {});
  if (code != Code::ok) withdraw(call, checked);
  requests_.end_call(call);
  return code;
}

// Steps 1 to 6.
Code Collectives::meet_and_move(Call& call, bool& checked) {
  call.deadline_ns = 0;  // set by the first wait that is not over at once
  choose_way(call);
  put_input(call, requests_.describe(call));
  requests_.publish(call);
  record(call);
  recorded_.published();
  if (Code code = waiter_.await(call, Phase::descriptor, call.seq); code != Code::ok) return code;
  if (Code code = requests_.check(call); code != Code::ok) return code;
  checked = true;
  return Mover(g_, waiter_, requests_, staging_, call).run();
}

// At the first use on this kind of machine; the other ranks wait for rank 0's request meanwhile.
void Collectives::find_tuning() {
  const Trial trial = measure_tuning();
  if (trial.is_complete)
    keep_tuning(trial.tuning);
  else
    set_tuning(trial.tuning.is_known() ? trial.tuning : kDefaultTuning);
}

// Of a call that is not short. Rank 0 decides, and measures at the first use on a kind of machine; the others learn it
// with its request.
void Collectives::choose_way(Call& call) {
  call.way = call.next_way = 0;
  call.is_way_timed = false;
  if (g_.rank() != 0) return;
  const bool has_parts = call.in_parts || call.out_parts;
  if (!has_parts && call.count * dtype_bytes(call.dtype) < kGaugedFrom) return;
  const Requests::Extent extent = requests_.extent(call);
  if (extent.hidden && extent.longest >= kStagedFrom && !current_tuning().is_known() &&
      waiter_.limit_of(call) >= kTrialLimit)
    find_tuning();
  const Ways ways = ways_of(call, extent);
  if (ways.count < 2 && !ways.list[0]) return;
  const Gauge::Plan plan = staging_.ways.plan({call.verb, extent.hidden, extent.longest}, ways);
  call.way = plan.way;
  call.next_way = plan.next | kTold;
  call.is_way_timed = plan.is_timed;
}

Ways Collectives::ways_of(const Call& call, const Requests::Extent& extent) const {
  const bool is_chosen = current_tuning().is_chosen;
  const bool is_staged = extent.hidden && extent.longest >= (is_chosen ? kGaugedFrom : kStagedFrom) && !call.epilogue;
  // Shorter outputs had better be in the caches when their owner uses them. In place, lines that were loaded are there
  // already.
  const bool in_place = call.verb != Verb::broadcast && call.in && call.in == call.out;
  const uint8_t outputs = !in_place && extent.output >= kPastCachesFrom ? kOutputsPastCaches : 0;
  const bool can_read = is_staged && requests_.can_read_all(), better_read = can_read && requests_.is_better_read(call);
  Ways ways;
  if (better_read) ways.add(kSingleCopy);
  for (const uint8_t past : {uint8_t{0}, outputs}) {
    if (!is_chosen || !better_read) {
      if (has_fast_strings() && (is_staged || (call.op == RedOp::none && !past))) ways.add(kByStrings | past);
      ways.add(past);
      if (is_staged) ways.add(kStagePastCaches | past);
    }
    if (can_read && (!is_chosen || better_read)) ways.add(kSingleCopy | past);
  }
  return ways;
}

// Copies the input to where peers read it, if its own place is not that.
void Collectives::put_input(Call& call, Requests::Input input) {
  Staging::Slot& slot = staging_.slot;
  slot = {};
  if (!input.holder || !input.bytes) return;
  if (requests_.mine().input == Holder::ring) staging_.bytes.fetch_add(input.bytes, std::memory_order_relaxed);
  if (requests_.advice(call)) {
    slot.plan.way = requests_.advice(call);
  } else if (input.bytes >= kGaugedFrom) {
    slot.key = {call.verb, true, input.bytes};
    Ways ways;
    if (has_fast_strings()) ways.add(kByStrings);
    for (const uint8_t way : {uint8_t{0}, kStagePastCaches}) ways.add(way);
    slot.plan = staging_.slots.plan(slot.key, ways);
  }
  const auto copy = copy_to_stage(slot.plan.way);
  const bool is_timed = slot.plan.is_timed || call.is_way_timed;
  const int64_t began = is_timed ? now_ns() : 0;
  if (!call.in_parts) {
    copy(input.holder, call.in, input.bytes);
  } else {
    std::byte* to = input.holder;
    for (int r = 0; r < g_.size(); r++) {
      const size_t bytes = call.in_parts[r].count * dtype_bytes(call.dtype);
      copy(to, call.in_parts[r].ptr, bytes);
      to += bytes;
    }
  }
  if (is_timed) slot.put_ns = now_ns() - began;
}

// Whether another group of this process has, while the call ran, taken memory away that peers wrote into.
bool Collectives::lost_an_output(const Call& call) {
  for (auto [at, bytes] : requests_.exposed(call).own)
    if (g_.heap().is_detached(at, bytes)) return true;
  return false;
}

// Whether rank r may still write for this call: it has seen our descriptor, and has not said that it is out. Only a
// hang-up excuses it, since then no thread of it is left; one that says it has left may have another thread that is
// still at work.
bool Collectives::may_write(int r, uint64_t seq) const {
  return r != g_.rank() && g_.has_reached(r, Phase::descriptor, seq) && !g_.has_reached(r, Phase::exit, seq) &&
         !g_.has_reached(r, Phase::withdrawn, seq) && !(g_.peer(r).link && g_.peer(r).link->hung_up());
}

// Whoever has not seen this rank's descriptor must not find it later: it is taken back. Whoever has may be writing; it
// looks for failures before each piece, and says when it is out. A peer that does not say so in time was stopped, or
// cannot run: its hands are tied by giving the exposed tensors new memory.
void Collectives::withdraw(Call& call, bool checked) {
  g_.publish(g_.mine().flag(Phase::withdrawn), call.seq);
  if (checked && requests_.all_buffered()) return;  // everybody serves itself
  const Requests::Exposed tensors = requests_.exposed(call);
  if (!tensors.any || !is_up(Defence::withdrawal)) return;
  g_.mine().descriptor(call.seq).seq.store(0, std::memory_order_release);
  fence_everybody();  // from here on, who has not published its own descriptor cannot have seen ours
  const int64_t until = now_ns() + kWithdrawFor;
  for (int r = 0; r < g_.size(); r++)
    while (may_write(r, call.seq)) {
      if (now_ns() < until) {
        usleep(200);
        continue;
      }
      bool safe = true;
      for (auto [at, bytes] : tensors.own) safe = g_.heap().detach(at, bytes) && safe;
      if (!safe) call.failure.text += "; rank " + std::to_string(r) + " may still write into this call's tensors";
      return;
    }
}

}  // namespace unisono
