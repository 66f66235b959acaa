// See retire.h.
#include "group/retire.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "base/fork.h"
#include "base/thread.h"

namespace unisono {
namespace {

auto* retired = new std::vector<std::unique_ptr<Group>>;  // never destroyed: the thread may outlive static objects
bool sweeping = false;                                    // there is a thread
ForkMutex mutex(ForkOrder::retired, [] {
  retired = new std::vector<std::unique_ptr<Group>>;  // the parent's groups are not touched
  sweeping = false;
});

void sweep_until_empty() {
  using namespace std::chrono_literals;
  for (auto nap = 2ms;; nap = std::min(nap * 2, 100ms)) {
    std::this_thread::sleep_for(nap);
    sweep_retired();
    std::lock_guard lock(mutex);
    if (!retired->empty()) continue;
    sweeping = false;
    return;
  }
}

void start_sweeping() {
  // If there is no thread to be had, the next group that comes or goes looks.
  sweeping = sweeping || start_detached("unisono-sweep", sweep_until_empty);
}

}  // namespace

void sweep_retired() {
  std::vector<std::unique_ptr<Group>> over;
  {
    std::lock_guard lock(mutex);
    for (auto& group : *retired)
      if (group->all_left()) over.push_back(std::move(group));
    std::erase(*retired, nullptr);
  }
}  // destroyed here, without the lock

void retire(std::unique_ptr<Group> group) {
  if (group->all_left()) return;
  std::lock_guard lock(mutex);
  retired->push_back(std::move(group));
  start_sweeping();
}

}  // namespace unisono
