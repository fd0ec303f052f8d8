// Assembles a micro-batch from the sequences of its rows, which can be anywhere in the shards.
//
// A row has seq_length positions: its sequences one after another, each padded to a multiple, then padding (the tail).
// With multiple 1, cu_seqlens are the boundaries of all sequences and of the tail. With a larger multiple, these
// boundaries are cu_seqlens_padded, and cu_seqlens are running sums of the sequence lengths without padding, as
// Transformer Engine expects: entry k of one array belongs to entry k of the other, and the tail has length 0.
// Both arrays are filled up to their width with entries of length zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sft_idx {

enum class IdType { u16, i32 };
enum class LossType { u8, f32 };

// All tokens of a shard and their label-aligned mask. tokens is null if no segment refers to the shard.
struct ShardView {
  const void* tokens = nullptr;
  const void* loss = nullptr;
  std::int64_t count = 0;
  IdType id_type = IdType::i32;
  LossType loss_type = LossType::u8;
};

// Row r consists of segments offsets[r] to offsets[r + 1]. A segment is one sequence: shard, first token and length.
struct SegmentTable {
  const std::int64_t* offsets;
  std::size_t rows;
  const std::int32_t* shards;
  const std::int64_t* starts;
  const std::int64_t* lengths;
  std::size_t segments;
};

struct BatchShape {
  std::int64_t seq_length;
  std::int64_t width;  // of cu_seqlens and cu_seqlens_padded
  std::int64_t multiple;
  std::int32_t pad_id;
};

// cu_seqlens and cu_seqlens_padded [rows, width], max_seqlen [rows]; cu_seqlens_padded is null with multiple 1.
struct BoundariesOut {
  std::int32_t* cu_seqlens;
  std::int32_t* cu_seqlens_padded;
  std::int32_t* max_seqlen;
};

// Each array is [rows, seq_length]. Wide: tokens, labels and position_ids are int64, loss_mask is float32. Narrow:
// tokens are int32, loss_mask has loss_type (uint8 cannot store float weights), labels and position_ids are null.
struct BatchOut {
  void* tokens;
  std::int64_t* labels;
  std::int64_t* position_ids;
  void* loss_mask;
  LossType loss_type;
};

enum class Per { token = 1, sequence = 2, pack = 3 };

// Rows of a column in one shard, contiguous; null if nothing refers to them.
struct ColumnView {
  const void* rows = nullptr;
  std::int64_t count = 0;
};

// Values of a column, as bytes. Entry e is a segment, or a row of the batch if `per` is pack. Its values begin with row
// starts[e] of shards[slots[e]]. `out` is [rows, seq_length], [rows, width - 1] or [rows].
struct BatchColumn {
  Per per;
  std::size_t row_nbytes;
  std::vector<ColumnView> shards;
  const std::int32_t* slots;
  const std::int64_t* starts;
  void* out;
};

// Writes every item of its outputs; padding in a column is zero bytes. Before the first write, everything is checked
// against the shards and the shape. std::invalid_argument has the row and the error.
void assemble(const std::vector<ShardView>& shards, const SegmentTable& table, const BatchShape& shape,
              const BoundariesOut& boundaries, const BatchOut& out, const std::vector<BatchColumn>& columns);

}  // namespace sft_idx
