// What every planner works on and returns: classes of equal size, and packs described by how many of each they take.
#pragma once

#include <cstdint>
#include <vector>

namespace sft_idx::packing {

// The sequences to pack, by size. Sizes count in units of the sequence multiple, rounded up; so does the capacity,
// rounded down. Class c is all sequences of size sizes[c].
struct Problem {
  std::vector<std::int64_t> sizes;   // ascending, distinct, in [1, capacity]
  std::vector<std::int64_t> counts;  // > 0
  std::int64_t capacity = 0;         // units a pack holds
  std::int64_t most = 0;             // sequences a pack may hold, >= 1

  std::size_t classes() const { return sizes.size(); }

  // Throws std::invalid_argument where the comments above do not hold: what comes from outside is checked once.
  void check() const;
};

struct Entry {
  std::int32_t size_class;
  std::int32_t times;
};

// A plan: pattern p is packs[p] packs, each holding entries [offsets[p], offsets[p + 1]).
struct Patterns {
  std::vector<std::int64_t> offsets{0};
  std::vector<Entry> entries;
  std::vector<std::int64_t> packs;

  void add(std::int32_t size_class, std::int64_t times) {
    entries.push_back({size_class, static_cast<std::int32_t>(times)});
  }
  // Ends the pattern whose entries were added since the last one.
  void finish(std::int64_t count) {
    offsets.push_back(static_cast<std::int64_t>(entries.size()));
    packs.push_back(count);
  }

  // Throws std::invalid_argument unless offsets are in order and every class, times and packs is in range.
  void check(std::size_t classes) const;
};

}  // namespace sft_idx::packing
