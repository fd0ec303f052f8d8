#!/usr/bin/env bash
# Fine-tune Qwen3-8B with Megatron-LM on the shards of examples/sft_qwen3.yaml. Start it in the folder that has data/:
#
#   MEGATRON_LM=path/to/Megatron-LM BASE=path/to/checkpoint bash examples/megatron_lm.sh
#
# MEGATRON_LM is a checkout, and BASE a checkpoint of the model in Megatron's format. For another model, change
# TOKENIZER and MODEL. --seq-length must be the same as for the shards. Arguments of this script go to Megatron and
# replace those below, for example --lr 2e-5. If the run is killed, the same command continues it. GPUS is the number of
# GPUs (8).
#
# Tests run this script with a tiny model on a CPU, not on GPUs.
set -euo pipefail

TOKENIZER=(
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model Qwen/Qwen3-8B
)
DATA=(
    --train-data-path data/sft
    --valid-data-path data/sft.valid
    --seq-length 4096
    # All three are required: docs/megatron.md gives the reasons.
    --sft
    --no-create-attention-mask-in-dataloader
    --calculate-per-token-loss
)
MODEL=(
    --num-layers 36
    --hidden-size 4096
    --ffn-hidden-size 12288
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --qk-layernorm
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --position-embedding-type rope
    --rotary-base 1000000
    --max-position-embeddings 40960
    --make-vocab-size-divisible-by 128
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
)
TRAINING=(
    --bf16
    --use-distributed-optimizer
    --tensor-model-parallel-size 2
    --micro-batch-size 1
    --global-batch-size 32
    --train-iters 500
    --lr 1e-5
    --min-lr 1e-6
    --lr-decay-style cosine
    --lr-warmup-iters 20
    --weight-decay 0.1
    --clip-grad 1.0
    --eval-interval 100
    --eval-iters 4
    --log-interval 1
    --pretrained-checkpoint "$BASE"
    --load checkpoints/sft
    --save checkpoints/sft
    --save-interval 100
)

torchrun --nproc-per-node "${GPUS:-8}" -m megatron_sft_idx.pretrain "$MEGATRON_LM/pretrain_gpt.py" \
    "${TOKENIZER[@]}" "${DATA[@]}" "${MODEL[@]}" "${TRAINING[@]}" "$@"
