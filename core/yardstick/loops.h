// The loops of the yardstick: strips of memory loaded, added and stored as plainly and as fast as possible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace unisono {

constexpr size_t kElement = sizeof(float);

// A byte range with the addresses it is loaded from and stored to; several sources are added as float32.
struct Strip {
  std::vector<const char*> src;
  std::vector<char*> dst;
  size_t bytes;
};

enum class Store : uint8_t { cached, streaming, string_move };  // streaming: non-temporal; the last: rep movsb

// Does all of them, in order. Where a kind of store cannot be used (alignment, CPU) the next plainer one is.
void move_strips(const std::vector<Strip>& strips, Store store);

void relax();  // one turn of a spin loop

}  // namespace unisono
