// What reductions must give, for test_reduce.cc: one element at a time, sharing no code with the kernels (16-bit floats
// go through ldexp and nearbyint).
#pragma once

#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "base/types.h"

namespace unisono::expected {

inline double decode_f16(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  double value;
  if (exponent == 31) {
    value = mantissa ? std::nan("") : HUGE_VAL;
  } else {
    value = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
  }
  return bits >> 15 ? -value : value;
}

inline uint16_t encode_f16(double value) {
  if (std::isnan(value)) return 0x7e00;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (magnitude >= 65520) return sign | 0x7c00;  // half way between the largest number and 2^16
  int exponent = magnitude > 0 ? std::ilogb(magnitude) : -14;
  if (exponent < -14) exponent = -14;
  // In units of the last place; the carry into the next exponent is the right one by itself.
  const int units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return static_cast<uint16_t>(sign | (units + (exponent + 14) * 1024));
}

inline double decode_bf16(uint16_t bits) {
  const int exponent = (bits >> 7) & 255;
  const int mantissa = bits & 127;
  double value;
  if (exponent == 255) {
    value = mantissa ? std::nan("") : HUGE_VAL;
  } else {
    value = exponent ? std::ldexp(128 + mantissa, exponent - 134) : std::ldexp(mantissa, -133);
  }
  return bits >> 15 ? -value : value;
}

inline uint16_t encode_bf16(double value) {
  if (std::isnan(value)) return 0x7fc0;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (magnitude >= std::ldexp(511, 119)) return sign | 0x7f80;
  int exponent = magnitude > 0 ? std::ilogb(magnitude) : -126;
  if (exponent < -126) exponent = -126;
  const int units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 7 - exponent)));
  return static_cast<uint16_t>(sign | (units + (exponent + 126) * 128));
}

// Level by level: neighbours are joined, the last one passes on if it has none.
template <class V, class Join>
V tree(std::vector<V> level, Join join) {
  while (level.size() > 1) {
    std::vector<V> next;
    for (size_t i = 0; i < level.size(); i += 2)
      next.push_back(i + 1 < level.size() ? join(level[i], level[i + 1]) : level[i]);
    level = next;
  }
  return level[0];
}

template <class A>
A fold_float(RedOp op, std::vector<A> values, const std::vector<double>& factors) {
  const A nan = std::numeric_limits<A>::quiet_NaN();
  if (op == RedOp::premul_sum)
    for (size_t s = 0; s < values.size(); ++s) values[s] *= static_cast<A>(factors[s]);
  A acc = tree(values, [op, nan](A x, A y) -> A {
    if (op == RedOp::product) return x * y;
    if (op != RedOp::min && op != RedOp::max) return x + y;
    if (std::isnan(x) || std::isnan(y)) return nan;
    return (op == RedOp::min ? y <= x : y >= x) ? y : x;
  });
  if (op == RedOp::avg) acc /= static_cast<A>(values.size());
  return std::isnan(acc) ? nan : acc;
}

template <class T>
T fold_integer(RedOp op, const std::vector<T>& values) {
  T acc = values[0];
  for (size_t s = 1; s < values.size(); ++s) {
    const T x = values[s];
    const uint64_t a = static_cast<uint64_t>(acc);
    const uint64_t b = static_cast<uint64_t>(x);
    switch (op) {
      case RedOp::sum:
      case RedOp::avg:
        acc = static_cast<T>(a + b);
        break;
      case RedOp::product:
        acc = static_cast<T>(a * b);
        break;
      case RedOp::min:
        acc = x < acc ? x : acc;
        break;
      case RedOp::max:
        acc = x > acc ? x : acc;
        break;
      case RedOp::band:
        acc = static_cast<T>(a & b);
        break;
      case RedOp::bor:
        acc = static_cast<T>(a | b);
        break;
      case RedOp::bxor:
        acc = static_cast<T>(a ^ b);
        break;
      default:
        break;
    }
  }
  if (op != RedOp::avg) return acc;
  if constexpr (std::is_signed_v<T>) {
    return static_cast<T>(static_cast<int64_t>(acc) / static_cast<int64_t>(values.size()));
  } else {
    return static_cast<T>(static_cast<uint64_t>(acc) / values.size());
  }
}

inline uint8_t fold_bool(RedOp op, const std::vector<uint8_t>& values) {
  bool any = false, all = true, odd = false;
  for (uint8_t x : values) {
    any = any || x;
    all = all && x;
    odd = odd != (x != 0);
  }
  if (op == RedOp::bxor) return odd;
  return op == RedOp::sum || op == RedOp::max || op == RedOp::bor ? any : all;
}

template <class P>
void fold_complex(RedOp op, const std::vector<std::complex<P>>& values, const std::vector<double>& factors, P out[2]) {
  if (op != RedOp::product) {
    std::vector<P> real, imaginary;
    for (auto z : values) real.push_back(z.real()), imaginary.push_back(z.imag());
    out[0] = fold_float(op, real, factors);
    out[1] = fold_float(op, imaginary, factors);
    return;
  }
  std::vector<std::pair<P, P>> pairs;
  for (auto z : values) pairs.push_back({z.real(), z.imag()});
  const auto [a, b] = tree(pairs, [](std::pair<P, P> x, std::pair<P, P> y) {
    return std::pair<P, P>(x.first * y.first - x.second * y.second, x.first * y.second + x.second * y.first);
  });
  const P nan = std::numeric_limits<P>::quiet_NaN();
  out[0] = std::isnan(a) ? nan : a;
  out[1] = std::isnan(b) ? nan : b;
}

using Buffer = std::vector<uint8_t>;

template <class T>
std::vector<T> elements_at(const std::vector<Buffer>& sources, size_t i) {
  std::vector<T> values(sources.size());
  for (size_t s = 0; s < sources.size(); ++s) std::memcpy(&values[s], &sources[s][i * sizeof(T)], sizeof(T));
  return values;
}

template <class T>
void put(Buffer& out, size_t i, const T& value) {
  std::memcpy(&out[i * sizeof(T)], &value, sizeof(T));
}

template <class A>
std::vector<A> decode_all(const std::vector<uint16_t>& bits, double (*decode)(uint16_t)) {
  std::vector<A> values;
  for (uint16_t b : bits) values.push_back(static_cast<A>(decode(b)));
  return values;
}

inline Buffer reference(DType dtype, RedOp op, const std::vector<Buffer>& sources, const std::vector<double>& factors) {
  if (sources.size() == 1 && op != RedOp::premul_sum && dtype != DType::boolean) return sources[0];
  Buffer out(sources[0].size());
  const size_t count = out.size() / dtype_bytes(dtype);
  for (size_t i = 0; i < count; ++i) {
    switch (dtype) {
      case DType::f64:
        put(out, i, fold_float(op, elements_at<double>(sources, i), factors));
        break;
      case DType::f32:
        put(out, i, fold_float(op, elements_at<float>(sources, i), factors));
        break;
      case DType::f16: {
        const auto values = decode_all<float>(elements_at<uint16_t>(sources, i), decode_f16);
        put(out, i, encode_f16(fold_float(op, values, factors)));
        break;
      }
      case DType::bf16: {
        const auto values = decode_all<float>(elements_at<uint16_t>(sources, i), decode_bf16);
        put(out, i, encode_bf16(fold_float(op, values, factors)));
        break;
      }
      case DType::i8:
        put(out, i, fold_integer(op, elements_at<int8_t>(sources, i)));
        break;
      case DType::i16:
        put(out, i, fold_integer(op, elements_at<int16_t>(sources, i)));
        break;
      case DType::i32:
        put(out, i, fold_integer(op, elements_at<int32_t>(sources, i)));
        break;
      case DType::i64:
        put(out, i, fold_integer(op, elements_at<int64_t>(sources, i)));
        break;
      case DType::u8:
        put(out, i, fold_integer(op, elements_at<uint8_t>(sources, i)));
        break;
      case DType::u16:
        put(out, i, fold_integer(op, elements_at<uint16_t>(sources, i)));
        break;
      case DType::u32:
        put(out, i, fold_integer(op, elements_at<uint32_t>(sources, i)));
        break;
      case DType::u64:
        put(out, i, fold_integer(op, elements_at<uint64_t>(sources, i)));
        break;
      case DType::boolean:
        put(out, i, fold_bool(op, elements_at<uint8_t>(sources, i)));
        break;
      case DType::c64: {
        float parts[2];
        fold_complex(op, elements_at<std::complex<float>>(sources, i), factors, parts);
        put(out, i, parts);
        break;
      }
      case DType::c128: {
        double parts[2];
        fold_complex(op, elements_at<std::complex<double>>(sources, i), factors, parts);
        put(out, i, parts);
        break;
      }
      default:
        break;
    }
  }
  return out;
}

}  // namespace unisono::expected
