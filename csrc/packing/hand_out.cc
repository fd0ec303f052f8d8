#include "packing/planners.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "packing/buffer.h"
#include "packing/histogram.h"
#include "packing/random.h"

namespace sft_idx::packing {
namespace {

constexpr char kOtherLengths[] = "the patterns do not use each class of these lengths as often as it occurs";
constexpr std::size_t kAhead = 32;      // number of sequences to prefetch slots for
constexpr std::size_t kPacksAhead = 4;  // number of packs to prefetch

// The first slot of each class in an array sorted by class, from the number of its uses in the patterns.
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

// Indices of the sequences, sorted by class and shuffled within each class. Index is the narrowest type that fits,
// because this array is written in random order, so its size determines the cost.
template <typename Index>
Buffer<Index> deal(const std::int64_t* lengths, std::size_t count, const ClassOf& class_of, std::int64_t longest,
                   const std::vector<std::int64_t>& starts, std::uint64_t seed) {
  Buffer<Index> dealt(count);
  std::vector<std::int64_t> cursor(starts.begin(), starts.end() - 1);
  // Cursors of the sequences i to i + kAhead - 1, so that each class is looked up once.
  std::array<std::int64_t*, kAhead> coming{};
  const auto look_up = [&](std::size_t i) {
    check_length(lengths[i], longest, i);
    std::int64_t* const at = &cursor[static_cast<std::size_t>(class_of(lengths[i]))];
    __builtin_prefetch(dealt.data() + *at, 1);
    coming[i % kAhead] = at;
  };
  for (std::size_t i = 0; i < std::min(count, kAhead); ++i) look_up(i);
  for (std::size_t i = 0; i < count; ++i) {
    const auto slot = static_cast<std::size_t>((*coming[i % kAhead])++);
    if (i + kAhead < count) look_up(i + kAhead);
    if (slot >= count) throw std::invalid_argument(kOtherLengths);  // the write is in bounds; more checks below
    dealt[slot] = static_cast<Index>(i);
  }
  if (!std::equal(cursor.begin(), cursor.end(), starts.begin() + 1)) throw std::invalid_argument(kOtherLengths);
  Random random(seed, kItems);
  for (std::size_t c = 0; c + 1 < starts.size(); ++c) {
    shuffle(dealt.data() + starts[c], static_cast<std::size_t>(starts[c + 1] - starts[c]), random);
  }
  return dealt;
}

// The pattern of each pack, shuffled with the seed.
template <typename Index>
Buffer<Index> pack_order(const Patterns& patterns, std::uint64_t seed) {
  Buffer<Index> order(
      static_cast<std::size_t>(std::accumulate(patterns.packs.begin(), patterns.packs.end(), std::int64_t{0})));
  Index* end = order.data();
  for (std::size_t p = 0; p < patterns.packs.size(); ++p) {
    end = std::fill_n(end, patterns.packs[p], static_cast<Index>(p));
  }
  Random random(seed, kPacks);
  shuffle(order.data(), order.size(), random);
  return order;
}

template <typename Index>
void fill(const Buffer<Index>& dealt, const Patterns& patterns, std::vector<std::int64_t> cursor, std::uint64_t seed,
          std::int64_t* offsets, std::int64_t* sequences) {
  const Buffer<Index> order = pack_order<Index>(patterns, seed);
  std::int64_t* out = sequences;
  *offsets++ = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (i + kPacksAhead < order.size()) {
      const Index later = order[i + kPacksAhead];
      for (auto e = patterns.offsets[later]; e < patterns.offsets[later + 1]; ++e) {
        const Entry& entry = patterns.entries[static_cast<std::size_t>(e)];
        __builtin_prefetch(dealt.begin() + cursor[static_cast<std::size_t>(entry.size_class)]);
      }
    }
    const Entry* entry = patterns.entries.data() + patterns.offsets[order[i]];
    const Entry* const end = patterns.entries.data() + patterns.offsets[order[i] + 1];
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
    throw std::invalid_argument(kOtherLengths);
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
