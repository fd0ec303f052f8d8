// Scratch memory with one value per sequence.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <type_traits>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace sft_idx::packing {

// Uninitialised, and on huge pages if the system has them. These arrays are written once, out of order, so zeroing
// them and page faults for every 4 KiB would cost more than the work done on them.
template <typename T>
class Buffer {
 public:
  static_assert(std::is_trivial_v<T>);

  explicit Buffer(std::size_t count) : count_(count) {
    std::size_t bytes = count * sizeof(T);
    if (bytes < kHugePage) {
      data_ = static_cast<T*>(std::malloc(bytes + 1));  // never a size of zero, for which malloc may return null
    } else {
      bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
      data_ = static_cast<T*>(std::aligned_alloc(kHugePage, bytes));
#if defined(__linux__)
      if (data_ != nullptr) madvise(data_, bytes, MADV_HUGEPAGE);  // only advice, so a refusal does not matter
#endif
    }
    if (data_ == nullptr) throw std::bad_alloc();
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept : data_(other.data_), count_(other.count_) { other.data_ = nullptr; }
  Buffer& operator=(Buffer&&) = delete;
  ~Buffer() { std::free(data_); }

  T* data() { return data_; }
  std::size_t size() const { return count_; }
  T& operator[](std::size_t at) { return data_[at]; }
  const T& operator[](std::size_t at) const { return data_[at]; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + count_; }

 private:
  static constexpr std::size_t kHugePage = std::size_t{1} << 21;

  T* data_;
  std::size_t count_;
};

}  // namespace sft_idx::packing
