#include "packing/histogram.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace sft_idx::packing {
namespace {

// A table over all lengths is worth zeroing if there are at least this many sequences per slot, or if it is small.
bool table_pays(std::int64_t slots, std::size_t count) {
  return slots <= 4096 || static_cast<std::uint64_t>(slots) / 4 <= count;
}

void append(Histogram& result, std::int64_t length, std::int64_t count, std::int64_t multiple) {
  const std::int64_t size = (length + multiple - 1) / multiple;
  result.total += length * count;
  if (!result.sizes.empty() && result.sizes.back() == size) {
    result.counts.back() += count;
  } else {
    result.sizes.push_back(size);
    result.counts.push_back(count);
  }
}

Histogram by_table(const std::int64_t* lengths, std::size_t count, std::int64_t capacity, std::int64_t multiple) {
  // Two tables, because in a run of equal lengths each increment would wait for the previous one.
  const auto slots = static_cast<std::size_t>(capacity) + 1;
  std::vector<std::int64_t> table(2 * slots, 0);
  std::int64_t* const even = table.data();
  std::int64_t* const odd = even + slots;
  for (std::size_t i = 0; i < count; ++i) {
    check_length(lengths[i], capacity, i);
    ++(i % 2 == 0 ? even : odd)[lengths[i]];
  }
  Histogram result;
  for (std::size_t length = 1; length < slots; ++length) {
    const std::int64_t sum = even[length] + odd[length];
    if (sum > 0) append(result, static_cast<std::int64_t>(length), sum, multiple);
  }
  return result;
}

Histogram by_sorting(const std::int64_t* lengths, std::size_t count, std::int64_t capacity, std::int64_t multiple) {
  for (std::size_t i = 0; i < count; ++i) check_length(lengths[i], capacity, i);
  std::vector<std::int64_t> sorted(lengths, lengths + count);
  std::sort(sorted.begin(), sorted.end());
  Histogram result;
  for (const std::int64_t length : sorted) append(result, length, 1, multiple);
  return result;
}

}  // namespace

void refuse_length(std::int64_t length, std::int64_t capacity, std::size_t index) {
  throw std::invalid_argument("lengths[" + std::to_string(index) + "] is " + std::to_string(length) +
                              ", expected 1 to the capacity " + std::to_string(capacity));
}

Histogram histogram(const std::int64_t* lengths, std::size_t count, std::int64_t capacity, std::int64_t multiple) {
  if (multiple < 1) throw std::invalid_argument("the sequence multiple must be at least 1");
  const std::int64_t usable = capacity / multiple * multiple;  // a longer sequence would not fit after rounding up
  return table_pays(usable, count) ? by_table(lengths, count, usable, multiple)
                                   : by_sorting(lengths, count, usable, multiple);
}

ClassOf::ClassOf(const std::vector<std::int64_t>& sizes, std::int64_t multiple, std::size_t count)
    : sizes_(sizes), multiple_(multiple) {
  if (sizes.empty() || !table_pays(sizes.back() * multiple, count)) return;
  table_.resize(static_cast<std::size_t>(sizes.back() * multiple) + 1);
  std::size_t from = 0;
  for (std::size_t c = 0; c < sizes.size(); ++c) {
    const auto to = static_cast<std::size_t>(sizes[c] * multiple) + 1;
    std::fill(table_.begin() + static_cast<std::ptrdiff_t>(from), table_.begin() + static_cast<std::ptrdiff_t>(to),
              static_cast<std::int32_t>(c));
    from = to;
  }
}

std::int32_t ClassOf::search(std::int64_t length) const {
  const std::int64_t size = (length + multiple_ - 1) / multiple_;
  return static_cast<std::int32_t>(std::lower_bound(sizes_.begin(), sizes_.end(), size) - sizes_.begin());
}

}  // namespace sft_idx::packing
