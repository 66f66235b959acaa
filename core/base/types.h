// The numbers that cross from Python into the core: element types, reduce operations and verbs.
//
// Python learns those it needs from tables in python/bindings.cc, and never writes one of these numbers by hand.
#pragma once

#include <cstddef>
#include <cstdint>

namespace unisono {

enum class DType : uint8_t {
  f64,
  f32,
  f16,
  bf16,
  i8,
  i16,
  i32,
  i64,
  u8,
  u16,
  u32,
  u64,
  boolean,
  c64,
  c128,
  // Moved but never reduced, one byte each; numbers of their own, so that ranks cannot mix them up.
  f8_e4m3fn,
  f8_e4m3fnuz,
  f8_e5m2,
  f8_e5m2fnuz,
  f8_e8m0fnu,
  f4_e2m1fn_x2,
  count_
};

constexpr bool is_reducible(DType t) {
  return t < DType::f8_e4m3fn;
}

enum class RedOp : uint8_t { sum, avg, product, min, max, band, bor, bxor, premul_sum, none, count_ };

enum class Verb : uint8_t {
  barrier,
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  gather,
  scatter,
  all_to_all,
  matmul_reduce,
  send,
  recv,
  count_
};

// Where each rank's number of elements is its own affair.
constexpr bool counts_differ(Verb verb) {
  return verb == Verb::all_to_all || verb == Verb::gather || verb == Verb::scatter;
}

constexpr size_t dtype_bytes(DType t) {
  switch (t) {
    case DType::f64:
    case DType::i64:
    case DType::u64:
    case DType::c64:
      return 8;
    case DType::f32:
    case DType::i32:
    case DType::u32:
      return 4;
    case DType::f16:
    case DType::bf16:
    case DType::i16:
    case DType::u16:
      return 2;
    case DType::c128:
      return 16;
    default:
      return 1;
  }
}

const char* dtype_name(DType t);  // torch's names: "float32"
const char* redop_name(RedOp op);
const char* verb_name(Verb v);

}  // namespace unisono
