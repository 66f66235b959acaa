// What a forked child keeps of its parent's heap: its tensors as they are at the fork, though peers have the same pages
// mapped and the parent writes on.
//
// Steps, in the parent and before the fork: if more is in use than set_fork_copy_max allows, tensors are made private
// memory of this process (Heap::detach), those no collective has used lately first, until the rest is little enough;
// the rest is copied. The fork itself hands both on to the child, private memory as it does with any other: shared
// until one of the two writes. In the child the copy is put where the heap was.
// A tensor that was made private costs nothing at the next fork, and is ordinary memory for collectives until it is
// freed; its pages are the heap's again then. Nothing can be made private while peers may be at a tensor of this
// process (`Told`): then everything is copied, whatever the limit; and where there is no memory for that, the child has
// no access to those tensors, and is killed by the system if it tries: never a wrong value.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <utility>

#include "memory/heap.h"
#include "memory/limits.h"

namespace unisono {
namespace {

// Written by set_fork_copy_max, read before a fork; relaxed, since the number publishes nothing.
std::atomic<size_t> fork_copy_max{256 << 20};

}  // namespace

void set_fork_copy_max(size_t bytes) {
  fork_copy_max.store(bytes, std::memory_order_relaxed);
}

void Heap::before_fork() {
  for (Heap* heap : heaps_) {
    heap->mutex_.lock();
    try {
      heap->prepare_fork(fork_copy_max.load(std::memory_order_relaxed));
    } catch (const std::bad_alloc&) {  // as if there were no memory for the copy
    }
  }
}

void Heap::prepare_fork(size_t most) {
  if (to_copy() > most) leave_to_fork(most);
  const size_t bytes = to_copy();
  if (bytes > kSlack && bytes + kSlack > memory_available()) {
    std::fprintf(stderr,
                 "unisono: a process is forked with %zu bytes of shared tensors in use, and there is no memory to copy "
                 "them; the child cannot use them\n",
                 bytes);
    return;
  }
  copy_ = Pages(top_);
  if (!copy_) return;
  // Half of the time goes into getting the pages one by one. Large ones may hold what is not copied too, so only where
  // that is little.
  if (bytes > top_ / 2) madvise(copy_.get(), top_, MADV_HUGEPAGE);
  for (const auto& [offset, block] : live_)
    if (!block.spare && !block.is_private) std::memcpy(copy_.get() + offset, base() + offset, block.bytes);
}

// Makes tensors private until at most `most` bytes are left to copy, as far as that can be done.
void Heap::leave_to_fork(size_t most) {
  // Before the look at told_: a call that begins meanwhile raises told_ first, and then asks for detached memory, under
  // the lock if it sees this number. So either its Told is seen here, or it sees what is detached here.
  detachments_.fetch_add(1);
  if (told_.load() != 0) return;
  std::vector<Live::iterator> tensors;
  for (auto it = live_.begin(); it != live_.end(); ++it) {
    const Block& block = it->second;
    const bool can_go = block.is_tensor && !block.spare && !block.is_private && block.bytes >= kPage;
    if (can_go && (detached_.empty() || !is_detached_locked(it->first, block.bytes))) tensors.push_back(it);
  }
  auto is_used = [&](Live::iterator it) { return mapping_->used(it->first, it->second.bytes); };
  std::sort(tensors.begin(), tensors.end(), [&](Live::iterator a, Live::iterator b) {
    const bool a_used = is_used(a), b_used = is_used(b);
    return a_used != b_used ? b_used : a->second.bytes > b->second.bytes;
  });
  for (auto it : tensors) {
    if (to_copy() <= most) break;
    if (!take_away(it->first, it->second.bytes)) break;
    it->second.is_private = true;
    private_bytes_ += it->second.bytes;
  }
  mapping_->forget_used();
}

void Heap::after_fork_in_parent() {
  for (Heap* heap : heaps_) {
    heap->copy_.reset();
    heap->mutex_.unlock();
  }
}

void Heap::after_fork_in_child() {
  for (Heap* heap : heaps_) {
    if (heap->copy_) {
      heap->mapping_->replace(std::move(heap->copy_));
    } else {
      for (const auto& [offset, block] : heap->live_)
        if (block.is_tensor && !block.spare && !block.is_private && block.bytes >= kPage)
          mprotect(heap->base() + offset, block.bytes, PROT_NONE);
    }
    heap->mutex_.unlock();
  }
  heaps_.clear();  // a child of this child gets what is here now by fork itself
}

// A tensor that was made private for a fork is given back: the heap's pages come back to its addresses.
bool Heap::take_back(size_t offset, size_t bytes) {
  if (!mapping_->share_again(offset, bytes)) return false;
  detached_.erase(detached_.lower_bound(offset), detached_.lower_bound(offset + bytes));
  private_bytes_ -= bytes;
  holes_.insert(offset, bytes);
  pages_.insert(offset, bytes);
  return true;
}

}  // namespace unisono
