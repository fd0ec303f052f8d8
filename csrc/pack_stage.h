// Packs on their way to disk: checked against the format's rules while they are copied into the form that is written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "rules.h"

namespace sft_idx {

// Leaves the bytes that a vector grows by as they are: they are written over at once.
struct Unset : std::allocator<unsigned char> {
  template <typename T>
  struct rebind {
    using other = Unset;
  };
  void construct(unsigned char* byte) { ::new (static_cast<void*>(byte)) unsigned char; }
};
using StagedBytes = std::vector<unsigned char, Unset>;

// Holds staged tokens (u16 or i32), masks (u8 or f32), starts and journal records until they are written and cleared,
// and the running counts of all packs ever added.
class PackStage {
 public:
  struct Totals {
    std::int64_t packs = 0, sequences = 0, tokens = 0;
    std::int64_t trained_tokens = 0;
    std::int64_t masked_packs = 0;         // packs with no trained position
    std::int64_t dropped_first = 0;        // token-aligned masks set on a sequence's first token
    PackSizes sizes;
  };

  // room: tokens staged before add() asks for a flush. capacity: most positions of a pack, each sequence rounded up.
  // vocab_size: ids are below it; 0 where no vocabulary is known.
  PackStage(TokenType tokens, MaskType mask, std::int64_t capacity, std::int64_t sequence_multiple, std::size_t room,
            std::int64_t vocab_size = 0);

  // Stages packs. False, with nothing done, where what is staged must be flushed first. Throws
  // std::invalid_argument, beginning with "pack <its number in the shard>: ", where a rule is broken; nothing is kept.
  bool add(const PackInput& input);

  // As add, for packs that the caller writes from its own arrays: only their starts and records are staged. They have
  // the types of the stage and are label-aligned.
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
