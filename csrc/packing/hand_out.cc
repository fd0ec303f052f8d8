#include "packing/hand_out.h"

#include <limits>
#include <numeric>
#include <stdexcept>

#include "packing/histogram.h"
#include "packing/random.h"

namespace sft_idx::packing {
namespace {

// The first slot of each class in an array sorted by class, from how often the patterns use it.
std::vector<std::int64_t> class_starts(const Patterns& patterns, std::size_t classes) {
  std::vector<std::int64_t> starts(classes + 1, 0);
  for (std::size_t p = 0; p < patterns.packs.size(); ++p) {
    for (auto e = static_cast<std::size_t>(patterns.offsets[p]); e < static_cast<std::size_t>(patterns.offsets[p + 1]);
         ++e) {
      const Entry& entry = patterns.entries[e];
      starts[static_cast<std::size_t>(entry.size_class) + 1] += entry.times * patterns.packs[p];
    }
  }
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  return starts;
}

// Indices of the sequences, sorted by class and shuffled inside each. Index is the narrowest type that holds them:
// this array is written at random, so its size is its cost.
template <typename Index>
std::vector<Index> deal(const std::int64_t* lengths, std::size_t count, const ClassOf& class_of,
                        std::int64_t longest, const std::vector<std::int64_t>& starts, std::uint64_t seed) {
  std::vector<Index> dealt(count);
  std::vector<std::int64_t> cursor(starts.begin(), starts.end() - 1);
  for (std::size_t i = 0; i < count; ++i) {
    check_length(lengths[i], longest, i);
    const auto c = static_cast<std::size_t>(class_of(lengths[i]));
    if (cursor[c] == starts[c + 1]) throw std::invalid_argument("the patterns use a class less often than it occurs");
    dealt[static_cast<std::size_t>(cursor[c]++)] = static_cast<Index>(i);
  }
  Random random(seed, kItems);
  for (std::size_t c = 0; c + 1 < starts.size(); ++c) {
    shuffle(dealt.data() + starts[c], static_cast<std::size_t>(starts[c + 1] - starts[c]), random);
  }
  return dealt;
}

template <typename Index>
void fill(const std::vector<Index>& dealt, const Patterns& patterns, std::vector<std::int64_t> cursor,
          std::uint64_t seed, std::int64_t* offsets, std::int64_t* sequences) {
  std::vector<Index> order;  // the pattern of each pack
  order.reserve(static_cast<std::size_t>(
      std::accumulate(patterns.packs.begin(), patterns.packs.end(), std::int64_t{0})));
  for (std::size_t p = 0; p < patterns.packs.size(); ++p) {
    order.insert(order.end(), static_cast<std::size_t>(patterns.packs[p]), static_cast<Index>(p));
  }
  Random random(seed, kPacks);
  shuffle(order.data(), order.size(), random);
  std::int64_t* out = sequences;
  *offsets++ = 0;
  for (const Index p : order) {
    const Entry* entry = patterns.entries.data() + patterns.offsets[p];
    const Entry* const end = patterns.entries.data() + patterns.offsets[p + 1];
    for (; entry != end; ++entry) {
      std::int64_t& at = cursor[static_cast<std::size_t>(entry->size_class)];
      for (std::int32_t t = 0; t < entry->times; ++t) *out++ = dealt[static_cast<std::size_t>(at++)];
    }
    *offsets++ = out - sequences;
  }
}

}  // namespace

void hand_out(const std::int64_t* lengths, std::size_t count, std::int64_t multiple,
              const std::vector<std::int64_t>& sizes, const Patterns& patterns, std::uint64_t seed,
              std::int64_t* offsets, std::int64_t* sequences) {
  patterns.check(sizes.size());
  const std::vector<std::int64_t> starts = class_starts(patterns, sizes.size());
  if (starts.back() != static_cast<std::int64_t>(count)) {
    throw std::invalid_argument("the patterns do not use every sequence once");
  }
  if (count == 0) {
    offsets[0] = 0;
    return;
  }
  const std::int64_t longest = sizes.back() * multiple;
  const ClassOf class_of(sizes, multiple, count);
  if (count <= std::numeric_limits<std::uint32_t>::max()) {
    const auto dealt = deal<std::uint32_t>(lengths, count, class_of, longest, starts, seed);
    fill(dealt, patterns, starts, seed, offsets, sequences);
  } else {
    const auto dealt = deal<std::uint64_t>(lengths, count, class_of, longest, starts, seed);
    fill(dealt, patterns, starts, seed, offsets, sequences);
  }
}

}  // namespace sft_idx::packing
