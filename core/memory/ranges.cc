// See ranges.h.
#include "memory/ranges.h"

#include <iterator>

namespace unisono {

void Ranges::erase(size_t offset) {
  auto found = by_place.find(offset);
  total -= found->second;
  by_size.erase({found->second, offset});
  by_place.erase(found);
}

std::pair<size_t, size_t> Ranges::insert(size_t offset, size_t bytes) {
  auto next = by_place.lower_bound(offset);
  if (next != by_place.begin()) {
    auto [begin, length] = *std::prev(next);
    if (begin + length == offset) {
      offset = begin;
      bytes += length;
      erase(begin);
    }
  }
  if (next != by_place.end() && offset + bytes == next->first) {
    bytes += next->second;
    erase(next->first);
  }
  by_place[offset] = bytes;
  by_size.insert({bytes, offset});
  total += bytes;
  return {offset, bytes};
}

void Ranges::remove(size_t offset, size_t bytes) {
  for (;;) {
    auto found = by_place.lower_bound(offset + bytes);
    if (found == by_place.begin()) return;
    auto [begin, length] = *--found;
    if (begin + length <= offset) return;
    erase(begin);
    if (begin < offset) insert(begin, offset - begin);
    if (begin + length > offset + bytes) insert(offset + bytes, begin + length - (offset + bytes));
  }
}

bool Ranges::take(size_t bytes, size_t& offset) {
  auto fit = by_size.lower_bound({bytes, 0});
  if (fit == by_size.end()) return false;
  const size_t size = fit->first;
  offset = fit->second;
  erase(offset);
  if (size > bytes) insert(offset + bytes, size - bytes);
  return true;
}

}  // namespace unisono
