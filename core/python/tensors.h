// Reading and making torch tensors without torch: through the C function table of the DLPack standard that torch.Tensor
// carries as `__dlpack_c_exchange_api__`. Used by the bindings only; the GIL is held in every function.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "kernels/gemm.h"
#include "memory/heap.h"
#include "python/errors.h"

namespace unisono {

// The parts of DLPack 1.x that are needed; the layout is fixed by that standard.
namespace dlpack {
struct Device {
  int32_t type, index;
};
struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct Managed {
  uint32_t major, minor;
  void* owner;
  void (*deleter)(Managed*);
  uint64_t flags;
  Tensor tensor;
};
struct Exchange {
  uint32_t major, minor;
  void* previous;
  void* allocator;
  void* from_object;
  int (*to_object)(Managed*, void**);
  int (*view_object)(void*, Tensor*);
  void* work_stream;
};
constexpr int32_t kCpu = 1;
enum Kind : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8_e4m3fn = 10,
  kFloat8_e4m3fnuz = 11,
  kFloat8_e5m2 = 12,
  kFloat8_e5m2fnuz = 13,
  kFloat8_e8m0fnu = 14,
  kFloat4_e2m1fn = 17,
};
}  // namespace dlpack

// What a call needs to know of a tensor.
struct View {
  std::byte* data = nullptr;
  size_t count = 0;
  DType dtype = DType::u8;
  size_t bytes() const { return count * dtype_bytes(dtype); }
};

void learn_tensor_type(nanobind::handle tensor_type);
bool is_tensor(nanobind::handle object);
// Raises TypeError or ValueError that names `argument` if it is no dense contiguous CPU tensor of a known dtype.
View view_tensor(nanobind::handle object, ArgumentName argument);
// A matrix of float16, bfloat16 or float32 with any strides, for products; the same errors.
struct MatrixView {
  Matrix matrix;
  size_t rows = 0, columns = 0;
};
MatrixView view_matrix(nanobind::handle object, const char* argument);
// "float32 [1024, 512]" for messages; never raises.
std::string tensor_words(nanobind::handle object);

// A new tensor in this process's heap; null with `failure` filled when memory is short.
nanobind::object make_tensor(const int64_t* shape, size_t dims, dlpack::DataType dtype, Failure& failure,
                             void** memory = nullptr);

// The shape of a tensor, of any kind that DLPack knows; false if there is none.
struct Shape {
  const int64_t* sizes;
  int dims;
  int64_t rows() const { return dims ? sizes[0] : 1; }
  int64_t row() const {  // elements
    int64_t elements = 1;
    for (int d = 1; d < dims; d++) elements *= sizes[d];
    return elements;
  }
};
bool read_shape(nanobind::handle object, Shape& shape);

// Whether view_tensor would take it.
bool is_plain(nanobind::handle object);

// The rows of a new tensor like another: a number or, if that is negative, the other's rows times `times` over `parts`,
// which must divide them. With `times` 0 the shape stays as it is.
struct NewRows {
  int64_t number = -1;
  int64_t times = 0, parts = 1;
};

// A new tensor in this process's heap with the dtype and shape of another but for dimension 0; a tensor without
// dimensions counts as one row. Null with `failure` filled when memory is short, Python's None if the other is not as
// view_tensor wants it: check and allocation in one step, and `views` of both.
struct Views {
  View in, out;
};
nanobind::object make_like(nanobind::handle object, NewRows rows, Failure& failure, Views* views = nullptr);

// The same with another shape altogether.
constexpr size_t kMostDims = 64;  // torch's own limit
nanobind::object make_shaped(nanobind::handle object, const int64_t* shape, size_t dims, Failure& failure);

// One element of the dtype of a tensor that view_tensor takes, a zero; raises when memory is short.
nanobind::object zero_of(nanobind::handle object);

// A copy of a dense tensor without gaps, conjugation and negation; other tensors are refused as view_tensor does.
nanobind::object plain_copy(nanobind::handle object);

// A tensor of bytes over memory that `keep` keeps alive.
nanobind::object wrap_bytes(std::byte* data, size_t bytes, std::shared_ptr<void> keep);

}  // namespace unisono
