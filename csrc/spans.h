// Converts weights of character spans of a text to weights of its tokens, for tokenizers whose tokens are byte strings.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sft_idx {

// The bytes of each token id: token i is bytes [offsets[i], offsets[i + 1]). A row with a token that is empty or
// outside [0, size) counts as "not spelled". The table of a whole vocabulary is not checked in advance.
struct TokenBytes {
  const std::uint8_t* bytes;
  std::int64_t size;
  const std::int64_t* offsets;
  std::size_t count;
};

// Rows one after another: row r has ids [id_offsets[r], id_offsets[r + 1]) and UTF-8 text [text_offsets[r],
// text_offsets[r + 1]).
struct TokenizedTexts {
  const std::uint32_t* ids;
  const std::int64_t* id_offsets;
  const std::uint8_t* text;
  const std::int64_t* text_offsets;
  std::size_t rows;
};

// Row r has spans [offsets[r], offsets[r + 1]); span s is characters [edges[2s], edges[2s + 1]) with weights[s].
struct CharacterSpans {
  const std::int64_t* offsets;
  const std::int64_t* edges;
  const float* weights;
};

// A token gets the largest weight of the spans that contain one of its bytes, or 0 if there is none.
//
// spelled[r] is whether the concatenated tokens of the row are exactly its text. If not, byte positions are not valid,
// so the weights of the row are 0, and the caller must use another method. straddling[r] counts the weighted spans
// with a first token that begins before the span.
//
// weights has one value per id; spelled and straddling have one value per row. Throws std::invalid_argument if spans
// descend, overlap, or end after the text. The texts must be valid UTF-8.
void weigh_tokens(const TokenizedTexts& texts, const TokenBytes& tokens, const CharacterSpans& spans,
                  float* weights, std::int64_t* straddling, std::uint8_t* spelled);

}  // namespace sft_idx
