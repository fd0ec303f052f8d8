// From plans to packs: which sequence goes where.
#pragma once

#include <cstddef>
#include <cstdint>

#include "packing/patterns.h"

namespace sft_idx::packing {

// Fills offsets [packs + 1] and sequences [count], CSR: pack p holds sequences[offsets[p] .. offsets[p + 1]).
// Sequences of one class are dealt in an order shuffled by seed, and the packs are in an order shuffled by seed.
// The patterns must use each class of the lengths exactly as often as it occurs, else std::invalid_argument.
void hand_out(const std::int64_t* lengths, std::size_t count, std::int64_t multiple,
              const std::vector<std::int64_t>& sizes, const Patterns& patterns, std::uint64_t seed,
              std::int64_t* offsets, std::int64_t* sequences);

}  // namespace sft_idx::packing
