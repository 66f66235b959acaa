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

constexpr size_t kGrowth = 1 << 20;  // steps of extension, so that small tensors do not cost a system call each

constexpr size_t kSmallRun = 64 << 10;     // pages that small blocks are cut from
constexpr size_t kSpares = 8;              // small blocks of one size kept for the next allocation
constexpr size_t kSpareBytes = 256 << 20;  // the same of pages, of all sizes

std::shared_ptr<Heap>& own_heap = *new std::shared_ptr<Heap>;
ForkMutex own_heap_mutex(ForkOrder::process_heap, [] { own_heap.reset(); });

}  // namespace

std::vector<Heap*>& Heap::heaps_ = *new std::vector<Heap*>;  // never destroyed: tensors may outlive static objects
ForkMutex Heap::heaps_mutex_(ForkOrder::heaps, after_fork_in_child, before_fork, after_fork_in_parent);

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
  // The first pages hold the header and the recorder.
  static_assert(RecorderLayout::end % kPage == 0 && RecorderLayout::end < kGrowth);
  heap->pages_.insert(RecorderLayout::end, heap->top_ - RecorderLayout::end);
  heap->recorder_.place(heap->base());
  auto* header = reinterpret_cast<HeapHeader*>(heap->base());
  *header = {HeapHeader::kMagic, kLayoutVersion, heap->token_, capacity};
  std::lock_guard lock(heaps_mutex_);
  heaps_.push_back(heap.get());
  return heap;
}

Heap::~Heap() {
  std::lock_guard lock(heaps_mutex_);
  std::erase(heaps_, this);
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

bool Heap::grow(size_t bytes, Failure& failure) {
  size_t more = round_up(std::max(bytes, kGrowth), kGrowth);
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
    limit_unused(end - first);
    if (!reserve(first, end - first, failure)) return false;
    holes_.remove(first, end - first);
  }
}

bool Heap::take_pages(size_t bytes, size_t& offset, Failure& failure) {
  drop_spares();  // no block of this size was given back lately: sizes change, so what is free grows together
  if (!pages_.take(bytes, offset)) {
    limit_unused(bytes);
    if (!grow_tail(bytes, offset, failure)) return false;
  }
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

void* Heap::allocate(size_t bytes, bool is_tensor, Failure& failure) {
  std::lock_guard lock(mutex_);
  if (bytes > capacity()) {
    fail(failure, Code::no_memory,
         std::to_string(bytes) + " bytes were asked for, the heap holds at most " + std::to_string(capacity()) +
             " (UNISONO_HEAP_MAX)");
    return nullptr;
  }
  size_t want = size_class(bytes), offset;
  const bool small = want < kPage;
  if (!small) want = round_up(want + color_, kPage);
  do {  // a small block in a page that was taken away from the peers is of no use any more
    auto* spares = spares_of(want);
    if (spares && !spares->empty()) {
      auto block = spares->back();
      spares->pop_back();
      block->second = {want, is_tensor};
      offset = block->first;
      if (!small) spare_bytes_ -= want;
    } else {
      if (!(small ? take_small(want, offset, failure) : take_anyhow(want, offset, failure))) return nullptr;
      live_[offset] = {want, is_tensor};
    }
  } while (!detached_.empty() && is_detached_locked(offset, want) && live_.erase(offset));
  count_in_use(want);
  return base() + offset + (small ? 0 : color_);
}

// Where there is no memory to grow, free pages elsewhere in the heap go back first.
bool Heap::take_anyhow(size_t bytes, size_t& offset, Failure& failure) {
  return take_pages(bytes, offset, failure) || (give_all_back() > 0 && take_pages(bytes, offset, failure));
}

// The list for blocks of this size, if they are kept for the next allocation: small ones in units of kAlign, then by
// pages, then in steps, of which one has one size class.
std::vector<Heap::Live::iterator>* Heap::spares_of(size_t bytes) {
  if (bytes < kPage) return &spares_[bytes / kAlign];
  if (bytes < 4 * kSpareStep) return &spares_[kSparePages + bytes / kPage];
  return bytes <= kSpareMost ? &spares_[kSpareSteps + bytes / kSpareStep] : nullptr;
}

bool Heap::keep_spare(Live::iterator block) {
  const size_t bytes = block->second.bytes;
  auto* spares = spares_of(bytes);
  const bool room = spares && (bytes < kPage ? spares->size() < kSpares : spare_bytes_ + bytes <= kSpareBytes);
  if (!room) return false;
  spares->push_back(block);
  block->second.spare = true;
  if (bytes >= kPage) spare_bytes_ += bytes;
  return true;
}

// Blocks of pages that were kept for the next allocation of their size become free for all.
void Heap::drop_spares() {
  for (size_t i = kSparePages; spare_bytes_ && i < spares_.size(); i++) {
    for (auto block : spares_[i]) {
      pages_.insert(block->first, block->second.bytes);
      spare_bytes_ -= block->second.bytes;
      live_.erase(block);
    }
    spares_[i].clear();
  }
}

// The live allocation that `p` points into; the end if there is none.
Heap::Live::iterator Heap::find_live(const void* p) {
  if (!holds(p)) return live_.end();
  const auto at = static_cast<size_t>(static_cast<const std::byte*>(p) - base());
  auto found = live_.upper_bound(at);
  if (found == live_.begin()) return live_.end();
  --found;
  return at < found->first + found->second.bytes && !found->second.spare ? found : live_.end();
}

void Heap::release(void* p) {
  if (is_of_parent()) return;
  std::lock_guard lock(mutex_);
  auto found = find_live(p);
  if (found == live_.end()) return;
  const size_t offset = found->first, bytes = found->second.bytes;
  count_in_use(-bytes);
  if (!detached_.empty() && is_detached_locked(offset, bytes)) {
    const bool is_private = found->second.is_private;
    live_.erase(found);
    if (is_private && take_back(offset, bytes)) return;
    quarantined_ += bytes;      // its addresses are not the file's any more
    if (bytes < kPage) return;  // others may live in the same page
    for (auto gone = detached_.lower_bound(offset); gone != detached_.end() && gone->first < offset + bytes; ++gone)
      madvise(base() + gone->first, gone->second, MADV_DONTNEED);
    return;
  }
  if (!keep_spare(found)) {
    live_.erase(found);
    if (bytes < kPage) return give_small(offset, bytes);
    pages_.insert(offset, bytes);
  }
  if (bytes >= kPage && spare_bytes_ + pages_.total - holes_.total > kTrimKeep) start_trimming();
}

void Heap::pin(const void* p) {
  std::lock_guard lock(mutex_);
  if (auto found = find_live(p); found != live_.end()) found->second.is_tensor = false;
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

}  // namespace unisono
