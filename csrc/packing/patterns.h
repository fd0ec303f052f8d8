// Input and output of all planners: classes of equal size, and packs as the number of sequences of each class.
#pragma once

#include <cstdint>
#include <vector>

namespace sft_idx::packing {

// The sequences to pack, by size. Units are the sequence multiple: sizes are rounded up, the capacity is rounded down.
// Class c has all sequences of size sizes[c].
struct Problem {
  std::vector<std::int64_t> sizes;   // ascending, distinct, in [1, capacity]
  std::vector<std::int64_t> counts;  // > 0
  std::int64_t capacity = 0;         // units per pack
  std::int64_t most = 0;             // maximum sequences per pack, >= 1

  std::size_t classes() const { return sizes.size(); }

  // Throws std::invalid_argument if the values violate the comments above. Called once for values from a caller.
  void check() const;
};

struct Entry {
  std::int32_t size_class;
  std::int32_t times;
};

// A plan: pattern p is packs[p] packs, each with entries [offsets[p], offsets[p + 1]).
struct Patterns {
  std::vector<std::int64_t> offsets{0};
  std::vector<Entry> entries;
  std::vector<std::int64_t> packs;

  void add(std::int32_t size_class, std::int64_t times) {
    entries.push_back({size_class, static_cast<std::int32_t>(times)});
  }
  // Ends a pattern: its entries are the ones added since the previous pattern.
  void finish(std::int64_t count) {
    offsets.push_back(static_cast<std::int64_t>(entries.size()));
    packs.push_back(count);
  }

  // Throws std::invalid_argument unless offsets are in order and every class, times and packs is in range.
  void check(std::size_t classes) const;
};

}  // namespace sft_idx::packing
