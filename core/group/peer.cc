// See peer.h.
#include "group/peer.h"

#include <algorithm>

#include "base/faults.h"

namespace unisono {

Membership* membership_of(const Block& block, std::byte* heap_base, size_t capacity) {
  const uint64_t offset = block.membership_offset();
  if (offset == 0 || offset % kLineBytes || offset > capacity - sizeof(Membership)) return nullptr;
  return reinterpret_cast<Membership*>(heap_base + offset);
}

Member member_of(const Peer& peer) {
  if (!peer.met) return {};
  return {membership_of(peer.block, peer.heap_base, peer.heap_capacity), peer.block.membership_use()};
}

PeerState state_of(const Peer& peer, const Member& member, std::string* reason) {
  const auto& [line, use] = member;
  const bool may_leave = line && is_up(Defence::departures);
  if (may_leave && line->use.load(std::memory_order_acquire) != use) return PeerState::left;
  if (may_leave && line->left.load(std::memory_order_acquire) == use) {
    if (reason) {
      alignas(uint64_t) char words[sizeof line->reason];
      copy_words(words, line->reason, sizeof words);
      fence(std::memory_order_acquire);  // keeps the second look at `use` behind the copy
      if (line->use.load(std::memory_order_relaxed) == use) *reason = text_in(words);
    }
    return PeerState::left;
  }
  if (!line && !peer.link) return PeerState::left;
  if (!is_up(Defence::patience) && process_state(peer.pid) == "stopped") return PeerState::died;
  return peer.link && peer.link->hung_up() && is_up(Defence::deaths) ? PeerState::died : PeerState::alive;
}

namespace {

size_t count_processors(const std::vector<Peer>& peers) {
  std::bitset<1024> processors;
  for (const Peer& peer : peers) processors |= peer.processors;
  return processors.count();
}

}  // namespace

bool are_crowded(const std::vector<Peer>& peers) {
  double quota = INFINITY;
  for (const Peer& peer : peers) quota = std::min(quota, peer.quota);
  return static_cast<double>(peers.size()) > std::min(static_cast<double>(count_processors(peers)), quota);
}

size_t ranks_per_processor(const std::vector<Peer>& peers) {
  const size_t processors = std::max<size_t>(1, count_processors(peers));
  return std::max<size_t>(1, (peers.size() + processors - 1) / processors);
}

namespace {

BlockMemory make_block_of(Heap& heap, size_t bytes, Failure& failure) {
  HeapMemory memory = take_memory(heap, bytes, failure);
  if (!memory) return nullptr;
  Block block(memory.get(), 1);
  // Slots and stages, at the end, need no initial value; everything before them starts at zero.
  std::memset(static_cast<void*>(block.base()), 0, bytes - 2 * kSlotBytes - kStageBytes);
  auto* line = reinterpret_cast<Membership*>(heap.take_line(failure));
  if (!line) return nullptr;
  block.membership_offset() = static_cast<uint64_t>(reinterpret_cast<std::byte*>(line) - heap.base());
  block.membership_use() = line->use.load(std::memory_order_relaxed) + 1;
  line->use.store(block.membership_use(), std::memory_order_release);
  block.address() = reinterpret_cast<uint64_t>(block.base());
  return {memory.release(), BlockRelease{&heap}};
}

}  // namespace

BlockMemory make_block(Heap& heap, int size, Failure& failure) {
  return make_block_of(heap, Block::bytes(size), failure);
}

BlockMemory make_roomy_block(Heap& heap, int most, Failure& failure) {
  size_t bytes = 0;
  for (int size = 1; size <= most; size++) bytes = std::max(bytes, Block::bytes(size));  // mailboxes get shorter
  return make_block_of(heap, bytes, failure);
}

void BlockRelease::operator()(std::byte* base) const {
  if (heap->is_of_parent()) return;
  // Peers can write to the block, so even what this process wrote there is looked at before it is used.
  if (Membership* line = membership_of(Block(base, 1), heap->base(), heap->capacity())) {
    line->use.store(Block(base, 1).membership_use() + 1, std::memory_order_release);  // whoever still looks: it is over
    heap->give_line(reinterpret_cast<std::byte*>(line));
  }
  heap->release(base);
}

void leave_block(const Block& block, Heap& heap, const std::string& reason) {
  Membership* line = membership_of(block, heap.base(), heap.capacity());
  if (!line) return;
  alignas(uint64_t) char words[sizeof line->reason];
  copy_text(words, sizeof words, reason);
  copy_words(line->reason, words, sizeof words);
  line->left.store(block.membership_use(), std::memory_order_release);
}

void write_abort(AbortLine& line, const Failure& cause) {
  std::fill(std::begin(line.peers), std::end(line.peers), -1);
  for (size_t i = 0; i < std::min<size_t>(cause.peers.size(), std::size(line.peers)); i++)
    line.peers[i] = cause.peers[i];
  line.seq = cause.seq;
  copy_text(line.text, sizeof line.text, cause.text);
  line.code.store(static_cast<uint64_t>(cause.code), std::memory_order_release);
}

void refuse_block(std::byte* block, int rank, const std::string& reason) {
  Failure cause;
  fail(cause, Code::aborted, reason, {rank});
  write_abort(Block(block, 1).abort(), cause);
}

}  // namespace unisono
