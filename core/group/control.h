// What one rank of a group shares with the others: its control block, a piece of its own heap.
//
// Vocabulary. A *line* is 128 bytes with one writer, the block's owner; everybody else only reads it. A *flag* is a
// monotonic 64-bit number in a line; `store(release)` by the owner pairs with `load(acquire)` in Group::await, so
// whatever the owner wrote before the flag is seen by whoever saw the flag. There is no read-modify-write anywhere.
// The *descriptor* line of call s is line s % 2: a rank writes call s + 2 only after it has seen every descriptor of
// call s + 1, and a rank publishes s + 1 only when it has done with the descriptors and slots of s. The same holds for
// *slots* (small inputs) and *tables* (per-part places and counts), which are double-buffered alike.
// The *stage* is a ring of pieces for tensors that are not in the heap; three flags count pieces over all calls.
// The *ring* is a larger memory for stages and slots, made when first needed. Calls take it in turn from front to end,
// so that what is written has left the caches of whoever read it last: on Zen 4 a core stores at 32 GB/s to such lines,
// at 7 to ones that another core still has. A rank's `turn` says where in its ring a call begins.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstring>

#include "base/shared.h"
#include "base/types.h"

namespace unisono {

constexpr size_t kInlineBytes = 40;
constexpr size_t kSlotBytes = 64 << 10;
constexpr size_t kStageBytes = 512 << 10;  // half of it for pieces going in, half for pieces coming out
constexpr size_t kPieceBytes = 128 << 10;  // the longest piece in a stage
constexpr size_t kRingBytes = 4 << 20;     // more than twice a second-level cache
constexpr size_t kRingPieceBytes = 256 << 10;
constexpr size_t kRingSlotBytes = 1 << 20;
constexpr size_t kRingFrom = 4 << 10;          // bytes of the input
constexpr size_t kCrowdedRingFrom = 64 << 10;  // the same with more ranks than processors
// With more ranks than processors, or beside busy neighbours, every wait for another rank is a turn of the scheduler:
// then pieces are few and long.
constexpr size_t kLongPieceBytes = 1 << 20;
// A rank fills piece p + 1 before it reduces piece p, so there must be room for two.
static_assert(kStageBytes / 2 >= 2 * kPieceBytes && kRingBytes / 2 >= 2 * kLongPieceBytes);
constexpr size_t kNoteBytes = 496;
constexpr int kMostRanks = 256;

// Where a tensor is, in words every rank understands: 0 is "not in shared memory"; otherwise bit 63, the group rank
// whose heap holds it, and the offset in that heap.
struct Place {
  uint64_t word = 0;
  static Place at(int rank, size_t offset) { return {uint64_t{1} << 63 | static_cast<uint64_t>(rank) << 48 | offset}; }
  explicit operator bool() const { return word != 0; }
  int rank() const { return static_cast<int>(word >> 48 & 0x7fff); }
  size_t offset() const { return word & ((uint64_t{1} << 48) - 1); }
};

// What holds a rank's input. `kept` is for a root that everybody else sends to: nobody else reads its input, unless the
// others' are too long for their slots; then it is a hidden one.
enum class Holder : uint8_t { place, inlined, slot, ring, kept };

// What a rank says about one call. Peers copy it once, check the copy and use the copy: a peer that breaks, or wants
// to, can change the original at any time.
struct Request {
  // With the sequence number before it the first 64 bytes: all a small call needs.
  Verb verb;
  DType dtype;
  RedOp op;
  Holder input;
  uint8_t has_table;
  uint8_t has_ring;
  int16_t root;
  uint64_t count;  // elements: of the whole for all_reduce, reduce, broadcast; of this rank's part otherwise
  std::byte payload[kInlineBytes];
  // Second 64 bytes.
  uint64_t counts_hash;
  Place in, out;
  double factor;
  Place residual;
  uint64_t turn;        // the byte of this rank's ring where its slot or its pieces begin
  uint64_t few_pieces;  // 1: waiting is expensive where this rank runs
  uint64_t spare;
};
constexpr size_t kSmallRequestBytes = 56;
static_assert(offsetof(Request, counts_hash) == kSmallRequestBytes && sizeof(Request) == kLineBytes - sizeof(Flag));

struct alignas(kLineBytes) Descriptor {
  Flag seq;
  Request said;
};
static_assert(sizeof(Descriptor) == kLineBytes);

struct TableEntry {
  Place in, out;
  uint64_t in_count, out_count;
};

struct alignas(kLineBytes) FlagLine {
  Flag value;
};

// `exit`: done with a call's data. `withdrawn`: out of a call that failed; this rank will not write for it any more.
enum class Phase : uint8_t { descriptor, exit, staged, reduced, copied, note, withdrawn, count_ };

struct alignas(kLineBytes) AbortLine {
  Flag code;  // 0: alive; otherwise Code, written once after the text
  uint64_t seq;
  int32_t peers[16];
  char text[176];
};
static_assert(sizeof(AbortLine) == 2 * kLineBytes);

// Says whether a rank is still in a group: a line of its heap that outlives the group's block, since peers look at it
// until they have left themselves. It is used again for the next group; whoever finds another `use` than it knows
// learns from that alone that the rank has left.
struct alignas(kLineBytes) Membership {
  Flag use;   // counts the groups that have had this line
  Flag left;  // equal to `use` once the rank has left; pairs with Group::state_of
  char reason[kLineBytes - 2 * sizeof(Flag)];
};
static_assert(sizeof(Membership) == kLineBytes);

// Point-to-point: for every ordered pair (sender, receiver) a ring of letters in the sender's block and a ring of
// replies in the receiver's. Letter i lives in entry i % depth until reply i says done.
struct LetterHead {  // copied once by the receiver
  int64_t tag;
  uint64_t bytes;
  uint64_t seq;  // the sender's number of this send, for messages
  Place place;   // the tensor itself, or the staging ring of this letter
  DType dtype;
  uint8_t kind;  // LetterKind
};
struct alignas(kLineBytes) Letter {
  Flag posted;  // i + 1 once the letter may be read
  Flag filled;  // staged letters: bytes put into the ring so far
  LetterHead head;
  std::byte payload[72];
};
static_assert(sizeof(Letter) == kLineBytes);

struct alignas(64) Reply {
  Flag done;              // i + 1 once letter i is finished with
  Flag drained;           // staged letters: bytes taken so far
  uint64_t error;         // 1: the receiver refused the letter; valid with `done`
  uint64_t wanted_bytes;  // what it expected
  uint64_t wanted_dtype;
  uint64_t spare[3];
};
static_assert(sizeof(Reply) == 64);

// One rank's stage: pieces going in, then as many coming out; copies use all of it for one stream.
struct Stage {
  std::byte* base;
  size_t bytes;
  size_t piece;    // bytes
  uint64_t first;  // where piece 0 of a call is
  uint64_t depth() const { return bytes / 2 / piece; }
  std::byte* in(uint64_t p) const { return base + (first + p) % depth() * piece; }
  std::byte* out(uint64_t p) const { return in(p) + bytes / 2; }
  std::byte* stream(uint64_t p) const { return base + (first + p) % (2 * depth()) * piece; }
};

// Addresses inside a block of a group with `size` ranks.
class Block {
 public:
  Block() = default;
  Block(std::byte* base, int size) : base_(base), size_(size) {}

  static int letters(int size) { return size <= 8 ? 16 : size <= 32 ? 8 : 4; }
  static size_t table_bytes(int size) { return round(sizeof(TableEntry) * static_cast<size_t>(size)); }
  static size_t pair_bytes(int size) { return (sizeof(Letter) + sizeof(Reply)) * static_cast<size_t>(letters(size)); }
  static size_t bytes(int size) { return slots_at(size) + 2 * kSlotBytes + kStageBytes; }

  std::byte* base() const { return base_; }
  Descriptor& descriptor(uint64_t seq) const { return at<Descriptor>(0)[seq % 2]; }
  AbortLine& abort() const { return *at<AbortLine>(2 * kLineBytes); }
  std::atomic<uint32_t>& asleep() const { return at<std::atomic<uint32_t>>(4 * kLineBytes)[0]; }
  std::atomic<uint32_t>& processor() const { return at<std::atomic<uint32_t>>(4 * kLineBytes)[1]; }  // + 1; 0: unknown
  std::atomic<uint64_t>& ring_offset() const { return at<std::atomic<uint64_t>>(4 * kLineBytes)[1]; }  // in the heap
  // Where this rank's membership is, and which of its users this group is: written when the block is made.
  uint64_t& membership_offset() const { return at<uint64_t>(4 * kLineBytes)[2]; }
  uint64_t& membership_use() const { return at<uint64_t>(4 * kLineBytes)[3]; }
  Flag& flag(Phase phase) const {  // all but descriptor
    return at<FlagLine>(5 * kLineBytes)[static_cast<size_t>(phase)].value;
  }
  char* note() const { return at<char>(kNoteAt); }
  TableEntry* table(uint64_t seq) const { return at<TableEntry>(kTablesAt + seq % 2 * table_bytes(size_)); }
  Letter& letter(int receiver, uint64_t i) const {
    return at<Letter>(pairs_at(size_) + static_cast<size_t>(receiver) * pair_bytes(size_))[i % ring()];
  }
  Reply& reply(int sender, uint64_t i) const {
    return at<Reply>(pairs_at(size_) + static_cast<size_t>(sender) * pair_bytes(size_) +
                     sizeof(Letter) * ring())[i % ring()];
  }
  uint64_t ring() const { return static_cast<uint64_t>(letters(size_)); }
  std::byte* slot(uint64_t seq) const { return base_ + slots_at(size_) + seq % 2 * kSlotBytes; }
  std::byte* stage() const { return base_ + slots_at(size_) + 2 * kSlotBytes; }

 private:
  static constexpr size_t kNoteAt = (5 + static_cast<size_t>(Phase::count_)) * kLineBytes;
  static constexpr size_t kTablesAt = kNoteAt + 512;
  static constexpr size_t round(size_t n) { return (n + kLineBytes - 1) / kLineBytes * kLineBytes; }
  static size_t pairs_at(int size) { return kTablesAt + 2 * table_bytes(size); }
  static size_t slots_at(int size) {
    return (pairs_at(size) + pair_bytes(size) * static_cast<size_t>(size) + 4095) / 4096 * 4096;
  }
  template <class T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }
  std::byte* base_ = nullptr;
  int size_ = 0;
};

}  // namespace unisono
