// The verbs that move bytes and change none: broadcast, all_gather, gather, scatter, all_to_all.
//
// All five are sets of segments (from, to). A segment that both ends can see may be copied by anyone, so those are
// dealt out until every rank has the same number of bytes to write; one end visible: the other end copies; no end
// visible: the sender puts it piece by piece into its stage ring and the receiver takes it out. Invariant: ranks deal
// with the same arguments (descriptors only), so every segment is copied exactly once. Where everybody gets the same
// bytes (all_gather, broadcast) and all of it is visible, the bytes are cut instead: a rank loads its range once and
// stores it to all outputs.
#include <algorithm>
#include <vector>

#include "verbs/mover.h"

namespace unisono {
namespace {

constexpr size_t kLeastCut = 64 << 10;  // smaller leftovers are not worth another rank's attention
constexpr size_t kTile = 32 << 10;      // stays in the second-level cache between two uses

}  // namespace

size_t Mover::segment(int from, int to) const {
  switch (c_.verb) {
    case Verb::broadcast:
      return from == c_.root ? c_.count : 0;
    case Verb::all_gather:
      return c_.out_parts[from].count;
    case Verb::gather:
      return to == c_.root ? descriptor(from).count : 0;
    case Verb::scatter:
      return from == c_.root ? descriptor(to).count : 0;
    default:
      return from == me_ ? c_.in_parts[to].count : entry(from, to).in_count;
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
  const Request& d = descriptor(from);
  if (held(from)) return Place{1};
  return d.has_table && entry(from, to).in_count ? entry(from, to).in : d.in;
}

Place Mover::target_place(int from, int to) const {
  const Request& d = descriptor(to);
  return d.has_table && entry(to, from).out_count ? entry(to, from).out : d.out;
}

Code Mover::copy_buffered() {
  for (int from = 0; from < size_; from++) {
    size_t n = bytes(segment(from, me_));
    if (n == 0) continue;
    const std::byte* source = segment_source(from, me_);
    std::byte* target = segment_target(from, me_);
    if (source != target) copy_bytes(target, source, n);
  }
  return Code::ok;
}

Code Mover::copy_block(std::byte* to, const std::byte* from, size_t n, bool stream) {
  if (to == from) return Code::ok;
  for (size_t done = 0; done < n; done += kWorkBlock) {
    size_t part = std::min(kWorkBlock, n - done);
    if (Code code = look(part); code != Code::ok) return code;
    stream ? copy_stream(to + done, from + done, part) : copy_bytes(to + done, from + done, part);
  }
  return Code::ok;
}

Code Mover::copy_to_all(bool& done) {
  done = false;
  size_t total = 0;
  for (int from = 0; from < size_; from++) {
    if (segment(from, me_) == 0) continue;
    total += bytes(segment(from, me_));
    if (!source_place(from, me_)) return Code::ok;
    for (int to = 0; to < size_; to++)
      if (!target_place(from, to)) return Code::ok;
  }
  if (total * static_cast<size_t>(size_ + 1) < g_.facts().cache_bytes) return Code::ok;
  done = true;
  const auto ranks = static_cast<size_t>(size_);
  const size_t lo = total / 64 * static_cast<size_t>(me_) / ranks * 64;
  const size_t hi = me_ + 1 == size_ ? total : total / 64 * static_cast<size_t>(me_ + 1) / ranks * 64;
  std::vector<std::byte*> targets(ranks);
  std::vector<void*> into(ranks);
  size_t begin = 0;
  for (int from = 0; from < size_; from++) {
    size_t n = bytes(segment(from, me_));
    size_t a = std::max(lo, begin), b = std::min(hi, begin + n);
    if (a < b) {
      const std::byte* source = segment_source(from, me_);
      bool sound = source != nullptr;
      for (int to = 0; to < size_; to++) {
        targets[static_cast<size_t>(to)] = segment_target(from, to);
        sound = sound && targets[static_cast<size_t>(to)];
      }
      if (!sound) return g_.break_with(c_, Code::system, "a rank published an impossible place", {from});
      for (size_t at = a - begin; at < b - begin; at += kWorkBlock) {
        size_t part = std::min(kWorkBlock, b - begin - at);
        if (Code code = look(part * ranks); code != Code::ok) return code;
        for (size_t to = 0; to < ranks; to++) into[to] = targets[to] + at;
        copy_stream_to_all(into.data(), ranks, source + at, part);
      }
    }
    begin += n;
  }
  return leave();
}

Code Mover::copy_shared() {
  if (c_.verb == Verb::all_gather || c_.verb == Verb::broadcast) {
    bool done;
    Code code = copy_to_all(done);
    if (done) return code;
  }
  struct Segment {
    int from, to;
    size_t bytes;
  };
  std::vector<Segment> free;  // anyone may copy these
  std::vector<size_t> load(static_cast<size_t>(size_));
  std::vector<size_t> staged(static_cast<size_t>(size_));  // bytes of each rank's stream through its stage
  auto at = [](std::vector<size_t>& v, int r) -> size_t& { return v[static_cast<size_t>(r)]; };
  size_t total = 0, mine = 0;
  const bool same_for_all = c_.verb == Verb::broadcast || c_.verb == Verb::all_gather || c_.verb == Verb::gather;

  for (int to = 0; to < size_; to++)
    for (int from = 0; from < size_; from++) {
      size_t n = bytes(segment(from, to));
      if (n == 0) continue;
      Place source = source_place(from, to), target = target_place(from, to);
      if (from == to) {
        if (!source || source.word != target.word) {
          at(load, to) += n;
          total += n;
        }
      } else if (source && target) {
        free.push_back({from, to, n});
        total += n;
      } else if (source || target) {
        at(load, source ? to : from) += n;
        total += n;
      } else {
        at(staged, from) = same_for_all ? n : at(staged, from) + n;
      }
    }
  mine = at(load, me_);

  // Deal: first to the receiver, up to a fair share; what is over goes to whoever has room.
  struct Job {
    int from, to;
    size_t offset, bytes;
  };
  std::vector<Job> jobs, over;
  size_t share = total / static_cast<size_t>(size_) + 1;
  auto give = [&](int worker, const Job& job) {
    at(load, worker) += job.bytes;
    if (worker == me_) jobs.push_back(job);
  };
  for (const Segment& s : free) {
    size_t room = share > at(load, s.to) ? share - at(load, s.to) : 0;
    size_t take = std::min(s.bytes, (room + 4095) / 4096 * 4096);
    if (s.bytes - take < kLeastCut) take = s.bytes;
    if (take) give(s.to, {s.from, s.to, 0, take});
    if (take < s.bytes) over.push_back({s.from, s.to, take, s.bytes - take});
  }
  for (Job job : over)
    for (int i = 0; i < size_ && job.bytes; i++) {
      int worker = (job.from + i) % size_;
      size_t room = share > at(load, worker) ? share - at(load, worker) : 0;
      size_t take = i == size_ - 1 ? job.bytes : std::min(job.bytes, (room + 4095) / 4096 * 4096);
      if (job.bytes - take < kLeastCut) take = job.bytes;
      if (take) give(worker, {job.from, job.to, job.offset, take});
      job.offset += take;
      job.bytes -= take;
    }
  for (const Job& job : jobs) mine += job.bytes;
  const bool stream = 2 * mine * static_cast<size_t>(size_) >= g_.facts().cache_bytes;

  // What only this rank can do, then its share of the rest.
  for (int r = 0; r < size_; r++) {
    if (size_t n = bytes(segment(r, me_)); n) {
      bool pull = r == me_ ? !keeps_own_while_staging(staged) : source_place(r, me_) && !target_place(r, me_);
      if (pull) {
        const std::byte* source = segment_source(r, me_);
        if (!source)
          return g_.break_with(c_, Code::system, "rank " + std::to_string(r) + " published an impossible place", {r});
        if (Code code = copy_block(segment_target(r, me_), source, n, stream); code != Code::ok) return code;
      }
    }
    if (size_t n = bytes(segment(me_, r)); n && r != me_ && !source_place(me_, r) && target_place(me_, r)) {
      std::byte* target = segment_target(me_, r);
      if (!target)
        return g_.break_with(c_, Code::system, "rank " + std::to_string(r) + " published an impossible place", {r});
      if (Code code = copy_block(target, segment_source(me_, r), n, stream); code != Code::ok) return code;
    }
  }
  for (const Job& job : jobs) {
    const std::byte* source = segment_source(job.from, job.to);
    std::byte* target = segment_target(job.from, job.to);
    if (!source || !target)
      return g_.break_with(
          c_, Code::system,
          "ranks " + std::to_string(job.from) + " and " + std::to_string(job.to) + " published an impossible place",
          {job.from, job.to});
    if (Code code = copy_block(target + job.offset, source + job.offset, job.bytes, stream); code != Code::ok)
      return code;
  }
  if (std::any_of(staged.begin(), staged.end(), [](size_t n) { return n > 0; }))
    if (Code code = copy_staged(staged); code != Code::ok) return code;
  return leave();
}

// All-gather: the rank's own copy of its input is made while that passes through the cache on its way to the stage.
bool Mover::keeps_own_while_staging(const std::vector<size_t>& staged) const {
  return c_.verb == Verb::all_gather && staged[static_cast<size_t>(me_)] > 0;
}

// Piece p of every stream moves in step p; a rank fills piece p before it takes the others' piece p - 1, so that
// filling and taking overlap. Flags count pieces: `staged` says filled, `copied` says taken by this rank.
Code Mover::copy_staged(const std::vector<size_t>& staged) {
  const bool same_for_all = c_.verb == Verb::broadcast || c_.verb == Verb::all_gather || c_.verb == Verb::gather;
  const uint64_t base = staging_.pieces;
  size_t total = 0;
  for (size_t n : staged) total += n;
  staging_.ask_gauge(c_, total);
  if (!find_stages(*std::max_element(staged.begin(), staged.end())))
    return g_.break_with(c_, Code::system, "a rank published an impossible stage", {});
  const size_t piece = piece_;
  uint64_t pieces = 0;
  for (size_t n : staged) pieces = std::max<uint64_t>(pieces, (n + piece - 1) / piece);
  const bool stream = 2 * total >= g_.facts().cache_bytes;
  auto hidden = [&](int from, int to) {
    return from != to && segment(from, to) && !source_place(from, to) && !target_place(from, to);
  };
  auto ring = [&](int r, uint64_t p) { return stage(static_cast<size_t>(r)).stream(p); };

  // Where in `from`'s stream the segment for `to` begins.
  auto stream_begin = [&](int from, int to) {
    size_t begin = 0;
    for (int k = 0; !same_for_all && k < to; k++)
      if (hidden(from, k)) begin += bytes(segment(from, k));
    return begin;
  };

  const size_t mine = staged[static_cast<size_t>(me_)];
  std::byte* own = keeps_own_while_staging(staged) ? segment_target(me_, me_) : nullptr;
  for (uint64_t step = 0; step <= pieces; step++) {
    if (step < pieces) {
      size_t lo = step * piece, hi = std::min(mine, lo + piece);
      if (lo < hi) {
        if (step >= 2 * depth_)
          if (Code code = waiter_.await(c_, Phase::copied, base + step - 2 * depth_ + 1); code != Code::ok) return code;
        std::byte* slot = ring(me_, step);
        int64_t began = now_ns();
        for (int to = 0; to < size_; to++) {
          if (!hidden(me_, to)) continue;
          size_t begin = stream_begin(me_, to), end = begin + bytes(segment(me_, to));
          size_t a = std::max(lo, begin), b = std::min(hi, end);
          const std::byte* source = segment_source(me_, to) + (a - begin);
          for (size_t done = 0; a < b && done < b - a; done += kTile) {
            size_t part = std::min(kTile, b - a - done);
            std::byte* into = slot + (a - lo) + done;
            c_.past_caches ? copy_stream(into, source + done, part) : copy_bytes(into, source + done, part);
            std::byte* own_at = own ? own + (a - begin) + done : nullptr;
            if (own && own_at != source + done)
              stream ? copy_stream(own_at, source + done, part) : copy_bytes(own_at, source + done, part);
          }
          if (same_for_all) break;
        }
        c_.worked_ns += now_ns() - began;
        staging_.bytes.fetch_add(hi - lo, std::memory_order_relaxed);
        since_ += hi - lo;
      }
      g_.publish(g_.mine().flag(Phase::staged), base + step + 1);
    }
    if (step == 0) continue;
    uint64_t p = step - 1;
    for (int k = 1; k < size_; k++) {
      int from = (me_ + k) % size_;
      if (!hidden(from, me_)) continue;
      size_t begin = stream_begin(from, me_), end = begin + bytes(segment(from, me_));
      size_t lo = p * piece;
      size_t a = std::max(lo, begin), b = std::min(lo + piece, end);
      if (a >= b) continue;
      if (Code code = waiter_.await_rank(c_, Phase::staged, base + p + 1, from); code != Code::ok) return code;
      std::byte* target = segment_target(from, me_) + (a - begin);
      const std::byte* source = ring(from, p) + (a - lo);
      int64_t began = now_ns();
      stream ? copy_stream(target, source, b - a) : copy_bytes(target, source, b - a);
      c_.worked_ns += now_ns() - began;
      since_ += b - a;
    }
    g_.publish(g_.mine().flag(Phase::copied), base + p + 1);
    if (Code code = look(0); code != Code::ok) return code;
  }
  end_stages(pieces);
  return Code::ok;
}

}  // namespace unisono
