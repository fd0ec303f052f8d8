#include "verify.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "mask_values.h"

namespace sft_idx {
namespace {

template <typename Mask>
using Found = std::conditional_t<std::is_floating_point_v<Mask>, double, std::int64_t>;

struct Steps {
  bool ascend;  // strictly, from 0 or more to limit or less
  std::int64_t longest;
};

Steps steps(const std::vector<std::int64_t>& offsets, std::int64_t limit) {
  // The highest bit of a difference is its sign. Differences of values from 0 to limit cannot overflow, and a value
  // outside this range has the bit set itself.
  const auto top = static_cast<std::uint64_t>(limit);
  auto before = static_cast<std::uint64_t>(offsets[0]);
  std::uint64_t wrong = before | (top - before);
  std::int64_t longest = 0;
  for (std::size_t i = 1; i < offsets.size(); ++i) {
    const auto offset = static_cast<std::uint64_t>(offsets[i]);
    const std::uint64_t step = offset - before;
    wrong |= offset | (top - offset) | (step - 1);
    longest = std::max(longest, static_cast<std::int64_t>(step));
    before = offset;
  }
  return {wrong >> 63 == 0, longest};
}

}  // namespace

PackWalk::PackWalk(const Limits& limits) : limits_(limits) {
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max(), most_count = std::int64_t{1} << 56;
  if (std::min(limits.sequences, limits.tokens) < 0 || std::max(limits.sequences, limits.tokens) > most_count) {
    throw std::invalid_argument("counts are 0 to 2^56");
  }
  if (limits.capacity < 0 || limits.capacity > most || limits.multiple < 1 || limits.multiple > most) {
    throw std::invalid_argument("capacity and multiple are at most " + std::to_string(most));
  }
}

void PackWalk::broken(const char* rule, std::int64_t pack, std::int64_t at,
                      std::variant<std::int64_t, double> found, std::int64_t expected) {
  if (counts_[rule]++ < static_cast<std::int64_t>(limits_.most)) breaches_.push_back({rule, pack, at, found, expected});
}

PackWalk::Pack PackWalk::pack(std::size_t k) const {
  return {token_offsets_[k], token_offsets_[k + 1], sequence_offsets_[k], sequence_offsets_[k + 1]};
}

void PackWalk::packs(const std::int64_t* token_offsets, const std::int64_t* sequence_offsets, std::size_t count,
                     bool looks_ahead) {
  run_begin_ = run_end_;
  run_end_ += static_cast<std::int64_t>(count);
  token_offsets_.assign(token_offsets, token_offsets + count + 1);
  sequence_offsets_.assign(sequence_offsets, sequence_offsets + count + 1);
  passed_over_.clear();
  at_ = seen_ = 0;
  if (!count) return;
  // If the next pack does not end later, this pack is the one that ends too late.
  const std::int64_t token_ahead = looks_ahead ? token_offsets[count + 1] : limits_.tokens + 1;
  const std::int64_t sequence_ahead = looks_ahead ? sequence_offsets[count + 1] : limits_.sequences + 1;
  const Steps tokens = steps(token_offsets_, limits_.tokens), sequences = steps(sequence_offsets_, limits_.sequences);
  const bool follows = token_offsets_[0] >= last_end_ && sequence_offsets_[0] >= last_sequence_ &&
                       token_offsets_[count] < token_ahead && sequence_offsets_[count] < sequence_ahead;
  if (follows && tokens.ascend && sequences.ascend && tokens.longest <= limits_.capacity) {
    totals_.sizes.longest = std::max(totals_.sizes.longest, tokens.longest);
    totals_.sizes.most_sequences = std::max(totals_.sizes.most_sequences, sequences.longest);
    last_end_ = token_offsets_[count];
    last_sequence_ = sequence_offsets_[count];
  } else {
    pass_over(token_ahead, sequence_ahead);
    measure();
  }
}

void PackWalk::pass_over(std::int64_t token_ahead, std::int64_t sequence_ahead) {
  passed_over_.resize(run_packs());
  for (std::size_t k = 0; k < run_packs(); ++k) {
    const auto [begin, end, first, last] = pack(k);
    if (end <= begin || end > limits_.tokens) {
      broken("O2", number(k), number(k) + 1, end, end <= begin ? begin : limits_.tokens);
    }
    if (last <= first || last > limits_.sequences) {
      broken("O1", number(k), number(k) + 1, last, last <= first ? first : limits_.sequences);
    }
    const bool more = k + 1 < run_packs();
    const std::int64_t next_end = more ? token_offsets_[k + 2] : token_ahead;
    const std::int64_t next_last = more ? sequence_offsets_[k + 2] : sequence_ahead;
    const bool placed = begin >= last_end_ && begin < end && end < next_end && end <= limits_.tokens;
    const bool filled = first >= last_sequence_ && first < last && last < next_last && last <= limits_.sequences;
    passed_over_[k] = !placed || !filled;
    if (passed_over_[k]) continue;
    last_end_ = end;
    last_sequence_ = last;
  }
}

void PackWalk::measure() {
  for (std::size_t k = 0; k < run_packs(); ++k) {
    if (passed_over(k)) continue;
    const auto [begin, end, first, last] = pack(k);
    const std::int64_t length = end - begin;
    if (length > limits_.capacity) broken("P1", number(k), number(k), length, limits_.capacity);
    totals_.sizes.longest = std::max(totals_.sizes.longest, length);
    totals_.sizes.most_sequences = std::max(totals_.sizes.most_sequences, last - first);
  }
}

std::int64_t PackWalk::wanted_sequences() const {
  std::size_t k = run_packs();
  while (k && passed_over(k - 1)) --k;
  return k ? sequence_offsets_[k] : sequence_;
}

void PackWalk::starts(const std::uint32_t* values, std::size_t count) {
  // The end of the sequence that was open before, and one end per start.
  ends_.resize(std::max(ends_.size(), count + 1));
  num_ends_ = next_end_ = 0;
  while (count) {
    while (at_ < run_packs() && passed_over(at_)) ++at_;
    std::size_t taken = count;  // if no pack needs them
    if (at_ < run_packs()) {
      const Pack open = pack(at_);
      const std::int64_t ahead = open.first - sequence_;
      if (ahead > 0) {  // of a pack that was skipped
        taken = std::min(static_cast<std::size_t>(ahead), count);
      } else if (taken = ahead ? 0 : whole_packs(values, count); !taken) {
        start(open, *values);
        if (sequence_ + 1 == open.last) end_pack(open);
        taken = 1;
      }
    }
    values += taken;
    count -= taken;
    sequence_ += static_cast<std::int64_t>(taken);
  }
}

// Consumes packs as long as all their starts are available and valid. Returns the number of consumed starts.
std::size_t PackWalk::whole_packs(const std::uint32_t* values, std::size_t count) {
  // Local copies, because the compiler must assume that writes through a 64-bit pointer change the members.
  const std::int64_t first_sequence = sequence_, added = limits_.multiple - 1, capacity = limits_.capacity;
  const auto given = static_cast<std::int64_t>(count);
  const std::size_t first = at_, packs = run_packs();
  const bool none_passed = passed_over_.empty();
  std::int64_t taken = 0, *ends = ends_.data() + num_ends_;
  std::size_t k = first;
  for (; k < packs && (none_passed || !passed_over_[k]); ++k) {
    const Pack open = pack(k);
    if (open.last - first_sequence > given) break;
    const std::int64_t length = open.end - open.begin, last = open.last - open.first - 1;
    if (length > capacity || !starts_ok(values + taken, last + 1, length)) break;
    for (std::int64_t i = taken; i < taken + last; ++i) ends[i] = open.begin + values[i + 1];
    ends[taken + last] = open.end;
    // If rounding up cannot make the pack the longest so far, its sequences need not be rounded.
    if (length + (last + 1) * added > totals_.sizes.longest_padded) {
      const std::int64_t padded = padded_length(values + taken, last + 1, length, limits_.multiple);
      if (padded > capacity) break;
      totals_.sizes.longest_padded = std::max(totals_.sizes.longest_padded, padded);
    }
    taken += last + 1;
  }
  if (k == first) return 0;
  at_ = k;
  num_ends_ += static_cast<std::size_t>(taken);
  known_ = token_offsets_[k];
  totals_.packs += static_cast<std::int64_t>(k - first);
  return static_cast<std::size_t>(taken);
}

void PackWalk::start(const Pack& pack, std::int64_t value) {
  const std::int64_t length = pack.end - pack.begin;
  const bool first = sequence_ == pack.first, inside = value < length;
  if (first) {
    open_ = padded_ = 0;
    sound_ = true;
  }
  if (first && value != 0) broken("P2", number(at_), sequence_, value, 0);
  if (!first && value <= open_) broken("P3", number(at_), sequence_, value, open_ + 1);
  if (!inside) broken("P4", number(at_), sequence_, value, length - 1);
  if (first ? value != 0 : value <= open_) sound_ = false;
  sound_ = sound_ && inside;
  if (!first && value > open_ && inside) end_sequence(pack, value);
}

void PackWalk::end_sequence(const Pack& pack, std::int64_t end) {
  constexpr std::int64_t huge = std::int64_t{1} << 62;  // far above any capacity; adding one still fits 63 bits
  if (padded_ < huge) {
    padded_ += (end - open_ + limits_.multiple - 1) / limits_.multiple * limits_.multiple;
  }
  open_ = end;
  known_ = pack.begin + end;
  ends_[num_ends_++] = known_;
}

void PackWalk::end_pack(const Pack& pack) {
  const std::int64_t length = pack.end - pack.begin;
  end_sequence(pack, length);
  if (sound_ && length <= limits_.capacity) {
    if (padded_ > limits_.capacity) {
      broken("P5", number(at_), number(at_), padded_, limits_.capacity);
    } else {
      totals_.sizes.longest_padded = std::max(totals_.sizes.longest_padded, padded_);
    }
  }
  ++totals_.packs;
  ++at_;
}

template <typename Mask>
void PackWalk::mask(const Mask* values, std::size_t count) {
  const std::int64_t begin = token_, stop = begin + static_cast<std::int64_t>(count);
  const MaskSummary seen = summarise(values, stop - begin);
  totals_.trained_tokens += seen.nonzero;
  for (std::int64_t i = begin; !seen.ok && i < stop; ++i) {
    const Mask value = values[i - begin];
    if (!mask_value_ok<Mask>(value)) broken("P7", -1, i, Found<Mask>{value}, 0);
  }
  for (; next_end_ < num_ends_ && ends_[next_end_] <= stop; ++next_end_) {
    const std::int64_t at = ends_[next_end_] - 1;
    if (at >= begin && values[at - begin] != Mask{0}) broken("P6", -1, at, Found<Mask>{values[at - begin]}, 0);
  }
  for (; seen_ < run_packs(); ++seen_) {
    if (passed_over(seen_)) continue;
    const std::int64_t first = token_offsets_[seen_], end = token_offsets_[seen_ + 1];
    if (first >= stop) break;
    if (first >= begin) trained_ = false;
    const std::int64_t from = std::max(first, begin), to = std::min(end, stop);
    // The end of a pack is usually trained on, so checking there first is a well-predicted branch.
    const std::int64_t tail = std::max(from, to - 8);
    trained_ = trained_ || any_nonzero(values + (tail - begin), to - tail) ||
               any_nonzero(values + (from - begin), tail - from);
    if (end > stop) break;
    totals_.masked_packs += !trained_;
  }
  token_ = stop;
}

template void PackWalk::mask(const std::uint8_t*, std::size_t);
template void PackWalk::mask(const float*, std::size_t);

}  // namespace sft_idx
