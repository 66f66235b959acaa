// See post.h.
#include "verbs/post.h"

#include <algorithm>

#include "kernels/reduce.h"

namespace unisono {
namespace {

constexpr size_t kEager = 64 << 10;         // a send of up to this many bytes is over as soon as it is copied
constexpr size_t kBuffer = kRingBytes / 2;  // staging of one longer send
constexpr size_t kTurn = 16 << 10;          // bytes moved before the other end is told
constexpr size_t kSweepFrom = 8;            // buffers that wait for their receivers before we look

}  // namespace

std::byte* Arena::take(size_t bytes, Failure& failure) {
  if (!base_) {
    Failure none;
    HeapMemory memory = take_memory(heap_, kRingBytes, none);
    base_ = memory.get();
    if (base_) g_.keep(std::move(memory));
  }
  while (!ranges_.empty() && !ranges_.front().used) ranges_.pop_front();
  const size_t size = (bytes + 4095) / 4096 * 4096;
  size_t at = ranges_.empty() ? next_ : ranges_.back().end;
  if (at + size > kRingBytes) at = 0;
  // Free is what lies behind the youngest range and before the oldest one.
  bool fits = base_ && size <= kRingBytes;
  for (const Range& r : ranges_) fits = fits && (at + size <= r.begin || at >= r.end);
  if (!fits) return static_cast<std::byte*>(heap_.allocate(bytes, failure));
  ranges_.push_back({at, at + size, true});
  next_ = at + size;
  return base_ + at;
}

void Arena::give(std::byte* at) {
  if (!owns(at)) return heap_.release(at);
  for (Range& r : ranges_)
    if (base_ + r.begin == at) r.used = false;
}

void Arena::leave(std::byte* at) {
  if (!owns(at)) g_.keep(HeapMemory(at, HeapRelease{&heap_}));
}

Post::Post(Group& group, Waiter& waiter)
    : g_(group),
      waiter_(waiter),
      arena_(group),
      next_out_(static_cast<size_t>(group.size())),
      next_in_(static_cast<size_t>(group.size())),
      holders_(static_cast<size_t>(group.size()), std::vector<uint8_t>(group.peer(group.rank()).block.ring())),
      taken_(static_cast<size_t>(group.size()), std::vector<uint8_t>(group.peer(group.rank()).block.ring())),
      seen_(static_cast<size_t>(group.size())) {}

Post::~Post() {
  sweep();
  // What a receiver may still read is never handed out again.
  for (const Lingering& l : lingering_)
    if (l.buffer) arena_.leave(l.buffer);
}

void Post::add(std::shared_ptr<Message> message) {
  std::lock_guard lock(mutex_);
  Message& m = *message;
  m.seq = ++count_;
  if (over_.code != Code::ok) {
    m.failure = over_;
    return finish(m);
  }
  if (m.sending) {
    if (lingering_.size() > kSweepFrom) sweep();
    const bool waits = std::any_of(sends_.begin(), sends_.end(),
                                   [&](const auto& other) { return !other->started && other->peer == m.peer; });
    if (waits) {
      sends_.push_back(std::move(message));
      return step();  // letters may have become free
    }
    step_send(m);
    if (!is_over(m)) sends_.push_back(std::move(message));
  } else {
    // With others before it, it has its turn in the next step: they may want the same letter.
    if (receives_.empty()) {
      steps_++;
      step_receive(m);
    }
    if (!is_over(m)) receives_.push_back(std::move(message));
  }
  count();
}

void Post::count() {
  pending_.store(sends_.size() + receives_.size(), std::memory_order_relaxed);
  const auto owed = std::count_if(sends_.begin(), sends_.end(), [&](const auto& m) {
    if (m->started || !m->finished.load(std::memory_order_relaxed)) return false;
    return m->peer == g_.rank() || g_.state_of(m->peer) == PeerState::alive;
  });
  owed_.store(static_cast<size_t>(owed), std::memory_order_relaxed);
}

// A send that found no letter is over for its caller only.
bool Post::is_over(const Message& m) {
  return m.finished.load(std::memory_order_relaxed) && (!m.sending || m.started || m.failure.code != Code::ok);
}

void Post::finish(Message& m) {
  m.finished.store(true, std::memory_order_release);
}

void Post::sweep() {
  std::erase_if(lingering_, [&](const Lingering& l) {
    if (g_.peer(l.peer).block.reply(g_.rank(), l.letter).done.load(std::memory_order_acquire) <= l.letter) return false;
    if (l.buffer) arena_.give(l.buffer);
    return true;
  });
}

// No free letter: a short message does not keep its sender, it waits in memory of our own.
void Post::set_aside(Message& m) {
  if (m.finished.load(std::memory_order_relaxed) || m.bytes > kEager) return;
  m.owned.reset(new (std::nothrow) std::byte[m.bytes + 1]);
  if (!m.owned) return;
  if (m.bytes) copy_bytes(m.owned.get(), m.data, m.bytes);
  m.data = m.owned.get();
  finish(m);
}

bool Post::step_send(Message& m) {
  const int me = g_.rank();
  const auto to = static_cast<size_t>(m.peer);
  Block mine = g_.peer(me).block, theirs = g_.peer(m.peer).block;
  const uint64_t ring = mine.ring();
  if (!m.started) {
    uint64_t i = next_out_[to];
    if (holders_[to][i % ring]) return set_aside(m), false;  // its last message has not seen its reply yet
    if (i >= ring && theirs.reply(me, i).done.load(std::memory_order_acquire) < i - ring + 1) {
      set_aside(m);
      return false;
    }
    Letter& letter = mine.letter(m.peer, i);
    LetterHead& head = letter.head;
    head.tag = m.tag;
    head.bytes = m.bytes;
    head.dtype = m.dtype;
    head.seq = m.seq;
    letter.filled.store(0, std::memory_order_relaxed);
    Place place = m.bytes > kEager ? g_.locate(m.data, m.bytes) : Place{};
    if (m.bytes <= sizeof letter.payload) {
      head.kind = static_cast<uint8_t>(LetterKind::inlined);
      if (m.bytes) std::memcpy(letter.payload, m.data, m.bytes);
    } else if (place) {
      head.kind = static_cast<uint8_t>(LetterKind::place);
      head.place = place;
    } else {
      head.kind = static_cast<uint8_t>(LetterKind::staged);
      m.buffer = arena_.take(std::min(m.bytes, kBuffer), m.failure);
      if (!m.buffer) {
        finish(m);
        return true;
      }
      head.place = g_.locate(m.buffer, std::min(m.bytes, kBuffer));
    }
    m.started = true;
    m.letter = i;
    holders_[to][i % ring] = 1;
    next_out_[to]++;
    g_.publish(letter.posted, i + 1);
    if (head.kind == static_cast<uint8_t>(LetterKind::inlined)) {
      holders_[to][i % ring] = 0;
      finish(m);
      return true;
    }
  }
  Letter& letter = mine.letter(m.peer, m.letter);
  Reply& reply = theirs.reply(me, m.letter);
  bool done = reply.done.load(std::memory_order_acquire) > m.letter;
  if (done && reply.error) {
    const auto wanted =
        static_cast<DType>(std::min<uint64_t>(reply.wanted_dtype, static_cast<uint64_t>(DType::count_)));
    fail(m.failure, Code::mismatch,
         "rank " + std::to_string(m.peer) + " expected " + std::to_string(reply.wanted_bytes) + " bytes of " +
             dtype_name(wanted) + ", rank " + std::to_string(me) + " sent " + std::to_string(m.bytes) + " bytes of " +
             dtype_name(m.dtype),
         {m.peer});
    if (m.buffer) arena_.give(m.buffer);
    holders_[to][m.letter % ring] = 0;
    finish(m);
    return true;
  }
  if (!m.buffer) {  // read where it is
    if (!done) return false;
    holders_[to][m.letter % ring] = 0;
    finish(m);
    return true;
  }
  const size_t room = std::min(m.bytes, kBuffer);
  bool moved = false;
  while (m.moved < m.bytes) {
    size_t drained = reply.drained.load(std::memory_order_acquire);
    if (drained > m.moved) break;  // impossible from a sound peer
    size_t free = room - (m.moved - drained), at = m.moved % room;
    size_t n = std::min({free, m.bytes - m.moved, room - at, kTurn});
    if (n == 0) break;
    copy_bytes(m.buffer + at, m.data + m.moved, n);
    m.moved += n;
    g_.publish(letter.filled, m.moved);
    moved = true;
  }
  if (m.moved == m.bytes) {
    lingering_.push_back({m.peer, m.letter, m.buffer});
    holders_[to][m.letter % ring] = 0;
    finish(m);
    return true;
  }
  return moved;
}

// Read once: the sender can change it at any time.
LetterHead Post::head_of(int from, uint64_t i) const {
  LetterHead head = g_.peer(from).block.letter(g_.rank(), i).head;
  asm volatile("" : "+m"(head) : : "memory");
  return head;
}

bool Post::posted(int from, uint64_t i) const {
  return g_.peer(from).block.letter(g_.rank(), i).posted.load(std::memory_order_acquire) == i + 1;
}

void Post::refuse(Message& m) {
  fail(m.failure, Code::mismatch,
       "expected " + std::to_string(m.bytes) + " bytes of " + dtype_name(m.dtype) + " from rank " +
           std::to_string(m.source) + ", which sent " + std::to_string(m.head.bytes) + " bytes of " +
           dtype_name(m.head.dtype),
       {m.source});
  Reply& reply = g_.peer(g_.rank()).block.reply(m.source, m.letter);
  reply.error = 1;
  reply.wanted_bytes = m.bytes;
  reply.wanted_dtype = static_cast<uint64_t>(m.dtype);
}

// Binds a receive to letter i of `from`.
bool Post::take(Message& m, int from, uint64_t i) {
  m.head = head_of(from, i);
  m.source = from;
  m.letter = i;
  m.started = true;
  taken_[static_cast<size_t>(from)][i % taken_[0].size()] = 1;
  g_.peer(g_.rank()).block.reply(from, i).error = 0;
  if (m.head.bytes != m.bytes || m.head.dtype != m.dtype) refuse(m);
  return true;
}

// After reading the sender's memory: a sender that has given up or left may have used it for something else meanwhile.
// The loads before the fence come before those behind it; the sender says that it is out before it touches its memory.
bool Post::withdrawn(const Message& m) const {
  fence(std::memory_order_acquire);
  return m.source != g_.rank() && (g_.peer(m.source).block.abort().code.load(std::memory_order_acquire) ||
                                   g_.state_of(m.source) == PeerState::left);
}

// The letters of `from` that this step may look at end here. All receives of a step see the same ones, or a letter that
// arrives in between would go to the second of two receives that wait for it.
uint64_t Post::seen(int from) {
  Seen& s = seen_[static_cast<size_t>(from)];
  if (s.step != steps_) {
    const uint64_t first = next_in_[static_cast<size_t>(from)], ring = taken_[0].size();
    s = {steps_, first};
    while (s.end < first + ring && posted(from, s.end)) s.end++;
  }
  return s.end;
}

bool Post::match(Message& m) {
  for (int k = 0; k < g_.size(); k++) {
    int from = m.peer >= 0 ? m.peer : (g_.rank() + k) % g_.size();
    uint64_t first = next_in_[static_cast<size_t>(from)], ring = taken_[0].size(), end = seen(from);
    for (uint64_t i = first; i < end; i++)
      if (!taken_[static_cast<size_t>(from)][i % ring] && g_.peer(from).block.letter(g_.rank(), i).head.tag == m.tag)
        return take(m, from, i);
    if (m.peer >= 0) break;
  }
  return false;
}

bool Post::match_unasked(Message& m) {
  for (auto it = unasked_.begin(); it != unasked_.end(); ++it) {
    Message& held = **it;
    if (held.tag != m.tag || (m.peer >= 0 && held.source != m.peer)) continue;
    if (!held.finished.load(std::memory_order_relaxed)) return true;  // its turn, but it is still coming in
    m.source = held.source;
    if (held.failure.code != Code::ok) {
      m.failure = held.failure;
    } else if (held.bytes != m.bytes || held.dtype != m.dtype) {
      fail(m.failure, Code::mismatch,
           "expected " + std::to_string(m.bytes) + " bytes of " + dtype_name(m.dtype) + " from rank " +
               std::to_string(m.source) + ", which sent " + std::to_string(held.bytes) + " bytes of " +
               dtype_name(held.dtype),
           {m.source});
    } else if (m.bytes) {
      copy_bytes(m.data, held.data, m.bytes);
    }
    unasked_.erase(it);
    finish(m);
    return true;
  }
  return false;
}

void Post::take_unasked(int from) {
  const uint64_t first = next_in_[static_cast<size_t>(from)], ring = taken_[0].size();
  if (taken_[static_cast<size_t>(from)][first % ring]) return;
  for (uint64_t i = first; i < first + ring; i++)
    if (!posted(from, i)) return;  // there is still room for what may be asked for
  const LetterHead head = head_of(from, first);
  auto held = std::make_shared<Message>();
  held->peer = from;
  held->tag = head.tag;
  held->bytes = head.bytes;
  held->dtype = head.dtype;
  if (head.bytes > g_.peer(from).heap_capacity) return;  // impossible; the receive will time out
  held->owned.reset(new (std::nothrow) std::byte[head.bytes + 1]);
  if (!held->owned) return;
  held->data = held->owned.get();
  take(*held, from, first);
  unasked_.push_back(held);
}

bool Post::step_receive(Message& m) {
  if (!m.started) {
    if (match_unasked(m)) return m.finished.load(std::memory_order_relaxed);
    if (!match(m)) {
      for (int r = 0; r < g_.size(); r++)
        if (m.peer < 0 || m.peer == r) take_unasked(r);
      return false;
    }
  }
  Letter& letter = g_.peer(m.source).block.letter(g_.rank(), m.letter);
  Reply& reply = g_.peer(g_.rank()).block.reply(m.source, m.letter);
  bool over = m.failure.code != Code::ok, moved = false;
  if (!over && m.head.kind == static_cast<uint8_t>(LetterKind::inlined)) {
    if (m.bytes > sizeof letter.payload)
      fail(m.failure, Code::system, "a letter says more than it can hold", {m.source});
    else if (m.bytes)
      std::memcpy(m.data, letter.payload, m.bytes);
    over = true;
  } else if (!over) {
    const bool staged = m.head.kind == static_cast<uint8_t>(LetterKind::staged);
    const size_t room = staged ? std::min(m.bytes, kBuffer) : m.bytes;
    const std::byte* from = g_.resolve(m.head.place, room);
    if (!from) {
      fail(m.failure, Code::system, "a letter names an impossible place", {m.source});
      over = true;
    } else if (!staged) {
      copy_bytes(m.data, from, m.bytes);
      if (withdrawn(m))
        fail(m.failure, Code::peer_lost, "rank " + std::to_string(m.source) + " gave up while its message was read",
             {m.source});
      over = true;
    } else {
      size_t filled = std::min<size_t>(letter.filled.load(std::memory_order_acquire), m.bytes);
      while (m.moved < filled) {
        size_t at = m.moved % room, n = std::min({filled - m.moved, room - at, kTurn});
        copy_bytes(m.data + m.moved, from + at, n);
        m.moved += n;
        g_.publish(reply.drained, m.moved);
        moved = true;
      }
      over = m.moved == m.bytes;
    }
  }
  if (!over) return moved;
  reply.drained.store(0, std::memory_order_relaxed);
  g_.publish(reply.done, m.letter + 1);
  auto& taken = taken_[static_cast<size_t>(m.source)];
  uint64_t& next = next_in_[static_cast<size_t>(m.source)];
  taken[m.letter % taken.size()] = 2;
  while (taken[next % taken.size()] == 2) taken[next++ % taken.size()] = 0;
  finish(m);
  return true;
}

void Post::step() {
  steps_++;
  if (!lingering_.empty()) sweep();
  std::vector<uint8_t> blocked(static_cast<size_t>(g_.size()));  // letters to one rank are posted in order
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
  for (auto& held : unasked_)
    if (!held->finished.load(std::memory_order_relaxed)) step_receive(*held);
  for (auto it = receives_.begin(); it != receives_.end();) {
    step_receive(**it);
    it = (*it)->finished.load(std::memory_order_relaxed) ? receives_.erase(it) : std::next(it);
  }
  count();
}

bool Post::advance() {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return true;  // somebody else does it
  step();
  return !sends_.empty() || !receives_.empty();
}

void Post::fail_all(const Failure& failure) {
  std::lock_guard lock(mutex_);
  if (over_.code == Code::ok) over_ = failure;
  for (auto* list : {&sends_, &receives_}) {
    for (auto& m : *list) {
      if (m->buffer) lingering_.push_back({m->peer, m->letter, m->buffer});
      if (m->finished.load(std::memory_order_relaxed)) continue;  // over for its sender, it only waited for a letter
      m->failure = failure;
      finish(*m);
    }
    list->clear();
  }
  count();
}

Code Post::wait(const std::shared_ptr<Message>& message, Call& call) {
  Message& m = *message;
  Code code = waiter_.await_until(
      call,
      [&] {
        if (m.finished.load(std::memory_order_acquire)) return true;
        if (std::unique_lock lock(mutex_, std::try_to_lock); lock) step();
        return m.finished.load(std::memory_order_acquire);
      },
      [&](int r) {
        // What came in just before the peer left counts: look once more, for sure.
        {
          std::lock_guard lock(mutex_);
          step();
        }
        if (m.finished.load(std::memory_order_acquire)) return false;
        if (m.peer >= 0) return m.peer == r;
        // From anyone: one who left owes nothing while another is still here.
        auto left = [&](int p) { return p == g_.rank() || g_.state_of(p) == PeerState::left; };
        if (!left(r)) return true;
        for (int p = 0; p < g_.size(); p++)
          if (!left(p)) return false;
        return true;
      });
  if (code != Code::ok) {
    fail_all(call.failure);
    return code;
  }
  call.failure = m.failure;
  call.failure.verb = call.verb;
  call.failure.seq = m.seq;
  return m.failure.code;
}

}  // namespace unisono
