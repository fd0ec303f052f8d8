// Checks packs against the rules of the format while copying them into the form in which they are written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "rules.h"

namespace sft_idx {

// Does not initialize the bytes by which a vector grows, because they are overwritten immediately.
struct Unset : std::allocator<unsigned char> {
  template <typename T>
  struct rebind {
    using other = Unset;
  };
  void construct(unsigned char* byte) { ::new (static_cast<void*>(byte)) unsigned char; }
};
using StagedBytes = std::vector<unsigned char, Unset>;

// Stores staged tokens (u16 or i32), masks (u8 or f32), starts and journal records until they are written and cleared,
// and running counts of all packs added so far.
class PackStage {
 public:
  struct Totals {
    std::int64_t packs = 0, sequences = 0, tokens = 0;
    std::int64_t trained_tokens = 0;
    std::int64_t masked_packs = 0;         // packs with no trained position
    std::int64_t dropped_first = 0;        // non-zero token-aligned masks on the first token of a sequence
    PackSizes sizes;
  };

  // room: number of staged tokens at which add() requires a flush. capacity: maximum positions of a pack, with each
  // sequence rounded up. vocab_size: upper bound of ids; 0 if no vocabulary is known.
  PackStage(TokenType tokens, MaskType mask, std::int64_t capacity, std::int64_t sequence_multiple, std::size_t room,
            std::int64_t vocab_size = 0);

  // Stages packs. Returns false, without any change, if the staged packs must be flushed first. If a pack breaks a
  // rule, throws std::invalid_argument beginning with "pack <its number in the shard>: ", and stages none of the packs.
  bool add(const PackInput& input);

  // Like add, for packs that the caller writes from its own arrays, which have the types of the stage and are
  // label-aligned. Stages only their starts and records.
  void count(const PackInput& input);

  void clear();

  const Totals& totals() const { return totals_; }
  TokenType token_type() const { return rules_.tokens; }
  MaskType mask_type() const { return rules_.mask; }
  const StagedBytes& tokens() const { return tokens_; }
  const StagedBytes& mask() const { return mask_; }
  const std::vector<std::uint32_t>& starts() const { return starts_; }
  const std::vector<std::uint32_t>& records() const { return records_; }  // length, sequences of each staged pack

 private:
  [[noreturn]] void fail(const Breach& breach) const;
  void enter(const PackInput& input, const Totals& added, const PackSizes& sizes);
  template <typename Out>
  void copy_tokens(const PackInput& input, Out* out) const;
  template <typename Out>
  void copy_mask(const PackInput& input, Out* out, Totals& added) const;

  PackRules rules_;
  std::size_t room_;
  Totals totals_;
  StagedBytes tokens_, mask_;
  std::vector<std::uint32_t> starts_, records_;
};

}  // namespace sft_idx
