// Where a rank can be reached before there is a group, as Python sees it: open it, pass its name on through the Store,
// then join with everybody's names.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "group/join.h"
#include "python/communicator.h"

namespace unisono {

class ListenerBinding {
 public:
  ListenerBinding();
  const std::string& name() const { return listener_->name(); }
  // Meets all ranks within `limit_s`, or the group's timeout if there is none. Once.
  std::unique_ptr<Communicator> join(int rank, int size, const std::string& group, nb::bytes nonce, uint64_t id,
                                     double timeout_s, const std::vector<std::string>& names,
                                     std::optional<double> limit_s);

 private:
  std::shared_ptr<Heap> heap_;
  std::unique_ptr<Listener> listener_;
};

}  // namespace unisono
