// The rules of packs (FORMAT.md, P1 to P9). This is their only implementation: it checks packs that are written, and
// verification uses parts of it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>

namespace sft_idx {

// A broken rule. For packs that are written, `at` is a sequence (P2 to P4), 0 (P1, P5) or a token (P6 to P9) of the
// pack; PackWalk counts from the beginning of the shard. `expected` is the maximum or, for a start (P2, P3), the
// minimum that is allowed.
struct Breach {
  const char* rule;
  std::int64_t pack, at;
  std::variant<std::int64_t, double> found;  // a weight is a double
  std::int64_t expected;
};

enum class TokenType { u16, i32, i64 };
enum class MaskType { u8, i64, f32, f64 };

// Packs from a caller, one after another. starts are positions in their pack.
struct PackInput {
  const void* tokens;
  TokenType token_type;
  const void* mask;
  MaskType mask_type;
  std::size_t tokens_count;  // also the mask's
  const std::int64_t* starts;
  std::size_t starts_count;
  const std::int64_t* lengths;    // [packs], tokens
  const std::int64_t* sequences;  // [packs], sequences
  std::size_t packs;
  bool token_aligned;  // else label-aligned
};

// Limits and dtypes of packs: capacity and multiple are 1 to 2^31 - 1, tokens are u16 or i32, masks are u8 or f32.
struct PackRules {
  std::int64_t capacity, multiple;
  TokenType tokens;
  MaskType mask;
  std::int64_t vocab_size = 0;  // upper bound of ids (P9); 0 if no vocabulary is known
  std::int64_t first_pack = 0;  // number of the first pack, for breaches
};

struct PackSizes {
  std::int64_t longest = 0;         // tokens
  std::int64_t longest_padded = 0;  // each sequence rounded up to the multiple
  std::int64_t most_sequences = 0;
};

// Calls a function with the values in their dtype.
template <typename Call>
auto with_tokens(const PackInput& input, Call call) {
  if (input.token_type == TokenType::u16) return call(static_cast<const std::uint16_t*>(input.tokens));
  if (input.token_type == TokenType::i32) return call(static_cast<const std::int32_t*>(input.tokens));
  return call(static_cast<const std::int64_t*>(input.tokens));
}

template <typename Call>
auto with_mask(const PackInput& input, Call call) {
  if (input.mask_type == MaskType::u8) return call(static_cast<const std::uint8_t*>(input.mask));
  if (input.mask_type == MaskType::i64) return call(static_cast<const std::int64_t*>(input.mask));
  if (input.mask_type == MaskType::f32) return call(static_cast<const float*>(input.mask));
  return call(static_cast<const double*>(input.mask));
}

// Whether the starts of one pack, at least one, follow rules P2 to P4.
template <typename Start>
bool starts_ok(const Start* starts, std::int64_t count, std::int64_t length) {
  bool ok = starts[0] == 0 && static_cast<std::int64_t>(starts[count - 1]) < length;
  for (std::int64_t i = 1; i < count; ++i) ok &= starts[i] > starts[i - 1];
  return ok;
}

// Positions of one pack of at most 2^31 - 1 tokens with valid starts, with each sequence rounded up to the multiple.
template <typename Start>
std::int64_t padded_length(const Start* starts, std::int64_t count, std::int64_t length, std::int64_t multiple) {
  // Processors divide 32 bits faster than 64.
  const auto divisor = static_cast<std::uint32_t>(multiple), last = static_cast<std::uint32_t>(length);
  std::int64_t units = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto stop = i + 1 < count ? static_cast<std::uint32_t>(starts[i + 1]) : last;
    units += (stop - static_cast<std::uint32_t>(starts[i]) + divisor - 1) / divisor;
  }
  return units * multiple;
}

// The largest id that the dtype and the vocabulary allow.
std::int64_t largest_id(const PackRules& rules);

// The first violation of rules P1 to P5; sizes describe the packs before it. Never reads outside the arrays. Throws
// std::invalid_argument if lengths and counts do not add up to the sizes of the arrays.
std::optional<Breach> broken_shape(const PackInput& input, const PackRules& rules, PackSizes& sizes);
// For packs with a valid shape: the first id that does not fit its type (P8) or is outside the vocabulary (P9), the
// first invalid mask value (P7), and the first label-aligned mask value that is not 0 at the end of a sequence (P6).
std::optional<Breach> broken_id(const PackInput& input, const PackRules& rules);
std::optional<Breach> broken_mask(const PackInput& input, const PackRules& rules);
std::optional<Breach> broken_end(const PackInput& input, const PackRules& rules);
// The first violation of these checks, in this order.
std::optional<Breach> first_breach(const PackInput& input, const PackRules& rules);

// A violation as text, without the number of the pack.
std::string in_words(const Breach& breach, const PackRules& rules);

}  // namespace sft_idx
