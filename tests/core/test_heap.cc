// What a heap gives back: pages to the system, loans to the next user. And files about its recorder.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "base/fd.h"
#include "memory/dump.h"
#include "memory/scratch.h"

using namespace unisono;

namespace {

int failed = 0, passed = 0;

void expect(bool ok, const char* what) {
  (ok ? passed : failed)++;
  if (!ok) std::fprintf(stderr, "FAILED: %s\n", what);
}

// Free pages go back to the system once they have been free from one trim to the next, and are reserved again when they
// are taken; what is in use meanwhile stays, and what a loop takes and gives back between two trims too.
void test_trimmed_memory() {
  Failure failure;
  auto heap = Heap::create(failure);
  constexpr size_t bytes = 3 << 20;
  std::vector<unsigned char*> blocks;
  auto fill = [&] {
    while (blocks.size() < 5) blocks.push_back(static_cast<unsigned char*>(heap->allocate(bytes, failure)));
    for (size_t i = 0; i < blocks.size(); i++) std::memset(blocks[i], static_cast<int>(i) + 1, bytes);
  };
  fill();
  const size_t full = heap->usage().resident;
  expect(full >= 5 * bytes, "reserved");
  auto release_all_but_one = [&] {
    for (unsigned char* p : {blocks[0], blocks[2], blocks[3], blocks[4]}) heap->release(p);
    blocks = {blocks[1]};
  };
  for (int i = 0; i < 3; i++) {
    release_all_but_one();
    Heap::trim_all();
    fill();
    expect(heap->usage().resident == full, "a loop keeps its memory");
  }
  release_all_but_one();
  Heap::trim_all();
  Heap::trim_all();
  const Heap::Usage idle = heap->usage();
  expect(idle.resident <= bytes + (3 << 20) && idle.reserved == idle.resident, "given back");
  bool kept = true;
  for (size_t i = 0; i < bytes; i++) kept = kept && blocks[0][i] == 2;
  expect(kept, "what is in use stays");
  fill();
  const Heap::Usage again = heap->usage();
  expect(again.resident >= 5 * bytes && again.resident <= full && again.reserved == again.resident, "reserved again");
  // Whatever is taken and given back, in whatever order: every byte handed out is reserved.
  for (unsigned seed = 1; seed <= 300; seed++) {
    const size_t i = seed * 7 % blocks.size();
    heap->release(blocks[i]);
    if (seed % 3 == 0) Heap::trim_all();
    blocks[i] = static_cast<unsigned char*>(heap->allocate((seed * 37 % 40) << 16, failure));
    const Heap::Usage use = heap->usage();
    expect(blocks[i] && use.reserved == use.resident && use.in_use <= use.reserved, "reserved");
  }
}

class Borrower final : public Scratch::User {
 public:
  uint64_t uses() const override { return count; }
  bool let_go() override { return !busy; }
  uint64_t count = 1;
  bool busy = false;
};

// Some have a loan each; then the first who does not need his passes it on; what is not used goes back.
void test_scratch() {
  Failure failure;
  auto heap = Heap::create(failure);
  Scratch& scratch = heap->scratch();
  std::vector<Borrower> users(7);
  std::set<std::byte*> places;
  for (size_t i = 0; i < 4; i++) places.insert(scratch.take(users[i]));
  expect(places.size() == 4 && !places.contains(nullptr), "a loan each");
  users[0].busy = true;
  expect(places.contains(scratch.take(users[4])) && !scratch.end(users[1]), "passed on");
  for (Borrower& user : users) user.busy = true;
  expect(!places.contains(scratch.take(users[5])), "all are busy: a new one");
  scratch.collect();
  for (Borrower& user : users) user.busy = false;
  users[0].count++;
  scratch.collect();
  expect(scratch.is_lent() && scratch.end(users[0]) && !scratch.is_lent(), "only what was used is left");
}

std::string content_of(const std::filesystem::path& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// Threads of one process write its record at the same time: no complaint, nothing left, and whoever reads meanwhile
// finds a whole file.
void test_dumps_at_the_same_time() {
  Failure failure;
  auto heap = Heap::create(failure);
  const Operated some{Verb::all_reduce, DType::f32, RedOp::sum, false, -1, 1, 2, 0, 0, nullptr};
  for (size_t i = 0; i < kOperations; i++) heap->recorder().begin(some);  // so that a file takes a while to write
  char name[] = "/tmp/unisono-dumps-XXXXXX";
  const std::filesystem::path folder = mkdtemp(name);
  const std::filesystem::path said = folder / "said";
  std::fflush(stderr);
  const Fd usual(dup(STDERR_FILENO)), file(open(said.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  dup2(file.get(), STDERR_FILENO);
  set_trace_folder(folder);
  dump_record(heap->base(), "first");
  std::atomic<bool> over{false};
  size_t read = 0, whole = 0;
  std::thread reader([&] {
    while (!over)
      for (const auto& entry : std::filesystem::directory_iterator(folder)) {
        if (entry.path().extension() != ".json") continue;
        const std::string text = content_of(entry.path());
        read++;
        whole += text.size() > 2 && text.front() == '{' && text.ends_with("]}");
      }
  });
  std::vector<std::thread> writers;
  for (int i = 0; i < 4; i++)
    writers.emplace_back([&] {
      for (int k = 0; k < 25; k++) dump_record(heap->base(), "again");
    });
  for (auto& writer : writers) writer.join();
  over = true;
  reader.join();
  set_trace_folder("");
  std::fflush(stderr);
  dup2(usual.get(), STDERR_FILENO);
  expect(content_of(said).empty(), content_of(said).c_str());
  expect(read > 0 && whole == read, "a file that is not whole was seen");
  size_t files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) files++;
  expect(files == 2, "one record, and what was said");
  std::filesystem::remove_all(folder);
}

}  // namespace

int main() {
  set_heap_capacity(size_t{64} << 20);
  test_trimmed_memory();
  test_scratch();
  test_dumps_at_the_same_time();
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
