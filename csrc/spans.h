// Character spans of a text become weights of the tokens that spell it, for tokenizers whose tokens are byte strings.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sft_idx {

// What each token id stands for: token i is bytes [offsets[i], offsets[i + 1]). A token that is empty or outside
// [0, size) spells nothing and makes its row "not spelled": a table of a whole vocabulary is not checked up front.
struct TokenBytes {
  const std::uint8_t* bytes;
  std::int64_t size;
  const std::int64_t* offsets;
  std::size_t count;
};

// Rows end to end: row r has ids [id_offsets[r], id_offsets[r + 1]) and UTF-8 text [text_offsets[r], text_offsets[r + 1]).
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

// A token gets the largest weight among the spans of which it holds a byte, 0 where there is none.
//
// spelled[r] says whether the row's tokens, end to end, are exactly its text. Where they are not, byte positions mean
// nothing: the row's weights are 0 and the caller must find another way. straddling[r] counts the weighted spans
// whose first token began before them.
//
// weights holds one value an id, spelled and straddling one a row. Throws std::invalid_argument on spans that
// descend, overlap, or end past the text (the texts must be valid UTF-8).
void weigh_tokens(const TokenizedTexts& texts, const TokenBytes& tokens, const CharacterSpans& spans,
                  float* weights, std::int64_t* straddling, std::uint8_t* spelled);

}  // namespace sft_idx
