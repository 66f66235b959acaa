// An asynchronous call as Python holds it: the engine's ticket, and the tensors that must live until the call is over,
// whether or not anybody waits for it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "python/errors.h"

namespace unisono {

inline int64_t nanoseconds(double seconds) {
  return static_cast<int64_t>(std::min(seconds, 9e9) * 1e9);
}

class Pending {
 public:
  Pending(std::shared_ptr<Engine> engine, std::shared_ptr<Ticket> ticket, nb::list keep)
      : engine_(std::move(engine)), ticket_(std::move(ticket)), keep_(std::move(keep)) {}
  ~Pending() {
    // Dropped without waiting: the tensors stay until the call is over.
    if (!done()) orphans().emplace_back(ticket_, keep_.release().ptr());
    nb::gil_scoped_release release;  // as in ~Communicator
    engine_.reset();
  }
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;

  // Lets go of the tensors of calls that are over and whose Pending was dropped before. With the GIL held.
  static void reap() {
    auto& list = orphans();
    for (size_t i = 0; i < list.size();) {
      if (!is_done(*list[i].first)) {
        i++;
        continue;
      }
      PyObject* kept = list[i].second;
      list[i] = std::move(list.back());
      list.pop_back();
      Py_DECREF(kept);
    }
  }

  bool done() const { return is_done(*ticket_); }
  void withdraw() {
    nb::gil_scoped_release release;
    engine_->withdraw(*ticket_);
  }
  bool wait(double timeout_s) {
    bool over = done(), interrupted = false;
    if (!over) {
      nb::gil_scoped_release release;
      over = engine_->wait(*ticket_, nanoseconds(timeout_s), true, interrupted);
    }
    if (PyErr_Occurred()) nb::raise_python_error();  // a signal handler raised while waiting
    if (over) keep_.clear();
    return over;
  }
  nb::object error() const {
    if (!done() || ticket_->code == Code::ok) return nb::none();
    return error_of(ticket_->call.failure, engine_->group().facts().name, engine_->group().rank());
  }
  // Calls `callback` once the call is over, in whatever thread ends it.
  void on_done(nb::object callback) {
    PyObject* held = callback.release().ptr();
    nb::gil_scoped_release release;
    engine_->when_done(*ticket_, [held] {
      nb::gil_scoped_acquire gil;
      nb::object callback = nb::steal(held);
      try {
        callback();
      } catch (nb::python_error& error) {
        error.discard_as_unraisable("a callback of unisono");
      }
    });
  }
  int source() const { return ticket_->message ? ticket_->message->source : -1; }

 private:
  // Pairs with the release in Engine::mark_done: whoever sees `done` sees the ticket's code and failure, and nobody
  // touches the tensors any more.
  static bool is_done(const Ticket& ticket) { return ticket.done.load(std::memory_order_acquire); }
  static std::vector<std::pair<std::shared_ptr<Ticket>, PyObject*>>& orphans() {
    static auto& list = *new std::vector<std::pair<std::shared_ptr<Ticket>, PyObject*>>;
    return list;
  }
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Ticket> ticket_;
  nb::list keep_;
};

}  // namespace unisono
