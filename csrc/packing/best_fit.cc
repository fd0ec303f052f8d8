#include "packing/planners.h"

#include <algorithm>

#include "packing/free_space.h"
#include "packing/pack_groups.h"

namespace sft_idx::packing {
namespace {

template <typename Spaces>
class BestFit {
 public:
  explicit BestFit(const Problem& problem) : problem_(problem), spaces_(problem.capacity) {}

  Patterns run() {
    for (std::size_t c = problem_.classes(); c-- > 0;) place(c);
    Patterns out;
    for (const Group& group : groups_) contents_.emit(group, out);
    return out;
  }

 private:
  // Packs one class: all packs with the best free space at once, split if fewer sequences are left than they could
  // take.
  void place(std::size_t c) {
    const std::int64_t size = problem_.sizes[c];
    std::int64_t left = problem_.counts[c];
    while (left > 0) {
      const std::int32_t id = spaces_.pop_at_least(size);
      if (id == Spaces::kNone) break;
      const Group group = groups_[static_cast<std::size_t>(id)];
      const std::int64_t times = room_for(group, size, problem_.most);
      const std::int64_t full = std::min(group.packs, left / times);
      const std::int64_t part = full < group.packs ? left - full * times : 0;
      const std::int64_t rest = group.packs - full - (part > 0 ? 1 : 0);
      left -= full * times + part;
      std::int32_t slot = id;  // the first piece keeps the number of the group, the others get new numbers
      if (rest > 0) keep(slot, {rest, group.free, group.sequences, group.link});
      if (part > 0) keep(slot, grown(group, 1, part, size, static_cast<std::int32_t>(c), contents_));
      if (full > 0) keep(slot, grown(group, full, times, size, static_cast<std::int32_t>(c), contents_));
    }
    if (left > 0) open(c, left);
  }

  void open(std::size_t c, std::int64_t left) {
    const Group empty{0, problem_.capacity, 0, Contents::kEmpty};
    const std::int64_t size = problem_.sizes[c];
    const std::int64_t times = room_for(empty, size, problem_.most);
    std::int32_t slot = kNew;
    const auto size_class = static_cast<std::int32_t>(c);
    if (left / times > 0) keep(slot, grown(empty, left / times, times, size, size_class, contents_));
    if (left % times > 0) keep(slot, grown(empty, 1, left % times, size, size_class, contents_));
  }

  // Stores a group, and its free space if it can still take sequences.
  void keep(std::int32_t& slot, const Group& group) {
    if (slot == kNew) {
      slot = static_cast<std::int32_t>(groups_.size());
      groups_.push_back(group);
    } else {
      groups_[static_cast<std::size_t>(slot)] = group;
    }
    if (group.free >= problem_.sizes.front() && group.sequences < problem_.most) spaces_.push(group.free, slot);
    slot = kNew;
  }

  static constexpr std::int32_t kNew = -1;

  const Problem& problem_;
  Spaces spaces_;
  std::vector<Group> groups_;
  Contents contents_;
};

}  // namespace

Patterns best_fit(const Problem& problem) {
  const bool sparse = static_cast<std::uint64_t>(problem.capacity) / 32 > problem.classes();
  return sparse ? BestFit<SparseSpaces>(problem).run() : BestFit<DenseSpaces>(problem).run();
}

}  // namespace sft_idx::packing
