// This rank's ring (control.h) in a group: lent by the heap's scratch memory, for as long as calls need it.
//
// Peers may read the ring for a while after the call that filled it has ended here. They say when they have done so by
// the flags `exit` and `withdrawn`; before that, the ring is given to nobody else.
// Memory order: `state_` is changed by the thread that runs a call, and by whoever asks the group to let go; the first
// to change it from idle wins. Peers' flags are loaded with acquire before that, so what they read was read before the
// next user writes.
#pragma once

#include <atomic>

#include "memory/scratch.h"

namespace unisono {

class Group;

class Ring final : public Scratch::User {
 public:
  explicit Ring(Group& group) : g_(group) {}
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // One thread at a time. `begin` returns the ring for a call; null: there is no memory for it.
  std::byte* begin();
  void end(uint64_t seq);                        // of the call that has begun with it
  bool is_wanted() const { return is_wanted_; }  // an earlier call has asked for it

  uint64_t uses() const override { return state_.load(std::memory_order_relaxed); }
  bool let_go() override;

 private:
  static constexpr uint64_t kNone = 0, kBusy = 1;

  bool may_read(int r, uint64_t seq) const;

  Group& g_;
  std::byte* base_ = nullptr;  // while there is one
  bool is_wanted_ = false;
  std::atomic<uint64_t> state_{kNone};  // or twice the number of the last call that has used it
};

}  // namespace unisono
