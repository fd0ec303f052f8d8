#include "pack_stage.h"

#include <algorithm>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "mask_values.h"

namespace sft_idx {
namespace {

template <typename... Parts>
[[noreturn]] void fail(std::int64_t pack, const Parts&... parts) {
  std::ostringstream message;
  message << "pack " << pack << ": ";
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

std::size_t token_nbytes(TokenType type) { return type == TokenType::u16 ? 2 : 4; }
std::size_t mask_nbytes(MaskType type) { return type == MaskType::u8 ? 1 : 4; }

}  // namespace

PackStage::PackStage(TokenType tokens, MaskType mask, std::int64_t capacity, std::int64_t sequence_multiple,
                     std::size_t room)
    : token_type_(tokens), mask_type_(mask), capacity_(capacity), multiple_(sequence_multiple), room_(room) {
  if (tokens == TokenType::i64 || (mask != MaskType::u8 && mask != MaskType::f32)) {
    throw std::invalid_argument("staged as uint16 or int32 tokens, uint8 or float32 masks");
  }
  // The upper limit keeps sums of rounded-up lengths within 63 bits.
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  if (capacity < 1 || sequence_multiple < 1 || capacity > most || sequence_multiple > most) {
    throw std::invalid_argument("capacity and multiple are 1 to " + std::to_string(most));
  }
}

PackStage::Totals PackStage::check_shapes(const PackInput& input) const {
  Totals added;
  std::size_t next = 0, tokens = 0;
  for (std::size_t p = 0; p < input.packs; ++p) {
    const std::int64_t pack = totals_.packs + static_cast<std::int64_t>(p);
    const std::int64_t length = input.lengths[p], count = input.sequences[p];
    if (length <= 0) fail(pack, "it has ", length, " tokens, a pack holds at least one (rule P1)");
    if (length > capacity_) fail(pack, "it has ", length, " tokens, the capacity is ", capacity_, " (rule P1)");
    if (count <= 0) fail(pack, "no sequence starts, the first must be 0 (rule P2)");
    if (static_cast<std::size_t>(count) > input.starts_count - next) fail(pack, "sequence starts run out");
    if (static_cast<std::size_t>(length) > input.tokens_count - tokens) fail(pack, "tokens run out");
    const std::int64_t* starts = input.starts + next;
    if (starts[0] != 0) fail(pack, "first sequence starts at ", starts[0], ", expected 0 (rule P2)");
    std::int64_t padded = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t stop = i + 1 < count ? starts[i + 1] : length;
      if (starts[i] < 0 || starts[i] >= length) {
        fail(pack, "sequence ", i, " starts at ", starts[i], ", the pack has ", length, " tokens (rule P4)");
      }
      if (stop <= starts[i]) {
        fail(pack, "sequence ", i + 1, " starts at ", stop, ", not after ", starts[i], " (rule P3)");
      }
      padded += (stop - starts[i] + multiple_ - 1) / multiple_ * multiple_;
    }
    if (padded > capacity_) {
      fail(pack, "it takes ", padded, " positions with each sequence rounded up to a multiple of ", multiple_,
           ", the capacity is ", capacity_, " (rule P5)");
    }
    added.longest_pack = std::max(added.longest_pack, length);
    added.longest_padded_pack = std::max(added.longest_padded_pack, padded);
    added.most_sequences = std::max(added.most_sequences, count);
    next += static_cast<std::size_t>(count);
    tokens += static_cast<std::size_t>(length);
  }
  if (next != input.starts_count || tokens != input.tokens_count) {
    throw std::invalid_argument("pack lengths and sequence counts do not add up to the arrays handed in");
  }
  return added;
}

// Which pack holds a token, and where in it: only asked for once something is wrong.
void PackStage::fail_at_token(const PackInput& input, std::size_t token, const std::string& what) const {
  auto position = static_cast<std::int64_t>(token);
  std::size_t p = 0;
  while (position >= input.lengths[p]) position -= input.lengths[p++];
  fail(totals_.packs + static_cast<std::int64_t>(p), "position ", position, " ", what);
}

template <typename In, typename Out>
void PackStage::copy_tokens(const PackInput& input, Out* out) const {
  // All ids are within 0 and 2^k - 1 exactly when the or of their bits is: one fast instruction an id.
  using Bits = std::make_unsigned_t<In>;
  constexpr auto largest = static_cast<std::int64_t>(std::numeric_limits<Out>::max());
  const auto ok = [](In id) {
    return (static_cast<std::int64_t>(id) >= 0) & (static_cast<std::int64_t>(id) <= largest);
  };
  const auto* tokens = static_cast<const In*>(input.tokens);
  Bits bits = 0;
  for (std::size_t i = 0; i < input.tokens_count; ++i) {
    bits = static_cast<Bits>(bits | static_cast<Bits>(tokens[i]));
    out[i] = static_cast<Out>(tokens[i]);
  }
  const bool all_ok = static_cast<std::uint64_t>(bits) <= static_cast<std::uint64_t>(largest);
  for (std::size_t i = 0; !all_ok; ++i) {
    if (ok(tokens[i])) continue;
    fail_at_token(input, i, "has id " + std::to_string(tokens[i]) + ", the token dtype holds 0 to " +
                                std::to_string(largest) + " (rule P8)");
  }
}

template <typename In, typename Out>
void PackStage::copy_mask(const PackInput& input, Out* out, Totals& added) const {
  const auto* mask = static_cast<const In*>(input.mask);
  const bool all_ok = mask_ok<Out>(mask, input.tokens_count);
  for (std::size_t i = 0; !all_ok; ++i) {
    if (mask_value_ok<Out>(mask[i])) continue;
    std::ostringstream what;
    what << "has loss mask " << +mask[i] << ", the mask dtype holds "
         << (std::is_same_v<Out, std::uint8_t> ? "0 and 1 (weights need float32)" : "finite weights of 0 or more")
         << " (rule P7)";
    fail_at_token(input, i, what.str());
  }
  const std::int64_t* starts = input.starts;
  for (std::size_t p = 0; p < input.packs; ++p) {
    const std::int64_t length = input.lengths[p], count = input.sequences[p];
    const std::int64_t shift = input.token_aligned ? 1 : 0;
    for (std::int64_t j = 0; j < length - shift; ++j) out[j] = static_cast<Out>(mask[j + shift]);
    if (input.token_aligned) out[length - 1] = Out{0};
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t last = (i + 1 < count ? starts[i + 1] : length) - 1;
      if (input.token_aligned) {
        added.dropped_first += mask[starts[i]] != In{0};
        out[last] = Out{0};
      } else if (mask[last] != In{0}) {
        fail(totals_.packs + static_cast<std::int64_t>(p), "label-aligned loss mask is set at position ", last,
             ", the end of a sequence, where there is no next token to predict (rule P6);"
             " hand token-aligned masks in with mask_alignment=\"token\"");
      }
    }
    const std::int64_t trained = count_nonzero(out, length);
    added.trained_tokens += trained;
    added.masked_packs += trained == 0;
    mask += length;
    out += length;
    starts += count;
  }
}

template <typename Out>
void PackStage::copy_tokens_to(const PackInput& input, Out* out) const {
  switch (input.token_type) {
    case TokenType::u16: return copy_tokens<std::uint16_t>(input, out);
    case TokenType::i32: return copy_tokens<std::int32_t>(input, out);
    case TokenType::i64: return copy_tokens<std::int64_t>(input, out);
  }
}

template <typename Out>
void PackStage::copy_mask_to(const PackInput& input, Out* out, Totals& added) const {
  switch (input.mask_type) {
    case MaskType::u8: return copy_mask<std::uint8_t>(input, out, added);
    case MaskType::i64: return copy_mask<std::int64_t>(input, out, added);
    case MaskType::f32: return copy_mask<float>(input, out, added);
    case MaskType::f64: return copy_mask<double>(input, out, added);
  }
}

bool PackStage::add(const PackInput& input) {
  const std::size_t token_size = token_nbytes(token_type_), mask_size = mask_nbytes(mask_type_);
  const std::size_t staged = tokens_.size() / token_size;
  if (staged != 0 && staged + input.tokens_count > room_) return false;
  Totals added = check_shapes(input);
  const std::size_t starts = starts_.size(), records = records_.size();
  try {
    tokens_.resize((staged + input.tokens_count) * token_size);
    mask_.resize((staged + input.tokens_count) * mask_size);
    void* tokens_out = tokens_.data() + staged * token_size;
    void* mask_out = mask_.data() + staged * mask_size;
    if (token_type_ == TokenType::u16) {
      copy_tokens_to(input, static_cast<std::uint16_t*>(tokens_out));
    } else {
      copy_tokens_to(input, static_cast<std::int32_t*>(tokens_out));
    }
    if (mask_type_ == MaskType::u8) {
      copy_mask_to(input, static_cast<std::uint8_t*>(mask_out), added);
    } else {
      copy_mask_to(input, static_cast<float*>(mask_out), added);
    }
    starts_.resize(starts + input.starts_count);
    records_.resize(records + 2 * input.packs);
  } catch (...) {
    tokens_.resize(staged * token_size);
    mask_.resize(staged * mask_size);
    starts_.resize(starts);
    records_.resize(records);
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
  totals_.longest_pack = std::max(totals_.longest_pack, added.longest_pack);
  totals_.longest_padded_pack = std::max(totals_.longest_padded_pack, added.longest_padded_pack);
  totals_.most_sequences = std::max(totals_.most_sequences, added.most_sequences);
  return true;
}

void PackStage::clear() {
  // A pack larger than the room does not leave its memory behind.
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
