// What a rank knows of another: its heap, its control block, and whether it is still in the group.
//
// A rank says that it leaves in its membership line (control.h), which outlives its block; a rank that dies says
// nothing, so its socket tells (watch.h).
#pragma once

#include <bitset>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "group/control.h"
#include "group/watch.h"
#include "memory/heap.h"

namespace unisono {

struct Peer {  // this rank itself has such an entry too
  std::byte* heap_base = nullptr;
  size_t heap_capacity = 0;
  std::shared_ptr<Mapping> mapping;
  Block block;
  std::shared_ptr<Link> link;  // null for this rank itself, and for ranks that are threads
  pid_t pid = 0;
  bool met = true;  // false: only the link is its own; another's memory stands in for what was never mapped
  std::bitset<1024> processors{};  // it may run on, and how many of them at a time
  double quota = INFINITY;
};

// Whether ranks have fewer processors than they are; and how many are on each, if all have as many, at least 1.
bool are_crowded(const std::vector<Peer>& peers);
size_t ranks_per_processor(const std::vector<Peer>& peers);

enum class PeerState : uint8_t { alive, left, died };

// A rank's line among its heap's memberships, and which of the line's users a group is.
struct Member {
  const Membership* line = nullptr;  // null: unknown, or an impossible one; then only the link tells
  uint64_t use = 0;
};
Member member_of(const Peer& peer);
// With the words of one that left.
PeerState state_of(const Peer& peer, const Member& member, std::string* reason = nullptr);

// A control block of this process, given back to its heap with its owner: no peer may read it then, or read it any
// more.
struct BlockRelease {
  Heap* heap = nullptr;
  void operator()(std::byte* block) const;
};
using BlockMemory = std::unique_ptr<std::byte, BlockRelease>;
BlockMemory make_block(Heap& heap, int size, Failure& failure);
// One that will do for a group of up to `most` ranks.
BlockMemory make_roomy_block(Heap& heap, int most, Failure& failure);
// The membership line that a block of this heap names; null if the place is impossible.
Membership* membership_of(const Block& block, std::byte* heap_base, size_t capacity);
// Tells the peers of a block that its rank has left the group, with its reason.
void leave_block(const Block& block, Heap& heap, const std::string& reason);
// Tells the peers of a block that its rank will not come to their group after all.
void refuse_block(std::byte* block, int rank, const std::string& reason);
// Fills an abort line and then releases its code: from then on the group is broken for whoever looks.
void write_abort(AbortLine& line, const Failure& cause);

}  // namespace unisono
