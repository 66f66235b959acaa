// See mover.h: what copies and reductions share.
#include "verbs/mover.h"

#include <algorithm>
#include <bit>

namespace unisono {

const std::byte* Mover::input(int r, int j, size_t count) const {
  if (r == me_) return c_.in_parts ? c_.in_parts[j].ptr : c_.in;
  const Request& d = request(r);
  if (!held(r)) return g_.resolve(d.has_table && entry(r, j).in_count ? entry(r, j).in : d.in, bytes(count));
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

std::byte* Mover::output(int r, int j, size_t count) const {
  if (r == me_) return c_.out_parts ? c_.out_parts[j].ptr : c_.out;
  const Request& d = request(r);
  return g_.resolve(d.has_table && entry(r, j).out_count ? entry(r, j).out : d.out, bytes(count));
}

// Each rank's stage is in its ring if it has one that does not hold its input, else in its block. Pieces are as long on
// all ranks: a quarter of the message, so that writing and reading it overlap, within what stages can hold. All from
// descriptors, so ranks agree.
bool Mover::find_stages(size_t message, size_t least) {
  auto in_ring = [&](int r) { return request(r).has_ring && request(r).input != Holder::ring; };
  bool rings = true;
  for (int r = 0; r < size_; r++) rings = rings && in_ring(r);
  bool few = false;
  for (int r = 0; r < size_; r++) few = few || request(r).few_pieces;
  few = few && rings;
  piece_ = std::clamp(std::bit_ceil(few ? message : message / 4 + 1), std::max<size_t>(32 << 10, std::bit_ceil(least)),
                      few     ? kLongPieceBytes
                      : rings ? kRingPieceBytes
                              : kPieceBytes);
  stages_.clear();
  depth_ = SIZE_MAX;
  for (int r = 0; r < size_; r++) {
    Stage stage = {g_.peer(r).block.stage(), kStageBytes, piece_, 0};
    if (in_ring(r)) stage = {requests_.ring(r), kRingBytes, piece_, request(r).turn / piece_};
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

Code Mover::run() {
  const bool buffered = requests_.all_buffered();
  const int64_t began = buffered && c_.gauged ? now_ns() : 0;
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
  if (!c_.gauged) return code;
  if (buffered) c_.worked_ns += now_ns() - began;
  staging_.gauge.note(c_.verb, c_.gauged, c_.past_caches, c_.worked_ns);
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
