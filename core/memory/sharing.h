// What torch allocates for CPU tensors comes from this process's heap.
//
// torch's CPU allocator is posix_memalign and free, imported by libc10.so; both are replaced (imports.h), once and for
// good. An allocation that is large enough while the switch is on comes from the heap; all others, and all that the
// heap has no memory for, from the function that was there before. What is freed goes back to where its address says.
// torch's own way to another allocator, c10::SetAllocator, wants an object of a C++ class of torch: its headers, its
// compiler's ABI and a build for each of its releases; and c10::alloc_cpu, which some operators call, passes it by.
//
// Both functions run in any thread, with or without Python's lock, also while the process ends and in forked children.
// They never throw, and nothing they use is ever destroyed. A child has a heap of its own; freeing what it inherited
// does nothing, since that memory is its parent's heap.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace unisono {

// From now on torch's allocator asks here. Once done, it stays; until then nothing is changed.
bool replace_allocator(const char* library, Failure& failure);

// Allocations of `min_bytes` and more come from the heap while less than `max_bytes` of it are in use, as far as that
// is known. SIZE_MAX for `min_bytes`: none.
void share_from(size_t min_bytes, size_t max_bytes);

// Allocations that were large enough, but the heap had no room for.
uint64_t share_refusals();

}  // namespace unisono
