// What stays of a rank that is gone: its heap, and in it the tensors it kept; and how a tensor is kept.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <vector>

#include "group/group.h"
#include "python/errors.h"

namespace unisono {

// A tensor of this process that peers inherit. It and its memory are held for good, past the end of Python, until
// `drop`. Every method is called with the GIL, which makes each of them one step for the program's threads.
class KeptBinding {
 public:
  KeptBinding(const std::string& name, nb::handle tensor);
  KeptBinding(const KeptBinding&) = delete;
  KeptBinding& operator=(const KeptBinding&) = delete;

  // An update: `begin`, then `end` unless the program raised inside, then `leave` in any case. `begin` raises if
  // another update is under way, if the memory was taken away from the peers, or if the tensor lies elsewhere by now.
  void begin(int64_t step);
  void end();
  void leave() { updating_ = false; }
  void drop();  // raises inside of an update, which would end in an entry that may be another tensor's by then

 private:
  void expect_ours() const;  // neither dropped nor a parent's: a child has a copy, which nobody inherits

  std::string name_;
  std::shared_ptr<Heap> heap_;
  KeptEntry* entry_ = nullptr;  // null: dropped
  size_t offset_ = 0, bytes_ = 0;
  nb::handle tensor_, storage_;  // one reference to each: the program may give the tensor other memory
  bool updating_ = false;
  int64_t step_ = 0;  // of the update under way
};

// The heap of a rank that was lost.
class Estate {
 public:
  explicit Estate(const Peer& peer) : peer_(peer) {}
  // False while the process may still write: one that has left hangs up too. A rank that is a thread has no process of
  // its own to end; of one in another pid namespace only the hang-up is known.
  bool is_final() const { return !peer_.link || (peer_.link->hung_up() && (peer_.pid <= 0 || is_dying(peer_.pid))); }
  int pid() const { return peer_.pid; }
  // (name, dtype, shape, bytes as a tensor, step or None, whole) of every kept tensor.
  nb::list read() const;

 private:
  Peer peer_;
};

}  // namespace unisono
