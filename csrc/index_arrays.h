// Index arrays: running sums of lengths, which .idx and .seq.idx store, and positions of packs, derived from starts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sft_idx {

// out[i] = start + scale * (lengths[0] + ... + lengths[i-1]) for i in [0, count]; out has count + 1 values.
// Throws std::invalid_argument on a negative length or a sum past 2^63 - 1.
// The last value of one chunk is the start of the next, so an index of any size can be built in pieces.
void offsets_from_lengths(const std::int64_t* lengths, std::size_t count, std::int64_t scale, std::int64_t start,
                          std::int64_t* out);

// The index of one shard as stored in its files. It can contain any errors.
struct PackIndex {
  const std::int64_t* sequence_offsets = nullptr;  // [packs + 1]
  const std::int64_t* token_offsets = nullptr;     // [packs + 1]
  std::size_t packs = 0;
  const std::uint32_t* starts = nullptr;  // [sequences], positions in their pack
  std::size_t sequences = 0;
  std::int64_t tokens = 0;
};

// The sequences of the requested packs, one after another; pack i has sequences offsets[i] to offsets[i + 1].
struct PackSegments {
  std::vector<std::int64_t> offsets;
  std::vector<std::int32_t> shards;
  std::vector<std::int64_t> starts, lengths;
};

// Limits of all packs: positions, with each sequence rounded up to the multiple, and number of sequences.
struct PackLimits {
  std::int64_t capacity, multiple, most_sequences;
};

// Requested pack i is packs[i] of shard shards[i]. Throws std::invalid_argument if a pack does not exist, if its
// sequences would exceed it or its shard, or if it exceeds the limits, which happens if several offsets are wrong.
PackSegments pack_segments(const std::vector<PackIndex>& indexes, const std::int64_t* shards,
                           const std::int64_t* packs, std::size_t count, const PackLimits& limits);

// Absolute positions of all sequences: out[s] = token_offsets[pack of s] + starts[s], and the token count last.
// sequence_offsets and token_offsets are the CSR arrays of .seq.idx. Throws if they do not match starts.
void absolute_offsets(const std::int64_t* sequence_offsets, const std::int64_t* token_offsets, std::size_t packs,
                      const std::uint32_t* starts, std::size_t starts_count, std::int64_t* out);

}  // namespace sft_idx
