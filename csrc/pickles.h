// Reads pickles without executing them: checks any pickle, and parses the indexes of Modalities' files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sft_idx {

// Returns the position after STOP. Throws std::invalid_argument with the position of the error unless the bytes are a
// pickle of protocol 0 to 5, complete up to STOP, with memo numbers below the number of bytes. Python's unpickler
// allocates a table for the largest memo number, so without this check ten bytes could make it fill 64 GiB.
std::size_t check_pickle(const std::uint8_t* data, std::size_t nbytes);

// Parses a pickled list of pairs of integers of any protocol from 0 to 5, and returns the integers in order. There is
// no stack of objects: nothing is looked up, called or remembered, and memory is at most a few times nbytes for any
// input. Throws std::invalid_argument with the position of any other opcode, shape or size.
std::vector<std::int64_t> parse_pickled_pairs(const std::uint8_t* data, std::size_t nbytes);

}  // namespace sft_idx
