// One copy instead of two: a rank reads tensors that lie in another's own memory, by process_vm_readv.
//
// The kernel allows it to processes of one user, unless it is told otherwise (Yama, seccomp, a process that is not
// dumpable) or the memory is a device's. So each rank tries it with every peer when a group is made, and looks whether
// its own tensors can be read before it says where they are; only if all ranks say yes is anything read (Mover).
// Invariant: only the reader writes, into its own memory. What it has read counts once it knows that the other rank was
// in the same call all the time: the last wait of a call, or the reply to a message.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "group/peer.h"

namespace unisono {

// Reads the peer's word for where its block is, and compares it with the one it has shared.
bool can_read(const Peer& peer);
// 0, or what went wrong: an errno, ENODATA if only a part could be read.
int read_memory(pid_t pid, void* to, uint64_t address, size_t bytes);
// Whether others could read this process's memory there: looks at the ends.
bool is_readable(const std::pair<const void*, size_t>* ranges, size_t count);

}  // namespace unisono
