// Groups that were closed here while a peer was still in them.
//
// A slower peer may still read the closed group's block, so the block, the mappings and the sockets stay until every
// peer has left or died. A thread that lives only while there is such a group looks for that, since the program may
// never call unisono again.
#pragma once

#include <memory>

#include "group/group.h"

namespace unisono {

void retire(std::unique_ptr<Group> group);  // destroys it now or later; closed already
void sweep_retired();                       // looks now

}  // namespace unisono
