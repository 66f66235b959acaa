// Point-to-point messages of one group: letters from one rank to another, matched by tag.
//
// Each ordered pair of ranks has a ring of letters (control.h). A short message travels in the letter; one in the heap
// is read where it is; any other goes through a small buffer of the sender's heap that both ends work through in turns.
// Sends and receives do not stand in the group's order of collectives: all pending ones advance together (`step`),
// driven by whoever waits for one of them. Letters to one rank are posted in order; a receive takes the oldest letter
// with its tag; when letters nobody asked for fill the whole ring, the oldest is taken into memory of our own.
// Invariant: letter i's entry is written again only after reply i says done.
#pragma once

#include <deque>
#include <list>
#include <memory>
#include <mutex>

#include "group/wait.h"

namespace unisono {

enum class LetterKind : uint8_t { inlined, place, staged };

struct Message {
  bool sending = false;
  int peer = -1;  // -1: receive from anyone
  int64_t tag = 0;
  std::byte* data = nullptr;
  size_t bytes = 0;
  DType dtype = DType::u8;

  std::atomic<bool> finished{false};
  Failure failure;  // valid when finished
  int source = -1;  // of a finished receive
  uint64_t seq = 0;

 private:
  friend class Post;
  bool started = false;
  uint64_t letter = 0;
  LetterHead head{};  // of a receive: what its letter said when it was taken
  size_t moved = 0;
  std::byte* buffer = nullptr;         // staged sends
  std::unique_ptr<std::byte[]> owned;  // of receives nobody asked for yet, and of sends that wait for a letter
};

// Memory for staged sends, taken from front to end and then from the front again: see the ring in control.h.
class Arena {
 public:
  explicit Arena(Group& group) : g_(group), heap_(group.heap()) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  std::byte* take(size_t bytes, Failure& failure);  // from the heap where the ring has no room; null: none there either
  void give(std::byte* at);
  void leave(std::byte* at);  // as give, but somebody may still read it: it stays as long as the group

 private:
  struct Range {
    size_t begin, end;
    bool used;
  };
  bool owns(const std::byte* at) const { return base_ && at >= base_ && at < base_ + kRingBytes; }
  Group& g_;
  Heap& heap_;
  std::byte* base_ = nullptr;  // kept by the group
  size_t next_ = 0;
  std::deque<Range> ranges_;  // in the order in which they were taken
};

class Post {
 public:
  Post(Group& group, Waiter& waiter);
  ~Post();

  void add(std::shared_ptr<Message> message);
  // Waits for one message, advancing all. `call` carries the deadline and gets the failure.
  Code wait(const std::shared_ptr<Message>& message, Call& call);
  // Advances all pending messages once; false if none is pending any more.
  bool advance();
  size_t pending() const { return pending_.load(std::memory_order_relaxed); }
  // Sends that are over for their callers and still wait for a free letter, to peers that may yet make one free.
  size_t owed() const { return owed_.load(std::memory_order_relaxed); }
  // Ends every pending message with this failure, and every later one.
  void fail_all(const Failure& failure);

 private:
  struct Lingering {  // a send that is over for its caller, not yet for its receiver
    int peer;
    uint64_t letter;
    std::byte* buffer;
  };
  void step();
  void set_aside(Message& m);
  static bool is_over(const Message& m);
  bool step_send(Message& m);
  bool step_receive(Message& m);
  uint64_t seen(int from);
  bool match(Message& m);
  bool match_unasked(Message& m);
  void take_unasked(int from);
  bool take(Message& m, int from, uint64_t i);
  void finish(Message& m);
  void refuse(Message& m);
  bool withdrawn(const Message& m) const;
  void sweep();
  LetterHead head_of(int from, uint64_t i) const;
  bool posted(int from, uint64_t i) const;
  void count();

  Group& g_;
  Waiter& waiter_;
  Arena arena_;
  std::mutex mutex_;
  std::list<std::shared_ptr<Message>> sends_, receives_;
  std::deque<std::shared_ptr<Message>> unasked_;
  std::vector<Lingering> lingering_;
  std::vector<uint64_t> next_out_, next_in_;   // per peer: the next letter to post; the oldest not finished with
  std::vector<std::vector<uint8_t>> holders_;  // per peer and ring entry: a send that still looks at its letter
  std::vector<std::vector<uint8_t>> taken_;    // per peer and ring entry
  struct Seen {
    uint64_t step = 0, end = 0;
  };
  std::vector<Seen> seen_;  // per peer: in which step we looked for letters, and the first that was not there
  uint64_t steps_ = 0;
  uint64_t count_ = 0;
  Failure over_;  // what fail_all was called with
  std::atomic<size_t> pending_{0}, owed_{0};
};

}  // namespace unisono
