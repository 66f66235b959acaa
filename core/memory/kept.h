// Tensors that outlive their process: a directory in its heap says what they are called, where they lie and whether
// they are whole, and survivors read it in their own mapping of the dead rank's heap.
//
// A word in the heap's first page leads to a chain of pages with entries. The owner fills an entry before it gives it a
// stamp, and brackets every write to the tensor: `begun` is one ahead of `ended` while it writes. A process that is
// killed has done all its stores up to some instruction and none behind it, so whoever reads the heap after its death
// finds either both numbers equal, and the tensor as the last bracket left it, or that a write was under way.
// Invariant: every word is read once and checked: another rank may write into a dead one's heap.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "base/shared.h"
#include "base/status.h"

namespace unisono {

class Heap;

constexpr size_t kKeptAt = 512;  // in the heap's first page: a Flag, where the first page of the directory is; 0: none
constexpr int kKeptDims = 8;
constexpr size_t kKeptName = 120;  // with a zero at its end

struct alignas(kLineBytes) KeptEntry {
  // 0: free. Otherwise the number of this use of any entry: of two with one name the higher one counts. Released by
  // add after the rest, acquired by read_kept.
  Flag stamp;
  uint64_t offset, bytes;
  uint64_t dtype;
  uint64_t dims;
  uint64_t shape[kKeptDims];
  // Brackets begun and ended. Stored by begin_write and end_write; nobody reads them while their owner lives. Loaded by
  // copy_entry, relaxed: it comes after the owner's hang-up, which comes after all its stores.
  Flag begun, ended;
  // Of bracket n in entry n % 2: the last one that ended is not overwritten by the next. Stored by end_write, before
  // `ended` and with release, so that a process killed in between has not ended the bracket; loaded as `ended` is.
  Flag steps[2];
  char name[kKeptName];
};
static_assert(sizeof(KeptEntry) == 2 * kLineBytes);

struct alignas(kLineBytes) KeptPage {
  Flag next;  // where the next page is; 0: none. Released by add when that page is filled with zeros
  KeptEntry entries[15];
};
static_assert(sizeof(KeptPage) <= 4096);

struct KeptTensor {
  std::string name;
  size_t offset = 0, bytes = 0;
  DType dtype = DType::u8;
  std::vector<int64_t> shape;
  int64_t step = 0;
  bool has_step = false;  // a bracket has ended
  bool whole = false;
};

// The owner's side; one per heap.
class Keeping {
 public:
  explicit Keeping(Heap& heap) : heap_(heap) {}
  // Null with `failure` filled when there is no memory. The tensor must stay where it is until `remove`.
  KeptEntry* add(const KeptTensor& tensor, Failure& failure);
  void remove(KeptEntry* entry);
  // These bytes are not the file's any more (Heap::detach): a tensor there is lost to the peers.
  void forget(size_t offset, size_t bytes);
  bool has(const KeptEntry* entry) const { return entry->stamp.load(std::memory_order_relaxed) != 0; }

  static void begin_write(KeptEntry& entry);
  static void end_write(KeptEntry& entry, int64_t step);

 private:
  KeptEntry* take_entry(Failure& failure);

  Heap& heap_;
  std::mutex mutex_;  // taken after the heap's own, if both are
  uint64_t stamp_ = 0;
  std::vector<KeptPage*> pages_;
  std::vector<KeptEntry*> free_, used_;
};

// What the process whose heap this was has kept; entries that are impossible, or were half made, are left out.
std::vector<KeptTensor> read_kept(const std::byte* heap_base, size_t capacity);

}  // namespace unisono
