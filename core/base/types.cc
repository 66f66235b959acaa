// Names of the numbers in types.h, as error messages and traces print them.
//
// A number outside its enum (from a torn or foreign descriptor) has the name "?", never undefined behaviour.
#include "base/types.h"

namespace unisono {

const char* dtype_name(DType t) {
  switch (t) {
    case DType::f64:
      return "float64";
    case DType::f32:
      return "float32";
    case DType::f16:
      return "float16";
    case DType::bf16:
      return "bfloat16";
    case DType::i8:
      return "int8";
    case DType::i16:
      return "int16";
    case DType::i32:
      return "int32";
    case DType::i64:
      return "int64";
    case DType::u8:
      return "uint8";
    case DType::u16:
      return "uint16";
    case DType::u32:
      return "uint32";
    case DType::u64:
      return "uint64";
    case DType::boolean:
      return "bool";
    case DType::c64:
      return "complex64";
    case DType::c128:
      return "complex128";
    case DType::f8_e4m3fn:
      return "float8_e4m3fn";
    case DType::f8_e4m3fnuz:
      return "float8_e4m3fnuz";
    case DType::f8_e5m2:
      return "float8_e5m2";
    case DType::f8_e5m2fnuz:
      return "float8_e5m2fnuz";
    case DType::f8_e8m0fnu:
      return "float8_e8m0fnu";
    case DType::f4_e2m1fn_x2:
      return "float4_e2m1fn_x2";
    case DType::count_:
      break;
  }
  return "?";
}

const char* redop_name(RedOp op) {
  switch (op) {
    case RedOp::sum:
      return "sum";
    case RedOp::avg:
      return "avg";
    case RedOp::product:
      return "product";
    case RedOp::min:
      return "min";
    case RedOp::max:
      return "max";
    case RedOp::band:
      return "band";
    case RedOp::bor:
      return "bor";
    case RedOp::bxor:
      return "bxor";
    case RedOp::premul_sum:
      return "premul_sum";
    case RedOp::none:
      return "none";
    case RedOp::count_:
      break;
  }
  return "?";
}

const char* verb_name(Verb v) {
  switch (v) {
    case Verb::barrier:
      return "barrier";
    case Verb::all_reduce:
      return "all_reduce";
    case Verb::reduce:
      return "reduce";
    case Verb::broadcast:
      return "broadcast";
    case Verb::all_gather:
      return "all_gather";
    case Verb::reduce_scatter:
      return "reduce_scatter";
    case Verb::gather:
      return "gather";
    case Verb::scatter:
      return "scatter";
    case Verb::all_to_all:
      return "all_to_all";
    case Verb::matmul_reduce:
      return "matmul_reduce";
    case Verb::send:
      return "send";
    case Verb::recv:
      return "recv";
    case Verb::count_:
      break;
  }
  return "?";
}

}  // namespace unisono
