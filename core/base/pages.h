// Private anonymous memory in whole pages, unmapped with its owner.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <utility>

namespace unisono {

class Pages {
 public:
  Pages() = default;
  // Empty if the system refuses.
  explicit Pages(size_t bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return;
    base_ = static_cast<std::byte*>(p);
    bytes_ = bytes;
  }
  Pages(Pages&& other) noexcept : base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_) {}
  Pages& operator=(Pages&& other) noexcept {
    if (this != &other) {
      reset();
      base_ = std::exchange(other.base_, nullptr);
      bytes_ = other.bytes_;
    }
    return *this;
  }
  ~Pages() { reset(); }
  explicit operator bool() const { return base_ != nullptr; }
  std::byte* get() const { return base_; }
  size_t bytes() const { return bytes_; }
  // Moves some of them to this address, over what is mapped there; they belong to whoever owns that. False: the system
  // refused, and they stay here.
  bool move_part(size_t offset, size_t bytes, std::byte* at) {
    return mremap(base_ + offset, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, at) != MAP_FAILED;
  }
  void reset() {
    if (base_) munmap(base_, bytes_);
    base_ = nullptr;
  }

 private:
  std::byte* base_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace unisono
