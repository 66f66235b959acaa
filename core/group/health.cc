// Whether a waiting call may go on waiting, and the words for why not.
//
// Steps of a look: a peer that gave the group up comes first, since it knows the cause; then peers that died or left
// while they owed something; then the deadline; then Python's signals. Every one of them breaks the group here, so that
// all ranks learn it. Memory order: an abort line's code is loaded with acquire (see AbortLine), and a peer is asked
// whether it owes something before and after its state was looked at, since it may do its part and leave in between.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <type_traits>

#include "base/faults.h"
#include "group/wait.h"

namespace unisono {
namespace {

constexpr int64_t kWarnAfter = 10'000'000'000;
constexpr size_t kMostTold = 8;  // ranks of which an error says where they were

std::string seconds(int64_t ns) {
  char text[32];
  const double s = static_cast<double>(ns) / 1e9;
  std::snprintf(text, sizeof text, s < 100 ? "%.3g s" : "%.0f s", s);
  return text;
}

std::string timed_out_words(int64_t limit_ns) {  // gloo's, which programs look for
  char text[64];
  std::snprintf(text, sizeof text, "Timed out waiting %.10gms", static_cast<double>(limit_ns) / 1e6);
  return text;
}

// A process that is there and not stopped is only slow.
std::string state_words(pid_t pid) {
  if (!pid) return "unknown";
  const std::string state = process_state(pid);
  return state == "stopped" || state == "gone" || state == "unknown" ? state : "slow (" + state + ")";
}

}  // namespace

Code Waiter::health(Call& call, Owes owes) {
  if (g_.stopped()) return g_.quote_first_cause(call);
  if (Code code = heed_aborts(call, owes); code != Code::ok) return code;
  std::vector<int> gone;
  for (int r = 0; r < g_.size(); r++)
    if (r != g_.rank() && owes(r) && g_.state_of(r) != PeerState::alive && owes(r)) gone.push_back(r);
  if (!gone.empty()) return lost(call, gone);
  if (int64_t now = now_ns(); call.deadline_ns == 0)
    set_deadline(call, now);
  else if (now > call.deadline_ns && is_up(Defence::deadlines))
    return timed_out(call, owes);
  if (call.may_interrupt && is_up(Defence::interrupts) && python_interrupted && python_interrupted())
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
    int32_t named[std::extent_v<decltype(AbortLine::peers)>];
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
  std::vector<bool> has_left;
  bool all_left = true;
  for (int r : gone) {
    std::string reason;
    bool left = g_.state_of(r, &reason) == PeerState::left;
    all_left &= left;
    has_left.push_back(left);
    if (!text.empty()) text += ", ";
    const std::string how = left ? "" : exit_words(g_.peer(r).pid);
    text += "rank " + std::to_string(r) + (left ? " left" : " died") + " (pid " + std::to_string(g_.peer(r).pid) +
            (how.empty() ? "" : ", " + how) + ")";
    if (left && !reason.empty()) text += ": " + reason;
  }
  // Ranks may well leave while others wait for a time-out: if that is over too, it is what the caller asked for.
  if (all_left && call.deadline_ns && now_ns() > call.deadline_ns)
    return g_.break_with(call, Code::timeout, timed_out_words(limit_of(call)) + ": " + text, gone);
  const Code code = g_.break_with(call, Code::peer_lost, text, gone);  // first: the others wait for the news
  for (size_t i = 0; i < std::min(gone.size(), kMostTold); i++)
    call.failure.lines.push_back(where_was(gone[i], has_left[i]));
  if (gone.size() > kMostTold) call.failure.lines.push_back("and " + std::to_string(gone.size() - kMostTold) + " more");
  return code;
}

Code Waiter::timed_out(Call& call, Owes owes) {
  const std::vector<int> late = late_ranks(owes);
  std::string text = timed_out_words(limit_of(call));
  std::vector<std::string> lines;
  for (int r : late) {
    if (lines.empty()) text += ": rank " + std::to_string(r) + " is " + state_words(g_.peer(r).pid);
    lines.push_back(where_is(r));
  }
  Code code = g_.break_with(call, Code::timeout, text, late);
  call.failure.lines = lines;
  return code;
}

// At a quarter of the time limit, after kWarnAfter at the latest, and then whenever the wait has doubled: who is
// missing and where it is, for the program's log.
void Waiter::warn_if_late(Call& call, Owes owes, int64_t now) const {
  const int64_t limit = limit_of(call);
  if (!warn || call.deadline_ns == 0 || call.deadline_ns == INT64_MAX) return;
  const int64_t since = call.deadline_ns - limit;
  if (call.warn_ns == 0) call.warn_ns = since + std::min(limit / 4, kWarnAfter);
  if (now < call.warn_ns) return;
  call.warn_ns = since + 2 * (now - since);
  std::string text =
      std::string(verb_name(call.verb)) + (call.seq ? " #" + std::to_string(call.seq) : "") + " in group \"" +
      g_.facts().name + "\"" + (call.site && *call.site ? std::string(" at ") + call.site : "") + ": rank " +
      std::to_string(g_.rank()) + " has waited " + seconds(now - since) + " of " + seconds(limit) + " for";
  for (int r : late_ranks(owes)) text += "\n  " + where_is(r);
  warn(std::move(text), call.may_interrupt);
}

std::vector<int> Waiter::late_ranks(Owes owes) const {
  std::vector<int> late;
  for (int r = 0; r < g_.size(); r++)
    if (r != g_.rank() && owes(r)) late.push_back(r);
  return late;
}

// "rank 1   pid 4711   slow (running)   last call all_reduce #41 at train.py:88   in no call"
std::string Waiter::where_is(int r) const {
  const pid_t pid = g_.peer(r).pid;
  const std::string waits = waits_of(r);
  return "rank " + std::to_string(r) + "   pid " + std::to_string(pid) + "   " + state_words(pid) + "   last call " +
         last_call(r) + (waits.empty() ? "   in no call" : "   now in " + waits);
}

// "rank 1   pid 4711   died   last call all_reduce #41 (published) at train.py:88   waited in all_reduce #41 at …". The
// memory of one that died stays mapped as long as the group; what it says is copied and checked like a living rank's.
std::string Waiter::where_was(int r, bool left) const {
  const std::string waits = left ? "" : waits_of(r);  // whoever has left may wait for something else by now
  return "rank " + std::to_string(r) + "   pid " + std::to_string(g_.peer(r).pid) + (left ? "   left" : "   died") +
         "   last call " + last_call(r, true) + (waits.empty() ? "" : "   waited in " + waits);
}

// Of this group, as the rank's flight recorder has it.
std::string Waiter::last_call(int r, bool with_state) const {
  const auto last = read_last_operation(g_.peer(r).heap_base, g_.facts().id);
  if (!last) return "none";
  return std::string(verb_name(last->verb)) + " #" + std::to_string(last->seq) +
         (with_state ? std::string(" (") + state_name(last->state) + ")" : "") +
         (last->site.empty() ? "" : " at " + last->site);
}

// What the threads of rank r wait for, in this group or in another; empty: for nothing.
std::string Waiter::waits_of(int r) const {
  std::string words;
  for (const auto& [w, stamp, counted, threads, proven] : read_waiting(g_.peer(r).heap_base)) {
    if (w.what == WaitFor::ticket) continue;  // the call it waits for has a line of its own
    if (!words.empty()) words += ", ";
    words += verb_name(w.verb);
    if (w.verb == Verb::send || w.verb == Verb::recv) {
      words += w.verb == Verb::send ? " to " : " from ";
      words += w.peer < 0 ? "anyone" : "rank " + std::to_string(w.peer);
      if (w.tag) words += " (tag " + std::to_string(w.tag) + ")";
    } else {
      words += " #" + std::to_string(w.seq);
    }
    if (g_.facts().id != w.group_id) words += std::string(" of group \"") + w.group + "\"";
    if (*w.site) words += std::string(" at ") + w.site;
  }
  return words;
}

}  // namespace unisono
