// The flight recorder: what a process does in its groups, in its heap, where peers can read it also after its death,
// and tools of the same user through /proc. Nobody needs the process itself, or its GIL, for that.
//
// Layout, from the heap's second page on: a header, the lines of waiting threads (activity.h), a table of groups, a
// ring of the last operations, and a ring of their counts per rank ("splits"). Only the owner writes. A call costs one
// line: an operation is written when it begins, and from then on only its state and its end. Invariant: nothing here is
// used by the calls themselves; a reader copies, checks the copy and uses the copy. Memory order: an operation and a
// group are sequence locks like an activity. `state`, `ended` and the counters are single words that change while the
// rest stays, relaxed: whoever reads them gets one moment's value.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "base/clock.h"
#include "base/types.h"
#include "memory/activity.h"
#include "memory/region.h"

namespace unisono {

constexpr size_t kOperations = 1024;
constexpr size_t kRecordedGroups = 64;
constexpr size_t kSplitWords = 8192;
constexpr size_t kMostRecordedRanks = 256;

enum class State : uint8_t { started, published, done, failed, count_ };
const char* state_name(State state);

struct alignas(kLineBytes) Operation {
  // 2 n + 1 while operation n is written, 2 n + 2 once it can be read. Written by Recorder::begin, read by
  // read_operations; ordered as Activity::stamp is.
  Flag stamp;
  uint64_t seq;   // of a message changed once more while the line can be read: by Recorded::number, as one atomic word
  int64_t began;  // ticks
  // Ticks; 0: still under way, or so short that nobody looked at the clock. Stored by Recorded::end, loaded by the
  // copy_words of copy_operation, both relaxed: a word on its own.
  std::atomic<int64_t> ended;
  uint64_t count;   // elements: of the whole, or of this rank's part
  int64_t tag;      // of a message
  uint64_t splits;  // where its counts begin in the ring of splits, if it has any
  uint32_t group;   // the group's place in the table, and above 16 bits which of that place's users it is
  uint16_t in_splits, out_splits;  // how many counts of the input, and behind them of the output
  int16_t root;                    // or the other end of a message
  Verb verb;
  DType dtype;
  RedOp op;
  std::atomic<State> state;  // stored by Recorded::published and Recorded::end, loaded as `ended` is
  uint8_t asynchronous;
  uint8_t unused;
  char site[kSiteBytes];
};
static_assert(sizeof(Operation) == kLineBytes);

struct GroupWords {  // what does not change while the group lives
  uint64_t id;       // the same on all ranks
  int64_t opened_ns;
  int32_t rank, size;
  char name[96];
  uint64_t tokens[kMostRecordedRanks];  // of the members' heaps: the same process has the same in every group
  int32_t pids[kMostRecordedRanks];
};
static_assert(std::is_trivially_copyable_v<GroupWords> && sizeof(GroupWords) % sizeof(uint64_t) == 0);

struct alignas(kLineBytes) GroupRecord {
  // 4 n while user n of the place is written, 4 n + 1 while its group is open, 4 n + 2 once it is closed; 0: none yet.
  // Written by open_group and close_group, read by read_groups; ordered as Activity::stamp is.
  Flag stamp;
  // Counters, relaxed. Collectives that began and their bytes, by whoever runs them, one at a time.
  Flag calls, bytes;
  // Asynchronous collectives that are not over, under the queue's lock.
  Flag queued;
  // Messages of this rank, their bytes, and those not over, under the messages' lock.
  Flag messages, message_bytes, pending;
  alignas(kLineBytes) GroupWords words;
};

struct RecorderHeader {
  int64_t pid;
  int64_t ticks0, ns0;    // the same moment on the recorder's clock and on that of deadlines
  int64_t wall_minus_ns;  // add to the clock of deadlines for the time of day
};

class Recorder;

// One operation of this process, as whoever runs it holds it. It looks whether the place in the ring is still its own,
// and then stores. Should another thread begin 1024 operations between the two, one of those gets a wrong state or
// number: the recorder only tells, so that is cheaper than a lock.
class Recorded {
 public:
  void published() const { set(State::published); }
  // With the time, unless the call was too short for a look at the clock.
  void end(bool well, bool timed) const;
  // Of a message: the number it got.
  void number(uint64_t seq) const;

 private:
  friend class Recorder;
  bool is_ours() const { return at_ && at_->stamp.load(std::memory_order_relaxed) == stamp_; }
  void set(State state) const {
    if (is_ours()) at_->state.store(state, std::memory_order_relaxed);
  }
  Operation* at_ = nullptr;
  uint64_t stamp_ = 0;
};

struct Operated {  // what `begin` takes
  Verb verb;
  DType dtype;
  RedOp op;
  bool asynchronous;
  int root;
  uint64_t seq;
  uint64_t count;
  int64_t tag;
  uint32_t group;
  const char* site;  // kSiteBytes of them; null: not known
};

constexpr size_t kRecorderAt = 4096;
constexpr size_t whole_pages(size_t n) {
  return (n + 4095) / 4096 * 4096;
}
struct RecorderLayout {
  static constexpr size_t activities = kRecorderAt + 4096;
  static constexpr size_t groups = activities + whole_pages(kActivities * sizeof(Activity));
  static constexpr size_t operations = groups + whole_pages(kRecordedGroups * sizeof(GroupRecord));
  static constexpr size_t splits = operations + kOperations * sizeof(Operation);
  static constexpr size_t end = splits + kSplitWords * sizeof(uint64_t);
};

class Recorder {
 public:
  void place(std::byte* heap_base);  // on zeroed memory
  // What operations of this group say as their `group`, and its counters; null if there are too many groups.
  struct OpenGroup {
    uint32_t reference = UINT32_MAX;
    GroupRecord* record = nullptr;
  };
  OpenGroup open_group(const GroupWords& words);
  void rename(const OpenGroup& group, const std::string& name);
  void close_group(const OpenGroup& group);

  Recorded begin(const Operated& what);
  // The same with counts; `count_of(i)` gives in_splits + out_splits of them.
  template <class CountOf>
  Recorded begin(const Operated& what, size_t in_splits, size_t out_splits, CountOf count_of) {
    const uint64_t n = next_.fetch_add(1, std::memory_order_relaxed), words = in_splits + out_splits + 1;
    uint64_t at = next_split_.fetch_add(words, std::memory_order_relaxed);
    auto put = [&](uint64_t i, uint64_t value) {
      __atomic_store_n(&splits_[(at + i) % kSplitWords], value, __ATOMIC_RELAXED);
    };
    put(0, 0);  // its place is taken from whoever had it
    for (size_t i = 0; i + 1 < words; i++) put(i + 1, count_of(i));
    __atomic_store_n(&splits_[at % kSplitWords], n + 1, __ATOMIC_RELEASE);  // pairs with the acquire in read_splits
    return write(what, n, at, in_splits, out_splits);
  }
  Activities& activities() { return activities_; }

 private:
  Recorded write(const Operated& what, uint64_t n, uint64_t splits, size_t in_splits, size_t out_splits);

  Operation* operations_ = nullptr;
  GroupRecord* groups_ = nullptr;
  uint64_t* splits_ = nullptr;
  Activities activities_;
  // Kept here and not in shared memory, because peers can write there. Relaxed: they hand out numbers.
  std::atomic<uint64_t> next_{0}, next_split_{0};
  std::mutex groups_mutex_;
  uint64_t uses_[kRecordedGroups] = {};
  int64_t closed_ns_[kRecordedGroups] = {};  // of a free place; 0: never used
  bool open_[kRecordedGroups] = {};
};

// Whether collectives are recorded: switched off by the bench only, which measures what that costs. Relaxed: on its
// own.
inline std::atomic<bool> records_calls{true};

// The recorder's clock: the processor's where all of them agree on it, since a look at it costs least.
int64_t ticks();

// -- reading, of any process's heap that is mapped at `heap_base`

struct ReadOperation {
  uint64_t number, seq, count;
  int64_t began_ns, ended_ns, tag;
  uint64_t group_id;  // 0: not known any more
  std::string group;
  std::vector<uint64_t> in_splits, out_splits;
  int root;
  Verb verb;
  DType dtype;
  RedOp op;
  State state;
  bool asynchronous;
  std::string site;
};
struct ReadGroup {
  uint64_t stamp;
  bool open;
  uint32_t reference;
  GroupWords words;
  uint64_t calls, bytes, queued, messages, message_bytes, pending;
  std::string name() const { return words.name; }
};
Token read_token(const std::byte* heap_base);
RecorderHeader read_recorder_header(const std::byte* heap_base);
std::vector<ReadGroup> read_groups(const std::byte* heap_base);
// The last ones, oldest first.
std::vector<ReadOperation> read_operations(const std::byte* heap_base);
// The last one of a group, without its counts: at a fraction of the cost, for errors, which may be about many ranks.
std::optional<ReadOperation> read_last_operation(const std::byte* heap_base, uint64_t group_id);
inline std::vector<ReadWaiting> read_waiting(const std::byte* heap_base) {
  return read_activities(heap_base + RecorderLayout::activities);
}

}  // namespace unisono
