#include "spans.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace sft_idx {
namespace {

// A position in UTF-8 text with its character number. It only moves forward.
class Cursor {
 public:
  Cursor(const std::uint8_t* text, std::int64_t size) : text_(text), size_(size) {}

  // Returns the first byte of character `target`; size for one past the last character, -1 for any later one.
  std::int64_t seek(std::int64_t target) {
    while (character_ < target) {
      // Eight ASCII bytes at a time, because most bytes of chats are ASCII, even in languages with other letters.
      std::uint64_t eight = 0;
      if (target - character_ >= 8 && size_ - byte_ >= 8) {
        std::memcpy(&eight, text_ + byte_, 8);
        if ((eight & 0x8080808080808080u) == 0) {
          byte_ += 8;
          character_ += 8;
          continue;
        }
      }
      if (byte_ >= size_) return -1;
      do {
        ++byte_;
      } while (byte_ < size_ && (text_[byte_] & 0xC0) == 0x80);
      ++character_;
    }
    return byte_;
  }

 private:
  const std::uint8_t* text_;
  std::int64_t size_;
  std::int64_t byte_ = 0;
  std::int64_t character_ = 0;
};

// Fills ends[i] with the byte after token i. Returns false if the tokens do not spell the text.
bool spell(const std::uint32_t* ids, std::size_t count, const std::uint8_t* text, std::int64_t size,
           const TokenBytes& tokens, std::vector<std::int64_t>& ends) {
  ends.resize(count);
  std::int64_t position = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (ids[i] >= tokens.count) return false;
    const std::int64_t begin = tokens.offsets[ids[i]];
    const std::int64_t end = tokens.offsets[ids[i] + 1];
    const std::int64_t length = end - begin;
    if (begin < 0 || end > tokens.size || length <= 0 || length > size - position) return false;
    if (std::memcmp(text + position, tokens.bytes + begin, static_cast<std::size_t>(length)) != 0) return false;
    position += length;
    ends[i] = position;
  }
  return position == size;
}

[[noreturn]] void refuse(std::size_t row, std::int64_t start, std::int64_t stop, const char* why) {
  throw std::invalid_argument("row " + std::to_string(row) + ": span [" + std::to_string(start) + ", " +
                              std::to_string(stop) + ") " + why);
}

}  // namespace

void weigh_tokens(const TokenizedTexts& texts, const TokenBytes& tokens, const CharacterSpans& spans,
                  float* weights, std::int64_t* straddling, std::uint8_t* spelled) {
  std::vector<std::int64_t> ends;
  for (std::size_t row = 0; row < texts.rows; ++row) {
    const std::int64_t first_id = texts.id_offsets[row];
    const auto count = static_cast<std::size_t>(texts.id_offsets[row + 1] - first_id);
    const std::uint8_t* text = texts.text + texts.text_offsets[row];
    const std::int64_t size = texts.text_offsets[row + 1] - texts.text_offsets[row];
    float* row_weights = weights + first_id;
    std::fill_n(row_weights, count, 0.0f);
    straddling[row] = 0;
    spelled[row] = spell(texts.ids + first_id, count, text, size, tokens, ends);

    Cursor cursor(text, size);
    std::size_t token = 0;
    std::int64_t previous = 0;
    for (std::int64_t s = spans.offsets[row]; s < spans.offsets[row + 1]; ++s) {
      const std::int64_t start = spans.edges[2 * s];
      const std::int64_t stop = spans.edges[2 * s + 1];
      if (start < previous || stop < start) refuse(row, start, stop, "descends or overlaps the previous span");
      previous = stop;
      const std::int64_t begin_byte = cursor.seek(start);
      const std::int64_t end_byte = cursor.seek(stop);
      if (begin_byte < 0 || end_byte < 0) refuse(row, start, stop, "ends after the text");
      if (stop == start || !spelled[row]) continue;
      while (ends[token] <= begin_byte) ++token;
      if (spans.weights[s] != 0.0f && (token ? ends[token - 1] : 0) < begin_byte) ++straddling[row];
      for (std::size_t t = token; t < count && (t ? ends[t - 1] : 0) < end_byte; ++t) {
        row_weights[t] = std::max(row_weights[t], spans.weights[s]);
      }
    }
  }
}

}  // namespace sft_idx
