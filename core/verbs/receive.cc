// The receiving end of messages.h.
//
// Steps of a receive: look among the unexpected messages, then in the mailboxes, for the oldest with its tag; take it,
// which copies its envelope; compare sizes and dtypes; read the data from the entry, from where it is, or from the
// sender's buffer as it fills; release `done`. Invariant: an envelope is copied once and only the copy is used, because
// the sender can change the original at any time.
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "group/reach.h"
#include "kernels/reduce.h"
#include "verbs/messages.h"

namespace unisono {
namespace {

// Of a staged message: then others have a turn, and whoever waits for the lock.
constexpr size_t kMostInAStep = 1 << 20;

// No message is larger than the memory of the host that both ranks share. What is really read is checked when it is
// read. Asked each time, which is rare: a value made at first use would have a child of fork wait for another thread.
size_t most_unexpected_bytes() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

std::string mismatch_words(const Message& m, size_t sent_bytes, DType sent_dtype) {
  return "expected " + std::to_string(m.bytes) + " bytes of " + dtype_name(m.dtype) + " from rank " +
         std::to_string(m.source) + ", which sent " + std::to_string(sent_bytes) + " bytes of " +
         dtype_name(sent_dtype);
}

}  // namespace

Envelope Messages::envelope_of(int from, uint64_t i) const {
  Envelope envelope = incoming(from, i).envelope;
  asm volatile("" : "+m"(envelope) : : "memory");  // the compiler may not look at the original again
  return envelope;
}

bool Messages::is_posted(int from, uint64_t i) const {
  return incoming(from, i).posted.load(std::memory_order_acquire) == i + 1;
}

void Messages::refuse(Message& m) {
  fail(m.failure, Code::mismatch, mismatch_words(m, m.envelope.bytes, m.envelope.dtype), {m.source});
  Reply& reply = own_reply(m.source, m.index);
  reply.error = 1;
  reply.wanted_bytes = m.bytes;
  reply.wanted_dtype = static_cast<uint64_t>(m.dtype);
}

// Binds a receive to entry i of the mailbox from `from`.
void Messages::take(Message& m, int from, uint64_t i) {
  m.envelope = envelope_of(from, i);
  m.source = from;
  m.index = i;
  m.started = true;
  taken_[static_cast<size_t>(from)][i % depth_] = kTaken;
  own_reply(from, i).error = 0;
  if (m.envelope.bytes != m.bytes || m.envelope.dtype != m.dtype) refuse(m);
}

// After reading the sender's memory: a sender that has given up or left may have used it for something else meanwhile.
// The loads before the fence come before those behind it; the sender says that it is out before it touches its memory.
bool Messages::withdrawn(const Message& m) const {
  fence(std::memory_order_acquire);
  return m.source != g_.rank() && (g_.peer(m.source).block.abort().code.load(std::memory_order_acquire) ||
                                   g_.state_of(m.source) == PeerState::left);
}

// The messages of `from` that this step may look at end here. All receives of a step see the same ones, or a message
// that arrives in between would go to the second of two receives that wait for it.
uint64_t Messages::seen(int from) {
  Seen& s = seen_[static_cast<size_t>(from)];
  if (s.step != steps_) {
    const uint64_t first = next_in_[static_cast<size_t>(from)];
    s = {steps_, first};
    while (s.end < first + depth_ && is_posted(from, s.end)) s.end++;
  }
  return s.end;
}

bool Messages::match(Message& m) {
  for (int k = 0; k < g_.size(); k++) {
    const int from = m.peer >= 0 ? m.peer : (g_.rank() + k) % g_.size();
    const auto& taken = taken_[static_cast<size_t>(from)];
    for (uint64_t i = next_in_[static_cast<size_t>(from)], end = seen(from); i < end; i++)
      if (!taken[i % depth_] && incoming(from, i).envelope.tag == m.tag) {
        take(m, from, i);
        return true;
      }
    if (m.peer >= 0) break;
  }
  return false;
}

// Whether a receive that is there already gets the next message from this rank with this tag.
bool Messages::is_asked_for(int from, int64_t tag) const {
  return std::any_of(receives_.begin(), receives_.end(),
                     [&](const auto& m) { return !m->started && m->tag == tag && (m->peer < 0 || m->peer == from); });
}

bool Messages::waits(int64_t tag) {
  std::lock_guard lock(mutex_);
  steps_++;
  for (auto& held : unexpected_) {
    if (!held->done.load(std::memory_order_relaxed)) step_receive(*held);
    if (held->tag == tag && held->done.load(std::memory_order_relaxed) && !is_asked_for(held->source, tag)) return true;
  }
  for (int from = 0; from < g_.size(); from++)
    for (uint64_t i = next_in_[static_cast<size_t>(from)], end = seen(from); i < end; i++)
      if (!taken_[static_cast<size_t>(from)][i % depth_] && incoming(from, i).envelope.tag == tag &&
          !is_asked_for(from, tag))
        return true;
  for (int from = 0; from < g_.size(); from++) take_unexpected(from);  // it may wait behind them for room
  return false;
}

void Messages::withdraw(Message& m) {
  std::lock_guard lock(mutex_);
  const auto found = std::find_if(receives_.begin(), receives_.end(), [&](const auto& other) { return &m == &*other; });
  if (found == receives_.end() || m.started) return;
  fail(m.failure, Code::timeout, "was withdrawn", {});
  complete(m);
  receives_.erase(found);
  count();
}

// True: one of them is for this receive, which is over, or must wait until that one has come in.
bool Messages::match_unexpected(Message& m) {
  for (auto it = unexpected_.begin(); it != unexpected_.end(); ++it) {
    Message& held = **it;
    if (held.tag != m.tag || (m.peer >= 0 && held.source != m.peer)) continue;
    if (!held.done.load(std::memory_order_relaxed)) return true;
    m.source = held.source;
    if (held.failure.code != Code::ok)
      m.failure = held.failure;
    else if (held.bytes != m.bytes || held.dtype != m.dtype)
      fail(m.failure, Code::mismatch, mismatch_words(m, held.bytes, held.dtype), {m.source});
    else if (m.bytes)
      copy_bytes(m.data, held.data, m.bytes);
    unexpected_.erase(it);
    complete(m);
    return true;
  }
  return false;
}

void Messages::take_unexpected(int from) {
  const uint64_t first = next_in_[static_cast<size_t>(from)];
  if (taken_[static_cast<size_t>(from)][first % depth_]) return;
  for (uint64_t i = first; i < first + depth_; i++)
    if (!is_posted(from, i)) return;  // there is still room for what is expected
  const Envelope envelope = envelope_of(from, first);
  if (envelope.bytes > most_unexpected_bytes()) return;  // impossible; the receive will time out
  auto held = std::make_shared<Message>();
  held->peer = from;
  held->tag = envelope.tag;
  held->bytes = envelope.bytes;
  held->dtype = envelope.dtype;
  held->owned.reset(new (std::nothrow) std::byte[envelope.bytes + 1]);
  if (!held->owned) return;
  held->data = held->owned.get();
  take(*held, from, first);
  unexpected_.push_back(held);
}

void Messages::step_receive(Message& m) {
  if (!m.started) {
    if (match_unexpected(m)) return;
    if (!match(m)) {
      for (int r = 0; r < g_.size(); r++)
        if (m.peer < 0 || m.peer == r) take_unexpected(r);
      return;
    }
  }
  if (m.failure.code != Code::ok || read(m)) end_receive(m);
}

Gauge::Key Messages::key_of(const Message& m) const {
  return {Verb::recv, m.envelope.carrier == Carrier::staged, m.bytes};
}

// Long tensors are not in the caches anyway, where others would be driven out.
void Messages::plan_writing(Message& m) {
  constexpr size_t kPlannedFrom = 2 << 20;
  m.plan = {};
  if (has_fast_strings()) m.plan.way = kByStrings;
  if (m.bytes < kPlannedFrom) return;
  Ways ways;
  ways.add(m.plan.way);
  ways.add(kOutputsPastCaches);
  m.plan = ways_.plan(key_of(m), ways);
  if (m.plan.is_timed) m.began_ns = now_ns();
}

void Messages::note_writing(const Message& m) {
  if (m.plan.is_timed) ways_.note(key_of(m), m.plan.way, now_ns() - m.began_ns);
}

// True: it has been read, or cannot be.
bool Messages::read(Message& m) {
  if (m.envelope.carrier == Carrier::staged) return read_staged(m);
  if (m.envelope.carrier == Carrier::inlined) {
    const MailboxEntry& entry = incoming(m.source, m.index);
    if (m.bytes > sizeof entry.payload)
      fail(m.failure, Code::system, "a message says more than its entry can hold", {m.source});
    else if (m.bytes)
      std::memcpy(m.data, entry.payload, m.bytes);
    return true;
  }
  if (!m.envelope.place && m.envelope.place.word) {
    if (!read_hidden(m)) return false;
  } else if (const std::byte* from = g_.resolve(m.envelope.place, m.bytes)) {
    plan_writing(m);
    copy_to_output(m.plan.way)(m.data, from, m.bytes);
    note_writing(m);
  } else {
    fail(m.failure, Code::system, "a message names an impossible place", {m.source});
    return true;
  }
  if (withdrawn(m) && m.failure.code == Code::ok)
    fail(m.failure, Code::peer_lost, "rank " + std::to_string(m.source) + " gave up while its message was read",
         {m.source});
  return true;
}

// Reads what the sender has in its own memory. False: it is dead, which whoever waits for the message will find out;
// had it died before, another process could have been read in its place.
bool Messages::read_hidden(Message& m) {
  const Peer& peer = g_.peer(m.source);
  const int error = read_memory(peer.pid, m.data, m.envelope.place.address(), m.bytes);
  if ((peer.link && peer.link->hung_up()) || (error && is_dying(peer.pid))) return false;
  if (error)
    fail(m.failure, Code::system,
         "the memory of rank " + std::to_string(m.source) + " cannot be read: " + std::strerror(error), {m.source});
  return true;
}

bool Messages::read_staged(Message& m) {
  const size_t room = std::min(m.bytes, kSendBuffer);
  const std::byte* from = g_.resolve(m.envelope.place, room);
  if (!from) {
    fail(m.failure, Code::system, "a message names an impossible place", {m.source});
    return true;
  }
  Reply& reply = own_reply(m.source, m.index);
  const Flag& flag = incoming(m.source, m.index).filled;
  auto filled = std::min<size_t>(flag.load(std::memory_order_acquire), m.bytes);
  if (m.moved == 0 && filled) plan_writing(m);
  const auto copy = copy_to_output(m.plan.way);
  const size_t turn_end = m.moved + kMostInAStep;
  while (m.moved < filled && m.moved < turn_end) {
    size_t at = m.moved % room, n = std::min({filled - m.moved, room - at, send_turn(m.bytes)});
    copy(m.data + m.moved, from + at, n);
    m.moved += n;
    if (room < m.bytes) g_.publish_to(m.source, reply.drained, m.moved);  // else the sender waits for no room
    if (m.moved == filled && filled < m.bytes) filled = std::min<size_t>(look_briefly_for_more(flag, filled), m.bytes);
  }
  if (m.moved == m.bytes) note_writing(m);
  return m.moved == m.bytes;
}

void Messages::end_receive(Message& m) {
  Reply& reply = own_reply(m.source, m.index);
  reply.drained.store(0, std::memory_order_relaxed);  // released with `done`
  g_.publish_to(m.source, reply.done, m.index + 1);
  auto& taken = taken_[static_cast<size_t>(m.source)];
  uint64_t& next = next_in_[static_cast<size_t>(m.source)];
  taken[m.index % depth_] = kDone;
  while (taken[next % depth_] == kDone) taken[next++ % depth_] = kFree;
  complete(m);
}

}  // namespace unisono
