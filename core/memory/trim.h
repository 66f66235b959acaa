// Gives memory that is not needed back to the system.
//
// A thread looks once a second, and lives only while there may be something to find. It collects what nobody has used
// since its last look (scratch.h), and punches holes where heaps have had free pages since then. So a loop that needs
// its memory again within a second never loses it; a slower one loses kTrimBytes a second, which cost it 2 % of its
// time at most.
#pragma once

#include <cstddef>

namespace unisono {

constexpr size_t kTrimKeep = 1 << 20;    // free bytes that a heap keeps in any case
constexpr size_t kTrimBytes = 64 << 20;  // the most that one heap gives back at a time

void start_trimming();  // cheap if it is under way

}  // namespace unisono
