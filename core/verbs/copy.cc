// The verbs that move bytes and change none: broadcast, all_gather, gather, scatter, all_to_all.
//
// All five are sets of segments (from, to). A segment that both ends can see may be copied by anyone, so those are
// dealt out until every rank has the same number of bytes to write; one end visible: the other end copies; no end
// visible: the receiver reads it where it is (reach.h) if all ranks can do that and it is long enough, else the sender
// puts it piece by piece into its stage ring and the receiver takes it out. Invariant: ranks deal
// with the same arguments (descriptors only), so every segment is copied exactly once. Where everybody gets the same
// bytes (all_gather, broadcast) and all of it is visible, the bytes are cut instead: a rank loads its range once and
// stores it to all outputs.
#include <algorithm>
#include <vector>

#include "verbs/mover.h"

namespace unisono {
namespace {

constexpr size_t kLeastCut = 64 << 10;        // smaller leftovers are not worth another rank's attention
constexpr Place kHeld = {uint64_t{1} << 63};  // visible to all, in a line, a slot or a ring
constexpr size_t kTile = 32 << 10;            // stays in the second-level cache between two uses

}  // namespace

size_t Mover::segment(int from, int to) const {
  switch (c_.verb) {
    case Verb::broadcast:
      return from == c_.root ? c_.count : 0;
    case Verb::all_gather:
      return c_.out_parts[from].count;
    case Verb::gather:
      return to == c_.root ? request(from).count : 0;
    case Verb::scatter:
      return from == c_.root ? request(to).count : 0;
    case Verb::all_to_all:
      return from == me_ ? c_.in_parts[to].count : entry(from, to).in_count;
    default:
      return 0;  // no other verb copies
  }
}

const std::byte* Mover::segment_source(int from, int to) const {
  return input(from, to, segment(from, to));
}
std::byte* Mover::segment_target(int from, int to) const {
  return output(to, from, segment(from, to));
}

// Where a segment begins and ends, in words all ranks share; nothing if only its own rank can see it. What is held in a
// line or slot is visible to all.
Place Mover::source_place(int from, int to) const {
  return held(from) ? kHeld : input_place(from, to);
}

Place Mover::target_place(int from, int to) const {
  const Request& d = request(to);
  return d.has_table && entry(to, from).out_count ? entry(to, from).out : d.out;
}

Code Mover::copy_buffered() {
  const auto copy = staging_.slot.plan.way & kByStrings ? copy_over : copy_bytes;
  for (int from = 0; from < size_; from++) {
    size_t n = bytes(segment(from, me_));
    if (n == 0) continue;
    const std::byte* source = segment_source(from, me_);
    std::byte* target = segment_target(from, me_);
    if (source != target) copy(target, source, n);
  }
  return Code::ok;
}

Code Mover::copy_block(std::byte* to, const std::byte* from, size_t n) {
  if (to == from) return Code::ok;
  const auto copy = copy_to_output(request(0).way);
  for (size_t done = 0; done < n; done += kWorkBlock) {
    size_t part = std::min(kWorkBlock, n - done);
    if (Code code = look(part); code != Code::ok) return code;
    copy(to + done, from + done, part);
  }
  return Code::ok;
}

// Everybody gets the same bytes, and every input and output of them is visible to all.
bool Mover::all_see_all(size_t& total) const {
  total = 0;
  for (int from = 0; from < size_; from++) {
    if (segment(from, me_) == 0) continue;
    total += bytes(segment(from, me_));
    if (!source_place(from, me_)) return false;
    for (int to = 0; to < size_; to++)
      if (!target_place(from, to)) return false;
  }
  return true;
}

Code Mover::copy_to_all(size_t total) {
  const auto ranks = static_cast<size_t>(size_), self = static_cast<size_t>(me_);
  const size_t lo = total / 64 * self / ranks * 64;
  const size_t hi = self + 1 == ranks ? total : total / 64 * (self + 1) / ranks * 64;
  size_t begin = 0;
  for (int from = 0; from < size_; from++) {
    const size_t n = bytes(segment(from, me_)), a = std::max(lo, begin), b = std::min(hi, begin + n);
    if (a < b)
      if (Code code = copy_range_to_all(from, a - begin, b - begin); code != Code::ok) return code;
    begin += n;
  }
  return leave();
}

// The bytes from begin to end of what comes from one rank.
Code Mover::copy_range_to_all(int from, size_t begin, size_t end) {
  const auto ranks = static_cast<size_t>(size_);
  std::vector<std::byte*> targets(ranks);
  std::vector<void*> into(ranks);
  const std::byte* source = segment_source(from, me_);
  bool sound = source != nullptr;
  for (size_t to = 0; to < ranks; to++) {
    targets[to] = segment_target(from, static_cast<int>(to));
    sound = sound && targets[to];
  }
  if (!sound) return g_.break_with(c_, Code::system, "a rank published an impossible place", {from});
  for (size_t at = begin; at < end; at += kWorkBlock) {
    const size_t part = std::min(kWorkBlock, end - at);
    if (Code code = look(part * ranks); code != Code::ok) return code;
    for (size_t to = 0; to < ranks; to++) into[to] = targets[to] + at;
    copy_stream_to_all(into.data(), ranks, source + at, part);
  }
  return Code::ok;
}

// Who copies what. The same on every rank but for `mine`.
struct Mover::CopyPlan {
  struct Job {
    int from, to;
    size_t offset, bytes;
  };
  std::vector<Job> free;       // visible at both ends: anyone may copy these
  std::vector<Job> mine;       // what this rank was dealt of them
  std::vector<size_t> load;    // by rank: bytes to write
  std::vector<size_t> staged;  // by rank: bytes of its stream through its stage
  std::vector<size_t> hidden;  // by rank: bytes for it that are visible at neither end
  bool single = false;         // those are read where they are, nothing is staged
  size_t total = 0;            // bytes that are written without a stage

  size_t& load_of(int r) { return load[static_cast<size_t>(r)]; }
  // What rank r still lacks of a fair share, in whole pages.
  size_t room_of(int r) {
    const size_t share = total / load.size() + 1;
    return share > load_of(r) ? (share - load_of(r) + 4095) / 4096 * 4096 : 0;
  }
};

Mover::CopyPlan Mover::plan_copies() const {
  CopyPlan plan;
  plan.load.resize(static_cast<size_t>(size_));
  plan.staged.resize(static_cast<size_t>(size_));
  plan.hidden.resize(static_cast<size_t>(size_));
  size_t longest = 0;
  for (int to = 0; to < size_; to++)
    for (int from = 0; from < size_; from++) {
      const size_t n = bytes(segment(from, to));
      if (n == 0) continue;
      const Place source = source_place(from, to), target = target_place(from, to);
      if (from == to) {
        if (source && source.word == target.word) continue;  // it is there already
        plan.load_of(to) += n;
      } else if (source && target) {
        plan.free.push_back({from, to, 0, n});
      } else if (source || target) {
        plan.load_of(source ? to : from) += n;
      } else {
        size_t& stream = plan.staged[static_cast<size_t>(from)];
        stream = is_same_for_all() ? n : stream + n;
        plan.hidden[static_cast<size_t>(to)] += n;
        longest = std::max(longest, n);
        continue;
      }
      plan.total += n;
    }
  plan.single = longest && goes(kSingleCopy) && requests_.all_read();
  for (int to = 0; plan.single && to < size_; to++) {
    plan.load_of(to) += plan.hidden[static_cast<size_t>(to)];
    plan.total += plan.hidden[static_cast<size_t>(to)];
    plan.staged[static_cast<size_t>(to)] = 0;
  }
  return plan;
}

// Visible at neither end.
bool Mover::is_hidden(int from, int to) const {
  return from != to && segment(from, to) && !source_place(from, to) && !target_place(from, to);
}

// First to the receiver, up to a fair share; what is over goes to whoever has room.
void Mover::deal_out(CopyPlan& plan) const {
  auto give = [&](int worker, const CopyPlan::Job& job) {
    if (job.bytes == 0) return;
    plan.load_of(worker) += job.bytes;
    if (worker == me_) plan.mine.push_back(job);
  };
  std::vector<CopyPlan::Job> over;
  for (const CopyPlan::Job& job : plan.free) {
    size_t take = std::min(job.bytes, plan.room_of(job.to));
    if (job.bytes - take < kLeastCut) take = job.bytes;
    give(job.to, {job.from, job.to, 0, take});
    if (take < job.bytes) over.push_back({job.from, job.to, take, job.bytes - take});
  }
  for (CopyPlan::Job job : over)
    for (int i = 0; i < size_ && job.bytes; i++) {
      const int worker = (job.from + i) % size_;
      size_t take = i == size_ - 1 ? job.bytes : std::min(job.bytes, plan.room_of(worker));
      if (job.bytes - take < kLeastCut) take = job.bytes;
      give(worker, {job.from, job.to, job.offset, take});
      job.offset += take;
      job.bytes -= take;
    }
}

// What only this rank can copy: from where others see it into its own memory, and from its own to where it sees theirs.
Code Mover::copy_own(const CopyPlan& plan) {
  auto copy = [&](int r, std::byte* target, const std::byte* source, size_t n) {
    if (!source || !target)
      return g_.break_with(c_, Code::system, "rank " + std::to_string(r) + " published an impossible place", {r});
    return copy_block(target, source, n);
  };
  for (int k = 0; k < size_; k++) {
    const int r = (me_ + k) % size_;
    const size_t in = bytes(segment(r, me_)), out = bytes(segment(me_, r));
    const bool pull = r == me_ ? !keeps_own_while_staging(plan.staged) : source_place(r, me_) && !target_place(r, me_);
    if (in && pull)
      if (Code code = copy(r, segment_target(r, me_), segment_source(r, me_), in); code != Code::ok) return code;
    if (out && r != me_ && !source_place(me_, r) && target_place(me_, r))
      if (Code code = copy(r, segment_target(me_, r), segment_source(me_, r), out); code != Code::ok) return code;
    if (in && r != me_ && plan.single && is_hidden(r, me_))
      if (Code code = read_hidden(r, segment_target(r, me_), source_place(r, me_).address(), in); code != Code::ok)
        return code;
  }
  return plan.single ? all_are_there() : Code::ok;
}

Code Mover::copy_dealt(const CopyPlan& plan) {
  for (const CopyPlan::Job& job : plan.mine) {
    const std::byte* source = segment_source(job.from, job.to);
    std::byte* target = segment_target(job.from, job.to);
    if (!source || !target)
      return g_.break_with(
          c_, Code::system,
          "ranks " + std::to_string(job.from) + " and " + std::to_string(job.to) + " published an impossible place",
          {job.from, job.to});
    if (Code code = copy_block(target + job.offset, source + job.offset, job.bytes); code != Code::ok) return code;
  }
  return Code::ok;
}

// All-gather: the rank's own copy of its input is made while that passes through the cache on its way to the stage.
bool Mover::keeps_own_while_staging(const std::vector<size_t>& staged) const {
  return c_.verb == Verb::all_gather && staged[static_cast<size_t>(me_)] > 0;
}

// Streams of hidden segments through the stages. Piece p of every stream moves in step p; a rank fills piece p before
// it takes the others' piece p - 1, so that filling and taking overlap. Flags count pieces: `staged` says filled,
// `copied` says taken by this rank.
class Mover::StagedCopy {
 public:
  StagedCopy(Mover& mover, const std::vector<size_t>& staged)
      : m_(mover),
        staged_(staged),
        same_for_all_(mover.is_same_for_all()),
        base_(mover.staging_.pieces),
        copy_out_(copy_to_output(mover.request(0).way)) {}
  Code run();

 private:
  Code fill(uint64_t p);
  void fill_segment(int to, uint64_t p, size_t hi);
  Code take(uint64_t p);
  void publish(Phase phase, uint64_t p) { m_.g_.publish(m_.g_.mine().flag(phase), base_ + p + 1); }
  bool hidden(int from, int to) const { return m_.is_hidden(from, to); }
  std::byte* ring(int r, uint64_t p) const { return m_.stage(static_cast<size_t>(r)).stream(p); }
  // Where in `from`'s stream the segment for `to` begins.
  size_t stream_begin(int from, int to) const {
    size_t begin = 0;
    for (int k = 0; !same_for_all_ && k < to; k++)
      if (hidden(from, k)) begin += m_.bytes(m_.segment(from, k));
    return begin;
  }

  Mover& m_;
  const std::vector<size_t>& staged_;  // by rank: bytes of its stream
  const bool same_for_all_;
  const uint64_t base_;  // pieces of earlier calls
  void (*const copy_out_)(void*, const void*, size_t);
  std::byte* own_ = nullptr;
};

// Puts piece p of this rank's stream into its stage.
Code Mover::StagedCopy::fill(uint64_t p) {
  const size_t lo = p * m_.piece_, hi = std::min(staged_[static_cast<size_t>(m_.me_)], lo + m_.piece_);
  if (lo < hi) {
    if (p >= 2 * m_.depth_)
      if (Code code = m_.waiter_.await(m_.c_, Phase::copied, base_ + p - 2 * m_.depth_ + 1); code != Code::ok)
        return code;
    for (int to = 0; to < m_.size_; to++) {
      if (!hidden(m_.me_, to)) continue;
      fill_segment(to, p, hi);
      if (same_for_all_) break;
    }
    m_.staging_.bytes.fetch_add(hi - lo, std::memory_order_relaxed);
    m_.since_ += hi - lo;
  }
  publish(Phase::staged, p);
  return Code::ok;
}

// The part of the segment for `to` that lies in piece p, which ends at byte `hi` of the stream.
void Mover::StagedCopy::fill_segment(int to, uint64_t p, size_t hi) {
  const size_t lo = p * m_.piece_;
  const size_t begin = stream_begin(m_.me_, to), end = begin + m_.bytes(m_.segment(m_.me_, to));
  const size_t a = std::max(lo, begin), b = std::min(hi, end);
  if (a >= b) return;
  const std::byte* source = m_.segment_source(m_.me_, to) + (a - begin);
  std::byte* into = ring(m_.me_, p) + (a - lo);
  std::byte* own = own_ ? own_ + (a - begin) : nullptr;
  const auto copy_in = copy_to_stage(m_.request(0).way), copy_own = copy_out_;
  for (size_t done = 0; done < b - a; done += kTile) {
    const size_t part = std::min(kTile, b - a - done);
    copy_in(into + done, source + done, part);
    if (own && own != source) copy_own(own + done, source + done, part);
  }
}

// Takes what is for this rank in piece p of the others' streams.
Code Mover::StagedCopy::take(uint64_t p) {
  for (int k = 1; k < m_.size_; k++) {
    const int from = (m_.me_ + k) % m_.size_;
    if (!hidden(from, m_.me_)) continue;
    const size_t begin = stream_begin(from, m_.me_), end = begin + m_.bytes(m_.segment(from, m_.me_));
    const size_t lo = p * m_.piece_;
    const size_t a = std::max(lo, begin), b = std::min(lo + m_.piece_, end);
    if (a >= b) continue;
    if (Code code = m_.waiter_.await_rank(m_.c_, Phase::staged, base_ + p + 1, from); code != Code::ok) return code;
    copy_out_(m_.segment_target(from, m_.me_) + (a - begin), ring(from, p) + (a - lo), b - a);
    m_.since_ += b - a;
  }
  publish(Phase::copied, p);
  return m_.look(0);
}

Code Mover::StagedCopy::run() {
  const size_t longest = *std::max_element(staged_.begin(), staged_.end());
  if (!m_.find_stages(longest))
    return m_.g_.break_with(m_.c_, Code::system, "a rank published an impossible stage", {});
  const uint64_t pieces = (longest + m_.piece_ - 1) / m_.piece_;
  if (m_.keeps_own_while_staging(staged_)) own_ = m_.segment_target(m_.me_, m_.me_);
  for (uint64_t step = 0; step <= pieces; step++) {
    if (step < pieces)
      if (Code code = fill(step); code != Code::ok) return code;
    if (step > 0)
      if (Code code = take(step - 1); code != Code::ok) return code;
  }
  m_.end_stages(pieces);
  return Code::ok;
}

Code Mover::copy_shared() {
  if (c_.verb == Verb::all_gather || c_.verb == Verb::broadcast)
    if (size_t total; goes(kOutputsPastCaches) && all_see_all(total)) return copy_to_all(total);
  CopyPlan plan = plan_copies();
  deal_out(plan);
  if (Code code = copy_own(plan); code != Code::ok) return code;
  if (Code code = copy_dealt(plan); code != Code::ok) return code;
  if (std::any_of(plan.staged.begin(), plan.staged.end(), [](size_t n) { return n > 0; }))
    if (Code code = StagedCopy(*this, plan.staged).run(); code != Code::ok) return code;
  return leave();
}

}  // namespace unisono
