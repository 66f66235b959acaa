// In which runs a product sums over k, and how the runs' sums are joined.
//
// A run is a stretch of k of which every element of the result has one sum, a chain of fused multiply-adds from the
// first k to the last. Ordinary products have runs of equal length, each added to what there is. In the tree order
// (Product::slice) all that decides an element's bits is fixed by k and the slice: the slice is cut into blocks, each a
// run, whose sums are joined by the binary tree of reduce.h, first those of a slice, then the slices. A part of the
// slices that is a subtree gives a sum that others can be joined to: that is how ranks share a product.
#pragma once

#include <cstddef>
#include <vector>

namespace unisono {

constexpr size_t kLongestBlock = 255;  // a slice up to here is one block
constexpr size_t kBlock = 128;         // longer ones, which cannot be halved, are cut into these; the last is shorter

struct Run {
  size_t k0, k;
  bool begins;   // a unit: runs that are worked off together, tile by tile
  size_t joins;  // bit l: the sum that waits at level l is joined to this one, from the lowest on
  int waits;     // the level at which this one waits then; -1: it is the result
};

struct Runs {
  std::vector<Run> list;
  size_t levels = 0;
  size_t near = 0;  // the levels below wait for runs of their own unit only
};

// Of a product of k > 0 in slices that divide k, in units of at most `depth`, which is not less than a block.
Runs tree_runs(size_t k, size_t slice, size_t depth);

}  // namespace unisono
