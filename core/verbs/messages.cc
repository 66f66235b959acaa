// See messages.h: what sends and receives share.
#include "verbs/messages.h"

#include <algorithm>

#include "base/turns.h"

namespace unisono {
namespace {

constexpr size_t kGiveBackFrom = 8;  // buffers that wait for their receivers before we look

}  // namespace

Messages::Messages(Group& group, Waiter& waiter)
    : g_(group),
      waiter_(waiter),
      arena_(group, *this),
      depth_(group.mine().mailbox_depth()),
      next_out_(static_cast<size_t>(group.size())),
      next_in_(static_cast<size_t>(group.size())),
      holders_(static_cast<size_t>(group.size()), std::vector<uint8_t>(depth_)),
      taken_(static_cast<size_t>(group.size()), std::vector<uint8_t>(depth_)),
      seen_(static_cast<size_t>(group.size())) {}

Messages::~Messages() {
  HeapMemory ring = g_.heap().scratch().end(*this);  // first: until then other threads may call let_go
  give_back_buffers();
  // What a receiver may still read stays as long as the group.
  for (const Lingering& l : lingering_)
    if (l.buffer) arena_.leave(l.buffer);
  if (!arena_.let_go()) g_.keep(std::move(ring));
}

bool Messages::let_go() {
  std::unique_lock lock(mutex_, std::try_to_lock);  // whoever has it may wait for the lock of our caller
  if (!lock) return false;
  give_back_buffers();
  return arena_.let_go();
}

void Messages::add(std::shared_ptr<Message> message, Call* call) {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) {
    if (call) call->end_lease();
    lock.lock();
  }
  Message& m = *message;
  m.seq = ++count_;
  record(m);
  if (over_.code != Code::ok) {
    m.failure = over_;
    return complete(m);
  }
  if (m.sending) {
    if (lingering_.size() > kGiveBackFrom) give_back_buffers();
    const bool waits = std::any_of(sends_.begin(), sends_.end(),
                                   [&](const auto& other) { return !other->started && other->peer == m.peer; });
    if (waits) {
      if (call) call->end_lease();
      sends_.push_back(std::move(message));
      return step();  // entries may have become free
    }
    step_send(m);
    if (!is_over(m)) sends_.push_back(std::move(message));
  } else {
    // With others before it, it has its turn in the next step: they may want the same message.
    if (receives_.empty()) {
      steps_++;
      step_receive(m);
    }
    if (!is_over(m)) {
      if (m.peer >= 0 && !m.started && receives_.empty()) {
        const uint64_t next = seen(m.peer);
        m.awaited = &incoming(m.peer, next).posted;
        m.awaited_value = next + 1;
      }
      receives_.push_back(std::move(message));
    }
  }
  count();
}

void Messages::record(Message& m) {
  const Recorder::OpenGroup& group = g_.recorded();
  m.recorded =
      g_.heap().recorder().begin({m.sending ? Verb::send : Verb::recv, m.dtype, RedOp::none, m.asynchronous, m.peer,
                                  m.seq, m.bytes / dtype_bytes(m.dtype), m.tag, group.reference, m.site});
  if (!group.record) return;
  group.record->messages.store(m.seq, std::memory_order_relaxed);
  Flag& bytes = group.record->message_bytes;
  bytes.store(bytes.load(std::memory_order_relaxed) + m.bytes, std::memory_order_relaxed);
}

void Messages::count() {
  if (GroupRecord* record = g_.recorded().record)
    record->pending.store(sends_.size() + receives_.size(), std::memory_order_relaxed);
  pending_.store(sends_.size() + receives_.size(), std::memory_order_relaxed);
  if (sends_.empty()) return backlog_.store(0, std::memory_order_relaxed);
  const auto waiting = std::count_if(sends_.begin(), sends_.end(), [&](const auto& m) {
    if (m->started || !m->done.load(std::memory_order_relaxed)) return false;
    return m->peer == g_.rank() || g_.state_of(m->peer) == PeerState::alive;
  });
  backlog_.store(static_cast<size_t>(waiting), std::memory_order_relaxed);
}

// A send that found no entry is over for its caller only.
bool Messages::is_over(const Message& m) {
  return m.done.load(std::memory_order_relaxed) && (!m.sending || m.started || m.failure.code != Code::ok);
}

void Messages::complete(Message& m) {
  m.recorded.end(m.failure.code == Code::ok, true);
  m.told = {};
  m.done.store(true, std::memory_order_release);
  g_.wake_own_listeners();  // another thread may wait for it
}

void Messages::give_back_buffers() {
  std::erase_if(lingering_, [&](const Lingering& l) {
    if (reply_of(l.peer, l.index).done.load(std::memory_order_acquire) <= l.index) return false;
    if (l.buffer) arena_.give(l.buffer);
    return true;
  });
}

void Messages::step() {
  steps_++;
  if (!lingering_.empty()) give_back_buffers();
  if (!sends_.empty()) step_sends();
  for (auto& held : unexpected_)
    if (!held->done.load(std::memory_order_relaxed)) step_receive(*held);
  for (auto it = receives_.begin(); it != receives_.end();) {
    step_receive(**it);
    it = (*it)->done.load(std::memory_order_relaxed) ? receives_.erase(it) : std::next(it);
  }
  count();
}

void Messages::step_sends() {
  std::vector<uint8_t> blocked(static_cast<size_t>(g_.size()));  // messages to one rank are posted in order
  for (auto it = sends_.begin(); it != sends_.end();) {
    Message& m = **it;
    if (!m.started && blocked[static_cast<size_t>(m.peer)]) {
      set_aside(m);
      ++it;
      continue;
    }
    step_send(m);
    if (!m.started) blocked[static_cast<size_t>(m.peer)] = 1;
    it = is_over(m) ? sends_.erase(it) : std::next(it);
  }
}

void Messages::advance() {
  if (std::unique_lock lock(mutex_, std::try_to_lock); lock) step();  // else somebody else does it
}

void Messages::settle() {
  std::lock_guard lock(mutex_);
  step();
}

bool Messages::needs(const Message& m, int r) const {
  if (m.done.load(std::memory_order_acquire)) return false;
  if (m.peer >= 0) return m.peer == r;
  // From anyone: one who left owes nothing while another is still here.
  auto left = [&](int p) { return p == g_.rank() || g_.state_of(p) == PeerState::left; };
  if (!left(r)) return true;
  for (int p = 0; p < g_.size(); p++)
    if (!left(p)) return false;
  return true;
}

void Messages::fail_all(const Failure& failure) {
  std::lock_guard lock(mutex_);
  if (over_.code == Code::ok) over_ = failure;
  for (auto* list : {&sends_, &receives_}) {
    for (auto& m : *list) {
      if (m->buffer) lingering_.push_back({m->peer, m->index, m->buffer});
      if (m->done.load(std::memory_order_relaxed)) continue;  // over for its sender, it only waited for an entry
      m->failure = failure;
      complete(*m);
    }
    list->clear();
  }
  count();
}

// An answer that is on its way comes within a microsecond or so: for that long only the flag is looked at that says so,
// without the lock, and whoever sends need not share the line with what a step reads. Relaxed: a step acquires it.
void Messages::look_briefly(const Message& m) const {
  constexpr int kLooks = 64;
  if (!m.awaited || g_.facts().crowded) return;
  for (int i = 0; i < kLooks && m.awaited->load(std::memory_order_relaxed) != m.awaited_value; i++) pause_cpu();
}

// The same of the other end, which is at work on the next turn of this message.
uint64_t Messages::look_briefly_for_more(const Flag& flag, uint64_t seen) const {
  constexpr int kLooks = 64;
  uint64_t now = flag.load(std::memory_order_acquire);
  for (int i = 0; i < kLooks && now == seen && !g_.facts().crowded; i++) {
    pause_cpu();
    now = flag.load(std::memory_order_acquire);
  }
  return now;
}

bool Messages::comes_soon(const Message& m) {
  if (m.done.load(std::memory_order_acquire)) return true;
  look_briefly(m);
  advance();
  return m.done.load(std::memory_order_acquire);
}

Code Messages::wait(const std::shared_ptr<Message>& message, Call& call) {
  Message& m = *message;
  if (pending() > 1) call.end_lease();  // a step moves the others too, however long they are
  look_briefly(m);
  auto ready = [&] {
    if (m.done.load(std::memory_order_acquire)) return true;
    advance();
    return m.done.load(std::memory_order_acquire);
  };
  auto owes = [&](int r) {
    settle();
    return needs(m, r);
  };
  if (Code code = waiter_.await_until(call, ready, owes); code != Code::ok) {
    fail_all(call.failure);
    return code;
  }
  call.failure = m.failure;
  call.failure.verb = call.verb;
  call.failure.seq = m.seq;
  return m.failure.code;
}

}  // namespace unisono
