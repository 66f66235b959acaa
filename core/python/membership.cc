// See communicator.h: the memory of a group that Python sees, and how a rank comes and goes.
#include "group/join.h"
#include "group/retire.h"
#include "python/communicator.h"
#include "python/tensors.h"

namespace unisono {

// -- memory

nb::object Communicator::new_like(nb::handle tensor) {
  Failure failure;
  nb::object made = make_like(tensor, {}, failure);
  if (!made.is_valid()) raise(failure);
  return made;
}

nb::object Communicator::new_rows(nb::handle tensor, nb::handle rows) {
  Failure failure;
  nb::object made = make_like(tensor, {.number = not_negative(rows, "rows")}, failure);
  if (!made.is_valid()) raise(failure);
  return made;
}

// A tensor that has elements must lie where peers can reach it.
void Communicator::expect_shared(const View& view, const char* argument) {
  Heap& heap = group().heap();
  if (view.count && (!heap.holds(view.data) || heap.is_detached(view.data, view.bytes())))
    refuse({.rule = Rule::shared, .argument = argument});
}

uint64_t Communicator::offset_of(nb::handle tensor) {
  const View view = view_tensor(tensor, "tensor");
  group().heap().pin(view.data);  // first: from now on a fork leaves it where it is
  expect_shared(view, "tensor");
  return static_cast<uint64_t>(view.data - group().heap().base());
}

nb::object Communicator::peer_bytes(nb::handle who, uint64_t offset, uint64_t bytes) {
  const int rank = arguments_.rank_in_group(who, "rank");
  std::byte* at = group().resolve(Place::at(rank, offset), bytes);
  if (!at) refuse({.rule = Rule::outside_heap, .argument = "offset", .got = nb::int_(offset)});
  return wrap_bytes(at, bytes, group().peer(rank).mapping);
}

// -- coming and going

std::vector<int> Communicator::pids() {
  std::vector<int> pids;
  for (int r = 0; r < size_; r++) pids.push_back(group().peer(r).pid);
  return pids;
}

void Communicator::close(const std::string& reason, double linger_s) {
  nb::gil_scoped_release release;
  engine_->close(reason, nanoseconds(linger_s));
}

void Communicator::abort(const std::string& reason) {
  Failure cause;
  fail(cause, Code::aborted, reason, {rank_});
  cause.seq = group().seq();
  group().abort(cause);
}

uint64_t Communicator::make_block(int size) {
  Failure failure;
  if (!group().usable(failure)) raise(failure);
  sweep_retired();
  std::byte* block = unisono::make_block(group().heap(), size, failure).release();
  if (!block) raise(failure);
  return static_cast<uint64_t>(block - group().heap().base());
}

void Communicator::drop_block(uint64_t offset, int rank, nb::handle reason) {
  BlockMemory block(group().heap().base() + offset, BlockRelease{&group().heap()});
  if (reason.is_none()) return;
  refuse_block(block.get(), rank, nb::cast<std::string>(reason));
  group().keep(std::move(block));
}

std::unique_ptr<Communicator> Communicator::split(const std::vector<int>& members, const std::vector<size_t>& blocks,
                                                  int rank, const std::string& child, uint64_t id, double timeout_s) {
  Failure failure;
  const GroupFacts& mine = group().facts();
  const int size = static_cast<int>(members.size());
  GroupFacts facts{rank, size, child, id, nanoseconds(timeout_s), mine.crowded, mine.cache_bytes};
  auto engine = Engine::open(unisono::split(group(), members, blocks, facts, failure));
  if (!engine) raise(failure);
  return std::make_unique<Communicator>(std::move(engine));
}

}  // namespace unisono
