// A group as Python calls it: the core's own implementation of the Transport protocol.
//
// A verb takes what a user wrote and gives back what the user gets. Its steps are always the same: collect pointers and
// counts from the arguments, run without the GIL, wrap the outcome: None, a Handle, or an exception. Errors in
// arguments are raised before anything is published, so the group stays usable.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "python/arguments.h"
#include "python/pending.h"

namespace unisono {

class Estate;

class Communicator {
 public:
  explicit Communicator(std::shared_ptr<Engine> engine);
  // Without a group: verbs read and check their arguments, make new outputs, and move nothing. For groups whose ranks
  // are on several hosts, so that these refuse what a group in shared memory refuses.
  Communicator(int rank, int size);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() { return group().facts().name; }
  void rename(const std::string& name) { group().rename(name); }
  uint64_t staged_bytes() { return engine_->staged_bytes(); }
  uint64_t single_copy_bytes() { return engine_->single_copy_bytes(); }
  uint64_t calls() { return group().seq(); }
  uint64_t id() { return group().facts().id; }
  size_t cache_bytes() { return group().facts().cache_bytes; }
  std::vector<int> pids();

  // Verbs. `timeout_s` None or 0 stands for the group's. With `async_op` they return a Handle, else None; recv the rank
  // a message came from. An output may be a number, the rows of a new tensor like the input, and for all_to_all a list
  // of shapes; what was made is returned then.
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

  // For groups over several hosts (hosts.cc). Waits until each word (address, value) is there: 0; 1: not within
  // `timeout_s`; 2: the word at `watch` is no longer `seen`, or the group is given up, or a peer died.
  int await_words(const std::vector<std::pair<uintptr_t, uint64_t>>& words, uintptr_t watch, uint64_t seen,
                  double timeout_s);
  // None, or what is wrong with the group: (code, ranks, text). A rank that has left has the code of a closed group.
  nb::object trouble();
  // Whether a message with this tag has come that no receive has taken; it may be from any rank.
  bool has_message(int64_t tag);

  // For split: a block in this heap for a group of `size` ranks, by its offset.
  uint64_t make_block(int size);
  // Takes such a block back. If peers may have heard of it, `reason` tells them that this rank will not come, and the
  // memory goes with this group's.
  void drop_block(uint64_t offset, int rank, nb::handle reason);
  std::unique_ptr<Communicator> split(const std::vector<int>& members, const std::vector<size_t>& blocks, int rank,
                                      const std::string& child, uint64_t id, double timeout_s);

  // For shrink (survivors.cc): the members that all survivors agree on, with a number from each; the group of them; and
  // what a rank has left.
  nb::tuple agree(const std::vector<int>& excluded, double limit_s);
  std::unique_ptr<Communicator> adopt(const std::string& child, uint64_t id, double timeout_s);
  std::unique_ptr<Estate> estate(int rank);

  // Where a heap tensor of this rank lies, and a tensor of bytes over another rank's heap.
  uint64_t offset_of(nb::handle tensor);
  nb::object peer_bytes(nb::handle who, uint64_t offset, uint64_t bytes);

 private:
  struct Collected;
  struct Made;

  Group& group() { return engine_->group(); }
  [[noreturn]] void raise(const Failure& failure) { unisono::raise(failure, name(), rank_); }
  Made make_output(nb::handle& output, nb::handle& input, NewRows rows = {}, bool wanted = true);
  Made make_outputs(nb::handle& outputs, nb::handle& inputs);
  nb::object run(Collected& collected, nb::handle timeout_s, bool async_op, nb::handle outputs);
  void run_now(Call& call);
  nb::object start(std::shared_ptr<Ticket> ticket, nb::list keep, nb::handle outputs);
  nb::object exchange_message(Verb verb, nb::handle tensor, int peer, nb::handle tag, nb::handle timeout_s,
                              bool async_op);
  nb::object start_message(Call& call, std::shared_ptr<Message> message, nb::handle tensor);
  int partner(nb::handle peer, const char* argument, bool async_op) const;
  void expect_shared(const View& view, const char* argument);

  std::shared_ptr<Engine> engine_;
  int size_, rank_;
  Arguments arguments_;
};

}  // namespace unisono
