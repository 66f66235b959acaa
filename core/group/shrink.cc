// See shrink.h.
#include "group/shrink.h"

#include <time.h>

#include <algorithm>
#include <cstdio>

#include "base/faults.h"
#include "group/join.h"
#include "group/retire.h"
#include "group/wait.h"

namespace unisono {
namespace {

constexpr int64_t kFirstNap = 20'000, kLongestNap = 1'000'000;
constexpr int64_t kDifferFor = 2'000'000'000;  // one whose time ran out may name others, and the rest soon will too

bool has_bit(const RankBits& bits, int rank) {
  return bits[rank / 64] >> rank % 64 & 1;
}

void set_bit(RankBits& bits, int rank) {
  bits[rank / 64] |= uint64_t{1} << rank % 64;
}

// One agreement of this rank. Steps return false with `failure_` filled, or with it empty: look again later.
class Agreement {
 public:
  Agreement(Group& group, const std::vector<int>& excluded, int64_t limit_ns)
      : g_(group), attempt_(group.survival().attempts + 1), limit_ns_(limit_ns), deadline_ns_(now_ns() + limit_ns) {
    for (int r : excluded) set_bit(excluded_, r);
  }

  bool offer() {
    Group::Survival& survival = g_.survival();
    if (!survival.block) {
      BlockMemory made = make_roomy_block(g_.heap(), g_.size(), failure_);
      if (!made) return false;
      if (!g_.write_unless_closed([&] { survival.block = std::move(made); })) return closed();
    }
    for (int i = 0; i < g_.size() && is_over(); i++) survival.attempts = attempt_++;
    if (survival.offered != attempt_) {
      survival.offered = attempt_;
      survival.random = random_token().a >> 2;
    }
    Offer& mine = g_.mine().offer();
    return g_.write_unless_closed([&] {
      mine.attempt.store(0, std::memory_order_release);  // of an attempt that ran out of time
      mine.block = static_cast<uint64_t>(survival.block.get() - g_.heap().base());
      mine.random = survival.random;
      copy_words(mine.excluded, excluded_, sizeof excluded_);
      mine.attempt.store(attempt_, std::memory_order_release);
    }) || closed();
  }

  // The ranks in turn, from `turn_` on. False with no failure: wait.
  bool find_verdict(RankBits& members) {
    for (; turn_ < g_.size(); turn_++) {
      if (has_bit(excluded_, turn_)) continue;
      if (turn_ == g_.rank()) return decide(members);
      const bool gone =
          g_.state_of(turn_) != PeerState::alive;  // before the look at its verdict, which may be its last
      if (read_verdict(turn_, members)) return true;
      if (!gone) check_lists();
      if (!gone || failure_.code != Code::ok) return false;
    }
    fail(failure_, Code::system, "no rank was left to decide");
    return false;
  }

  bool wait() {
    const int64_t now = now_ns();
    if (now > deadline_ns_) return too_late();
    if (python_interrupted && python_interrupted()) {
      fail(failure_, Code::interrupted, "interrupted while shrinking");
      return false;
    }
    if (!g_.write_unless_closed([] {})) return closed();
    const timespec nap{0, nap_ns_};
    nanosleep(&nap, nullptr);
    nap_ns_ = std::min(nap_ns_ * 2, kLongestNap);
    return true;
  }

  // A list that differs is left to be seen; otherwise nobody shall count on this rank any more. The attempt goes on,
  // and this rank may come back to it, unless it finds a verdict there then.
  void give_up() {
    if (failure_.code == Code::mismatch)
      g_.survival().attempts = attempt_;
    else
      g_.write_unless_closed([&] { g_.mine().offer().attempt.store(0, std::memory_order_release); });
  }

  void accept(const RankBits& members) {
    Group::Survival& survival = g_.survival();
    survival.attempts = attempt_;
    survival.members.clear();
    for (int r = 0; r < g_.size(); r++)
      if (has_bit(members, r)) survival.members.push_back(r);
  }

  Failure& failure() { return failure_; }

 private:
  bool is_waiting_for(int r) const {
    return r != g_.rank() && !has_bit(excluded_, r) && g_.state_of(r) == PeerState::alive &&
           g_.peer(r).block.offer().attempt.load(std::memory_order_acquire) != attempt_;
  }

  // Whether there is a verdict of this attempt with this rank in it, before its offer: see shrink.h. One without this
  // rank is left for read_verdict, which refuses it.
  bool is_over() const {
    for (int r = 0; r < g_.size(); r++) {
      if (r == g_.rank()) continue;
      const Verdict& verdict = g_.peer(r).block.verdict();
      if (verdict.attempt.load(std::memory_order_acquire) != attempt_) continue;
      RankBits members;
      copy_words(members, verdict.members, sizeof members);
      if (has_bit(members, g_.rank())) return true;
    }
    return false;
  }

  bool decide(RankBits& members) {
    if (!check_lists()) return false;
    for (int r = 0; r < g_.size(); r++)
      if (is_waiting_for(r)) return false;
    RankBits found = {};
    for (int r = 0; r < g_.size(); r++)
      if (r == g_.rank() || (!has_bit(excluded_, r) && g_.state_of(r) == PeerState::alive)) set_bit(found, r);
    reach("deciding");
    Verdict& mine = g_.mine().verdict();
    const bool written = g_.write_unless_closed([&] {
      copy_words(mine.members, found, sizeof found);
      mine.attempt.store(attempt_, std::memory_order_release);
    });
    if (!written) return closed();
    copy_words(members, found, sizeof found);
    return true;
  }

  // Copied once, and only believed if it can be true.
  bool read_verdict(int r, RankBits& members) {
    const Verdict& verdict = g_.peer(r).block.verdict();
    if (verdict.attempt.load(std::memory_order_acquire) != attempt_) return false;
    copy_words(members, verdict.members, sizeof members);
    bool possible = has_bit(members, g_.rank());
    for (int p = 0; p < kMostRanks; p++)
      if (has_bit(members, p) && (p >= g_.size() || has_bit(excluded_, p))) possible = false;
    if (possible) return true;
    fail(failure_, Code::system, "rank " + std::to_string(r) + " decided on an impossible group", {r});
    return false;
  }

  // Whether, as far as can be seen, nobody names other ranks to leave out. If that lasts, it is a failure.
  bool check_lists() {
    std::vector<int> differing;
    bool ahead = false;  // of this attempt
    for (int r = 0; r < g_.size(); r++) {
      if (r == g_.rank() || has_bit(excluded_, r)) continue;
      const Offer& theirs = g_.peer(r).block.offer();
      const uint64_t attempt = theirs.attempt.load(std::memory_order_acquire);
      RankBits excluded;
      copy_words(excluded, theirs.excluded, sizeof excluded);
      fence(std::memory_order_acquire);  // keeps the second look behind the copy
      if (theirs.attempt.load(std::memory_order_relaxed) != attempt) continue;
      if (attempt && has_bit(excluded, g_.rank())) {  // it may have left since, with a group of its own
        const std::string text = "rank " + std::to_string(r) + " left this rank out of the smaller group";
        return fail(failure_, Code::aborted, text, {r}), false;
      }
      if (attempt == attempt_) set_bit(heard_, r);
      const bool other_list = attempt == attempt_ && !std::equal(excluded, excluded + std::size(excluded), excluded_);
      if ((other_list || attempt > attempt_) && g_.state_of(r) == PeerState::alive) {
        differing.push_back(r);
        ahead = ahead || attempt > attempt_;
      }
    }
    if (differing.empty()) return differing_since_ns_ = 0, true;
    if (differing_since_ns_ == 0) differing_since_ns_ = now_ns();
    if (!ahead && now_ns() < differing_since_ns_ + kDifferFor) return false;
    // A rank that is ahead may have taken a verdict that this one has not seen yet.
    RankBits unused;
    for (int r = 0; r <= turn_ && r < g_.size(); r++)
      if (r != g_.rank() && read_verdict(r, unused)) return true;
    fail(failure_, Code::mismatch, "ranks disagree on whom to leave out", differing);
    return false;
  }

  bool too_late() {
    std::vector<int> late;
    std::string text;
    for (int r = 0; r < g_.size(); r++)
      if (is_waiting_for(r) && !has_bit(heard_, r)) {  // one that was here may have run out of time a moment ago
        late.push_back(r);
        text += text.empty() ? ": rank " : ", rank ";
        text += std::to_string(r) + " is " + process_state(g_.peer(r).pid);
      }
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%.3g s", static_cast<double>(limit_ns_) / 1e9);
    fail(failure_, Code::timeout, "Timed out waiting " + std::string(seconds) + " for other ranks to shrink it" + text,
         late);
    return false;
  }

  bool closed() {
    fail(failure_, Code::closed, "the group was closed on this rank");
    return false;
  }

  Group& g_;
  uint64_t attempt_;
  const int64_t limit_ns_, deadline_ns_;
  RankBits excluded_ = {};
  RankBits heard_ = {};  // made their offers
  int64_t differing_since_ns_ = 0;
  int turn_ = 0;  // ranks before it are gone and have no verdict
  int64_t nap_ns_ = kFirstNap;
  Failure failure_;
};

}  // namespace

Code agree(Group& group, const std::vector<int>& excluded, int64_t limit_ns, Failure& failure) {
  if (group.is_of_parent()) return group.usable(failure), failure.code;
  Group::Survival& survival = group.survival();
  std::unique_lock lock(survival.mutex, std::try_to_lock);
  if (!lock) return fail(failure, Code::invalid, "another thread of this process is shrinking the group");
  Failure cause;
  fail(cause, Code::aborted, "rank " + std::to_string(group.rank()) + " shrinks the group", {group.rank()});
  cause.seq = group.seq() + 1;  // a call that this rank has done its part of ends well for those still in it
  group.abort(cause);
  sweep_retired();
  Agreement agreement(group, excluded, limit_ns);
  RankBits members;
  bool going = agreement.offer();
  while (going) {
    if (agreement.find_verdict(members)) {
      agreement.accept(members);
      return Code::ok;
    }
    going = agreement.failure().code == Code::ok && agreement.wait();
  }
  agreement.give_up();
  failure = agreement.failure();
  return failure.code;
}

std::vector<uint64_t> offered_numbers(Group& group) {
  std::vector<uint64_t> numbers;
  for (int r : group.survival().members) numbers.push_back(group.peer(r).block.offer().random);
  return numbers;
}

std::unique_ptr<Group> make_survivors(Group& group, GroupFacts facts, Failure& failure) {
  Group::Survival& survival = group.survival();
  std::lock_guard lock(survival.mutex);
  const std::vector<int> members = std::move(survival.members);
  survival.members.clear();
  std::vector<size_t> blocks;
  for (int r : members) blocks.push_back(group.peer(r).block.offer().block);
  const auto me = std::find(members.begin(), members.end(), group.rank());
  BlockMemory block;
  if (me == members.end() || !group.write_unless_closed([&] { block = std::move(survival.block); }) || !block) {
    fail(failure, Code::closed, "the group was closed on this rank");
    return nullptr;
  }
  blocks[static_cast<size_t>(me - members.begin())] = static_cast<size_t>(block.get() - group.heap().base());
  facts.rank = static_cast<int>(me - members.begin());
  facts.size = static_cast<int>(members.size());
  facts.cache_bytes = group.facts().cache_bytes;
  std::vector<Peer> peers;
  for (int r : members) peers.push_back(group.peer(r));
  facts.crowded = are_crowded(peers);
  auto made = split(group, members, blocks, facts, failure);
  if (made)
    (void)block.release();
  else
    refuse_block(block.get(), facts.rank, failure.text), group.keep(std::move(block));
  return made;
}

}  // namespace unisono
