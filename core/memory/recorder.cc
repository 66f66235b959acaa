// See recorder.h.
#include "memory/recorder.h"

#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>

namespace unisono {
namespace {

bool processor_clock_is_common() {
#if defined(__x86_64__)
  std::ifstream file("/sys/devices/system/clocksource/clocksource0/current_clocksource");
  std::string name;
  return std::getline(file, name) && name == "tsc";
#else
  return false;
#endif
}

const bool use_processor_clock = processor_clock_is_common();

template <class T>
T* at(std::byte* base, size_t offset) {
  return reinterpret_cast<T*>(base + offset);
}

template <class T>
const T* at(const std::byte* base, size_t offset) {
  return reinterpret_cast<const T*>(base + offset);
}

// Turns ticks of another process on this machine into nanoseconds on the clock of deadlines.
class TickClock {
 public:
  explicit TickClock(const RecorderHeader& header) : from_(header) {
    const double ns = static_cast<double>(wrapped_difference(now_ns(), header.ns0));
    const double passed = static_cast<double>(wrapped_difference(ticks(), header.ticks0));
    if (use_processor_clock && passed > 0 && ns > 0) rate_ = ns / passed;
  }
  int64_t ns(int64_t tick) const {
    const double ns = static_cast<double>(wrapped_difference(tick, from_.ticks0)) * rate_;
    constexpr double kMost = 9e18;  // what an integer holds
    return wrapped_sum(from_.ns0, static_cast<int64_t>(std::clamp(ns, -kMost, kMost)));
  }

 private:
  RecorderHeader from_;
  double rate_ = 1;
};

}  // namespace

int64_t ticks() {
#if defined(__x86_64__)
  if (use_processor_clock) return static_cast<int64_t>(__rdtsc());
#endif
  return now_ns();
}

const char* state_name(State state) {
  constexpr const char* names[] = {"started", "published", "done", "failed"};
  static_assert(std::size(names) == static_cast<size_t>(State::count_));
  return names[static_cast<size_t>(state)];
}

void Recorder::place(std::byte* base) {
  timespec wall;
  clock_gettime(CLOCK_REALTIME, &wall);
  const int64_t now = now_ns();
  *at<RecorderHeader>(base, kRecorderAt) = {getpid(), ticks(), now, wall.tv_sec * 1'000'000'000 + wall.tv_nsec - now};
  activities_.place(base + RecorderLayout::activities);
  groups_ = at<GroupRecord>(base, RecorderLayout::groups);
  operations_ = at<Operation>(base, RecorderLayout::operations);
  splits_ = at<uint64_t>(base, RecorderLayout::splits);
}

// -- groups

Recorder::OpenGroup Recorder::open_group(const GroupWords& words) {
  std::lock_guard lock(groups_mutex_);
  // The place that has been free for longest, so that the last operations of a closed group keep its name.
  size_t place = kRecordedGroups;
  for (size_t i = 0; i < kRecordedGroups; i++)
    if (!open_[i] && (place == kRecordedGroups || closed_ns_[i] < closed_ns_[place])) place = i;
  if (place == kRecordedGroups) return {};
  GroupRecord& record = groups_[place];
  const uint64_t use = ++uses_[place];
  open_[place] = true;
  record.stamp.store(4 * use, std::memory_order_relaxed);
  fence(std::memory_order_release);  // pairs with the fence in read_groups
  copy_words(&record.words, &words, sizeof words);
  for (Flag* counter :
       {&record.calls, &record.bytes, &record.queued, &record.messages, &record.message_bytes, &record.pending})
    counter->store(0, std::memory_order_relaxed);
  record.stamp.store(4 * use + 1, std::memory_order_release);
  return {static_cast<uint32_t>(place | (use & 0xffff) << 16), &record};
}

void Recorder::rename(const OpenGroup& group, const std::string& name) {
  if (!group.record) return;
  std::lock_guard lock(groups_mutex_);
  const uint64_t use = uses_[group.reference & 0xffff];
  GroupWords words;
  copy_words(&words, &group.record->words, sizeof words);
  copy_text(words.name, sizeof words.name, name);
  group.record->stamp.store(4 * use, std::memory_order_relaxed);
  fence(std::memory_order_release);
  copy_words(&group.record->words, &words, sizeof words);
  group.record->stamp.store(4 * use + 1, std::memory_order_release);
}

void Recorder::close_group(const OpenGroup& group) {
  if (!group.record) return;
  std::lock_guard lock(groups_mutex_);
  const size_t place = group.reference & 0xffff;
  open_[place] = false;
  closed_ns_[place] = now_ns();
  group.record->stamp.store(4 * uses_[place] + 2, std::memory_order_release);
}

// -- operations

Recorded Recorder::begin(const Operated& what) {
  return write(what, next_.fetch_add(1, std::memory_order_relaxed), 0, 0, 0);
}

Recorded Recorder::write(const Operated& what, uint64_t n, uint64_t splits, size_t in_splits, size_t out_splits) {
  Operation& o = operations_[n % kOperations];
  o.stamp.store(2 * n + 1, std::memory_order_relaxed);
  fence(std::memory_order_release);  // pairs with the fence in read_operations
  o.seq = what.seq;
  o.began = ticks();
  o.ended.store(0, std::memory_order_relaxed);
  o.count = what.count;
  o.tag = what.tag;
  o.splits = splits;
  o.group = what.group;
  o.in_splits = static_cast<uint16_t>(in_splits);
  o.out_splits = static_cast<uint16_t>(out_splits);
  o.root = static_cast<int16_t>(what.root);
  o.verb = what.verb;
  o.dtype = what.dtype;
  o.op = what.op;
  o.state.store(State::started, std::memory_order_relaxed);
  o.asynchronous = what.asynchronous;
  if (what.site)
    std::memcpy(o.site, what.site, kSiteBytes);
  else
    o.site[0] = 0;
  Recorded recorded;
  recorded.at_ = &o;
  recorded.stamp_ = 2 * n + 2;
  o.stamp.store(recorded.stamp_, std::memory_order_release);
  return recorded;
}

void Recorded::end(bool well, bool timed) const {
  if (!is_ours()) return;
  if (timed) at_->ended.store(ticks(), std::memory_order_relaxed);
  at_->state.store(well ? State::done : State::failed, std::memory_order_relaxed);
}

void Recorded::number(uint64_t seq) const {
  if (is_ours()) __atomic_store_n(&at_->seq, seq, __ATOMIC_RELAXED);  // pairs with copy_words in copy_operation
}

// -- reading

Token read_token(const std::byte* base) {
  uint64_t words[sizeof(HeapHeader) / sizeof(uint64_t)];
  copy_words(words, base, sizeof words);
  return std::bit_cast<HeapHeader>(words).token;
}

RecorderHeader read_recorder_header(const std::byte* base) {
  RecorderHeader header;
  copy_words(&header, base + kRecorderAt, sizeof header);
  return header;
}

std::vector<ReadGroup> read_groups(const std::byte* base) {
  std::vector<ReadGroup> found;
  for (size_t i = 0; i < kRecordedGroups; i++) {
    const GroupRecord& record = at<GroupRecord>(base, RecorderLayout::groups)[i];
    const uint64_t stamp = record.stamp.load(std::memory_order_acquire);
    if (stamp % 4 != 1 && stamp % 4 != 2) continue;
    ReadGroup& g = found.emplace_back();
    copy_words(&g.words, &record.words, sizeof g.words);
    fence(std::memory_order_acquire);
    const uint64_t after = record.stamp.load(std::memory_order_relaxed);
    auto& words = g.words;
    words.name[sizeof words.name - 1] = 0;
    if (after / 4 != stamp / 4 || after % 4 == 0 || words.size < 1 ||
        words.size > static_cast<int>(kMostRecordedRanks) || words.rank < 0 || words.rank >= words.size) {
      found.pop_back();
      continue;
    }
    g.stamp = stamp;
    g.open = stamp % 4 == 1;
    g.reference = static_cast<uint32_t>(i | (stamp / 4 & 0xffff) << 16);
    g.calls = record.calls.load(std::memory_order_relaxed);
    g.bytes = record.bytes.load(std::memory_order_relaxed);
    g.queued = record.queued.load(std::memory_order_relaxed);
    g.messages = record.messages.load(std::memory_order_relaxed);
    g.message_bytes = record.message_bytes.load(std::memory_order_relaxed);
    g.pending = record.pending.load(std::memory_order_relaxed);
  }
  return found;
}

namespace {

// The counts of operation n, if they are still there.
std::vector<uint64_t> read_splits(const uint64_t* ring, uint64_t at, uint64_t n, size_t count) {
  std::vector<uint64_t> counts(count);
  if (__atomic_load_n(&ring[at % kSplitWords], __ATOMIC_ACQUIRE) != n + 1) return {};
  for (size_t i = 0; i < count; i++) counts[i] = __atomic_load_n(&ring[(at + 1 + i) % kSplitWords], __ATOMIC_RELAXED);
  fence(std::memory_order_acquire);
  return __atomic_load_n(&ring[at % kSplitWords], __ATOMIC_RELAXED) == n + 1 ? counts : std::vector<uint64_t>{};
}

bool is_possible(const Operation& o) {
  return o.verb < Verb::count_ && o.dtype < DType::count_ && o.op < RedOp::count_ &&
         o.state.load(std::memory_order_relaxed) < State::count_ && o.in_splits <= kMostRecordedRanks &&
         o.out_splits <= kMostRecordedRanks;
}

// An operation of the ring as it was at one moment. The copy is the reader's own; its atomics have no partner there.
struct OperationCopy {
  uint64_t stamp = 0;
  alignas(Operation) std::byte bytes[sizeof(Operation)];
  const Operation& words() const { return *reinterpret_cast<const Operation*>(bytes); }
};

// False: nothing is there, it was written meanwhile, or it cannot be true.
bool copy_operation(const std::byte* base, size_t i, OperationCopy& copy) {
  const Operation& shared = at<Operation>(base, RecorderLayout::operations)[i];
  copy.stamp = shared.stamp.load(std::memory_order_acquire);
  copy_words(copy.bytes, &shared, sizeof copy.bytes);
  fence(std::memory_order_acquire);
  return copy.stamp != 0 && copy.stamp % 2 == 0 && shared.stamp.load(std::memory_order_relaxed) == copy.stamp &&
         is_possible(copy.words());
}

// Without its counts.
ReadOperation read_operation(const OperationCopy& copy, const TickClock& clock, const std::vector<ReadGroup>& groups) {
  const Operation& o = copy.words();
  ReadOperation r{};
  r.number = copy.stamp / 2 - 1;
  r.seq = o.seq, r.count = o.count, r.tag = o.tag, r.root = o.root;
  r.began_ns = clock.ns(o.began);
  const int64_t ended = o.ended.load(std::memory_order_relaxed);
  r.ended_ns = ended ? clock.ns(ended) : 0;
  r.verb = o.verb, r.dtype = o.dtype, r.op = o.op, r.asynchronous = o.asynchronous;
  r.state = o.state.load(std::memory_order_relaxed);
  r.site = text_in(o.site);
  for (const ReadGroup& g : groups)
    if (g.reference == o.group) r.group_id = g.words.id, r.group = g.name();
  return r;
}

}  // namespace

std::vector<ReadOperation> read_operations(const std::byte* base) {
  const TickClock clock(read_recorder_header(base));
  const std::vector<ReadGroup> groups = read_groups(base);
  const auto* splits = at<uint64_t>(base, RecorderLayout::splits);
  std::vector<ReadOperation> found;
  OperationCopy copy;
  for (size_t i = 0; i < kOperations; i++) {
    if (!copy_operation(base, i, copy)) continue;
    const Operation& o = copy.words();
    ReadOperation& r = found.emplace_back(read_operation(copy, clock, groups));
    std::vector<uint64_t> counts;
    if (o.in_splits || o.out_splits) counts = read_splits(splits, o.splits, r.number, o.in_splits + o.out_splits);
    if (!counts.empty()) {
      r.in_splits.assign(counts.begin(), counts.begin() + o.in_splits);
      r.out_splits.assign(counts.begin() + o.in_splits, counts.end());
    }
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.number < b.number; });
  return found;
}

std::optional<ReadOperation> read_last_operation(const std::byte* base, uint64_t group_id) {
  std::vector<ReadGroup> groups = read_groups(base);
  std::erase_if(groups, [&](const ReadGroup& g) { return g.words.id != group_id; });
  OperationCopy last, copy;
  for (size_t i = 0; i < kOperations; i++)
    if (copy_operation(base, i, copy) && copy.stamp > last.stamp &&
        std::any_of(groups.begin(), groups.end(), [&](const auto& g) { return g.reference == copy.words().group; }))
      last = copy;
  if (last.stamp == 0) return std::nullopt;
  return read_operation(last, TickClock(read_recorder_header(base)), groups);
}

}  // namespace unisono
