// Brings sequences from where they lie in a shard into the order of a packing plan.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sft_idx {

// starts[s] and stops[s] are where sequence s begins and ends in source, in items; order names the sequences wanted.
// Copies them end to end into out. Throws std::invalid_argument where an index or a range lies outside, or where the
// total is not out_count.
void gather_sequences(const void* source, std::size_t source_count, std::size_t item_nbytes,
                      const std::int64_t* starts, const std::int64_t* stops, std::size_t sequences,
                      const std::int64_t* order, std::size_t order_count, void* out, std::size_t out_count);

// Absolute positions of all sequences: out[s] = token_offsets[pack of s] + starts[s], and the token count last.
// sequence_offsets and token_offsets are the CSR arrays of .seq.idx. Throws where they disagree with starts.
void absolute_offsets(const std::int64_t* sequence_offsets, const std::int64_t* token_offsets, std::size_t packs,
                      const std::uint32_t* starts, std::size_t starts_count, std::int64_t* out);

}  // namespace sft_idx
