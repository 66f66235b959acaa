// The verbs that combine: all_reduce, reduce, reduce_scatter.
//
// The elements form one space: a single span for all_reduce (for everybody) and reduce (for the root), one span per
// rank for reduce_scatter. Buffered calls: every rank reduces what it wants for itself. Otherwise the space is worked
// off in pieces; a piece takes the same fraction of every span, and each rank reduces an equal byte range of it,
// whoever the result is for: it loads the range from all inputs, in rank order, and stores to all outputs it can see.
// When everything is visible there is one piece and nothing is staged. Otherwise, step p of the pipeline:
//   copy in    a rank whose input is hidden puts piece p into its stage (but for the range it reduces itself)
//   reduce     piece p - 1; results for hidden outputs go into this rank's out stage
//   copy out   piece p - 2; a rank whose output is hidden takes its results from the out stages
// The flags staged, reduced and copied count these. Invariant: a stage buffer is written again only when every rank has
// passed the step that reads it (reduced for the in stage, copied for the out stage).
#include <algorithm>
#include <vector>

#include "verbs/mover.h"

namespace unisono {
namespace {

constexpr size_t kStagedBlock = 16 << 10;  // bytes that are reduced, then copied to the stage from the first cache

}  // namespace

Code Mover::reduce_buffered() {
  size_t count = c_.count, part = 0;
  if (c_.verb == Verb::reduce && c_.root != me_) return Code::ok;
  if (c_.verb == Verb::reduce_scatter) {
    part = static_cast<size_t>(me_);
    count = c_.in_parts[me_].count;
  }
  if (count == 0) return Code::ok;
  const void* src[kMostRanks];
  double factors[kMostRanks];
  for (int r = 0; r < size_; r++) {
    src[r] = input(r, static_cast<int>(part), count);
    if (c_.op == RedOp::premul_sum) factors[r] = descriptor(r).factor;
  }
  void* dst = c_.out;
  unisono::reduce({c_.dtype, c_.op, count, src, static_cast<size_t>(size_), &dst, 1, factors, false});
  return Code::ok;
}

struct Mover::Span {
  size_t count;
  int dest;  // -1: every rank
  size_t begin(uint64_t p, uint64_t pieces, size_t grain) const {
    if (p >= pieces) return count;
    return static_cast<size_t>(static_cast<unsigned __int128>(count / grain) * p / pieces) * grain;
  }
};

Code Mover::reduce_shared() {
  const auto ranks = static_cast<size_t>(size_);
  const size_t grain = std::max<size_t>(1, 64 / element_);  // cut where cache lines end
  std::vector<Span> spans;
  if (c_.verb == Verb::reduce_scatter)
    for (int r = 0; r < size_; r++) spans.push_back({c_.in_parts[r].count, r});
  else
    spans.push_back({c_.count, c_.verb == Verb::reduce ? c_.root : -1});
  size_t total = 0;
  for (const Span& s : spans) total += s.count;

  // Addresses of every span's input on every rank and of the outputs, null where hidden from this rank; and whether
  // they are hidden from others, which every rank must see alike.
  std::vector<const std::byte*> in(spans.size() * ranks);
  std::vector<std::byte*> out(spans.size() * ranks);
  std::vector<uint8_t> in_hidden(ranks), out_hidden(ranks);
  for (int r = 0; r < size_; r++) {
    const Request& d = descriptor(r);
    for (size_t s = 0; s < spans.size(); s++) {
      const size_t n = spans[s].count;
      const int j = static_cast<int>(s);
      if (n == 0) continue;
      in[s * ranks + static_cast<size_t>(r)] = input(r, j, n);
      if (!held(r) && !(d.has_table && entry(r, j).in_count ? entry(r, j).in : d.in))
        in_hidden[static_cast<size_t>(r)] = 1;
      if (spans[s].dest == -1 || spans[s].dest == r) {
        out[s * ranks + static_cast<size_t>(r)] = output(r, 0, n);
        if (!d.out) out_hidden[static_cast<size_t>(r)] = 1;
      }
    }
  }
  for (size_t s = 0; s < spans.size(); s++)
    for (size_t r = 0; r < ranks; r++) {
      bool takes = spans[s].dest == -1 || spans[s].dest == static_cast<int>(r);
      if (spans[s].count && ((!in[s * ranks + r] && !in_hidden[r]) || (takes && !out[s * ranks + r] && !out_hidden[r])))
        return g_.break_with(c_, Code::system, "rank " + std::to_string(r) + " published an impossible place",
                             {static_cast<int>(r)});
    }
  const bool any_in = std::count(in_hidden.begin(), in_hidden.end(), 1) > 0;
  const bool any_out = std::count(out_hidden.begin(), out_hidden.end(), 1) > 0;
  const bool staged = any_in || any_out;
  if (staged) staging_.ask_gauge(c_, bytes(total));
  if (!find_stages(bytes(total), spans.size() * 8 * 64))
    return g_.break_with(c_, Code::system, "a rank published an impossible stage", {});
  const size_t room = piece_ / element_ - spans.size() * 2 * grain;
  const uint64_t pieces = staged ? (total + room - 1) / room : 1;
  const uint64_t base = staging_.pieces;
  const bool in_place = c_.in && c_.in == c_.out;
  const bool stream = !in_place && bytes(total) * (ranks + 1) >= g_.facts().cache_bytes / 4 * 3;
  std::vector<double> factors(ranks);
  for (int r = 0; r < size_; r++)
    factors[static_cast<size_t>(r)] = c_.op == RedOp::premul_sum ? descriptor(r).factor : 1;

  // The range of a piece that rank r reduces, in elements from the piece's begin.
  auto piece_count = [&](uint64_t p) {
    size_t n = 0;
    for (const Span& s : spans) n += s.begin(p + 1, pieces, grain) - s.begin(p, pieces, grain);
    return n;
  };
  auto share = [&](size_t n, size_t r) { return r >= ranks ? n : n / grain * r / ranks * grain; };

  // Calls f(span, element in the span, element in the piece, count) for the part of piece p inside [lo, hi).
  auto each = [&](uint64_t p, size_t lo, size_t hi, auto f) {
    size_t at = 0;
    for (size_t s = 0; s < spans.size(); s++) {
      size_t first = spans[s].begin(p, pieces, grain), n = spans[s].begin(p + 1, pieces, grain) - first;
      size_t a = std::max(lo, at), b = std::min(hi, at + n);
      if (a < b) f(s, first + (a - at), a, b - a);
      at += n;
    }
  };

  std::vector<const void*> src(ranks);
  std::vector<void*> dst;
  Code code = Code::ok;
  const size_t self = static_cast<size_t>(me_);

  auto copy_in = [&](uint64_t p) {
    if (!in_hidden[self]) return;
    size_t n = piece_count(p);
    std::byte* into = stage(self).in(p);
    auto put = [&](size_t s, size_t element, size_t at, size_t count) {
      const std::byte* from = in[s * ranks + self] + bytes(element);
      c_.past_caches ? copy_stream(into + bytes(at), from, bytes(count))
                     : copy_bytes(into + bytes(at), from, bytes(count));
      staging_.bytes.fetch_add(bytes(count), std::memory_order_relaxed);
    };
    each(p, 0, share(n, self), put);
    each(p, share(n, self + 1), n, put);
  };
  const size_t block = (any_out && c_.past_caches ? kStagedBlock : kWorkBlock) / element_;
  auto reduce_piece = [&](uint64_t p) {
    size_t n = piece_count(p);
    each(p, share(n, self), share(n, self + 1), [&](size_t s, size_t element, size_t at, size_t count) {
      for (size_t done = 0; done < count; done += block) {
        size_t part = std::min(block, count - done);
        if (code == Code::ok) code = look(bytes(part) * ranks);
        if (code != Code::ok) return;
        for (size_t r = 0; r < ranks; r++) {
          bool from_stage = r != self && in_hidden[r];
          src[r] = from_stage ? stage(r).in(p) + bytes(at + done) : in[s * ranks + r] + bytes(element + done);
        }
        dst.clear();
        bool to_stage = false;
        for (size_t r = 0; r < ranks; r++) {
          if (spans[s].dest != -1 && spans[s].dest != static_cast<int>(r)) continue;
          if (r != self && out_hidden[r])
            to_stage = true;
          else
            dst.push_back(out[s * ranks + r] + bytes(element + done));
        }
        std::byte* staged_at = stage(self).out(p) + bytes(at + done);
        const bool copy_later = to_stage && c_.past_caches && !dst.empty();
        if (to_stage && !copy_later) dst.push_back(staged_at);
        bool past = to_stage ? c_.past_caches && !copy_later : stream;
        unisono::reduce({c_.dtype, c_.op, part, src.data(), ranks, dst.data(), dst.size(), factors.data(), past});
        if (copy_later) copy_stream(staged_at, dst[0], bytes(part));  // from the first cache
      }
    });
  };
  auto copy_out = [&](uint64_t p) {
    size_t n = piece_count(p);
    for (size_t k = 1; k < ranks; k++) {
      size_t r = (self + k) % ranks;
      each(p, share(n, r), share(n, r + 1), [&](size_t s, size_t element, size_t at, size_t count) {
        if (spans[s].dest != -1 && spans[s].dest != me_) return;
        const std::byte* from = stage(r).out(p) + bytes(at);
        std::byte* to = out[s * ranks + self] + bytes(element);
        stream ? copy_stream(to, from, bytes(count)) : copy_bytes(to, from, bytes(count));
      });
    }
  };

  if (!staged) {
    reduce_piece(0);
    return code == Code::ok ? leave() : code;
  }
  Group& g = g_;
  auto wait = [&](Phase phase, uint64_t p, const std::vector<uint8_t>& who) {
    if (code == Code::ok) code = waiter_.await(c_, phase, base + p + 1, who.data());
  };
  auto timed = [&](auto work, uint64_t p) {
    int64_t began = now_ns();
    work(p);
    c_.worked_ns += now_ns() - began;
  };
  const std::vector<uint8_t> everyone(ranks, 1);
  for (uint64_t step = 0; step < pieces + 2 && code == Code::ok; step++) {
    if (step < pieces) {
      if (step >= depth_ && in_hidden[self]) wait(Phase::reduced, step - depth_, everyone);
      if (code != Code::ok) break;
      timed(copy_in, step);
      g.publish(g.mine().flag(Phase::staged), base + step + 1);
    }
    if (step >= 1 && step - 1 < pieces) {
      uint64_t p = step - 1;
      wait(Phase::staged, p, in_hidden);
      if (any_out && p >= depth_) wait(Phase::copied, p - depth_, out_hidden);
      if (code != Code::ok) break;
      timed(reduce_piece, p);
      if (code != Code::ok) break;
      g.publish(g.mine().flag(Phase::reduced), base + p + 1);
    }
    if (step >= 2) {
      uint64_t p = step - 2;
      if (out_hidden[self]) {
        wait(Phase::reduced, p, everyone);
        if (code != Code::ok) break;
        timed(copy_out, p);
      }
      g.publish(g.mine().flag(Phase::copied), base + p + 1);
    }
  }
  if (code != Code::ok) return code;
  end_stages(pieces);
  return leave();
}

}  // namespace unisono
