// See survivors.h; and communicator.h: how a group shrinks.
#include "python/survivors.h"

#include <stdexcept>

#include "group/shrink.h"
#include "python/communicator.h"
#include "python/tensors.h"

namespace unisono {

KeptBinding::KeptBinding(const std::string& name, nb::handle tensor) : name_(name) {
  const View view = view_tensor(tensor, "tensor");
  Failure failure;
  heap_ = process_heap(failure);
  if (!heap_) raise(failure, "", -1);
  KeptTensor kept;
  kept.shape = nb::cast<std::vector<int64_t>>(nb::object(tensor.attr("shape")));
  if (name.empty() || name.size() >= kKeptName || name.find('\0') != std::string::npos)
    throw nb::value_error("argument 'name' must have 1 to 119 bytes and no zero among them");
  if (kept.shape.size() > kKeptDims) throw nb::value_error("argument 'tensor' must have at most 8 dimensions");
  if (!heap_->holds(view.data)) refuse({.rule = Rule::shared, .argument = "tensor"});
  kept.name = name;
  kept.offset = offset_ = static_cast<size_t>(view.data - heap_->base());
  kept.bytes = bytes_ = view.bytes();
  kept.dtype = view.dtype;
  nb::object storage = tensor.attr("untyped_storage")();
  heap_->pin(view.data);  // a fork must not make it private: peers find it outside of calls
  entry_ = heap_->keeping().add(kept, failure);
  if (!entry_) raise(failure, "", -1);
  // Asked when peers could already find it: a failure of a group either was before, or forgets the entry.
  if (heap_->is_detached(view.data, view.bytes())) {
    heap_->keeping().remove(entry_);
    refuse({.rule = Rule::shared, .argument = "tensor"});
  }
  tensor_ = nb::borrow(tensor).release();
  storage_ = storage.release();
}

void KeptBinding::expect_ours() const {
  Failure failure;
  const std::string named = "kept tensor \"" + name_ + "\": ";
  if (!entry_)
    fail(failure, Code::system, named + "it was dropped; keep the tensor again");
  else if (heap_->is_of_parent())
    fail(failure, Code::forked, named + "it belongs to the parent of this process; keep a tensor of this one");
  else
    return;
  raise(failure, "", -1);
}

void KeptBinding::begin(int64_t step) {
  expect_ours();
  if (updating_) throw std::runtime_error("kept tensor \"" + name_ + "\" is being updated already");
  if (!heap_->keeping().has(entry_)) {
    Failure failure;
    fail(failure, Code::system,
         "kept tensor \"" + name_ +
             "\": when a group failed, a peer that did not answer could still write to it, so it was made private; "
             "copy it to a new tensor in shared memory and keep that");
    raise(failure, "", -1);
  }
  const View view = view_tensor(tensor_, "tensor");
  if (view.data != heap_->base() + offset_ || view.bytes() != bytes_)
    throw std::runtime_error("kept tensor \"" + name_ +
                             "\" has other memory than when it was kept (by .data, set_ or resize_), which nobody "
                             "would inherit; keep it again");
  Keeping::begin_write(*entry_);
  updating_ = true;
  step_ = step;
}

void KeptBinding::end() {
  expect_ours();
  if (!updating_) throw std::runtime_error("kept tensor \"" + name_ + "\" is not being updated");
  Keeping::end_write(*entry_, step_);
}

void KeptBinding::drop() {
  if (!entry_) return;
  // A child may drop what a thread of its parent was updating when it forked: that thread is not here.
  if (updating_ && !heap_->is_of_parent())
    throw std::runtime_error("kept tensor \"" + name_ +
                             "\" is being updated: drop it, or keep another under its name, after the update");
  heap_->keeping().remove(entry_);
  entry_ = nullptr;
  nb::steal(tensor_.ptr());  // goes here
  nb::steal(storage_.ptr());
  tensor_ = storage_ = nb::handle();
}

nb::list Estate::read() const {
  nb::list list;
  for (const KeptTensor& kept : read_kept(peer_.heap_base, peer_.heap_capacity)) {
    nb::object name = nb::steal(
        PyUnicode_DecodeUTF8(kept.name.data(), static_cast<Py_ssize_t>(kept.name.size()), "backslashreplace"));
    if (!name.is_valid()) nb::raise_python_error();
    nb::object step = kept.has_step ? nb::object(nb::int_(kept.step)) : nb::none();
    nb::object bytes = wrap_bytes(peer_.heap_base + kept.offset, kept.bytes, peer_.mapping);
    list.append(nb::make_tuple(name, dtype_name(kept.dtype), nb::cast(kept.shape), bytes, step, kept.whole));
  }
  return list;
}

nb::tuple Communicator::agree(const std::vector<int>& excluded, double limit_s) {
  for (int r : excluded)
    if (r < 0 || r >= size_ || r == rank_)
      refuse({.rule = Rule::rank_range, .argument = "exclude", .expected = nb::int_(size_ - 1), .got = nb::int_(r)});
  Failure failure;
  Code code;
  {
    nb::gil_scoped_release release;
    code = unisono::agree(group(), excluded, nanoseconds(limit_s), failure);
  }
  if (code != Code::ok) raise(failure);
  return nb::make_tuple(nb::cast(group().survival().members), nb::cast(offered_numbers(group())));
}

std::unique_ptr<Communicator> Communicator::adopt(const std::string& child, uint64_t id, double timeout_s) {
  Failure failure;
  GroupFacts facts;
  facts.name = child;
  facts.id = id;
  facts.timeout_ns = nanoseconds(timeout_s);
  auto engine = Engine::open(make_survivors(group(), facts, failure));
  if (!engine) raise(failure);
  return std::make_unique<Communicator>(std::move(engine));
}

std::unique_ptr<Estate> Communicator::estate(int rank) {
  return std::make_unique<Estate>(group().peer(rank));
}

}  // namespace unisono
