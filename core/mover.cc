// See mover.h: what copies and reductions share.
#include "mover.h"

#include <algorithm>
#include <fstream>

#include "wait.h"

namespace unisono {

size_t last_cache_bytes() {
  static const size_t bytes = [] {
    // What this processor shares, not what sysconf adds up over a whole socket.
    size_t largest = 0;
    for (int i = 0; i < 8; i++) {
      std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(i) + "/size");
      size_t n = 0;
      char unit = 0;
      if (file >> n) file >> unit;
      largest = std::max(largest, unit == 'M' ? n << 20 : unit == 'K' ? n << 10 : n);
    }
    return largest ? largest : size_t{8} << 20;
  }();
  return bytes;
}

bool Mover::all_buffered() const {
  for (int r = 0; r < size_; r++)
    if (!buffered(r)) return false;
  return true;
}

const std::byte* Mover::input(int r, int j, size_t count) const {
  if (r == me_) return c_.in_parts ? c_.in_parts[j].ptr : c_.in;
  const Descriptor& d = descriptor(r);
  if (d.input == Holder::place)
    return g_.resolve(d.has_table && entry(r, j).in_count ? entry(r, j).in : d.in, bytes(count));
  const std::byte* held = d.input == Holder::inlined ? d.payload : g_.peer(r).block.slot(c_.seq);
  if (c_.verb == Verb::reduce_scatter) {
    for (int k = 0; k < j; k++) held += bytes(c_.in_parts[k].count);
  } else if (c_.verb == Verb::all_to_all || c_.verb == Verb::scatter) {
    for (int k = 0; k < j; k++) held += bytes(entry(r, k).in_count);
  }
  return held;
}

std::byte* Mover::output(int r, int j, size_t count) const {
  if (r == me_) return c_.out_parts ? c_.out_parts[j].ptr : c_.out;
  const Descriptor& d = descriptor(r);
  return g_.resolve(d.has_table && entry(r, j).out_count ? entry(r, j).out : d.out, bytes(count));
}

void StageGauge::end(bool past_caches) {
  constexpr size_t enough = 64 << 10;  // bytes to judge by
  constexpr double least = 5.5;        // bytes per nanosecond
  constexpr uint32_t calls = 100;      // until the usual way is tried again
  uint32_t left = slow_.load(std::memory_order_relaxed);
  if (left) {
    slow_.store(left - 1, std::memory_order_relaxed);
  } else if (!past_caches && bytes_ >= enough && static_cast<double>(bytes_) < least * static_cast<double>(ns_)) {
    slow_.store(calls, std::memory_order_relaxed);
  }
}

// The wide stages if every rank has one, else those in the blocks; descriptors say which, so all ranks agree.
bool Mover::find_stages() {
  bool wide = true;
  for (int r = 0; r < size_; r++) wide = wide && descriptor(r).wide;
  stages_.clear();
  gauge_.begin();
  past_caches_ = false;
  for (int r = 0; r < size_; r++) past_caches_ |= g_.peer(r).block.reads_slowly().load(std::memory_order_relaxed) != 0;
  for (int r = 0; r < size_; r++) {
    const Block& block = g_.peer(r).block;
    Stage stage{block.stage(), kStageBytes};
    if (wide) {
      size_t offset = block.wide_stage().load(std::memory_order_relaxed);  // published with the descriptor
      if (offset == 0) return false;
      stage = {g_.resolve(Place::at(r, offset), Stage::bytes(kWideStageBytes)), kWideStageBytes};
    }
    if (!stage.base) return false;
    stages_.push_back(stage);
  }
  return true;
}

Code Mover::leave() {
  g_.publish(g_.mine_.flag(Phase::exit), c_.seq);
  return g_.await(c_, Phase::exit, c_.seq);
}

Code Mover::pause(size_t& since) {
  since = 0;
  // A peer that has passed its exit owes nothing any more.
  return g_.health(c_,
                   [&](int r) { return g_.flag_of(r, Phase::exit, c_.seq).load(std::memory_order_acquire) < c_.seq; });
}

Code Mover::run() {
  switch (c_.verb) {
    case Verb::barrier:
      return Code::ok;
    case Verb::all_reduce:
    case Verb::reduce:
    case Verb::reduce_scatter:
      return all_buffered() ? reduce_buffered() : reduce_shared();
    case Verb::matmul_reduce:
      return all_buffered() ? finish_buffered() : finish_shared();
    default:
      return all_buffered() ? copy_buffered() : copy_shared();
  }
}

Code Mover::run_alone() {
  if (c_.verb == Verb::barrier) return Code::ok;
  if (c_.verb == Verb::matmul_reduce) return finish_alone();
  const std::byte* from = input(0, 0, c_.count);
  std::byte* to = output(0, 0, c_.count);
  size_t count = c_.in_parts ? c_.in_parts[0].count : c_.count;
  if (count == 0) return Code::ok;
  if (c_.op != RedOp::none) {
    const void* src = from;
    void* dst = to;
    unisono::reduce({c_.dtype, c_.op, count, &src, 1, &dst, 1, &c_.factor, false});
  } else if (to != from) {
    copy_bytes(to, from, bytes(count));
  }
  return Code::ok;
}

}  // namespace unisono
