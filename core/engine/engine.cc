// See engine.h.
#include "engine/engine.h"

#include <time.h>

#include <algorithm>

#include "base/faults.h"
#include "group/retire.h"

namespace unisono {

constexpr int64_t kAwaitThreads = 500'000'000;  // how long closing waits for this engine's threads

Engine::Engine(std::unique_ptr<Group> group)
    : group_(std::move(group)),
      waiter_(*group_),
      collectives_(*group_, waiter_),
      messages_(std::make_unique<Messages>(*group_, waiter_)) {
  waiter_.meanwhile = [this] {
    if (messages_->pending()) messages_->advance();
  };
}

std::shared_ptr<Engine> Engine::open(std::unique_ptr<Group> group) {
  if (!group) return nullptr;
  // Two counts: the inner one, shared with the threads, keeps the engine in memory; the outer one is the users'.
  std::shared_ptr<Engine> inner(new Engine(std::move(group)));
  return std::shared_ptr<Engine>(inner.get(), [inner](Engine* engine) mutable {
    // In a forked child its threads are not here, and its locks and conditions may be in use.
    if (engine->group_->is_of_parent())
      new std::shared_ptr<Engine>(std::move(inner));
    else
      engine->close("the group was dropped");
  });
}

Engine::~Engine() {
  messages_.reset();
  retire(std::move(group_));
}

Code Engine::run(Call& call) {
  if (!is_up(Defence::order)) return collectives_.run(call);
  if (queued_.load(std::memory_order_acquire) == 0 && run_mutex_.try_lock()) {
    Code code = collectives_.run(call);
    run_mutex_.unlock();
    return code;
  }
  call.end_lease();
  if (Failure cause; !group_->usable(cause)) {
    call.failure = cause;
    return cause.code;
  }
  auto ticket = std::make_shared<Ticket>();
  bool may_interrupt = call.may_interrupt, interrupted = false;
  ticket->call = call;
  ticket->call.may_interrupt = false;  // another thread may run it
  ticket->call.lease = nullptr;
  submit(ticket);
  wait(*ticket, 0, may_interrupt, interrupted);
  call.seq = ticket->call.seq;
  call.failure = ticket->call.failure;
  return interrupted ? Code::interrupted : ticket->code;
}

Code Engine::run(Call& call, const std::shared_ptr<Message>& message) {
  if (!group_->usable(call.failure)) return call.failure.code;
  post(call, message);
  const Driver drives(*this);
  return messages_->wait(message, call);
}

bool Engine::post(Call& call, const std::shared_ptr<Message>& message) {
  call.seq = group_->seq();
  messages_->add(message, &call);
  if (messages_->backlog()) {
    call.end_lease();
    start_progress();
  }
  return message->done.load(std::memory_order_acquire);
}

// Nobody here is woken by what comes from outside, and the threads that bring it need processors: rest soon.
int Engine::await_outside(FunctionRef<bool()> ready, FunctionRef<bool()> stop, int64_t timeout_ns) {
  constexpr int64_t kYieldFor = 300'000, kLookEvery = 1'000'000;
  const int64_t begin = now_ns();
  int64_t looked = begin;
  while (!ready()) {
    const int64_t now = now_ns();
    if (now - looked >= kLookEvery || looked == begin) {
      looked = now;
      if (stop() || (python_interrupted && python_interrupted())) return 2;
      if (now - begin > timeout_ns) return 1;
    }
    if (messages_->pending()) messages_->advance();
    if (now - begin < kYieldFor && !has_busy_neighbours()) {
      give_way();
    } else {
      timespec nap{0, 50'000};
      nanosleep(&nap, nullptr);
    }
  }
  return 0;
}

void Engine::submit(const std::shared_ptr<Ticket>& ticket) {
  Failure cause;
  if (!group_->usable(cause)) {
    // One that has begun would still be written to, by whoever moves messages on.
    if (ticket->message && ticket->message->seq) messages_->fail_all(cause);
    return refuse(*ticket, cause);
  }
  if (ticket->message && !ticket->message->seq) post(ticket->call, ticket->message);
  bool refused = false;
  {
    std::lock_guard lock(queue_mutex_);
    refused = closed_;
    if (!refused) {
      if (ticket->message) {
        in_flight_count_.fetch_add(1, std::memory_order_relaxed);
        in_flight_.push_back(ticket);
      } else {
        queue_.push_back(ticket);
        count_queue();
      }
      ensure_progress_thread();
    }
  }
  if (refused) {
    // Nobody else knows the ticket, so nobody else writes to it.
    group_->usable(cause);
    if (ticket->message) {
      messages_->fail_all(cause);
      return end_message(*ticket);
    }
    ticket->call.failure = cause;
    return complete(*ticket, cause.code);
  }
  if (ticket->message && ticket->message->done.load(std::memory_order_acquire)) return end_messages();
  work_.notify_one();
  group_->wake_own_listeners();
}

// Of a ticket that nobody else knows. Takes no lock: in a forked child a thread that is not there may hold it.
void Engine::refuse(Ticket& ticket, const Failure& cause) {
  ticket.call.failure = cause;
  mark_done(ticket, cause.code);
  if (auto callback = std::move(ticket.on_done)) callback();
}

bool Engine::refuse_forked(Ticket& ticket) {
  if (!group_->is_of_parent()) return false;
  Failure cause;
  group_->usable(cause);
  if (!ticket.done.load(std::memory_order_acquire)) refuse(ticket, cause);
  return true;
}

void Engine::complete(Ticket& ticket, Code code) {
  {
    std::lock_guard lock(queue_mutex_);
    mark_done(ticket, code);
  }
  announce(ticket);
}

// Under the queue's mutex, so that a waiter between its check and its sleep cannot miss it.
void Engine::mark_done(Ticket& ticket, Code code) {
  ticket.code = code;
  ticket.done.store(true, std::memory_order_release);  // pairs with the acquire in wait and Pending::done
}

void Engine::when_done(Ticket& ticket, std::function<void()> callback) {
  if (refuse_forked(ticket)) return callback();
  {
    // mark_done holds the mutex too: either it comes later, and announce finds the callback, or we see `done`.
    std::lock_guard lock(queue_mutex_);
    if (!ticket.done.load(std::memory_order_acquire)) {
      ticket.on_done = std::move(callback);
      return;
    }
  }
  callback();
}

void Engine::count_queue() {
  queued_.store(queue_.size(), std::memory_order_release);
  if (GroupRecord* record = group_->recorded().record) record->queued.store(queue_.size(), std::memory_order_relaxed);
}

bool Engine::run_head(bool may_interrupt, const Ticket* awaited, WaitLine* line) {
  if (!run_mutex_.try_lock()) return false;
  std::shared_ptr<Ticket> head;
  {
    std::lock_guard lock(queue_mutex_);
    if (!queue_.empty() && !(awaited && awaited->done.load(std::memory_order_relaxed))) head = queue_.front();
  }
  if (!head) {
    run_mutex_.unlock();
    return false;
  }
  head->call.may_interrupt = may_interrupt;
  if (line) line->end();  // from here on this thread's wait is that of the call it runs
  Code code = collectives_.run(head->call);
  {
    // Done before the next call can begin: whoever has seen a later call end sees this one ended.
    std::lock_guard lock(queue_mutex_);
    queue_.pop_front();
    count_queue();
    mark_done(*head, code);
  }
  run_mutex_.unlock();
  announce(*head);
  return true;
}

bool Engine::wait(Ticket& ticket, int64_t timeout_ns, bool may_interrupt, bool& interrupted) {
  interrupted = false;
  if (refuse_forked(ticket)) return true;
  if (ticket.message && messages_->comes_soon(*ticket.message)) end_messages();
  if (ticket.done.load(std::memory_order_acquire)) return true;
  const int64_t begin = now_ns();
  int64_t last_look = begin;
  WaitLine line(group_->heap().recorder());
  DeadlockFinder finder(*group_);
  MessageSleep until_moved(waiter_);
  std::optional<Driver> drives;
  if (ticket.message) drives.emplace(*this);
  while (!ticket.done.load(std::memory_order_acquire)) {
    const int64_t now = now_ns();
    if (ticket.message) {
      messages_->advance();
      if (ticket.message->done.load(std::memory_order_acquire))
        end_messages();
      else if (now - begin > 200'000 && lacks_progress_thread())
        progress_messages();
    } else if ((timeout_ns == 0 || lacks_progress_thread()) && run_head(may_interrupt, &ticket, &line)) {
      // With a limit the work is left to the progress thread, unless there is none.
      continue;
    }
    if (timeout_ns && now - begin > timeout_ns) return false;
    if (now - last_look > 5'000'000) {
      last_look = now;
      if (may_interrupt && python_interrupted && python_interrupted()) {
        interrupted = true;
        Failure cause;
        fail(cause, Code::interrupted, "rank " + std::to_string(group_->rank()) + " was interrupted", {group_->rank()});
        group_->abort(cause);
        may_interrupt = false;  // the ticket ends soon, with that cause
      }
    }
    if (now - begin < 200'000 && !has_busy_neighbours()) {
      give_way();
      continue;
    }
    if (ticket.done.load(std::memory_order_acquire)) break;
    const bool blocks = timeout_ns == 0 && may_interrupt;
    tell_waiting(line, ticket, now, blocks);
    if (blocks && ticket.message && now - begin > kDeadlockAfter) find_deadlock(line, finder, ticket, now);
    constexpr int64_t longest_sleep = 2'000'000;
    if (ticket.message) {
      until_moved.sleep(longest_sleep);
      continue;
    }
    std::unique_lock lock(queue_mutex_);
    if (!ticket.done.load(std::memory_order_acquire)) changed_.wait_for(lock, std::chrono::nanoseconds(longest_sleep));
  }
  return true;
}

// Says that this thread waits for a ticket that another one carries out.
void Engine::tell_waiting(WaitLine& line, const Ticket& ticket, int64_t now, bool blocks) {
  if (!line.is_due(now)) return;
  const Message* message = ticket.message.get();
  Call call;
  call.verb = ticket.call.verb;
  call.tag = ticket.call.tag;
  call.correspondent = ticket.call.correspondent;
  call.seq = message ? message->seq : group_->seq();
  call.site = message ? message->site : ticket.call.site;
  call.may_interrupt = blocks;
  auto owes = [&](int r) { return message && r != group_->rank() && (message->peer < 0 || message->peer == r); };
  line.tell(waiter_.words_of(call, message ? WaitFor::message : WaitFor::ticket, ticket.submitted_ns, owes), now);
}

// Of a collective the thread that runs it looks; of a message that only this thread waits for, this one.
void Engine::find_deadlock(WaitLine& line, DeadlockFinder& finder, const Ticket& ticket, int64_t now) {
  if (!finder.look(ticket.message->seq, WaitFor::message, now)) return;
  line.prove();
  if (!finder.all_know(now)) return;
  DeadlockFinder::Words words = finder.words();
  Failure cause;
  fail(cause, Code::deadlock, words.text, words.peers);
  cause.verb = ticket.call.verb;
  cause.seq = ticket.message->seq;
  cause.lines = words.lines;
  group_->abort(cause);
  messages_->fail_all(cause);
  end_messages();
}

void Engine::withdraw(Ticket& ticket) {
  if (!ticket.message || group_->is_of_parent()) return;
  messages_->withdraw(*ticket.message);
  end_messages();
}

void Engine::end_messages() {
  // One at a time, so that another thread can end the rest while this one is in a callback.
  for (;;) {
    std::shared_ptr<Ticket> over;
    {
      std::lock_guard lock(queue_mutex_);
      auto found = std::find_if(in_flight_.begin(), in_flight_.end(), [](const std::shared_ptr<Ticket>& t) {
        return t->message->done.load(std::memory_order_acquire);
      });
      if (found == in_flight_.end()) return;
      over = std::move(*found);
      in_flight_.erase(found);
      in_flight_count_.fetch_sub(1, std::memory_order_relaxed);
    }
    end_message(*over);
  }
}

void Engine::end_message(Ticket& ticket) {
  ticket.call.failure = ticket.message->failure;
  ticket.call.failure.verb = ticket.call.verb;
  ticket.call.failure.seq = ticket.message->seq;
  complete(ticket, ticket.message->failure.code);
}

void Engine::close(const std::string& reason, int64_t linger_ns) {
  if (group_->is_of_parent()) return;  // the parent's, and its locks may be held by threads that are not here
  if (!is_up(Defence::endings)) return;
  flush_sends();
  group_->close(reason);
  {
    std::lock_guard lock(queue_mutex_);
    if (closed_) return;
    closed_ = true;
  }
  changed_.notify_all();
  work_.notify_all();
  needed_.notify_all();
  const int64_t until = now_ns() + kAwaitThreads;
  end_pending();
  await_threads(until);
  end_pending();  // what a thread held that is in a callback now
  await_threads(until);
  // Peers usually close at the same time; then the block can go at once.
  for (int64_t until = now_ns() + linger_ns; now_ns() < until && !group_->all_left();) {
    timespec nap{0, 1'000'000};
    nanosleep(&nap, nullptr);
  }
  sweep_retired();
}

}  // namespace unisono
