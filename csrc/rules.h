// The rules of packs (FORMAT.md, P1 to P9) in the one place that knows them: packs on their way in are held to them
// here, and what verification walks over is measured with the same parts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>

namespace sft_idx {

// Where a rule is broken. In packs that are taken in, `at` is a sequence (P2 to P4), 0 (P1, P5) or a token (P6 to P9)
// of the pack; PackWalk counts from the shard's beginning. `expected` is the most or, for a start (P2, P3), the least
// that is allowed.
struct Breach {
  const char* rule;
  std::int64_t pack, at;
  std::variant<std::int64_t, double> found;  // a weight is a double
  std::int64_t expected;
};

enum class TokenType { u16, i32, i64 };
enum class MaskType { u8, i64, f32, f64 };

// Packs as a caller has them, end to end. starts are positions inside their pack.
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

// What packs are held to: capacity and multiple are 1 to 2^31 - 1, tokens end up as u16 or i32, masks as u8 or f32.
struct PackRules {
  std::int64_t capacity, multiple;
  TokenType tokens;
  MaskType mask;
  std::int64_t vocab_size = 0;  // ids are below it (P9); 0 where no vocabulary is known
  std::int64_t first_pack = 0;  // number of the first pack, for breaches
};

struct PackSizes {
  std::int64_t longest = 0;         // tokens
  std::int64_t longest_padded = 0;  // each sequence rounded up to the multiple
  std::int64_t most_sequences = 0;
};

// Calls with the values as what they are.
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

// Whether the starts of one pack keep rules P2 to P4; there is at least one.
template <typename Start>
bool starts_ok(const Start* starts, std::int64_t count, std::int64_t length) {
  bool ok = starts[0] == 0 && static_cast<std::int64_t>(starts[count - 1]) < length;
  for (std::int64_t i = 1; i < count; ++i) ok &= starts[i] > starts[i - 1];
  return ok;
}

// Positions of one pack of at most 2^31 - 1 tokens whose starts are good, each sequence rounded up to the multiple.
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

// The first breach of rules P1 to P5; sizes are those of the packs before it. Reads nothing outside the arrays,
// whatever they hold. Throws std::invalid_argument where lengths and counts do not add up to them.
std::optional<Breach> broken_shape(const PackInput& input, const PackRules& rules, PackSizes& sizes);
// Of packs whose shape is good, the first id that its type does not hold (P8)
// or that is beyond the vocabulary (P9), the first mask value (P7), and the first
// label-aligned one that is set at a sequence's end (P6).
std::optional<Breach> broken_id(const PackInput& input, const PackRules& rules);
std::optional<Breach> broken_mask(const PackInput& input, const PackRules& rules);
std::optional<Breach> broken_end(const PackInput& input, const PackRules& rules);
// All of these, in this order.
std::optional<Breach> first_breach(const PackInput& input, const PackRules& rules);

// A breach of packs that are taken in, as a sentence without the number of the pack.
std::string in_words(const Breach& breach, const PackRules& rules);

}  // namespace sft_idx
