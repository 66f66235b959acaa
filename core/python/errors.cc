// See errors.h.
#include "python/errors.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <mutex>
#include <string>
#include <utility>

#include "base/fork.h"

namespace unisono {

nb::object text_of(const std::string& s) {
  return nb::steal(PyUnicode_DecodeUTF8(s.data(), static_cast<Py_ssize_t>(s.size()), "replace"));
}

namespace {

constexpr const char* rule_names[] = {
    "whole_number",   "not_negative",     "rank_range",     "another_rank",
    "list_length",    "list_dtype",       "divides",        "rows_divide",
    "shape",          "counts_sequence",  "counts_length",  "counts_negative",
    "counts_sum",     "dtype_of",         "size_of",        "part_size",
    "own_part_size",  "overlap",          "overlap_partly", "overlap_part",
    "op_name",        "op_dtype",         "factor_missing", "factor_foreign",
    "timeout_number", "timeout_positive", "not_tensor",     "dense",
    "device",         "dtype_known",      "contiguous",     "lazy",
    "no_memory",      "matrix",           "like",           "inputs_and_factors",
    "float32_size",   "matrix_size",      "own_elements",   "shared",
    "outside_heap",   "group_size",
};
static_assert(std::size(rule_names) == static_cast<size_t>(Rule::count_), "one name per rule, in the same order");

[[noreturn]] void throw_exception(nb::handle error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(error.type().ptr()), error.ptr());
  nb::raise_python_error();
}

}  // namespace

Hooks& hooks = *new Hooks;

std::string ArgumentName::text() const {
  std::string text = name;
  if (index >= 0) text.append("[").append(std::to_string(index)).append("]");
  return text;
}

const char* rule_name(Rule rule) {
  return rule_names[static_cast<size_t>(rule)];
}

void refuse(const Refusal& r) {
  throw_exception(hooks.make_argument_error(rule_name(r.rule), r.argument.text(), r.expected, r.got, r.other, r.index));
}

nb::object error_of(const Failure& f, const std::string& group, int rank) {
  nb::list lines;
  for (const std::string& line : f.lines) lines.append(text_of(line));
  return hooks.make_error(static_cast<int>(f.code), verb_name(f.verb), f.seq, text_of(group), rank, nb::cast(f.peers),
                          text_of(f.text), lines, f.first_cause);
}

void raise(const Failure& f, const std::string& group, int rank) {
  if (PyErr_Occurred()) nb::raise_python_error();  // a signal handler raised
  throw_exception(error_of(f, group, rank));
}

namespace {

std::vector<std::string>& warnings = *new std::vector<std::string>;
// A leaf: nothing is called under it. The parent logs its own warnings.
ForkMutex warnings_mutex(ForkOrder::warnings, [] { warnings.clear(); });
// Whether there are any. Stored under the mutex, read without it, relaxed: a hint.
std::atomic<bool> has_warnings{false};

// With the GIL held.
void log_warnings() {
  std::vector<std::string> texts;
  {
    std::lock_guard lock(warnings_mutex);
    texts.swap(warnings);
    has_warnings.store(false, std::memory_order_relaxed);
  }
  if (!hooks.warn.is_valid()) return;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);  // a handler may have raised
  for (const std::string& text : texts) try {
      hooks.warn(text_of(text));
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("a warning of unisono");
    }
  PyErr_Restore(type, value, trace);
}

// Threads of libraries that only serve others and call nothing of the program's: module and function.
constexpr std::pair<const char*, const char*> kServants[] = {
    {"tqdm._monitor", "run"},                                    // redraws progress bars
    {"multiprocessing.queues", "_feed"},                         // of each queue, as data loaders have them
    {"torch.utils.data._utils.pin_memory", "_pin_memory_loop"},  // of a data loader
};
// Whose frames may be on their stacks; anything else there may be the program's.
constexpr const char* kServantModules[] = {"threading",       "queue", "weakref",
                                           "multiprocessing", "tqdm",  "torch.utils.data"};

bool is_below(const std::string& module, const std::string& top) {
  return module == top || module.compare(0, top.size() + 1, top + ".") == 0;
}

// Whether a thread, of which this is the top frame, is such a servant: it will never make a call.
bool is_servant(nb::object frame) {
  bool serves = false;
  for (; !frame.is_none(); frame = frame.attr("f_back")) {
    const auto module = nb::cast<std::string>(nb::str(nb::object(frame.attr("f_globals").attr("get")("__name__"))));
    const auto function = nb::cast<std::string>(frame.attr("f_code").attr("co_name"));
    if (std::none_of(std::begin(kServantModules), std::end(kServantModules),
                     [&](const char* top) { return is_below(module, top); }))
      return false;
    for (const auto& [of, name] : kServants) serves = serves || (module == of && function == name);
  }
  return serves;
}

}  // namespace

bool check_python_signals() {
  PyGILState_STATE state = PyGILState_Ensure();
  if (has_warnings.load(std::memory_order_relaxed)) log_warnings();
  bool raised = PyErr_CheckSignals() != 0;
  PyGILState_Release(state);
  return raised;
}

int count_python_threads() {
  PyGILState_STATE state = PyGILState_Ensure();
  int threads = 255;  // "not known"
  try {
    const auto frames = nb::cast<nb::dict>(nb::module_::import_("sys").attr("_current_frames")());
    int callers = 0;
    for (auto [id, frame] : frames) callers += !is_servant(nb::borrow(frame));
    threads = callers;
  } catch (...) {
    PyErr_Clear();
  }
  PyGILState_Release(state);
  return threads;
}

void warn_program(std::string text, bool now) {
  {
    std::lock_guard lock(warnings_mutex);
    warnings.push_back(std::move(text));
    has_warnings.store(true, std::memory_order_relaxed);
  }
  if (!now) {
    Py_AddPendingCall(
        [](void*) {
          log_warnings();
          return 0;
        },
        nullptr);
    return;
  }
  PyGILState_STATE state = PyGILState_Ensure();
  log_warnings();
  PyGILState_Release(state);
}

}  // namespace unisono
