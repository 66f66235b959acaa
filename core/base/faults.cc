// See faults.h.
#include "base/faults.h"

#if defined(UNISONO_FAULTS)
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <iterator>
#include <mutex>

namespace unisono {
namespace {

constexpr const char* defence_names[] = {
    "deaths",     "departures", "deadlines", "agreement", "endings", "interrupts", "forks",   "strangers", "cycles",
    "withdrawal", "callbacks",  "patience",  "arguments", "order",   "width",      "empties", "rest"};
static_assert(std::size(defence_names) == static_cast<size_t>(Defence::count_));

std::atomic<uint32_t> down{0};         // a bit for each defence that is switched off
std::atomic<bool> is_injected{false};  // stored after the rest, under the mutex
std::mutex& mutex = *new std::mutex;
std::string& where = *new std::string;
std::string& what = *new std::string;
int turns = 0;
bool again = false;

}  // namespace

void reach(const char* point) {
  if (!is_injected.load(std::memory_order_acquire)) return;
  {
    std::lock_guard lock(mutex);
    if (where != point || --turns > 0 || (turns < 0 && !again)) return;
  }
  if (what == "die") kill(getpid(), SIGKILL);
  if (what == "stop") kill(getpid(), SIGSTOP);
  if (what == "delay" || what == "long delay") {
    const timespec some{0, what == "delay" ? 300'000'000 : 800'000'000};
    nanosleep(&some, nullptr);
  }
}

bool is_up(Defence defence) {
  return !(down.load(std::memory_order_relaxed) >> static_cast<int>(defence) & 1);
}

void inject_fault(const std::string& point, const std::string& action, int nth) {
  std::lock_guard lock(mutex);
  where = point;
  what = action;
  turns = nth < 0 ? -nth : nth;
  again = nth < 0;
  is_injected.store(true, std::memory_order_release);
}

bool switch_off(const std::string& defence) {
  for (size_t i = 0; i < std::size(defence_names); i++)
    if (defence == defence_names[i]) return down.fetch_or(1u << i, std::memory_order_relaxed), true;
  return false;
}

}  // namespace unisono
#endif
