// See scratch.h.
#include "memory/scratch.h"

#include <algorithm>

#include "memory/trim.h"

namespace unisono {
namespace {

constexpr size_t kApart = 4;  // as many users have a loan each before one is asked to let go

}  // namespace

// The first loan that its user does not need becomes that of `user`.
std::byte* Scratch::pass_on(User& user) {
  auto found = std::find_if(loans_.begin(), loans_.end(), [](const Loan& loan) { return loan.user->let_go(); });
  if (found == loans_.end()) return nullptr;
  found->user = &user;
  std::rotate(found, found + 1, loans_.end());
  return loans_.back().memory.get();
}

std::byte* Scratch::take(User& user) {
  std::lock_guard lock(mutex_);
  if (loans_.size() >= kApart)
    if (std::byte* base = pass_on(user)) return base;
  Failure none;
  HeapMemory memory = take_memory(heap_, kBytes, none);
  if (!memory) return pass_on(user);
  loans_.push_back({std::move(memory), &user, 0});
  start_trimming();
  return loans_.back().memory.get();
}

HeapMemory Scratch::end(User& user) {
  std::lock_guard lock(mutex_);
  auto found = std::find_if(loans_.begin(), loans_.end(), [&](const Loan& loan) { return loan.user == &user; });
  if (found == loans_.end()) return nullptr;
  HeapMemory memory = std::move(found->memory);
  loans_.erase(found);
  return memory;
}

void Scratch::collect() {
  std::lock_guard lock(mutex_);
  std::erase_if(loans_, [](Loan& loan) {
    const uint64_t before = std::exchange(loan.uses, loan.user->uses());
    return loan.uses == before && loan.user->let_go();
  });
}

bool Scratch::is_lent() {
  std::lock_guard lock(mutex_);
  return !loans_.empty();
}

}  // namespace unisono
