#include "rules.h"

#include <limits>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <type_traits>

#include "mask_values.h"

namespace sft_idx {
namespace {

std::int64_t number(const PackRules& rules, std::size_t pack) {
  return rules.first_pack + static_cast<std::int64_t>(pack);
}

// The largest id that the dtype can store.
std::int64_t largest_stored(const PackRules& rules) {
  if (rules.tokens == TokenType::u16) return std::numeric_limits<std::uint16_t>::max();
  return std::numeric_limits<std::int32_t>::max();
}

// Finds the pack of a token and the position in it. Only called for errors.
template <typename Value>
Breach at_token(const char* rule, const PackInput& input, const PackRules& rules, std::size_t token, Value value,
                std::int64_t expected) {
  auto position = static_cast<std::int64_t>(token);
  std::size_t p = 0;
  while (position >= input.lengths[p]) position -= input.lengths[p++];
  using Found = std::conditional_t<std::is_floating_point_v<Value>, double, std::int64_t>;
  return {rule, number(rules, p), position, static_cast<Found>(value), expected};
}

// Returns how counts differ from the sizes of the arrays: rule F2 with `at` 0 for tokens, 1 for starts.
std::optional<Breach> broken_counts(const PackInput& input, const PackRules& rules) {
  std::size_t starts = input.starts_count, tokens = input.tokens_count;
  for (std::size_t p = 0; p < input.packs; ++p) {
    const std::int64_t length = input.lengths[p], count = input.sequences[p], pack = number(rules, p);
    if (length <= 0 || length > rules.capacity) return Breach{"P1", pack, 0, length, rules.capacity};
    if (count <= 0) return Breach{"P2", pack, -1, count, 1};
    if (static_cast<std::size_t>(count) > starts) {
      return Breach{"F2", pack, 1, count, static_cast<std::int64_t>(starts)};
    }
    if (static_cast<std::size_t>(length) > tokens) {
      return Breach{"F2", pack, 0, length, static_cast<std::int64_t>(tokens)};
    }
    starts -= static_cast<std::size_t>(count);
    tokens -= static_cast<std::size_t>(length);
  }
  if (starts || tokens) {
    throw std::invalid_argument("pack lengths and sequence counts do not add up to the sizes of the arrays");
  }
  return std::nullopt;
}

Breach broken_start(std::int64_t pack, const std::int64_t* starts, std::int64_t length) {
  if (starts[0] != 0) return {"P2", pack, 0, starts[0], 0};
  for (std::int64_t i = 1;; ++i) {
    if (starts[i] <= starts[i - 1]) return {"P3", pack, i, starts[i], starts[i - 1] + 1};
    if (starts[i] >= length) return {"P4", pack, i, starts[i], length - 1};
  }
}

template <typename Out, typename In>
std::optional<Breach> first_bad_mask(const In* mask, const PackInput& input, const PackRules& rules) {
  if (mask_ok<Out>(mask, input.tokens_count)) return std::nullopt;
  std::size_t i = 0;
  while (mask_value_ok<Out>(mask[i])) ++i;
  return at_token("P7", input, rules, i, mask[i], 1);
}

}  // namespace

std::int64_t largest_id(const PackRules& rules) {
  const std::int64_t stored = largest_stored(rules);
  return rules.vocab_size > 0 ? std::min(stored, rules.vocab_size - 1) : stored;
}

std::optional<Breach> broken_shape(const PackInput& input, const PackRules& rules, PackSizes& sizes) {
  if (auto breach = broken_counts(input, rules)) return breach;
  const std::int64_t* starts = input.starts;
  for (std::size_t p = 0; p < input.packs; ++p) {
    const std::int64_t length = input.lengths[p], count = input.sequences[p];
    if (!starts_ok(starts, count, length)) return broken_start(number(rules, p), starts, length);
    const std::int64_t padded = padded_length(starts, count, length, rules.multiple);
    if (padded > rules.capacity) return Breach{"P5", number(rules, p), 0, padded, rules.capacity};
    sizes.longest = std::max(sizes.longest, length);
    sizes.longest_padded = std::max(sizes.longest_padded, padded);
    sizes.most_sequences = std::max(sizes.most_sequences, count);
    starts += count;
  }
  return std::nullopt;
}

std::optional<Breach> broken_id(const PackInput& input, const PackRules& rules) {
  return with_tokens(input, [&](const auto* tokens) -> std::optional<Breach> {
    // Negative ids are large as unsigned numbers.
    using Bits = std::make_unsigned_t<std::remove_const_t<std::remove_pointer_t<decltype(tokens)>>>;
    const auto largest = static_cast<std::uint64_t>(largest_id(rules));
    if (largest >= std::numeric_limits<Bits>::max()) return std::nullopt;
    Bits most = 0;
    for (std::size_t i = 0; i < input.tokens_count; ++i) most = std::max(most, static_cast<Bits>(tokens[i]));
    if (most <= largest) return std::nullopt;
    std::size_t i = 0;
    while (static_cast<Bits>(tokens[i]) <= largest) ++i;
    const bool is_stored = static_cast<Bits>(tokens[i]) <= static_cast<std::uint64_t>(largest_stored(rules));
    return at_token(is_stored ? "P9" : "P8", input, rules, i, tokens[i],
                    is_stored ? largest_id(rules) : largest_stored(rules));
  });
}

std::optional<Breach> broken_mask(const PackInput& input, const PackRules& rules) {
  return with_mask(input, [&](const auto* mask) {
    return rules.mask == MaskType::u8 ? first_bad_mask<std::uint8_t>(mask, input, rules)
                                      : first_bad_mask<float>(mask, input, rules);
  });
}

std::optional<Breach> broken_end(const PackInput& input, const PackRules& rules) {
  if (input.token_aligned) return std::nullopt;
  return with_mask(input, [&](const auto* mask) -> std::optional<Breach> {
    std::size_t begin = 0, sequence = 0;
    for (std::size_t p = 0; p < input.packs; ++p) {
      for (std::int64_t i = 1; i <= input.sequences[p]; ++i, ++sequence) {
        const std::int64_t end = i < input.sequences[p] ? input.starts[sequence + 1] : input.lengths[p];
        const std::size_t last = begin + static_cast<std::size_t>(end) - 1;
        if (mask[last] != 0) return at_token("P6", input, rules, last, mask[last], 0);
      }
      begin += static_cast<std::size_t>(input.lengths[p]);
    }
    return std::nullopt;
  });
}

std::optional<Breach> first_breach(const PackInput& input, const PackRules& rules) {
  PackSizes sizes;
  if (auto breach = broken_shape(input, rules, sizes)) return breach;
  if (auto breach = broken_id(input, rules)) return breach;
  if (auto breach = broken_mask(input, rules)) return breach;
  return broken_end(input, rules);
}

std::string in_words(const Breach& breach, const PackRules& rules) {
  const std::string_view rule = breach.rule;
  const std::int64_t at = breach.at, expected = breach.expected;
  std::ostringstream out, value;
  std::visit([&](auto number) { value << number; }, breach.found);
  const std::string found = value.str();
  if (rule == "F2") return at ? "sequence starts run out" : "tokens run out";
  if (rule == "P1") {
    const bool empty = std::get<std::int64_t>(breach.found) < 1;
    out << "it has " << found << " tokens, but ";
    empty ? out << "a pack needs at least one" : out << "the capacity is " << expected;
  } else if (rule == "P2" && at < 0) {
    out << "it has no sequence starts, but needs at least a first one at 0";
  } else if (rule == "P2") {
    out << "the first sequence starts at " << found << ", expected 0";
  } else if (rule == "P3") {
    out << "sequence " << at << " starts at " << found << ", expected a start after " << expected - 1;
  } else if (rule == "P4") {
    out << "sequence " << at << " starts at " << found << ", but the pack has " << expected + 1 << " tokens";
  } else if (rule == "P5") {
    out << "it needs " << found << " positions with each sequence rounded up to a multiple of " << rules.multiple
        << ", but the capacity is " << expected;
  } else if (rule == "P6") {
    out << "the label-aligned loss mask is not 0 at position " << at
        << ", the end of a sequence, where there is no next token to predict (rule P6);"
           " pass token-aligned masks with mask_alignment=\"token\"";
    return out.str();
  } else if (rule == "P7") {
    out << "position " << at << " has loss mask " << found << ", but the mask dtype stores "
        << (rules.mask == MaskType::u8 ? "0 and 1 (weights need float32)" : "finite weights of 0 or more");
  } else if (rule == "P8") {
    out << "position " << at << " has id " << found << ", but the token dtype stores 0 to " << expected;
  } else {
    out << "position " << at << " has id " << found << ", but the vocabulary has " << expected + 1 << " tokens";
  }
  out << " (rule " << rule << ")";
  return out.str();
}

}  // namespace sft_idx
