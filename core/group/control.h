// What one rank of a group shares with the others: its control block, a piece of its own heap.
//
// Vocabulary. A *line* is 128 bytes with one writer, the block's owner; everybody else only reads it. A *flag* is a
// monotonic 64-bit number in a line (base/shared.h).
// The *descriptor* line of call s is line s % 2: a rank writes call s + 2 only after it has seen every descriptor of
// call s + 1, and a rank publishes s + 1 only when it has done with the descriptors and slots of s. The same holds for
// *slots* (small inputs) and *tables* (per-part places and counts), which are double-buffered alike.
// The *stage* is a ring of pieces for tensors that are not in the heap; three flags count pieces over all calls.
// The *ring* is a larger memory for stages and slots, lent to a group while it needs one (ring.h). Calls take it in
// turn from front to end, so that what is written has left the caches of whoever read it last: on Zen 4 a core stores
// at 32 GB/s to such lines, at 7 to ones that another core still has. A rank's `turn` says where in its ring a call
// begins.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "base/shared.h"
#include "base/tuning.h"
#include "base/types.h"
#include "memory/scratch.h"

namespace unisono {

constexpr size_t kInlineBytes = 40;
constexpr size_t kSlotBytes = 64 << 10;
constexpr size_t kStageBytes = 512 << 10;       // half of it for pieces going in, half for pieces coming out
constexpr size_t kPieceBytes = 128 << 10;       // the longest piece in a stage
constexpr size_t kRingBytes = Scratch::kBytes;  // more than twice a second-level cache
constexpr size_t kRingPieceBytes = 128 << 10;
constexpr size_t kRingSlotBytes = 1 << 20;
constexpr size_t kRingFrom = 4 << 10;          // bytes of the input
constexpr size_t kCrowdedRingFrom = 64 << 10;  // the same with more ranks than processors
// With more ranks than processors, or beside busy neighbours, every wait for another rank is a turn of the scheduler:
// then pieces are few and long.
constexpr size_t kLongPieceBytes = 1 << 20;
// A rank fills piece p + 1 before it reduces piece p, so there must be room for two.
static_assert(kStageBytes / 2 >= 2 * kPieceBytes && kRingBytes / 2 >= 2 * kLongPieceBytes);
constexpr size_t kNoteBytes = 496;

// How much of a ring is used, as far as it was measured (base/tuning.h).
inline size_t ring_window(Tuning tuning) {
  return tuning.is_known() ? std::min(kRingBytes, size_t{1} << tuning.ring) : kRingBytes;
}

// Where a tensor is, in words every rank understands. In shared memory: bit 63, the group rank whose heap holds it, and
// the offset in that heap. Otherwise its address in the process of the rank that says so, of use to single copies only
// (reach.h); 0 if there is no tensor.
struct Place {
  uint64_t word = 0;
  static Place at(int rank, size_t offset) { return {uint64_t{1} << 63 | static_cast<uint64_t>(rank) << 48 | offset}; }
  static Place hidden(const void* p) { return {reinterpret_cast<uint64_t>(p) & ~(uint64_t{1} << 63)}; }
  explicit operator bool() const { return word >> 63; }  // in shared memory
  uint64_t address() const { return word; }              // of one that is not
  int rank() const { return static_cast<int>(word >> 48 & 0x7fff); }
  size_t offset() const { return word & ((uint64_t{1} << 48) - 1); }
};

// What holds a rank's input. `kept` is for a root that everybody else sends to: nobody else reads its input, unless the
// others' are too long for their slots; then it is a hidden one.
enum class Holder : uint8_t { place, inlined, slot, ring, kept };

// How the bytes of a longer call move: what others read in slots and stages is stored past the caches, and so are
// outputs; tensors that are not in the heap are read where they are (reach.h); what goes through slots and stages is
// copied by the processor's string instruction (copy_over).
constexpr uint8_t kStagePastCaches = 1, kOutputsPastCaches = 2, kSingleCopy = 4, kByStrings = 8;
constexpr uint8_t kTold = 128;  // in `next_way`

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
  // Elements: of the whole for all_reduce, reduce, broadcast; a hash of all counts for all_gather and reduce_scatter;
  // of this rank's part otherwise.
  uint64_t count;
  std::byte payload[kInlineBytes];
  // Second 64 bytes.
  uint64_t epilogue_hash;  // matmul_reduce: of what must be equal on all ranks and has no field
  Place in, out;
  double factor;
  Place residual;
  uint64_t turn;       // the byte of this rank's ring where its slot or its pieces begin
  uint8_t way;         // how the call moves; rank 0's decides for all
  uint8_t next_way;    // and the next call of its kind; 0 if rank 0 does not say
  uint8_t few_pieces;  // 1: waiting is expensive where this rank runs
  uint8_t reads;       // 1: this rank can read all others' own memory, and they can read its tensors (reach.h)
  uint32_t tuning;     // Tuning::word; rank 0's decides for all
  uint64_t ring;       // where in this rank's heap its ring is, if it has one
};
constexpr size_t kSmallRequestBytes = 56;
static_assert(std::is_trivially_copyable_v<Request> && offsetof(Request, epilogue_hash) == kSmallRequestBytes &&
              sizeof(Request) == kSmallRequestBytes + 8 * sizeof(uint64_t));  // no padding: parts are compared as bytes

struct alignas(kLineBytes) Descriptor {
  // The call's number, or 0 for one that was taken back. Released by Requests::publish, acquired by Waiter::await and
  // by Collectives::may_write: publishes `said`, the table of the same call, its slot, and the ring's part for it.
  Flag seq;
  Request said;
};
static_assert(sizeof(Descriptor) == kLineBytes);

struct TableEntry {
  Place in, out;
  uint64_t in_count, out_count;
};
static_assert(std::has_unique_object_representations_v<TableEntry> && std::is_trivially_copyable_v<TableEntry>);

struct alignas(kLineBytes) FlagLine {
  Flag value;
};

// The flags of a call. Each is released by its rank through Group::publish and acquired by peers in Waiter::await (exit
// and withdrawn also in Collectives::may_write). `staged`, `reduced` and `copied` count pieces of all calls, the others
// hold the number of a call. What they publish:
enum class Phase : uint8_t {
  descriptor,  // Descriptor::seq
  exit,        // what this rank wrote into others' outputs, and that it reads nothing of this call any more
  staged,      // a piece in this rank's stage
  reduced,     // results in its out stage and in outputs; and that it has read that piece of the others' stages
  copied,      // that it has taken that piece from the others' stages, which may be written again
  note,        // its words after a mismatch
  withdrawn,   // that it is out of a call that failed, and will not write for it any more
  count_
};

struct alignas(kLineBytes) AbortLine {
  // 0: alive; otherwise a Code. Released once, by write_abort, after the rest of the line; acquired by Group::given_up,
  // Waiter::heed_aborts, Messages::withdrawn and while joining.
  Flag code;
  uint64_t seq;
  int32_t peers[16];
  char text[176];
};
static_assert(sizeof(AbortLine) == 2 * kLineBytes);

// What a rank says while survivors agree on a smaller group (shrink.h). `attempt` counts the agreements of a group,
// from 1 on, and makes the rest of its line known.
constexpr int kMostRanks = 256;
using RankBits = uint64_t[kMostRanks / 64];
struct alignas(kLineBytes) Offer {
  Flag attempt;    // 0: none, or taken back. Released and acquired in shrink.cc only, as in Verdict
  uint64_t block;  // where in its heap this rank has made a control block for the new group
  uint64_t random;
  RankBits excluded;
};
struct alignas(kLineBytes) Verdict {  // of the rank that decides
  Flag attempt;
  RankBits members;
};

// Says whether a rank is still in a group: a line of its heap that outlives the group's block, since peers look at it
// until they have left themselves. It is used again for the next group; whoever finds another `use` than it knows
// learns from that alone that the rank has left.
struct alignas(kLineBytes) Membership {
  // Counts the groups that have had this line, and how each ended. Released by make_block and BlockRelease, acquired by
  // state_of and Group::all_came: whoever finds another number may not believe in the block.
  Flag use;
  Flag left;  // equal to `use` once the rank has left. Released by Group::close after the reason, acquired by state_of
  char reason[kLineBytes - 2 * sizeof(Flag)];
};
static_assert(sizeof(Membership) == kLineBytes);

// Point-to-point: for every ordered pair (sender, receiver) a mailbox, a ring of entries in the sender's block, and a
// ring of replies in the receiver's. Message i lives in entry i % depth until reply i says done.
enum class Carrier : uint8_t { inlined, place, staged };  // what holds a message's data
constexpr size_t kSendBuffer = kRingBytes / 2;            // through which a longer message is staged
// Bytes moved before the other end is told: few turns, but so many that both ends are at work together.
inline size_t send_turn(size_t bytes) {
  return std::clamp<size_t>(bytes / 8, 16 << 10, 64 << 10);
}

struct Envelope {  // copied once by the receiver
  int64_t tag;
  uint64_t bytes;
  uint64_t seq;  // the sender's number of this send, for errors
  Place place;   // the tensor itself, or the buffer through which it is staged
  DType dtype;
  Carrier carrier;
};
struct alignas(kLineBytes) MailboxEntry {
  Flag posted;  // i + 1: publishes the envelope and the payload. Released by Messages::post, acquired by is_posted
  Flag filled;  // bytes put into the buffer so far: publishes them. Released by fill_buffer, acquired by read_staged
  Envelope envelope;
  std::byte payload[456];  // a few hundred bytes are there with their envelope; more takes a buffer and its bookkeeping
};
static_assert(sizeof(MailboxEntry) == 4 * kLineBytes && std::is_trivially_copyable_v<Envelope>);

struct alignas(64) Reply {
  // i + 1 once the receiver has done with message i: publishes the rest of the reply, and that the entry and the tensor
  // or buffer are free. Released by Messages::end_receive, acquired by post, step_send and give_back_buffers.
  Flag done;
  Flag drained;           // bytes taken from the buffer so far: their room is free. Released and acquired as `filled`
  uint64_t error;         // 1: the receiver refused the message
  uint64_t wanted_bytes;  // what it expected
  uint64_t wanted_dtype;
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

  static constexpr int mailbox_depth(int size) { return size <= 8 ? 16 : size <= 32 ? 8 : 4; }
  static constexpr size_t table_bytes(int size) { return round(sizeof(TableEntry) * static_cast<size_t>(size)); }
  static constexpr size_t pair_bytes(int size) {
    return (sizeof(MailboxEntry) + sizeof(Reply)) * static_cast<size_t>(mailbox_depth(size));
  }
  static constexpr size_t bytes(int size) { return slots_at(size) + 2 * kSlotBytes + kStageBytes; }

  std::byte* base() const { return base_; }
  Descriptor& descriptor(uint64_t seq) const { return at<Descriptor>(0)[seq % 2]; }
  AbortLine& abort() const { return *at<AbortLine>(2 * kLineBytes); }
  // Set by its rank around a sleep, read by whoever publishes a flag; relaxed, since a missed wake-up costs one short
  // sleep (wait.h).
  std::atomic<uint32_t>& asleep() const { return at<std::atomic<uint32_t>>(4 * kLineBytes)[0]; }
  // Where its rank runs, plus 1; 0: unknown. A hint between Waiter::note_processor and part_ways, relaxed.
  std::atomic<uint32_t>& processor() const { return at<std::atomic<uint32_t>>(4 * kLineBytes)[1]; }
  // Where this rank's membership is, and which of its users this group is: written when the block is made.
  uint64_t& membership_offset() const { return at<uint64_t>(4 * kLineBytes)[1]; }
  uint64_t& membership_use() const { return at<uint64_t>(4 * kLineBytes)[2]; }
  // Where the block is in its own process, for reach.h: written when it is made.
  uint64_t& address() const { return at<uint64_t>(4 * kLineBytes)[3]; }
  static size_t address_offset() { return 4 * kLineBytes + 3 * sizeof(uint64_t); }
  // 1: its rank can read all others' own memory. Stored when its group is made, loaded by ranks that send to it, both
  // relaxed: whoever does not see it yet sends in another way.
  std::atomic<uint32_t>& reads_all() const { return at<std::atomic<uint32_t>>(4 * kLineBytes)[8]; }
  // 1 while a thread of its rank sleeps until a message moves, as `asleep` is for the flags of a call.
  std::atomic<uint32_t>& listening() const { return at<std::atomic<uint32_t>>(4 * kLineBytes)[9]; }
  // How often its rank has told listening ones, itself among them, that a message has moved (Group::wake_listeners).
  // They sleep on it; it publishes nothing, so relaxed.
  Flag& rings() const { return at<Flag>(4 * kLineBytes)[5]; }
  Flag& flag(Phase phase) const {  // all but descriptor
    return at<FlagLine>(5 * kLineBytes)[static_cast<size_t>(phase)].value;
  }
  Offer& offer() const { return *at<Offer>(kOfferAt); }
  Verdict& verdict() const { return *at<Verdict>(kOfferAt + sizeof(Offer)); }
  char* note() const { return at<char>(kNoteAt); }
  TableEntry* table(uint64_t seq) const { return at<TableEntry>(kTablesAt + seq % 2 * table_bytes(size_)); }
  MailboxEntry& mailbox(int receiver, uint64_t i) const {
    return at<MailboxEntry>(pairs_at(size_) + static_cast<size_t>(receiver) * pair_bytes(size_))[i % mailbox_depth()];
  }
  Reply& reply(int sender, uint64_t i) const {
    return at<Reply>(pairs_at(size_) + static_cast<size_t>(sender) * pair_bytes(size_) +
                     sizeof(MailboxEntry) * mailbox_depth())[i % mailbox_depth()];
  }
  uint64_t mailbox_depth() const { return static_cast<uint64_t>(mailbox_depth(size_)); }
  std::byte* slot(uint64_t seq) const { return base_ + slots_at(size_) + seq % 2 * kSlotBytes; }
  std::byte* stage() const { return base_ + slots_at(size_) + 2 * kSlotBytes; }

 private:
  static constexpr size_t kOfferAt = (5 + static_cast<size_t>(Phase::count_)) * kLineBytes;
  static constexpr size_t kNoteAt = kOfferAt + sizeof(Offer) + sizeof(Verdict);
  static constexpr size_t kTablesAt = kNoteAt + 512;
  static constexpr size_t round(size_t n) { return (n + kLineBytes - 1) / kLineBytes * kLineBytes; }
  static constexpr size_t pairs_at(int size) { return kTablesAt + 2 * table_bytes(size); }
  static constexpr size_t slots_at(int size) {
    return (pairs_at(size) + pair_bytes(size) * static_cast<size_t>(size) + 4095) / 4096 * 4096;
  }
  template <class T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }
  std::byte* base_ = nullptr;
  int size_ = 0;
};
// Builds that disagree about what lies where must refuse each other: with new sizes comes a new version.
static_assert(kLayoutVersion == 7 && Block::bytes(2) == 679'936 && Block::bytes(64) == 811'008);

}  // namespace unisono
