// A shard's files held against the rules of FORMAT.md while they stream by: nothing in them is known to be right, and
// no array is ever held whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "rules.h"

namespace sft_idx {

// Walks the packs of one shard in order. In its breaches `at` counts offsets (O1, O2), packs (P1, P5), sequences (P2
// to P4) or tokens (P6, P7) from the shard's beginning; `pack` is -1 for those of tokens; `expected` of an offset that
// does not ascend is the one before it. The caller hands in, in turn: a run of packs, the starts they ask for in any
// number of pieces, and after each piece the masks of the tokens that known() covers; masks that come later than that
// are not held against it. Packs whose offsets make no sense are reported and passed over, and so are their neighbours
// where they overlap. Runs and packs that are as they should be take a short way, which only tells that they are.
class PackWalk {
 public:
  struct Limits {
    std::int64_t sequences, tokens;   // of the shard
    std::int64_t capacity, multiple;  // of a pack
    std::size_t most;                 // breaches kept of each rule
  };
  struct Totals {
    std::int64_t packs = 0;  // whose structure could be checked
    std::int64_t trained_tokens = 0, masked_packs = 0;
    PackSizes sizes;  // longest_padded is of packs that break no rule
  };

  explicit PackWalk(const Limits& limits);

  // The next `count` packs. The arrays hold count + 1 offsets, or count + 2 where more packs follow: one look ahead
  // tells which of two neighbours is wrong.
  void packs(const std::int64_t* token_offsets, const std::int64_t* sequence_offsets, std::size_t count,
             bool looks_ahead);
  // The next starts, from next_sequence() on.
  void starts(const std::uint32_t* values, std::size_t count);
  // The masks of the next tokens.
  template <typename Mask>
  void mask(const Mask* values, std::size_t count);

  std::int64_t next_sequence() const { return sequence_; }
  std::int64_t wanted_sequences() const;  // one past the last sequence of the run
  std::int64_t known() const { return known_; }  // one past the last token whose sequence's end is known

  const std::vector<Breach>& breaches() const { return breaches_; }
  const std::map<std::string, std::int64_t>& counts() const { return counts_; }  // breaches of each rule, all of them
  const Totals& totals() const { return totals_; }

 private:
  struct Pack {
    std::int64_t begin, end;   // tokens
    std::int64_t first, last;  // sequences
  };

  std::size_t run_packs() const { return token_offsets_.size() - 1; }
  Pack pack(std::size_t k) const;
  bool passed_over(std::size_t k) const { return !passed_over_.empty() && passed_over_[k]; }
  std::int64_t number(std::size_t k) const { return run_begin_ + static_cast<std::int64_t>(k); }

  void broken(const char* rule, std::int64_t pack, std::int64_t at, std::variant<std::int64_t, double> found,
              std::int64_t expected);
  void pass_over(std::int64_t token_ahead, std::int64_t sequence_ahead);
  void measure();
  std::size_t whole_packs(const std::uint32_t* values, std::size_t count);
  void start(const Pack& pack, std::int64_t value);
  void end_sequence(const Pack& pack, std::int64_t end);
  void end_pack(const Pack& pack);

  Limits limits_;
  Totals totals_;
  std::vector<Breach> breaches_;
  std::map<std::string, std::int64_t> counts_;

  // The run.
  std::int64_t run_begin_ = 0, run_end_ = 0;  // numbers of its packs
  std::vector<std::int64_t> token_offsets_{0}, sequence_offsets_{0};
  std::vector<bool> passed_over_;  // by pack; empty where none is
  std::int64_t last_end_ = 0, last_sequence_ = 0;  // of the last pack that was not passed over
  std::size_t at_ = 0;    // pack in the run that the next start is of
  std::size_t seen_ = 0;  // pack in the run that token_ is in

  std::int64_t sequence_ = 0;
  std::int64_t open_ = 0;    // where the open sequence starts in its pack
  std::int64_t padded_ = 0;  // positions of the pack's sequences before it, each rounded up
  bool sound_ = true;        // no rule broken in the pack so far

  std::int64_t token_ = 0, known_ = 0;
  bool trained_ = false;            // some token of the pack that token_ is in
  std::vector<std::int64_t> ends_;  // of the sequences that the last starts ended, ascending, and room for more
  std::size_t num_ends_ = 0, next_end_ = 0;
};

}  // namespace sft_idx
