// Index arrays derived from lengths: the running sums that .idx and .seq.idx store.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sft_idx {

// out[i] = start + scale * (lengths[0] + ... + lengths[i-1]) for i in [0, count]; out holds count + 1 values.
// Throws std::invalid_argument on a negative length or a sum past 2^63 - 1.
// One chunk's last value is the next chunk's start, so an index of any size is built in pieces.
void offsets_from_lengths(const std::int64_t* lengths, std::size_t count, std::int64_t scale, std::int64_t start,
                          std::int64_t* out);

}  // namespace sft_idx
