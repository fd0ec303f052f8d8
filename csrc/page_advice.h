// Pages of mapped files: what the kernel is told of those that will be read, and how many it has in memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sft_idx {

// Asks for bytes [starts[i], stops[i]) * item_nbytes of data, rounded out to whole pages, to be read in the
// background; of memory that is no map, nothing changes. Ranges whose pages touch are asked for together. Returns the number of requests that were accepted.
// Throws std::invalid_argument where a range does not lie within count items.
std::int64_t advise_will_need(const void* data, std::size_t count, std::size_t item_nbytes, const std::int64_t* starts,
                              const std::int64_t* stops, std::size_t ranges);

// Bytes of data, which begins where a map does, that lie in memory, in whole pages; no page is brought in by asking.
// Linux tells only the owner of a file and those who may write to it: for others every page counts. Throws
// std::invalid_argument where data does not begin with a page, or lies outside all maps.
std::int64_t resident_nbytes(const void* data, std::size_t nbytes);

}  // namespace sft_idx
