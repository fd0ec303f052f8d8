#include "gather.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace sft_idx {

void gather_sequences(const void* source, std::size_t source_count, std::size_t item_nbytes,
                      const std::int64_t* starts, const std::int64_t* stops, std::size_t sequences,
                      const std::int64_t* order, std::size_t order_count, void* out, std::size_t out_count) {
  const auto* from = static_cast<const char*>(source);
  auto* to = static_cast<char*>(out);
  std::size_t room = out_count;
  for (std::size_t i = 0; i < order_count; ++i) {
    const std::int64_t sequence = order[i];
    if (sequence < 0 || sequence >= static_cast<std::int64_t>(sequences)) {
      throw std::invalid_argument("order[" + std::to_string(i) + "] is " + std::to_string(sequence) + ", there are " +
                                  std::to_string(sequences) + " sequences");
    }
    const std::int64_t start = starts[sequence], stop = stops[sequence];
    if (start < 0 || stop < start || stop > static_cast<std::int64_t>(source_count)) {
      throw std::invalid_argument("sequence " + std::to_string(sequence) + " lies outside the source");
    }
    const auto count = static_cast<std::size_t>(stop - start);
    if (count > room) throw std::invalid_argument("the sequences do not fit the output");
    std::memcpy(to, from + static_cast<std::size_t>(start) * item_nbytes, count * item_nbytes);
    to += count * item_nbytes;
    room -= count;
  }
  if (room != 0) throw std::invalid_argument("the sequences do not fill the output");
}

void absolute_offsets(const std::int64_t* sequence_offsets, const std::int64_t* token_offsets, std::size_t packs,
                      const std::uint32_t* starts, std::size_t starts_count, std::int64_t* out) {
  if (sequence_offsets[0] != 0 || token_offsets[0] != 0) throw std::invalid_argument("offsets begin with 0");
  for (std::size_t pack = 0; pack < packs; ++pack) {
    // Both begin with 0 and every pack before this one ascended, so the differences cannot overflow.
    const std::int64_t begin = sequence_offsets[pack], end = sequence_offsets[pack + 1];
    const auto refuse = [pack](const char* why) {
      throw std::invalid_argument("shard 0, pack " + std::to_string(pack) + ": " + why);
    };
    if (end <= begin || end > static_cast<std::int64_t>(starts_count)) {
      refuse("sequence offsets are not ascending within the shard (rule O1)");
    }
    if (token_offsets[pack + 1] <= token_offsets[pack]) refuse("token offsets are not ascending (rule O2)");
    const std::int64_t length = token_offsets[pack + 1] - token_offsets[pack];
    for (std::int64_t s = begin; s < end; ++s) {
      if (starts[s] >= length || (s == begin ? starts[s] != 0 : starts[s] <= starts[s - 1])) {
        refuse("sequence starts do not ascend from 0 within it (rules P2 to P4)");
      }
      out[s] = token_offsets[pack] + starts[s];
    }
  }
  out[starts_count] = token_offsets[packs];
}

}  // namespace sft_idx
