// See communicator.h: what a group over several hosts asks of its ranks on this host, beside the verbs.
//
// Bytes from other hosts are written into this process's memory by another library's threads, which wake nobody here.
// So a message ends with a word that its receiver knows, and whoever needs it looks for the word. Memory order: x86 and
// the acquiring load keep what is read later behind it; and the caller then asks the library, which takes its lock.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>

#include "python/communicator.h"

namespace unisono {
namespace {

uint64_t word_at(uintptr_t address) {
  return __atomic_load_n(reinterpret_cast<const uint64_t*>(address), __ATOMIC_ACQUIRE);
}

bool any_died(const Group& group) {
  for (int r = 0; r < group.size(); r++)
    if (r != group.rank() && group.state_of(r) == PeerState::died) return true;
  return false;
}

}  // namespace

int Communicator::await_words(const std::vector<std::pair<uintptr_t, uint64_t>>& words, uintptr_t watch, uint64_t seen,
                              double timeout_s) {
  int outcome = 1;
  {
    nb::gil_scoped_release release;
    outcome = engine_->await_outside(
        [&] {
          for (const auto& [address, value] : words)
            if (word_at(address) != value) return false;
          return true;
        },
        [&] { return word_at(watch) != seen || group().given_up() || any_died(group()); }, nanoseconds(timeout_s));
  }
  if (PyErr_Occurred()) nb::raise_python_error();  // a signal handler raised while waiting
  return outcome;
}

nb::object Communicator::trouble() {
  Failure failure;
  auto told = [](Code code, const std::vector<int>& peers, const std::string& text) {
    return nb::make_tuple(static_cast<int>(code), peers, text_of(text));
  };
  if (!group().usable(failure)) return told(failure.code, failure.peers, failure.text);
  std::vector<int> left, died;
  std::string why;
  for (int r = 0; r < size_; r++) {
    if (r == rank_) continue;
    const AbortLine& line = group().peer(r).block.abort();
    const uint64_t word = line.code.load(std::memory_order_acquire);
    if (word && word < static_cast<uint64_t>(Code::count_)) {
      std::vector<int> about;
      for (int32_t p : line.peers)
        if (p >= 0 && p < size_) about.push_back(p);
      if (about.empty()) about.push_back(r);
      return told(static_cast<Code>(word), about, text_in(line.text));
    }
    const PeerState state = group().state_of(r, &why);
    if (state == PeerState::died) died.push_back(r);
    if (state == PeerState::left) left.push_back(r);
  }
  if (!died.empty()) return told(Code::peer_lost, died, "");
  if (!left.empty()) return told(Code::closed, left, why);
  return nb::none();
}

bool Communicator::has_message(int64_t tag) {
  return engine_->has_message(tag);
}

}  // namespace unisono
