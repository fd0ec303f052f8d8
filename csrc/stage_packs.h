// Checks packs against the format's rules while copying them into the form that is written.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sft_idx {

// Packs as the caller has them, end to end. starts are positions inside their pack.
struct PackShapes {
  const std::int64_t* pack_lengths;    // [packs], tokens
  const std::int64_t* pack_sequences;  // [packs], sequences
  std::size_t packs;
  const std::int64_t* starts;  // [sum of pack_sequences]
  std::size_t starts_count;
  std::size_t tokens_count;
};

struct StageLimits {
  std::int64_t capacity;           // most positions a pack may hold, each sequence rounded up to the multiple
  std::int64_t sequence_multiple;  // 1 or more
};

struct ShapeTotals {
  std::int64_t longest_pack = 0;         // tokens
  std::int64_t longest_padded_pack = 0;  // each sequence rounded up to the multiple
  std::int64_t most_sequences = 0;
};

struct MaskTotals {
  std::int64_t trained_tokens = 0;
  std::int64_t masked_packs = 0;        // packs with no trained position
  std::int64_t dropped_first = 0;       // token-aligned masks set on a sequence's first token
};

// Rules P1 to P5, and starts as uint32. Throws std::invalid_argument that begins with "pack <number>: ".
ShapeTotals stage_shapes(const PackShapes& shapes, const StageLimits& limits, std::uint32_t* starts_out);

// Copies ids, each in [0, largest id of Out]; throws with the pack, position and value of the first that is not.
template <typename In, typename Out>
void stage_tokens(const In* tokens, const PackShapes& shapes, Out* out);

// Copies masks as label-aligned Out. With token_aligned, shifts left by one inside each sequence and counts what
// stood on first tokens; otherwise a mask set at a sequence's end throws (rule P6).
// uint8_t takes 0 and 1 only, float any finite weight >= 0 (rule P7).
template <typename In, typename Out>
MaskTotals stage_mask(const In* mask, const PackShapes& shapes, bool token_aligned, Out* out);

}  // namespace sft_idx
