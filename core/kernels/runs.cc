// See runs.h.
#include "kernels/runs.h"

#include <algorithm>
#include <bit>

namespace unisono {
namespace {

// What number i of n completes, and the level at which what comes of it waits; see tree.h.
size_t completed_by(size_t i, size_t n) {
  return i + 1 == n ? i : i & ~(i + 1);
}

}  // namespace

Runs tree_runs(size_t k, size_t slice, size_t depth) {
  const size_t block = slice <= kLongestBlock ? slice : kBlock;
  const size_t blocks = (slice + block - 1) / block, slices = k / slice;
  const size_t inner = std::bit_width(blocks - 1);  // levels of the blocks; those of the slices lie above
  const size_t together = std::bit_floor(std::max<size_t>(1, depth / block));  // runs of a unit, a subtree
  Runs runs{{}, inner + std::bit_width(slices - 1), static_cast<size_t>(std::countr_zero(together))};
  runs.near = std::min(runs.near, blocks > 1 ? inner : runs.levels);
  runs.list.reserve(blocks * slices);
  for (size_t s = 0; s < slices; s++)
    for (size_t i = 0; i < blocks; i++) {
      const bool begins = (blocks > 1 ? i : s) % together == 0;
      Run run{s * slice + i * block, std::min(block, slice - i * block), begins, completed_by(i, blocks), -1};
      if (i + 1 < blocks) {
        run.waits = std::countr_zero(i + 1);
      } else {
        run.joins |= completed_by(s, slices) << inner;
        if (s + 1 < slices) run.waits = static_cast<int>(inner) + std::countr_zero(s + 1);
      }
      runs.list.push_back(run);
    }
  return runs;
}

}  // namespace unisono
