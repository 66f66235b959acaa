// See engine.h.
#include "engine/engine.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <system_error>

#include "group/retire.h"

namespace unisono {
namespace {

constexpr int64_t kFlush = 1'000'000'000;            // how long a closing rank waits for receivers of its short sends
constexpr std::chrono::milliseconds kFarewell{500};  // and for its own threads

void nap() {  // between two looks at messages that nobody waits for
  timespec some{0, 50'000};
  nanosleep(&some, nullptr);
}

constexpr std::chrono::milliseconds kSpareLife{100};  // how long a thread without the post stays

thread_local Engine* serving = nullptr;  // the engine whose post this thread has, if it is a progress thread

}  // namespace

Engine::Engine(std::unique_ptr<Group> group)
    : group_(std::move(group)),
      waiter_(*group_),
      collectives_(*group_, waiter_),
      post_(std::make_unique<Post>(*group_, waiter_)) {
  waiter_.meanwhile = [this] {
    if (post_->pending()) post_->advance();
  };
}

std::shared_ptr<Engine> Engine::open(std::unique_ptr<Group> group) {
  if (!group) return nullptr;
  // Two counts: the inner one, shared with the threads, keeps the engine in memory; the outer one is the users'.
  std::shared_ptr<Engine> inner(new Engine(std::move(group)));
  return std::shared_ptr<Engine>(inner.get(), [inner](Engine* engine) mutable {
    // In a forked child its threads are not here, and its locks and conditions may be in use.
    if (engine->generation_ != fork_generation())
      new std::shared_ptr<Engine>(std::move(inner));
    else
      engine->close("the group was dropped");
  });
}

Engine::~Engine() {
  post_.reset();
  retire(std::move(group_));
}

Code Engine::run(Call& call) {
  if (queued_.load(std::memory_order_acquire) == 0 && run_mutex_.try_lock()) {
    Code code = collectives_.run(call);
    run_mutex_.unlock();
    return code;
  }
  if (Failure cause; !group_->usable(cause)) {
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
  if (!group_->usable(cause)) return refuse(*ticket, cause);
  if (ticket->message) {
    post_->add(ticket->message);
    if (post_->owed()) deliver();
  }
  bool refused = false;
  {
    std::lock_guard lock(queue_mutex_);
    refused = closed_;
    if (!refused) {
      if (ticket->message) {
        in_flight_.fetch_add(1, std::memory_order_relaxed);
        messages_.push_back(ticket);
      } else {
        queue_.push_back(ticket);
        queued_.store(queue_.size(), std::memory_order_release);
      }
      man_post();
    }
  }
  if (refused) {
    // Nobody else knows the ticket, so nobody else writes to it.
    group_->usable(cause);
    if (ticket->message) {
      post_->fail_all(cause);
      return end_message(*ticket);
    }
    ticket->call.failure = cause;
    return finish(*ticket, cause.code);
  }
  if (ticket->message && ticket->message->finished.load(std::memory_order_acquire)) return end_messages();
  work_.notify_one();
}

// Of a ticket that nobody else knows. Takes no lock: in a forked child a thread that is not there may hold it.
void Engine::refuse(Ticket& ticket, const Failure& cause) {
  ticket.call.failure = cause;
  mark_done(ticket, cause.code);
  if (auto callback = std::move(ticket.on_done)) callback();
}

bool Engine::refuse_forked(Ticket& ticket) {
  if (generation_ == fork_generation()) return false;
  Failure cause;
  group_->usable(cause);
  if (!ticket.done.load(std::memory_order_acquire)) refuse(ticket, cause);
  return true;
}

bool Engine::unmanned() {
  std::lock_guard lock(queue_mutex_);
  man_post();
  return !manned_ && !closed_;
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
    threads_.emplace_back([self = shared_from_this()] { self->progress(); });
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
  if (refuse_forked(ticket)) return callback();
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

bool Engine::run_head(bool may_interrupt, const Ticket* awaited) {
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
  Code code = collectives_.run(head->call);
  {
    // Done before the next call can begin: whoever has seen a later call end sees this one ended.
    std::lock_guard lock(queue_mutex_);
    queue_.pop_front();
    queued_.store(queue_.size(), std::memory_order_release);
    mark_done(*head, code);
  }
  run_mutex_.unlock();
  announce(*head);
  return true;
}

bool Engine::wait(Ticket& ticket, int64_t timeout_ns, bool may_interrupt, bool& interrupted) {
  const int64_t begin = now_ns();
  int64_t last_look = begin;
  interrupted = false;
  if (refuse_forked(ticket)) return true;
  while (!ticket.done.load(std::memory_order_acquire)) {
    if (ticket.message) {
      post_->advance();
      if (ticket.message->finished.load(std::memory_order_acquire))
        end_messages();
      else if (now_ns() - begin > 200'000 && unmanned())
        tend_messages();
    } else if ((timeout_ns == 0 || unmanned()) && run_head(may_interrupt, &ticket)) {
      // With a limit the work is left to the progress thread, unless there is none.
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
    if (now - begin < 200'000 && !has_busy_neighbours()) {
      give_way();
      continue;
    }
    std::unique_lock lock(queue_mutex_);
    if (!ticket.done.load(std::memory_order_acquire))
      changed_.wait_for(lock, std::chrono::microseconds(ticket.message ? 100 : 2000));
  }
  return true;
}

void Engine::end_messages() {
  // One at a time, so that another thread can end the rest while this one is in a callback.
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
      in_flight_.fetch_sub(1, std::memory_order_relaxed);
    }
    end_message(*over);
  }
}

void Engine::end_message(Ticket& ticket) {
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
  if (!openings_) return false;
  openings_--;
  serving = this;
  return true;
}

void Engine::progress() {
  serving = this;  // a new thread begins with the post
  bool more = true;
  while (more) {
    while (more && serving == this) more = progress_once();
    more = more && take_post();
  }
  std::lock_guard lock(queue_mutex_);
  finished_.push_back(std::this_thread::get_id());
  changed_.notify_all();
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
  if (messages && serving == this) tend_messages();
  return true;
}

void Engine::tend_messages() {
  size_t before = in_flight_.load(std::memory_order_relaxed);
  post_->advance();
  end_messages();
  if (in_flight_.load(std::memory_order_relaxed) != before) return;
  std::vector<std::shared_ptr<Ticket>> pending;
  {
    std::lock_guard lock(queue_mutex_);
    pending = messages_;
  }
  Call watcher;  // deadline and failure of the messages nobody waits for
  watcher.verb = Verb::recv;
  watcher.seq = group_->seq();
  int64_t limit = INT64_MAX;
  for (auto& t : pending) {
    const int64_t deadline = t->submitted_ns + (t->call.timeout_ns ? t->call.timeout_ns : group_->facts().timeout_ns);
    if (deadline >= limit) continue;
    limit = deadline;
    watcher.timeout_ns = t->call.timeout_ns;
    watcher.verb = t->call.verb;
    watcher.tag = t->call.tag;
    watcher.correspondent = t->call.correspondent;
  }
  watcher.deadline_ns = limit;
  auto owes = [&](int r) {
    return std::any_of(pending.begin(), pending.end(), [&](const auto& t) {
      return !t->message->finished.load(std::memory_order_acquire) && (t->message->peer < 0 || t->message->peer == r);
    });
  };
  int64_t until = now_ns() + 10'000'000;
  Code code = waiter_.await_until(
      watcher,
      [&] {
        // Whoever waits for a message moves it; this thread is for those nobody waits for, and keeps out of the way.
        nap();
        post_->advance();
        return now_ns() > until || queued_.load() || (pending.empty() && post_->owed() == 0) ||
               std::any_of(pending.begin(), pending.end(),
                           [](const auto& t) { return t->message->finished.load(std::memory_order_acquire); });
      },
      owes);
  if (code == Code::ok && now_ns() > until) code = waiter_.health(watcher, owes);
  if (code != Code::ok) post_->fail_all(watcher.failure);
  end_messages();
}

// Callers count on short sends from the moment those return.
void Engine::flush() {
  for (int64_t until = now_ns() + kFlush; post_->owed() && now_ns() < until && !group_->stopped(); nap())
    post_->advance();
}

// A thread that is in a callback may stay there for long, and may be this one: it is left alone, and holds the engine.
void Engine::await_threads() {
  std::unique_lock lock(queue_mutex_);
  auto is_over = [&](const std::thread& t) {
    return std::find(finished_.begin(), finished_.end(), t.get_id()) != finished_.end();
  };
  changed_.wait_for(lock, kFarewell, [&] {
    return std::all_of(threads_.begin(), threads_.end(),
                       [&](const std::thread& t) { return is_over(t) || t.get_id() == std::this_thread::get_id(); });
  });
  std::vector<std::thread> threads = std::move(threads_);
  threads_.clear();
  std::vector<bool> over;
  for (std::thread& t : threads) over.push_back(is_over(t));
  lock.unlock();
  for (size_t i = 0; i < threads.size(); i++) over[i] ? threads[i].join() : threads[i].detach();
}

void Engine::close(const std::string& reason, int64_t linger_ns) {
  if (generation_ != fork_generation()) return;  // the parent's, and its locks may be held by threads that are not here
  flush();
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
  end_messages();
  while (run_head(false)) {  // each ends with the cause above
  }
  await_threads();
  while (run_head(false)) {  // what a thread held that is in a callback now
  }
  // Peers usually close at the same time; then the block can go at once.
  for (int64_t until = now_ns() + linger_ns; now_ns() < until && !group_->all_left();) {
    timespec nap{0, 1'000'000};
    nanosleep(&nap, nullptr);
  }
  sweep_retired();
}

}  // namespace unisono
