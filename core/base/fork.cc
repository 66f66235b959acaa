// See fork.h. One registration with pthread_atfork, made when the program or the module is loaded: a thread that is
// inside of its first lock while another forks must find it there.
#include "base/fork.h"

#include <pthread.h>

#include <array>
#include <atomic>

namespace unisono {
namespace {

using Step = ForkMutex::Step;

struct Entry {
  ForkMutex* mutex;
  Step before, in_parent, in_child;
};
constinit std::array<Entry, static_cast<size_t>(ForkOrder::count_)> entries{};  // each written once, while loading
// Raised in a child while it has one thread only; read by any thread, relaxed: a thread made later sees what was
// before.
constinit std::atomic<int> generation{0};

void before_fork() {
  for (Entry& e : entries) {
    if (e.mutex) e.mutex->lock();
    if (e.before) e.before();
  }
}

void give_back(Step Entry::* step) {
  for (size_t i = entries.size(); i-- > 0;) {
    if (Step done = entries[i].*step) done();
    if (entries[i].mutex) entries[i].mutex->unlock();
  }
}

void after_in_parent() {
  give_back(&Entry::in_parent);
}

void after_in_child() {
  generation.fetch_add(1, std::memory_order_relaxed);  // the child has one thread
  give_back(&Entry::in_child);
}

}  // namespace

ForkMutex::ForkMutex(ForkOrder order, Step in_child, Step before, Step in_parent) {
  static const int once = pthread_atfork(before_fork, after_in_parent, after_in_child);
  (void)once;
  entries[static_cast<size_t>(order)] = {this, before, in_parent, in_child};
}

int fork_generation() {
  return generation.load(std::memory_order_relaxed);
}

}  // namespace unisono
