// See kept.h.
#include "memory/kept.h"

#include <algorithm>
#include <map>

#include "memory/heap.h"

namespace unisono {
namespace {

constexpr size_t kMostPages = 4096;  // of a directory: a hostile chain may be a circle

// An entry as its words said when each was read once. Nothing if they cannot be true.
bool copy_entry(const KeptEntry& entry, size_t capacity, KeptTensor& tensor, uint64_t& stamp) {
  stamp = entry.stamp.load(std::memory_order_acquire);
  if (stamp == 0) return false;
  const uint64_t begun = entry.begun.load(std::memory_order_relaxed);
  const uint64_t ended = entry.ended.load(std::memory_order_relaxed);
  tensor.step = static_cast<int64_t>(entry.steps[ended % 2].load(std::memory_order_relaxed));
  tensor.has_step = ended != 0;
  tensor.whole = begun == ended;
  struct {
    uint64_t offset, bytes, dtype, dims, shape[kKeptDims];
  } said;
  copy_words(&said, &entry.offset, sizeof said);
  alignas(uint64_t) char name[kKeptName];
  copy_words(name, entry.name, sizeof name);
  tensor.name = text_in(name);
  if (said.dtype >= static_cast<uint64_t>(DType::count_) || said.dims > kKeptDims || said.offset < 4096 ||
      said.offset > capacity || said.bytes > capacity - said.offset || tensor.name.empty())
    return false;
  tensor.dtype = static_cast<DType>(said.dtype);
  if (said.offset % dtype_bytes(tensor.dtype)) return false;
  tensor.offset = said.offset;
  tensor.bytes = said.bytes;
  size_t bytes = dtype_bytes(tensor.dtype);  // with an empty dimension counted as 1: strides must not overflow either
  bool is_empty = false;
  tensor.shape.clear();
  for (uint64_t i = 0; i < said.dims; i++) {
    is_empty |= said.shape[i] == 0;
    const size_t length = std::max<size_t>(said.shape[i], 1);
    if (length > INT64_MAX || __builtin_mul_overflow(bytes, length, &bytes) || bytes > INT64_MAX) return false;
    tensor.shape.push_back(static_cast<int64_t>(said.shape[i]));
  }
  return (is_empty ? 0 : bytes) == said.bytes;
}

Flag& first_page(std::byte* heap_base) {
  return *reinterpret_cast<Flag*>(heap_base + kKeptAt);
}

}  // namespace

KeptEntry* Keeping::take_entry(Failure& failure) {
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      KeptEntry* entry = free_.back();
      free_.pop_back();
      return entry;
    }
  }
  auto* page = static_cast<KeptPage*>(heap_.allocate(sizeof(KeptPage), failure));  // for good; not under the mutex
  if (!page) return nullptr;
  std::memset(static_cast<void*>(page), 0, sizeof *page);
  std::lock_guard lock(mutex_);
  Flag& before = pages_.empty() ? first_page(heap_.base()) : pages_.back()->next;
  before.store(static_cast<uint64_t>(reinterpret_cast<std::byte*>(page) - heap_.base()), std::memory_order_release);
  pages_.push_back(page);
  for (size_t i = std::size(page->entries); i-- > 1;) free_.push_back(&page->entries[i]);
  return &page->entries[0];
}

KeptEntry* Keeping::add(const KeptTensor& tensor, Failure& failure) {
  KeptEntry* entry = take_entry(failure);
  if (!entry) return nullptr;
  std::lock_guard lock(mutex_);
  entry->offset = tensor.offset;
  entry->bytes = tensor.bytes;
  entry->dtype = static_cast<uint64_t>(tensor.dtype);
  entry->dims = tensor.shape.size();
  for (size_t i = 0; i < tensor.shape.size(); i++) entry->shape[i] = static_cast<uint64_t>(tensor.shape[i]);
  entry->begun.store(0, std::memory_order_relaxed);
  entry->ended.store(0, std::memory_order_relaxed);
  copy_text(entry->name, sizeof entry->name, tensor.name);
  entry->stamp.store(++stamp_, std::memory_order_release);
  used_.push_back(entry);
  return entry;
}

void Keeping::remove(KeptEntry* entry) {
  if (heap_.is_of_parent()) return;
  std::lock_guard lock(mutex_);
  entry->stamp.store(0, std::memory_order_release);
  if (std::erase(used_, entry)) free_.push_back(entry);
}

void Keeping::forget(size_t offset, size_t bytes) {
  std::lock_guard lock(mutex_);
  for (KeptEntry* entry : used_)
    if (entry->offset < offset + bytes && offset < entry->offset + entry->bytes)
      entry->stamp.store(0, std::memory_order_release);
}

void Keeping::begin_write(KeptEntry& entry) {
  // After a bracket that was left by an exception this changes nothing: the tensor is still not whole.
  entry.begun.store(entry.ended.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  fence(std::memory_order_seq_cst);  // the caller's writes stay behind it
}

void Keeping::end_write(KeptEntry& entry, int64_t step) {
  const uint64_t begun = entry.begun.load(std::memory_order_relaxed);
  entry.steps[begun % 2].store(static_cast<uint64_t>(step), std::memory_order_release);
  entry.ended.store(begun, std::memory_order_release);
}

std::vector<KeptTensor> read_kept(const std::byte* heap_base, size_t capacity) {
  std::map<std::string, std::pair<uint64_t, KeptTensor>> found;
  uint64_t at = first_page(const_cast<std::byte*>(heap_base)).load(std::memory_order_acquire);
  for (size_t pages = 0; at && pages < kMostPages; pages++) {
    if (at < 4096 || at % kLineBytes || at > capacity - sizeof(KeptPage)) break;
    const auto* page = reinterpret_cast<const KeptPage*>(heap_base + at);
    for (const KeptEntry& entry : page->entries) {
      KeptTensor tensor;
      uint64_t stamp;
      if (!copy_entry(entry, capacity, tensor, stamp)) continue;
      auto& best = found[tensor.name];
      if (stamp > best.first) best = {stamp, std::move(tensor)};
    }
    at = page->next.load(std::memory_order_acquire);
  }
  std::vector<KeptTensor> tensors;
  for (auto& [name, stamped] : found) tensors.push_back(std::move(stamped.second));
  return tensors;
}

}  // namespace unisono
