// Point-to-point messages of one group, matched by sender and tag.
//
// Each ordered pair of ranks has a mailbox: a ring of entries in the sender's block, and of replies in the receiver's
// (control.h). A short message travels in its entry; one in the heap is read where it is, and so is a long one
// elsewhere if the receiver can do that (reach.h); any other goes through a small buffer of the sender's heap that both
// ends work through in turns. Sends and receives do not stand in the group's order of collectives: all pending ones
// advance together (`step`), driven by whoever waits for one of them. Messages to one rank are posted in order; a
// receive takes the oldest with its tag. When unexpected messages, for which there is no receive yet, fill a whole
// mailbox, the oldest is taken into memory of our own. Invariant: entry i is written again only after reply i says
// done. Memory order: `mutex_` guards all state here; what the two ends share is released and acquired by the flags of
// MailboxEntry and Reply.
#pragma once

#include <deque>
#include <list>
#include <memory>
#include <mutex>

#include "group/wait.h"
#include "verbs/arena.h"
#include "verbs/gauge.h"

namespace unisono {

struct Message {
  bool sending = false;
  int peer = -1;  // -1: receive from anyone
  int64_t tag = 0;
  std::byte* data = nullptr;
  size_t bytes = 0;
  DType dtype = DType::u8;
  bool asynchronous = false;
  const char* site = nullptr;  // as in Call

  // Over for its caller. Stored with release by Messages::complete, loaded with acquire by whoever waits: publishes
  // `failure`, `source` and what was received.
  std::atomic<bool> done{false};
  Failure failure;
  int source = -1;  // of a receive
  uint64_t seq = 0;

 private:
  friend class Messages;
  bool started = false;  // a send: has an entry; a receive: has found its message
  uint64_t index = 0;    // of the entry in its mailbox
  Envelope envelope{};   // of a receive: what the entry said when it was taken
  // Of a receive that has found nothing: the flag that its sender changes next, and to what. Set by Messages::add,
  // before anybody can wait for it.
  const Flag* awaited = nullptr;
  uint64_t awaited_value = 0;
  size_t moved = 0;
  Gauge::Plan plan;                    // of a receive: how it writes its tensor
  int64_t began_ns = 0;                // of a receive whose time the gauge wants
  Heap::Told told;                     // of a send that is read where it is
  std::byte* buffer = nullptr;         // staged sends
  std::unique_ptr<std::byte[]> owned;  // of unexpected messages, and of sends that wait for an entry
  Recorded recorded;
};

class Messages final : private Scratch::User {
 public:
  Messages(Group& group, Waiter& waiter);
  ~Messages();

  // Ends the lease of `call`, if there is one, before it waits for another thread.
  void add(std::shared_ptr<Message> message, Call* call = nullptr);
  // Waits for one message, advancing all. `call` carries the deadline and gets the failure.
  Code wait(const std::shared_ptr<Message>& message, Call& call);
  // Looks whether it is over within a microsecond or so.
  bool comes_soon(const Message& message);
  // Advances all pending messages once.
  void advance();
  size_t pending() const { return pending_.load(std::memory_order_relaxed); }
  // Sends that are over for their callers and still wait for a free entry, to peers that may yet make one free.
  size_t backlog() const { return backlog_.load(std::memory_order_relaxed); }
  // Whether a message with this tag, from anyone, is here and not for a receive that is pending.
  bool waits(int64_t tag);
  // Gives up a receive that has found nothing yet.
  void withdraw(Message& message);
  // Moves all pending messages on, for sure: what came in just before its sender left counts.
  void settle();
  // Whether the message still needs rank r, as far as has been looked.
  bool needs(const Message& m, int r) const;
  // Ends every pending message with this failure, and every later one.
  void fail_all(const Failure& failure);

 private:
  struct Lingering {  // a send that is over for its caller, not yet for its receiver
    int peer;
    uint64_t index;
    std::byte* buffer;
  };
  // Of the arena's ring.
  uint64_t uses() const override { return arena_.uses(); }
  bool let_go() override;

  void step();
  void step_sends();
  void look_briefly(const Message& m) const;
  uint64_t look_briefly_for_more(const Flag& flag, uint64_t seen) const;
  static bool is_over(const Message& m);
  void complete(Message& m);
  void count();
  void record(Message& m);
  void give_back_buffers();
  MailboxEntry& outgoing(const Message& m) const { return g_.mine().mailbox(m.peer, m.index); }
  MailboxEntry& incoming(int from, uint64_t i) const { return g_.peer(from).block.mailbox(g_.rank(), i); }
  Reply& reply_of(int to, uint64_t i) const { return g_.peer(to).block.reply(g_.rank(), i); }
  Reply& own_reply(int from, uint64_t i) const { return g_.mine().reply(from, i); }

  // send.cc
  void step_send(Message& m);
  bool post(Message& m);
  bool fill_entry(Message& m, MailboxEntry& entry, Failure& failure);
  bool may_be_read(const Message& m) const;
  void fill_buffer(Message& m);
  void note_refusal(Message& m, const Reply& reply);
  void end_send(Message& m);
  void set_aside(Message& m);

  // receive.cc
  void step_receive(Message& m);
  bool read(Message& m);
  bool read_hidden(Message& m);
  bool read_staged(Message& m);
  Gauge::Key key_of(const Message& m) const;
  void plan_writing(Message& m);
  void note_writing(const Message& m);
  void end_receive(Message& m);
  uint64_t seen(int from);
  bool match(Message& m);
  bool match_unexpected(Message& m);
  void take_unexpected(int from);
  void take(Message& m, int from, uint64_t i);
  void refuse(Message& m);
  bool withdrawn(const Message& m) const;
  Envelope envelope_of(int from, uint64_t i) const;
  bool is_posted(int from, uint64_t i) const;
  bool is_asked_for(int from, int64_t tag) const;

  Group& g_;
  Waiter& waiter_;
  Arena arena_;
  std::mutex mutex_;
  std::list<std::shared_ptr<Message>> sends_, receives_;
  std::deque<std::shared_ptr<Message>> unexpected_;
  Gauge ways_;  // how long messages are written best by their receiver: its own affair
  std::vector<Lingering> lingering_;
  const uint64_t depth_;                       // entries of a mailbox
  std::vector<uint64_t> next_out_, next_in_;   // per peer: the next entry to post; the oldest not done with
  std::vector<std::vector<uint8_t>> holders_;  // per peer and entry: a send that still looks at its reply
  enum Taken : uint8_t { kFree, kTaken, kDone };
  std::vector<std::vector<uint8_t>> taken_;  // per peer and entry: Taken
  struct Seen {
    uint64_t step = 0, end = 0;
  };
  std::vector<Seen> seen_;  // per peer: in which step we looked for messages, and the first that was not there
  uint64_t steps_ = 0;
  uint64_t count_ = 0;
  Failure over_;  // what fail_all was called with
  // Stored by `count` under the mutex, read without it, relaxed: hints for whoever drives messages.
  std::atomic<size_t> pending_{0}, backlog_{0};
};

}  // namespace unisono
