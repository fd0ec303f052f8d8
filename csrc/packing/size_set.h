// The set of sizes with remaining sequences, with the two queries of exact fill.
#pragma once

#include <cstdint>
#include <vector>

namespace sft_idx::packing {

// A bitset over all sizes, and its mirror image. The sizes a with both a and sum - a in the set are the AND of one
// with the other shifted, 64 sizes per word. If there are few classes compared with the capacity, the classes are
// walked instead, so that no memory proportional to the capacity is needed; the results are the same.
class SizeSet {
 public:
  // Starts with all of `sizes` (ascending) in it. Keeps a reference to them.
  SizeSet(const std::vector<std::int64_t>& sizes, std::int64_t capacity);

  void insert(std::int32_t size_class);
  void erase(std::int32_t size_class);

  // The class of the smallest a with from <= a <= sum / 2 where a and sum - a are both in the set; -1 if none.
  // The caller checks for a == sum - a, which needs two sequences, and continues after it.
  std::int32_t pair(std::int64_t sum, std::int64_t from) const;

  // The class of the largest size that is at most `size`; -1 if none.
  std::int32_t at_most(std::int64_t size) const;

  // The class of exactly this size if it is in the set, else -1.
  std::int32_t exactly(std::int64_t size) const;

  // Number of classes, in the set or not, of at most this size.
  std::int32_t rank(std::int64_t size) const;

  // Number of words and classes read so far: the cost of the queries, the same on any machine.
  std::uint64_t steps() const { return steps_; }

 private:
  std::int32_t pair_dense(std::int64_t sum, std::int64_t from) const;
  std::int32_t pair_sparse(std::int64_t sum, std::int64_t from) const;
  std::uint64_t mirrored(std::int64_t bit) const;  // 64 bits of the mirror image from any bit on

  bool has(std::size_t size_class) const { return (present_[size_class / 64] >> (size_class % 64) & 1) != 0; }

  const std::vector<std::int64_t>& sizes_;
  std::int64_t capacity_;
  bool dense_;
  std::vector<std::uint64_t> present_;  // bit c is set if class c is in the set
  std::vector<std::uint64_t> bits_;     // dense: bit s is set if size s is in the set
  std::vector<std::uint64_t> mirror_;   // dense: bit capacity - s
  std::vector<std::int32_t> ranks_;     // dense: rank() of every size
  mutable std::uint64_t steps_ = 0;
};

}  // namespace sft_idx::packing
