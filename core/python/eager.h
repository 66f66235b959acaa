// The eager functional call, told apart in one step: plain tensors, nothing to differentiate, trace or fake, and a
// group of ours. All others are left to Python (comm_func/dispatch.py), which also has all words for what is wrong.
//
// It is on the way of every small call. So names are interned, and types are compared by identity.
#pragma once

#include <nanobind/nanobind.h>

namespace unisono {

// Finds in torch what the functions below ask for. Once, before the first call.
void learn_torch();

// What moves the data of a call on one tensor, or a list of them: the group's transport. None if it is to be found by
// other means, for the group is not ours or meant by a name; False if a tensor is none, has a behaviour of its own or
// takes part in autograd, or if torch traces: such a call has to go through torch's dispatcher.
nanobind::object eager_transport(nanobind::handle group, nanobind::handle tensor);
nanobind::object eager_transport_of_all(nanobind::handle group, nanobind::handle tensors);

// The same with a rank, given by its global number: the transport and the rank in the group. None if either is not
// such a one.
nanobind::object eager_partner(nanobind::handle group, nanobind::handle tensor, nanobind::handle rank);

}  // namespace unisono
