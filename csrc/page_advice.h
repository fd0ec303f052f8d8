// Pages of mapped files: asks the kernel to read pages in advance, and counts the pages in memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sft_idx {

// Requests that bytes [starts[i], stops[i]) * item_nbytes of data, rounded out to whole pages, are read in the
// background. Has no effect on memory that is not mapped. Ranges with adjacent pages are requested together. Returns
// the number of accepted requests. Throws std::invalid_argument if a range exceeds count items.
std::int64_t advise_will_need(const void* data, std::size_t count, std::size_t item_nbytes, const std::int64_t* starts,
                              const std::int64_t* stops, std::size_t ranges);

// Number of bytes of data in memory, in whole pages. Data must begin at the start of a map. Loads no pages.
// Linux only answers the owner of a file and users with write access; for others, every page counts as in memory.
// Throws std::invalid_argument if data does not begin at a page, or is not mapped.
std::int64_t resident_nbytes(const void* data, std::size_t nbytes);

}  // namespace sft_idx
