// Ranges of bytes by place and by size, no two of them adjacent: what is next to each other is joined.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <utility>

namespace unisono {

struct Ranges {
  std::map<size_t, size_t> by_place;            // offset -> bytes
  std::set<std::pair<size_t, size_t>> by_size;  // (bytes, offset) of the same ranges
  size_t total = 0;                             // bytes of all of them

  std::pair<size_t, size_t> insert(size_t offset, size_t bytes);  // the range it has become part of
  void erase(size_t offset);                                      // the range that begins there
  void remove(size_t offset, size_t bytes);                       // whatever of that is in a range
  bool take(size_t bytes, size_t& offset);                        // the best fit
};

}  // namespace unisono
