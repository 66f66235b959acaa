// AVX2 loops chosen at run time, with a plain version for other CPUs. Four vectors (two cache lines) of every
// source are added in registers and stored to every sink before the next four, so each byte moves once.
#include "yardstick/loops.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define UNISONO_AVX2 __attribute__((target("avx2")))
#endif

namespace unisono {
namespace {

void move_elements(const Strip& s, size_t from, size_t to) {
  for (size_t at = from; at < to; at += kElement) {
    float sum, next;
    std::memcpy(&sum, s.src[0] + at, kElement);
    for (size_t i = 1; i < s.src.size(); ++i) {
      std::memcpy(&next, s.src[i] + at, kElement);
      sum += next;
    }
    for (char* dst : s.dst) std::memcpy(dst + at, &sum, kElement);
  }
}

// For CPUs without AVX2: whole rows at a time through a block that stays in L1.
void move_plain(const Strip& s) {
  constexpr size_t kBlock = 1024;
  float block[kBlock], next[kBlock];
  for (size_t at = 0; at < s.bytes; at += sizeof block) {
    const size_t bytes = std::min(sizeof block, s.bytes - at);
    std::memcpy(block, s.src[0] + at, bytes);
    for (size_t i = 1; i < s.src.size(); ++i) {
      std::memcpy(next, s.src[i] + at, bytes);
      for (size_t e = 0; e < bytes / kElement; ++e) block[e] += next[e];
    }
    for (char* dst : s.dst) std::memcpy(dst + at, block, bytes);
  }
}

#if defined(__x86_64__)

// Sources and Sinks are the numbers of streams when known, 0 to read them from the strip.
template <size_t Sources, size_t Sinks, bool Streaming>
UNISONO_AVX2 void move_avx2(const Strip& s) {
  const size_t sources = Sources ? Sources : s.src.size();
  const size_t sinks = Sinks ? Sinks : s.dst.size();
  const char* const* src = s.src.data();
  char* const* dst = s.dst.data();
  constexpr size_t kVector = sizeof(__m256), kStep = 4 * kVector;
  const size_t head = std::min(s.bytes, -reinterpret_cast<uintptr_t>(dst[0]) % kVector);
  size_t at = head;
  move_elements(s, 0, head);
  for (; at + kStep <= s.bytes; at += kStep) {
    const float* in = reinterpret_cast<const float*>(src[0] + at);
    __m256 a = _mm256_loadu_ps(in), b = _mm256_loadu_ps(in + 8);
    __m256 c = _mm256_loadu_ps(in + 16), d = _mm256_loadu_ps(in + 24);
    for (size_t i = 1; i < sources; ++i) {
      in = reinterpret_cast<const float*>(src[i] + at);
      a = _mm256_add_ps(a, _mm256_loadu_ps(in));
      b = _mm256_add_ps(b, _mm256_loadu_ps(in + 8));
      c = _mm256_add_ps(c, _mm256_loadu_ps(in + 16));
      d = _mm256_add_ps(d, _mm256_loadu_ps(in + 24));
    }
    for (size_t i = 0; i < sinks; ++i) {
      float* out = reinterpret_cast<float*>(dst[i] + at);
      if constexpr (Streaming) {
        _mm256_stream_ps(out, a);
        _mm256_stream_ps(out + 8, b);
        _mm256_stream_ps(out + 16, c);
        _mm256_stream_ps(out + 24, d);
      } else {
        _mm256_storeu_ps(out, a);
        _mm256_storeu_ps(out + 8, b);
        _mm256_storeu_ps(out + 16, c);
        _mm256_storeu_ps(out + 24, d);
      }
    }
  }
  move_elements(s, at, s.bytes);
}

template <bool Streaming>
void move_fast(const Strip& s) {
  const size_t sources = s.src.size(), sinks = s.dst.size();
  if (sources == 1 && sinks == 1) return move_avx2<1, 1, Streaming>(s);
  if (sources == 1 && sinks == 2) return move_avx2<1, 2, Streaming>(s);
  if (sources == 1) return move_avx2<1, 0, Streaming>(s);
  if (sources == 2 && sinks == 2) return move_avx2<2, 2, Streaming>(s);
  if (sources == 2 && sinks == 1) return move_avx2<2, 1, Streaming>(s);
  if (sources == 4 && sinks == 4) return move_avx2<4, 4, Streaming>(s);
  if (sources == 8 && sinks == 8) return move_avx2<8, 8, Streaming>(s);
  return move_avx2<0, 0, Streaming>(s);
}

// Streaming stores must be aligned, for all sinks at once.
bool can_stream(const Strip& s) {
  for (const char* dst : s.dst)
    if ((dst - s.dst[0]) % static_cast<ptrdiff_t>(sizeof(__m256)) != 0) return false;
  return true;
}

void move_string(const Strip& s) {
  void* to = s.dst[0];
  const void* from = s.src[0];
  size_t bytes = s.bytes;
  asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
}

bool has_avx2() {
  static const bool yes = __builtin_cpu_supports("avx2");
  return yes;
}

#endif

}  // namespace

#if defined(__x86_64__)

void move_strips(const std::vector<Strip>& strips, Store store) {
  for (const Strip& s : strips) {
    if (s.bytes == 0) continue;
    const bool copy = s.src.size() == 1 && s.dst.size() == 1;
    if (store == Store::string_move && copy)
      move_string(s);
    else if (!has_avx2())
      move_plain(s);
    else if (store == Store::streaming && can_stream(s))
      move_fast<true>(s);
    else
      move_fast<false>(s);
  }
  if (store == Store::streaming) _mm_sfence();
}

void relax() {
  _mm_pause();
}

#else

void move_strips(const std::vector<Strip>& strips, Store) {
  for (const Strip& s : strips) move_plain(s);
}

void relax() {
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

#endif

}  // namespace unisono
