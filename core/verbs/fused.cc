// The verb of the fused matmuls: every rank's products, float32 or float64 in the heap, become results in the heap of
// those who want them (see epilogue.h for the arithmetic).
//
// The products form one space of elements, cut into spans. Without counts there is one span and everybody gets it; with
// counts there is a span for every output and rank, in that order, and a rank's outputs lie behind one another. Small
// calls are buffered: every rank reduces what it wants for itself. Otherwise the space is cut into equal shares, one
// per rank: a rank reduces its share, whoever it is for, and stores into all outputs. Everything is visible, so
// nothing is staged; the exit wait says that all shares are done and that all inputs have been read.
#include <algorithm>
#include <vector>

#include "kernels/epilogue.h"
#include "verbs/mover.h"

namespace unisono {
namespace {

constexpr size_t kGrain = 32;  // elements of a share's border: cache lines of the narrowest output

}  // namespace

struct Mover::Share {
  size_t element;  // in the space of products
  size_t count;
  int dest;    // -1: every rank
  size_t out;  // element in the destination's output
};

std::vector<Mover::Share> Mover::spans() const {
  if (!c_.epilogue->counts) return {{0, c_.count, -1, 0}};
  std::vector<Share> list;
  std::vector<size_t> filled(static_cast<size_t>(size_));
  size_t at = 0;
  for (size_t i = 0; i < c_.epilogue->spans; i++) {
    const size_t n = c_.epilogue->counts[i], dest = i % static_cast<size_t>(size_);
    if (n) list.push_back({at, n, static_cast<int>(dest), filled[dest]});
    filled[dest] += n;
    at += n;
  }
  return list;
}

Code Mover::fused_alone() {
  const void* src = c_.in;
  void* dst = c_.out;
  reduce_with_epilogue(
      {c_.epilogue->out, c_.op, c_.count, &src, 1, &dst, 1, c_.epilogue->scale, c_.epilogue->residual});
  return Code::ok;
}

Code Mover::fused_buffered() {
  const size_t out_bytes = dtype_bytes(c_.epilogue->out);
  const void* base[kMostRanks];
  const void* src[kMostRanks];
  for (int r = 0; r < size_; r++) base[r] = input(r, 0, c_.count);
  for (const Share& s : spans()) {
    if (s.dest != -1 && s.dest != me_) continue;
    for (int r = 0; r < size_; r++) src[r] = static_cast<const std::byte*>(base[r]) + bytes(s.element);
    void* dst = c_.out + s.out * out_bytes;
    const std::byte* residual = c_.epilogue->residual ? c_.epilogue->residual + s.out * out_bytes : nullptr;
    reduce_with_epilogue(
        {c_.epilogue->out, c_.op, s.count, src, static_cast<size_t>(size_), &dst, 1, c_.epilogue->scale, residual});
  }
  return Code::ok;
}

Code Mover::fused_shared() {
  const auto ranks = static_cast<size_t>(size_);
  const size_t out_bytes = dtype_bytes(c_.epilogue->out);
  const std::vector<Share> all = spans();
  std::vector<size_t> wanted(ranks, c_.epilogue->counts ? 0 : c_.count);
  for (const Share& s : all)
    if (s.dest != -1) wanted[static_cast<size_t>(s.dest)] += s.count;

  std::vector<const std::byte*> in(ranks), residual(ranks);
  std::vector<std::byte*> out(ranks);
  for (size_t r = 0; r < ranks; r++) {
    const int who = static_cast<int>(r);
    in[r] = input(who, 0, c_.count);
    out[r] = who == me_ ? c_.out : g_.resolve(request(who).out, wanted[r] * out_bytes);
    // With one span for all, a rank adds its own residual in its share; otherwise that of the rank the share is for.
    if (who == me_)
      residual[r] = c_.epilogue->residual;
    else if (c_.epilogue->has_residual && c_.epilogue->counts)
      residual[r] = g_.resolve(request(who).residual, wanted[r] * out_bytes);
    const bool misses_residual = c_.epilogue->has_residual && c_.epilogue->counts && wanted[r] && !residual[r];
    if (!in[r] || (wanted[r] && !out[r]) || misses_residual)
      return g_.break_with(c_, Code::system, "rank " + std::to_string(r) + " published an impossible place", {who});
  }

  auto border = [&](size_t r) { return r >= ranks ? c_.count : c_.count / kGrain * r / ranks * kGrain; };
  const size_t first = border(static_cast<size_t>(me_)), last = border(static_cast<size_t>(me_) + 1);
  std::vector<const void*> src(ranks);
  std::vector<void*> dst;
  const size_t block = kWorkBlock / element_;
  for (const Share& s : all) {
    const size_t lo = std::max(first, s.element), hi = std::min(last, s.element + s.count);
    for (size_t at = lo; at < hi; at += block) {
      if (Code code = look(bytes(std::min(block, hi - at)) * ranks); code != Code::ok) return code;
      const size_t n = std::min(block, hi - at), place = (s.out + at - s.element) * out_bytes;
      for (size_t r = 0; r < ranks; r++) src[r] = in[r] + bytes(at);
      dst.clear();
      for (size_t r = 0; r < ranks; r++)
        if (s.dest == -1 || s.dest == static_cast<int>(r)) dst.push_back(out[r] + place);
      const std::byte* extra = residual[static_cast<size_t>(s.dest == -1 ? me_ : s.dest)];
      reduce_with_epilogue({c_.epilogue->out, c_.op, n, src.data(), ranks, dst.data(), dst.size(), c_.epilogue->scale,
                            extra ? extra + place : nullptr});
    }
  }
  return leave();
}

}  // namespace unisono
