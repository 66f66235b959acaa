// What was measured about moving ordinary tensors on this kind of machine, once: see verbs/trial.h.
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
  // Powers of two; all 0: nothing is known yet.
  // Bytes from which on one rank's memory is read by another where it is (reach.h), to be copied or to be reduced; or
  // kNever.
  uint8_t single_from = 0;
  uint8_t reduce_from = 0;
  uint8_t piece = 0;  // bytes of the longest piece that goes through a ring
  uint8_t ring = 0;   // bytes of a ring that are used

  bool is_known() const { return single_from; }
  bool reads_from(size_t bytes, bool reduces = false) const {
    const uint8_t from = reduces ? reduce_from : single_from;
    return is_known() && from < kNever && bytes >> from;
  }
  uint32_t word() const {
    return static_cast<uint32_t>(single_from | piece << 8 | ring << 16) | static_cast<uint32_t>(reduce_from) << 24;
  }
  static Tuning of(uint32_t word);  // unknown if the word is impossible
};

constexpr Tuning kDefaultTuning = {Tuning::kNever, Tuning::kNever, 18, 22};  // where nothing was measured

// Of this process: what it was told, has measured, or found in the user's cache folder.
Tuning current_tuning();
void set_tuning(Tuning tuning);
// The same, and keeps it for later processes; nothing happens where the folder cannot be written.
void keep_tuning(Tuning tuning);

std::string machine_words();  // which machines are of one kind: the processor's name and its caches
std::string tuning_file();    // empty: there is no folder for it

}  // namespace unisono
