// Assembles a whole micro-batch from the sequences of its rows, wherever they lie in shards.
//
// A row of seq_length positions holds its sequences end to end, each padded to a multiple, and then one tail of
// padding. With multiple 1 cu_seqlens are the boundaries of everything in the row, the tail included. With a larger
// one cu_seqlens_padded are those, and cu_seqlens are running sums of the sequences' own lengths, as Transformer
// Engine wants them beside each other: entry k of one belongs to entry k of the other, the tail has length 0. Either
// ends in zero-length entries up to its width.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sft_idx {

enum class IdType { u16, i32 };
enum class LossType { u8, f32 };

// All tokens of a shard and their label-aligned mask. tokens is null where no segment may name the shard.
struct ShardView {
  const void* tokens = nullptr;
  const void* loss = nullptr;
  std::int64_t count = 0;
  IdType id_type = IdType::i32;
  LossType loss_type = LossType::u8;
};

// Row r holds segments offsets[r] to offsets[r + 1]; a segment is one sequence: its shard, first token and length.
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

// Each [rows, seq_length]. Wide: tokens, labels and position_ids int64, loss_mask float32. Narrow: tokens int32, a
// loss_mask of loss_type, where uint8 takes no float weights, and labels and position_ids null.
struct BatchOut {
  void* tokens;
  std::int64_t* labels;
  std::int64_t* position_ids;
  void* loss_mask;
  LossType loss_type;
};

enum class Per { token = 1, sequence = 2, pack = 3 };

// Rows of a column in one shard, end to end; null where nothing may name them.
struct ColumnView {
  const void* rows = nullptr;
  std::int64_t count = 0;
};

// Values that travel beside the tokens, as bytes. Entry e is a segment, or a row of the batch where `per` is pack: its
// values begin with row starts[e] of shards[slots[e]]. `out` is [rows, seq_length], [rows, width - 1] or [rows].
struct BatchColumn {
  Per per;
  std::size_t row_nbytes;
  std::vector<ColumnView> shards;
  const std::int32_t* slots;
  const std::int64_t* starts;
  void* out;
};

// Writes every item of its outputs; what is padding in a column is zero bytes. Before the first write everything is
// checked against the shards and the shape: std::invalid_argument names the row and what is wrong with it.
void assemble(const std::vector<ShardView>& shards, const SegmentTable& table, const BatchShape& shape,
              const BoundariesOut& boundaries, const BatchOut& out, const std::vector<BatchColumn>& columns);

}  // namespace sft_idx
