// Puts the calls of one group in order: synchronous ones run in the caller's thread, asynchronous ones in a progress
// thread that starts with the first of them, and whoever waits for a ticket may run what stands before it.
//
// One total order per group: the queue. `run_mutex_` is held by whoever executes its head. Messages (messages.h) stand
// outside of that order. Tickets are completed with no lock held, so a callback may call again, and may wait for what
// it called by any means: while the progress thread is in a callback, another one takes its role (progress.cc). A
// callback may also drop the last reference to the group, or run for ever: every thread holds the engine for as long as
// it works in it, and closing waits for threads only so long.
// Memory order: state is guarded by queue_mutex_; the two atomics that are read without it say below what they publish.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <optional>
#include <thread>

#include "group/deadlock.h"
#include "verbs/collectives.h"
#include "verbs/messages.h"

namespace unisono {

struct Ticket {
  Call call;
  std::vector<Part> in_parts, out_parts;  // what call.in_parts and call.out_parts point to
  std::shared_ptr<Message> message;       // point-to-point instead of a collective
  std::function<void()> on_done;          // called once, by the thread that completed it
  int64_t submitted_ns = now_ns();
  Code code = Code::ok;  // valid when done
  // Stored with release by Engine::mark_done, loaded with acquire by whoever waits or asks: publishes `code`, the
  // call's failure, and its results.
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
  uint64_t single_copy_bytes() const { return collectives_.single_copy_bytes(); }

  Code run(Call& call);                                           // a collective, now
  Code run(Call& call, const std::shared_ptr<Message>& message);  // a message, now
  // Begins a message in a group that can be used. True: it is over. Otherwise it goes on while somebody waits for it,
  // or once it is submitted.
  bool post(Call& call, const std::shared_ptr<Message>& message);
  void submit(const std::shared_ptr<Ticket>& ticket);  // in the background
  // Waits for a ticket. On timeout (0: none) returns false and leaves it running.
  bool wait(Ticket& ticket, int64_t timeout_ns, bool may_interrupt, bool& interrupted);
  // Gives up a receive that nothing has come for.
  void withdraw(Ticket& ticket);
  // Has `callback` called once, when the ticket is done: by the thread that ends it, or now. One per ticket.
  void when_done(Ticket& ticket, std::function<void()> callback);

  // Waits for something outside of the group: 0 when `ready`, 1 after `timeout_ns`, 2 when `stop` or a Python signal
  // handler raised. Messages of the group go on meanwhile.
  int await_outside(FunctionRef<bool()> ready, FunctionRef<bool()> stop, int64_t timeout_ns);
  // Whether a message with this tag waits for a receive.
  bool has_message(int64_t tag) { return messages_->waits(tag); }

  // Leave the group: tells the peers, ends what is pending, stops the progress thread, then waits up to `linger_ns`
  // for the peers to leave too, so that shared memory can be given back at once. Takes less than 2 s, whatever
  // receivers and callbacks do: short sends that nobody takes in that time are lost, and callbacks are called by other
  // threads, which are left alone if they are not over soon.
  void close(const std::string& reason, int64_t linger_ns = 0);

 private:
  explicit Engine(std::unique_ptr<Group> group);
  // progress.cc
  void start_progress();
  void ensure_progress_thread();  // under queue_mutex_
  bool has_spare_threads();       // under queue_mutex_
  bool lacks_progress_thread();   // there is none, and none can be made
  bool become_progress_thread();  // waits a while for an opening; false: there is none, the thread ends
  void progress();                // what a thread does
  bool progress_once();           // false: nothing is left to do and the group is closed
  void progress_messages();
  Call watcher_of(const std::vector<std::shared_ptr<Ticket>>& messages, Ticket*& first) const;
  void announce(Ticket& ticket);
  bool leave_to_spare_thread(std::function<void()>& callback);  // under queue_mutex_; false: there is no thread
  void flush_sends();
  void end_pending();                    // all calls and messages of a group that is closed
  void await_threads(int64_t until_ns);  // and lets go of those that are not over by then

  // False: nothing to run now. Takes run_mutex_ if it is free, and gives it back before on_done. With `awaited`: only
  // what stands before that ticket, and the ticket itself; who waits for one call must not get into a later one.
  bool run_head(bool may_interrupt, const Ticket* awaited = nullptr, WaitLine* line = nullptr);
  void count_queue();  // under queue_mutex_
  void tell_waiting(WaitLine& line, const Ticket& ticket, int64_t now, bool blocks);
  void find_deadlock(WaitLine& line, DeadlockFinder& finder, const Ticket& ticket, int64_t now);
  void complete(Ticket& ticket, Code code);
  void refuse(Ticket& ticket, const Failure& cause);
  bool refuse_forked(Ticket& ticket);
  static void mark_done(Ticket& ticket, Code code);
  void end_messages();  // those that are over
  void end_message(Ticket& ticket);

  std::unique_ptr<Group> group_;
  Waiter waiter_;
  Collectives collectives_;
  std::unique_ptr<Messages> messages_;
  std::mutex run_mutex_;
  std::mutex queue_mutex_;           // guards all below but the atomics
  std::condition_variable changed_;  // a ticket is done, or a thread has ended
  std::condition_variable work_;     // there is something in queue_ or in_flight_, or closed_ changed
  std::deque<std::shared_ptr<Ticket>> queue_;
  std::vector<std::shared_ptr<Ticket>> in_flight_;  // asynchronous messages that are not done yet
  // The length of queue_. Stored with release under the mutex, loaded with acquire without it: whoever finds 0 sees the
  // results of all calls that stood in the queue.
  std::atomic<size_t> queued_{0};
  // Says that this thread, which waits for a message, moves all of them on.
  class Driver {
   public:
    explicit Driver(Engine& engine) : count_(engine.drivers_) { count_.fetch_add(1, std::memory_order_relaxed); }
    ~Driver() { count_.fetch_sub(1, std::memory_order_relaxed); }
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;

   private:
    std::atomic<int>& count_;
  };
  std::atomic<int> drivers_{0};  // relaxed: a hint for the progress thread
  // The length of in_flight_, read without the mutex; relaxed, since it only says whether there was progress.
  std::atomic<size_t> in_flight_count_{0};
  std::vector<std::thread> threads_;
  std::vector<std::thread::id> ended_;           // those of threads_ that have done all their work, to be joined
  bool has_progress_thread_ = false;             // or one is on its way
  size_t openings_ = 0;                          // 1 while the role is offered to spare threads
  std::deque<std::function<void()>> callbacks_;  // left to spare threads
  size_t spare_threads_ = 0;                     // threads that wait for one of both
  std::condition_variable needed_;               // openings_, callbacks_ or closed_ changed
  bool closed_ = false;
};

}  // namespace unisono
