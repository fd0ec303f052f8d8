// First fit over sequences in random order, as NeMo's packing script does it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sft_idx::packing {

// Each sequence, in an order shuffled by seed, goes into the first pack opened that still holds it. Sizes are not
// grouped here, as their order is what this method is about: n log(packs). Returns the offsets [packs + 1] and fills
// sequences [count]; the packs come in an order shuffled by seed.
std::vector<std::int64_t> first_fit_shuffle(const std::int64_t* lengths, std::size_t count, std::int64_t capacity,
                                            std::int64_t multiple, std::int64_t most, std::uint64_t seed,
                                            std::int64_t* sequences);

// Sequences in order; a new pack starts where the next one does not fit. Returns the offsets [packs + 1].
std::vector<std::int64_t> sequential(const std::int64_t* lengths, std::size_t count, std::int64_t capacity,
                                     std::int64_t multiple, std::int64_t most);

}  // namespace sft_idx::packing
