// See deadlock.h.
#include "group/deadlock.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>

namespace unisono {
namespace {

constexpr int64_t kLookEvery = 100'000'000;
constexpr int64_t kHoldBack = 1'000'000'000;  // others that have not found it by then cannot see all of it
constexpr size_t kMostProcesses = 512;

struct Process {
  std::shared_ptr<Mapping> mapping;
  std::vector<ReadWaiting> waits;
  std::vector<ReadGroup> groups;

  const ReadGroup* group(uint64_t id) const {
    for (const ReadGroup& g : groups)
      if (g.open && g.words.id == id) return &g;
    return nullptr;
  }
};

using Lane = std::pair<uint64_t, uint64_t>;  // process, group

}  // namespace

// What the processes that matter say in one look.
class DeadlockFinder::Picture {
 public:
  explicit Picture(Group& group) : own_(group.heap().token().a) { load(own_, group.heap().mapping()); }

  uint64_t own() const { return own_; }
  const Process& process(uint64_t token) { return processes_.at(token); }

  // The wait of this rank that has begun the look.
  const ReadWaiting* find(uint64_t group_id, uint64_t seq, WaitFor what) {
    for (const ReadWaiting& w : processes_.at(own_).waits)
      if (w.what.group_id == group_id && w.what.seq == seq && w.what.what == what) return &w;
    return nullptr;
  }

  // Strikes out what can go on; false: `wait` is among that.
  bool is_stuck(const ReadWaiting& wait) {
    collect(own_, wait);
    for (bool changed = true; changed;) {
      changed = false;
      for (uint64_t p : programs_)
        if (!moving_programs_.count(p) && program_moves(p)) changed = moving_programs_.insert(p).second;
      for (const Lane& lane : lanes_)
        if (!moving_lanes_.count(lane) && lane_moves(lane)) changed = moving_lanes_.insert(lane).second;
    }
    return !wait_moves(own_, wait);
  }

  // All that must stay as it is between two looks.
  std::vector<uint64_t> signature() const {
    std::vector<uint64_t> words;
    for (const auto& [token, p] : processes_) {
      words.push_back(token);
      for (const ReadWaiting& w : p.waits)
        if (matters(w)) words.insert(words.end(), {w.stamp, w.what.group_id, w.what.seq});
      for (const ReadGroup& g : p.groups)
        words.insert(words.end(), {g.stamp, g.calls, g.queued, g.messages, g.pending});
    }
    return words;
  }
  // When the threads that wait here were counted and the waits of the lanes confirmed, the earliest of all.
  int64_t counted_ms() const {
    int64_t least = INT64_MAX;
    for (uint64_t p : programs_)
      for (const ReadWaiting& w : processes_.at(p).waits)
        if (w.what.blocks) least = std::min(least, w.counted_ms);
    for (const Lane& lane : lanes_)
      if (const ReadWaiting* w = lane_wait(lane)) least = std::min(least, w->counted_ms);
    return least;
  }
  const std::set<uint64_t>& programs() const { return programs_; }

  struct Step {
    uint64_t process;
    const ReadWaiting* wait;
    int waits_for;  // a rank of the wait's group
  };
  // From this rank's wait on, whom each waits for, until one comes again.
  std::vector<Step> cycle(const ReadWaiting& wait) {
    std::vector<Step> steps;
    std::set<const ReadWaiting*> seen;
    uint64_t process = own_;
    const ReadWaiting* at = &wait;
    while (at && seen.insert(at).second) {
      steps.push_back({process, at, next_rank(process, *at)});
      const std::optional<uint64_t> next = member(process, at->what.group_id, steps.back().waits_for);
      if (!next) break;
      const uint64_t group_id = at->what.group_id;
      process = *next;
      at = lane_wait({process, group_id});
      if (!at) at = blocking_wait(process);
      if (at && at->what.what == WaitFor::ticket) at = lane_wait({process, at->what.group_id});
    }
    // Those before the cycle proper wait for it, and are left out.
    if (at)
      while (!steps.empty() && steps.front().wait != at) steps.erase(steps.begin());
    return steps;
  }

 private:
  // A thread of this process that only moves messages on tells a new wait every few milliseconds.
  static bool matters(const ReadWaiting& w) { return w.what.blocks || w.what.what == WaitFor::callers; }

  bool load(uint64_t token, const std::shared_ptr<Mapping>& mapping) {
    if (processes_.count(token)) return true;
    if (!mapping || processes_.size() >= kMostProcesses) return false;
    Process p{mapping, read_waiting(mapping->base()), read_groups(mapping->base())};
    processes_.emplace(token, std::move(p));
    return true;
  }

  // The process of a rank in a group of another process's; nothing if this process does not know it.
  std::optional<uint64_t> member(uint64_t process, uint64_t group_id, int rank) const {
    const ReadGroup* group = processes_.at(process).group(group_id);
    if (!group || rank < 0 || rank >= group->words.size) return std::nullopt;
    const uint64_t token = group->words.tokens[rank];
    return processes_.count(token) ? std::optional(token) : std::nullopt;
  }

  // All that a wait may depend on.
  void collect(uint64_t process, const ReadWaiting& wait) {
    if (wait.what.what == WaitFor::data) return;
    const uint64_t group_id = wait.what.group_id;
    if (wait.what.what == WaitFor::ticket) return collect_lane({process, group_id});
    const ReadGroup* group = processes_.at(process).group(group_id);
    for (int r = 0; group && r < group->words.size; r++) {
      if (!wait.what.owes(r) || !load(group->words.tokens[r], find_peer(group->words.tokens[r]))) continue;
      if (wait.what.what == WaitFor::callers)
        collect_lane({group->words.tokens[r], group_id});
      else
        collect_program(group->words.tokens[r]);
    }
  }
  void collect_lane(const Lane& lane) {
    if (!lanes_.insert(lane).second) return;
    if (const ReadWaiting* wait = lane_wait(lane))
      collect(lane.first, *wait);
    else
      collect_program(lane.first);
  }
  void collect_program(uint64_t process) {
    if (!programs_.insert(process).second) return;
    const Process& p = processes_.at(process);
    for (const ReadWaiting& w : p.waits)
      if (w.what.blocks) collect(process, w);
  }

  const ReadWaiting* lane_wait(const Lane& lane) const {
    for (const ReadWaiting& w : processes_.at(lane.first).waits)
      if (w.what.group_id == lane.second && (w.what.what == WaitFor::callers || w.what.what == WaitFor::data))
        return &w;
    return nullptr;
  }
  const ReadWaiting* blocking_wait(uint64_t process) const {
    for (const ReadWaiting& w : processes_.at(process).waits)
      if (w.what.blocks) return &w;
    return nullptr;
  }

  bool program_moves(uint64_t process) const {
    const Process& p = processes_.at(process);
    if (p.waits.size() >= kActivities) return true;  // there may be more that found no line
    int blocked = 0;
    for (const ReadWaiting& w : p.waits) {
      if (!w.what.blocks) continue;
      blocked++;
      if (w.threads == 0 || w.threads == 255 || wait_moves(process, w)) return true;
    }
    for (const ReadWaiting& w : p.waits)
      if (w.what.blocks && w.threads > blocked) return true;
    return blocked == 0;
  }

  bool lane_moves(const Lane& lane) const {
    if (const ReadWaiting* wait = lane_wait(lane)) return wait_moves(lane.first, *wait);
    const ReadGroup* group = processes_.at(lane.first).group(lane.second);
    return !group || group->queued || moving_programs_.count(lane.first);
  }

  bool message_moves(uint64_t process, uint64_t group_id) const {
    const Process& p = processes_.at(process);
    const ReadGroup* group = p.group(group_id);
    if (!group || moving_programs_.count(process)) return true;
    uint64_t awaited = 0;
    for (const ReadWaiting& w : p.waits)
      awaited += w.what.blocks && w.what.what == WaitFor::message && w.what.group_id == group_id;
    return group->pending > awaited;
  }

  bool wait_moves(uint64_t process, const ReadWaiting& wait) const {
    const uint64_t group_id = wait.what.group_id;
    if (wait.what.what == WaitFor::data) return true;
    if (wait.what.what == WaitFor::ticket) return moving_lanes_.count({process, group_id});
    const ReadGroup* group = processes_.at(process).group(group_id);
    if (!group) return true;
    bool any_stuck = false, any_moves = false;
    for (int r = 0; r < group->words.size; r++) {
      if (!wait.what.owes(r)) continue;
      const std::optional<uint64_t> other = member(process, group_id, r);
      const bool moves = !other || (wait.what.what == WaitFor::callers ? moving_lanes_.count({*other, group_id}) != 0
                                                                       : message_moves(*other, group_id));
      (moves ? any_moves : any_stuck) = true;
    }
    // A collective needs all of them; a message from anyone needs one.
    return wait.what.what == WaitFor::callers ? !any_stuck : any_moves || !any_stuck;
  }

  int next_rank(uint64_t process, const ReadWaiting& wait) const {
    const ReadGroup* group = processes_.at(process).group(wait.what.group_id);
    for (int r = 0; group && r < group->words.size; r++) {
      if (!wait.what.owes(r)) continue;
      const std::optional<uint64_t> other = member(process, wait.what.group_id, r);
      if (!other) continue;
      const bool moves = wait.what.what == WaitFor::callers ? moving_lanes_.count({*other, wait.what.group_id}) != 0
                                                            : message_moves(*other, wait.what.group_id);
      if (!moves) return r;
    }
    return -1;
  }

  const uint64_t own_;
  std::map<uint64_t, Process> processes_;
  std::set<uint64_t> programs_, moving_programs_;
  std::set<Lane> lanes_, moving_lanes_;
};

namespace {

std::string operation_words(const Waiting& w) {
  std::string words = verb_name(w.verb);
  if (w.what != WaitFor::message) words += " #" + std::to_string(w.seq);
  if (w.what == WaitFor::message) {
    words += w.verb == Verb::send ? " to " : " from ";
    words += w.peer < 0 ? "anyone" : "rank " + std::to_string(w.peer);
  }
  return words + " in group \"" + w.group + "\"";
}

}  // namespace

bool DeadlockFinder::look(uint64_t seq, WaitFor what, int64_t now) {
  if (proven_ns_) return true;
  if (now < next_ns_ || g_.facts().id == 0) return false;
  next_ns_ = now + kLookEvery;
  Picture picture(g_);
  const ReadWaiting* wait = picture.find(g_.facts().id, seq, what);
  if (!wait || !picture.is_stuck(*wait)) {
    signature_.clear();
    return false;
  }
  std::vector<uint64_t> signature = picture.signature();
  if (signature != signature_) {
    signature_ = std::move(signature);
    first_ms_ = now_ns() / 1'000'000;
    return false;
  }
  if (picture.counted_ms() <= first_ms_) return false;
  proven_ns_ = now;
  words_ = {};
  std::string chain;
  for (const Picture::Step& step : picture.cycle(*wait)) {
    const Waiting& w = step.wait->what;
    const ReadGroup* group = picture.process(step.process).group(w.group_id);
    const std::string rank = "rank " + std::to_string(group ? group->words.rank : -1);
    const std::string other = "rank " + std::to_string(step.waits_for);
    chain += (chain.empty() ? "" : ", ") + rank + " waits for " + other + " in \"" + w.group + "\"";
    words_.lines.push_back(
        rank + " (pid " + std::to_string(group ? group->words.pids[group->words.rank] : 0) + ")   " +
        operation_words(w) + (*w.site ? std::string("   ") + w.site : "") + "   waits for " + other +
        (group && step.waits_for >= 0 ? " (pid " + std::to_string(group->words.pids[step.waits_for]) + ")" : ""));
  }
  words_.text = "deadlock: " + chain;
  for (int r = 0; r < g_.size(); r++)
    if (r != g_.rank() && wait->what.owes(r)) words_.peers.push_back(r);
  for (uint64_t token : picture.programs()) {
    if (token == picture.own()) continue;
    for (const ReadWaiting& w : picture.process(token).waits)
      if (w.what.blocks) open_[token] = w.stamp;
  }
  return true;
}

bool DeadlockFinder::all_know(int64_t now) {
  if (now - proven_ns_ > kHoldBack) return true;
  for (auto it = open_.begin(); it != open_.end();) {
    bool waits = false, knows = false;
    if (const std::shared_ptr<Mapping> mapping = find_peer(it->first))
      for (const ReadWaiting& w : read_waiting(mapping->base())) {
        waits |= w.what.blocks && w.stamp == it->second;
        knows |= w.proven;
      }
    it = knows || !waits ? open_.erase(it) : std::next(it);
  }
  return open_.empty();
}

}  // namespace unisono
