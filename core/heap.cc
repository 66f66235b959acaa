// See heap.h.
#include "heap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

namespace unisono {
namespace {

constexpr size_t kAlign = 128;  // a flag line, and two cache lines
constexpr size_t kPage = 4096;
constexpr size_t kGrowth = 1 << 20;  // least extension, so that small tensors do not cost a system call each
constexpr size_t kSlack = 64 << 20;  // left to the rest of the system when memory is counted

constexpr size_t kSpares = 8;  // small blocks of one size kept for the next allocation

std::vector<Heap*>& heaps = *new std::vector<Heap*>;  // never destroyed: tensors may outlive static objects
ForkMutex heaps_mutex(ForkOrder::heaps, Heap::after_fork_in_child, Heap::before_fork, Heap::after_fork_in_parent);

std::shared_ptr<Heap>& own_heap = *new std::shared_ptr<Heap>;
ForkMutex own_heap_mutex(ForkOrder::process_heap, [] { own_heap.reset(); });

std::atomic<size_t> fork_copy_max{256 << 20};  // relaxed: a number of its own

size_t round_up(size_t n, size_t to) {
  return (n + to - 1) / to * to;
}

// One number in a file; SIZE_MAX for "max" or no file.
size_t read_number(const std::string& path) {
  std::ifstream file(path);
  size_t n = SIZE_MAX;
  if (!(file >> n)) return SIZE_MAX;
  return n;
}

size_t field_of(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    if (line.compare(0, key.size(), key) == 0) return std::strtoull(line.c_str() + key.size(), nullptr, 10);
  return SIZE_MAX;
}

// What a cgroup folder still allows: limit - (usage - page cache that can be dropped).
size_t cgroup_room(const std::string& folder, const char* limit, const char* usage, const char* cache_key) {
  size_t most = read_number(folder + limit), used = read_number(folder + usage);
  if (most == SIZE_MAX || used == SIZE_MAX || most > (size_t{1} << 60)) return SIZE_MAX;
  size_t cache = field_of(folder + "/memory.stat", cache_key);
  if (cache != SIZE_MAX) used -= std::min(used, cache);
  return most > used ? most - used : 0;
}

size_t cgroup_available() {
  size_t least = SIZE_MAX;
  std::ifstream self("/proc/self/cgroup");
  for (std::string line; std::getline(self, line);) {
    size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
    bool v2 = controllers.empty(), v1 = ("," + controllers + ",").find(",memory,") != std::string::npos;
    if (!v1 && !v2) continue;
    // A limit anywhere on the way to the root counts. In a container the path may not exist below the mount.
    for (;;) {
      if (path == "/") path.clear();
      size_t room = v2 ? cgroup_room("/sys/fs/cgroup" + path, "/memory.max", "/memory.current", "inactive_file ")
                       : cgroup_room("/sys/fs/cgroup/memory" + path, "/memory.limit_in_bytes", "/memory.usage_in_bytes",
                                     "total_inactive_file ");
      least = std::min(least, room);
      if (path.empty()) break;
      path.erase(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
  return least;
}

}  // namespace

size_t memory_available() {
  size_t kib = field_of("/proc/meminfo", "MemAvailable:");
  size_t machine = kib == SIZE_MAX ? SIZE_MAX : kib * 1024;
  return std::min(machine, cgroup_available());
}

size_t Heap::size_class(size_t bytes) {
  // Four classes per doubling: at most a fifth is lost to rounding, and a tensor freed fits the next of its kind.
  if (bytes <= kAlign) return kAlign;
  size_t step = std::max(kAlign, std::bit_floor(bytes - 1) / 4);
  return round_up(bytes, std::min<size_t>(step, 2 << 20));
}

std::shared_ptr<Heap> Heap::create(Failure& failure) {
  int fd = static_cast<int>(memfd_create("unisono", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd < 0) {
    fail(failure, Code::system, system_error("memfd_create"));
    return nullptr;
  }
  size_t capacity = heap_capacity();
  bool ok = fchmod(fd, 0600) == 0 && ftruncate(fd, static_cast<off_t>(capacity)) == 0 &&
            fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0;
  if (!ok) {
    fail(failure, Code::system, system_error("cannot size and seal the heap"));
    close(fd);
    return nullptr;
  }
  std::shared_ptr<Heap> heap(new Heap);
  heap->fd_ = fd;
  heap->token_ = random_token();
  heap->mapping_ = Mapping::map(fd, capacity, failure);
  if (!heap->mapping_) return nullptr;
  if (!heap->grow(kGrowth, failure)) return nullptr;
  // The header comes first. The room it takes differs from heap to heap, so that the same tensor of different ranks
  // falls into different sets of the caches, and stores to one do not look like stores to the other (4 KiB aliasing).
  const size_t first = kPage + heap->token_.a % (kPage / kAlign) * kAlign;
  heap->erase_free(heap->free_.begin());
  heap->insert_free(first, heap->top_ - first);
  auto* header = reinterpret_cast<HeapHeader*>(heap->base());
  *header = {HeapHeader::kMagic, kLayoutVersion, heap->token_, capacity, static_cast<uint64_t>(getpid())};
  std::lock_guard lock(heaps_mutex);
  heaps.push_back(heap.get());
  return heap;
}

Heap::~Heap() {
  {
    std::lock_guard lock(heaps_mutex);
    std::erase(heaps, this);
  }
  if (fd_ >= 0) close(fd_);
}

std::shared_ptr<Heap> process_heap(Failure& failure) {
  std::lock_guard lock(own_heap_mutex);
  if (!own_heap) own_heap = Heap::create(failure);
  return own_heap;
}

void set_fork_copy_max(size_t bytes) {
  fork_copy_max.store(bytes, std::memory_order_relaxed);
}

void Heap::before_fork() {
  size_t bytes = 0;
  for (Heap* heap : heaps) {
    heap->mutex_.lock();
    bytes += heap->in_use_;
  }
  if (bytes > fork_copy_max.load(std::memory_order_relaxed)) return;
  if (bytes > kSlack && bytes + kSlack > memory_available()) return;
  for (Heap* heap : heaps) {
    void* copy = mmap(nullptr, heap->top_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (copy == MAP_FAILED) continue;
    heap->copy_ = static_cast<std::byte*>(copy);
    for (auto [offset, size] : heap->live_) std::memcpy(heap->copy_ + offset, heap->base() + offset, size);
  }
}

void Heap::after_fork_in_parent() {
  for (Heap* heap : heaps) {
    if (heap->copy_) munmap(std::exchange(heap->copy_, nullptr), heap->top_);
    heap->mutex_.unlock();
  }
}

void Heap::after_fork_in_child() {
  for (Heap* heap : heaps) {
    if (heap->copy_) heap->mapping_->replace(std::exchange(heap->copy_, nullptr), heap->top_);
    close(std::exchange(heap->fd_, -1));
    heap->mutex_.unlock();
  }
  heaps.clear();  // a child of this child gets what is here now by fork itself
}

bool Heap::grow(size_t bytes, Failure& failure) {
  size_t more = round_up(std::max(bytes, kGrowth), kPage);
  if (more > capacity() - top_) {
    fail(failure, Code::no_memory,
         "the heap holds at most " + std::to_string(capacity()) + " bytes, " + std::to_string(top_) +
             " are reserved and " + std::to_string(more) + " more were asked for (UNISONO_HEAP_MAX)");
    return false;
  }
  if (more > kGrowth || top_ / kSlack != (top_ + more) / kSlack) {  // small steps: once per kSlack, which covers them
    size_t room = memory_available();
    if (room != SIZE_MAX && more + kSlack > room) {
      fail(failure, Code::no_memory,
           std::to_string(more) + " bytes were asked for, " + std::to_string(room) +
               " are available on this machine or in its cgroup");
      return false;
    }
  }
  int rc;
  do rc = fallocate(fd_, 0, static_cast<off_t>(top_), static_cast<off_t>(more));
  while (rc != 0 && errno == EINTR);
  if (rc != 0) {
    fail(failure, Code::no_memory, system_error(("cannot reserve " + std::to_string(more) + " bytes").c_str()));
    return false;
  }
  mapping_->populate(base() + top_, more);
  insert_free(top_, more);
  top_ += more;
  return true;
}

void Heap::erase_free(std::map<size_t, size_t>::iterator range) {
  by_size_.erase({range->second, range->first});
  free_.erase(range);
}

void Heap::insert_free(size_t offset, size_t bytes) {
  auto next = free_.lower_bound(offset);
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      erase_free(before);
    }
  }
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    erase_free(next);
  }
  free_[offset] = bytes;
  by_size_.insert({bytes, offset});
}

void* Heap::allocate(size_t bytes, Failure& failure) {
  std::lock_guard lock(mutex_);
  if (bytes > capacity()) {
    fail(failure, Code::no_memory,
         std::to_string(bytes) + " bytes were asked for, the heap holds at most " + std::to_string(capacity()) +
             " (UNISONO_HEAP_MAX)");
    return nullptr;
  }
  size_t want = size_class(bytes);
  if (want / kAlign < spare_.size() && !spare_[want / kAlign].empty()) {
    auto& nodes = spare_[want / kAlign];
    size_t offset = nodes.back().key();
    live_.insert(std::move(nodes.back()));
    nodes.pop_back();
    in_use_ += want;
    return base() + offset;
  }
  auto fit = by_size_.lower_bound({want, 0});
  if (fit == by_size_.end()) {
    // The last free range, if it ends at the top, grows into what is needed.
    size_t tail = 0;
    if (!free_.empty()) {
      auto last = std::prev(free_.end());
      if (last->first + last->second == top_) tail = last->second;
    }
    if (!grow(want - tail, failure)) return nullptr;
    fit = by_size_.lower_bound({want, 0});
  }
  auto [size, offset] = *fit;
  erase_free(free_.find(offset));
  if (size > want) insert_free(offset + want, size - want);
  live_[offset] = want;
  in_use_ += want;
  return base() + offset;
}

void Heap::release(void* p) {
  if (generation_ != fork_generation()) return;
  std::lock_guard lock(mutex_);
  auto found = live_.find(static_cast<size_t>(static_cast<std::byte*>(p) - base()));
  if (found == live_.end()) return;
  auto [offset, bytes] = *found;
  in_use_ -= bytes;
  auto node = live_.extract(found);
  if (!kept_.empty() && kept_.erase(offset)) {
    quarantined_ += bytes;
    return;
  }
  if (bytes / kAlign < spare_.size() && spare_[bytes / kAlign].size() < kSpares)
    spare_[bytes / kAlign].push_back(std::move(node));
  else
    insert_free(offset, bytes);
}

void Heap::quarantine(const void* p) {
  std::lock_guard lock(mutex_);
  if (!holds(p)) return;
  auto found = live_.upper_bound(static_cast<size_t>(static_cast<const std::byte*>(p) - base()));
  if (found == live_.begin()) return;
  --found;
  if (p < base() + found->first + found->second) kept_.insert(found->first);
}

Heap::Usage Heap::usage() {
  std::lock_guard lock(mutex_);
  return {in_use_, top_, quarantined_, capacity()};
}

}  // namespace unisono
