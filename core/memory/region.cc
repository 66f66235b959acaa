// See region.h. The slot table is guarded by one mutex; it is taken when groups come and go, never in a call.
#include "memory/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <map>
#include <vector>

#include "base/fork.h"
#include "memory/recorder.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace unisono {
namespace {

constexpr size_t kRegionLimit = size_t{1} << 46;  // half of what x86-64 gives a process
constexpr size_t kMostSlots = 1024;
// Slots are a power of two and this much apart. AMD's first-level cache guesses its way from bits 12 to 27 of the
// linear address: with a plain power of two, the same tensor of two ranks would have one guess, and storing to both
// missed the cache every time (measured on Zen 4: 8 GB/s instead of 100).
constexpr size_t kSkew = 17 << 12;

struct Region {
  std::byte* base = nullptr;
  size_t capacity = 0;  // most bytes of one heap
  size_t stride = 0;    // between two slots
  size_t slots = 0;
  std::vector<Mapping*> live;  // for the fork handler, which may not lock a weak_ptr
  std::vector<bool> used;
  std::map<Token, std::weak_ptr<Mapping>> peers;
};

Region& region = *new Region;  // never destroyed: tensors may outlive static objects
ForkMutex region_mutex(ForkOrder::region, [] {
  for (Mapping* mapping : region.live)
    if (mapping) mapping->make_private();
  region.peers.clear();
});
// Set once by open_region and read by in_region: `region_begin` with release and acquire publishes `region_bytes`,
// which is stored before it and can therefore be relaxed.
std::atomic<std::byte*> region_begin{nullptr};
std::atomic<size_t> region_bytes{0};
size_t wanted_capacity = 0;

// What was mapped there goes; the addresses stay the region's. If the system refuses, its memory stays too.
void clear_slot(std::byte* at, size_t bytes) {
  (void)mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

size_t default_capacity() {
  // A heap cannot usefully hold more than the machine has; a little above it keeps powers of two simple.
  size_t ram = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return std::bit_ceil(ram);
}

bool open_region(Failure& failure) {
  if (region.base) return true;
  size_t capacity = wanted_capacity ? wanted_capacity : default_capacity();
  size_t stride = capacity + kSkew;
  size_t slots = std::min(kMostSlots, kRegionLimit / stride);
  void* p = MAP_FAILED;
  // Address space may be limited (RLIMIT_AS, sanitizers): take fewer slots rather than fail.
  for (; slots >= 4; slots /= 2) {
    p = mmap(nullptr, stride * slots, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p != MAP_FAILED) break;
  }
  if (p == MAP_FAILED) {
    fail(failure, Code::no_memory,
         system_error("cannot reserve address space for the heaps; a smaller UNISONO_HEAP_MAX may help"));
    return false;
  }
  madvise(p, stride * slots, MADV_DONTDUMP);
  region.base = static_cast<std::byte*>(p);
  region.capacity = capacity;
  region.stride = stride;
  region.slots = slots;
  region.live.resize(slots);
  region.used.resize(slots);
  region_bytes.store(stride * slots, std::memory_order_relaxed);
  region_begin.store(region.base, std::memory_order_release);
  return true;
}

}  // namespace

std::string system_error(const char* what) {
  return std::string(what) + ": " + std::strerror(errno);
}

Token random_token() {
  Token t;
  while (getrandom(&t, sizeof t, 0) != static_cast<ssize_t>(sizeof t)) {
  }
  return t;
}

size_t heap_capacity() {
  std::lock_guard lock(region_mutex);
  return region.base ? region.capacity : wanted_capacity ? wanted_capacity : default_capacity();
}

void set_heap_capacity(size_t bytes) {
  std::lock_guard lock(region_mutex);
  wanted_capacity = std::bit_ceil(std::max<size_t>(bytes, size_t{1} << 24));
}

std::shared_ptr<Mapping> Mapping::map(Fd fd, size_t capacity, Failure& failure) {
  std::lock_guard lock(region_mutex);
  if (!open_region(failure)) return nullptr;
  if (capacity > region.capacity) {
    fail(failure, Code::no_memory,
         "a peer's heap may grow to " + std::to_string(capacity) + " bytes, this process keeps " +
             std::to_string(region.capacity) + " for each; set the same UNISONO_HEAP_MAX on all ranks");
    return nullptr;
  }
  size_t slot = 0;
  while (slot < region.slots && region.used[slot]) slot++;
  if (slot == region.slots) {
    fail(failure, Code::no_memory, "all " + std::to_string(region.slots) + " heap slots of this process are in use");
    return nullptr;
  }
  std::byte* at = region.base + slot * region.stride;
  if (mmap(at, capacity, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd.get(), 0) == MAP_FAILED) {
    fail(failure, Code::no_memory, system_error("cannot map a heap"));
    return nullptr;
  }
  madvise(at, capacity, MADV_HUGEPAGE);  // taken only where the machine allows huge shared pages
  madvise(at, capacity, MADV_DONTDUMP);
  std::shared_ptr<Mapping> mapping(new Mapping(at, capacity, slot, std::move(fd)));
  region.used[slot] = true;
  region.live[slot] = mapping.get();
  return mapping;
}

Mapping::~Mapping() {
  std::lock_guard lock(region_mutex);
  clear_slot(base_, capacity_);
  region.used[slot_] = false;
  region.live[slot_] = nullptr;
}

void Mapping::populate(const std::byte* p, size_t bytes) {
  size_t first = (static_cast<size_t>(p - base_) + (1 << 20) - 1) >> 20;
  size_t end = std::min((static_cast<size_t>(p - base_) + bytes) >> 20, populated_.size());
  for (size_t i = first; i < end; i++) {
    size_t begin = i;
    while (i < end && !populated_[i].load(std::memory_order_relaxed)) {
      populated_[i].store(1, std::memory_order_relaxed);
      i++;
    }
    // A failure only means that the pages fault in one by one.
    if (i > begin) madvise(base_ + (begin << 20), (i - begin) << 20, MADV_POPULATE_WRITE);
  }
}

void Mapping::make_private() {
  if (!fd_) return;
  size_t begin = 0;
  auto hide = [&](size_t end) {
    if (begin >= end) return;
    void* at = mmap(base_ + begin, end - begin, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
                    fd_.get(), static_cast<off_t>(begin));
    if (at == MAP_FAILED) mprotect(base_ + begin, end - begin, PROT_NONE);  // rather a fault than a write to the parent
  };
  for (auto [offset, bytes] : detached_) {
    hide(offset);
    begin = offset + bytes;
  }
  hide(capacity_);
  fd_.reset();
}

void Mapping::replace(Pages copy) {
  const size_t bytes = copy.bytes();
  size_t begin = 0;
  auto put = [&](size_t end) {
    // Where the system refuses, what make_private has left must do.
    if (begin < end) copy.move_part(begin, end - begin, base_ + begin);
  };
  for (auto [offset, length] : detached_) {
    put(std::min(offset, bytes));
    begin = offset + length;
  }
  put(bytes);
  clear_slot(base_ + bytes, capacity_ - bytes);
}

bool Mapping::share_again(size_t offset, size_t bytes) {
  std::byte* at = base_ + offset;
  if (mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd_.get(),
           static_cast<off_t>(offset)) == MAP_FAILED)
    return false;
  madvise(at, bytes, MADV_HUGEPAGE);
  madvise(at, bytes, MADV_DONTDUMP);
  detached_.erase(detached_.lower_bound(offset), detached_.lower_bound(offset + bytes));
  forget_populated(offset, bytes);
  return true;
}

bool Mapping::used(size_t offset, size_t bytes) const {
  for (size_t i = offset >> 20; i <= (offset + bytes - 1) >> 20; i++)
    if (used_[i].load(std::memory_order_relaxed)) return true;
  return false;
}

void Mapping::forget_used() {
  for (auto& mark : used_) mark.store(0, std::memory_order_relaxed);
}

std::shared_ptr<Mapping> map_peer(const Token& token, Fd fd, size_t capacity, Failure& failure) {
  // Sealed before it is mapped: a file that can shrink would turn a later read into a SIGBUS. Only a memfd has seals.
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  struct stat st;
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || fstat(fd.get(), &st) != 0 || !S_ISREG(st.st_mode) ||
      static_cast<size_t>(st.st_size) != capacity || capacity < RecorderLayout::end) {
    fail(failure, Code::system, "a peer sent a descriptor that is not a sealed heap of the size it named");
    return nullptr;
  }
  std::shared_ptr<Mapping> mapping;  // may be the last owner of what it finds, and end it: not under the lock
  {
    std::lock_guard lock(region_mutex);
    auto found = region.peers.find(token);
    if (found != region.peers.end()) mapping = found->second.lock();
  }
  if (mapping && mapping->capacity() == capacity) return mapping;
  mapping = Mapping::map(std::move(fd), capacity, failure);
  if (!mapping) return nullptr;
  // Each word is read once: the peer can write while we compare.
  std::array<uint64_t, sizeof(HeapHeader) / sizeof(uint64_t)> words;
  auto* from = reinterpret_cast<uint64_t*>(mapping->base());
  for (size_t i = 0; i < words.size(); i++) words[i] = std::atomic_ref(from[i]).load(std::memory_order_relaxed);
  const auto header = std::bit_cast<HeapHeader>(words);
  if (header.magic != HeapHeader::kMagic || header.layout != kLayoutVersion || header.token != token ||
      header.capacity != capacity) {
    fail(failure, Code::system, "a peer's memory does not carry the token it announced");
    return nullptr;
  }
  std::lock_guard lock(region_mutex);
  region.peers[token] = mapping;
  return mapping;
}

std::shared_ptr<Mapping> find_peer(uint64_t token) {
  std::lock_guard lock(region_mutex);
  for (const auto& [known, peer] : region.peers)
    if (known.a == token) return peer.lock();
  return nullptr;
}

bool in_region(const void* p) {
  std::byte* begin = region_begin.load(std::memory_order_acquire);
  return begin &&
         static_cast<size_t>(static_cast<const std::byte*>(p) - begin) < region_bytes.load(std::memory_order_relaxed);
}

}  // namespace unisono
