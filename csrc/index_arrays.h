// Index arrays derived from lengths: the running sums that .idx and .seq.idx store; and from starts, where packs lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sft_idx {

// out[i] = start + scale * (lengths[0] + ... + lengths[i-1]) for i in [0, count]; out holds count + 1 values.
// Throws std::invalid_argument on a negative length or a sum past 2^63 - 1.
// One chunk's last value is the next chunk's start, so an index of any size is built in pieces.
void offsets_from_lengths(const std::int64_t* lengths, std::size_t count, std::int64_t scale, std::int64_t start,
                          std::int64_t* out);

// The index of one shard, as its files hold it: nothing in it is known to be right.
struct PackIndex {
  const std::int64_t* sequence_offsets = nullptr;  // [packs + 1]
  const std::int64_t* token_offsets = nullptr;     // [packs + 1]
  std::size_t packs = 0;
  const std::uint32_t* starts = nullptr;  // [sequences], inside their pack
  std::size_t sequences = 0;
  std::int64_t tokens = 0;
};

// The sequences of the wanted packs, end to end: offsets[i] to offsets[i + 1] are those of the i-th.
struct PackSegments {
  std::vector<std::int64_t> offsets;
  std::vector<std::int32_t> shards;
  std::vector<std::int64_t> starts, lengths;
};

// What the packs of all shards keep to: positions with each sequence rounded up to the multiple, and sequences.
struct PackLimits {
  std::int64_t capacity, multiple, most_sequences;
};

// The i-th wanted pack is packs[i] of shard shards[i]. Throws std::invalid_argument where a pack is not there, its
// sequences would lie outside it or its shard, or it keeps to no such limits: offsets that are wrong together.
PackSegments pack_segments(const std::vector<PackIndex>& indexes, const std::int64_t* shards,
                           const std::int64_t* packs, std::size_t count, const PackLimits& limits);

// Absolute positions of all sequences: out[s] = token_offsets[pack of s] + starts[s], and the token count last.
// sequence_offsets and token_offsets are the CSR arrays of .seq.idx. Throws where they disagree with starts.
void absolute_offsets(const std::int64_t* sequence_offsets, const std::int64_t* token_offsets, std::size_t packs,
                      const std::uint32_t* starts, std::size_t starts_count, std::int64_t* out);

}  // namespace sft_idx
