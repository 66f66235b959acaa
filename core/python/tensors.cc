// See tensors.h.
#include "python/tensors.h"

#include <algorithm>
#include <cstring>

#include "base/faults.h"

namespace unisono {
namespace {

PyTypeObject* tensor_type = nullptr;
dlpack::Exchange* exchange = nullptr;
nb::handle torch_uint8, torch_int8, torch_strided;

// Owns what a tensor made here lies on. Shape and strides stand behind it, in the same allocation: making a small
// tensor is on the way of every small functional call.
struct Owner {
  dlpack::Managed managed{};
  std::shared_ptr<void> keep;  // the heap, or the mapping of a peer's
  void* block = nullptr;       // what to give back to `heap`, if anything
  Heap* heap = nullptr;

  ~Owner() {
    if (heap) heap->release(block);
  }
  int64_t* dims() { return reinterpret_cast<int64_t*>(this + 1); }
  static void drop(dlpack::Managed* self) {
    auto* owner = static_cast<Owner*>(self->owner);
    owner->~Owner();
    ::operator delete(owner);
  }
};

Owner* make_owner(const int64_t* shape, size_t n, void* data, dlpack::DataType dtype) {
  auto* owner = new (::operator new(sizeof(Owner) + 2 * n * sizeof(int64_t))) Owner;
  int64_t *sizes = owner->dims(), *strides = sizes + n, step = 1;
  std::copy_n(shape, n, sizes);
  for (size_t i = n; i-- > 0;) {
    strides[i] = step;
    step *= std::max<int64_t>(sizes[i], 1);
  }
  dlpack::Managed& m = owner->managed;
  m.major = 1;
  m.owner = owner;
  m.deleter = Owner::drop;
  m.tensor = {data, {dlpack::kCpu, 0}, static_cast<int32_t>(n), dtype, sizes, strides, 0};
  return owner;
}

nb::object to_tensor(Owner* owner) {
  void* object = nullptr;
  if (exchange->to_object(&owner->managed, &object) != 0) nb::raise_python_error();
  return nb::steal(static_cast<PyObject*>(object));
}

bool convert(dlpack::DataType t, DType& out) {
  if (t.code == dlpack::kFloat4_e2m1fn) return out = DType::f4_e2m1fn_x2, t.bits == 4 && t.lanes == 2;
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
    case dlpack::kFloat8_e4m3fn:
      return out = DType::f8_e4m3fn, true;
    case dlpack::kFloat8_e4m3fnuz:
      return out = DType::f8_e4m3fnuz, true;
    case dlpack::kFloat8_e5m2:
      return out = DType::f8_e5m2, true;
    case dlpack::kFloat8_e5m2fnuz:
      return out = DType::f8_e5m2fnuz, true;
    case dlpack::kFloat8_e8m0fnu:
      return out = DType::f8_e8m0fnu, true;
    default:
      return false;
  }
}

// False for a dtype unisono does not know. torch's integers of 1 to 7 bits come as whole bytes; only the tensor itself
// tells them from int8 and uint8.
bool find_dtype(nb::handle object, dlpack::DataType t, DType& out) {
  if (!convert(t, out)) return false;
  if (out != DType::u8 && out != DType::i8) return true;
  static PyObject* name = PyUnicode_InternFromString("dtype");
  nb::object dtype = nb::steal(PyObject_GetAttr(object.ptr(), name));
  if (!dtype.is_valid()) nb::raise_python_error();
  return dtype.is(out == DType::u8 ? torch_uint8 : torch_int8);
}

bool is_contiguous(const dlpack::Tensor& t) {
  if (!is_up(Defence::arguments)) return true;
  int64_t expected = 1;
  for (int i = t.ndim; i-- > 0;) {
    if (t.shape[i] != 1 && t.strides && t.strides[i] != expected) return false;
    expected *= t.shape[i];
  }
  return true;
}

size_t element_count(const dlpack::Tensor& t) {
  size_t count = 1;
  for (int i = 0; i < t.ndim; i++) count *= static_cast<size_t>(t.shape[i]);
  return count;
}

// Lazy conjugation and negation are bits beside the data; a view that has one and is contiguous has one element at
// most, or is complex.
bool is_lazy(nb::handle object, const View& view) {
  bool complex = view.dtype == DType::c64 || view.dtype == DType::c128;
  return (complex && nb::cast<bool>(object.attr("is_conj")())) ||
         (view.count == 1 && nb::cast<bool>(object.attr("is_neg")()));
}

// False if the object is not as view_tensor wants it.
bool view_plain(nb::handle object, dlpack::Tensor& t, View& v) {
  if (!is_tensor(object) || exchange->view_object(object.ptr(), &t) != 0) {
    PyErr_Clear();
    return false;
  }
  v = {static_cast<std::byte*>(t.data) + t.byte_offset, element_count(t), DType::u8};
  return t.device.type == dlpack::kCpu && (v.count == 0 || (is_contiguous(t) && t.data)) &&
         find_dtype(object, t.dtype, v.dtype) && !is_lazy(object, v);
}

nb::str attribute(nb::handle object, const char* name) {
  return nb::str(nb::object(nb::getattr(object, name, nb::none())));
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
  nb::module_ torch = nb::module_::import_("torch");
  torch_uint8 = nb::object(torch.attr("uint8")).release();  // kept for good
  torch_int8 = nb::object(torch.attr("int8")).release();
  torch_strided = nb::object(torch.attr("strided")).release();
  exchange = table;
  tensor_type = reinterpret_cast<PyTypeObject*>(type.ptr());
}

bool is_tensor(nb::handle object) {
  return PyObject_TypeCheck(object.ptr(), tensor_type);
}

View view_tensor(nb::handle object, ArgumentName argument) {
  dlpack::Tensor t;
  View view;
  if (!is_tensor(object))
    refuse({.rule = Rule::not_tensor, .argument = argument, .got = object.type().attr("__name__")});
  if (exchange->view_object(object.ptr(), &t) != 0) {
    PyErr_Clear();  // the table knows no such device, layout or dtype; the user is told all three
    refuse(
        {.rule = Rule::dense,
         .argument = argument,
         .got = nb::make_tuple(attribute(object, "device"), attribute(object, "layout"), attribute(object, "dtype"))});
  }
  if (t.device.type != dlpack::kCpu)
    refuse({.rule = Rule::device, .argument = argument, .got = attribute(object, "device")});
  if (!find_dtype(object, t.dtype, view.dtype))
    refuse({.rule = Rule::dtype_known, .argument = argument, .got = attribute(object, "dtype")});
  view.count = element_count(t);
  if (view.count > 0 && !is_contiguous(t))
    refuse({.rule = Rule::contiguous,
            .argument = argument,
            .got = nb::make_tuple(attribute(object, "shape"), nb::str(nb::object(object.attr("stride")())))});
  view.data = static_cast<std::byte*>(t.data) + t.byte_offset;
  if (is_lazy(object, view)) refuse({.rule = Rule::lazy, .argument = argument});
  if (view.count > 0 && t.data == nullptr) refuse({.rule = Rule::no_memory, .argument = argument});
  return view;
}

MatrixView view_matrix(nb::handle object, const char* argument) {
  dlpack::Tensor t;
  MatrixView view;
  DType& dtype = view.matrix.dtype;
  const bool readable = is_tensor(object) && exchange->view_object(object.ptr(), &t) == 0;
  PyErr_Clear();
  if (!readable || t.device.type != dlpack::kCpu || !convert(t.dtype, dtype) || t.ndim != 2 ||
      (dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::f32) || nb::cast<bool>(object.attr("is_neg")()))
    refuse({.rule = Rule::matrix, .argument = argument});
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
    std::string dtype = attribute(object, "dtype").c_str();
    if (dtype.rfind("torch.", 0) == 0) dtype.erase(0, 6);
    return dtype + "  " +
           nb::cast<std::string>(nb::str(nb::steal(PySequence_List(nb::object(object.attr("shape")).ptr()))));
  } catch (...) {
    PyErr_Clear();
    return "";
  }
}

nb::object make_tensor(const int64_t* shape, size_t dims, dlpack::DataType dtype, Failure& failure, void** memory) {
  size_t bytes = dtype.bits * dtype.lanes / 8;
  for (size_t i = 0; i < dims; i++)
    if (__builtin_mul_overflow(bytes, static_cast<size_t>(shape[i]), &bytes)) {
      fail(failure, Code::no_memory, "the tensor has more bytes than an address has bits for");
      return {};
    }
  auto heap = process_heap(failure);
  void* data = heap ? heap->allocate_tensor(bytes, failure) : nullptr;
  if (!data) return {};
  if (memory) *memory = data;
  Owner* owner = make_owner(shape, dims, data, dtype);
  owner->block = data;
  owner->heap = heap.get();
  owner->keep = std::move(heap);
  return to_tensor(owner);
}

bool read_shape(nb::handle object, Shape& shape) {
  dlpack::Tensor t;
  if (!is_tensor(object) || exchange->view_object(object.ptr(), &t) != 0) return PyErr_Clear(), false;
  shape = {t.shape, t.ndim};
  return true;
}

bool is_plain(nb::handle object) {
  dlpack::Tensor t;
  View view;
  return view_plain(object, t, view);
}

nb::object make_like(nb::handle object, NewRows rows, Failure& failure, Views* views) {
  dlpack::Tensor t;
  View in;
  if (!view_plain(object, t, in) || t.ndim > static_cast<int>(kMostDims)) return nb::none();
  int64_t shape[kMostDims];
  size_t dims = static_cast<size_t>(t.ndim), count = in.count;
  std::copy_n(t.shape, dims, shape);
  if (rows.number >= 0 || rows.times > 0) {
    const int64_t given = dims ? shape[0] : 1;
    if (rows.number < 0 && given % rows.parts)
      refuse(
          {.rule = Rule::rows_divide, .argument = "input", .expected = nb::int_(rows.parts), .got = nb::int_(given)});
    shape[0] = rows.number < 0 ? given / rows.parts * rows.times : rows.number;
    dims = std::max<size_t>(dims, 1);
    count = 1;
    for (size_t d = 0; d < dims; d++) count *= static_cast<size_t>(shape[d]);
  }
  void* data = nullptr;
  nb::object made = make_tensor(shape, dims, t.dtype, failure, &data);
  if (views) *views = {in, {static_cast<std::byte*>(data), count, in.dtype}};
  return made;
}

nb::object make_shaped(nb::handle object, const int64_t* shape, size_t dims, Failure& failure) {
  dlpack::Tensor t;
  View view;
  return view_plain(object, t, view) ? make_tensor(shape, dims, t.dtype, failure) : nb::none();
}

nb::object zero_of(nb::handle object) {
  const int64_t one = 1;
  Failure failure;
  nb::object made = make_shaped(object, &one, 1, failure);
  if (!made.is_valid()) raise(failure, "", -1);
  const View view = view_tensor(made, "output");
  std::memset(view.data, 0, view.bytes());
  return made;
}

nb::object plain_copy(nb::handle object) {
  const bool is_strided = is_tensor(object) && nb::object(object.attr("layout")).is(torch_strided);
  if (!is_strided || !nb::cast<bool>(object.attr("is_cpu"))) view_tensor(object, "tensor");
  return object.attr("contiguous")().attr("resolve_conj")().attr("resolve_neg")();
}

nb::object wrap_bytes(std::byte* data, size_t bytes, std::shared_ptr<void> keep) {
  const auto shape = static_cast<int64_t>(bytes);
  Owner* owner = make_owner(&shape, 1, data, {dlpack::kUInt, 8, 1});
  owner->keep = std::move(keep);
  return to_tensor(owner);
}

}  // namespace unisono
