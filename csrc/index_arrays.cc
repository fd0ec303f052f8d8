#include "index_arrays.h"

#include <stdexcept>
#include <string>

namespace sft_idx {

void offsets_from_lengths(const std::int64_t* lengths, std::size_t count, std::int64_t scale, std::int64_t start,
                          std::int64_t* out) {
  std::int64_t sum = start;
  out[0] = sum;
  for (std::size_t i = 0; i < count; ++i) {
    std::int64_t bytes = 0;
    if (lengths[i] < 0) {
      throw std::invalid_argument("lengths[" + std::to_string(i) + "] is " + std::to_string(lengths[i]) +
                                  ", lengths are never negative");
    }
    if (__builtin_mul_overflow(lengths[i], scale, &bytes) || __builtin_add_overflow(sum, bytes, &sum)) {
      throw std::invalid_argument("the offset after lengths[" + std::to_string(i) + "] does not fit 63 bits");
    }
    out[i + 1] = sum;
  }
}

}  // namespace sft_idx
