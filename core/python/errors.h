// Everything that becomes a Python exception: failures of a group, and arguments that a function refuses.
//
// Both leave C++ as data. The exception and its English are made by the hooks, in src/unisono/base/errors.py. The GIL
// is held in every function but check_python_signals.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "base/status.h"

namespace nb = nanobind;

namespace unisono {

// What Python hands in before the first call (`setup`). Never destroyed: threads may outlive the interpreter's objects.
struct Hooks {
  nb::object make_error;           // (code, verb, seq, group, rank, peers, text, lines, first_cause) -> exception
  nb::object make_argument_error;  // (rule, argument, expected, got, other, index) -> exception
  nb::object warn;                 // (text): into the program's log
};
extern Hooks& hooks;

// An argument as messages call it: its name, and for a tensor of a list its place there. The words are only put
// together for a message.
struct ArgumentName {
  ArgumentName(const char* name, int index = -1) : name(name), index(index) {}
  std::string text() const;
  const char* name;
  int index;
};

// What an argument must be. The table `_RULES` in errors.py says for each, under the same name, which exception it is
// and what it says.
enum class Rule {
  whole_number,
  not_negative,
  rank_range,
  another_rank,
  list_length,
  list_dtype,
  divides,
  rows_divide,
  shape,
  counts_sequence,
  counts_length,
  counts_negative,
  counts_sum,
  dtype_of,
  size_of,
  part_size,
  own_part_size,
  overlap,
  overlap_partly,
  overlap_part,
  op_name,
  op_dtype,
  factor_missing,
  factor_foreign,
  timeout_number,
  timeout_positive,
  not_tensor,
  dense,
  device,
  dtype_known,
  contiguous,
  lazy,
  no_memory,
  matrix,
  like,
  inputs_and_factors,
  float32_size,
  matrix_size,
  own_elements,
  shared,
  outside_heap,
  group_size,
  count_
};
const char* rule_name(Rule rule);

struct Refusal {
  Rule rule;
  ArgumentName argument;
  nb::object expected = nb::none();
  nb::object got = nb::none();
  const char* other = "";  // the name of another argument that the rule is about
  int index = -1;          // which number of a list
};

[[noreturn]] void refuse(const Refusal& refusal);
[[noreturn]] void raise(const Failure& failure, const std::string& group, int rank);
// Parts of a message come out of shared memory, where a broken peer may have put anything.
nb::object text_of(const std::string& s);
nb::object error_of(const Failure& failure, const std::string& group, int rank);

// Called by the core while it waits, without the GIL: true if a signal handler raised. The exception stays set in this
// thread, and `raise` passes it on.
bool check_python_signals();
// The same for its threads: how many are running Python code, or wait in it.
int count_python_threads();
// Puts a warning into the program's log: at once if `now`, else when the main thread next runs, or a thread that waits
// looks at its signals. Without the GIL; threads of ours must not wait for it, since calls wait for them.
void warn_program(std::string text, bool now);

}  // namespace unisono
