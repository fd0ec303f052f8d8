// The sizes of which something is left, with the two questions exact fill asks about them.
#pragma once

#include <cstdint>
#include <vector>

namespace sft_idx::packing {

// A bitset over all sizes and its mirror image: the sizes a for which both a and sum - a are there are the AND of one
// with the other shifted, 64 of them a word. Where classes are few beside the capacity they are walked instead, so
// that nothing the size of the capacity is allocated; the answers are the same.
class SizeSet {
 public:
  // Starts with all of `sizes` (ascending) in it. Keeps a reference to them.
  SizeSet(const std::vector<std::int64_t>& sizes, std::int64_t capacity);

  void insert(std::int32_t size_class);
  void erase(std::int32_t size_class);

  // The class of the smallest a with from <= a <= sum / 2 where a and sum - a are both in the set; -1 if none.
  // The caller checks a == sum - a, for which two sequences are needed, and goes on behind it.
  std::int32_t pair(std::int64_t sum, std::int64_t from) const;

  // The class of the largest size that is at most `size`; -1 if none.
  std::int32_t at_most(std::int64_t size) const;

  // The class of exactly this size if it is in the set, else -1.
  std::int32_t exactly(std::int64_t size) const;

  // How many classes, present or not, have at most this size.
  std::int32_t rank(std::int64_t size) const;

  // Words and classes that were looked at to answer so far: what the answers cost, the same on any machine.
  std::uint64_t steps() const { return steps_; }

 private:
  std::int32_t pair_dense(std::int64_t sum, std::int64_t from) const;
  std::int32_t pair_sparse(std::int64_t sum, std::int64_t from) const;
  std::uint64_t mirrored(std::int64_t bit) const;  // 64 bits of the mirror image from any bit on

  bool has(std::size_t size_class) const { return (present_[size_class / 64] >> (size_class % 64) & 1) != 0; }

  const std::vector<std::int64_t>& sizes_;
  std::int64_t capacity_;
  bool dense_;
  std::vector<std::uint64_t> present_;  // bit c is set where class c is there
  std::vector<std::uint64_t> bits_;     // dense: bit s is set where size s is there
  std::vector<std::uint64_t> mirror_;   // dense: bit capacity - s
  std::vector<std::int32_t> ranks_;     // dense: rank() of every size
  mutable std::uint64_t steps_ = 0;
};

}  // namespace sft_idx::packing
