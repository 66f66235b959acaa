// See limits.h.
#include "memory/limits.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>

namespace unisono {
namespace {

// One number in a file; SIZE_MAX for "max" or no file.
size_t read_number(const std::string& path) {
  std::ifstream file(path);
  size_t n = SIZE_MAX;
  if (!(file >> n)) return SIZE_MAX;
  return n;
}

size_t field_of(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    if (line.compare(0, key.size(), key) == 0) return std::strtoull(line.c_str() + key.size(), nullptr, 10);
  return SIZE_MAX;
}

// What a cgroup folder still allows: limit - (usage - page cache that can be dropped).
size_t cgroup_room(const std::string& folder, const char* limit, const char* usage, const char* cache_key) {
  size_t most = read_number(folder + limit), used = read_number(folder + usage);
  if (most == SIZE_MAX || used == SIZE_MAX || most > (size_t{1} << 60)) return SIZE_MAX;
  size_t cache = field_of(folder + "/memory.stat", cache_key);
  if (cache != SIZE_MAX) used -= std::min(used, cache);
  return most > used ? most - used : 0;
}

// Calls `look` with every cgroup folder of this process for a controller, up to the root, where a limit anywhere
// counts, and with whether it is of version 2. In a container the path may not exist below the mount.
template <class Look>
void visit_cgroups(const std::string& controller, Look look) {
  std::ifstream self("/proc/self/cgroup");
  for (std::string line; std::getline(self, line);) {
    size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
    const bool v2 = controllers.empty(),
               v1 = ("," + controllers + ",").find("," + controller + ",") != std::string::npos;
    if (!v1 && !v2) continue;
    for (;;) {
      if (path == "/") path.clear();
      look((v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/" + controller) + path, v2);
      if (path.empty()) break;
      path.erase(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
}

size_t cgroup_available() {
  size_t least = SIZE_MAX;
  visit_cgroups("memory", [&](const std::string& folder, bool v2) {
    least = std::min(
        least, v2 ? cgroup_room(folder, "/memory.max", "/memory.current", "inactive_file ")
                  : cgroup_room(folder, "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file "));
  });
  return least;
}

}  // namespace

size_t memory_available() {
  size_t kib = field_of("/proc/meminfo", "MemAvailable:");
  size_t machine = kib == SIZE_MAX ? SIZE_MAX : kib * 1024;
  return std::min(machine, cgroup_available());
}

double processors_allowed() {
  double least = INFINITY;
  visit_cgroups("cpu", [&](const std::string& folder, bool v2) {
    double us = 0, period = 0;
    if (v2) {
      std::ifstream(folder + "/cpu.max") >> us >> period;  // "max" is no number, and leaves a 0
    } else {
      std::ifstream(folder + "/cpu.cfs_quota_us") >> us;
      std::ifstream(folder + "/cpu.cfs_period_us") >> period;
    }
    if (us > 0 && period > 0) least = std::min(least, us / period);
  });
  return least;
}

}  // namespace unisono
