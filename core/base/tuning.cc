// See tuning.h.
#include "base/tuning.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>

namespace unisono {
namespace {

// What was measured in another way is measured again.
constexpr char kFormat[] = "unisono tuning 3";

// Of this process, as a word; 0: not known. Relaxed: the word is all there is. Nothing guards the look into
// the file, because a child that is forked meanwhile would wait for it for ever; two threads may look.
std::atomic<uint32_t> chosen{0};
std::atomic<bool> has_looked{false};

constexpr uint8_t kLeastPiece = 15, kLeastRing = 19;

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

void make_folders(const std::string& file) {
  for (size_t end = file.find('/', 1); end != std::string::npos; end = file.find('/', end + 1))
    mkdir(file.substr(0, end).c_str(), 0700);
}

uint32_t read_file() {
  std::ifstream file(tuning_file());
  std::string format, machine;
  uint32_t word = 0;
  if (!std::getline(file, format) || !std::getline(file, machine) || !(file >> word)) return 0;
  return format == kFormat && machine == machine_words() ? Tuning::of(word).word() : 0;
}

}  // namespace

Tuning Tuning::of(uint32_t word) {
  auto bits = [&](int at, int n) { return static_cast<uint8_t>(word >> at & ((1u << n) - 1)); };
  const Tuning t{{bits(0, 6), bits(6, 6)},
                 {bits(12, 6), bits(18, 6)},
                 static_cast<uint8_t>(kLeastPiece + bits(24, 3)),
                 static_cast<uint8_t>(kLeastRing + bits(27, 2)),
                 bits(29, 1) != 0};
  const bool possible =
      t.copies.is_possible() && t.reductions.is_possible() && t.piece <= 20 && t.ring >= t.piece + 2 && !(word >> 30);
  return possible ? t : Tuning{};
}

uint32_t Tuning::word() const {
  if (!is_known()) return 0;
  const uint32_t spans =
      copies.from | uint32_t{copies.below} << 6 | uint32_t{reductions.from} << 12 | uint32_t{reductions.below} << 18;
  return spans | static_cast<uint32_t>(piece - kLeastPiece) << 24 | static_cast<uint32_t>(ring - kLeastRing) << 27 |
         uint32_t{is_chosen} << 29;
}

Tuning current_tuning() {
  if (!has_looked.load(std::memory_order_relaxed)) {
    uint32_t none = 0;
    chosen.compare_exchange_strong(none, read_file(), std::memory_order_relaxed);
    has_looked.store(true, std::memory_order_relaxed);
  }
  return Tuning::of(chosen.load(std::memory_order_relaxed));
}

void set_tuning(Tuning tuning) {
  chosen.store(tuning.word(), std::memory_order_relaxed);
}

void keep_tuning(Tuning tuning) {
  set_tuning(tuning);
  const std::string path = tuning_file();
  if (path.empty()) return;
  make_folders(path);
  const std::string unfinished = path + "." + std::to_string(getpid());
  {
    std::ofstream file(unfinished);
    file << kFormat << '\n' << machine_words() << '\n' << tuning.word() << '\n';
    if (!file.flush()) {
      unlink(unfinished.c_str());
      return;
    }
  }
  if (std::rename(unfinished.c_str(), path.c_str()) != 0) unlink(unfinished.c_str());
}

std::string machine_words() {
  std::string found;
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line) && !line.empty();)  // the first processor's
    for (const char* key : {"vendor_id", "cpu family", "model", "model name", "stepping", "CPU part"})
      if (line.rfind(std::string(key) + "\t", 0) == 0) found += line.substr(line.find(':') + 1);
  for (int i = 0; i < 4; i++) {
    found += ' ';
    found += first_line("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(i) + "/size");
  }
  return found;
}

std::string tuning_file() {
  const char *cache = std::getenv("XDG_CACHE_HOME"), *home = std::getenv("HOME");
  std::string folder;
  if (cache && *cache == '/')
    folder = cache;
  else if (home && *home == '/')
    folder = std::string(home) + "/.cache";
  if (folder.empty()) return "";
  uint64_t hash = 0xcbf29ce484222325;
  for (char c : machine_words()) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  char name[64];
  std::snprintf(name, sizeof name, "/unisono/tuning/%016lx", static_cast<unsigned long>(hash));
  return folder + name;
}

}  // namespace unisono
