#include "batch.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace sft_idx {
namespace {

constexpr std::int64_t kMostPositions = std::numeric_limits<std::int32_t>::max();

std::int64_t round_up(std::int64_t length, std::int64_t multiple) {
  return (length + multiple - 1) / multiple * multiple;
}

[[noreturn]] void refuse(std::size_t row, const std::string& what) {
  throw std::invalid_argument("row " + std::to_string(row) + ": " + what);
}

void check_shape(const SegmentTable& table, const BatchShape& shape) {
  if (shape.multiple < 1 || shape.multiple > kMostPositions) {
    throw std::invalid_argument("the sequence multiple must be a positive int32");
  }
  if (shape.seq_length < 1 || shape.seq_length > kMostPositions || shape.seq_length % shape.multiple != 0) {
    throw std::invalid_argument("sequence length " + std::to_string(shape.seq_length) +
                                " is not a positive int32 that the sequence multiple " +
                                std::to_string(shape.multiple) + " divides");
  }
  if (shape.width < 2) throw std::invalid_argument("cu_seqlens must have a width of at least 2");
  if (shape.pad_id < 0) throw std::invalid_argument("the pad id is negative");
  for (std::size_t row = 0; row < table.rows; ++row) {
    if (table.offsets[row] < 0 || table.offsets[row] > table.offsets[row + 1] ||
        table.offsets[row + 1] > static_cast<std::int64_t>(table.segments)) {
      refuse(row, "its offsets do not ascend, or exceed the segments");
    }
  }
}

void check_row(const std::vector<ShardView>& shards, const SegmentTable& table, const BatchShape& shape,
               std::size_t row) {
  std::int64_t used = 0;
  for (std::int64_t s = table.offsets[row]; s < table.offsets[row + 1]; ++s) {
    const std::int32_t shard = table.shards[s];
    const std::int64_t start = table.starts[s], length = table.lengths[s];
    if (shard < 0 || static_cast<std::size_t>(shard) >= shards.size() || shards[shard].tokens == nullptr) {
      refuse(row, "segment " + std::to_string(s) + " refers to shard " + std::to_string(shard) +
                      ", which does not exist");
    }
    const std::int64_t count = shards[shard].count;
    if (length < 1 || length > count || start < 0 || start > count - length) {
      refuse(row, "segment " + std::to_string(s) + " begins at " + std::to_string(start) + " and has " +
                      std::to_string(length) + " tokens, but shard " + std::to_string(shard) + " has " +
                      std::to_string(count) + "; the index is damaged, or belongs to another shard");
    }
    // Neither sum can overflow, because the remaining room and the multiple are below 2^31.
    const std::int64_t room = shape.seq_length - used;
    if (length > room || round_up(length, shape.multiple) > room) {
      refuse(row, "its sequences, each padded to a multiple of " + std::to_string(shape.multiple) +
                      ", need more than " + std::to_string(shape.seq_length) + " positions");
    }
    used += round_up(length, shape.multiple);
  }
  const std::int64_t entries = table.offsets[row + 1] - table.offsets[row] + 1 + (used < shape.seq_length ? 1 : 0);
  if (entries > shape.width) {
    refuse(row, "cu_seqlens of width " + std::to_string(shape.width) + " have no room for its " +
                    std::to_string(entries) + " boundaries");
  }
}

void check_column(const SegmentTable& table, const BatchColumn& column, std::size_t row) {
  const bool one = column.per == Per::pack;
  const auto first = one ? static_cast<std::int64_t>(row) : table.offsets[row];
  const auto last = one ? first + 1 : table.offsets[row + 1];
  for (std::int64_t e = first; e < last; ++e) {
    const std::int64_t slot = column.slots[e], start = column.starts[e];
    const std::int64_t wanted = column.per == Per::token ? table.lengths[e] : 1;
    const bool there = slot >= 0 && static_cast<std::size_t>(slot) < column.shards.size();
    const ColumnView shard = there ? column.shards[slot] : ColumnView{};
    if (shard.rows == nullptr || start < 0 || wanted > shard.count || start > shard.count - wanted) {
      refuse(row, "needs " + std::to_string(wanted) + " rows of a column from row " + std::to_string(start) +
                      " of shard " + std::to_string(slot) + ", which has " + std::to_string(shard.count) +
                      "; the index is damaged, or belongs to another shard");
    }
  }
}

// ---- writing ----

void write_boundaries(const SegmentTable& table, const BatchShape& shape, std::size_t row, const BoundariesOut& out) {
  const bool padded = out.cu_seqlens_padded != nullptr;
  const auto width = static_cast<std::size_t>(shape.width);
  std::int32_t* logical = out.cu_seqlens + row * width;
  std::int32_t* physical = padded ? out.cu_seqlens_padded + row * width : logical;
  std::int64_t own = 0, at = 0, longest = 0;
  std::size_t k = 0;
  logical[0] = physical[0] = 0;
  for (std::int64_t s = table.offsets[row]; s < table.offsets[row + 1]; ++s) {
    const std::int64_t room = round_up(table.lengths[s], shape.multiple);
    own += table.lengths[s];
    at += room;
    longest = std::max(longest, room);
    ++k;
    logical[k] = static_cast<std::int32_t>(own);
    physical[k] = static_cast<std::int32_t>(at);
  }
  longest = std::max(longest, shape.seq_length - at);
  if (padded) std::fill(logical + k + 1, logical + width, static_cast<std::int32_t>(own));
  std::fill(physical + k + 1, physical + width, static_cast<std::int32_t>(shape.seq_length));
  out.max_seqlen[row] = static_cast<std::int32_t>(longest);
}

template <typename In, typename Out>
void widen(const In* __restrict from, std::size_t count, Out* __restrict to) {
  if constexpr (std::is_same_v<In, Out>) {
    std::memcpy(to, from, count * sizeof(In));
  } else {
    for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<Out>(from[i]);
  }
}

void count_up(std::int64_t* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<std::int64_t>(i);
}

// Ids of a segment from `first` on.
template <typename Out>
void copy_ids(const ShardView& shard, std::int64_t first, std::size_t count, Out* to) {
  if (shard.id_type == IdType::u16) {
    widen(static_cast<const std::uint16_t*>(shard.tokens) + first, count, to);
  } else {
    widen(static_cast<const std::int32_t*>(shard.tokens) + first, count, to);
  }
}

template <typename Out>
void copy_loss(const ShardView& shard, std::int64_t first, std::size_t count, Out* to) {
  if (shard.loss_type == LossType::u8) {
    widen(static_cast<const std::uint8_t*>(shard.loss) + first, count, to);
  } else {
    widen(static_cast<const float*>(shard.loss) + first, count, to);
  }
}

// The mask of a segment of `room` positions. The last position predicts nothing.
template <typename Out>
void write_loss(const ShardView& shard, std::int64_t first, std::size_t count, std::size_t room, Out* to) {
  copy_loss(shard, first, count - 1, to);
  std::fill(to + count - 1, to + room, Out{0});
}

// Calls segment(shard, first token, tokens, positions, output position) for each sequence of a row, and
// tail(positions, output position) for the padding at the end.
template <typename Segment, typename Tail>
void walk_row(const std::vector<ShardView>& shards, const SegmentTable& table, const BatchShape& shape, std::size_t row,
              Segment segment, Tail tail) {
  const auto seq_length = static_cast<std::size_t>(shape.seq_length);
  std::size_t at = row * seq_length;
  for (std::int64_t s = table.offsets[row]; s < table.offsets[row + 1]; ++s) {
    const auto room = static_cast<std::size_t>(round_up(table.lengths[s], shape.multiple));
    segment(shards[table.shards[s]], table.starts[s], static_cast<std::size_t>(table.lengths[s]), room, at);
    at += room;
  }
  tail((row + 1) * seq_length - at, at);
}

// One row of a batch in a column: values of the sequences, and zeros for padding.
void write_column(const SegmentTable& table, const BatchShape& shape, std::size_t row, const BatchColumn& column) {
  const bool by_token = column.per == Per::token, by_pack = column.per == Per::pack;
  const std::int64_t entries = by_token ? shape.seq_length : by_pack ? 1 : shape.width - 1;
  const std::size_t nbytes = column.row_nbytes, all = static_cast<std::size_t>(entries) * nbytes;
  char *to = static_cast<char*>(column.out) + row * all, *const end = to + all;
  const auto put = [&](std::size_t entry, std::int64_t count, std::int64_t room) {
    const auto* from = static_cast<const char*>(column.shards[column.slots[entry]].rows);
    const std::size_t taken = static_cast<std::size_t>(count) * nbytes, wide = static_cast<std::size_t>(room) * nbytes;
    std::memcpy(to, from + static_cast<std::size_t>(column.starts[entry]) * nbytes, taken);
    std::memset(to + taken, 0, wide - taken);
    to += wide;
  };
  if (by_pack) put(row, 1, 1);
  for (std::int64_t s = table.offsets[row]; !by_pack && s < table.offsets[row + 1]; ++s) {
    put(s, by_token ? table.lengths[s] : 1, by_token ? round_up(table.lengths[s], shape.multiple) : 1);
  }
  std::memset(to, 0, static_cast<std::size_t>(end - to));
}

// Wide if ids are int64.
template <typename Id, typename Loss>
void write_rows(const std::vector<ShardView>& shards, const SegmentTable& table, const BatchShape& shape,
                const BoundariesOut& boundaries, const BatchOut& out) {
  auto *tokens = static_cast<Id*>(out.tokens);
  auto *loss = static_cast<Loss*>(out.loss_mask);
  const Id pad = shape.pad_id;
  constexpr bool wide = std::is_same_v<Id, std::int64_t>;
  for (std::size_t row = 0; row < table.rows; ++row) {
    write_boundaries(table, shape, row, boundaries);
    walk_row(
        shards, table, shape, row,
        [&](const ShardView& shard, std::int64_t first, std::size_t count, std::size_t room, std::size_t at) {
          copy_ids(shard, first, count, tokens + at);
          std::fill(tokens + at + count, tokens + at + room, pad);
          if constexpr (wide) {
            std::int64_t* labels = out.labels + at;
            copy_ids(shard, first + 1, count - 1, labels);
            std::fill(labels + count - 1, labels + room, pad);
            count_up(out.position_ids + at, room);
          }
          write_loss(shard, first, count, room, loss + at);
        },
        [&](std::size_t count, std::size_t at) {
          std::fill_n(tokens + at, count, pad);
          if constexpr (wide) {
            std::fill_n(out.labels + at, count, pad);
            count_up(out.position_ids + at, count);
          }
          std::fill_n(loss + at, count, Loss{0});
        });
  }
}

}  // namespace

void assemble(const std::vector<ShardView>& shards, const SegmentTable& table, const BatchShape& shape,
              const BoundariesOut& boundaries, const BatchOut& out, const std::vector<BatchColumn>& columns) {
  check_shape(table, shape);
  for (std::size_t row = 0; row < table.rows; ++row) {
    check_row(shards, table, shape, row);
    for (const BatchColumn& column : columns) check_column(table, column, row);
  }
  const bool flags = out.loss_type == LossType::u8;
  for (const ShardView& shard : shards) {
    if (flags && shard.tokens != nullptr && shard.loss_type == LossType::f32) {
      throw std::invalid_argument(
          "a uint8 mask cannot store the float32 weights of the shards; request a float32 mask");
    }
  }
  const auto write = out.labels != nullptr ? &write_rows<std::int64_t, float>
                     : flags               ? &write_rows<std::int32_t, std::uint8_t>
                                           : &write_rows<std::int32_t, float>;
  write(shards, table, shape, boundaries, out);
  for (std::size_t row = 0; row < table.rows; ++row) {
    for (const BatchColumn& column : columns) write_column(table, shape, row, column);
  }
}

}  // namespace sft_idx
