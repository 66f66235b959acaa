// Large pieces of a heap that are lent: the rings of collectives (group/ring.h) and of messages (verbs/arena.h).
//
// A user keeps its loan while it is in use. When several are out, the next one who asks gets that of a user who does
// not need it just now; a loan that nobody has used for a while goes back to the heap. So a few groups in use have a
// piece each, as if it were their own, and idle ones have none, however many there are.
// Memory order: `mutex_` guards the loans. It is held while users are asked to let go, so they may not wait for
// anybody who may want it.
#pragma once

#include <mutex>
#include <vector>

#include "memory/heap.h"

namespace unisono {

class Scratch {
 public:
  static constexpr size_t kBytes = 4 << 20;

  class User {
   public:
    virtual uint64_t uses() const = 0;  // differs after every use
    // True: neither this process nor a peer reads or writes the loan any more, and the user has forgotten it. Called
    // by any thread.
    virtual bool let_go() = 0;

   protected:
    ~User() = default;
  };

  explicit Scratch(Heap& heap) : heap_(heap) {}
  // One loan for each user. Null: there is no memory.
  std::byte* take(User& user);
  // Ends the user's loan, if it has one; from then on it is not asked any more. The memory goes with the result.
  HeapMemory end(User& user);
  // Takes back what has not been used since the last call.
  void collect();
  bool is_lent();

 private:
  struct Loan {
    HeapMemory memory;
    User* user;
    uint64_t uses;  // when we last looked
  };
  std::byte* pass_on(User& user);

  Heap& heap_;
  std::mutex mutex_;
  std::vector<Loan> loans_;  // the one that was taken first comes first
};

}  // namespace unisono
