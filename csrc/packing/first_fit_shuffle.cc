#include "packing/planners.h"

#include <algorithm>
#include <numeric>

#include "packing/histogram.h"
#include "packing/random.h"

namespace sft_idx::packing {
namespace {

// The free space of every pack, in a tree of maxima with 16 children per node. The first pack with enough room is found
// from the root, with 16 comparisons (one or two vector instructions) per level.
class FreeTree {
 public:
  // The first pack with at least `size` free; packs() if there is none.
  std::size_t first(std::int32_t size) const {
    std::size_t at = 0;
    for (std::size_t level = levels_.size(); level-- > 0;) {
      const auto& nodes = levels_[level];
      while (at < nodes.size() && nodes[at] < size) ++at;
      if (at == nodes.size()) return packs();  // only at the root: below it, a child always has room
      if (level > 0) at *= kFan;
    }
    return at;
  }

  std::size_t packs() const { return levels_[0].size(); }
  std::int32_t free(std::size_t pack) const { return levels_[0][pack]; }

  void open(std::int32_t free) {
    levels_[0].push_back(0);
    set(packs() - 1, free);
  }

  void set(std::size_t pack, std::int32_t free) {
    levels_[0][pack] = free;
    std::size_t at = pack;
    for (std::size_t level = 1; levels_[level - 1].size() > kFan || level < levels_.size(); ++level) {
      if (level == levels_.size()) levels_.emplace_back();
      auto& nodes = levels_[level];
      const auto& below = levels_[level - 1];
      while (nodes.size() * kFan < below.size()) {
        const std::size_t begin = nodes.size() * kFan;
        nodes.push_back(largest(below, begin));
      }
      at /= kFan;
      nodes[at] = largest(below, at * kFan);
    }
  }

 private:
  static constexpr std::size_t kFan = 16;

  static std::int32_t largest(const std::vector<std::int32_t>& nodes, std::size_t begin) {
    const std::size_t end = std::min(begin + kFan, nodes.size());
    std::int32_t value = 0;
    for (std::size_t i = begin; i < end; ++i) value = std::max(value, nodes[i]);
    return value;
  }

  std::vector<std::vector<std::int32_t>> levels_{1};
};

// Sorts sequences by pack, with packs renumbered by `place`. The order within a pack is that in `order`.
std::vector<std::int64_t> group(const std::vector<std::int64_t>& order, const std::vector<std::int64_t>& pack_of,
                                const std::vector<std::int64_t>& place, std::int64_t* sequences) {
  auto placed = [&](std::int64_t pack) { return static_cast<std::size_t>(place[static_cast<std::size_t>(pack)]); };
  std::vector<std::int64_t> offsets(place.size() + 1, 0);
  for (const std::int64_t pack : pack_of) ++offsets[placed(pack) + 1];
  std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
  std::vector<std::int64_t> cursor(offsets.begin(), offsets.end() - 1);
  for (std::size_t i = 0; i < order.size(); ++i) {
    sequences[cursor[placed(pack_of[i])]++] = order[i];
  }
  return offsets;
}

std::vector<std::int64_t> shuffled(std::size_t count, Random random) {
  std::vector<std::int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  shuffle(order.data(), count, random);
  return order;
}

}  // namespace

std::vector<std::int64_t> first_fit_shuffle(const std::int64_t* lengths, std::size_t count, std::int64_t capacity,
                                            std::int64_t multiple, std::int64_t most, std::uint64_t seed,
                                            std::int64_t* sequences) {
  const std::vector<std::int64_t> order = shuffled(count, Random(seed, kItems));
  std::vector<std::int64_t> pack_of(count);
  std::vector<std::int64_t> held;
  const std::int64_t units = capacity / multiple;
  FreeTree tree;
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t length = lengths[order[i]];
    check_length(length, units * multiple, static_cast<std::size_t>(order[i]));
    const auto size = static_cast<std::int32_t>((length + multiple - 1) / multiple);
    const std::size_t pack = tree.first(size);
    if (pack == tree.packs()) {
      tree.open(static_cast<std::int32_t>(units));
      held.push_back(0);
    }
    // A pack with the maximum number of sequences has no room.
    tree.set(pack, ++held[pack] == most ? 0 : tree.free(pack) - size);
    pack_of[i] = static_cast<std::int64_t>(pack);
  }
  return group(order, pack_of, shuffled(tree.packs(), Random(seed, kPacks)), sequences);
}

std::vector<std::int64_t> sequential(const std::int64_t* lengths, std::size_t count, std::int64_t capacity,
                                     std::int64_t multiple, std::int64_t most) {
  const std::int64_t units = capacity / multiple;
  std::vector<std::int64_t> offsets{0};
  std::int64_t used = 0;
  for (std::size_t i = 0; i < count; ++i) {
    check_length(lengths[i], units * multiple, i);
    const std::int64_t size = (lengths[i] + multiple - 1) / multiple;
    const auto begin = static_cast<std::size_t>(offsets.back());
    if (used + size > units || i - begin == static_cast<std::size_t>(most)) {
      offsets.push_back(static_cast<std::int64_t>(i));
      used = 0;
    }
    used += size;
  }
  if (count > 0) offsets.push_back(static_cast<std::int64_t>(count));
  return offsets;
}

}  // namespace sft_idx::packing
