// Tests of core/kernels/reduce.h: every kernel of every instruction set this CPU has, against a plain reference.
//
// Since all arithmetic is per element, the expected output of a short reduction is a prefix of the expected output of
// the longest one, computed once per data type, operation and source count (reduce_reference.h).
#include "kernels/reduce.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "reduce_reference.h"

using namespace unisono;
using namespace unisono::expected;

namespace {

size_t passed = 0;
size_t failed = 0;

#define CHECK(condition, ...)                                     \
  do {                                                            \
    if (condition) {                                              \
      ++passed;                                                   \
    } else if (++failed <= 20) {                                  \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                   \
      std::printf("\n");                                          \
    }                                                             \
  } while (0)

// With a sanitizer, which looks at addresses and not at values, a part of the values will do.
#ifdef UNISONO_SANITIZED
constexpr bool brief = true;
#else
constexpr bool brief = false;
#endif

std::mt19937_64 random_bits(20240607);

// ---- Inputs ----

constexpr uint16_t f16_special[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x0400, 0x3c00, 0xbc00,
                                    0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00, 0xfe00, 0x7c01, 0xfd55};
constexpr uint16_t bf16_special[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x007f, 0x0080, 0x3f80, 0xbf80,
                                     0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fc0, 0xffc0, 0x7f81, 0xffaa};
constexpr uint32_t f32_special[] = {0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x00800000,
                                    0x3f800000, 0xbf800000, 0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000,
                                    0x7fc00000, 0xffc00000, 0x7f800001, 0xffabcdef};
constexpr uint64_t f64_special[] = {0,
                                    0x8000000000000000,
                                    1,
                                    0x8000000000000001,
                                    0x000fffffffffffff,
                                    0x0010000000000000,
                                    0x3ff0000000000000,
                                    0xbff0000000000000,
                                    0x7fefffffffffffff,
                                    0xffefffffffffffff,
                                    0x7ff0000000000000,
                                    0xfff0000000000000,
                                    0x7ff8000000000000,
                                    0xfff8000000000000,
                                    0x7ff0000000000001,
                                    0xfff123456789abcd};

// Ordinary numbers, special ones and arbitrary bits in equal parts.
template <class T, class Bits, size_t n>
Bits random_float(const Bits (&special)[n], Bits (*encode)(double)) {
  const uint64_t r = random_bits();
  switch (r % 4) {
    case 0:
      return special[(r >> 8) % n];
    case 1:
      return static_cast<Bits>(random_bits());
    default:
      return encode(std::ldexp(static_cast<double>(static_cast<int64_t>(random_bits())), -62));
  }
}

template <class T, class Bits>
Bits bits_of(double value) {
  const T narrow = static_cast<T>(value);
  Bits bits;
  std::memcpy(&bits, &narrow, sizeof bits);
  return bits;
}

Buffer random_source(DType dtype, size_t count) {
  Buffer out(count * dtype_bytes(dtype));
  for (size_t at = 0; at < out.size();) {
    switch (dtype) {
      case DType::f16:
        put(out, at / 2, random_float<float>(f16_special, encode_f16));
        at += 2;
        break;
      case DType::bf16:
        put(out, at / 2, random_float<float>(bf16_special, encode_bf16));
        at += 2;
        break;
      case DType::f32:
      case DType::c64:
        put(out, at / 4, random_float<float>(f32_special, bits_of<float, uint32_t>));
        at += 4;
        break;
      case DType::f64:
      case DType::c128:
        put(out, at / 8, random_float<double>(f64_special, bits_of<double, uint64_t>));
        at += 8;
        break;
      case DType::boolean:
        out[at++] = static_cast<uint8_t>((0x80ff0201u >> (8 * (random_bits() % 4))) & (random_bits() % 2 ? 0xff : 0));
        break;
      default:
        out[at++] = static_cast<uint8_t>(random_bits());
        break;
    }
  }
  return out;
}

std::vector<double> random_factors(size_t n) {
  constexpr double special[] = {0.0, -0.0, HUGE_VAL, 1e-300, 1e300, std::numeric_limits<double>::quiet_NaN()};
  std::vector<double> factors;
  for (size_t s = 0; s < n; ++s) {
    const bool rare = n > 2 && random_bits() % 16 == 0;
    factors.push_back(rare ? special[random_bits() % std::size(special)]
                           : std::ldexp(static_cast<double>(random_bits() >> 11), -50) - 2);
  }
  return factors;
}

std::vector<Isa> instruction_sets() {
  std::vector<Isa> found;
  for (Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512_bf16}) {
    if (set_isa(isa)) found.push_back(isa);
  }
  return found;
}

// ---- Tests ----

enum class Place { apart, first, last };      // outputs: own memory, src[0], src[n-1], src[n-2], ...
enum class Alignment { line, element, odd };  // of all pointers, each pointer differently
constexpr size_t guard = 64;
constexpr uint8_t guard_byte = 0xa5;

// Memory for one operand at the wanted alignment, with guard bytes on both sides.
class Operand {
 public:
  explicit Operand(size_t largest) : memory_(largest + 4 * guard) {}

  uint8_t* place(size_t bytes, size_t misalignment) {
    const auto base = reinterpret_cast<uintptr_t>(memory_.data());
    at_ = memory_.data() + (-base % 64) + guard + misalignment;
    bytes_ = bytes;
    std::memset(at_ - guard, guard_byte, bytes + 2 * guard);
    return at_;
  }
  bool guards_intact() const {
    for (size_t i = 1; i <= guard; ++i) {
      if (at_[-static_cast<ptrdiff_t>(i)] != guard_byte || at_[bytes_ + i - 1] != guard_byte) return false;
    }
    return true;
  }

 private:
  std::vector<uint8_t> memory_;
  uint8_t* at_ = nullptr;
  size_t bytes_ = 0;
};

size_t misalignment(Alignment alignment, size_t element, size_t index) {
  switch (alignment) {
    case Alignment::line:
      return 0;
    case Alignment::element:
      return element * (index * 3 + 1) % 64;
    case Alignment::odd:
      return (index * 7 + 1) % 64;
  }
  return 0;
}

struct Case {
  DType dtype;
  RedOp op;
  Isa isa;
  size_t nsrc, ndst, count;
  Alignment alignment;
  Place place;
  bool stream;
};

void run_case(const Case& c, const std::vector<Buffer>& sources, const std::vector<double>& factors,
              const Buffer& expected, std::vector<Operand>& memory) {
  const size_t element = dtype_bytes(c.dtype);
  const size_t bytes = c.count * element;
  std::vector<uint8_t*> src, dst;
  for (size_t s = 0; s < c.nsrc; ++s) {
    src.push_back(memory[s].place(bytes, misalignment(c.alignment, element, s)));
    if (bytes) std::memcpy(src[s], sources[s].data(), bytes);
  }
  for (size_t d = 0; d < c.ndst; ++d) {
    if (c.place == Place::first && d == 0) {
      dst.push_back(src[0]);
    } else if (c.place == Place::last && d < c.nsrc) {
      dst.push_back(src[c.nsrc - 1 - d]);
    } else {
      dst.push_back(memory[c.nsrc + d].place(bytes, misalignment(c.alignment, element, c.nsrc + d)));
    }
  }
  reduce({.dtype = c.dtype,
          .op = c.op,
          .count = c.count,
          .src = reinterpret_cast<const void* const*>(src.data()),
          .nsrc = c.nsrc,
          .dst = reinterpret_cast<void* const*>(dst.data()),
          .ndst = c.ndst,
          .factors = factors.data(),
          .stream = c.stream});
  bool good = true;
  size_t wrong_at = 0;
  for (uint8_t* out : dst) {
    if (bytes && std::memcmp(out, expected.data(), bytes) != 0) {
      good = false;
      while (out[wrong_at] == expected[wrong_at]) ++wrong_at;
    }
  }
  for (size_t s = 0; s < c.nsrc; ++s) {
    bool is_output = false;
    for (uint8_t* out : dst) is_output = is_output || out == src[s];
    if (!is_output && bytes) good = good && std::memcmp(src[s], sources[s].data(), bytes) == 0;
    good = good && memory[s].guards_intact();
  }
  for (size_t d = 0; d < c.ndst; ++d) {
    if (dst[d] != src[0] && !(c.place == Place::last && d < c.nsrc)) {
      good = good && memory[c.nsrc + d].guards_intact();
    }
  }
  CHECK(good, "%s %s %s nsrc=%zu ndst=%zu count=%zu alignment=%d place=%d stream=%d element=%zu", isa_name(c.isa),
        dtype_name(c.dtype), redop_name(c.op), c.nsrc, c.ndst, c.count, static_cast<int>(c.alignment),
        static_cast<int>(c.place), c.stream, wrong_at / element);
}

void test_every_kernel(const std::vector<Isa>& isas) {
  constexpr size_t counts[] = {0, 1, 2, 3, 7, 31, 32, 33, 255, 1000, 4099};
  constexpr size_t longest = 4099;
  constexpr size_t most_sources = 11;
  std::vector<Operand> memory(most_sources + 3, Operand(longest * 16));
  for (int t = 0; t < static_cast<int>(DType::count_); ++t) {
    for (int o = 0; o < static_cast<int>(RedOp::count_); ++o) {
      const auto dtype = static_cast<DType>(t);
      const auto op = static_cast<RedOp>(o);
      if (!reduction_exists(dtype, op)) continue;
      for (size_t nsrc : {1, 2, 3, 4, 5, 6, 8, 11}) {
        std::vector<Buffer> sources;
        for (size_t s = 0; s < nsrc; ++s) sources.push_back(random_source(dtype, longest));
        const auto factors = random_factors(nsrc);
        const Buffer expected = reference(dtype, op, sources, factors);
        for (Isa isa : isas) {
          set_isa(isa);
          for (size_t ndst : {1, 2, 3}) {
            for (size_t count : counts) {
              if (brief && count >= 1000) continue;
              for (auto alignment : {Alignment::line, Alignment::element, Alignment::odd}) {
                for (auto place : {Place::apart, Place::first, Place::last}) {
                  for (bool stream : {false, true}) {
                    run_case({dtype, op, isa, nsrc, ndst, count, alignment, place, stream}, sources, factors, expected,
                             memory);
                  }
                }
              }
            }
          }
        }
      }
    }
  }
}

Buffer reduced(DType dtype, RedOp op, const std::vector<Buffer>& sources, const std::vector<double>& factors) {
  Buffer out(sources[0].size());
  std::vector<const void*> src;
  for (const Buffer& s : sources) src.push_back(s.data());
  void* dst[] = {out.data()};
  reduce({dtype, op, out.size() / dtype_bytes(dtype), src.data(), src.size(), dst, 1, factors.data(), false});
  return out;
}

// Arbitrary bits and up to 200 sources: every instruction set against the first, and that against the
// reference.
void test_isas_agree(const std::vector<Isa>& isas) {
  constexpr size_t count = 3001;
  for (int t = 0; t < static_cast<int>(DType::count_); ++t) {
    for (int o = 0; o < static_cast<int>(RedOp::count_); ++o) {
      const auto dtype = static_cast<DType>(t);
      const auto op = static_cast<RedOp>(o);
      if (!reduction_exists(dtype, op)) continue;
      for (size_t nsrc : {2, 3, 7, 21, 64, 200}) {
        std::vector<Buffer> sources;
        for (size_t s = 0; s < nsrc; ++s) {
          sources.push_back(nsrc == 3 ? random_source(dtype, count)
                                      : random_source(DType::u8, count * dtype_bytes(dtype)));
        }
        const auto factors = random_factors(nsrc);
        set_isa(isas[0]);
        const Buffer expected = reduced(dtype, op, sources, factors);
        CHECK(expected == reference(dtype, op, sources, factors), "%s %s nsrc=%zu", dtype_name(dtype), redop_name(op),
              nsrc);
        for (Isa isa : isas) {
          set_isa(isa);
          CHECK(reduced(dtype, op, sources, factors) == expected, "%s %s %s nsrc=%zu", isa_name(isa), dtype_name(dtype),
                redop_name(op), nsrc);
        }
      }
    }
  }
}

// All 65536 numbers of a 16-bit type: unchanged by adding -0, and rounded rightly when scaled into every
// range.
void test_all_16_bit_numbers(const std::vector<Isa>& isas) {
  for (DType dtype : {DType::f16, DType::bf16}) {
    Buffer all(65536 * 2), zero(65536 * 2), minus_zero(65536 * 2), shuffled(65536 * 2);
    for (size_t i = 0; i < 65536; ++i) {
      put(all, i, static_cast<uint16_t>(i));
      put(minus_zero, i, static_cast<uint16_t>(0x8000));
      put(shuffled, i, static_cast<uint16_t>(i * 40503 + 12345));
    }
    Buffer expected = all;
    for (size_t i = 0; i < 65536; ++i) {
      const double value =
          dtype == DType::f16 ? decode_f16(static_cast<uint16_t>(i)) : decode_bf16(static_cast<uint16_t>(i));
      if (std::isnan(value)) put(expected, i, static_cast<uint16_t>(dtype == DType::f16 ? 0x7e00 : 0x7fc0));
    }
    Buffer expected_plus = expected;
    put(expected_plus, 0x8000, uint16_t{0});  // -0 + 0 = 0
    for (Isa isa : isas) {
      set_isa(isa);
      const char* type = dtype_name(dtype);
      CHECK(reduced(dtype, RedOp::sum, {all, minus_zero}, {}) == expected, "%s %s", isa_name(isa), type);
      CHECK(reduced(dtype, RedOp::sum, {all, zero}, {}) == expected_plus, "%s %s", isa_name(isa), type);
      CHECK(reduced(dtype, RedOp::max, {all, all}, {}) == expected, "%s %s", isa_name(isa), type);
      CHECK(reduced(dtype, RedOp::premul_sum, {all}, {1.0}) == expected, "%s %s", isa_name(isa), type);
      CHECK(
          reduced(dtype, RedOp::product, {all, shuffled}, {}) == reference(dtype, RedOp::product, {all, shuffled}, {}),
          "%s %s", isa_name(isa), type);
      for (int exponent = -30; exponent <= 30; exponent += brief ? 30 : 1) {
        for (double mantissa : {1.0, 1.25, 1.0009765625, 1.7}) {
          const std::vector<double> factors = {std::ldexp(mantissa, exponent), std::ldexp(1.0, -exponent)};
          CHECK(
              reduced(dtype, RedOp::premul_sum, {all}, factors) == reference(dtype, RedOp::premul_sum, {all}, factors),
              "%s %s 2^%d", isa_name(isa), type, exponent);
          CHECK(reduced(dtype, RedOp::premul_sum, {all, shuffled}, factors) ==
                    reference(dtype, RedOp::premul_sum, {all, shuffled}, factors),
                "%s %s 2^%d", isa_name(isa), type, exponent);
        }
      }
    }
  }
}

void test_copies(const std::vector<Isa>& isas) {
  constexpr size_t most = 700001;
  const Buffer from = random_source(DType::u8, most + 128);
  Operand to(most), other(most);
  for (Isa isa : isas) {
    set_isa(isa);
    for (size_t bytes : {size_t{0}, size_t{1}, size_t{63}, size_t{64}, size_t{65}, size_t{127}, size_t{128},
                         size_t{4095}, size_t{262144}, size_t{262145}, most}) {
      for (size_t skew : {0, 1, 8, 17, 32, 63}) {
        for (bool stream : {false, true}) {
          uint8_t* const at = to.place(bytes, skew);
          (stream ? copy_stream : copy_bytes)(at, from.data() + skew / 3, bytes);
          CHECK(std::memcmp(at, from.data() + skew / 3, bytes) == 0 && to.guards_intact(),
                "%s %zu bytes skew %zu stream %d", isa_name(isa), bytes, skew, stream);
        }
        for (size_t second : {skew, skew / 2}) {  // aligned alike, and not
          void* const both[] = {to.place(bytes, skew), other.place(bytes, second)};
          copy_stream_to_all(both, 2, from.data() + skew / 3, bytes);
          bool good = to.guards_intact() && other.guards_intact();
          for (void* at : both) good = good && std::memcmp(at, from.data() + skew / 3, bytes) == 0;
          CHECK(good, "%s %zu bytes skew %zu and %zu", isa_name(isa), bytes, skew, second);
        }
      }
    }
  }
}

void test_names_and_pairs() {
  using D = DType;
  using R = RedOp;
  CHECK(std::string(dtype_name(D::bf16)) == "bfloat16", "%s", dtype_name(D::bf16));
  CHECK(std::string(dtype_name(D::boolean)) == "bool", "%s", dtype_name(D::boolean));
  CHECK(std::string(redop_name(R::premul_sum)) == "premul_sum", "%s", redop_name(R::premul_sum));
  CHECK(std::string(verb_name(Verb::reduce_scatter)) == "reduce_scatter", "%s", verb_name(Verb::reduce_scatter));
  CHECK(std::string(dtype_name(static_cast<DType>(200))) == "?", "unknown number");
  const std::pair<D, R> missing[] = {{D::f32, R::band},           {D::bf16, R::bxor},         {D::c64, R::min},
                                     {D::c128, R::max},           {D::c64, R::bor},           {D::boolean, R::avg},
                                     {D::boolean, R::premul_sum}, {D::i32, R::premul_sum},    {D::u8, R::premul_sum},
                                     {D::f8_e4m3fn, R::sum},      {D::f4_e2m1fn_x2, R::band}, {D::f32, R::none},
                                     {D::f32, R::count_},         {D::count_, R::sum}};
  for (auto [dtype, op] : missing) {
    CHECK(!reduction_exists(dtype, op), "%s %s", dtype_name(dtype), redop_name(op));
  }
  size_t pairs = 0;
  for (int t = 0; t < 256; ++t) {
    for (int o = 0; o < 256; ++o) pairs += reduction_exists(static_cast<DType>(t), static_cast<RedOp>(o));
  }
  // 4 floats x 6, 8 integers x 8, bool x 7, 2 complex x 4.
  CHECK(pairs == 4 * 6 + 8 * 8 + 7 + 2 * 4, "%zu pairs", pairs);
}

}  // namespace

int main() {
  CHECK(current_isa() == best_isa(), "starts with the best");
  const auto isas = instruction_sets();
  for (Isa isa : isas) std::printf("%s ", isa_name(isa));
  std::printf("(best: %s)\n", isa_name(best_isa()));
  test_names_and_pairs();
  test_copies(isas);
  test_all_16_bit_numbers(isas);
  test_isas_agree(isas);
  test_every_kernel(isas);
  std::printf("%zu passed, %zu failed\n", passed, failed);
  return failed != 0;
}
