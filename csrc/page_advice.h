// Tells the kernel how mapped files will be read. Advice only: where memory is no map, nothing changes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sft_idx {

// Asks for bytes [starts[i], stops[i]) * item_nbytes of data, rounded out to whole pages, to be read in the
// background. Ranges whose pages touch are asked for together. Returns the number of requests that were accepted.
// Throws std::invalid_argument where a range does not lie within count items.
std::int64_t advise_will_need(const void* data, std::size_t count, std::size_t item_nbytes, const std::int64_t* starts,
                              const std::int64_t* stops, std::size_t ranges);

}  // namespace sft_idx
