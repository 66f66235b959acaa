// The verbs that combine: all_reduce, reduce, reduce_scatter.
//
// The elements form one space: a single span for all_reduce (for everybody) and reduce (for the root), one span per
// rank for reduce_scatter. Buffered calls: every rank reduces what it wants for itself. Otherwise the space is worked
// off in pieces; a piece takes the same fraction of every span, and each rank reduces a share of it: it loads the share
// from all inputs, combines (reduce.h), and stores to all outputs it can see. When everything is visible there is one
// piece, nothing is staged, and shares are equal byte ranges, whoever the result is for. If tensors are hidden, results
// for others have to be handed over; so a rank's share is what it gets itself, unless that is so much more than the
// others' that equal shares are faster (`owners_reduce`). Step p of the pipeline:
//   copy in    a rank whose input is hidden puts piece p into its stage (but for the range it reduces itself)
//   reduce     piece p - 1; results for hidden outputs go into this rank's out stage
//   copy out   piece p - 2; a rank whose output is hidden takes its results from the out stages
// Where all ranks can read each other's own memory (reach.h) and that is faster, nothing is copied in: whoever reduces
// a block reads it from all ranks first. The flags staged, reduced and copied count these. Invariant: a stage buffer is
// written again only when every rank has passed the step that reads it (reduced for the in stage, copied for the out
// stage).
#include <algorithm>
#include <vector>

#include "verbs/mover.h"

namespace unisono {
namespace {

constexpr size_t kStagedBlock = 16 << 10;  // bytes that are reduced, then copied to the stage from the first cache
constexpr size_t kReadBlock = 64 << 10;    // bytes that are read from other ranks, then reduced from the second cache
constexpr size_t kLeastReadBlock = 16 << 10;  // the same with many ranks

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
    if (c_.op == RedOp::premul_sum) factors[r] = request(r).factor;
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

// One call whose elements are worked off in shares. Steps: find where everything is, cut it into pieces, then reduce
// the one piece or run the pipeline.
class Mover::SharedReduction {
 public:
  explicit SharedReduction(Mover& mover);
  Code run();

 private:
  Code find_places();
  Code plan_pieces();
  bool owners_reduce() const;
  void copy_in(uint64_t p);
  Code reduce_piece(uint64_t p);
  Code reduce_block(uint64_t p, size_t span, size_t element, size_t at, size_t count);
  void copy_out(uint64_t p);
  bool all_have_addresses() const;
  Code run_pipeline();
  Code step_in(uint64_t p);
  Code step_reduce(uint64_t p);
  Code step_out(uint64_t p);

  size_t bytes(size_t count) const { return m_.bytes(count); }
  bool takes(size_t span, size_t r) const {
    return spans_[span].dest == -1 || spans_[span].dest == static_cast<int>(r);
  }
  const std::byte* in(size_t span, size_t r) const { return in_[span * ranks_ + r]; }
  std::byte* out(size_t span, size_t r) const { return out_[span * ranks_ + r]; }
  size_t piece_count(uint64_t p) const {
    size_t n = 0;
    for (const Span& s : spans_) n += part(p, s);
    return n;
  }
  // No piece has more elements than this.
  size_t most_in_a_piece() const {
    size_t n = 0;
    for (const Span& s : spans_) n += (s.count / grain_ + pieces_ - 1) / pieces_ * grain_ + s.count % grain_;
    return n;
  }
  size_t part(uint64_t p, const Span& s) const { return s.begin(p + 1, pieces_, grain_) - s.begin(p, pieces_, grain_); }
  // Where in piece p, of n elements, the share of rank r begins.
  size_t share(uint64_t p, size_t n, size_t r) const {
    if (!by_owners_) return r >= ranks_ ? n : n / grain_ * r / ranks_ * grain_;
    size_t begin = 0;
    for (const Span& s : spans_)
      if (static_cast<size_t>(s.dest) < r) begin += part(p, s);
    return begin;
  }
  // Calls f(span, element in the span, element in the piece, count) for the part of piece p inside [lo, hi).
  template <class F>
  void each(uint64_t p, size_t lo, size_t hi, F f) const {
    size_t at = 0;
    for (size_t s = 0; s < spans_.size(); s++) {
      size_t first = spans_[s].begin(p, pieces_, grain_), n = part(p, spans_[s]);
      size_t a = std::max(lo, at), b = std::min(hi, at + n);
      if (a < b) f(s, first + (a - at), a, b - a);
      at += n;
    }
  }
  Code wait(Phase phase, uint64_t p, const std::vector<uint8_t>& who) {
    return m_.waiter_.await(m_.c_, phase, base_ + p + 1, who.data());
  }
  void publish(Phase phase, uint64_t p) { m_.g_.publish(m_.g_.mine().flag(phase), base_ + p + 1); }

  Mover& m_;
  const size_t ranks_, self_;
  const size_t grain_;  // elements: cut where cache lines end
  std::vector<Span> spans_;
  size_t total_ = 0;
  // Addresses of every span's input on every rank and of the outputs, null where hidden from this rank; and whether
  // they are hidden from others, which every rank must see alike.
  std::vector<const std::byte*> in_;
  std::vector<std::byte*> out_;
  std::vector<uint8_t> in_hidden_, out_hidden_;
  const std::vector<uint8_t> everyone_;
  bool by_owners_ = false;  // shares are what their rank gets
  bool any_out_ = false;    // an output is hidden from a rank that reduces for it
  bool staged_ = false;
  bool single_ = false;  // hidden inputs are read where they are
  size_t read_block_ = 0;
  bool stream_ = false;  // outputs past the caches
  uint64_t pieces_ = 1;
  uint64_t base_ = 0;  // pieces of earlier calls
  std::vector<double> factors_;
  std::vector<const void*> src_;
  std::vector<void*> dst_;
};

Mover::SharedReduction::SharedReduction(Mover& mover)
    : m_(mover),
      ranks_(static_cast<size_t>(mover.size_)),
      self_(static_cast<size_t>(mover.me_)),
      grain_(std::max<size_t>(1, 64 / mover.element_)),
      in_hidden_(ranks_),
      out_hidden_(ranks_),
      everyone_(ranks_, 1),
      factors_(ranks_, 1),
      src_(ranks_) {
  const Call& c = m_.c_;
  if (c.verb == Verb::reduce_scatter)
    for (int r = 0; r < m_.size_; r++) spans_.push_back({c.in_parts[r].count, r});
  else
    spans_.push_back({c.count, c.verb == Verb::reduce ? c.root : -1});
  for (const Span& s : spans_) total_ += s.count;
  in_.resize(spans_.size() * ranks_);
  out_.resize(spans_.size() * ranks_);
  if (c.op == RedOp::premul_sum)
    for (int r = 0; r < m_.size_; r++) factors_[static_cast<size_t>(r)] = m_.request(r).factor;
}

Code Mover::SharedReduction::find_places() {
  for (size_t r = 0; r < ranks_; r++) {
    const int who = static_cast<int>(r);
    const Request& d = m_.request(who);
    for (size_t s = 0; s < spans_.size(); s++) {
      const size_t n = spans_[s].count;
      const int j = static_cast<int>(s);
      if (n == 0) continue;
      in_[s * ranks_ + r] = m_.input(who, j, n);
      if (!m_.held(who) && !m_.input_place(who, j)) in_hidden_[r] = 1;
      if (!takes(s, r)) continue;
      out_[s * ranks_ + r] = m_.output(who, 0, n);
      if (!d.out) out_hidden_[r] = 1;
    }
  }
  for (size_t s = 0; s < spans_.size(); s++)
    for (size_t r = 0; r < ranks_; r++)
      if (spans_[s].count && ((!in(s, r) && !in_hidden_[r]) || (takes(s, r) && !out(s, r) && !out_hidden_[r])))
        return m_.g_.break_with(m_.c_, Code::system, "rank " + std::to_string(r) + " published an impossible place",
                                {static_cast<int>(r)});
  return Code::ok;
}

// What crosses from core to core, counted in elements for the rank that gets most, if shares are the spans: the others'
// spans into the stage, its own from the other ranks. With equal shares: all but 1/n into the stage, as much from other
// ranks, results for others into the stage, and its own results from there.
bool Mover::SharedReduction::owners_reduce() const {
  size_t most = 0;
  for (const Span& s : spans_) {
    if (s.dest == -1) return false;
    most = std::max(most, s.count);
  }
  const auto n = static_cast<double>(ranks_), all = static_cast<double>(total_), own = static_cast<double>(most);
  const double others = (n - 1) / n;
  return all + (n - 2) * own <= others * (2 * all + all / n + own);
}

Code Mover::SharedReduction::plan_pieces() {
  auto any = [](const std::vector<uint8_t>& hidden) { return std::count(hidden.begin(), hidden.end(), 1) > 0; };
  by_owners_ = (any(in_hidden_) || any(out_hidden_)) && owners_reduce();
  if (by_owners_) std::fill(out_hidden_.begin(), out_hidden_.end(), 0);  // from nobody who writes them
  any_out_ = any(out_hidden_);
  staged_ = any_out_ || any(in_hidden_);
  single_ = staged_ && m_.goes(kSingleCopy) && m_.requests_.all_read() && all_have_addresses();
  if (single_) {
    read_block_ = std::max(kLeastReadBlock, kReadBlock / (ranks_ - 1)) / 64 * 64;
    m_.staging_.read.resize(read_block_ * ranks_ + 64);
  }
  if (!m_.find_stages(bytes(total_), spans_.size() * 8 * 64, single_))
    return m_.g_.break_with(m_.c_, Code::system, "a rank published an impossible stage", {});
  const size_t room = m_.piece_ / m_.element_;
  pieces_ = staged_ ? std::max<uint64_t>(1, (total_ + room - 1) / room) : 1;
  while (staged_ && most_in_a_piece() > room) pieces_++;
  base_ = m_.staging_.pieces;
  const bool in_place = m_.c_.in && m_.c_.in == m_.c_.out;
  stream_ = !in_place && m_.goes(kOutputsPastCaches);
  return Code::ok;
}

void Mover::SharedReduction::copy_in(uint64_t p) {
  if (!in_hidden_[self_]) return;
  const size_t n = piece_count(p);
  std::byte* into = m_.stage(self_).in(p);
  const auto copy = copy_to_stage(m_.request(0).way);
  auto put = [&](size_t s, size_t element, size_t at, size_t count) {
    copy(into + bytes(at), in(s, self_) + bytes(element), bytes(count));
    m_.staging_.bytes.fetch_add(bytes(count), std::memory_order_relaxed);
  };
  each(p, 0, share(p, n, self_), put);
  each(p, share(p, n, self_ + 1), n, put);
}

Code Mover::SharedReduction::reduce_piece(uint64_t p) {
  const size_t n = piece_count(p);
  const size_t most = any_out_ && m_.goes(kStagePastCaches | kByStrings) ? kStagedBlock : kWorkBlock;
  const size_t block = (single_ ? read_block_ : most) / m_.element_;
  Code code = Code::ok;
  each(p, share(p, n, self_), share(p, n, self_ + 1), [&](size_t s, size_t element, size_t at, size_t count) {
    for (size_t done = 0; done < count && code == Code::ok; done += block) {
      const size_t part = std::min(block, count - done);
      code = m_.look(bytes(part) * ranks_);
      if (code == Code::ok) code = reduce_block(p, s, element + done, at + done, part);
    }
  });
  return code;
}

Code Mover::SharedReduction::reduce_block(uint64_t p, size_t s, size_t element, size_t at, size_t count) {
  for (size_t r = 0; r < ranks_; r++) {
    // Of a rank's parts some may be hidden and others not; a stage has both.
    if (r == self_ || !in_hidden_[r] || (single_ && in(s, r))) {
      src_[r] = in(s, r) + bytes(element);
    } else if (!single_) {
      src_[r] = m_.stage(r).in(p) + bytes(at);
    } else {
      const int who = static_cast<int>(r);
      std::byte* block = m_.staging_.read_block(r, read_block_);
      const uint64_t from = m_.input_place(who, static_cast<int>(s)).address() + bytes(element);
      if (Code code = m_.read_hidden(who, block, from, bytes(count)); code != Code::ok) return code;
      src_[r] = block;
    }
  }
  dst_.clear();
  bool to_stage = false;
  for (size_t r = 0; r < ranks_; r++) {
    if (!takes(s, r)) continue;
    if (r != self_ && out_hidden_[r])
      to_stage = true;
    else
      dst_.push_back(out(s, r) + bytes(element));
  }
  std::byte* staged_at = m_.stage(self_).out(p) + bytes(at);
  const bool copy_later = to_stage && m_.goes(kStagePastCaches | kByStrings) && !dst_.empty();
  if (to_stage && !copy_later) dst_.push_back(staged_at);
  const bool past = to_stage ? m_.goes(kStagePastCaches) && !copy_later : stream_;
  unisono::reduce({m_.c_.dtype, m_.c_.op, count, src_.data(), ranks_, dst_.data(), dst_.size(), factors_.data(), past});
  if (copy_later) copy_to_stage(m_.request(0).way)(staged_at, dst_[0], bytes(count));  // from the first cache
  return Code::ok;
}

void Mover::SharedReduction::copy_out(uint64_t p) {
  const size_t n = piece_count(p);
  const auto copy = copy_to_output(m_.request(0).way);
  for (size_t k = 1; k < ranks_; k++) {
    const size_t r = (self_ + k) % ranks_;
    each(p, share(p, n, r), share(p, n, r + 1), [&](size_t s, size_t element, size_t at, size_t count) {
      if (takes(s, self_)) copy(out(s, self_) + bytes(element), m_.stage(r).out(p) + bytes(at), bytes(count));
    });
  }
}

// Of what would have to be read.
bool Mover::SharedReduction::all_have_addresses() const {
  for (size_t r = 0; r < ranks_; r++) {
    const int who = static_cast<int>(r);
    for (size_t s = 0; in_hidden_[r] && s < spans_.size(); s++)
      if (spans_[s].count && !m_.input_place(who, static_cast<int>(s)).word) return false;
  }
  return true;
}

Code Mover::SharedReduction::step_in(uint64_t p) {
  if (single_) return Code::ok;
  if (p >= m_.depth_ && in_hidden_[self_])
    if (Code code = wait(Phase::reduced, p - m_.depth_, everyone_); code != Code::ok) return code;
  copy_in(p);
  publish(Phase::staged, p);
  return Code::ok;
}

Code Mover::SharedReduction::step_reduce(uint64_t p) {
  if (!single_)
    if (Code code = wait(Phase::staged, p, in_hidden_); code != Code::ok) return code;
  if (any_out_ && p >= m_.depth_)
    if (Code code = wait(Phase::copied, p - m_.depth_, out_hidden_); code != Code::ok) return code;
  Code code = reduce_piece(p);
  if (code == Code::ok) publish(Phase::reduced, p);
  return code;
}

Code Mover::SharedReduction::step_out(uint64_t p) {
  if (out_hidden_[self_]) {
    if (Code code = wait(Phase::reduced, p, everyone_); code != Code::ok) return code;
    copy_out(p);
  }
  publish(Phase::copied, p);
  return Code::ok;
}

Code Mover::SharedReduction::run_pipeline() {
  for (uint64_t step = 0; step < pieces_ + 2; step++) {
    Code code = Code::ok;
    if (step < pieces_) code = step_in(step);
    if (code == Code::ok && step >= 1 && step - 1 < pieces_) code = step_reduce(step - 1);
    if (code == Code::ok && step >= 2) code = step_out(step - 2);
    if (code != Code::ok) return code;
  }
  m_.end_stages(pieces_);
  return single_ ? m_.all_are_there() : Code::ok;
}

Code Mover::SharedReduction::run() {
  if (Code code = find_places(); code != Code::ok) return code;
  if (Code code = plan_pieces(); code != Code::ok) return code;
  Code code = staged_ ? run_pipeline() : reduce_piece(0);
  return code == Code::ok ? m_.leave() : code;
}

Code Mover::reduce_shared() {
  return SharedReduction(*this).run();
}

}  // namespace unisono
