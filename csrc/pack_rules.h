// The rules of packs (P1 to P4, P7, P8) over packs end to end that somebody else wrote.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sft_idx {

template <typename Token, typename Mask>
struct PackColumns {
  const Token* tokens;
  const Mask* mask;
  std::size_t tokens_count;  // also the mask's
  const std::int64_t* starts;
  std::size_t starts_count;
  const std::int64_t* lengths;    // [packs], tokens
  const std::int64_t* sequences;  // [packs], sequences
  std::size_t packs;
};

// Whether every rule is kept and the mask is 0 at every sequence's end, so that the arrays can be used as they are.
// Reads nothing outside them, whatever they hold. Which pack breaks which rule is for the caller to find.
template <typename Token, typename Mask>
bool packs_are_sound(const PackColumns<Token, Mask>& columns, std::int64_t most_tokens);

}  // namespace sft_idx
