// What a loss mask may hold, and how much of it is trained on (rule P7): loops that compilers turn into vector code.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace sft_idx {

// What a mask value may be on its way to Out.
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
    std::make_unsigned_t<In> bits = 0;  // all values are 0 or 1 exactly when the or of their bits is
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
  // In runs that a counter as narrow as the values can hold, so that compilers keep it in a vector's lanes.
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

}  // namespace sft_idx
