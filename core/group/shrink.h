// Life after a death: the ranks of a broken group that are left agree on who they are, and make a smaller group.
//
// Vocabulary. Every survivor writes an *offer* into its block: it takes part, here is its control block for the new
// group. One of them writes the *verdict*: who is a member. Both lie in the blocks of the old group, which stay mapped
// when their owner dies, so no store, no server and no new connection is needed.
//
// Steps of `agree`, the same on every survivor: give the group up, so that nobody waits in it any more; write the
// offer; then go through the ranks from 0 up. If it is this rank's own turn: wait until every other rank has made its
// offer or is gone, and write the verdict. If it is another's: wait for its verdict and take it, or go on once that
// rank is gone without one. Why all agree: a hang-up comes after a process's last store, and a rank that leaves says so
// after it. So "rank r is gone and has no verdict" stays true for ever, and all survivors stop at the same first rank
// that has one. A member may die after the verdict; the caller finds out with a barrier in the new group, and shrinks
// that. Ranks that are alive may be left out by all the others naming them; whoever finds an offer that names others
// raises a mismatch, and both go on to the next attempt.
//
// A rank whose time runs out, or that is interrupted, takes its offer back, but the verdict may be on its way: who
// decides has looked at all offers and is about to write. The others take that verdict, wait in vain for the rank in
// the new group's barrier, and come back for the next attempt. Were the rank to come back for the same one, it would
// take the verdict too, find the others gone from that group, and go on alone. So it first looks for a verdict of the
// attempt that names it. A verdict names a living rank only if that rank has made its offer, hence one that is there
// before the offer counts on the one taken back: the attempt is over, as it is for the others, and this rank makes its
// offer for the next one. A verdict that is written after that look is met by an offer that says the same as the one
// before (the block, the random number), so it does not matter which of the two was seen: the others have only just
// taken it and are in the barrier, where this rank now comes too. What this costs: one who comes back while the others
// still wait in that barrier does not join them there; their time runs out, and all meet in the next attempt.
#pragma once

#include <vector>

#include "group/group.h"

namespace unisono {

// Fills group.survival().members, in rank order; this rank is one of them.
Code agree(Group& group, const std::vector<int>& excluded, int64_t limit_ns, Failure& failure);
// What the members' offers said, in their order: random numbers from which all make the same one.
std::vector<uint64_t> offered_numbers(Group& group);
// The group of the members that the last `agree` has found. Once.
std::unique_ptr<Group> make_survivors(Group& group, GroupFacts facts, Failure& failure);

}  // namespace unisono
