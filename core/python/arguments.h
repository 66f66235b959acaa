// Checks of a call's arguments.
//
// All of it is local and comes before anything is published, so a wrong argument leaves the group usable. The GIL is
// held; what is wrong is refused by rule (errors.h).
#pragma once

#include <memory>

#include "group/group.h"
#include "python/reduce_ops.h"
#include "python/tensors.h"

namespace unisono {

// A multi-part argument: one tensor cut by counts (None: equally), or a list of one tensor per rank. The parts of a
// group of usual size are kept in the object itself, which lies on the stack of a synchronous call.
class Parts {
 public:
  Parts() {}  // not `= default`: the array stays uninitialised
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;
  void resize(size_t ranks) {
    if (ranks > kInPlace) more_ = std::make_unique<Part[]>(ranks);
    size_ = ranks;
  }
  Part* data() { return size_ == 0 ? nullptr : more_ ? more_.get() : in_place_; }
  const Part* data() const { return const_cast<Parts*>(this)->data(); }
  const Part* begin() const { return data(); }
  const Part* end() const { return data() + size_; }
  const Part& of(int rank) const { return data()[rank]; }

  DType dtype = DType::u8;

 private:
  static constexpr size_t kInPlace = 16;
  size_t size_ = 0;  // 0: there is no such argument
  std::unique_ptr<Part[]> more_;
  Part in_place_[kInPlace];
};

class Arguments {
 public:
  Arguments(int rank, int size) : rank_(rank), size_(size) {}

  int rank_in_group(nanobind::handle object, const char* argument) const;
  int another_rank(nanobind::handle object, const char* argument) const;
  // `known`: the view of the argument, if there is one already.
  void read_parts(Parts& parts, nanobind::handle object, const char* argument, nanobind::handle counts,
                  const char* counts_argument, const View* known = nullptr) const;
  // The single-part tensor `one` belongs to this rank's part of `many`: same dtype and size, and either exactly that
  // memory or apart from all of it.
  void check_single_part(const View& one, const char* one_argument, const Parts& many, const char* many_argument) const;
  // Both sides of an exchange: same dtype, what this rank sends itself equal, and nothing of one over the other.
  void check_exchange(const Parts& output, const Parts& input) const;

 private:
  void read_list(Parts& parts, nanobind::handle list, const char* argument) const;
  void cut_equally(Parts& parts, const View& whole, const char* argument, const char* counts_argument) const;
  void cut_by_counts(Parts& parts, const View& whole, const char* argument, nanobind::handle counts,
                     const char* counts_argument) const;

  int rank_, size_;
};

// An item of a sequence, held: checking one may run Python code that changes the sequence.
nanobind::object item_of(nanobind::handle sequence, Py_ssize_t i);
int64_t whole_number(nanobind::handle object, const char* argument);
int64_t not_negative(nanobind::handle object, const char* argument);
// Fills dtype, op and factor of a reducing call on `tensor`.
void set_reduction(Call& call, nanobind::handle tensor, DType dtype, OpAndFactor reduction);
// Refuses a reduction that is not defined for the dtype of `tensor`.
[[noreturn]] void refuse_reduction(RedOp op, nanobind::handle tensor);
// The memory of `out`, which must match `in` and be the same memory or apart.
std::byte* matching_output(nanobind::handle out, const View& in);
int64_t call_timeout_ns(nanobind::handle seconds);  // 0, as None, stands for the group's

}  // namespace unisono
