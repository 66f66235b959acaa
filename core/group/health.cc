// Whether a waiting call may go on waiting, and the words for why not.
//
// Steps of a look: a peer that gave the group up comes first, since it knows the cause; then peers that died or left
// while they owed something; then the deadline; then Python's signals. Every one of them breaks the group here, so that
// all ranks learn it. Memory order: an abort line's code is loaded with acquire (see AbortLine), and a peer is asked
// whether it owes something before and after its state was looked at, since it may do its part and leave in between.
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "group/wait.h"

namespace unisono {

Code Waiter::health(Call& call, Owes owes) {
  if (g_.stopped()) return g_.quote_first_cause(call);
  if (Code code = heed_aborts(call, owes); code != Code::ok) return code;
  std::vector<int> gone;
  for (int r = 0; r < g_.size(); r++)
    if (r != g_.rank() && owes(r) && g_.state_of(r) != PeerState::alive && owes(r)) gone.push_back(r);
  if (!gone.empty()) return lost(call, gone);
  if (int64_t now = now_ns(); call.deadline_ns == 0)
    set_deadline(call, now);
  else if (now > call.deadline_ns)
    return timed_out(call, owes);
  if (call.may_interrupt && python_interrupted && python_interrupted())
    return g_.break_with(call, Code::interrupted, "rank " + std::to_string(g_.rank()) + " was interrupted",
                         {g_.rank()});
  return Code::ok;
}

// The line may be another process's mistake, or malice: what it says is copied and checked.
Code Waiter::heed_aborts(Call& call, Owes owes) {
  for (int r = 0; r < g_.size(); r++) {
    if (r == g_.rank()) continue;
    const AbortLine& line = g_.peer(r).block.abort();
    const uint64_t word = line.code.load(std::memory_order_acquire);
    if (!word || word >= static_cast<uint64_t>(Code::count_) || (line.seq > call.seq && !owes(r))) continue;
    const auto code = static_cast<Code>(word);
    std::vector<int> about;
    int32_t named[std::size(line.peers)];
    std::memcpy(named, line.peers, sizeof named);
    for (int p : named)
      if (p >= 0 && p < g_.size()) about.push_back(p);
    if (about.empty()) about.push_back(r);
    if (code == Code::peer_lost) return lost(call, about);
    std::string words = text_in(line.text);
    if (words.find("(reported by") == std::string::npos) words += " (reported by rank " + std::to_string(r) + ")";
    return g_.break_with(call, code == Code::interrupted ? Code::aborted : code, words, about);
  }
  return Code::ok;
}

Code Waiter::lost(Call& call, std::vector<int> gone) {
  // Others may have been killed in the same moment: give that a moment, and look at processes, not only at sockets.
  usleep(1000);
  for (int r = 0; r < g_.size(); r++) {
    const Peer& peer = g_.peer(r);
    if (r != g_.rank() && peer.link && std::find(gone.begin(), gone.end(), r) == gone.end() &&
        (peer.link->hung_up() || is_dying(peer.pid)))
      gone.push_back(r);
  }
  std::sort(gone.begin(), gone.end());
  std::string text;
  for (int r : gone) {
    std::string reason;
    bool left = g_.state_of(r, &reason) == PeerState::left;
    if (!text.empty()) text += ", ";
    text += "rank " + std::to_string(r) + (left ? " left" : " died") + " (pid " + std::to_string(g_.peer(r).pid) + ")";
    if (left && !reason.empty()) text += ": " + reason;
  }
  return g_.break_with(call, Code::peer_lost, text, gone);
}

Code Waiter::timed_out(Call& call, Owes owes) {
  std::vector<int> late;
  for (int r = 0; r < g_.size(); r++)
    if (r != g_.rank() && owes(r)) late.push_back(r);
  char seconds[32];
  int64_t limit = call.timeout_ns ? call.timeout_ns : g_.facts().timeout_ns;
  std::snprintf(seconds, sizeof seconds, "%.3g s", static_cast<double>(limit) / 1e9);
  std::string text = std::string("Timed out waiting ") + seconds;  // torch's words
  std::vector<std::string> lines;
  for (int r : late) {
    const pid_t pid = g_.peer(r).pid;
    std::string state = pid ? process_state(pid) : "unknown";
    if (lines.empty()) text += ": rank " + std::to_string(r) + " is " + state;
    lines.push_back("rank " + std::to_string(r) + "   pid " + std::to_string(pid) + "   " + state + "   last call " +
                    last_call(r) + waits_of(r));
  }
  Code code = g_.break_with(call, Code::timeout, text, late);
  call.failure.lines = lines;
  return code;
}

std::string Waiter::last_call(int r) const {
  const Descriptor* last = nullptr;
  uint64_t at = 0;
  for (uint64_t s : {0, 1}) {
    const Descriptor& d = g_.peer(r).block.descriptor(s);
    if (uint64_t seq = d.seq.load(std::memory_order_acquire); seq > at) at = seq, last = &d;
  }
  return last ? std::string(verb_name(last->said.verb)) + " #" + std::to_string(at) : "none";
}

// What the threads of rank r wait for, in this group or in another.
std::string Waiter::waits_of(int r) const {
  std::string words;
  for (const Waiting& w : read_activities(g_.peer(r).heap_base)) {
    words += words.empty() ? "   now in " : ", ";
    words += verb_name(w.verb);
    if (w.verb == Verb::send || w.verb == Verb::recv) {
      words += w.verb == Verb::send ? " to " : " from ";
      words += w.peer < 0 ? "anyone" : "rank " + std::to_string(w.peer);
      if (w.tag) words += " (tag " + std::to_string(w.tag) + ")";
    } else {
      words += " #" + std::to_string(w.seq);
    }
    if (g_.facts().name != w.group) words += std::string(" of group \"") + w.group + "\"";
  }
  return words.empty() ? "   in no call" : words;
}

}  // namespace unisono
