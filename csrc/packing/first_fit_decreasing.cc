#include <algorithm>
#include <utility>

#include "packing/planners.h"
#include "packing/pack_groups.h"

namespace sft_idx::packing {
namespace {

// Runs of equal packs in the order in which they were opened, in blocks that store their largest free space. Finding
// the first run with room for a size, and inserting the pieces of a split run, cost about the square root of the
// number.
class FirstFit {
 public:
  explicit FirstFit(const Problem& problem) : problem_(problem) {}

  Patterns run() {
    for (std::size_t c = problem_.classes(); c-- > 0;) place(c);
    for (const Block& block : blocks_) {
      for (const Group& run : block.runs) contents_.emit(run, out_);
    }
    return std::move(out_);
  }

 private:
  struct Block {
    std::int64_t largest = 0;
    std::vector<Group> runs;
  };
  static constexpr std::size_t kBlock = 128;

  void place(std::size_t c) {
    const std::int64_t size = problem_.sizes[c];
    std::int64_t left = problem_.counts[c];
    for (std::size_t b = 0; b < blocks_.size() && left > 0; ++b) {
      if (blocks_[b].largest < size) continue;
      left = fill(blocks_[b], c, left);
      if (blocks_[b].runs.size() > 2 * kBlock) split(b);
    }
    if (left == 0) return;
    const std::int64_t times = std::min(problem_.capacity / size, problem_.most);
    if (blocks_.empty() || blocks_.back().runs.size() >= kBlock) blocks_.emplace_back();
    Block& last = blocks_.back();
    const Group empty{(left + times - 1) / times, problem_.capacity, 0, Contents::kEmpty};
    take(empty, c, left, last);
    last.largest = largest(last);
  }

  // Offers the class to every run of the block in order. Returns the remaining count.
  std::int64_t fill(Block& block, std::size_t c, std::int64_t left) {
    std::vector<Group> before;
    before.swap(block.runs);
    block.runs.reserve(before.size() + 2);
    for (const Group& run : before) {
      if (left > 0 && run.free >= problem_.sizes[c]) {
        left = take(run, c, left, block);
      } else {
        block.runs.push_back(run);
      }
    }
    block.largest = largest(block);
    return left;
  }

  // The packs of the run take sequences in order: some become full, one takes a part, the others none.
  std::int64_t take(const Group& run, std::size_t c, std::int64_t left, Block& block) {
    const std::int64_t size = problem_.sizes[c];
    const auto size_class = static_cast<std::int32_t>(c);
    const std::int64_t times = room_for(run, size, problem_.most);
    const std::int64_t full = std::min(run.packs, left / times);
    const std::int64_t part = full < run.packs ? left - full * times : 0;
    const std::int64_t rest = run.packs - full - (part > 0 ? 1 : 0);
    if (full > 0) keep(grown(run, full, times, size, size_class, contents_), block);
    if (part > 0) keep(grown(run, 1, part, size, size_class, contents_), block);
    if (rest > 0) keep({rest, run.free, run.sequences, run.link}, block);
    return left - full * times - part;
  }

  // A pack that can take no more sequences is removed from the blocks, so that they stay short.
  void keep(const Group& run, Block& block) {
    if (run.free >= problem_.sizes.front() && run.sequences < problem_.most) {
      block.runs.push_back(run);
    } else {
      contents_.emit(run, out_);
    }
  }

  static std::int64_t largest(const Block& block) {
    std::int64_t value = 0;
    for (const Group& run : block.runs) value = std::max(value, run.free);
    return value;
  }

  void split(std::size_t b) {
    Block tail;
    auto& runs = blocks_[b].runs;
    const auto middle = runs.begin() + static_cast<std::ptrdiff_t>(runs.size() / 2);
    tail.runs.assign(middle, runs.end());
    runs.erase(middle, runs.end());
    tail.largest = largest(tail);
    blocks_[b].largest = largest(blocks_[b]);
    blocks_.insert(blocks_.begin() + static_cast<std::ptrdiff_t>(b) + 1, std::move(tail));
  }

  const Problem& problem_;
  std::vector<Block> blocks_;
  Contents contents_;
  Patterns out_;
};

}  // namespace

Patterns first_fit_decreasing(const Problem& problem) { return FirstFit(problem).run(); }

}  // namespace sft_idx::packing
