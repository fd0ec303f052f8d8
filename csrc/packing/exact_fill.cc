#include "packing/planners.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "packing/fenwick.h"
#include "packing/random.h"
#include "packing/size_set.h"

namespace sft_idx::packing {
namespace {

// A pattern is used for all packs that its scarcest class allows, or for half of them if there are few classes, because
// using up a class early reduces the choice.
constexpr std::size_t kFewClasses = 1000;
constexpr std::uint64_t kDrawSteps = 16;
constexpr int kTries = 4;           // draws for each number of sequences
constexpr std::int64_t kNear = 24;  // maximum free space to try, in order, if nothing fits exactly

class ExactFill {
 public:
  ExactFill(const Problem& problem, Mix mix, std::uint64_t seed, std::uint64_t most_work)
      : problem_(problem),
        mix_(mix),
        most_work_(most_work),
        random_(seed, kPatterns),
        left_(problem.counts),
        used_(problem.classes(), 0),
        tree_(problem.counts),
        set_(problem.sizes, problem.capacity) {
    for (std::size_t c = 0; c < problem.classes(); ++c) volume_ += static_cast<Wide>(left_[c]) * problem.sizes[c];
  }

  Patterns run() {
    while (tree_.total() > 0 && !spent()) {
      while (left_[static_cast<std::size_t>(largest_)] == 0) --largest_;
      while (left_[static_cast<std::size_t>(smallest_)] == 0) ++smallest_;
      room_ = problem_.capacity;
      pick(largest_);
      fill();
      apply();
    }
    if (tree_.total() > 0) pack_rest();
    return std::move(out_);
  }

 private:
  using Wide = __int128;

  std::int64_t size(std::int32_t c) const { return problem_.sizes[static_cast<std::size_t>(c)]; }
  std::int64_t available(std::int32_t c) const {
    return left_[static_cast<std::size_t>(c)] - used_[static_cast<std::size_t>(c)];
  }
  bool spent() const { return steps_ + set_.steps() >= most_work_; }
  std::int64_t seats() const { return problem_.most - static_cast<std::int64_t>(picked_.size()); }

  void pick(std::int32_t c) {
    ++steps_;
    picked_.push_back(c);
    room_ -= size(c);
    ++used_[static_cast<std::size_t>(c)];
    if (available(c) == 0) set_.erase(c);
  }

  void unpick() {
    const std::int32_t c = picked_.back();
    picked_.pop_back();
    room_ += size(c);
    --used_[static_cast<std::size_t>(c)];
    set_.insert(c);
  }

  void keep_first(std::size_t count) {
    while (picked_.size() > count) unpick();
  }

  // Fills the remaining room exactly with one or two sequences. The search for pairs begins at a given size.
  bool finish(std::int64_t room, std::int64_t from) {
    if (seats() < 2) return false;
    return pair(room, from, room / 2) || (from > 1 && pair(room, 1, from - 1));
  }

  bool pair(std::int64_t sum, std::int64_t from, std::int64_t to) {
    const std::int32_t low = set_.pair(sum, from);
    if (low < 0 || size(low) > to) return false;
    const std::int32_t high = set_.exactly(sum - size(low));
    if (low == high && available(low) < 2) return false;  // sum / 2 is the last possible pair
    pick(high);
    pick(low);
    return true;
  }

  // Draws one sequence of at most this size, in proportion to the remaining counts.
  std::int32_t draw(std::int64_t limit) {
    steps_ += kDrawSteps;
    const std::int64_t total = tree_.before(set_.rank(limit));
    if (total == 0) return -1;
    const auto c = tree_.find(static_cast<std::int64_t>(random_.below(static_cast<std::uint64_t>(total))));
    return available(c) > 0 ? c : -1;
  }

  // Draws all but the last two of `count` sequences, and more if two cannot fill the room.
  bool draw_all_but_two(std::int64_t count) {
    for (std::int64_t behind = count - 1; behind >= 2 || room_ > 2 * size(largest_); --behind) {
      if (seats() <= 2) return false;
      const std::int32_t c = draw(room_ - std::max<std::int64_t>(behind, 2) * size(smallest_));
      if (c < 0) return false;
      pick(c);
    }
    return true;
  }

  bool try_exact(std::int64_t count) {
    if (spent()) return false;
    const std::size_t base = picked_.size();
    if (count == 1) {
      const std::int32_t c = set_.exactly(room_);
      if (c >= 0 && seats() >= 1) pick(c);
      return c >= 0 && room_ == 0;
    }
    if (draw_all_but_two(count) && finish(room_, pair_start())) return true;
    keep_first(base);
    return false;
  }

  // The search for pairs begins at a drawn size, so that pairs are also found in proportion to the remaining counts.
  std::int64_t pair_start() {
    const std::int32_t c = draw(room_ - size(smallest_));
    return c < 0 ? 1 : std::min(size(c), room_ - size(c));
  }

  // How many more sequences give this pack the average size of the remaining sequences, or slightly more. This saves
  // small sequences for the last packs. Without it (31 / 32), triples that fill a pack exactly lose up to 1.5%.
  std::int64_t average_count() const {
    const Wide count = static_cast<Wide>(tree_.total()) * problem_.capacity * 31 / 32 / volume_;
    return std::max<std::int64_t>(1, static_cast<std::int64_t>(std::min<Wide>(count, problem_.most)) - 1);
  }

  void fill() {
    if (room_ < size(smallest_) || seats() == 0) return;
    const std::int64_t average = average_count();
    const std::int64_t fewest = std::max<std::int64_t>(1, (room_ + size(largest_) - 1) / size(largest_));
    if (mix_ == Mix::kAverage) {
      const std::int64_t count = std::max(average, fewest);
      for (int i = 0; i < kTries; ++i) {
        if (try_exact(count)) return;
      }
      for (const std::int64_t other : {count - 1, count + 1, count + 2}) {
        if (other >= fewest && try_exact(other)) return;
      }
    }
    for (std::int64_t count = fewest; count <= fewest + 3; ++count) {
      if (try_exact(count)) return;
    }
    fill_nearly(average);
  }

  // Nothing fits exactly: use the fuller of first fit, and drawn sequences with a nearly exact pair.
  void fill_nearly(std::int64_t average) {
    const std::size_t base = picked_.size();
    first_fit();
    const std::int64_t spare = room_;
    const std::vector<std::int32_t> greedy(picked_.begin() + static_cast<std::ptrdiff_t>(base), picked_.end());
    keep_first(base);
    for (const std::int64_t count : {average, std::int64_t{2}}) {
      if (!spent() && draw_all_but_two(count)) {
        const std::int64_t start = pair_start();
        for (std::int64_t gap = 1; gap < std::min(spare, kNear) && !spent(); ++gap) {
          if (finish(room_ - gap, std::min(start, std::max<std::int64_t>(1, (room_ - gap) / 2)))) return;
        }
      }
      keep_first(base);
    }
    for (const std::int32_t c : greedy) pick(c);
  }

  void first_fit() {
    while (seats() > 0 && room_ > 0) {
      const std::int32_t c = set_.at_most(room_);
      if (c < 0) return;
      pick(c);
    }
  }

  // Uses the pattern for a share of the packs it allows, and removes its sequences from the remaining counts.
  void apply() {
    std::sort(picked_.begin(), picked_.end(), std::greater<>());
    std::int64_t packs = std::int64_t{1} << 62;
    for (const std::int32_t c : picked_) {
      const auto at = static_cast<std::size_t>(c);
      packs = std::min(packs, left_[at] / used_[at]);
    }
    if (problem_.classes() < kFewClasses) packs = (packs + 1) / 2;
    for (std::size_t i = 0; i < picked_.size();) {
      const std::int32_t c = picked_[i];
      const auto at = static_cast<std::size_t>(c);
      const std::int64_t times = used_[at];
      i += static_cast<std::size_t>(times);
      out_.add(c, times);
      left_[at] -= times * packs;
      used_[at] = 0;
      tree_.add(c, -times * packs);
      volume_ -= static_cast<Wide>(times) * packs * size(c);
      if (left_[at] == 0) {
        set_.erase(c);
      } else {
        set_.insert(c);
      }
    }
    out_.finish(packs);
    picked_.clear();
  }

  // Packs the remaining sequences when the work limit is reached.
  void pack_rest() {
    Problem rest{{}, {}, problem_.capacity, problem_.most};
    std::vector<std::int32_t> classes;
    for (std::size_t c = 0; c < left_.size(); ++c) {
      if (left_[c] == 0) continue;
      classes.push_back(static_cast<std::int32_t>(c));
      rest.sizes.push_back(problem_.sizes[c]);
      rest.counts.push_back(left_[c]);
    }
    const Patterns plan = best_fit(rest);
    for (std::size_t p = 0; p < plan.packs.size(); ++p) {
      for (auto e = static_cast<std::size_t>(plan.offsets[p]); e < static_cast<std::size_t>(plan.offsets[p + 1]); ++e) {
        out_.add(classes[static_cast<std::size_t>(plan.entries[e].size_class)], plan.entries[e].times);
      }
      out_.finish(plan.packs[p]);
    }
  }

  const Problem& problem_;
  const Mix mix_;
  const std::uint64_t most_work_;
  std::uint64_t steps_ = 0;  // in addition to the steps of set_
  Random random_;
  std::vector<std::int64_t> left_;  // remaining count by class, before the current pattern is subtracted
  std::vector<std::int64_t> used_;  // by class, in the current pattern
  Fenwick tree_;                    // running sums of left_
  SizeSet set_;                     // classes with left_ - used_ > 0
  Wide volume_ = 0;                 // sum of left_ x sizes
  std::int32_t largest_ = static_cast<std::int32_t>(problem_.classes()) - 1;
  std::int32_t smallest_ = 0;
  std::vector<std::int32_t> picked_;
  std::int64_t room_ = 0;
  Patterns out_;
};

}  // namespace

Patterns exact_fill(const Problem& problem, Mix mix, std::uint64_t seed, std::uint64_t most_work) {
  return ExactFill(problem, mix, seed, most_work).run();
}

}  // namespace sft_idx::packing
