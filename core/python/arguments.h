// Checks of a call's arguments, each with the words a user needs: the argument's name, what was expected, what was got.
//
// All of it is local and comes before anything is published, so a wrong argument leaves the group usable. The GIL is
// held; errors are Python's TypeError and ValueError. Used by the bindings only.
#pragma once

#include "group/group.h"
#include "python/tensors.h"

namespace unisono {

// A multi-part argument: one tensor cut by counts (None: equally), or a list of one tensor per rank.
struct Parts {
  std::vector<Part> parts;
  DType dtype = DType::u8;
  const Part& of(int rank) const { return parts[static_cast<size_t>(rank)]; }
};

class Arguments {
 public:
  Arguments(int rank, int size) : rank_(rank), size_(size) {}

  int rank_in_group(nanobind::handle object, const char* argument) const;
  int another_rank(nanobind::handle object, const char* argument) const;
  Parts parts(nanobind::handle object, const char* argument, nanobind::handle counts,
              const char* counts_argument) const;
  // The single-part tensor `one` belongs to this rank's part of `many`: same dtype and size, and either exactly that
  // memory or apart from all of it.
  void fits(const View& one, const char* one_argument, const Parts& many, const char* many_argument) const;
  // Both sides of an exchange: same dtype, what this rank sends itself equal, and nothing of one over the other.
  void fit(const Parts& output, const Parts& input) const;

 private:
  int rank_, size_;
};

int64_t whole_number(nanobind::handle object, const char* argument);
// Fills dtype, op and factor of a reducing call on `tensor`.
void set_reduction(Call& call, nanobind::handle tensor, DType dtype, int op, double factor);
// The memory of `out`, which must match `in` and be the same memory or apart.
std::byte* matching_output(nanobind::handle out, const View& in);
int64_t call_timeout_ns(double seconds);  // 0 stands for the group's

}  // namespace unisono
