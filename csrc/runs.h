// What is told of runs of values: sequences, or packs, between bounds in an array.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sft_idx {

// Run i is values[bounds[i]] to values[bounds[i + 1] - 1]; bounds holds runs + 1 of them. All of these throw
// std::invalid_argument where the bounds descend or leave the array of `size` values.

// How many values of each run are above zero.
template <typename Mask>
void count_positive(const Mask* values, std::size_t size, const std::int64_t* bounds, std::size_t runs,
                    std::int64_t* out);

// A hash of each run's values, by value: the same whatever their type. Not for input that is made to collide.
template <typename Value>
void hash_runs(const Value* values, std::size_t size, const std::int64_t* bounds, std::size_t runs,
               std::uint64_t* out);

}  // namespace sft_idx
