#include "packing/size_set.h"

#include <algorithm>

namespace sft_idx::packing {
namespace {

void flip(std::vector<std::uint64_t>& bits, std::int64_t at) {
  bits[static_cast<std::size_t>(at) / 64] ^= 1ULL << (at % 64);
}

}  // namespace

SizeSet::SizeSet(const std::vector<std::int64_t>& sizes, std::int64_t capacity)
    : sizes_(sizes),
      capacity_(capacity),
      dense_(capacity <= 1024 || static_cast<std::uint64_t>(capacity) / 32 <= sizes.size()),
      present_(sizes.size() / 64 + 1, 0) {
  if (dense_) {
    const auto words = static_cast<std::size_t>(capacity) / 64 + 1;
    bits_.assign(words, 0);
    mirror_.assign(words + 2, 0);  // read past the end by a shifted word
    ranks_.resize(static_cast<std::size_t>(capacity) + 1);
    std::int32_t rank = 0;
    for (std::int64_t size = 0; size <= capacity; ++size) {
      const auto c = static_cast<std::size_t>(rank);
      if (c < sizes.size() && sizes[c] == size) ++rank;
      ranks_[static_cast<std::size_t>(size)] = rank;
    }
  }
  for (std::size_t c = 0; c < sizes.size(); ++c) insert(static_cast<std::int32_t>(c));
}

void SizeSet::insert(std::int32_t size_class) {
  if (has(static_cast<std::size_t>(size_class))) return;
  flip(present_, size_class);
  if (!dense_) return;
  const std::int64_t size = sizes_[static_cast<std::size_t>(size_class)];
  flip(bits_, size);
  flip(mirror_, capacity_ - size);
}

void SizeSet::erase(std::int32_t size_class) {
  if (!has(static_cast<std::size_t>(size_class))) return;
  flip(present_, size_class);
  if (!dense_) return;
  const std::int64_t size = sizes_[static_cast<std::size_t>(size_class)];
  flip(bits_, size);
  flip(mirror_, capacity_ - size);
}

std::int32_t SizeSet::rank(std::int64_t size) const {
  if (size <= 0) return 0;
  size = std::min(size, capacity_);
  if (dense_) return ranks_[static_cast<std::size_t>(size)];
  return static_cast<std::int32_t>(std::upper_bound(sizes_.begin(), sizes_.end(), size) - sizes_.begin());
}

std::int32_t SizeSet::at_most(std::int64_t size) const {
  const auto below = static_cast<std::size_t>(rank(size));
  std::size_t word = below / 64;
  std::uint64_t bits = present_[word] & ((1ULL << (below % 64)) - 1);
  for (++steps_; bits == 0; ++steps_, bits = present_[--word]) {
    if (word == 0) return -1;
  }
  return static_cast<std::int32_t>(word * 64 + 63 - static_cast<std::size_t>(__builtin_clzll(bits)));
}

std::int32_t SizeSet::exactly(std::int64_t size) const {
  const std::int32_t c = rank(size) - 1;
  if (c < 0 || sizes_[static_cast<std::size_t>(c)] != size) return -1;
  return has(static_cast<std::size_t>(c)) ? c : -1;
}

std::int32_t SizeSet::pair(std::int64_t sum, std::int64_t from) const {
  from = std::max<std::int64_t>(from, std::max<std::int64_t>(1, sum - capacity_));
  return dense_ ? pair_dense(sum, from) : pair_sparse(sum, from);
}

std::uint64_t SizeSet::mirrored(std::int64_t bit) const {
  // `bit` can be up to 63 bits before the image, where no bit is set.
  if (bit < 0) return mirror_[0] << -bit;
  const auto word = static_cast<std::size_t>(bit) / 64;
  const auto shift = static_cast<unsigned>(bit % 64);
  return shift == 0 ? mirror_[word] : mirror_[word] >> shift | mirror_[word + 1] << (64 - shift);
}

std::int32_t SizeSet::pair_dense(std::int64_t sum, std::int64_t from) const {
  // sum - a is mirrored to bit capacity - sum + a.
  const std::int64_t last = sum / 2;
  for (std::int64_t start = from / 64 * 64; start <= last; start += 64) {
    ++steps_;
    std::uint64_t hits = bits_[static_cast<std::size_t>(start) / 64] & mirrored(capacity_ - sum + start);
    if (start < from) hits &= ~0ULL << (from - start);
    if (hits == 0) continue;
    const std::int64_t a = start + __builtin_ctzll(hits);
    return a <= last ? rank(a) - 1 : -1;
  }
  return -1;
}

std::int32_t SizeSet::pair_sparse(std::int64_t sum, std::int64_t from) const {
  std::int32_t high = rank(sum - from);
  for (auto low = static_cast<std::size_t>(rank(from - 1)); low < sizes_.size() && sizes_[low] * 2 <= sum; ++low) {
    for (++steps_; high > 0 && sizes_[static_cast<std::size_t>(high) - 1] > sum - sizes_[low]; ++steps_) --high;
    if (high == 0) return -1;
    const auto top = static_cast<std::size_t>(high) - 1;
    if (sizes_[top] == sum - sizes_[low] && has(low) && has(top)) {
      return static_cast<std::int32_t>(low);
    }
  }
  return -1;
}

}  // namespace sft_idx::packing
