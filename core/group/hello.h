// What two ranks say to each other when they meet, over a Unix socket: one hello in each direction, with the descriptor
// of the speaker's heap.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "base/fd.h"
#include "memory/heap.h"

namespace unisono {

struct Hello {
  static constexpr uint64_t kMagic = 0x6f6e6f73696e75;  // "unisono"
  uint64_t magic;
  uint64_t layout;
  Token nonce;
  Token token;
  uint64_t capacity;
  uint64_t block;  // offset in the heap
  int32_t rank;
  int32_t size;
  uint64_t isa;
  uint64_t cache_bytes;
  double quota;           // processors the cgroup allows; infinity without a limit
  uint8_t affinity[128];  // one bit per processor this rank may run on
};
// Sent as bytes, so there is no padding whose old contents would go out.
static_assert(std::is_trivially_copyable_v<Hello> &&
              sizeof(Hello) == 10 * sizeof(uint64_t) + 2 * sizeof(int32_t) + sizeof(double) + sizeof(Hello::affinity));

// What this process says of itself, for a block of its heap.
Hello hello_of(const Heap& heap, const std::byte* block, int rank, int size, const Token& nonce);

bool send_hello(int socket, const Hello& hello, int heap_fd);

enum class Received : uint8_t { nothing, hello, other };
// One hello and one descriptor, or anything else; a hang-up is something else. Never waits.
Received receive_hello(int socket, Hello& hello, Fd& memory);

// Whether the process at the other end runs under the same user, and which one it is.
bool same_user(int socket, pid_t& pid);

// An abstract address, which is no file; and a socket for it. Never blocks.
sockaddr_un address_of(const std::string& name, socklen_t& length);
Fd open_socket();

}  // namespace unisono
