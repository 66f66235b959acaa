// The order in which sources are combined: the binary tree of the number rule (reduce.h), in registers.
//
// Private to the kernels' files, and like vectors.h in an unnamed namespace. A source is `vectors` accumulators at one
// place; `leaf(acc, s)` loads those of source s, `join(a, b)` combines two, the one of the lower sources first. Eight
// sources beginning at a multiple of eight are a subtree, so a row of them is worked off in such groups: what is done
// but still waits for its right neighbour is kept, one partial per set bit of the number of groups so far.
#pragma once

#include "base/vectors.h"

namespace unisono {
namespace {

constexpr size_t group_sources = 8;

template <size_t vectors, class Acc, class Join>
UNISONO_INLINE void join_all(Acc (&left)[vectors], const Acc* right, Join join) {
#pragma GCC unroll 8
  for (size_t v = 0; v < vectors; ++v) left[v] = join(left[v], right[v]);
}

template <size_t vectors, class Acc, class Leaf, class Join>
UNISONO_INLINE void tree_of_four(Acc (&acc)[vectors], size_t begin, size_t n, Leaf leaf, Join join) {
  leaf(acc, begin);
  if (n == 1) return;
  Acc right[vectors];
  leaf(right, begin + 1);
  join_all(acc, right, join);
  if (n == 2) return;
  leaf(right, begin + 2);
  if (n > 3) {
    Acc last[vectors];
    leaf(last, begin + 3);
    join_all(right, last, join);
  }
  join_all(acc, right, join);
}

// Sources [begin, begin + n), where begin is a multiple of 8 and n is at most 8.
template <size_t vectors, class Acc, class Leaf, class Join>
UNISONO_INLINE void tree_of_group(Acc (&acc)[vectors], size_t begin, size_t n, Leaf leaf, Join join) {
  tree_of_four(acc, begin, n < 4 ? n : 4, leaf, join);
  if (n <= 4) return;
  Acc right[vectors];
  tree_of_four(right, begin + 4, n - 4, leaf, join);
  join_all(acc, right, join);
}

// The waiting partials (bit l: the one of 2^l groups) that group `g` completes, to be joined from the lowest on; the
// last group is the right neighbour of all that wait. What comes of it waits at level `level_after`.
UNISONO_INLINE size_t completed_by(size_t g, bool last) {
  return last ? g : g & ~(g + 1);
}
UNISONO_INLINE size_t level_after(size_t g) {
  return static_cast<size_t>(__builtin_ctzll(g + 1));
}

// Any number of sources at one place.
template <size_t vectors, class Acc, class Leaf, class Join>
UNISONO_INLINE void tree_of_all(Acc (&acc)[vectors], size_t n, Leaf leaf, Join join) {
  if (n <= group_sources) return tree_of_group(acc, 0, n, leaf, join);
  Acc waiting[32][vectors];
  for (size_t g = 0;; ++g) {
    const size_t begin = g * group_sources, left = n - begin;
    const bool last = left <= group_sources;
    tree_of_group(acc, begin, last ? left : group_sources, leaf, join);
    for (size_t done = completed_by(g, last); done; done &= done - 1) {
      Acc held[vectors];
      const Acc* from = waiting[__builtin_ctzll(done)];
#pragma GCC unroll 8
      for (size_t v = 0; v < vectors; ++v) held[v] = from[v];
      join_all(held, acc, join);
#pragma GCC unroll 8
      for (size_t v = 0; v < vectors; ++v) acc[v] = held[v];
    }
    if (last) return;
    Acc* to = waiting[level_after(g)];
#pragma GCC unroll 8
    for (size_t v = 0; v < vectors; ++v) to[v] = acc[v];
  }
}

}  // namespace
}  // namespace unisono
