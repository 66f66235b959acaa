// What was measured about moving ordinary tensors on this kind of machine, once: see verbs/trial.h. Calls begin with
// it; how they go on is found out while they run (verbs/gauge.h).
//
// It is about speed only; results have the same bits whatever it says. Ranks need not know the same: what all must do
// alike they decide from rank 0's, which travels with every longer request (control.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace unisono {

struct Tuning {
  static constexpr uint8_t kNever = 63;
  // Bytes from which on, and below which, one rank's memory is read by another where it is (reach.h). Longer tensors
  // leave the caches: then a ring, which stays there, moves fewer bytes through memory than the kernel does.
  struct Span {
    uint8_t from = 0, below = 0;
    bool holds(size_t bytes) const { return bytes >> from && !(bytes >> below); }
    bool is_possible() const { return from >= 12 && from <= below; }
    bool operator==(const Span&) const = default;
  };
  // Powers of two; all 0: nothing is known yet.
  Span copies, reductions;
  uint8_t piece = 0;       // bytes of the longest piece that goes through a ring
  uint8_t ring = 0;        // bytes of a ring that are used
  bool is_chosen = false;  // by the user: nothing else is tried

  bool is_known() const { return copies.from; }
  bool reads(size_t bytes, bool reduces = false) const {
    return is_known() && (reduces ? reductions : copies).holds(bytes);
  }
  uint32_t word() const;            // 0: nothing is known
  static Tuning of(uint32_t word);  // unknown if the word is impossible
  bool operator==(const Tuning&) const = default;
};

// Where nothing was measured.
constexpr Tuning kDefaultTuning = {{Tuning::kNever, Tuning::kNever}, {Tuning::kNever, Tuning::kNever}, 17, 22};

// Of this process: what it was told, has measured, or found in the user's cache folder.
Tuning current_tuning();
void set_tuning(Tuning tuning);
// The same, and keeps it for later processes; nothing happens where the folder cannot be written.
void keep_tuning(Tuning tuning);

std::string machine_words();  // which machines are of one kind: the processor's name and its caches
std::string tuning_file();    // empty: there is no folder for it

}  // namespace unisono
