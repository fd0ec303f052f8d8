#include "packing/patterns.h"

#include <limits>
#include <stdexcept>

namespace sft_idx::packing {
namespace {

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

}  // namespace

void Problem::check() const {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  require(capacity >= 1 && capacity <= kMost, "the capacity must be 1 to 2147483647");
  require(most >= 1 && most <= kMost, "the maximum number of sequences per pack must be 1 to 2147483647");
  require(sizes.size() == counts.size(), "sizes and counts must have the same length");
  std::int64_t before = 0;
  for (std::size_t c = 0; c < sizes.size(); ++c) {
    require(sizes[c] > before && sizes[c] <= capacity, "sizes must ascend within [1, capacity]");
    require(counts[c] > 0, "counts must be positive");
    before = sizes[c];
  }
}

void Patterns::check(std::size_t classes) const {
  require(offsets.size() == packs.size() + 1 && offsets.front() == 0 &&
              offsets.back() == static_cast<std::int64_t>(entries.size()),
          "pattern offsets must run from 0 to the number of entries, with one offset more than patterns");
  for (std::size_t p = 0; p < packs.size(); ++p) {
    require(packs[p] > 0 && offsets[p] < offsets[p + 1], "a pattern must have entries and be used");
  }
  for (const Entry& entry : entries) {
    require(entry.times > 0 && entry.size_class >= 0 && static_cast<std::size_t>(entry.size_class) < classes,
            "a pattern entry must be an existing class, used at least once");
  }
}

}  // namespace sft_idx::packing
