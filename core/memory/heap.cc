// See heap.h.
#include "memory/heap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "memory/limits.h"
#include "memory/scratch.h"
#include "memory/trim.h"

namespace unisono {
namespace {

constexpr size_t kAlign = 128;  // a flag line, and two cache lines
constexpr size_t kPage = 4096;
constexpr size_t kGrowth = 1 << 20;  // least extension, so that small tensors do not cost a system call each
constexpr size_t kSlack = 64 << 20;  // left to the rest of the system when memory is counted

constexpr size_t kSmallRun = 64 << 10;  // pages that small blocks are cut from
constexpr size_t kDetachStep = 2 << 20;
constexpr size_t kTrimStep = 2 << 20;  // given back at a time, so that nobody waits long for the lock
constexpr size_t kSpares = 8;          // small blocks of one size kept for the next allocation

std::vector<Heap*>& heaps = *new std::vector<Heap*>;  // never destroyed: tensors may outlive static objects
ForkMutex heaps_mutex(ForkOrder::heaps, Heap::after_fork_in_child, Heap::before_fork, Heap::after_fork_in_parent);

std::shared_ptr<Heap>& own_heap = *new std::shared_ptr<Heap>;
ForkMutex own_heap_mutex(ForkOrder::process_heap, [] { own_heap.reset(); });

// Written by set_fork_copy_max, read before a fork; relaxed, since the number publishes nothing.
std::atomic<size_t> fork_copy_max{256 << 20};

size_t round_up(size_t n, size_t to) {
  return (n + to - 1) / to * to;
}

}  // namespace

size_t Heap::size_class(size_t bytes) {
  // Four classes per doubling: at most a fifth is lost to rounding, and a tensor freed fits the next of its kind.
  if (bytes <= kAlign) return kAlign;
  size_t step = std::max(kAlign, std::bit_floor(bytes - 1) / 4);
  return round_up(bytes, std::min<size_t>(step, 2 << 20));
}

std::shared_ptr<Heap> Heap::create(Failure& failure) {
  Fd fd(static_cast<int>(memfd_create("unisono", MFD_CLOEXEC | MFD_ALLOW_SEALING)));
  if (!fd) {
    fail(failure, Code::system, system_error("memfd_create"));
    return nullptr;
  }
  const size_t capacity = heap_capacity();
  const bool ok = fchmod(fd.get(), 0600) == 0 && ftruncate(fd.get(), static_cast<off_t>(capacity)) == 0 &&
                  fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0;
  if (!ok) {
    fail(failure, Code::system, system_error("cannot size and seal the heap"));
    return nullptr;
  }
  std::shared_ptr<Heap> heap(new Heap);
  heap->token_ = random_token();
  heap->scratch_ = std::make_unique<Scratch>(*heap);
  heap->mapping_ = Mapping::map(std::move(fd), capacity, failure);
  if (!heap->mapping_) return nullptr;
  if (!heap->grow(kGrowth, failure)) return nullptr;
  heap->color_ = heap->token_.a % (kPage / kAlign) * kAlign;
  heap->pages_.erase(0);
  heap->pages_.insert(kPage, heap->top_ - kPage);  // the first page holds the header and the activities
  auto* header = reinterpret_cast<HeapHeader*>(heap->base());
  *header = {HeapHeader::kMagic, kLayoutVersion, heap->token_, capacity};
  std::lock_guard lock(heaps_mutex);
  heaps.push_back(heap.get());
  return heap;
}

Heap::~Heap() {
  std::lock_guard lock(heaps_mutex);
  std::erase(heaps, this);
  scratch_.reset();  // while there is a heap to give it back to
}

std::shared_ptr<Heap> process_heap(Failure& failure) {
  std::lock_guard lock(own_heap_mutex);
  if (!own_heap) own_heap = Heap::create(failure);
  return own_heap;
}

bool is_reachable(const void* p, size_t bytes) {
  if (!in_region(p)) return false;
  std::lock_guard lock(own_heap_mutex);
  return !own_heap || !own_heap->is_detached(p, bytes);
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
    heap->copy_ = Pages(heap->top_);
    if (!heap->copy_) continue;
    for (auto [offset, size] : heap->live_) std::memcpy(heap->copy_.get() + offset, heap->base() + offset, size);
  }
}

void Heap::after_fork_in_parent() {
  for (Heap* heap : heaps) {
    heap->copy_.reset();
    heap->mutex_.unlock();
  }
}

void Heap::after_fork_in_child() {
  for (Heap* heap : heaps) {
    if (heap->copy_) heap->mapping_->replace(std::move(heap->copy_));
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
  if (!reserve(top_, more, failure)) return false;
  pages_.insert(top_, more);
  top_ += more;
  return true;
}

bool Heap::reserve(size_t offset, size_t bytes, Failure& failure) {
  // Small steps: once per kSlack, which covers them.
  if (bytes > kGrowth || offset / kSlack != (offset + bytes) / kSlack) {
    size_t room = memory_available();
    if (room != SIZE_MAX && bytes + kSlack > room) {
      fail(failure, Code::no_memory,
           std::to_string(bytes) + " bytes were asked for, " + std::to_string(room) +
               " are available on this machine or in its cgroup");
      return false;
    }
  }
  int rc;
  do rc = fallocate(fd(), 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  while (rc != 0 && errno == EINTR);
  if (rc != 0) {
    fail(failure, Code::no_memory, system_error(("cannot reserve " + std::to_string(bytes) + " bytes").c_str()));
    return false;
  }
  mapping_->populate(base() + offset, bytes);
  return true;
}

// Reserves what was given back of a range that is about to be handed out.
bool Heap::fill_holes(size_t offset, size_t bytes, Failure& failure) {
  for (;;) {
    auto hole = holes_.by_place.lower_bound(offset + bytes);
    if (hole == holes_.by_place.begin()) return true;
    auto [begin, length] = *--hole;
    if (begin + length <= offset) return true;
    const size_t first = std::max(begin, offset), end = std::min(begin + length, offset + bytes);
    if (!reserve(first, end - first, failure)) return false;
    holes_.remove(first, end - first);
  }
}

bool Heap::take_pages(size_t bytes, size_t& offset, Failure& failure) {
  if (!pages_.take(bytes, offset) && !grow_tail(bytes, offset, failure)) return false;
  cold_.remove(offset, bytes);
  if (fill_holes(offset, bytes, failure)) return true;
  pages_.insert(offset, bytes);
  return false;
}

bool Heap::grow_tail(size_t bytes, size_t& offset, Failure& failure) {
  // The last free range, if it ends at the top, grows into what is needed.
  size_t tail = 0;
  if (!pages_.by_place.empty()) {
    auto [begin, length] = *pages_.by_place.rbegin();
    if (begin + length == top_) tail = length;
  }
  return grow(bytes - tail, failure) && pages_.take(bytes, offset);
}

bool Heap::take_small(size_t bytes, size_t& offset, Failure& failure) {
  if (small_.take(bytes, offset)) return true;
  size_t run;
  if (!take_pages(kSmallRun, run, failure)) return false;
  small_.insert(run, kSmallRun);
  return small_.take(bytes, offset);
}

void Heap::give_small(size_t offset, size_t bytes) {
  auto [begin, length] = small_.insert(offset, bytes);
  // Whole pages go back, but for a run that the next small blocks are cut from.
  size_t first = round_up(begin + kSmallRun, kPage), end = (begin + length) / kPage * kPage;
  if (first + kSmallRun > end) return;
  small_.erase(begin);
  small_.insert(begin, first - begin);
  if (end < begin + length) small_.insert(end, begin + length - end);
  pages_.insert(first, end - first);
}

void* Heap::allocate(size_t bytes, Failure& failure) {
  std::lock_guard lock(mutex_);
  if (bytes > capacity()) {
    fail(failure, Code::no_memory,
         std::to_string(bytes) + " bytes were asked for, the heap holds at most " + std::to_string(capacity()) +
             " (UNISONO_HEAP_MAX)");
    return nullptr;
  }
  size_t want = size_class(bytes), offset;
  if (want < kPage) {
    do {  // a block in a page that was taken away from the peers is of no use any more
      if (auto& nodes = spare_[want / kAlign]; !nodes.empty()) {
        offset = nodes.back().key();
        live_.insert(std::move(nodes.back()));
        nodes.pop_back();
      } else {
        if (!take_small(want, offset, failure)) return nullptr;
        live_[offset] = want;
      }
    } while (!detached_.empty() && is_detached_locked(offset, want) && live_.erase(offset));
    in_use_ += want;
    return base() + offset;
  }
  want = round_up(want + color_, kPage);
  if (!take_pages(want, offset, failure)) return nullptr;
  live_[offset] = want;
  in_use_ += want;
  return base() + offset + color_;
}

// The live allocation that `p` points into; the end if there is none.
std::map<size_t, size_t>::iterator Heap::find_live(const void* p) {
  if (!holds(p)) return live_.end();
  const auto at = static_cast<size_t>(static_cast<const std::byte*>(p) - base());
  auto found = live_.upper_bound(at);
  if (found == live_.begin()) return live_.end();
  --found;
  return at < found->first + found->second ? found : live_.end();
}

void Heap::release(void* p) {
  if (is_of_parent()) return;
  std::lock_guard lock(mutex_);
  auto found = find_live(p);
  if (found == live_.end()) return;
  auto [offset, bytes] = *found;
  in_use_ -= bytes;
  auto node = live_.extract(found);
  if (!detached_.empty() && is_detached_locked(offset, bytes)) {
    quarantined_ += bytes;      // its addresses are not the file's any more
    if (bytes < kPage) return;  // others may live in the same page
    for (auto gone = detached_.lower_bound(offset); gone != detached_.end() && gone->first < offset + bytes; ++gone)
      madvise(base() + gone->first, gone->second, MADV_DONTNEED);
  } else if (bytes >= kPage) {
    pages_.insert(offset, bytes);
    if (pages_.total - holes_.total > kTrimKeep) start_trimming();
  } else if (auto& nodes = spare_[bytes / kAlign]; nodes.size() < kSpares) {
    nodes.push_back(std::move(node));
  } else {
    give_small(offset, bytes);
  }
}

bool Heap::detach(const void* p, size_t bytes) {
  std::lock_guard lock(mutex_);
  auto live = find_live(p);
  const auto at = static_cast<size_t>(static_cast<const std::byte*>(p) - base());
  if (bytes == 0 || live == live_.end() || bytes > live->first + live->second - at) return false;
  detachments_.fetch_add(1, std::memory_order_release);  // before the first page: who asks then waits for the lock
  const size_t end = round_up(at + bytes, kPage);
  // In steps, so that the memory needed twice stays small; around what is private already.
  for (size_t begin = at / kPage * kPage, length; begin < end; begin += length) {
    auto next = detached_.upper_bound(begin);
    if (next != detached_.begin() && std::prev(next)->first + std::prev(next)->second > begin) {
      length = std::prev(next)->first + std::prev(next)->second - begin;
      continue;
    }
    length = std::min({kDetachStep, end - begin, next == detached_.end() ? SIZE_MAX : next->first - begin});
    // A private mapping of the same pages: they look the same until they are written. The write below, which changes
    // nothing, has the kernel copy each of them; a write of another thread comes before or after that, never in
    // between.
    if (mmap(base() + begin, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd(),
             static_cast<off_t>(begin)) == MAP_FAILED)
      return false;
    madvise(base() + begin, length, MADV_DONTDUMP);
    for (size_t page = begin; page < begin + length; page += kPage)
      reinterpret_cast<std::atomic<uint64_t>*>(base() + page)->fetch_add(0, std::memory_order_relaxed);
    detached_[begin] = length;
    mapping_->leave_private(begin, length);
    // The old pages go; who still writes there gets new ones. But not the first and the last, where something else may
    // be that peers read just now.
    const size_t inside = std::max(begin, round_up(at, kPage));
    const size_t outside = std::min(begin + length, (at + bytes) / kPage * kPage);
    if (inside < outside)
      fallocate(fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(inside),
                static_cast<off_t>(outside - inside));
  }
  return true;
}

bool Heap::is_detached_locked(size_t offset, size_t bytes) const {
  auto next = detached_.lower_bound(offset + std::max<size_t>(bytes, 1));
  if (next == detached_.begin()) return false;
  --next;
  return next->first + next->second > offset;
}

bool Heap::is_detached(const void* p, size_t bytes) {
  if (detachments() == 0 || !holds(p)) return false;
  std::lock_guard lock(mutex_);
  return is_detached_locked(static_cast<size_t>(static_cast<const std::byte*>(p) - base()), bytes);
}

std::byte* Heap::take_line(Failure& failure) {
  std::lock_guard lock(mutex_);
  if (lines_.empty()) {
    size_t page;
    if (!take_pages(kPage, page, failure)) return nullptr;
    std::memset(static_cast<void*>(base() + page), 0, kPage);
    for (size_t i = 0; i < kPage / kLineBytes; i++) lines_.push_back(base() + page + i * kLineBytes);
  }
  std::byte* line = lines_.back();
  lines_.pop_back();
  return line;
}

void Heap::give_line(std::byte* line) {
  if (is_of_parent()) return;
  std::lock_guard lock(mutex_);
  lines_.push_back(line);
}

Heap::Usage Heap::usage() {
  std::lock_guard lock(mutex_);
  struct stat st;
  const size_t resident = fd() >= 0 && fstat(fd(), &st) == 0 ? static_cast<size_t>(st.st_blocks) * 512 : 0;
  return {in_use_, top_ - holes_.total, quarantined_, resident, capacity()};
}

bool Heap::trim_all() {
  {
    std::lock_guard lock(heaps_mutex);
    for (Heap* heap : heaps) heap->trim();
  }
  return any_to_trim();
}

bool Heap::any_to_trim() {
  std::lock_guard lock(heaps_mutex);
  return std::any_of(heaps.begin(), heaps.end(), [](Heap* heap) { return heap->may_be_trimmed(); });
}

bool Heap::may_be_trimmed() {
  if (scratch_->is_lent()) return true;
  std::lock_guard lock(mutex_);
  return pages_.total - holes_.total > kTrimKeep;
}

void Heap::trim() {
  scratch_->collect();
  for (size_t given = 0; given < kTrimBytes && give_back(kTrimStep); given += kTrimStep) {
  }
  std::lock_guard lock(mutex_);
  cold_ = pages_;
  for (auto [offset, bytes] : holes_.by_place) cold_.remove(offset, bytes);
}

// Some of what has been free since the last trim. False: there is no more of that.
bool Heap::give_back(size_t most) {
  std::lock_guard lock(mutex_);
  if (cold_.total <= kTrimKeep) return false;
  auto [begin, length] = *cold_.by_place.rbegin();  // at the end, since others are taken first
  const size_t bytes = std::min({most, length, cold_.total - kTrimKeep}), offset = begin + length - bytes;
  cold_.remove(offset, bytes);
  if (fallocate(fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                static_cast<off_t>(bytes)) == 0) {
    holes_.insert(offset, bytes);
    mapping_->forget_populated(offset, bytes);
  }
  return true;
}

}  // namespace unisono
