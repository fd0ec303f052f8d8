// A pickle's opcodes, walked without doing what they say.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sft_idx {

// Throws std::invalid_argument, which names the byte, unless the bytes are a pickle of protocol 0 to 5 whose opcodes
// and arguments lie inside them up to STOP, and whose memo numbers are below the count of bytes: Python's unpickler
// makes a table as long as the largest number says, so ten bytes could have it fill 64 GiB. Returns where STOP ends.
std::size_t check_pickle(const std::uint8_t* data, std::size_t nbytes);

}  // namespace sft_idx
