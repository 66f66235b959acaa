// Step 4 of a call: the requests of all ranks are copied and compared (see requests.h).
//
// Ranks must agree on verb, dtype, reduce operation, root and number of elements; where each rank's number is its own
// affair (gather, scatter, all_to_all) what one sends must be what the other expects. Then every place, holder and
// count must be possible: what passes here may be used without another look, but for places, which are checked when
// they are resolved. Invariant: every rank comes to the same verdict, because all compare the same copies; after a
// mismatch they exchange one line of words each, and the group goes on.
#include <algorithm>

#include "base/faults.h"
#include "base/tuning.h"
#include "group/requests.h"

namespace unisono {
namespace {

// The bytes of a request that must be equal on all ranks: verb, dtype, op and root.
constexpr uint64_t kKeyMask = 0xffff000000ffffff;
static_assert(offsetof(Request, verb) == 0 && offsetof(Request, dtype) == 1 && offsetof(Request, op) == 2 &&
              offsetof(Request, root) == 6);
uint64_t key_of(const Request& d) {
  uint64_t key;
  std::memcpy(&key, &d.verb, sizeof key);
  return key & kKeyMask;
}

// Counts beyond any memory, so that sums over all ranks cannot wrap.
constexpr uint64_t kMostElements = uint64_t{1} << 48;

constexpr int64_t kWordsFor = 5'000'000'000;  // how long to wait for the words of a rank that disagrees

// Copies shared memory that somebody may be changing; the compiler may not look at the original again.
void copy_once(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
  asm volatile("" ::: "memory");
}

}  // namespace

std::byte* Requests::find_ring(int r) const {
  const size_t offset = of(r).ring;
  return offset == 0 || offset >> 48 ? nullptr : g_.resolve(Place::at(r, offset), kRingBytes);
}

// A small call needs the first half of each request only.
void Requests::copy_requests(const Call& call) {
  bool small = call.op != RedOp::premul_sum && call.verb != Verb::matmul_reduce;
  for (int r = 0; r < g_.size(); r++) {
    Request& d = requests_[static_cast<size_t>(r)];
    if (r != g_.rank()) copy_once(&d, &g_.peer(r).block.descriptor(call.seq).said, kSmallRequestBytes);
    small = small && d.input == Holder::inlined && !d.has_table;
  }
  if (small) return;
  const auto ranks = static_cast<size_t>(g_.size());
  for (int r = 0; r < g_.size(); r++) {
    Request& d = requests_[static_cast<size_t>(r)];
    const Block& block = g_.peer(r).block;
    const bool is_own = r == g_.rank();  // what this rank said itself is here already
    if (!is_own)
      copy_once(&d.epilogue_hash, &block.descriptor(call.seq).said.epilogue_hash, sizeof d - kSmallRequestBytes);
    if (!d.has_table)
      std::fill_n(table(r), ranks, TableEntry{});
    else if (!is_own)
      copy_once(table(r), block.table(call.seq), ranks * sizeof(TableEntry));
    rings_[static_cast<size_t>(r)] = !d.has_ring ? nullptr : is_own ? ring_ : find_ring(r);
  }
  // What rank 0 says and has measured helps this process to put its next inputs where they are used best.
  if (of(0).next_way) remembered(call) = of(0).next_way;
  if (of(0).tuning && of(0).tuning != mine().tuning && !current_tuning().is_known())
    set_tuning(Tuning::of(of(0).tuning));
}

bool Requests::agree(const Request& a, const Request& b) const {
  return key_of(a) == key_of(b) && (a.verb != Verb::matmul_reduce || a.epilogue_hash == b.epilogue_hash) &&
         (counts_differ(a.verb) || a.count == b.count);
}

// The ranks that said something else than most did.
std::vector<int> Requests::odd_ones() const {
  size_t best = 0, votes = 0;
  for (size_t r = 0; r < requests_.size(); r++) {
    auto n = static_cast<size_t>(
        std::count_if(requests_.begin(), requests_.end(), [&](const Request& d) { return agree(d, requests_[r]); }));
    if (n > votes) best = r, votes = n;
  }
  std::vector<int> odd;
  for (size_t r = 0; r < requests_.size(); r++)
    if (!agree(requests_[r], requests_[best])) odd.push_back(static_cast<int>(r));
  return odd;
}

Code Requests::check(Call& call) {
  copy_requests(call);
  if (!g_.all_came()) return waiter_.health(call, [](int) { return true; });
  if (!is_up(Defence::agreement)) return Code::ok;
  if (Code code = compare_requests(call); code != Code::ok) return code;
  if (counts_differ(call.verb))
    if (Code code = compare_counts(call); code != Code::ok) return code;
  const size_t all_parts = call.in_parts ? sum_of_parts(call.in_parts) : 0;
  for (int r = 0; r < g_.size(); r++)
    if (!can_hold(call, r, input_count(call, r, all_parts))) return impossible(call, r);
  return Code::ok;
}

Code Requests::compare_requests(Call& call) {
  const Request& own = mine();
  for (const Request& d : requests_) {
    if (agree(d, own)) continue;
    if (d.verb != own.verb) return disagree(call, "the operation", odd_ones());
    if (d.dtype != own.dtype) return disagree(call, "dtype", odd_ones());
    if (d.op != own.op) return disagree(call, "the reduce operation", odd_ones());
    if (d.root != own.root) return disagree(call, "the root", odd_ones());
    if (call.verb == Verb::matmul_reduce && d.epilogue_hash != own.epilogue_hash)
      return disagree(call, "the shapes or options", odd_ones());
    const bool hashed = call.verb == Verb::all_gather || call.verb == Verb::reduce_scatter;
    return disagree(call, hashed ? "the counts" : "the number of elements", odd_ones());
  }
  return Code::ok;
}

// Elements of rank r's input; `all_parts` are those of this rank's.
size_t Requests::input_count(const Call& call, int r, size_t all_parts) const {
  size_t count = 0;
  switch (call.verb) {
    case Verb::barrier:
      return 0;
    case Verb::broadcast:
      return r == call.root ? call.count : 0;
    case Verb::all_gather:
      return call.out_parts[r].count;
    case Verb::reduce_scatter:
      return all_parts;
    case Verb::gather:
      return of(r).count;
    case Verb::scatter:
    case Verb::all_to_all:
      for (int j = 0; j < g_.size() && (call.verb == Verb::all_to_all || r == call.root); j++)
        count += entry(r, j).in_count;
      return count;
    default:
      return call.count;
  }
}

// Whether the input of rank r, of so many elements, can be where its request says.
bool Requests::can_hold(const Call& call, int r, size_t count) const {
  const Request& d = of(r);
  size_t most = 0;
  switch (d.input) {
    case Holder::kept:
      if (r != call.root || (call.verb != Verb::reduce && call.verb != Verb::gather)) return false;
      [[fallthrough]];
    case Holder::place:
      return true;  // checked when it is resolved
    case Holder::inlined:
      most = kInlineBytes;
      break;
    case Holder::slot:
      most = kSlotBytes;
      break;
    case Holder::ring:
      most = ring(r) ? kRingBytes - std::min<size_t>(d.turn, kRingBytes) : 0;
      break;
    default:
      return false;
  }
  return count <= most / dtype_bytes(call.dtype);
}

// Gather, scatter, all_to_all: what each rank sends is what the other expects.
Code Requests::compare_counts(Call& call) {
  const int size = g_.size();
  std::vector<int> wrong(static_cast<size_t>(size));  // by rank: how many of its partners expect something else
  auto compare = [&](int a, int b, uint64_t said, uint64_t expected) {
    if (said == expected) return;
    wrong[static_cast<size_t>(a)]++;
    if (a != b) wrong[static_cast<size_t>(b)]++;
  };
  for (int r = 0; r < size; r++) {
    const uint64_t count = of(r).count;
    bool possible = count <= kMostElements;
    for (int j = 0; j < size; j++)
      possible = possible && entry(r, j).in_count <= kMostElements && entry(r, j).out_count <= kMostElements;
    if (!possible) return impossible(call, r);
    if (call.verb == Verb::gather) compare(call.root, r, count, entry(call.root, r).out_count);
    if (call.verb == Verb::scatter) compare(call.root, r, count, entry(call.root, r).in_count);
    for (int j = 0; call.verb == Verb::all_to_all && j < size; j++)
      compare(r, j, entry(r, j).in_count, entry(j, r).out_count);
  }
  auto who = odd_counts(call, wrong);
  return who.empty() ? Code::ok : disagree(call, "the counts", std::move(who));
}

// Of a rooted call those that do not fit the root, otherwise those that fit the fewest.
std::vector<int> Requests::odd_counts(const Call& call, const std::vector<int>& wrong) const {
  const int most = *std::max_element(wrong.begin(), wrong.end());
  if (most == 0) return {};
  const bool rooted = call.verb != Verb::all_to_all;
  std::vector<int> who;
  for (int r = 0; r < g_.size(); r++) {
    const int misfits = wrong[static_cast<size_t>(r)];
    if (rooted ? r != call.root && misfits : misfits == most) who.push_back(r);
  }
  // A root that fits none of several others is the odd one itself.
  if (rooted && (who.empty() || (g_.size() > 2 && static_cast<int>(who.size()) == g_.size() - 1))) who = {call.root};
  return who;
}

Code Requests::impossible(Call& call, int r) {
  return g_.break_with(call, Code::system, "rank " + std::to_string(r) + " published an impossible descriptor", {r});
}

Code Requests::disagree(Call& call, const char* what, std::vector<int> who) {
  std::string words = call.describe ? call.describe() : std::string();
  if (words.empty())
    words = std::string(verb_name(call.verb)) + " " + dtype_name(call.dtype) + " " + std::to_string(call.count);
  copy_text(g_.mine().note(), kNoteBytes, words);
  g_.publish(g_.mine().flag(Phase::note), call.seq);
  int64_t deadline = call.deadline_ns;
  call.deadline_ns = now_ns() + kWordsFor;
  Code code = waiter_.await(call, Phase::note, call.seq);
  call.deadline_ns = deadline;
  if (code != Code::ok) return code;
  fail(call.failure, Code::mismatch, std::string("ranks disagree on ") + what, std::move(who));
  call.failure.verb = call.verb;
  call.failure.seq = call.seq;
  for (int r = 0; r < g_.size(); r++) {
    char text[kNoteBytes];
    copy_once(text, g_.peer(r).block.note(), kNoteBytes);
    call.failure.lines.emplace_back(text, strnlen(text, kNoteBytes));
  }
  return Code::mismatch;
}

}  // namespace unisono
