#include "stage_packs.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace sft_idx {
namespace {

template <typename... Parts>
[[noreturn]] void fail(std::size_t pack, const Parts&... parts) {
  std::ostringstream message;
  message << "pack " << pack << ": ";
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

// Which pack holds a token, and where in it: only asked for once something is wrong.
[[noreturn]] void fail_at_token(const PackShapes& shapes, std::size_t token, const std::string& what) {
  std::int64_t position = static_cast<std::int64_t>(token);
  std::size_t pack = 0;
  while (position >= shapes.pack_lengths[pack]) position -= shapes.pack_lengths[pack++];
  fail(pack, "position ", position, " ", what);
}

// What a mask value may be on its way to Out.
template <typename Out, typename In>
bool mask_value_ok(In value) {
  if constexpr (std::is_same_v<Out, std::uint8_t>) {
    return value == In{0} || value == In{1};
  } else if constexpr (std::is_floating_point_v<In>) {
    return value >= In{0} && value <= static_cast<In>(std::numeric_limits<float>::max());  // false for NaN
  } else {
    return value >= In{0};
  }
}

std::int64_t round_up(std::int64_t length, std::int64_t multiple) {
  return (length + multiple - 1) / multiple * multiple;
}

}  // namespace

ShapeTotals stage_shapes(const PackShapes& shapes, const StageLimits& limits, std::uint32_t* starts_out) {
  ShapeTotals totals;
  std::size_t next = 0, tokens = 0;
  for (std::size_t pack = 0; pack < shapes.packs; ++pack) {
    const std::int64_t length = shapes.pack_lengths[pack], count = shapes.pack_sequences[pack];
    if (length <= 0) fail(pack, "length ", length, ", a pack holds at least one token (rule P1)");
    if (length > limits.capacity) fail(pack, "length ", length, ", capacity ", limits.capacity, " (rule P1)");
    if (count <= 0) fail(pack, "no sequence starts, the first must be 0 (rule P2)");
    if (static_cast<std::size_t>(count) > shapes.starts_count - next) fail(pack, "sequence starts run out");
    if (static_cast<std::size_t>(length) > shapes.tokens_count - tokens) fail(pack, "tokens run out");
    const std::int64_t* starts = shapes.starts + next;
    if (starts[0] != 0) fail(pack, "first sequence starts at ", starts[0], ", expected 0 (rule P2)");
    if (starts[count - 1] >= length || starts[count - 1] < 0) {
      fail(pack, "last sequence starts at ", starts[count - 1], ", the pack has ", length, " tokens (rule P4)");
    }
    std::int64_t padded = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t stop = i + 1 < count ? starts[i + 1] : length;
      if (stop <= starts[i]) {
        fail(pack, "sequence ", i + 1, " starts at ", stop, ", not after ", starts[i], " (rule P3)");
      }
      padded += round_up(stop - starts[i], limits.sequence_multiple);
      starts_out[next + static_cast<std::size_t>(i)] = static_cast<std::uint32_t>(starts[i]);
    }
    if (padded > limits.capacity) {
      fail(pack, padded, " positions with each sequence rounded up to a multiple of ", limits.sequence_multiple,
           ", capacity ", limits.capacity, " (rule P5)");
    }
    totals.longest_pack = std::max(totals.longest_pack, length);
    totals.longest_padded_pack = std::max(totals.longest_padded_pack, padded);
    totals.most_sequences = std::max(totals.most_sequences, count);
    next += static_cast<std::size_t>(count);
    tokens += static_cast<std::size_t>(length);
  }
  if (next != shapes.starts_count || tokens != shapes.tokens_count) {
    throw std::invalid_argument("pack lengths and sequence counts do not add up to the arrays handed in");
  }
  return totals;
}

template <typename In, typename Out>
void stage_tokens(const In* tokens, const PackShapes& shapes, Out* out) {
  constexpr auto largest = static_cast<std::int64_t>(std::numeric_limits<Out>::max());
  bool bad = false;
  for (std::size_t i = 0; i < shapes.tokens_count; ++i) {
    const auto id = static_cast<std::int64_t>(tokens[i]);
    bad |= id < 0 || id > largest;
    out[i] = static_cast<Out>(tokens[i]);
  }
  if (!bad) return;
  for (std::size_t i = 0; i < shapes.tokens_count; ++i) {
    const auto id = static_cast<std::int64_t>(tokens[i]);
    if (id < 0 || id > largest) {
      fail_at_token(shapes, i, "has id " + std::to_string(id) + ", the token dtype holds 0 to " +
                                   std::to_string(largest) + " (rule P8)");
    }
  }
}

template <typename In, typename Out>
MaskTotals stage_mask(const In* mask, const PackShapes& shapes, bool token_aligned, Out* out) {
  bool bad = false;
  for (std::size_t i = 0; i < shapes.tokens_count; ++i) bad |= !mask_value_ok<Out>(mask[i]);
  if (bad) {
    for (std::size_t i = 0; i < shapes.tokens_count; ++i) {
      if (mask_value_ok<Out>(mask[i])) continue;
      std::ostringstream value;
      value << "has loss mask " << +mask[i] << ", the mask dtype holds "
            << (std::is_same_v<Out, std::uint8_t> ? "0 and 1; weights need float32" : "finite weights of 0 or more")
            << " (rule P7)";
      fail_at_token(shapes, i, value.str());
    }
  }
  MaskTotals totals;
  std::size_t base = 0, next = 0;
  for (std::size_t pack = 0; pack < shapes.packs; ++pack) {
    const std::int64_t length = shapes.pack_lengths[pack], count = shapes.pack_sequences[pack];
    const In* in = mask + base;
    Out* to = out + base;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t start = shapes.starts[next + static_cast<std::size_t>(i)];
      const std::int64_t stop = i + 1 < count ? shapes.starts[next + static_cast<std::size_t>(i) + 1] : length;
      if (token_aligned) {
        totals.dropped_first += in[start] != In{0};
        for (std::int64_t j = start; j + 1 < stop; ++j) to[j] = static_cast<Out>(in[j + 1]);
        to[stop - 1] = Out{0};
      } else {
        if (in[stop - 1] != In{0}) {
          fail(pack, "label-aligned loss mask is set at position ", stop - 1,
               ", the end of a sequence, where there is no next token to predict (rule P6);"
               " hand token-aligned masks in with mask_alignment=\"token\"");
        }
        for (std::int64_t j = start; j < stop; ++j) to[j] = static_cast<Out>(in[j]);
      }
    }
    std::int64_t trained = 0;
    for (std::int64_t j = 0; j < length; ++j) trained += to[j] != Out{0};
    totals.trained_tokens += trained;
    totals.masked_packs += trained == 0;
    base += static_cast<std::size_t>(length);
    next += static_cast<std::size_t>(count);
  }
  return totals;
}

#define SFT_IDX_TOKENS(In)                                                          \
  template void stage_tokens(const In*, const PackShapes&, std::uint16_t*);         \
  template void stage_tokens(const In*, const PackShapes&, std::int32_t*);
SFT_IDX_TOKENS(std::uint16_t)
SFT_IDX_TOKENS(std::int32_t)
SFT_IDX_TOKENS(std::int64_t)

#define SFT_IDX_MASKS(In)                                                                \
  template MaskTotals stage_mask(const In*, const PackShapes&, bool, std::uint8_t*);     \
  template MaskTotals stage_mask(const In*, const PackShapes&, bool, float*);
SFT_IDX_MASKS(std::uint8_t)
SFT_IDX_MASKS(std::int64_t)
SFT_IDX_MASKS(float)
SFT_IDX_MASKS(double)

}  // namespace sft_idx
