// How the core says that something went wrong: a code, and for everything but `ok` a Failure with the facts.
//
// The core never throws across its own borders; python/errors.cc turns a Failure into an exception, once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/types.h"

namespace unisono {

enum class Code : uint8_t {
  ok,
  mismatch,     // ranks made different calls; nothing was moved, the group goes on
  peer_lost,    // a rank died or left
  timeout,      // the deadline of the call passed
  aborted,      // another rank, or this one, gave the group up
  interrupted,  // a Python signal handler raised
  closed,       // the group was closed on this rank
  forked,       // used in a child of the process that made it
  no_memory,    // the heap cannot grow: memory, cgroup limit or address space
  invalid,      // an argument
  system,       // a system call failed, or shared memory holds something impossible
  deadlock,     // ranks wait for each other in a cycle over several groups
  count_
};

struct Failure {
  Code code = Code::ok;
  Verb verb = Verb::barrier;
  uint64_t seq = 0;
  std::vector<int> peers;          // the ranks it is about
  std::string text;                // one fact
  std::vector<std::string> lines;  // a mismatch: one line per rank, by rank
  bool first_cause = false;        // a later call that quotes the failure which broke the group
};

inline Code fail(Failure& failure, Code code, std::string text, std::vector<int> peers = {}) {
  failure.code = code;
  failure.text = std::move(text);
  failure.peers = std::move(peers);
  return code;
}

// The text in such an array, which lies in shared memory: copied first, since its end may change meanwhile.
template <size_t room>
std::string text_in(const char (&from)[room]) {
  std::string text(from, room);
  text.resize(strnlen(text.data(), room));
  return text;
}

// Copies `text` into an array of `room` bytes, with a zero at its end; what does not fit is cut between two characters,
// so that the reader's UTF-8 decoder never meets half of one.
inline void copy_text(char* to, size_t room, const std::string& text) {
  size_t n = std::min(text.size(), room - 1);
  if (n < text.size())
    while (n > 0 && (static_cast<unsigned char>(text[n]) & 0xc0) == 0x80) n--;
  std::memcpy(to, text.data(), n);
  std::memset(to + n, 0, room - n);
}

}  // namespace unisono
