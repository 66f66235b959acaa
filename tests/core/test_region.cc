// What map_peer believes: a sealed memfd of exactly the size that was named, which carries the token that was named.
// Anything else is refused before it is touched, because a peer could make reading it a SIGBUS later. And the opposite:
// memory that is taken away from peers.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "memory/heap.h"

using namespace unisono;

namespace {

constexpr size_t kBytes = size_t{1} << 24;
constexpr int kAllSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
int failed = 0, passed = 0;

void expect(bool ok, const char* what) {
  (ok ? passed : failed)++;
  if (!ok) std::fprintf(stderr, "FAILED: %s\n", what);
}

bool fill(int fd, size_t bytes, const HeapHeader& header) {
  return ftruncate(fd, static_cast<off_t>(bytes)) == 0 &&
         pwrite(fd, &header, sizeof header, 0) == static_cast<ssize_t>(sizeof header);
}

int memory(size_t bytes, const HeapHeader& header, int seals) {
  int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (!fill(fd, bytes, header) || (seals && fcntl(fd, F_ADD_SEALS, seals) != 0)) std::perror("memory");
  return fd;
}

HeapHeader header_of(const Token& token, size_t capacity) {
  return {HeapHeader::kMagic, kLayoutVersion, token, capacity};
}

std::shared_ptr<Mapping> map(int fd, const Token& token, size_t capacity) {
  Failure failure;
  auto mapping = map_peer(token, Fd(fd), capacity, failure);
  expect(!mapping == (failure.code != Code::ok), "a failure exactly where there is no mapping");
  return mapping;
}

void test_what_is_believed() {
  const Token token = random_token();
  const HeapHeader good = header_of(token, kBytes);
  expect(map(memory(kBytes, good, kAllSeals), token, kBytes) != nullptr, "a sealed heap");
  expect(map(memory(kBytes, good, kAllSeals | F_SEAL_FUTURE_WRITE), token, kBytes) == nullptr,
         "a heap that cannot be written");
  expect(map(memory(kBytes, good, 0), token, kBytes) == nullptr, "no seals");
  for (int missing : {F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SEAL})
    expect(map(memory(kBytes, good, kAllSeals & ~missing), token, kBytes) == nullptr, "one seal is missing");
  expect(map(memory(2 * kBytes, good, kAllSeals), token, kBytes) == nullptr, "larger than named");
  expect(map(memory(kBytes / 2, good, kAllSeals), token, kBytes) == nullptr, "smaller than named");
  expect(map(memory(kBytes, header_of(random_token(), kBytes), kAllSeals), token, kBytes) == nullptr, "another token");
  expect(map(memory(kBytes, header_of(token, 2 * kBytes), kAllSeals), token, kBytes) == nullptr, "another capacity");
  HeapHeader wrong = good;
  wrong.magic++;
  expect(map(memory(kBytes, wrong, kAllSeals), token, kBytes) == nullptr, "another magic number");

  std::FILE* file = std::tmpfile();
  expect(file && fill(fileno(file), kBytes, good) && map(dup(fileno(file)), token, kBytes) == nullptr,
         "a file on a disk");
  if (file) std::fclose(file);
  int ends[2];
  expect(pipe(ends) == 0 && map(ends[0], token, kBytes) == nullptr, "a pipe");
  close(ends[1]);
  expect(map(-1, token, kBytes) == nullptr, "no descriptor");
}

void test_one_mapping_per_heap() {
  const Token token = random_token();
  auto first = map(memory(kBytes, header_of(token, kBytes), kAllSeals), token, kBytes);
  expect(first && map(memory(kBytes, header_of(token, kBytes), kAllSeals), token, kBytes) == first, "mapped once");
  // Else what lies behind the end of the small heap would pass for a part of the large one.
  auto larger = map(memory(2 * kBytes, header_of(token, 2 * kBytes), kAllSeals), token, 2 * kBytes);
  expect(!larger || larger->capacity() == 2 * kBytes, "the same token with another size");
}

// Tensors that are taken away from the peers: what a peer writes to the file afterwards is not seen, to the last byte,
// however the ranges lie; what was there stays, and everything else is as shared as before.
void test_detached_memory() {
  Failure failure;
  auto heap = Heap::create(failure);
  constexpr size_t bytes = 5 << 20;
  auto* mine = static_cast<unsigned char*>(heap->allocate(bytes, failure));
  auto* other = static_cast<unsigned char*>(heap->allocate(bytes, failure));
  auto* file =
      static_cast<unsigned char*>(mmap(nullptr, heap->capacity(), PROT_READ | PROT_WRITE, MAP_SHARED, heap->fd(), 0));
  const auto offset = [&](unsigned char* p) { return reinterpret_cast<std::byte*>(p) - heap->base(); };
  std::memset(mine, 1, bytes);
  // Neighbours that share pages, larger than a step, inside one another, twice.
  const std::pair<size_t, size_t> parts[] = {{0, 1000},   {1000, 3 << 20}, {1000 + (3 << 20), 4096 * 5 + 1},
                                             {4096, 100}, {0, 1000},       {3 << 20, 2 << 20}};
  for (auto [at, length] : parts) expect(heap->detach(mine + at, length), "detach");
  expect(!heap->detach(mine + 1, bytes * 4), "more than the allocation");
  std::memset(file + offset(mine), 2, bytes);
  bool kept = true;
  for (size_t i = 0; i < bytes; i++) kept = kept && mine[i] == 1;
  expect(kept, "late writes are not seen");
  expect(heap->is_detached(mine + 77, 1) && heap->is_detached(mine + bytes - 1, 1), "detached");
  expect(!heap->is_detached(other, bytes), "the neighbour is not");
  file[offset(other)] = 9;
  expect(other[0] == 9, "the neighbour is shared");
  heap->release(mine);
  expect(heap->usage().quarantined >= bytes, "never handed out again");
  // Small blocks: pages with something detached in them are not used for new ones.
  auto* small = heap->allocate(256, failure);
  heap->detach(small, 256);
  for (int i = 0; i < 100; i++) expect(!heap->is_detached(heap->allocate(256, failure), 256), "a new small block");
  munmap(file, heap->capacity());
}

}  // namespace

int main() {
  set_heap_capacity(2 * kBytes);
  test_what_is_believed();
  test_one_mapping_per_heap();
  test_detached_memory();
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
