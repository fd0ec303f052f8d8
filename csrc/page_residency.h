// How much of a mapped file is in the page cache.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sft_idx {

// Bytes of data, which begins where a map does, that lie in memory, in whole pages; no page is brought in by asking.
// Linux tells only the owner of a file and those who may write to it: for others every page counts. Throws
// std::invalid_argument where data does not begin with a page, or lies outside all maps.
std::int64_t resident_nbytes(const void* data, std::size_t nbytes);

}  // namespace sft_idx
