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

bool Ring::let_go() {
  uint64_t idle = state_.load(std::memory_order_acquire);
  if (idle == kNone || idle == kBusy) return false;
  for (int r = 0; r < g_.size(); r++)
    if (r != g_.rank() && !g_.has_reached(r, Phase::exit, idle / 2) && !g_.has_reached(r, Phase::withdrawn, idle / 2) &&
        g_.state_of(r) == PeerState::alive)
      return false;
  return state_.compare_exchange_strong(idle, kNone, std::memory_order_acq_rel);
}

}  // namespace unisono
