#include "pack_places.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <stdexcept>

namespace sft_idx {
namespace {

// The first place in [least, stop) for a pack of these starts; stop where there is none.
std::int64_t first_fit(const EndFlags& ends, const std::uint32_t* first, const std::uint32_t* last, std::int64_t least,
                       std::int64_t stop) {
  for (std::int64_t place = least; place < stop; ++place) {
    const std::uint8_t* from = ends.flags + (place - ends.base);
    const void* set = std::memchr(from, 1, static_cast<std::size_t>(stop - place));
    if (!set) break;
    const auto* at = static_cast<const std::uint8_t*>(set);
    place += at - from;
    if (std::all_of(first, last, [at](std::uint32_t start) { return at[start] == 1; })) return place;
  }
  return stop;
}

}  // namespace

Placed first_fits(const EndFlags& ends, const std::uint32_t* starts, std::size_t num_starts,
                  const std::int64_t* offsets, std::size_t packs, std::int64_t least) {
  if (ends.base < 0 || least < ends.base) throw std::invalid_argument("least lies before the flags");
  Placed out;
  for (std::size_t k = 0; k < packs; ++k) {
    if (offsets[k] < 0 || offsets[k] >= offsets[k + 1] || offsets[k + 1] > static_cast<std::int64_t>(num_starts)) {
      throw std::invalid_argument("offsets do not ascend within the starts");
    }
    const std::uint32_t *first = starts + offsets[k], *last = starts + offsets[k + 1];
    if (*first != 0 || std::adjacent_find(first, last, std::greater_equal<>()) != last) {
      throw std::invalid_argument("starts do not ascend from 0");
    }
    const std::int64_t reach = last[-1];
    const std::int64_t stop = std::min(ends.base + static_cast<std::int64_t>(ends.count), ends.tokens) - reach;
    const std::int64_t place = first_fit(ends, first, last, least, stop);
    if (place >= stop) {
      least = std::max(least, stop);
      break;
    }
    out.begins.push_back(place);
    least = place + reach + 1;
  }
  out.least = least;
  return out;
}

}  // namespace sft_idx
