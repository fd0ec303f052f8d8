// Checks the values of loss masks (rule P7) and counts trained tokens, in loops that compilers vectorize.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace sft_idx {

// Whether a mask value can be stored as Out.
template <typename Out, typename In>
bool mask_value_ok(In value) {
  if constexpr (std::is_same_v<Out, std::uint8_t>) {
    return (value == In{0}) | (value == In{1});
  } else if constexpr (std::is_floating_point_v<In>) {
    return (value >= In{0}) & (value <= static_cast<In>(std::numeric_limits<float>::max()));  // false for NaN
  } else {
    return value >= In{0};
  }
}

template <typename Out, typename In>
bool mask_ok(const In* mask, std::size_t count) {
  if constexpr (std::is_same_v<Out, std::uint8_t> && std::is_integral_v<In>) {
    std::make_unsigned_t<In> bits = 0;  // all values are 0 or 1 if and only if the OR of their bits is
    for (std::size_t i = 0; i < count; ++i) {
      bits = static_cast<std::make_unsigned_t<In>>(bits | static_cast<std::make_unsigned_t<In>>(mask[i]));
    }
    return bits <= 1;
  } else {
    bool all_ok = true;
    for (std::size_t i = 0; i < count; ++i) all_ok &= mask_value_ok<Out>(mask[i]);
    return all_ok;
  }
}

template <typename T>
std::int64_t count_nonzero(const T* values, std::int64_t count) {
  // Count in runs that fit a counter as narrow as the values, so that compilers keep it in the lanes of a vector.
  using Counter = std::conditional_t<sizeof(T) == 1, std::uint8_t, std::uint32_t>;
  constexpr std::int64_t run = std::numeric_limits<std::uint8_t>::max();
  std::int64_t total = 0;
  for (std::int64_t start = 0; start < count; start += run) {
    Counter nonzero = 0;
    const std::int64_t stop = std::min(start + run, count);
    for (std::int64_t i = start; i < stop; ++i) nonzero = static_cast<Counter>(nonzero + (values[i] != T{0}));
    total += nonzero;
  }
  return total;
}

// Whether any token is trained on. Reads eight bytes at a time and stops at the first trained token.
template <typename T>
bool any_nonzero(const T* values, std::int64_t count) {
  constexpr std::int64_t step = 8 / sizeof(T);
  // Ignore the sign bits of floats, because of negative zero.
  constexpr std::uint64_t magnitude = std::is_floating_point_v<T> ? 0x7fffffff7fffffff : ~std::uint64_t{0};
  std::int64_t i = 0;
  for (; count - i >= step; i += step) {
    std::uint64_t word;
    std::memcpy(&word, values + i, sizeof word);
    if (word & magnitude) return true;
  }
  for (; i < count; ++i) {
    if (values[i] != T{0}) return true;
  }
  return false;
}

// Check and count in one pass over stored masks.
struct MaskSummary {
  std::int64_t nonzero;
  bool ok;
};

inline MaskSummary summarise(const std::uint8_t* mask, std::int64_t count) {
  // One counter for each lane of a vector, emptied before it overflows. If all values are 0 or 1, which follows from
  // the OR of their bits, their sum is the number of ones.
  constexpr std::int64_t lanes = 32, rows = std::numeric_limits<std::uint8_t>::max();
  std::int64_t total = 0, i = 0;
  std::uint8_t bits = 0;
  while (count - i >= lanes) {
    std::uint8_t sums[lanes] = {}, seen[lanes] = {};
    for (std::int64_t row = 0; row < rows && count - i >= lanes; ++row, i += lanes) {
      for (std::int64_t lane = 0; lane < lanes; ++lane) {
        sums[lane] = static_cast<std::uint8_t>(sums[lane] + mask[i + lane]);
        seen[lane] = static_cast<std::uint8_t>(seen[lane] | mask[i + lane]);
      }
    }
    for (std::int64_t lane = 0; lane < lanes; ++lane) {
      total += sums[lane];
      bits = static_cast<std::uint8_t>(bits | seen[lane]);
    }
  }
  for (; i < count; ++i) {
    total += mask[i];
    bits = static_cast<std::uint8_t>(bits | mask[i]);
  }
  return bits <= 1 ? MaskSummary{total, true} : MaskSummary{count_nonzero(mask, count), false};
}

inline MaskSummary summarise(const float* mask, std::int64_t count) {
  // The bits of finite floats of at least 0 ascend with their value. So one subtraction and the highest bits identify
  // all other values, including negative zero.
  constexpr std::uint32_t largest = 0x7f7fffff;
  constexpr std::int64_t run = 1 << 16;
  std::int64_t total = 0;
  std::uint32_t outside = 0;
  for (std::int64_t start = 0; start < count; start += run) {
    const std::int64_t stop = std::min(start + run, count);
    std::uint32_t nonzero = 0;
    for (std::int64_t i = start; i < stop; ++i) {
      std::uint32_t bits;
      std::memcpy(&bits, mask + i, sizeof bits);
      outside |= bits | (largest - bits);
      nonzero += bits != 0;
    }
    total += nonzero;
  }
  if (outside >> 31 == 0) return {total, true};
  return {count_nonzero(mask, count), mask_ok<float>(mask, static_cast<std::size_t>(count))};
}

}  // namespace sft_idx
