// See reach.h.
#include "group/reach.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace unisono {
namespace {

constexpr size_t kAtOnce = 1 << 30;  // bytes: less than the kernel's limit
constexpr size_t kMostEnds = 64;     // of ranges in one look

int errno_of(ssize_t got, size_t wanted) {
  return got < 0 ? errno : static_cast<size_t>(got) == wanted ? 0 : ENODATA;
}

}  // namespace

bool can_read(const Peer& peer) {
  const uint64_t address = peer.block.address();
  uint64_t found = 0;
  return peer.met && peer.pid > 0 && address &&
         read_memory(peer.pid, &found, address + peer.block.address_offset(), sizeof found) == 0 && found == address;
}

int read_memory(pid_t pid, void* to, uint64_t address, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const size_t part = std::min(kAtOnce, bytes - done);
    iovec here{static_cast<std::byte*>(to) + done, part}, there{reinterpret_cast<void*>(address + done), part};
    if (int error = errno_of(process_vm_readv(pid, &here, 1, &there, 1, 0), part)) return error;
    done += part;
  }
  return 0;
}

bool is_readable(const std::pair<const void*, size_t>* ranges, size_t count) {
  std::byte ends[kMostEnds];
  iovec there[kMostEnds];
  for (size_t done = 0; done < count;) {
    size_t n = 0;
    for (; done < count && n < kMostEnds; done++) {
      const auto [at, bytes] = ranges[done];
      if (!bytes) continue;
      auto* first = const_cast<std::byte*>(static_cast<const std::byte*>(at));
      there[n++] = {first, 1};
      there[n++] = {first + bytes - 1, 1};
    }
    iovec here{ends, n};
    if (n && process_vm_readv(getpid(), &here, 1, there, n, 0) != static_cast<ssize_t>(n)) return false;
  }
  return true;
}

}  // namespace unisono
