#include "pack_rules.h"

#include <type_traits>

#include "mask_values.h"

namespace sft_idx {
namespace {

template <typename Token>
bool ids_ok(const Token* tokens, std::size_t count) {
  if constexpr (std::is_unsigned_v<Token>) return true;
  Token bits = 0;  // negative exactly when one of the ids is
  for (std::size_t i = 0; i < count; ++i) bits = static_cast<Token>(bits | tokens[i]);
  return bits >= 0;
}

// A pack whose length and number of starts are known to be within the arrays.
template <typename Mask>
bool sequences_ok(const Mask* mask, std::int64_t length, const std::int64_t* starts, std::int64_t count) {
  if (starts[0] != 0) return false;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t stop = i + 1 < count ? starts[i + 1] : length;
    if (stop <= starts[i] || stop > length || mask[stop - 1] != Mask{0}) return false;
  }
  return true;
}

}  // namespace

template <typename Token, typename Mask>
bool packs_are_sound(const PackColumns<Token, Mask>& columns, std::int64_t most_tokens) {
  std::size_t token = 0, start = 0;
  for (std::size_t p = 0; p < columns.packs; ++p) {
    const std::int64_t length = columns.lengths[p], count = columns.sequences[p];
    if (length < 1 || length > most_tokens || static_cast<std::size_t>(length) > columns.tokens_count - token) {
      return false;
    }
    if (count < 1 || static_cast<std::size_t>(count) > columns.starts_count - start) return false;
    if (!sequences_ok(columns.mask + token, length, columns.starts + start, count)) return false;
    token += static_cast<std::size_t>(length);
    start += static_cast<std::size_t>(count);
  }
  return token == columns.tokens_count && start == columns.starts_count &&
         ids_ok(columns.tokens, columns.tokens_count) && mask_ok<Mask>(columns.mask, columns.tokens_count);
}

template bool packs_are_sound(const PackColumns<std::uint16_t, std::uint8_t>&, std::int64_t);
template bool packs_are_sound(const PackColumns<std::uint16_t, float>&, std::int64_t);
template bool packs_are_sound(const PackColumns<std::int32_t, std::uint8_t>&, std::int64_t);
template bool packs_are_sound(const PackColumns<std::int32_t, float>&, std::int64_t);

}  // namespace sft_idx
