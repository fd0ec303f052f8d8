// Runs of values, sequences or packs between bounds in an array: counts, hashes, and copies in another order.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sft_idx {

// Run i is values[bounds[i]] to values[bounds[i + 1] - 1]; there are runs + 1 bounds. The first two functions throw
// std::invalid_argument if the bounds descend or exceed the array of `size` values.

// Count the values above zero in each run.
template <typename Mask>
void count_positive(const Mask* values, std::size_t size, const std::int64_t* bounds, std::size_t runs,
                    std::int64_t* out);

// Hash the values of each run, independently of their dtype. Not safe against inputs designed to collide.
template <typename Value>
void hash_runs(const Value* values, std::size_t size, const std::int64_t* bounds, std::size_t runs,
               std::uint64_t* out);

// For each sequence s, copies lengths[s] items from source[starts[s]] on to out[places[s]] on. Throws
// std::invalid_argument if a sequence is outside the source, or its place outside of out.
void gather_sequences(const void* source, std::size_t source_count, std::size_t item_nbytes,
                      const std::int64_t* starts, const std::int64_t* lengths, const std::int64_t* places,
                      std::size_t sequences, void* out, std::size_t out_count);

}  // namespace sft_idx
