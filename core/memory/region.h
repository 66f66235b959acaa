// The address range all heaps of this process live in: this process's own and every peer's, a fixed stride apart.
//
// One PROT_NONE reservation is made at first use and never given back, so "is this pointer in shared memory?" is
// one range compare, and a slot's memory can be swapped in and out without another mapping ever landing there.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/pages.h"
#include "base/status.h"

namespace unisono {

struct Token {  // 128 random bits that name one heap
  uint64_t a = 0, b = 0;
  bool operator==(const Token&) const = default;
  auto operator<=>(const Token&) const = default;
};

Token random_token();

// The first page of every heap's memory; what a peer checks before it believes in a mapping.
struct HeapHeader {
  static constexpr uint64_t kMagic = 0x314f4e4f53494e55;  // "UNISONO1"
  uint64_t magic;
  uint64_t layout;  // version of everything that lives in shared memory
  Token token;
  uint64_t capacity;
};
static_assert(std::has_unique_object_representations_v<HeapHeader> && sizeof(HeapHeader) % sizeof(uint64_t) == 0);
constexpr uint64_t kLayoutVersion = 7;

// The most bytes one heap can hold, a power of two. Fixed at first use.
size_t heap_capacity();
void set_heap_capacity(size_t bytes);  // before first use only; rounded up to a power of two

// A slot of the region with `fd` mapped into it; unmapped when the object goes.
class Mapping {
 public:
  static std::shared_ptr<Mapping> map(Fd fd, size_t capacity, Failure& failure);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* base() const { return base_; }
  size_t capacity() const { return capacity_; }
  int fd() const { return fd_.get(); }
  bool holds(const void* p) const { return static_cast<size_t>(static_cast<const std::byte*>(p) - base_) < capacity_; }
  // Makes page-table entries for the whole megabytes inside [p, p + bytes) in one go instead of one fault a page.
  // Only for memory its owner has reserved. Cheap when already done.
  void populate(const std::byte* p, size_t bytes);
  // The owner has given these pages back to the system.
  void forget_populated(size_t offset, size_t bytes) {
    for (size_t i = offset >> 20; i <= (offset + bytes - 1) >> 20; i++)
      populated_[i].store(0, std::memory_order_relaxed);
  }
  // The owner has given these pages private memory: a forked child inherits that, as any other.
  void leave_private(size_t offset, size_t bytes) { detached_[offset] = bytes; }
  // The pages that leave_private was called for are the file's again. False: the system refused.
  bool share_again(size_t offset, size_t bytes);
  // Peers are told of a tensor here: for `used`, by megabyte.
  void note_use(size_t offset, size_t bytes) {
    for (size_t i = offset >> 20; i <= (offset + bytes - 1) >> 20; i++)
      if (!used_[i].load(std::memory_order_relaxed)) used_[i].store(1, std::memory_order_relaxed);
  }
  bool used(size_t offset, size_t bytes) const;
  void forget_used();
  // In a forked child: writes stay private. A page the child has not written shows what the owner writes later.
  void make_private();
  // In a forked child, after make_private: `copy` is what the mapping begins with from now on, with nothing behind it;
  // but for what leave_private was called for.
  void replace(Pages copy);

 private:
  Mapping(std::byte* base, size_t capacity, size_t slot, Fd fd)
      : base_(base),
        capacity_(capacity),
        slot_(slot),
        fd_(std::move(fd)),
        populated_(capacity >> 20),
        used_(capacity >> 20) {}
  std::byte* base_;
  size_t capacity_;
  size_t slot_;
  Fd fd_;  // none in a forked child
  // By megabyte, set by whoever populates it, relaxed: a hint that publishes nothing.
  std::vector<std::atomic<uint8_t>> populated_;
  std::vector<std::atomic<uint8_t>> used_;  // the same by whoever tells peers of a place there
  std::map<size_t, size_t> detached_;       // offset -> bytes; changed and read under the heap's lock, or in a fork
};

// The peer heap with this token, mapped at most once per process however many groups know it.
std::shared_ptr<Mapping> map_peer(const Token& token, Fd fd, size_t capacity, Failure& failure);

// The one among them whose token begins like this; null if this process knows none.
std::shared_ptr<Mapping> find_peer(uint64_t token);

// True if `p` lies in any heap this process can see.
bool in_region(const void* p);

std::string system_error(const char* what);  // "what: strerror"

}  // namespace unisono
