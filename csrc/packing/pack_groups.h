// Groups of equal packs during planning.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "packing/patterns.h"

namespace sft_idx::packing {

// `packs` packs with the same content. The content is a chain of links from the last class added to the first.
struct Group {
  std::int64_t packs;
  std::int64_t free;
  std::int64_t sequences;
  std::int32_t link;
};

// Owns the chains of all groups. Groups that split share the links they had in common.
class Contents {
 public:
  static constexpr std::int32_t kEmpty = -1;

  std::int32_t extend(std::int32_t link, std::int32_t size_class, std::int64_t times) {
    links_.push_back({link, {size_class, static_cast<std::int32_t>(times)}});
    return static_cast<std::int32_t>(links_.size() - 1);
  }

  // Appends the group's pattern, first class added first.
  void emit(const Group& group, Patterns& out) const {
    const auto begin = static_cast<std::ptrdiff_t>(out.entries.size());
    for (std::int32_t at = group.link; at != kEmpty; at = links_[static_cast<std::size_t>(at)].before) {
      out.entries.push_back(links_[static_cast<std::size_t>(at)].entry);
    }
    std::reverse(out.entries.begin() + begin, out.entries.end());
    out.finish(group.packs);
  }

 private:
  struct Link {
    std::int32_t before;
    Entry entry;
  };
  std::vector<Link> links_;
};

// How many more sequences of `size` fit into a pack of this group.
inline std::int64_t room_for(const Group& group, std::int64_t size, std::int64_t most) {
  return std::min(group.free / size, most - group.sequences);
}

// The content of the group after each of its packs takes `times` sequences of the class.
inline Group grown(const Group& group, std::int64_t packs, std::int64_t times, std::int64_t size,
                   std::int32_t size_class, Contents& contents) {
  return {packs, group.free - times * size, group.sequences + times, contents.extend(group.link, size_class, times)};
}

}  // namespace sft_idx::packing
