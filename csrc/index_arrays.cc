#include "index_arrays.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace sft_idx {

void offsets_from_lengths(const std::int64_t* lengths, std::size_t count, std::int64_t scale, std::int64_t start,
                          std::int64_t* out) {
  std::int64_t sum = start;
  out[0] = sum;
  for (std::size_t i = 0; i < count; ++i) {
    std::int64_t bytes = 0;
    if (lengths[i] < 0) {
      throw std::invalid_argument("lengths[" + std::to_string(i) + "] is " + std::to_string(lengths[i]) +
                                  ", but lengths must not be negative");
    }
    if (__builtin_mul_overflow(lengths[i], scale, &bytes) || __builtin_add_overflow(sum, bytes, &sum)) {
      throw std::invalid_argument("the offset after lengths[" + std::to_string(i) + "] does not fit 63 bits");
    }
    out[i + 1] = sum;
  }
}

PackSegments pack_segments(const std::vector<PackIndex>& indexes, const std::int64_t* shards,
                           const std::int64_t* packs, std::size_t count, const PackLimits& limits) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (limits.multiple < 1 || limits.multiple > kMost || limits.capacity < 0 || limits.capacity > kMost) {
    throw std::invalid_argument("the capacity and the sequence multiple must be positive int32");
  }
  PackSegments out;
  out.offsets.reserve(count + 1);
  out.offsets.push_back(0);
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t shard = shards[i], pack = packs[i];
    const auto refuse = [shard, pack](const std::string& why) {
      throw std::invalid_argument("shard " + std::to_string(shard) + ", pack " + std::to_string(pack) + ": " + why);
    };
    if (shard < 0 || static_cast<std::size_t>(shard) >= indexes.size()) refuse("no such shard");
    const PackIndex& index = indexes[static_cast<std::size_t>(shard)];
    if (pack < 0 || static_cast<std::size_t>(pack) >= index.packs) refuse("no such pack in the shard");
    const std::int64_t first = index.sequence_offsets[pack], last = index.sequence_offsets[pack + 1];
    const std::int64_t begin = index.token_offsets[pack], end = index.token_offsets[pack + 1];
    if (first < 0 || first >= last || static_cast<std::size_t>(last) > index.sequences) {
      refuse("sequence offsets do not ascend or exceed the shard (rule O1)");
    }
    if (begin < 0 || begin >= end || end > index.tokens) {
      refuse("token offsets do not ascend or exceed the shard (rule O2)");
    }
    if (end - begin > limits.capacity) {
      refuse("token offsets give it " + std::to_string(end - begin) + " tokens, expected at most " +
             std::to_string(limits.capacity) + " (rule O2)");
    }
    if (last - first > limits.most_sequences) {
      refuse("sequence offsets give it " + std::to_string(last - first) + " sequences, expected at most " +
             std::to_string(limits.most_sequences) + " (rule O1)");
    }
    if (index.starts[first] != 0) refuse("the first sequence does not start at 0 (rule P2)");
    std::int64_t room = limits.capacity;
    for (std::int64_t s = first; s < last; ++s) {
      const std::int64_t start = begin + index.starts[s];
      const std::int64_t stop = s + 1 < last ? begin + index.starts[s + 1] : end;
      if (start >= stop || stop > end) refuse("sequence starts do not ascend within the pack (rule P3)");
      room -= (stop - start - 1) / limits.multiple * limits.multiple + limits.multiple;
      out.shards.push_back(static_cast<std::int32_t>(shard));
      out.starts.push_back(start);
      out.lengths.push_back(stop - start);
    }
    if (room < 0) {
      refuse("its sequences, each rounded up to a multiple of " + std::to_string(limits.multiple) + ", need " +
             std::to_string(limits.capacity - room) + " positions, expected at most " +
             std::to_string(limits.capacity) + " (rule P5)");
    }
    out.offsets.push_back(static_cast<std::int64_t>(out.starts.size()));
  }
  return out;
}

void absolute_offsets(const std::int64_t* sequence_offsets, const std::int64_t* token_offsets, std::size_t packs,
                      const std::uint32_t* starts, std::size_t starts_count, std::int64_t* out) {
  if (sequence_offsets[0] != 0 || token_offsets[0] != 0) throw std::invalid_argument("offsets must begin with 0");
  for (std::size_t pack = 0; pack < packs; ++pack) {
    // Both begin with 0 and ascend up to this pack, so the differences cannot overflow.
    const std::int64_t begin = sequence_offsets[pack], end = sequence_offsets[pack + 1];
    const auto refuse = [pack](const char* why) {
      throw std::invalid_argument("shard 0, pack " + std::to_string(pack) + ": " + why);
    };
    if (end <= begin || end > static_cast<std::int64_t>(starts_count)) {
      refuse("sequence offsets do not ascend within the shard (rule O1)");
    }
    if (token_offsets[pack + 1] <= token_offsets[pack]) refuse("token offsets do not ascend (rule O2)");
    const std::int64_t length = token_offsets[pack + 1] - token_offsets[pack];
    for (std::int64_t s = begin; s < end; ++s) {
      if (starts[s] >= length || (s == begin ? starts[s] != 0 : starts[s] <= starts[s - 1])) {
        refuse("its sequence starts do not ascend from 0 (rules P2 to P4)");
      }
      out[s] = token_offsets[pack] + starts[s];
    }
  }
  out[starts_count] = token_offsets[packs];
}

}  // namespace sft_idx
