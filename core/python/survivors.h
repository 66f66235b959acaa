// What stays of a rank that is gone: its heap, and in it the tensors it kept; and how a tensor is kept.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <vector>

#include "group/group.h"
#include "python/errors.h"

namespace unisono {

// A tensor of this process that peers inherit. It is held for good, past the end of Python, until `drop`.
class KeptBinding {
 public:
  KeptBinding(const std::string& name, nb::handle tensor);
  KeptBinding(const KeptBinding&) = delete;
  KeptBinding& operator=(const KeptBinding&) = delete;

  void begin();  // raises if the memory was taken away from the peers
  void end(int64_t step) { Keeping::end_write(*entry_, step); }
  void drop();

 private:
  std::string name_;
  std::shared_ptr<Heap> heap_;
  KeptEntry* entry_ = nullptr;
  nb::handle tensor_;  // one reference
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
