// The progress thread of engine.h: who is it, and what it does.
//
// Steps of its work: wait until there is a call or a message nobody may be waiting for; run the head of the queue, if
// nobody else does; move messages on for some milliseconds, and see to their deadlines and peers. Invariant: at most
// one thread has the role. A callback may wait for a later call. So while calls or messages stand in line, callbacks
// are left to spare threads, and what peers may be waiting for goes on here. With nothing in line the thread gives the
// role up, calls back itself, and takes the role again afterwards if no other thread has it; otherwise it stays a while
// as a spare thread. All of that is guarded by queue_mutex_.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "base/faults.h"
#include "base/turns.h"
#include "engine/engine.h"

namespace unisono {
namespace {

constexpr int64_t kFlushFor = 1'000'000'000;  // how long a closing rank waits for receivers of its short sends
// How long a thread stays without the role: a few of them long, since beside busy neighbours a new thread waits for its
// first turn much longer than one that wakes up.
constexpr size_t kFewThreads = 2;
constexpr std::chrono::milliseconds kSpareThreadLife{100}, kFewThreadsLife{2000};

thread_local Engine* progressing = nullptr;  // the engine whose progress thread this is, if any
thread_local Engine* closing = nullptr;      // the engine that this thread is closing, if any

void nap() {  // between two looks at messages that nobody waits for
  timespec some{0, 50'000};
  nanosleep(&some, nullptr);
}

}  // namespace

// Short sends that found no free entry are over for their callers, so somebody else must see to them.
void Engine::start_progress() {
  std::lock_guard lock(queue_mutex_);
  ensure_progress_thread();
  work_.notify_one();
}

bool Engine::lacks_progress_thread() {
  std::lock_guard lock(queue_mutex_);
  ensure_progress_thread();
  return !has_progress_thread_ && !closed_;
}

// Without a thread (a limit of the system), whoever waits does the work.
void Engine::ensure_progress_thread() {
  if (has_progress_thread_ || closed_) return;
  openings_++;
  has_progress_thread_ = has_spare_threads();
  if (!has_progress_thread_) openings_--;
}

// Enough threads for all openings and callbacks; starts one if there are not.
bool Engine::has_spare_threads() {
  if (openings_ + callbacks_.size() <= spare_threads_) {
    needed_.notify_one();
    return true;
  }
  std::erase_if(threads_, [&](std::thread& thread) {
    if (std::find(ended_.begin(), ended_.end(), thread.get_id()) == ended_.end()) return false;
    thread.join();  // it has let go of the mutex for good
    return true;
  });
  ended_.clear();
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals belong to Python's main thread
  bool started = true;
  try {
    threads_.emplace_back([self = shared_from_this()] { self->progress(); });
    pthread_setname_np(threads_.back().native_handle(), "unisono");
    spare_threads_++;
  } catch (const std::system_error&) {
    started = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

void Engine::announce(Ticket& ticket) {
  changed_.notify_all();
  if (ticket.message) group_->wake_own_listeners();
  auto callback = std::move(ticket.on_done);
  if (!callback) return;
  if (closing == this && is_up(Defence::callbacks)) {
    // It may sleep for longer than closing may take.
    std::lock_guard lock(queue_mutex_);
    if (leave_to_spare_thread(callback)) return;
  }
  if (progressing != this) {
    callback();
    return;
  }
  {
    std::lock_guard lock(queue_mutex_);
    if (!closed_ && (!queue_.empty() || !in_flight_.empty() || messages_->backlog()))
      if (leave_to_spare_thread(callback)) return;
    progressing = nullptr;
    has_progress_thread_ = false;
  }
  callback();
  std::lock_guard lock(queue_mutex_);
  if (has_progress_thread_) return;  // another thread has taken over; this one becomes a spare one
  has_progress_thread_ = true;
  progressing = this;
}

bool Engine::leave_to_spare_thread(std::function<void()>& callback) {
  callbacks_.push_back(std::move(callback));
  if (has_spare_threads()) return true;
  callback = std::move(callbacks_.back());
  callbacks_.pop_back();
  return false;
}

bool Engine::become_progress_thread() {
  std::unique_lock lock(queue_mutex_);
  for (;;) {
    needed_.wait_for(lock, spare_threads_ > kFewThreads ? kSpareThreadLife : kFewThreadsLife,
                     [&] { return closed_ || openings_ || !callbacks_.empty(); });
    spare_threads_--;
    if (!callbacks_.empty()) {
      auto callback = std::move(callbacks_.front());
      callbacks_.pop_front();
      lock.unlock();
      callback();
      callback = nullptr;  // without the lock: it may hold the last reference to something
      lock.lock();
      spare_threads_++;
      continue;
    }
    if (!openings_) return false;
    openings_--;
    progressing = this;
    return true;
  }
}

void Engine::progress() {  // a new thread begins as a spare one, and is counted as such already
  ShortTurns().keep();
  bool more = become_progress_thread();
  while (more) {
    while (more && progressing == this) more = progress_once();
    if (!more) break;
    {
      std::lock_guard lock(queue_mutex_);
      spare_threads_++;
    }
    more = become_progress_thread();
  }
  std::lock_guard lock(queue_mutex_);
  ended_.push_back(std::this_thread::get_id());
  changed_.notify_all();
}

bool Engine::progress_once() {
  bool messages;
  {
    std::unique_lock lock(queue_mutex_);
    work_.wait(lock, [&] { return closed_ || !queue_.empty() || !in_flight_.empty() || messages_->backlog(); });
    if (closed_ && queue_.empty() && in_flight_.empty()) return false;
    messages = !in_flight_.empty() || messages_->backlog();
  }
  if (queued_.load(std::memory_order_acquire)) {
    if (!run_head(false)) {
      // Somebody else runs the head; look again when it is done.
      std::unique_lock lock(queue_mutex_);
      changed_.wait_for(lock, std::chrono::milliseconds(1));
    }
  }
  if (messages && progressing == this) progress_messages();
  return true;
}

// Deadline and failure of messages that nobody waits for: those of the one that must be done first.
Call Engine::watcher_of(const std::vector<std::shared_ptr<Ticket>>& messages, Ticket*& first) const {
  Call watcher;
  watcher.verb = Verb::recv;
  watcher.seq = group_->seq();
  watcher.deadline_ns = INT64_MAX;
  for (const auto& t : messages) {
    const int64_t deadline = t->submitted_ns + (t->call.timeout_ns ? t->call.timeout_ns : group_->facts().timeout_ns);
    if (deadline >= watcher.deadline_ns) continue;
    watcher.deadline_ns = deadline;
    watcher.timeout_ns = t->call.timeout_ns;
    watcher.verb = t->call.verb;
    watcher.tag = t->call.tag;
    watcher.correspondent = t->call.correspondent;
    watcher.warn_ns = t->call.warn_ns;
    watcher.site = t->message->site;
    first = t.get();
  }
  return watcher;
}

// Moves them on for some milliseconds, and sees to their deadlines and peers.
void Engine::progress_messages() {
  size_t before = in_flight_count_.load(std::memory_order_relaxed);
  messages_->advance();
  end_messages();
  if (in_flight_count_.load(std::memory_order_relaxed) != before) return;
  std::vector<std::shared_ptr<Ticket>> pending;
  {
    std::lock_guard lock(queue_mutex_);
    pending = in_flight_;
  }
  Ticket* first = nullptr;
  Call watcher = watcher_of(pending, first);
  auto owes = [&](int r) {
    messages_->settle();
    return std::any_of(pending.begin(), pending.end(), [&](const auto& t) { return messages_->needs(*t->message, r); });
  };
  auto is_done = [](const auto& t) { return t->message->done.load(std::memory_order_acquire); };
  const int64_t until = now_ns() + 10'000'000;
  auto is_over = [&] {
    messages_->advance();
    return now_ns() > until || queued_.load(std::memory_order_acquire) ||
           (pending.empty() && messages_->backlog() == 0) || std::any_of(pending.begin(), pending.end(), is_done);
  };
  auto ready = [&] {
    // Whoever waits for a message moves it. This thread is for those nobody waits for, and keeps out of the way: as
    // long as it listens, too, each message would cost a wake-up.
    while (drivers_.load(std::memory_order_relaxed)) {
      if (is_over()) return true;
      nap();
    }
    return is_over();
  };
  Code code = waiter_.await_until(watcher, ready, owes, true);
  if (code == Code::ok && now_ns() > until) code = waiter_.health(watcher, owes);
  if (first) first->call.warn_ns = watcher.warn_ns;
  if (code != Code::ok) messages_->fail_all(watcher.failure);
  end_messages();
}

// Callers count on short sends from the moment those return.
void Engine::flush_sends() {
  for (int64_t until = now_ns() + kFlushFor; messages_->backlog() && now_ns() < until && !group_->stopped(); nap())
    messages_->advance();
}

void Engine::end_pending() {
  Engine* before = std::exchange(closing, this);
  Failure cause;
  group_->usable(cause);
  messages_->fail_all(cause);
  end_messages();
  while (run_head(false)) {  // each ends with the cause above
  }
  closing = before;
}

// A thread that is in a callback may stay there for long, and may be this one: it is left alone, and holds the engine.
void Engine::await_threads(int64_t until_ns) {
  std::unique_lock lock(queue_mutex_);
  auto is_over = [&](const std::thread& t) {
    return std::find(ended_.begin(), ended_.end(), t.get_id()) != ended_.end();
  };
  changed_.wait_for(lock, std::chrono::nanoseconds(until_ns - now_ns()), [&] {
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

}  // namespace unisono
