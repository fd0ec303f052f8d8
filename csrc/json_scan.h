// Where the elements of one big JSON array end, found block by block without parsing them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sft_idx {

// What one block hands to the next. A scan starts behind the array's opening bracket, at depth 1.
struct JsonScanState {
  std::int64_t depth = 1;  // brackets and braces open, the array's own included; 0 once it is closed
  bool in_string = false;
  bool escaped = false;  // the last byte was a backslash inside a string
};

// Appends to separators the positions in block of the commas between elements and, last, of the bracket that
// closes the array; the scan stops there. Brackets are counted, not matched: each element is parsed later, and
// the parser finds what is wrong inside it.
void scan_json_array(const std::uint8_t* block, std::size_t nbytes, JsonScanState& state,
                     std::vector<std::int64_t>& separators);

}  // namespace sft_idx
