// Puts the calls of one group in order: synchronous ones run in the caller's thread, asynchronous ones in a progress
// thread that starts with the first of them, and whoever waits for a ticket may run what stands before it.
//
// One total order per group: the queue. `run_mutex_` is held by whoever executes its head. Messages
// (post.h) stand outside of that order. Tickets are finished with no lock held, so a callback may call again, and may
// wait for what it called by any means: while the progress thread is in a callback, another one takes its post.
// A callback may also drop the last reference to the group, or run for ever: every thread holds the engine for as long
// as it works in it, and closing waits for threads only so long.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <thread>

#include "verbs/collectives.h"
#include "verbs/post.h"

namespace unisono {

struct Ticket {
  Call call;
  std::vector<Part> in_parts, out_parts;  // what call.in_parts and call.out_parts point to
  std::shared_ptr<Message> message;       // point-to-point instead of a collective
  std::function<void()> on_done;          // called once, by the thread that finished it
  int64_t submitted_ns = now_ns();
  Code code = Code::ok;  // valid when done
  std::atomic<bool> done{false};
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // The engine closes when its last user lets go of the result. In a forked child nothing of it is touched. Without a
  // group there is no engine.
  static std::shared_ptr<Engine> open(std::unique_ptr<Group> group);
  ~Engine();

  Group& group() { return *group_; }
  uint64_t staged_bytes() const { return collectives_.staged_bytes(); }

  Code run(Call& call);                                    // a collective, now
  Code run(Call& call, std::shared_ptr<Message> message);  // a message, now
  void submit(std::shared_ptr<Ticket> ticket);
  // Waits for a ticket. On timeout (0: none) returns false and leaves it running.
  bool wait(Ticket& ticket, int64_t timeout_ns, bool may_interrupt, bool& interrupted);
  // Has `callback` called once, when the ticket is done: by the thread that ends it, or now. One per ticket.
  void when_done(Ticket& ticket, std::function<void()> callback);

  // Leave the group: tells the peers, ends what is pending, stops the progress thread, then waits up to `linger_ns`
  // for the peers to leave too, so that shared memory can be given back at once. Takes less than 2 s, whatever
  // receivers and callbacks do: short sends that nobody takes in that time are lost.
  void close(const std::string& reason, int64_t linger_ns = 0);

 private:
  explicit Engine(std::unique_ptr<Group> group);
  // The post: one progress thread at a time works through the queue. `manned_` and `openings_` are guarded by
  // queue_mutex_.
  void deliver();
  void man_post();       // under queue_mutex_: sees to it that a thread has the post
  bool take_post();      // waits a while for an opening; false: there is none, the thread ends
  bool unmanned();       // whether there is no thread, and none can be made
  bool progress_once();  // false: nothing is left to do and the group is closed
  void tend_messages();  // moves them on for some milliseconds, and sees to their deadlines and peers
  void progress();
  // False: nothing to run now. Takes run_mutex_ if it is free, and gives it back before on_done. With `awaited`: only
  // what stands before that ticket, and the ticket itself; who waits for one call must not get into a later one.
  bool run_head(bool may_interrupt, const Ticket* awaited = nullptr);
  void finish(Ticket& ticket, Code code);
  void refuse(Ticket& ticket, const Failure& cause);
  bool refuse_forked(Ticket& ticket);
  static void mark_done(Ticket& ticket, Code code);
  void announce(Ticket& ticket);
  void end_messages();  // those that are over
  void end_message(Ticket& ticket);
  void flush();
  void await_threads();

  std::unique_ptr<Group> group_;
  Waiter waiter_;
  Collectives collectives_;
  std::unique_ptr<Post> post_;
  std::mutex run_mutex_;
  std::mutex queue_mutex_;
  std::condition_variable changed_;  // a ticket is done
  std::condition_variable work_;     // there is something in queue_ or messages_, or stop_ changed
  std::deque<std::shared_ptr<Ticket>> queue_;
  std::vector<std::shared_ptr<Ticket>> messages_;  // asynchronous ones not finished yet
  std::atomic<size_t> queued_{0};
  std::atomic<size_t> in_flight_{0};  // messages nobody may be waiting for
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
  std::vector<std::thread::id> finished_;  // those of threads_ that have done all their work, to be joined
  bool manned_ = false;                    // a thread has the post, or is on its way there
  size_t openings_ = 0, spare_ = 0;        // posts offered to spare threads, and spare threads that wait for one
  std::condition_variable needed_;         // openings_ or stop_ changed
  bool closed_ = false;
  int generation_ = fork_generation();
};

}  // namespace unisono
