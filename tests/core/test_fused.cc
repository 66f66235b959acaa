// The parts of the fused matmuls, with ranks as threads where there are ranks: products against double, the reducing
// pass bit by bit on every instruction set, and the verb matmul_reduce on random shapes.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <thread>

#include "engine/engine.h"
#include "kernels/epilogue.h"
#include "kernels/gemm.h"
#include "kernels/reduce.h"

using namespace unisono;

namespace {

std::atomic<int> failed{0}, passed{0};

void expect(bool ok, const char* what, size_t detail = 0) {
  (ok ? passed : failed)++;
  if (!ok) std::fprintf(stderr, "FAILED %s (%zu)\n", what, detail);
}

std::vector<Isa> isas() {
  std::vector<Isa> list;
  for (Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512_bf16})
    if (set_isa(isa)) list.push_back(isa);
  set_isa(best_isa());
  return list;
}

uint16_t bf16_bits(float f) {  // exact numbers only
  uint32_t w;
  std::memcpy(&w, &f, 4);
  return static_cast<uint16_t>(w >> 16);
}

// ---- products

void test_products() {
  std::mt19937 dice(1);
  const size_t sizes[] = {1, 2, 4, 5, 7, 16, 17, 33, 70};
  for (Isa isa : isas()) {
    set_isa(isa);
    for (int round = 0; round < 300; round++) {
      const size_t m = sizes[dice() % 9], n = sizes[dice() % 9], k = dice() % 9 == 0 ? dice() % 1500 : dice() % 60;
      const bool half = dice() % 2, turned_a = dice() % 3 == 0, turned_b = dice() % 3 == 0, panels = dice() % 3 == 0;
      const size_t gap = dice() % 3, row_a = (turned_a ? m : k) + gap, row_b = (turned_b ? k : n) + gap;
      // Small whole numbers: every sum is exact in float32, so any order gives the same bits.
      std::vector<float> a((turned_a ? k : m) * row_a + 1), b((turned_b ? n : k) * row_b + 1), bias(n);
      for (float& x : a) x = static_cast<float>(static_cast<int>(dice() % 17) - 8);
      for (float& x : b) x = static_cast<float>(static_cast<int>(dice() % 17) - 8);
      for (float& x : bias) x = static_cast<float>(dice() % 100);
      std::vector<uint16_t> a16, b16;
      for (float x : a) a16.push_back(bf16_bits(x));
      for (float x : b) b16.push_back(bf16_bits(x));
      Matrix left{half ? static_cast<void*>(a16.data()) : a.data(), half ? DType::bf16 : DType::f32,
                  turned_a ? 1 : row_a, turned_a ? row_a : 1};
      Matrix right{half ? static_cast<void*>(b16.data()) : b.data(), half ? DType::bf16 : DType::f32,
                   turned_b ? 1 : row_b, turned_b ? row_b : 1};
      std::vector<float> packed((n + panel_columns()) * k);
      Matrix given = right;
      if (panels) {
        pack_panels(right, k, n, packed.data());
        given = {packed.data(), DType::f32, 0, 1};
      }
      const size_t c_row = n + dice() % 3;
      std::vector<float> c(m * c_row + 1, -7);
      const bool with_bias = dice() % 2;
      multiply({m, k, n, left, given, panels, c.data(), c_row, with_bias ? bias.data() : nullptr, 0});
      bool right_sums = true, untouched = c[m * c_row] == -7;
      for (size_t i = 0; i < m; i++) {
        for (size_t j = 0; j < n; j++) {
          double sum = with_bias ? bias[j] : 0;
          for (size_t l = 0; l < k; l++)
            sum += static_cast<double>(a[turned_a ? l * row_a + i : i * row_a + l]) *
                   static_cast<double>(b[turned_b ? j * row_b + l : l * row_b + j]);
          right_sums = right_sums && static_cast<double>(c[i * c_row + j]) == sum;
        }
        for (size_t j = n; j < c_row; j++) untouched = untouched && c[i * c_row + j] == -7;
      }
      expect(right_sums, "products", static_cast<size_t>(round));
      expect(untouched, "memory beside the products", static_cast<size_t>(round));
    }
  }
  set_isa(best_isa());
}

// ---- products in the tree order

float tree_sum(std::vector<float> level) {
  while (level.size() > 1) {
    std::vector<float> next;
    for (size_t i = 0; i < level.size(); i += 2)
      next.push_back(i + 1 < level.size() ? level[i] + level[i + 1] : level[i]);
    level = next;
  }
  return level[0];
}

// One element in exactly the order that is promised: blocks of a slice, then slices.
float tree_product(const std::vector<float>& a, const std::vector<float>& b, size_t slice) {
  const size_t block = slice <= 255 ? slice : 128;
  std::vector<float> slices;
  for (size_t begin = 0; begin < a.size(); begin += slice) {
    std::vector<float> blocks;
    for (size_t first = begin; first < begin + slice; first += block) {
      float sum = 0;
      for (size_t k = first; k < std::min(first + block, begin + slice); k++) sum = std::fma(a[k], b[k], sum);
      blocks.push_back(sum);
    }
    slices.push_back(tree_sum(blocks));
  }
  return tree_sum(slices);
}

float any_number(std::mt19937& dice) {
  const float wide = static_cast<float>(dice()) * 0x1p-31f - 1;
  return dice() % 50 ? wide : std::ldexp(wide, static_cast<int>(dice() % 200) - 140);
}

void test_tree_products() {
  std::mt19937 dice(5);
  const size_t rows[] = {1, 2, 3, 4, 5, 6, 7, 13, 30}, columns[] = {1, 7, 16, 31, 64, 130};
  for (int round = 0; round < 150; round++) {
    const size_t m = rows[dice() % 9], n = round == 0 ? 4100 : round == 1 ? 1040 : columns[dice() % 6];
    const size_t slice = dice() % 4 == 0 ? 256 + dice() % 600 : 1 + dice() % 255;
    const size_t k = slice * (1 + dice() % (dice() % 8 ? 5 : 20));
    const bool turned_a = dice() % 3 == 0, turned_b = dice() % 3 == 0, with_bias = dice() % 3 == 0;
    std::vector<float> a(m * k), b(k * n), bias(n);
    for (auto* list : {&a, &b, &bias})
      for (float& x : *list) x = any_number(dice);
    // c[i, j] at every place for few columns, at some for many.
    std::vector<std::vector<float>> columns_of(n), rows_of(m);
    for (size_t i = 0; i < m; i++)
      for (size_t l = 0; l < k; l++) rows_of[i].push_back(a[turned_a ? l * m + i : i * k + l]);
    for (size_t j = 0; j < n; j++)
      for (size_t l = 0; l < k; l++) columns_of[j].push_back(b[turned_b ? j * k + l : l * n + j]);
    for (Isa isa : isas()) {
      set_isa(isa);
      std::vector<float> packed((n + panel_columns()) * k), c(m * n + 1, -7);
      const Matrix left{a.data(), DType::f32, turned_a ? 1 : k, turned_a ? m : 1};
      Matrix right{b.data(), DType::f32, turned_b ? 1 : n, turned_b ? k : 1};
      const bool panels = dice() % 2;
      if (panels) {
        pack_panels(right, k, n, packed.data());
        right = {packed.data(), DType::f32, 0, 1};
      }
      multiply({m, k, n, left, right, panels, c.data(), n, with_bias ? bias.data() : nullptr, slice});
      bool same = c[m * n] == -7;
      for (size_t i = 0; i < m; i++)
        for (size_t j = 0; j < n; j += n > 200 ? 97 : 1) {
          const float sum = tree_product(rows_of[i], columns_of[j], slice);
          const float want = with_bias ? sum + bias[j] : sum;
          same = same && std::memcmp(&want, &c[i * n + j], sizeof want) == 0;
        }
      expect(same, isa_name(isa), static_cast<size_t>(round));
    }
    set_isa(best_isa());
  }
}

// ---- the reducing pass

float joined(RedOp op, float x, float y) {
  if (op != RedOp::min && op != RedOp::max) return x + y;
  if (std::isnan(x) || std::isnan(y)) return std::isnan(x) ? x : y;
  return op == RedOp::min ? (x < y ? x : y) : (x > y ? x : y);
}

void test_epilogues() {
  std::mt19937 dice(2);
  const float strange[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, -NAN, 1e-40f, 65520.0f, 3e38f, 6e-8f, 1.0009766f};
  for (DType out : {DType::f16, DType::bf16, DType::f32}) {
    for (RedOp op : {RedOp::sum, RedOp::avg, RedOp::min, RedOp::max}) {
      expect(epilogue_exists(DType::f32, out, op), "epilogue_exists");
      for (size_t n : {size_t{1}, size_t{7}, size_t{31}, size_t{32}, size_t{1003}}) {
        const size_t sources = 1 + dice() % (dice() % 4 ? 9 : 40), size = dtype_bytes(out);
        std::vector<std::vector<float>> in(sources, std::vector<float>(n));
        for (auto& source : in)
          for (float& x : source)
            x = dice() % 9 == 0 ? strange[dice() % 11] : std::ldexp(static_cast<float>(dice() % 4096) - 2048, -6);
        std::vector<const void*> src;
        for (auto& source : in) src.push_back(source.data());
        const double scale = dice() % 2 ? 1 : 0.3;
        std::vector<std::byte> residual(n * size);
        if (out == DType::f32) {
          for (size_t i = 0; i < n; i++) reinterpret_cast<float*>(residual.data())[i] = static_cast<float>(dice() % 64);
        } else {
          for (size_t i = 0; i < n; i++) reinterpret_cast<uint16_t*>(residual.data())[i] = 0x3c00 + dice() % 64;
        }
        const bool with_residual = dice() % 2;
        std::vector<std::vector<std::byte>> results;
        for (Isa isa : isas()) {
          set_isa(isa);
          std::vector<std::byte> x(n * size + 1, std::byte{77}), y = x;
          void* dst[] = {x.data(), y.data()};
          reduce_with_epilogue(
              {out, op, n, src.data(), sources, dst, 2, scale, with_residual ? residual.data() : nullptr});
          expect(x == y && x.back() == std::byte{77}, "both outputs, and nothing beyond", n);
          results.push_back(x);
        }
        set_isa(best_isa());
        for (auto& r : results) expect(r == results[0], "the same bits on every instruction set", n);
        if (out != DType::f32 || with_residual) continue;
        bool right = true;
        for (size_t i = 0; i < n; i++) {
          std::vector<float> level;
          for (auto& source : in) level.push_back(source[i]);
          for (; level.size() > 1;) {
            std::vector<float> next;
            for (size_t s = 0; s < level.size(); s += 2)
              next.push_back(s + 1 < level.size() ? joined(op, level[s], level[s + 1]) : level[s]);
            level = next;
          }
          float acc = level[0];
          if (op == RedOp::avg) acc /= static_cast<float>(sources);
          if (scale != 1) acc *= static_cast<float>(scale);
          float got;
          std::memcpy(&got, results[0].data() + i * 4, 4);
          right = right && (std::isnan(acc) ? std::isnan(got) : acc == got);
        }
        expect(right, "values", n);
      }
    }
  }
  expect(!epilogue_exists(DType::f32, DType::f64, RedOp::sum) && epilogue_exists(DType::f64, DType::f64, RedOp::max) &&
             !epilogue_exists(DType::f32, DType::f16, RedOp::product) &&
             !epilogue_exists(DType::f32, DType::i32, RedOp::sum),
         "what does not exist");
}

// ---- the verb

std::vector<std::shared_ptr<Engine>> make_engines(int size, bool crowded) {
  Failure failure;
  std::vector<std::shared_ptr<Heap>> heaps;
  std::vector<std::byte*> blocks;
  for (int r = 0; r < size; r++) {
    heaps.push_back(Heap::create(failure));
    if (!heaps.back()) std::fprintf(stderr, "%s\n", failure.text.c_str()), std::exit(1);
    blocks.push_back(make_block(*heaps.back(), size, failure).release());
  }
  std::vector<std::shared_ptr<Engine>> engines;
  for (int r = 0; r < size; r++) {
    std::vector<Peer> peers;
    for (size_t p = 0; p < heaps.size(); p++)
      peers.push_back(
          {heaps[p]->base(), heaps[p]->capacity(), heaps[p]->mapping(), Block(blocks[p], size), nullptr, 0});
    GroupFacts facts{r, size, "threads", 1, 60'000'000'000, crowded};
    engines.push_back(Engine::open(std::make_unique<Group>(facts, heaps[static_cast<size_t>(r)], std::move(peers))));
  }
  return engines;
}

void one_call(Engine& engine, int me, std::mt19937& dice) {
  const auto ranks = static_cast<size_t>(engine.group().size()), self = static_cast<size_t>(me);
  static const size_t sizes[] = {0, 1, 9, 33, 1000, 5000, 40'000, 300'000};
  const bool scattered = dice() % 2, with_residual = dice() % 2;
  const size_t outputs = 1 + dice() % 3;
  std::vector<size_t> counts(scattered ? outputs * ranks : 0);
  size_t total = sizes[dice() % 8], mine = total;
  if (scattered) {
    const size_t most = total + 1;
    total = mine = 0;
    for (size_t i = 0; i < counts.size(); i++) {
      counts[i] = dice() % 4 == 0 ? 0 : dice() % most / outputs;
      total += counts[i];
      if (i % ranks == self) mine += counts[i];
    }
  }
  Failure failure;
  Heap& heap = engine.group().heap();
  auto take = [&](size_t n) { return static_cast<float*>(heap.allocate((n + 1) * sizeof(float), failure)); };
  float *in = take(total), *out = take(mine), *residual = take(mine);
  auto value = [](size_t rank, size_t i) { return static_cast<float>((i * 7 + rank * 13) % 97); };
  for (size_t i = 0; i < total; i++) in[i] = value(self, i);
  // The same on all ranks unless everybody gets something else.
  for (size_t i = 0; i < mine; i++) residual[i] = static_cast<float>(i % 5 + (scattered ? self : 0));
  out[mine] = -5;

  Epilogue epilogue;
  epilogue.scale = 2;
  epilogue.has_residual = with_residual;
  epilogue.residual = with_residual ? reinterpret_cast<std::byte*>(residual) : nullptr;
  epilogue.out_count = mine;
  if (scattered) epilogue.counts = counts.data(), epilogue.spans = counts.size();
  Call call;
  call.verb = Verb::matmul_reduce;
  call.dtype = DType::f32;
  call.op = RedOp::sum;
  call.count = total;
  call.in = reinterpret_cast<std::byte*>(in);
  call.out = reinterpret_cast<std::byte*>(out);
  call.epilogue = &epilogue;
  expect(engine.run(call) == Code::ok, "matmul_reduce", total);

  bool right = out[mine] == -5;
  size_t at = 0, done = 0;
  for (size_t s = 0; s < (scattered ? counts.size() : 1); s++) {
    const size_t n = scattered ? counts[s] : total;
    for (size_t i = 0; (!scattered || s % ranks == self) && i < n; i++, done++) {
      float sum = 0;
      for (size_t r = 0; r < ranks; r++) sum += value(r, at + i);
      right = right && out[done] == sum * 2 + (with_residual ? residual[done] : 0);
    }
    at += n;
  }
  expect(right && done == mine, "what matmul_reduce gives", total);
  for (float* p : {in, out, residual}) heap.release(p);
}

void test_verb(int size, bool crowded, int calls) {
  auto engines = make_engines(size, crowded);
  std::vector<std::thread> threads;
  for (int r = 0; r < size; r++)
    threads.emplace_back([&, r] {
      std::mt19937 dice(7);  // the same decisions on every rank
      for (int i = 0; i < calls; i++) one_call(*engines[static_cast<size_t>(r)], r, dice);
    });
  for (auto& t : threads) t.join();
}

void test_mismatch() {
  auto engines = make_engines(2, false);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; r++)
    threads.emplace_back([&, r] {
      Engine& engine = *engines[static_cast<size_t>(r)];
      float in[4] = {1, 2, 3, 4}, out[4];
      Epilogue epilogue;
      epilogue.out_count = 4;
      epilogue.hash = static_cast<uint64_t>(r);
      Call call;
      call.verb = Verb::matmul_reduce;
      call.dtype = DType::f32;
      call.op = RedOp::sum;
      call.count = 4;
      call.in = reinterpret_cast<std::byte*>(in);
      call.out = reinterpret_cast<std::byte*>(out);
      call.epilogue = &epilogue;
      expect(engine.run(call) == Code::mismatch, "a mismatch");
      expect(call.failure.text.find("the shapes or options") != std::string::npos, "its words");
    });
  for (auto& t : threads) t.join();
}

}  // namespace

int main() {
  set_heap_capacity(size_t{64} << 20);
  test_products();
  test_tree_products();
  test_epilogues();
  for (int size : {1, 2, 3, 5}) test_verb(size, size > 2, 60);
  test_mismatch();
  std::printf("%d passed, %d failed\n", passed.load(), failed.load());
  return failed.load() != 0;
}
