// How ranks on one host meet: an abstract Unix socket per rank, named through the Store, over which every pair
// exchanges one hello in each direction and the descriptors of their heaps.
//
// Steps: every rank opens a listening socket with a random name and publishes it (Python, through the Store); rank r
// connects to the ranks below it and accepts those above it; both ends check that the other runs under the same user
// (SO_PEERCRED), knows the group's nonce, and speaks the same version; the heaps are mapped and their tokens compared.
// The connection stays open as the death watch. Whoever connects without the nonce is turned away and changes nothing.
//
// Whoever has a rank's hello may believe in the group and read that rank's block. So a rank that gives up says so in
// the block, and keeps the block until all of those have left.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "group/group.h"

namespace unisono {

class Listener {
 public:
  static std::unique_ptr<Listener> open(Failure& failure);
  const std::string& name() const { return name_; }

  // Meets all ranks within `limit_ns`: `names[r]` is rank r's listener. Fills the facts a group agrees on (crowded,
  // kernels). Once per listener, which is closed then.
  std::unique_ptr<Group> join(std::shared_ptr<Heap> heap, GroupFacts facts, const Token& nonce,
                              const std::vector<std::string>& names, int64_t limit_ns, Failure& failure);

 private:
  Listener(Fd socket, std::string name) : socket_(std::move(socket)), name_(std::move(name)) {}
  Fd socket_;
  std::string name_;
};

// A group of some of another's ranks, in the order of `members` (its ranks there). `blocks[i]` is the offset of member
// i's new block in its heap; the caller has exchanged them through the parent.
std::unique_ptr<Group> split(Group& parent, const std::vector<int>& members, const std::vector<size_t>& blocks,
                             GroupFacts facts, Failure& failure);

}  // namespace unisono
