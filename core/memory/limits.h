// How much memory this process may still take: what the machine has, and what every cgroup above it allows.
#pragma once

#include <cstddef>

namespace unisono {

// Bytes this process may still take without being refused or killed: least of MemAvailable and every cgroup
// limit above it. SIZE_MAX where nothing says.
size_t memory_available();

}  // namespace unisono
