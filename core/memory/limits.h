// What this process may take: memory that the machine has and every cgroup above it allows, and processors.
#pragma once

#include <cstddef>

namespace unisono {

// Bytes this process may still take without being refused or killed: least of MemAvailable and every cgroup
// limit above it. SIZE_MAX where nothing says.
size_t memory_available();

// Processors that the quotas of its cgroups allow; infinity without a limit.
double processors_allowed();

}  // namespace unisono
