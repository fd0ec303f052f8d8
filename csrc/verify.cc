#include "verify.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "mask_values.h"

namespace sft_idx {
namespace {

template <typename Mask>
std::int64_t bits_of(Mask value) {
  std::conditional_t<sizeof(Mask) == 1, std::uint8_t, std::uint32_t> bits;
  static_assert(sizeof bits == sizeof value);
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::int64_t>(bits);
}

}  // namespace

template <typename Id>
BadIds find_bad_ids(const Id* ids, std::size_t count, std::int64_t limit, std::size_t most) {
  BadIds out;
  if (limit < 1) throw std::invalid_argument("limit must be 1 or more");
  const std::int64_t room = std::int64_t{std::numeric_limits<Id>::max()} + 1;
  if (std::is_unsigned_v<Id> && limit >= room) return out;
  const Id largest = static_cast<Id>(std::min(limit, room) - 1);
  using Bits = std::make_unsigned_t<Id>;
  Bits bad = 0;
  for (std::size_t i = 0; i < count; ++i) {
    // A negative id has the highest bit of an unsigned one: one comparison sees both.
    bad = static_cast<Bits>(bad | static_cast<Bits>(static_cast<Bits>(ids[i]) > static_cast<Bits>(largest)));
  }
  if (!bad) return out;
  for (std::size_t i = 0; i < count; ++i) {
    if (static_cast<Bits>(ids[i]) <= static_cast<Bits>(largest)) continue;
    if (out.positions.size() < most) out.positions.push_back(static_cast<std::int64_t>(i));
    ++out.count;
  }
  return out;
}

template BadIds find_bad_ids(const std::uint16_t*, std::size_t, std::int64_t, std::size_t);
template BadIds find_bad_ids(const std::int32_t*, std::size_t, std::int64_t, std::size_t);

PackWalk::PackWalk(const Limits& limits) : limits_(limits) {
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max(), most_count = std::int64_t{1} << 56;
  if (std::min(limits.sequences, limits.tokens) < 0 || std::max(limits.sequences, limits.tokens) > most_count) {
    throw std::invalid_argument("counts are 0 to 2^56");
  }
  if (limits.capacity < 0 || limits.capacity > most || limits.multiple < 1 || limits.multiple > most) {
    throw std::invalid_argument("capacity and multiple are at most " + std::to_string(most));
  }
}

void PackWalk::broken(const char* rule, std::int64_t pack, std::int64_t at, std::int64_t found,
                      std::int64_t expected) {
  if (counts_[rule]++ < static_cast<std::int64_t>(limits_.most)) breaches_.push_back({rule, pack, at, found, expected});
}

void PackWalk::packs(const std::int64_t* token_offsets, const std::int64_t* sequence_offsets, std::size_t count,
                     bool looks_ahead) {
  run_.clear();
  at_ = 0;
  for (std::size_t i = 0; i < count; ++i, ++number_) {
    const Pack pack{number_, token_offsets[i], token_offsets[i + 1], sequence_offsets[i], sequence_offsets[i + 1]};
    if (pack.end <= pack.begin || pack.end > limits_.tokens) {
      broken("O2", number_, number_ + 1, pack.end, pack.end <= pack.begin ? pack.begin : limits_.tokens);
    }
    if (pack.last <= pack.first || pack.last > limits_.sequences) {
      broken("O1", number_, number_ + 1, pack.last, pack.last <= pack.first ? pack.first : limits_.sequences);
    }
    // The next pack has to end later, or it is this one that ends too late.
    const bool more = looks_ahead || i + 1 < count;
    const std::int64_t before = more ? token_offsets[i + 2] : limits_.tokens + 1;
    const std::int64_t before_sequence = more ? sequence_offsets[i + 2] : limits_.sequences + 1;
    if (pack.begin < last_end_ || pack.end <= pack.begin || pack.end >= before || pack.end > limits_.tokens) continue;
    if (pack.first < last_sequence_ || pack.last <= pack.first || pack.last >= before_sequence ||
        pack.last > limits_.sequences) {
      continue;
    }
    const std::int64_t length = pack.end - pack.begin;
    if (length > limits_.capacity) broken("P1", number_, number_, length, limits_.capacity);
    totals_.longest_pack = std::max(totals_.longest_pack, length);
    totals_.most_sequences = std::max(totals_.most_sequences, pack.last - pack.first);
    last_end_ = pack.end;
    last_sequence_ = pack.last;
    run_.push_back(pack);
  }
}

std::int64_t PackWalk::wanted_sequences() const { return run_.empty() ? sequence_ : run_.back().last; }

void PackWalk::starts(const std::uint32_t* values, std::size_t count) {
  // Those that mask() has seen make room for the new ones.
  ends_.erase(ends_.begin(), std::upper_bound(ends_.begin(), ends_.end(), token_));
  spans_.erase(spans_.begin(), first_span());
  for (std::size_t i = 0; i < count; ++i, ++sequence_) {
    if (at_ == run_.size()) continue;
    const Pack& pack = run_[at_];
    if (sequence_ < pack.first) continue;  // of a pack that was passed over
    start(pack, values[i]);
    if (sequence_ + 1 == pack.last) end_pack(pack);
  }
}

std::vector<PackWalk::Span>::const_iterator PackWalk::first_span() const {
  return std::partition_point(spans_.begin(), spans_.end(), [this](const Span& s) { return s.end <= token_; });
}

void PackWalk::start(const Pack& pack, std::int64_t value) {
  const std::int64_t length = pack.end - pack.begin;
  const bool first = sequence_ == pack.first, inside = value < length;
  if (first) {
    spans_.push_back({pack.begin, pack.end});
    open_ = padded_ = 0;
    sound_ = true;
    // Most packs have room for the most that rounding up can add, and need not be divided up.
    std::int64_t most = 0;
    const bool much = __builtin_mul_overflow(pack.last - pack.first, limits_.multiple - 1, &most);
    tight_ = much || most > limits_.capacity - length;
  }
  if (first && value != 0) broken("P2", pack.number, sequence_, value, 0);
  if (!first && value <= open_) broken("P3", pack.number, sequence_, value, open_ + 1);
  if (!inside) broken("P4", pack.number, sequence_, value, length - 1);
  if (first ? value != 0 : value <= open_) sound_ = false;
  sound_ = sound_ && inside;
  if (!first && value > open_ && inside) end_sequence(pack, value);
}

void PackWalk::end_sequence(const Pack& pack, std::int64_t end) {
  constexpr std::int64_t huge = std::int64_t{1} << 62;  // far beyond any capacity, and one more still fits 63 bits
  if (tight_ && padded_ < huge) {
    padded_ += (end - open_ + limits_.multiple - 1) / limits_.multiple * limits_.multiple;
  }
  open_ = end;
  known_ = pack.begin + end;
  ends_.push_back(known_);
}

void PackWalk::end_pack(const Pack& pack) {
  const std::int64_t length = pack.end - pack.begin;
  end_sequence(pack, length);
  if (sound_ && length <= limits_.capacity && padded_ > limits_.capacity) {
    broken("P5", pack.number, pack.number, padded_, limits_.capacity);
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
    if (!mask_value_ok<Mask>(value)) broken("P7", -1, i, bits_of(value), 0);
  }
  for (auto end = std::upper_bound(ends_.begin(), ends_.end(), begin); end != ends_.end() && *end <= stop; ++end) {
    const Mask value = values[*end - 1 - begin];
    if (value != Mask{0}) broken("P6", -1, *end - 1, bits_of(value), 0);
  }
  for (auto span = first_span(); span != spans_.end() && span->begin < stop; ++span) {
    if (span->begin >= begin) trained_ = false;
    const std::int64_t from = std::max(span->begin, begin), to = std::min(span->end, stop);
    trained_ = trained_ || any_nonzero(values + (from - begin), to - from);
    if (span->end <= stop) totals_.masked_packs += !trained_;
  }
  token_ = stop;
}

template void PackWalk::mask(const std::uint8_t*, std::size_t);
template void PackWalk::mask(const float*, std::size_t);

}  // namespace sft_idx
