// A group as Python calls it: the core's own implementation of the Transport protocol.
//
// A verb takes what a user wrote and gives back what the user gets. Its steps are always the same: collect pointers and
// counts from the arguments, run without the GIL, wrap the outcome: None, a Handle, or an exception. Errors in
// arguments are raised before anything is published, so the group stays usable.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "python/arguments.h"
#include "python/pending.h"

namespace unisono {

class Communicator {
 public:
  explicit Communicator(std::shared_ptr<Engine> engine);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() { return group().facts().name; }
  void rename(const std::string& name) { group().rename(name); }
  uint64_t staged_bytes() { return engine_->staged_bytes(); }
  uint64_t calls() { return group().seq(); }
  uint64_t id() { return group().facts().id; }
  size_t cache_bytes() { return group().facts().cache_bytes; }
  std::vector<int> pids();

  // Verbs. `timeout_s` None or 0 stands for the group's. With `async_op` they return a Handle, else None; recv the rank
  // a message came from. An output may be a number, the rows of a new tensor like the input; it is returned then.
  nb::object barrier(nb::handle timeout_s, bool async_op);
  nb::object all_reduce(nb::handle tensor, nb::handle out, nb::handle op, nb::handle factor, nb::handle timeout_s,
                        bool async_op);
  nb::object reduce(nb::handle tensor, nb::handle root, nb::handle out, nb::handle op, nb::handle factor,
                    nb::handle timeout_s, bool async_op);
  nb::object broadcast(nb::handle tensor, nb::handle root, nb::handle out, nb::handle timeout_s, bool async_op);
  nb::object all_gather(nb::handle output, nb::handle input, nb::handle counts, nb::handle timeout_s, bool async_op);
  nb::object reduce_scatter(nb::handle output, nb::handle input, nb::handle counts, nb::handle op, nb::handle factor,
                            nb::handle timeout_s, bool async_op);
  nb::object gather(nb::handle output, nb::handle input, nb::handle root, nb::handle counts, nb::handle timeout_s,
                    bool async_op);
  nb::object scatter(nb::handle output, nb::handle input, nb::handle root, nb::handle counts, nb::handle timeout_s,
                     bool async_op);
  nb::object all_to_all(nb::handle output, nb::handle input, nb::handle output_counts, nb::handle input_counts,
                        nb::handle timeout_s, bool async_op);
  nb::object send(nb::handle tensor, nb::handle dst, nb::handle tag, nb::handle timeout_s, bool async_op);
  nb::object recv(nb::handle tensor, nb::handle src, nb::handle tag, nb::handle timeout_s, bool async_op);
  // Reduces `products` with scale and residual into `output`. `words` say what differs in a mismatch; everything that
  // must be equal on all ranks and is not checked by number is in `hash`.
  void matmul_reduce(nb::handle products, nb::handle output, nb::handle op, double scale, nb::handle residual,
                     std::optional<std::vector<size_t>> counts, uint64_t hash, nb::handle words, nb::handle timeout_s);

  // New outputs in this process's heap; None if `tensor` must be made contiguous or resolved before a verb takes it.
  nb::object new_like(nb::handle tensor);
  nb::object new_rows(nb::handle tensor, nb::handle rows);

  void close(const std::string& reason, double linger_s);
  void abort(const std::string& reason);

  // For split: a block in this heap for a group of `size` ranks, by its offset.
  uint64_t make_block(int size);
  // Takes such a block back. If peers may have heard of it, `reason` tells them that this rank will not come, and the
  // memory goes with this group's.
  void drop_block(uint64_t offset, int rank, nb::handle reason);
  std::unique_ptr<Communicator> split(const std::vector<int>& members, const std::vector<size_t>& blocks, int rank,
                                      const std::string& child, uint64_t id, double timeout_s);

  // Where a heap tensor of this rank lies, and a tensor of bytes over another rank's heap.
  uint64_t offset_of(nb::handle tensor);
  nb::object peer_bytes(nb::handle who, uint64_t offset, uint64_t bytes);

 private:
  struct Collected;
  struct Made;

  Group& group() { return engine_->group(); }
  [[noreturn]] void raise(const Failure& failure) { unisono::raise(failure, name(), rank_); }
  Made make_output(nb::handle& output, nb::handle& input, bool wanted = true);
  nb::object run(Collected& collected, nb::handle timeout_s, bool async_op, nb::handle outputs);
  void run_now(Call& call);
  nb::object start(std::shared_ptr<Ticket> ticket, nb::list keep, nb::handle outputs);
  nb::object exchange_message(Verb verb, nb::handle tensor, int peer, nb::handle tag, nb::handle timeout_s,
                              bool async_op);
  int partner(nb::handle peer, const char* argument, bool async_op) const;
  void expect_shared(const View& view, const char* argument);

  std::shared_ptr<Engine> engine_;
  int size_, rank_;
  Arguments arguments_;
};

}  // namespace unisono
