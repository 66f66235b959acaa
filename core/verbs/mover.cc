// See mover.h: what copies and reductions share.
#include "verbs/mover.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/faults.h"
#include "base/tuning.h"
#include "group/reach.h"

namespace unisono {
namespace {

constexpr int64_t kDeathShowsIn = 200'000'000;  // that a rank has given up, or is dying

}  // namespace

const std::byte* Mover::input(int r, int j, size_t count) const {
  if (r == me_) return c_.in_parts ? c_.in_parts[j].ptr : c_.in;
  const Request& d = request(r);
  if (!held(r)) return g_.resolve(input_place(r, j), bytes(count));
  const std::byte* at = d.input == Holder::inlined ? d.payload
                        : d.input == Holder::slot  ? g_.peer(r).block.slot(c_.seq)
                                                   : requests_.ring(r) + d.turn;
  if (c_.verb == Verb::reduce_scatter) {
    for (int k = 0; k < j; k++) at += bytes(c_.in_parts[k].count);
  } else if (c_.verb == Verb::all_to_all || c_.verb == Verb::scatter) {
    for (int k = 0; k < j; k++) at += bytes(entry(r, k).in_count);
  }
  return at;
}

Place Mover::input_place(int r, int j) const {
  return request(r).has_table && entry(r, j).in_count ? entry(r, j).in : request(r).in;
}

std::byte* Mover::output(int r, int j, size_t count) const {
  if (r == me_) return c_.out_parts ? c_.out_parts[j].ptr : c_.out;
  const Request& d = request(r);
  return g_.resolve(d.has_table && entry(r, j).out_count ? entry(r, j).out : d.out, bytes(count));
}

size_t Mover::longest_piece() const {
  const Tuning tuning = Tuning::of(request(0).tuning);
  return tuning.is_known() ? size_t{1} << tuning.piece : kRingPieceBytes;
}

// Each rank's stage is in its ring if it has one that does not hold its input, else in its block. Pieces are as long on
// all ranks: a quarter of the message, so that writing and reading it overlap, within what stages can hold. All from
// descriptors, so ranks agree.
bool Mover::find_stages(size_t message, size_t least, bool few) {
  auto in_ring = [&](int r) { return request(r).has_ring && request(r).input != Holder::ring; };
  bool rings = true;
  for (int r = 0; r < size_; r++) rings = rings && in_ring(r);
  for (int r = 0; r < size_; r++) few = few || request(r).few_pieces;
  few = few && rings;
  const size_t shortest = std::max<size_t>(32 << 10, std::bit_ceil(least));
  const size_t longest = few ? kLongPieceBytes : rings ? longest_piece() : kPieceBytes;
  piece_ =
      std::clamp(few ? std::bit_ceil(message) : std::bit_floor(message / 4 | 1), shortest, std::max(shortest, longest));
  const size_t window = few ? kRingBytes : std::max(ring_window(Tuning::of(request(0).tuning)), 4 * piece_);
  stages_.clear();
  depth_ = SIZE_MAX;
  for (int r = 0; r < size_; r++) {
    Stage stage = {g_.peer(r).block.stage(), kStageBytes, piece_, 0};
    if (in_ring(r)) stage = {requests_.ring(r), window, piece_, request(r).turn / piece_};
    if (!stage.base) return false;
    depth_ = std::min(depth_, stage.depth());
    stages_.push_back(stage);
  }
  return true;
}

void Mover::end_stages(uint64_t pieces) {
  staging_.pieces += pieces;
  requests_.end_pieces(piece_, pieces);
}

Code Mover::leave() {
  g_.publish(g_.mine().flag(Phase::exit), c_.seq);
  if (Code code = waiter_.await(c_, Phase::exit, c_.seq); code != Code::ok) return code;
  // A rank that was stopped here comes late: others that gave up this call after their own exit may have refilled what
  // it has just read. They say that they gave up before they touch it, and the fence keeps the look behind the reads.
  fence(std::memory_order_acquire);
  return g_.given_up() ? waiter_.health(c_, [](int) { return false; }) : Code::ok;
}

// Nobody waits for this, but who has a ring wants to know when nobody reads it any more (Ring::let_go).
void Mover::end_buffered() {
  for (int r = 0; r < size_; r++)
    if (request(r).has_ring && r != me_) return g_.mine().flag(Phase::exit).store(c_.seq, std::memory_order_release);
}

Code Mover::look(size_t bytes) {
  constexpr size_t thorough = 32 << 20;
  since_ += bytes;
  if (since_ < thorough && !g_.given_up()) return Code::ok;
  since_ = 0;
  // A peer that has passed its exit owes nothing any more.
  return waiter_.health(c_, [&](int r) { return !g_.has_reached(r, Phase::exit, c_.seq); });
}

Code Mover::read_hidden(int r, std::byte* to, uint64_t address, size_t bytes) {
  for (size_t done = 0; done < bytes; done += kWorkBlock) {
    const size_t part = std::min(kWorkBlock, bytes - done);
    if (Code code = look(part); code != Code::ok) return code;
    reach("reading");
    const int error = read_memory(g_.peer(r).pid, to + done, address + done, part);
    staging_.bytes.fetch_add(part, std::memory_order_relaxed);
    staging_.single.fetch_add(part, std::memory_order_relaxed);
    if (!error) continue;
    // Most likely it is about to be seen dead, or has given up; then that is what is told. A process loses its memory
    // before its sockets, and on a busy machine the latter may take long.
    for (const int64_t until = now_ns() + kDeathShowsIn; now_ns() < until || is_dying(g_.peer(r).pid); usleep(200))
      if (Code code = waiter_.health(c_, [](int) { return true; }); code != Code::ok) return code;
    return g_.break_with(c_, Code::system,
                         "the memory of rank " + std::to_string(r) + " cannot be read: " + std::strerror(error), {r});
  }
  return Code::ok;
}

// After the last read: had a rank died before it, another process could have been read in its place. Nobody leaves a
// call before all have said that they have read.
Code Mover::all_are_there() {
  for (const Peer& p : g_.peers())
    if (p.link && p.link->hung_up()) return waiter_.health(c_, [](int) { return true; });
  return Code::ok;
}

Code Mover::run() {
  const bool buffered = requests_.all_buffered();
  if (!buffered) c_.end_lease();  // a rank may have little itself and be dealt a share of the others' work
  const Staging::Slot& slot = staging_.slot;
  const bool slot_timed = buffered && slot.plan.is_timed;
  const int64_t began = slot_timed || c_.is_way_timed ? now_ns() : 0;
  Code code;
  switch (c_.verb) {
    case Verb::barrier:
      return Code::ok;
    case Verb::all_reduce:
    case Verb::reduce:
    case Verb::reduce_scatter:
      code = buffered ? reduce_buffered() : reduce_shared();
      break;
    case Verb::matmul_reduce:
      code = buffered ? fused_buffered() : fused_shared();
      break;
    default:
      code = buffered ? copy_buffered() : copy_shared();
  }
  if (buffered) end_buffered();
  if (code != Code::ok) return code;
  // All ranks were there when it began, and unless it was buffered have done their part when it ends.
  if (slot_timed) staging_.slots.note(slot.key, slot.plan.way, slot.put_ns + now_ns() - began);
  if (c_.is_way_timed) {
    const Requests::Extent extent = requests_.extent(c_);
    staging_.ways.note({c_.verb, extent.hidden, extent.longest}, c_.way, slot.put_ns + now_ns() - began);
  }
  return code;
}

Code Mover::run_alone() {
  if (c_.verb == Verb::barrier) return Code::ok;
  if (c_.verb == Verb::matmul_reduce) return fused_alone();
  const std::byte* from = input(0, 0, c_.count);
  std::byte* to = output(0, 0, c_.count);
  size_t count = c_.in_parts ? c_.in_parts[0].count : c_.count;
  if (count == 0) return Code::ok;
  if (c_.op != RedOp::none) {
    const void* src = from;
    void* dst = to;
    unisono::reduce({c_.dtype, c_.op, count, &src, 1, &dst, 1, &c_.factor, false});
  } else if (to != from) {
    copy_bytes(to, from, bytes(count));
  }
  return Code::ok;
}

}  // namespace unisono
