// What a fork leaves of this process's state in the child.
//
// The child has one thread. A mutex that another thread held stays locked there for ever, and what it guards may be
// half changed. So every mutex of process-wide state is a ForkMutex: fork first takes them all, and parent and child
// give them back. A group's own locks are left out: no child touches a group of its parent, see fork_generation.
#pragma once

#include <mutex>

namespace unisono {

// Who holds several of these mutexes has taken them in this order, and so does fork.
enum class ForkOrder { process_heap, retired, heaps, region, links, warnings, count_ };

// Only for static objects. Its steps are called with the mutex held, and with those before it in the order; first
// `before`, each after its mutex was taken, then one of the others, each before its mutex is given back.
class ForkMutex : public std::mutex {
 public:
  using Step = void (*)();
  explicit ForkMutex(ForkOrder order, Step in_child = nullptr, Step before = nullptr, Step in_parent = nullptr);
};

// Counts the forks between the first process and this one; what was made under another count belongs to a parent.
int fork_generation();

}  // namespace unisono
