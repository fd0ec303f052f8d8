// Pickles that are read without doing what they say: any, and those of the indexes of Modalities' files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sft_idx {

// Throws std::invalid_argument, which names the byte, unless the bytes are a pickle of protocol 0 to 5 whose opcodes
// and arguments lie inside them up to STOP, and whose memo numbers are below the count of bytes: Python's unpickler
// makes a table as long as the largest number says, so ten bytes could have it fill 64 GiB. Returns where STOP ends.
std::size_t check_pickle(const std::uint8_t* data, std::size_t nbytes);

// The pairs of a list of pairs of integers, end to end. Reads what any pickle protocol, 0 to 5, makes of one, without
// a stack of objects: nothing is looked up, called or remembered, and memory is at most a few times nbytes whatever
// the bytes say.
// Throws std::invalid_argument, which names the byte, for every other opcode, shape and size.
std::vector<std::int64_t> parse_pickled_pairs(const std::uint8_t* data, std::size_t nbytes);

}  // namespace sft_idx
