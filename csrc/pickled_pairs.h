// A pickle that may hold one list of pairs of integers and nothing else: the indexes of Modalities' files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sft_idx {

// The pairs end to end. Reads what any pickle protocol, 0 to 5, makes of such a list, without a stack of objects:
// nothing is looked up, called or remembered, and memory is at most a few times nbytes whatever the bytes say.
// Throws std::invalid_argument, which names the byte, for every other opcode, shape and size.
std::vector<std::int64_t> parse_pickled_pairs(const std::uint8_t* data, std::size_t nbytes);

}  // namespace sft_idx
