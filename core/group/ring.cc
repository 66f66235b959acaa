// See ring.h.
#include "group/ring.h"

#include "group/group.h"

namespace unisono {

Ring::~Ring() {
  if (!g_.is_of_parent()) g_.heap().scratch().end(*this);
}

std::byte* Ring::begin() {
  is_wanted_ = true;
  uint64_t idle = state_.load(std::memory_order_relaxed);
  if (idle != kNone && state_.compare_exchange_strong(idle, kBusy, std::memory_order_acquire)) return base_;
  base_ = g_.heap().scratch().take(*this);
  if (base_) state_.store(kBusy, std::memory_order_relaxed);  // until then let_go refuses
  return base_;
}

void Ring::end(uint64_t seq) {
  state_.store(2 * seq, std::memory_order_release);
}

// A peer that has left may still have a thread inside of the call.
bool Ring::may_read(int r, uint64_t seq) const {
  if (g_.has_reached(r, Phase::exit, seq) || g_.has_reached(r, Phase::withdrawn, seq)) return false;
  const PeerState state = g_.state_of(r);
  if (state != PeerState::left) return state == PeerState::alive;
  return g_.has_reached(r, Phase::descriptor, seq) && !(g_.peer(r).link && g_.peer(r).link->hung_up());
}

bool Ring::let_go() {
  uint64_t idle = state_.load(std::memory_order_acquire);
  if (idle == kNone || idle == kBusy) return false;
  for (int r = 0; r < g_.size(); r++)
    if (r != g_.rank() && may_read(r, idle / 2)) return false;
  return state_.compare_exchange_strong(idle, kNone, std::memory_order_acq_rel);
}

}  // namespace unisono
