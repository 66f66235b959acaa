// One call as its caller sees it: what to do, with which memory, for how long at most.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "base/status.h"
#include "base/types.h"

namespace unisono {

struct Part {
  std::byte* ptr;
  size_t count;
};

// What matmul_reduce does beyond a reduction; see verbs/fused.cc.
struct Epilogue {
  DType out = DType::f32;
  double scale = 1;
  bool has_residual = false;            // the same on all ranks; where a rank gets nothing it is null
  const std::byte* residual = nullptr;  // as many elements as the output; in the heap if there are counts
  size_t out_count = 0;                 // elements of this rank's output
  const size_t* counts = nullptr;       // elements for every output and rank; null: all of them for everybody
  size_t spans = 0;                     // how many counts
  uint64_t hash = 0;                    // of all that must be equal on all ranks and has no field of its own

  size_t out_bytes() const { return out_count * dtype_bytes(out); }
};

// What the thread that makes a call has and others want, as an interpreter's lock: given up before the thread waits.
class Lease {
 public:
  virtual void end() = 0;

 protected:
  ~Lease() = default;
};

// Multi-part tensors (one part per rank) are given by in_parts / out_parts.
struct Call {
  Verb verb = Verb::barrier;
  DType dtype = DType::u8;
  RedOp op = RedOp::none;
  int root = -1;
  double factor = 1;
  size_t count = 0;          // elements: of the whole (all_reduce, reduce, broadcast), else of my single part
  std::byte* in = nullptr;   // single-part input
  std::byte* out = nullptr;  // single-part output
  const Part* in_parts = nullptr;
  const Part* out_parts = nullptr;
  const Epilogue* epilogue = nullptr;     // matmul_reduce only
  int64_t timeout_ns = 0;                 // 0: the group's
  bool may_interrupt = false;             // called from Python: look at its signals while waiting
  bool asynchronous = false;              // the caller does not wait, or not here
  Lease* lease = nullptr;                 // of the thread that runs it, if it has one
  const char* site = nullptr;             // where in the program it was made (recorder.h), for ever; null: not known
  std::function<std::string()> describe;  // words for a mismatch; called without locks held

  int64_t tag = 0;         // of a message
  int correspondent = -1;  // of a message; -1: anyone
  uint64_t seq = 0;
  int64_t deadline_ns = 0;
  int64_t warn_ns = 0;            // when to say next that the call is late; 0: not waited yet
  uint8_t way = 0, next_way = 0;  // rank 0: how this and the next call of its kind move (verbs/gauge.h)
  bool is_way_timed = false;      // whether the gauge wants to know how long that takes
  Failure failure;

  void end_lease() {
    if (lease) lease->end();
  }
};

}  // namespace unisono
