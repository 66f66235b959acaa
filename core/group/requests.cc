// See requests.h: this rank's own request.
#include "group/requests.h"

#include <algorithm>

#include "base/tuning.h"
#include "group/reach.h"

namespace unisono {
namespace {

constexpr size_t kAlwaysInSlot = 2 << 10;  // bytes, on any number of ranks

// Small inputs travel in a slot: one round, and no rank waits for another to leave. Long ones too if every rank gives
// and everybody needs all of it. All-reduce reads every slot on every rank, so its limit shrinks with the number of
// ranks. Of the others, a root's data had better move in pieces, which the others read while the next one is written,
// and slots would hold what a rank keeps for itself; in a reduce-scatter those with small parts would idle.
size_t slot_limit(Verb verb, int size, bool in_ring) {
  const size_t most = in_ring ? kRingSlotBytes : kSlotBytes;
  if (verb == Verb::all_reduce || verb == Verb::matmul_reduce)
    return std::clamp<size_t>((in_ring ? 1 << 20 : 128 << 10) / static_cast<size_t>(size), kAlwaysInSlot, most);
  return verb == Verb::all_gather ? most : kSlotBytes;
}

// From here on a tensor in the heap is read where it is: a second round costs less than copying it into the slot and
// moving all of it between cores.
constexpr size_t kDirectFrom = 4 << 10;

uint64_t hash_counts(const Part* parts, int size) {
  uint64_t h = 0xcbf29ce484222325;
  for (int r = 0; r < size; r++) {
    h = (h ^ parts[r].count) * 0x9e3779b97f4a7c15;
    h ^= h >> 29;
  }
  return h;
}

bool gives_input(const Call& call, int rank) {
  switch (call.verb) {
    case Verb::barrier:
      return false;
    case Verb::broadcast:
    case Verb::scatter:
      return call.root == rank;
    default:
      return true;
  }
}

}  // namespace

Requests::Requests(Group& group, Waiter& waiter)
    : g_(group),
      waiter_(waiter),
      requests_(group.peers().size()),
      tables_(group.peers().size() * group.peers().size()),
      rings_(group.peers().size()) {}

Requests::Input Requests::describe(const Call& call) {
  Request& d = own();
  d.verb = call.verb;
  d.dtype = call.dtype;
  d.op = call.op;
  d.root = static_cast<int16_t>(call.root);
  const size_t bytes = input_bytes(call);
  ring_ = needs_ring(call, bytes) ? g_.ring().begin() : nullptr;  // without it, slots and stage in the block do it
  d.has_ring = ring_ != nullptr;
  d.ring = ring_ ? static_cast<uint64_t>(ring_ - g_.heap().base()) : 0;
  d.turn = turn_;
  d.way = call.way;
  d.next_way = call.next_way;
  d.few_pieces = false;
  d.tuning = 0;
  d.reads = false;
  if (counts_differ(call.verb) || longest_of(call, bytes) > kDirectFrom) {
    d.few_pieces = g_.facts().crowded || has_busy_neighbours();
    d.tuning = current_tuning().word();
    d.reads = wants_read(call) && may_be_read(call, bytes);
  }
  d.count = call.count;
  if (call.verb == Verb::all_gather) d.count = hash_counts(call.out_parts, g_.size());
  if (call.verb == Verb::reduce_scatter) d.count = hash_counts(call.in_parts, g_.size());
  if (call.op == RedOp::premul_sum) d.factor = call.factor;
  if (call.epilogue) d.epilogue_hash = call.epilogue->hash;
  std::byte* holder = place_input(call, d, bytes);
  place_output(call, d);
  d.has_table = needs_table(call, d);
  if (d.has_table) fill_table(call);
  return {holder, bytes};
}

void Requests::publish(const Call& call) {
  Descriptor& descriptor = g_.mine().descriptor(call.seq);
  if (own().has_table) std::memcpy(g_.mine().table(call.seq), table(g_.rank()), g_.peers().size() * sizeof(TableEntry));
  descriptor.said = own();
  g_.publish(descriptor.seq, call.seq);
}

size_t Requests::input_bytes(const Call& call) const {
  if (!gives_input(call, g_.rank())) return 0;
  return (call.in_parts ? sum_of_parts(call.in_parts) : call.count) * dtype_bytes(call.dtype);
}

size_t Requests::sum_of_parts(const Part* parts) const {
  size_t count = 0;
  for (int r = 0; r < g_.size(); r++) count += parts[r].count;
  return count;
}

// Says in the request what holds the input, and returns where to copy it, unless it stays where it is.
std::byte* Requests::place_input(const Call& call, Request& d, size_t bytes) {
  d.input = Holder::inlined;
  const bool crowded = g_.facts().crowded;
  const std::byte* probe = call.in_parts ? call.in_parts[0].ptr : call.in;
  if (bytes <= kInlineBytes) return d.payload;
  if (bytes > slot_limit(call.verb, g_.size(), d.has_ring) ||
      (bytes > kDirectFrom && !crowded && (g_.heap().holds(probe) || d.reads))) {
    d.input = Holder::place;
    d.in = call.in_parts ? Place{} : g_.locate(call.in, bytes);
    return nullptr;
  }
  if (call.root == g_.rank() && (call.verb == Verb::reduce || call.verb == Verb::gather)) {
    d.input = Holder::kept;
    d.in = Place::hidden(call.in);
    return nullptr;
  }
  if (d.has_ring && bytes > kRingFrom) return take_ring(d, bytes);
  d.input = Holder::slot;
  return g_.mine().slot(call.seq);
}

std::byte* Requests::take_ring(Request& d, size_t bytes) {
  d.input = Holder::ring;
  // Not over the slot of the call before, which a peer may still read.
  size_t at = turn_ + bytes > ring_window(Tuning::of(d.tuning)) ? 0 : turn_;
  if (at < slot_end_ && slot_begin_ < at + bytes) at = slot_end_;
  static_assert(kRingBytes >= 3 * kRingSlotBytes);
  d.turn = slot_begin_ = at;
  turn_ = slot_end_ = at + (bytes + 4095) / 4096 * 4096;
  return ring_ + at;
}

void Requests::place_output(const Call& call, Request& d) const {
  const size_t bytes = call.epilogue ? call.epilogue->out_bytes() : call.count * dtype_bytes(call.dtype);
  d.out = {};
  if (!call.out_parts && call.out && call.verb != Verb::barrier &&
      (d.input == Holder::place || counts_differ(call.verb) || call.epilogue || call.verb == Verb::broadcast))
    d.out = g_.locate(call.out, bytes);
  if (call.epilogue) d.residual = g_.locate(call.epilogue->residual, bytes);
}

bool Requests::needs_table(const Call& call, const Request& d) const {
  if (!call.in_parts && !call.out_parts) return false;
  if (d.input == Holder::place || counts_differ(call.verb)) return true;
  if (call.verb != Verb::all_gather) return false;
  // A rank that gathers little from itself may get much from others, who then help to write it.
  for (int r = 0; r < g_.size(); r++)
    if (call.out_parts[r].count * dtype_bytes(call.dtype) > kDirectFrom) return true;
  return false;
}

void Requests::fill_table(const Call& call) {
  const size_t element = dtype_bytes(call.dtype);
  for (int r = 0; r < g_.size(); r++) {
    Part in = call.in_parts ? call.in_parts[r] : Part{nullptr, 0};
    Part out = call.out_parts ? call.out_parts[r] : Part{nullptr, 0};
    table(g_.rank())[r] = {in.count ? g_.locate(in.ptr, in.count * element) : Place{},
                           out.count ? g_.locate(out.ptr, out.count * element) : Place{}, in.count, out.count};
  }
}

// The first to need it is a call whose input is neither short nor in the heap. From then on every call has it that may
// stage something, here or elsewhere, whatever this rank gives.
bool Requests::needs_ring(const Call& call, size_t bytes) const {
  if (!g_.ring().is_wanted()) {
    const std::byte* probe = call.in_parts ? call.in_parts[0].ptr : call.in;
    return bytes > (g_.facts().crowded ? kCrowdedRingFrom : kRingFrom) && !g_.heap().holds(probe);
  }
  return longest_of(call, bytes) > kAlwaysInSlot;
}

uint8_t& Requests::remembered(const Call& call) {
  const auto size = static_cast<size_t>(std::bit_width(longest_of(call, input_bytes(call))));
  return next_ways_[static_cast<size_t>(call.verb)][std::min(size, next_ways_[0].size() - 1)];
}

uint8_t Requests::advice(const Call& call) const {
  if (g_.rank() == 0) return call.next_way ? call.way | kTold : 0;
  return const_cast<Requests*>(this)->remembered(call);
}

bool Requests::wants_read(const Call& call) const {
  const uint8_t told = current_tuning().is_chosen ? 0 : advice(call);
  return told ? told & kSingleCopy : is_better_read(call);
}

// Whether peers could read this rank's tensors of the call where they are, and it theirs.
bool Requests::may_be_read(const Call& call, size_t bytes) {
  if (!g_.reads_all() || call.epilogue) return false;
  auto may = [&](const std::byte* at, size_t n) {
    return n <= kDirectFrom || g_.heap().holds(at) || is_known_readable(at, n);
  };
  if (!call.in_parts) return may(call.in, bytes);
  for (int r = 0; r < g_.size(); r++)
    if (!may(call.in_parts[r].ptr, call.in_parts[r].count * dtype_bytes(call.dtype))) return false;
  return true;
}

// To ask the kernel takes as long as to move some 20 KiB, so the answer is kept. Should other memory have come to that
// address meanwhile, which cannot be read, then reading it fails, and with it the call.
bool Requests::is_known_readable(const std::byte* at, size_t bytes) {
  constexpr int64_t keep_ns = 1'000'000'000;
  Readable& known = readable_[(reinterpret_cast<uintptr_t>(at) >> 12) % readable_.size()];
  const int64_t now = now_ns();
  if (known.at == at && known.bytes >= bytes && now < known.until_ns) return true;
  const std::pair<const void*, size_t> range{at, bytes};
  if (!is_readable(&range, 1)) return false;
  known = {at, bytes, now + keep_ns};
  return true;
}

Requests::Extent Requests::extent(const Call& call) const {
  Extent found;
  found.longest = longest_of(call, input_bytes(call));
  size_t most = call.out_parts ? sum_of_parts(call.out_parts) : call.out ? call.count : 0;
  if (call.verb == Verb::reduce_scatter)
    for (int r = 0; r < g_.size(); r++) most = std::max(most, call.in_parts[r].count);
  // A root elsewhere gets as much as this rank gives, or as much from everybody, as far as this rank can know.
  if (call.verb == Verb::reduce) most = call.count;
  if (call.verb == Verb::gather && call.root != g_.rank()) most = call.count * g_.peers().size();
  found.output = most * dtype_bytes(call.dtype);
  auto hides = [&](const std::byte* at) { return at && !g_.heap().holds(at); };
  found.hidden = hides(call.in) || hides(call.out);
  for (const Part* parts : {call.in_parts, call.out_parts})
    for (int r = 0; parts && r < g_.size(); r++) found.hidden |= parts[r].count && hides(parts[r].ptr);
  return found;
}

// Bytes of this rank's input or output, whichever is longer.
size_t Requests::longest_of(const Call& call, size_t input_bytes) const {
  const size_t got = call.out_parts ? sum_of_parts(call.out_parts) : call.count;
  return std::max(input_bytes, got * dtype_bytes(call.dtype));
}

// What is read at a time must be long enough: of a reduction a rank's share, otherwise what goes to one rank.
bool Requests::is_better_read(const Call& call) const {
  const bool reduces = call.op != RedOp::none, in_shares = reduces || call.in_parts;
  const size_t bytes = longest_of(call, input_bytes(call));
  // What was measured for reductions is an all_reduce; the others move as little as copies do.
  return current_tuning().reads(in_shares ? bytes / g_.peers().size() : bytes, call.verb == Verb::all_reduce);
}

bool Requests::all_read() const {
  return std::all_of(requests_.begin(), requests_.end(), [](const Request& d) { return d.reads; });
}

bool Requests::all_buffered() const {
  for (const Request& d : requests_)
    if (d.input == Holder::place) return false;
  return true;
}

Requests::Exposed Requests::exposed(const Call& call) const {
  Exposed found;
  auto add = [&](Place place, size_t bytes) {
    if (!place || !bytes) return;
    found.any = true;
    if (place.rank() == g_.rank()) found.own.emplace_back(g_.peer(g_.rank()).heap_base + place.offset(), bytes);
  };
  const size_t element = dtype_bytes(call.dtype);
  add(mine().out, call.epilogue ? call.epilogue->out_bytes() : call.count * element);
  for (int r = 0; mine().has_table && r < g_.size(); r++)
    add(entry(g_.rank(), r).out, entry(g_.rank(), r).out_count * element);
  return found;
}

}  // namespace unisono
