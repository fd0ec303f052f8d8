// Converts lengths to size classes. This is the only pass over the sequences before planning.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sft_idx::packing {

struct Histogram {
  std::vector<std::int64_t> sizes;   // ascending, distinct; units of the multiple, rounded up
  std::vector<std::int64_t> counts;  // > 0
  std::int64_t total = 0;            // sum of the lengths as given, not rounded
};

// Throws std::invalid_argument if a length, rounded up to the multiple, is not in [1, capacity].
Histogram histogram(const std::int64_t* lengths, std::size_t count, std::int64_t capacity, std::int64_t multiple);

[[noreturn]] void refuse_length(std::int64_t length, std::int64_t capacity, std::size_t index);

// Throws std::invalid_argument unless 1 <= length <= capacity; the index is for the message.
inline void check_length(std::int64_t length, std::int64_t capacity, std::size_t index) {
  if (length < 1 || length > capacity) refuse_length(length, capacity, index);
}

// Finds the class of a length, with a table if that costs less than the sequences, else with a binary search.
class ClassOf {
 public:
  ClassOf(const std::vector<std::int64_t>& sizes, std::int64_t multiple, std::size_t count);

  std::int32_t operator()(std::int64_t length) const {
    return table_.empty() ? search(length) : table_[static_cast<std::size_t>(length)];
  }

 private:
  std::int32_t search(std::int64_t length) const;

  const std::vector<std::int64_t>& sizes_;
  std::int64_t multiple_;
  std::vector<std::int32_t> table_;
};

}  // namespace sft_idx::packing
