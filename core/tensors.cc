// See tensors.h.
#include "tensors.h"

#include <mutex>

namespace nb = nanobind;

namespace unisono {
namespace {

PyTypeObject* tensor_type = nullptr;
dlpack::Exchange* exchange = nullptr;

struct Owner {
  dlpack::Managed managed{};
  std::vector<int64_t> shape, strides;
  std::shared_ptr<void> keep;
};

nb::object to_tensor(Owner* owner, void* data, dlpack::DataType dtype) {
  auto& m = owner->managed;
  m.major = 1;
  m.minor = 0;
  m.owner = owner;
  m.deleter = [](dlpack::Managed* self) { delete static_cast<Owner*>(self->owner); };
  size_t n = owner->shape.size();
  owner->strides.assign(n, 1);
  for (size_t i = n; i-- > 1;) owner->strides[i - 1] = owner->strides[i] * std::max<int64_t>(owner->shape[i], 1);
  m.tensor = {data, {dlpack::kCpu, 0}, static_cast<int32_t>(n), dtype, owner->shape.data(), owner->strides.data(), 0};
  void* object = nullptr;
  if (exchange->to_object(&m, &object) != 0) nb::raise_python_error();
  return nb::steal(static_cast<PyObject*>(object));
}

bool convert(dlpack::DataType t, DType& out) {
  if (t.lanes != 1) return false;
  switch (t.code) {
    case dlpack::kFloat:
      if (t.bits == 64) return out = DType::f64, true;
      if (t.bits == 32) return out = DType::f32, true;
      if (t.bits == 16) return out = DType::f16, true;
      return false;
    case dlpack::kBfloat:
      return out = DType::bf16, t.bits == 16;
    case dlpack::kInt:
      switch (t.bits) {
        case 8:
          return out = DType::i8, true;
        case 16:
          return out = DType::i16, true;
        case 32:
          return out = DType::i32, true;
        case 64:
          return out = DType::i64, true;
      }
      return false;
    case dlpack::kUInt:
      switch (t.bits) {
        case 8:
          return out = DType::u8, true;
        case 16:
          return out = DType::u16, true;
        case 32:
          return out = DType::u32, true;
        case 64:
          return out = DType::u64, true;
      }
      return false;
    case dlpack::kBool:
      return out = DType::boolean, t.bits == 8;
    case dlpack::kComplex:
      if (t.bits == 64) return out = DType::c64, true;
      if (t.bits == 128) return out = DType::c128, true;
      return false;
    default:
      return out = DType::opaque8, t.bits == 8;  // the float8 family: moved, not reduced
  }
}

std::string attribute(nb::handle object, const char* name) {
  nb::object value = nb::getattr(object, name, nb::none());
  return nb::cast<std::string>(nb::str(value));
}

}  // namespace

void learn_tensor_type(nb::handle type) {
  nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  auto* table = capsule.is_none()
                    ? nullptr
                    : static_cast<dlpack::Exchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (!table || table->major != 1 || !table->view_object || !table->to_object) {
    PyErr_Clear();
    throw nb::import_error("this torch offers no DLPack C exchange table; unisono needs torch 2.13 or newer");
  }
  exchange = table;
  tensor_type = reinterpret_cast<PyTypeObject*>(type.ptr());
}

bool is_tensor(nb::handle object) {
  return PyObject_TypeCheck(object.ptr(), tensor_type);
}

View view_tensor(nb::handle object, const char* argument) {
  if (!is_tensor(object))
    throw nb::type_error(("argument '" + std::string(argument) + "' must be a torch.Tensor, got " +
                          nb::cast<std::string>(nb::str(object.type().attr("__name__"))))
                             .c_str());
  dlpack::Tensor t;
  if (exchange->view_object(object.ptr(), &t) != 0) {
    // The table knows no such device, layout or dtype; say which in the words of the user.
    PyErr_Clear();
    throw nb::value_error(("argument '" + std::string(argument) + "' must be a dense CPU tensor, got device " +
                           attribute(object, "device") + ", layout " + attribute(object, "layout") + ", dtype " +
                           attribute(object, "dtype"))
                              .c_str());
  }
  if (t.device.type != dlpack::kCpu)
    throw nb::value_error(
        ("argument '" + std::string(argument) + "' must be on the CPU, got device " + attribute(object, "device"))
            .c_str());
  View view;
  if (!convert(t.dtype, view.dtype))
    throw nb::type_error(("argument '" + std::string(argument) + "' has dtype " + attribute(object, "dtype") +
                          ", which unisono does not know")
                             .c_str());
  view.count = 1;
  bool contiguous = true;
  int64_t expected = 1;
  for (int i = t.ndim; i-- > 0;) {
    if (t.shape[i] != 1 && t.strides && t.strides[i] != expected) contiguous = false;
    expected *= t.shape[i];
    view.count *= static_cast<size_t>(t.shape[i]);
  }
  if (!contiguous && view.count > 0)
    throw nb::value_error(("argument '" + std::string(argument) + "' must be contiguous, got shape " +
                           attribute(object, "shape") + " with strides " +
                           nb::cast<std::string>(nb::str(object.attr("stride")())))
                              .c_str());
  view.data = static_cast<std::byte*>(t.data) + t.byte_offset;
  // Lazy conjugation and negation are bits beside the data; a view that has one and is contiguous has one element
  // at most, or is complex.
  bool complex = view.dtype == DType::c64 || view.dtype == DType::c128;
  if ((complex && nb::cast<bool>(object.attr("is_conj")())) ||
      (view.count == 1 && nb::cast<bool>(object.attr("is_neg")())))
    throw nb::value_error(("argument '" + std::string(argument) +
                           "' is a lazily conjugated or negated view; call resolve_conj() or resolve_neg() first")
                              .c_str());
  if (view.count > 0 && t.data == nullptr)
    throw nb::value_error(("argument '" + std::string(argument) + "' has no memory (a fake or meta tensor)").c_str());
  return view;
}

MatrixView view_matrix(nb::handle object, const char* argument) {
  dlpack::Tensor t;
  if (!is_tensor(object) || exchange->view_object(object.ptr(), &t) != 0 || t.device.type != dlpack::kCpu) {
    PyErr_Clear();
    throw nb::type_error(("argument '" + std::string(argument) + "' must be a dense CPU tensor").c_str());
  }
  MatrixView view;
  DType& dtype = view.matrix.dtype;
  if (!convert(t.dtype, dtype) || t.ndim != 2 || (dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::f32) ||
      nb::cast<bool>(object.attr("is_neg")()))
    throw nb::type_error(
        ("argument '" + std::string(argument) + "' must be a matrix of float16, bfloat16 or float32").c_str());
  view.rows = static_cast<size_t>(t.shape[0]);
  view.columns = static_cast<size_t>(t.shape[1]);
  view.matrix.data = static_cast<std::byte*>(t.data) + t.byte_offset;
  view.matrix.row = t.strides ? static_cast<size_t>(t.strides[0]) : view.columns;
  view.matrix.col = t.strides ? static_cast<size_t>(t.strides[1]) : 1;
  return view;
}

std::string tensor_words(nb::handle object) {
  try {
    if (!is_tensor(object)) return "";
    std::string dtype = attribute(object, "dtype");
    if (dtype.rfind("torch.", 0) == 0) dtype.erase(0, 6);
    return dtype + "  " +
           nb::cast<std::string>(nb::str(nb::steal(PySequence_List(nb::object(object.attr("shape")).ptr()))));
  } catch (...) {
    PyErr_Clear();
    return "";
  }
}

std::shared_ptr<Heap> process_heap(Failure& failure) {
  static std::mutex mutex;
  static auto& heap = *new std::shared_ptr<Heap>;
  static int generation = 0;
  std::lock_guard lock(mutex);
  if (heap && generation != fork_generation()) {
    // A forked child starts a heap of its own; the parent's object stays as it is, it may hold a locked mutex.
    new std::shared_ptr<Heap>(std::move(heap));
    heap = nullptr;
  }
  generation = fork_generation();
  if (!heap) heap = Heap::create(failure);
  return heap;
}

nb::object make_tensor(const std::vector<int64_t>& shape, dlpack::DataType dtype, Failure& failure) {
  size_t bytes = dtype.bits / 8;
  for (int64_t n : shape)
    if (__builtin_mul_overflow(bytes, static_cast<size_t>(n), &bytes)) {
      fail(failure, Code::no_memory, "the tensor has more bytes than an address has bits for");
      return {};
    }
  auto heap = process_heap(failure);
  void* data = heap ? heap->allocate(bytes, failure) : nullptr;
  if (!data) return {};
  auto* owner = new Owner;
  owner->shape = shape;
  owner->keep = std::shared_ptr<void>(data, [heap](void* p) { heap->release(p); });
  return to_tensor(owner, data, dtype);
}

nb::object wrap_bytes(std::byte* data, size_t bytes, std::shared_ptr<void> keep) {
  auto* owner = new Owner;
  owner->shape = {static_cast<int64_t>(bytes)};
  owner->keep = std::move(keep);
  return to_tensor(owner, data, {dlpack::kUInt, 8, 1});
}

}  // namespace unisono
