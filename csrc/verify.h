// Checks a shard's files against the rules of FORMAT.md as a stream. The files can contain any errors, and no array is
// completely in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "rules.h"

namespace sft_idx {

// Walks the packs of one shard in order. In its violations, `at` counts offsets (O1, O2), packs (P1, P5), sequences (P2
// to P4) or tokens (P6, P7) from the beginning of the shard. `pack` is -1 for violations of tokens. `expected` of an
// offset that does not ascend is the previous offset. The caller passes alternately a run of packs, their starts in any
// number of pieces, and after each piece the masks of the tokens covered by known(); later masks are not checked.
// Packs with invalid offsets are reported and skipped, and so are adjacent packs that overlap with them. Valid runs and
// packs take a fast path, which only determines that they are valid.
class PackWalk {
 public:
  struct Limits {
    std::int64_t sequences, tokens;   // of the shard
    std::int64_t capacity, multiple;  // of a pack
    std::size_t most;                 // violations kept of each rule
  };
  struct Totals {
    std::int64_t packs = 0;  // with a structure that could be checked
    std::int64_t trained_tokens = 0, masked_packs = 0;
    PackSizes sizes;  // longest_padded only includes packs that break no rule
  };

  explicit PackWalk(const Limits& limits);

  // Adds the next `count` packs. The arrays have count + 1 offsets, or count + 2 if more packs follow: the additional
  // offset shows which of two adjacent packs is wrong.
  void packs(const std::int64_t* token_offsets, const std::int64_t* sequence_offsets, std::size_t count,
             bool looks_ahead);
  // Adds the next starts, beginning with next_sequence().
  void starts(const std::uint32_t* values, std::size_t count);
  // Adds the masks of the next tokens.
  template <typename Mask>
  void mask(const Mask* values, std::size_t count);

  std::int64_t next_sequence() const { return sequence_; }
  std::int64_t wanted_sequences() const;  // one past the last sequence of the run
  std::int64_t known() const { return known_; }  // one past the last token of a sequence with a known end

  const std::vector<Breach>& breaches() const { return breaches_; }
  const std::map<std::string, std::int64_t>& counts() const { return counts_; }  // violations of each rule
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
  std::vector<bool> passed_over_;  // by pack; empty if no pack is
  std::int64_t last_end_ = 0, last_sequence_ = 0;  // of the last pack that was not passed over
  std::size_t at_ = 0;    // pack in the run with the next start
  std::size_t seen_ = 0;  // pack in the run with token_

  std::int64_t sequence_ = 0;
  std::int64_t open_ = 0;    // start of the open sequence in its pack
  std::int64_t padded_ = 0;  // positions of the pack's sequences before it, each rounded up
  bool sound_ = true;        // no rule broken in the pack so far

  std::int64_t token_ = 0, known_ = 0;
  bool trained_ = false;            // whether a token of the pack with token_ is trained on
  std::vector<std::int64_t> ends_;  // ends of the sequences completed by the last starts, ascending, with room for more
  std::size_t num_ends_ = 0, next_end_ = 0;
};

}  // namespace sft_idx
