// Two ways to find the smallest free space of at least a given size.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace sft_idx::packing {

// Stacks of group numbers by free space, over a bitset of 64-ary levels: a bit is set if one of the 64 bits below is
// set. Finding the next space reads two words per level; any capacity under 2^30 has five levels.
class DenseSpaces {
 public:
  explicit DenseSpaces(std::int64_t capacity) : heads_(static_cast<std::size_t>(capacity) + 1, kNone) {
    std::size_t bits = heads_.size();
    do {
      bits = (bits + 63) / 64;
      levels_.emplace_back(bits, 0);
    } while (bits > 1);
  }

  // Moves group `id` to the top of the stack of this free space.
  void push(std::int64_t space, std::int32_t id) {
    const auto at = static_cast<std::size_t>(space);
    if (below_.size() <= static_cast<std::size_t>(id)) below_.resize(static_cast<std::size_t>(id) + 1);
    below_[static_cast<std::size_t>(id)] = heads_[at];
    if (heads_[at] == kNone) set(at);
    heads_[at] = id;
  }

  // Takes the top group of the smallest free space that is at least `space`; kNone if there is none.
  std::int32_t pop_at_least(std::int64_t space) {
    const std::size_t at = next(static_cast<std::size_t>(space));
    if (at >= heads_.size()) return kNone;
    const std::int32_t id = heads_[at];
    heads_[at] = below_[static_cast<std::size_t>(id)];
    if (heads_[at] == kNone) clear(at);
    return id;
  }

  static constexpr std::int32_t kNone = -1;

 private:
  void set(std::size_t at) {
    for (auto& level : levels_) {
      const bool was = level[at / 64] != 0;
      level[at / 64] |= 1ULL << (at % 64);
      if (was) return;
      at /= 64;
    }
  }

  void clear(std::size_t at) {
    for (auto& level : levels_) {
      level[at / 64] &= ~(1ULL << (at % 64));
      if (level[at / 64] != 0) return;
      at /= 64;
    }
  }

  // The first set bit at or after `at`; a number past the end if there is none.
  std::size_t next(std::size_t at) const {
    std::size_t up = 0;
    for (; up < levels_.size(); ++up) {
      if (at / 64 >= levels_[up].size()) return heads_.size();
      const std::uint64_t word = levels_[up][at / 64] >> (at % 64);
      if (word != 0) {
        at += static_cast<std::size_t>(__builtin_ctzll(word));
        break;
      }
      at = at / 64 + 1;
    }
    if (up == levels_.size()) return heads_.size();
    while (up-- > 0) at = at * 64 + static_cast<std::size_t>(__builtin_ctzll(levels_[up][at]));
    return at;
  }

  std::vector<std::int32_t> heads_;
  std::vector<std::int32_t> below_;
  std::vector<std::vector<std::uint64_t>> levels_;
};

// The same with a search tree, for few sequences and a large capacity, because it zeroes no memory.
class SparseSpaces {
 public:
  explicit SparseSpaces(std::int64_t /*capacity*/) {}

  void push(std::int64_t space, std::int32_t id) { stacks_[space].push_back(id); }

  std::int32_t pop_at_least(std::int64_t space) {
    const auto at = stacks_.lower_bound(space);
    if (at == stacks_.end()) return kNone;
    const std::int32_t id = at->second.back();
    at->second.pop_back();
    if (at->second.empty()) stacks_.erase(at);
    return id;
  }

  static constexpr std::int32_t kNone = -1;

 private:
  std::map<std::int64_t, std::vector<std::int32_t>> stacks_;
};

}  // namespace sft_idx::packing
