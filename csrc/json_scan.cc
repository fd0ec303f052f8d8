#include "json_scan.h"

namespace sft_idx {

void scan_json_array(const std::uint8_t* block, std::size_t nbytes, JsonScanState& state,
                     std::vector<std::int64_t>& separators) {
  std::size_t i = 0;
  while (i < nbytes && state.depth > 0) {
    if (state.in_string) {
      if (state.escaped) {
        state.escaped = false;
        ++i;
      }
      while (i < nbytes && block[i] != '"' && block[i] != '\\') ++i;
      if (i == nbytes) return;
      if (block[i] == '"') {
        state.in_string = false;
      } else {
        state.escaped = true;
      }
      ++i;
      continue;
    }
    switch (block[i]) {
      case '"':
        state.in_string = true;
        break;
      case '[':
      case '{':
        ++state.depth;
        break;
      case ']':
      case '}':
        if (--state.depth == 0) separators.push_back(static_cast<std::int64_t>(i));
        break;
      case ',':
        if (state.depth == 1) separators.push_back(static_cast<std::int64_t>(i));
        break;
      default:
        break;
    }
    ++i;
  }
}

}  // namespace sft_idx
