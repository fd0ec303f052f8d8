// Runs of values, sequences or packs, between bounds in an array: what is told of them, and copies in another order.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sft_idx {

// Run i is values[bounds[i]] to values[bounds[i + 1] - 1]; bounds holds runs + 1 of them. The first two throw
// std::invalid_argument where the bounds descend or leave the array of `size` values.

// How many values of each run are above zero.
template <typename Mask>
void count_positive(const Mask* values, std::size_t size, const std::int64_t* bounds, std::size_t runs,
                    std::int64_t* out);

// A hash of each run's values, by value: the same whatever their type. Not for input that is made to collide.
template <typename Value>
void hash_runs(const Value* values, std::size_t size, const std::int64_t* bounds, std::size_t runs,
               std::uint64_t* out);

// Copies lengths[s] items of source, from starts[s] on, to out, from places[s] on, for each sequence s. Throws
// std::invalid_argument where a sequence lies outside the source or its place outside of out.
void gather_sequences(const void* source, std::size_t source_count, std::size_t item_nbytes,
                      const std::int64_t* starts, const std::int64_t* lengths, const std::int64_t* places,
                      std::size_t sequences, void* out, std::size_t out_count);

}  // namespace sft_idx
