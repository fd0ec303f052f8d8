// Finds the ends of the elements of one big JSON array, block by block, without parsing them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sft_idx {

// State between two blocks. A scan starts after the opening bracket of the array, at depth 1.
struct JsonScanState {
  std::int64_t depth = 1;  // number of open brackets and braces, including the array; 0 once it is closed
  bool in_string = false;
  bool escaped = false;  // the last byte was a backslash inside a string
};

// Appends to separators the positions in block of the commas between elements and finally of the bracket that
// closes the array, where the scan stops. Brackets are counted, not matched, because each element is parsed later and
// the parser finds errors inside it.
void scan_json_array(const std::uint8_t* block, std::size_t nbytes, JsonScanState& state,
                     std::vector<std::int64_t>& separators);

}  // namespace sft_idx
