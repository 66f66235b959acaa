// The sending end of messages.h.
//
// Steps of a send: take the next entry of the mailbox to its peer, once the reply to the message that had it before
// says done; fill it and release `posted`. A short message is over then, and a staged one when all of it is in its
// buffer. One that is read where it is, is over when its reply says done. A short message that finds no free entry is
// copied aside, so that it never keeps its sender.
#include <algorithm>

#include "base/tuning.h"
#include "group/reach.h"
#include "kernels/reduce.h"
#include "verbs/messages.h"

namespace unisono {
namespace {

constexpr size_t kEager = 64 << 10;  // a send of up to this many bytes is over as soon as it is copied

}  // namespace

void Messages::set_aside(Message& m) {
  if (m.done.load(std::memory_order_relaxed) || m.bytes > kEager) return;
  m.owned.reset(new (std::nothrow) std::byte[m.bytes + 1]);
  if (!m.owned) return;
  if (m.bytes) copy_bytes(m.owned.get(), m.data, m.bytes);
  m.data = m.owned.get();
  complete(m);
}

// False: it has no entry yet, or is over.
bool Messages::post(Message& m) {
  const auto to = static_cast<size_t>(m.peer);
  const uint64_t i = next_out_[to];
  const bool is_free = !holders_[to][i % depth_] &&  // else its last message has not seen its reply yet
                       (i < depth_ || reply_of(m.peer, i).done.load(std::memory_order_acquire) >= i - depth_ + 1);
  if (!is_free) {
    set_aside(m);
    return false;
  }
  MailboxEntry& entry = g_.mine().mailbox(m.peer, i);
  if (Failure failure; !fill_entry(m, entry, failure)) {
    // Its caller may have been told already that it is sent: then it is tried again until there is memory.
    if (m.done.load(std::memory_order_relaxed)) return false;
    m.failure = failure;
    complete(m);
    return false;
  }
  m.started = true;
  m.index = i;
  holders_[to][i % depth_] = 1;
  next_out_[to]++;
  g_.publish_to(m.peer, entry.posted, i + 1);
  if (m.bytes > sizeof entry.payload) return true;
  end_send(m);
  return false;
}

// False: no memory to stage it.
bool Messages::fill_entry(Message& m, MailboxEntry& entry, Failure& failure) {
  Envelope& envelope = entry.envelope;
  envelope.tag = m.tag;
  envelope.bytes = m.bytes;
  envelope.dtype = m.dtype;
  envelope.seq = m.seq;
  entry.filled.store(0, std::memory_order_relaxed);  // released with `posted`
  if (m.bytes > kEager) m.told = Heap::Told(g_.heap());
  Place place = m.bytes > kEager ? g_.locate(m.data, m.bytes) : Place{};
  if (m.bytes <= sizeof entry.payload) {
    envelope.carrier = Carrier::inlined;
    if (m.bytes) std::memcpy(entry.payload, m.data, m.bytes);
  } else if (place || may_be_read(m)) {
    envelope.carrier = Carrier::place;
    envelope.place = place;
  } else {
    envelope.carrier = Carrier::staged;
    m.told = {};
    m.buffer = arena_.take(std::min(m.bytes, kSendBuffer), failure);
    if (!m.buffer) return false;
    envelope.place = g_.locate(m.buffer, std::min(m.bytes, kSendBuffer));
    // What is short is there with its envelope: the receiver need not look again.
    m.moved = std::min(m.bytes, send_turn(m.bytes));
    copy_over(m.buffer, m.data, m.moved);
    entry.filled.store(m.moved, std::memory_order_relaxed);  // released with `posted`
  }
  return true;
}

// Whether the receiver can and should read an ordinary tensor where it is.
bool Messages::may_be_read(const Message& m) const {
  if (m.bytes <= kEager || m.peer == g_.rank() || !current_tuning().reads(m.bytes)) return false;
  const std::pair<const void*, size_t> tensor{m.data, m.bytes};
  return g_.peer(m.peer).block.reads_all().load(std::memory_order_relaxed) == 1 && is_readable(&tensor, 1);
}

void Messages::end_send(Message& m) {
  holders_[static_cast<size_t>(m.peer)][m.index % depth_] = 0;
  complete(m);
}

void Messages::note_refusal(Message& m, const Reply& reply) {
  const auto wanted = static_cast<DType>(std::min<uint64_t>(reply.wanted_dtype, static_cast<uint64_t>(DType::count_)));
  fail(m.failure, Code::mismatch,
       "rank " + std::to_string(m.peer) + " expected " + std::to_string(reply.wanted_bytes) + " bytes of " +
           dtype_name(wanted) + ", rank " + std::to_string(g_.rank()) + " sent " + std::to_string(m.bytes) +
           " bytes of " + dtype_name(m.dtype),
       {m.peer});
}

void Messages::step_send(Message& m) {
  if (!m.started && !post(m)) return;
  Reply& reply = reply_of(m.peer, m.index);
  const bool is_done = reply.done.load(std::memory_order_acquire) > m.index;
  if (is_done && reply.error) {
    if (!m.done.load(std::memory_order_relaxed)) note_refusal(m, reply);  // else its caller reads `failure` already
    if (m.buffer) arena_.give(m.buffer);
    return end_send(m);
  }
  if (m.buffer) return fill_buffer(m);
  if (is_done) end_send(m);  // it was read where it is
}

// Puts in as much as there is room for; when all is in, the buffer is left to the receiver.
void Messages::fill_buffer(Message& m) {
  MailboxEntry& entry = outgoing(m);
  const Reply& reply = reply_of(m.peer, m.index);
  const size_t room = std::min(m.bytes, kSendBuffer);
  while (m.moved < m.bytes) {
    size_t drained = reply.drained.load(std::memory_order_acquire);
    if (drained > m.moved) break;  // impossible from a sound peer
    size_t free = room - (m.moved - drained), at = m.moved % room;
    size_t n = std::min({free, m.bytes - m.moved, room - at, send_turn(m.bytes)});
    if (n == 0) break;
    copy_over(m.buffer + at, m.data + m.moved, n);
    m.moved += n;
    g_.publish_to(m.peer, entry.filled, m.moved);
  }
  if (m.moved < m.bytes) return;
  lingering_.push_back({m.peer, m.index, m.buffer});
  end_send(m);
}

}  // namespace unisono
