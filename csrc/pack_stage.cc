#include "pack_stage.h"

#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "mask_values.h"

namespace sft_idx {
namespace {

std::size_t token_nbytes(TokenType type) { return type == TokenType::u16 ? 2 : 4; }
std::size_t mask_nbytes(MaskType type) { return type == MaskType::u8 ? 1 : 4; }

}  // namespace

PackStage::PackStage(TokenType tokens, MaskType mask, std::int64_t capacity, std::int64_t sequence_multiple,
                     std::size_t room, std::int64_t vocab_size)
    : rules_{capacity, sequence_multiple, tokens, mask, vocab_size}, room_(room) {
  if (tokens == TokenType::i64 || (mask != MaskType::u8 && mask != MaskType::f32)) {
    throw std::invalid_argument("tokens must be staged as uint16 or int32, masks as uint8 or float32");
  }
  // The upper limit keeps sums of rounded-up lengths within 63 bits.
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  if (capacity < 1 || sequence_multiple < 1 || capacity > most || sequence_multiple > most) {
    throw std::invalid_argument("capacity and multiple must be 1 to " + std::to_string(most));
  }
  if (vocab_size < 0) throw std::invalid_argument("the vocabulary size must not be negative");
}

void PackStage::fail(const Breach& breach) const {
  throw std::invalid_argument("pack " + std::to_string(breach.pack) + ": " + in_words(breach, rules_));
}

template <typename Out>
void PackStage::copy_tokens(const PackInput& input, Out* out) const {
  const bool surely_fit = with_tokens(input, [&](const auto* tokens) {
    // No id is larger than the OR of all bits, which takes one fast instruction per id. If the OR is too large, which
    // can happen unless the vocabulary size is a power of two, the ids are checked individually.
    using Bits = std::make_unsigned_t<std::remove_const_t<std::remove_pointer_t<decltype(tokens)>>>;
    Bits bits = 0;
    for (std::size_t i = 0; i < input.tokens_count; ++i) {
      bits = static_cast<Bits>(bits | static_cast<Bits>(tokens[i]));
      out[i] = static_cast<Out>(tokens[i]);
    }
    return static_cast<std::uint64_t>(bits) <= static_cast<std::uint64_t>(largest_id(rules_));
  });
  if (surely_fit) return;
  if (const auto breach = broken_id(input, rules_)) fail(*breach);
}

template <typename Out>
void PackStage::copy_mask(const PackInput& input, Out* out, Totals& added) const {
  if (const auto breach = broken_mask(input, rules_)) fail(*breach);
  if (const auto breach = broken_end(input, rules_)) fail(*breach);
  with_mask(input, [&, starts = input.starts](const auto* mask) mutable {
    for (std::size_t p = 0; p < input.packs; ++p) {
      const std::int64_t length = input.lengths[p], count = input.sequences[p], shift = input.token_aligned ? 1 : 0;
      for (std::int64_t j = 0; j < length - shift; ++j) out[j] = static_cast<Out>(mask[j + shift]);
      for (std::int64_t i = 0; input.token_aligned && i < count; ++i) {
        added.dropped_first += mask[starts[i]] != 0;
        out[(i + 1 < count ? starts[i + 1] : length) - 1] = Out{0};
      }
      const std::int64_t trained = count_nonzero(out, length);
      added.trained_tokens += trained;
      added.masked_packs += trained == 0;
      mask += length;
      out += length;
      starts += count;
    }
  });
}

bool PackStage::add(const PackInput& input) {
  const std::size_t token_size = token_nbytes(rules_.tokens), mask_size = mask_nbytes(rules_.mask);
  const std::size_t staged = tokens_.size() / token_size;
  if (staged != 0 && staged + input.tokens_count > room_) return false;
  rules_.first_pack = totals_.packs;
  PackSizes sizes = totals_.sizes;
  if (const auto breach = broken_shape(input, rules_, sizes)) fail(*breach);
  Totals added;
  try {
    tokens_.resize((staged + input.tokens_count) * token_size);
    mask_.resize((staged + input.tokens_count) * mask_size);
    void* tokens_out = tokens_.data() + staged * token_size;
    void* mask_out = mask_.data() + staged * mask_size;
    if (rules_.tokens == TokenType::u16) {
      copy_tokens(input, static_cast<std::uint16_t*>(tokens_out));
    } else {
      copy_tokens(input, static_cast<std::int32_t*>(tokens_out));
    }
    if (rules_.mask == MaskType::u8) {
      copy_mask(input, static_cast<std::uint8_t*>(mask_out), added);
    } else {
      copy_mask(input, static_cast<float*>(mask_out), added);
    }
    enter(input, added, sizes);
  } catch (...) {
    tokens_.resize(staged * token_size);
    mask_.resize(staged * mask_size);
    throw;
  }
  return true;
}

void PackStage::count(const PackInput& input) {
  rules_.first_pack = totals_.packs;
  PackSizes sizes = totals_.sizes;
  if (const auto breach = broken_shape(input, rules_, sizes)) fail(*breach);
  if (const auto breach = broken_id(input, rules_)) fail(*breach);
  Totals added;
  const auto count_mask = [&](const auto* mask) {
    const MaskSummary summary = summarise(mask, static_cast<std::int64_t>(input.tokens_count));
    if (!summary.ok) fail(broken_mask(input, rules_).value());
    added.trained_tokens = summary.nonzero;
    for (std::size_t p = 0; p < input.packs; mask += input.lengths[p++]) {
      added.masked_packs += !any_nonzero(mask, input.lengths[p]);
    }
  };
  rules_.mask == MaskType::u8 ? count_mask(static_cast<const std::uint8_t*>(input.mask))
                              : count_mask(static_cast<const float*>(input.mask));
  if (const auto breach = broken_end(input, rules_)) fail(*breach);
  enter(input, added, sizes);
}

// Stages starts and records, and updates the totals.
void PackStage::enter(const PackInput& input, const Totals& added, const PackSizes& sizes) {
  const std::size_t starts = starts_.size(), records = records_.size();
  starts_.resize(starts + input.starts_count);
  try {
    records_.resize(records + 2 * input.packs);
  } catch (...) {
    starts_.resize(starts);
    throw;
  }
  for (std::size_t i = 0; i < input.starts_count; ++i) starts_[starts + i] = static_cast<std::uint32_t>(input.starts[i]);
  for (std::size_t p = 0; p < input.packs; ++p) {
    records_[records + 2 * p] = static_cast<std::uint32_t>(input.lengths[p]);
    records_[records + 2 * p + 1] = static_cast<std::uint32_t>(input.sequences[p]);
  }
  totals_.packs += static_cast<std::int64_t>(input.packs);
  totals_.sequences += static_cast<std::int64_t>(input.starts_count);
  totals_.tokens += static_cast<std::int64_t>(input.tokens_count);
  totals_.trained_tokens += added.trained_tokens;
  totals_.masked_packs += added.masked_packs;
  totals_.dropped_first += added.dropped_first;
  totals_.sizes = sizes;
}

void PackStage::clear() {
  // Free the memory of a pack that was larger than the room.
  const auto reset = [this](auto& staged) {
    staged.clear();
    if (staged.capacity() > 8 * room_) staged.shrink_to_fit();
  };
  reset(tokens_);
  reset(mask_);
  reset(starts_);
  reset(records_);
}

}  // namespace sft_idx
