// Running sums with terms that can change.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sft_idx::packing {

// Fenwick's tree ("A new data structure for cumulative frequency tables", 1994): sums and search in log2(n) steps.
class Fenwick {
 public:
  explicit Fenwick(const std::vector<std::int64_t>& values) : sums_(values.size() + 1, 0) {
    while (top_ * 2 < sums_.size()) top_ *= 2;
    for (std::size_t i = 1; i < sums_.size(); ++i) {
      sums_[i] += values[i - 1];
      total_ += values[i - 1];
      const std::size_t up = i + (i & (~i + 1));
      if (up < sums_.size()) sums_[up] += sums_[i];
    }
  }

  std::int64_t total() const { return total_; }

  void add(std::int32_t at, std::int64_t value) {
    total_ += value;
    for (std::size_t i = static_cast<std::size_t>(at) + 1; i < sums_.size(); i += i & (~i + 1)) sums_[i] += value;
  }

  // Sum of the first `count` terms.
  std::int64_t before(std::int32_t count) const {
    std::int64_t sum = 0;
    for (auto i = static_cast<std::size_t>(count); i > 0; i &= i - 1) sum += sums_[i];
    return sum;
  }

  // The term at which the running sum exceeds `value`, 0 <= value < total().
  std::int32_t find(std::int64_t value) const {
    std::size_t at = 0;
    for (std::size_t step = top_; step > 0; step /= 2) {
      if (at + step < sums_.size() && sums_[at + step] <= value) {
        at += step;
        value -= sums_[at];
      }
    }
    return static_cast<std::int32_t>(at);
  }

 private:
  std::vector<std::int64_t> sums_;
  std::int64_t total_ = 0;
  std::size_t top_ = 1;
};

}  // namespace sft_idx::packing
