// See listener.h.
#include "python/listener.h"

#include <cstring>

namespace unisono {

ListenerBinding::ListenerBinding() {
  Failure failure;
  heap_ = process_heap(failure);
  if (heap_) listener_ = Listener::open(failure);
  if (!listener_) raise(failure, "", -1);
}

std::unique_ptr<Communicator> ListenerBinding::join(int rank, int size, const std::string& group, nb::bytes nonce,
                                                    uint64_t id, double timeout_s,
                                                    const std::vector<std::string>& names,
                                                    std::optional<double> limit_s) {
  Token token;
  if (nonce.size() != sizeof token || names.size() != static_cast<size_t>(size) || size > kMostRanks)
    refuse({.rule = Rule::group_size, .argument = "size", .expected = nb::int_(kMostRanks), .got = nb::int_(size)});
  std::memcpy(&token, nonce.c_str(), sizeof token);
  Failure failure;
  const GroupFacts facts{rank, size, group, id, nanoseconds(timeout_s)};
  std::shared_ptr<Engine> engine;
  {
    nb::gil_scoped_release release;
    const int64_t limit_ns = nanoseconds(limit_s.value_or(timeout_s));
    engine = Engine::open(listener_->join(heap_, facts, token, names, limit_ns, failure));
  }
  if (!engine) raise(failure, group, rank);
  return std::make_unique<Communicator>(std::move(engine));
}

}  // namespace unisono
