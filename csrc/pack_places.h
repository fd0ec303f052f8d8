// Where packs can stand when only their starts are known: the search of a rebuild that has no index left.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sft_idx {

// Tokens of which it is known where sequences may end: flags[i] is 1 where one may end right before token base + i.
struct EndFlags {
  const std::uint8_t* flags;
  std::size_t count;
  std::int64_t base, tokens;  // of the first flag; in the whole shard
};

struct Placed {
  std::vector<std::int64_t> begins;
  std::int64_t least = 0;  // where the search for the next pack goes on
};

// Puts packs behind one another, each at the first place from `least` on where flags are set at its begin and at all
// its starts, as long as the flags reach. Each pack is longer than its last start, and so the next one begins behind
// that. Pack k has the starts offsets[k] to offsets[k + 1], 0 first. Throws std::invalid_argument where the starts do
// not ascend, or `least` lies before the flags.
Placed first_fits(const EndFlags& ends, const std::uint32_t* starts, std::size_t num_starts,
                  const std::int64_t* offsets, std::size_t packs, std::int64_t least);

}  // namespace sft_idx
