// See engine.h.
#include "engine.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <system_error>

#include "wait.h"

namespace unisono {
namespace {

// A closed group's block stays until every peer has left too: a slower one may still read its last slot.
std::vector<std::unique_ptr<Group>>& retired = *new std::vector<std::unique_ptr<Group>>;  // never destroyed
ForkMutex retired_mutex(ForkOrder::retired, [] { retired.clear(); });

bool peers_are_done(Group& g) {
  for (int r = 0; r < g.size(); r++)
    if (r != g.rank() && g.peer(r).link && g.peer(r).link->look(g.facts().id) == Link::State::alive) return false;
  return true;
}

constexpr int64_t kFlush = 1'000'000'000;  // how long a closing rank waits for receivers of its short sends

void nap() {  // between two looks at messages that nobody waits for
  timespec some{0, 50'000};
  nanosleep(&some, nullptr);
}

constexpr std::chrono::milliseconds kSpareLife{100};  // how long a thread without the post stays

thread_local Engine* serving = nullptr;  // the engine whose post this thread has, if it is a progress thread

}  // namespace

void sweep_retired_blocks() {
  std::vector<std::unique_ptr<Group>> over;
  {
    std::lock_guard lock(retired_mutex);
    for (auto& group : retired)
      if (peers_are_done(*group)) over.push_back(std::move(group));
    std::erase(retired, nullptr);
  }
  for (auto& group : over) group->release_block();
}

Engine::Engine(std::unique_ptr<Group> group) : group_(std::move(group)), post_(std::make_unique<Post>(*group_)) {
  group_->meanwhile = [this] {
    if (post_->pending()) post_->advance();
  };
}

Engine::~Engine() {
  close("the group was dropped");
  post_.reset();
  if (peers_are_done(*group_)) {
    group_->release_block();
  } else {
    std::lock_guard lock(retired_mutex);
    retired.push_back(std::move(group_));
  }
}

void Engine::drop(Engine* engine) {
  // In a forked child nothing of it may be touched: its thread is not here, its locks and conditions may be in use.
  if (engine->generation_ == fork_generation()) delete engine;
}

Code Engine::run(Call& call) {
  Group& g = *group_;
  if (queued_.load(std::memory_order_acquire) == 0 && g.run_mutex.try_lock()) {
    Code code = g.run(call);
    g.run_mutex.unlock();
    return code;
  }
  if (Failure cause; !g.usable(cause)) {
    call.failure = cause;
    return cause.code;
  }
  auto ticket = std::make_shared<Ticket>();
  bool may_interrupt = call.may_interrupt, interrupted = false;
  ticket->call = call;
  ticket->call.may_interrupt = false;  // another thread may run it
  submit(ticket);
  wait(*ticket, 0, may_interrupt, interrupted);
  call.seq = ticket->call.seq;
  call.failure = ticket->call.failure;
  return interrupted ? Code::interrupted : ticket->code;
}

Code Engine::run(Call& call, std::shared_ptr<Message> message) {
  if (!group_->usable(call.failure)) return call.failure.code;
  call.seq = group_->seq();
  post_->add(message);
  if (post_->owed()) deliver();
  return post_->wait(message, call);
}

// Short sends that found no letter are over for their callers, so somebody else must see to them.
void Engine::deliver() {
  std::lock_guard lock(queue_mutex_);
  man_post();
  work_.notify_one();
}

void Engine::submit(std::shared_ptr<Ticket> ticket) {
  Failure cause;
  if (!group_->usable(cause)) {
    ticket->call.failure = cause;
    finish(*ticket, cause.code);
    return;
  }
  if (ticket->message) {
    in_flight_.fetch_add(1, std::memory_order_relaxed);
    post_->add(ticket->message);
    if (post_->owed()) deliver();
    if (ticket->message->finished.load(std::memory_order_acquire)) return end_message(*ticket);
  }
  {
    std::lock_guard lock(queue_mutex_);
    if (ticket->message) {
      messages_.push_back(ticket);
    } else if (!closed_) {
      queue_.push_back(ticket);
      queued_.store(queue_.size(), std::memory_order_release);
    }
    man_post();
  }
  if (!group_->usable(cause)) {
    // Closed or broken meanwhile, perhaps after the last look at what is pending.
    post_->fail_all(cause);
    end_pending();
    if (!ticket->message && closed_) {
      ticket->call.failure = cause;
      if (!ticket->done.load(std::memory_order_acquire)) finish(*ticket, cause.code);
    }
  }
  work_.notify_one();
}

// Without a thread (a limit of the system), whoever waits does the work.
void Engine::man_post() {
  if (manned_ || closed_) return;
  if (openings_ < spare_) {
    manned_ = true;
    openings_++;
    needed_.notify_one();
    return;
  }
  std::erase_if(threads_, [&](std::thread& thread) {
    if (std::find(finished_.begin(), finished_.end(), thread.get_id()) == finished_.end()) return false;
    thread.join();  // it has let go of the mutex for good
    return true;
  });
  finished_.clear();
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals belong to Python's main thread
  try {
    threads_.emplace_back([this] { progress(); });
    pthread_setname_np(threads_.back().native_handle(), "unisono");
    manned_ = true;
  } catch (const std::system_error&) {
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Engine::finish(Ticket& ticket, Code code) {
  {
    std::lock_guard lock(queue_mutex_);
    mark_done(ticket, code);
  }
  announce(ticket);
}

// Under the queue's mutex, so that a waiter between its check and its sleep cannot miss it.
void Engine::mark_done(Ticket& ticket, Code code) {
  ticket.code = code;
  ticket.done.store(true, std::memory_order_release);  // pairs with the acquire in wait and is_completed
}

void Engine::announce(Ticket& ticket) {
  changed_.notify_all();
  auto callback = std::move(ticket.on_done);
  if (!callback) return;
  if (serving != this) {
    callback();
    return;
  }
  {
    // The callback may wait for a later call, so somebody else must be able to run it.
    std::lock_guard lock(queue_mutex_);
    serving = nullptr;
    manned_ = false;
    if (!queue_.empty() || !messages_.empty()) man_post();
  }
  callback();
  std::lock_guard lock(queue_mutex_);
  if (manned_) return;  // somebody else has the post now; progress() becomes a spare thread
  manned_ = true;
  serving = this;
}

void Engine::when_done(Ticket& ticket, std::function<void()> callback) {
  {
    std::lock_guard lock(
        queue_mutex_);  // mark_done holds it too: either it comes later and announce finds the callback
    if (!ticket.done.load(std::memory_order_acquire)) {
      ticket.on_done = std::move(callback);
      return;
    }
  }
  callback();
}

bool Engine::run_head(bool may_interrupt) {
  if (!group_->run_mutex.try_lock()) return false;
  std::shared_ptr<Ticket> head;
  {
    std::lock_guard lock(queue_mutex_);
    if (!queue_.empty()) head = queue_.front();
  }
  if (!head) {
    group_->run_mutex.unlock();
    return false;
  }
  head->call.may_interrupt = may_interrupt;
  Code code = group_->run(head->call);
  {
    // Done before the next call can begin: whoever has seen a later call end sees this one ended.
    std::lock_guard lock(queue_mutex_);
    queue_.pop_front();
    queued_.store(queue_.size(), std::memory_order_release);
    mark_done(*head, code);
  }
  group_->run_mutex.unlock();
  announce(*head);
  return true;
}

bool Engine::wait(Ticket& ticket, int64_t timeout_ns, bool may_interrupt, bool& interrupted) {
  const int64_t begin = now_ns();
  int64_t last_look = begin;
  interrupted = false;
  while (!ticket.done.load(std::memory_order_acquire)) {
    if (ticket.message) {
      post_->advance();
      if (ticket.message->finished.load(std::memory_order_acquire)) end_pending();
    } else if (timeout_ns == 0 && run_head(may_interrupt)) {
      continue;
    }
    int64_t now = now_ns();
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
    if (now - begin < 200'000) {
      sched_yield();
      continue;
    }
    std::unique_lock lock(queue_mutex_);
    if (!ticket.done.load(std::memory_order_acquire))
      changed_.wait_for(lock, std::chrono::microseconds(ticket.message ? 100 : 2000));
  }
  return true;
}

void Engine::end_pending() {
  // Messages: finished ones, or all of them once the group is of no use. One at a time, so that another thread can end
  // the rest while this one is in a callback.
  for (;;) {
    std::shared_ptr<Ticket> over;
    {
      std::lock_guard lock(queue_mutex_);
      auto found = std::find_if(messages_.begin(), messages_.end(), [](const std::shared_ptr<Ticket>& t) {
        return t->message->finished.load(std::memory_order_acquire);
      });
      if (found == messages_.end()) return;
      over = std::move(*found);
      messages_.erase(found);
    }
    end_message(*over);
  }
}

void Engine::end_message(Ticket& ticket) {
  in_flight_.fetch_sub(1, std::memory_order_relaxed);
  ticket.call.failure = ticket.message->failure;
  ticket.call.failure.verb = ticket.call.verb;
  ticket.call.failure.seq = ticket.message->seq;
  finish(ticket, ticket.message->failure.code);
}

bool Engine::take_post() {
  std::unique_lock lock(queue_mutex_);
  spare_++;
  needed_.wait_for(lock, kSpareLife, [&] { return stop_.load() || openings_; });
  spare_--;
  if (!openings_) {
    finished_.push_back(std::this_thread::get_id());
    return false;
  }
  openings_--;
  serving = this;
  return true;
}

void Engine::progress() {
  serving = this;  // a new thread begins with the post
  do {
    while (serving == this)
      if (!progress_once()) return;
  } while (take_post());
}

bool Engine::progress_once() {
  bool messages;
  {
    std::unique_lock lock(queue_mutex_);
    work_.wait(lock, [&] { return stop_.load() || !queue_.empty() || !messages_.empty() || post_->owed(); });
    if (stop_.load() && queue_.empty() && messages_.empty()) return false;
    messages = !messages_.empty() || post_->owed();
  }
  if (queued_.load(std::memory_order_acquire)) {
    if (!run_head(false)) {
      // Somebody else runs the head; look again when it is done.
      std::unique_lock lock(queue_mutex_);
      changed_.wait_for(lock, std::chrono::milliseconds(1));
    }
  }
  if (messages && serving == this) {
    Call watcher;  // deadline and failure of the messages nobody waits for
    watcher.verb = Verb::recv;
    size_t before = in_flight_.load(std::memory_order_relaxed);
    post_->advance();
    end_pending();
    if (in_flight_.load(std::memory_order_relaxed) == before) {
      std::vector<std::shared_ptr<Ticket>> pending;
      {
        std::lock_guard lock(queue_mutex_);
        pending = messages_;
      }
      watcher.seq = group_->seq();
      int64_t limit = INT64_MAX;
      for (auto& t : pending) {
        int64_t& deadline = t->call.deadline_ns;
        if (deadline == 0) deadline = now_ns() + (t->call.timeout_ns ? t->call.timeout_ns : group_->facts().timeout_ns);
        if (deadline < limit) {
          limit = deadline;
          watcher.timeout_ns = t->call.timeout_ns;
          watcher.verb = t->call.verb;
        }
      }
      watcher.deadline_ns = limit;
      auto owes = [&](int r) {
        return std::any_of(pending.begin(), pending.end(), [&](const auto& t) {
          return !t->message->finished.load(std::memory_order_acquire) &&
                 (t->message->peer < 0 || t->message->peer == r);
        });
      };
      int64_t until = now_ns() + 10'000'000;
      Code code = group_->await_until(
          watcher,
          [&] {
            // Whoever waits for a message moves it; this thread is for those nobody waits for, and keeps out of the
            // way.
            nap();
            post_->advance();
            return now_ns() > until || queued_.load() || (pending.empty() && post_->owed() == 0) ||
                   std::any_of(pending.begin(), pending.end(),
                               [](const auto& t) { return t->message->finished.load(std::memory_order_acquire); });
          },
          owes);
      if (code == Code::ok && now_ns() > until) code = group_->health(watcher, owes);
      if (code != Code::ok) post_->fail_all(watcher.failure);
      end_pending();
    }
  }
  return true;
}

void Engine::close(const std::string& reason, int64_t linger_ns) {
  if (generation_ != fork_generation()) return;  // the parent's, and its locks may be held by threads that are not here
  // Callers count on short sends from the moment those return.
  size_t owed = post_->owed();
  for (int64_t until = now_ns() + kFlush; owed && now_ns() < until && !group_->stopped(); nap()) {
    post_->advance();
    if (post_->owed() < owed) until = now_ns() + kFlush;  // somebody takes them
    owed = post_->owed();
  }
  group_->close(reason);
  {
    std::lock_guard lock(queue_mutex_);
    if (closed_) return;
    closed_ = true;
    stop_.store(true);
  }
  changed_.notify_all();
  work_.notify_all();
  needed_.notify_all();
  Failure cause;
  group_->usable(cause);
  post_->fail_all(cause);
  for (auto& thread : threads_) {  // none is added once closed
    // A callback of a progress thread may be what closes the group.
    if (thread.get_id() == std::this_thread::get_id())
      thread.detach();
    else
      thread.join();
  }
  while (run_head(false)) {  // each ends with the cause above
  }
  end_pending();
  // Peers usually close at the same time; then the block can go at once.
  for (int64_t until = now_ns() + linger_ns; now_ns() < until && !peers_are_done(*group_);) {
    timespec nap{0, 1'000'000};
    nanosleep(&nap, nullptr);
  }
  sweep_retired_blocks();
}

}  // namespace unisono
