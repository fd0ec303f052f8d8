"""Handling of each Megatron-LM argument about data, and errors for arguments that would go wrong.

Four tables list every such argument, so that none is silently ignored:

- ``FIELDS``: sets a field of the configuration.
- ``LOOKED_AT``: is compared with the data, or evaluated together with other arguments.
- ``REFUSED``: does not apply to packed data; any value except Megatron's default is an error.
- ``ELSEWHERE``: affects only Megatron's own code and does not change the rows of data sets.

A test compares the tables with Megatron's parser and fails for an argument that is in none of them.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import package_info
from megatron.core.datasets.utils import Split

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.lines import shown_by_fields

# The release of megatron-core, which is also that of Megatron-LM.
RELEASE = (package_info.MAJOR, package_info.MINOR)

# ---- the tables: the keys are the names of the parsed arguments ----

# The field of PackedSFTDatasetConfig that each argument sets. Fields that a Megatron release does not have are not set.
FIELDS = {
    "seed": "random_seed",
    "seq_length": "sequence_length",
    "multiple_validation_sets": "multiple_validation_sets",
    "full_validation": "full_validation",
    "num_dataset_builder_threads": "num_dataset_builder_threads",
    "data_cache_path": "path_to_cache",
    "object_storage_cache_path": "object_storage_cache_path",
    "global_batch_size": "global_batch_size",
    "mmap_bin_files": "mmap_bin_files",
    "mid_level_dataset_surplus": "mid_level_dataset_surplus",
    "dataloader_fast_cache_load": "fast_cache_load",
    "dataloader_defer_npy_index_mmap": "defer_npy_index_mmap",
}

# Arguments with the shards of a single split.
PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path", "per_split_data_args_path")
_NAMES_SHARDS = "selects shards and their weights"
LOOKED_AT = {
    **dict.fromkeys(
        ("data_path", "data_args_path", *PER_SPLIT),
        _NAMES_SHARDS,
    ),
    "split": "parts of each path of --data-path",
    "tensor_model_parallel_size": "with sequence parallelism, sequences are padded to a multiple of it",
    "sequence_parallel": "as --tensor-model-parallel-size",
    "context_parallel_size": "sequences are padded to a multiple of twice as many",
    "dynamic_context_parallel": "sequences are padded for all ranks that may share one",
    "pipeline_model_parallel_size": "compared with what the release supports",
    "micro_batch_size": "compared with what the release supports",
    "eval_micro_batch_size": "compared with --micro-batch-size",
    "eval_iters": "decides whether a validation split is needed",
    "start_eval_at_iter": "decides whether a validation split is needed",
    "skip_train": "decides whether a training split is needed",
    "sft": "needed",
    "dataloader_inter_document_masking": "rejected with pretraining data; chats always have boundaries",
    "create_attention_mask_in_dataloader": "must be off",
    "calculate_per_token_loss": "needed",
    "hybrid_context_parallel": "rejected: it loses sequences",
    "sequence_packing_scheduler": "single sequences instead of packs",
    "use_varlen_dataset": "single sequences instead of packs",
    "max_seqlen_per_dp_cp_rank": "compared with --seq-length",
    "padded_vocab_size": "compared with the vocabulary of the shards",
    "tokenizer_model": "compared with the tokenizer of the shards",
}


@shown_by_fields
class Refused(NamedTuple):
    """An argument that does not apply to packed data.

    Attributes:
        default: the default of Megatron's parser, which is accepted.
        why: the effect that it would have, and what to do instead.
        flag: the command-line flag, if it does not follow from the name.
    """

    default: Any
    why: str
    flag: str | None = None


_FIM = "is for --fim-data, which splits texts to train on their middle; packs do not support that, so leave it out"
_BERT = "is for BERT datasets; leave it out"
_MADE_UP = "is for mock data; leave it out, and pass shards with --data-path"
_FORMATTED = (
    "has no effect, because chats were formatted when their shard was made; leave it out, and see megatron-sft-idx"
    " preprocess --chat-template"
)
REFUSED = {
    "fim_data": Refused(False, "splits texts to train on their middle, which packs do not support; leave it out"),
    "fim_rate": Refused(0.5, _FIM),
    "fim_spm_rate": Refused(0.5, _FIM),
    "fim_split_sample": Refused(None, _FIM),
    "fim_fragment_rate": Refused(None, _FIM),
    "fim_no_prefix": Refused(None, _FIM),
    "fim_prefix_token": Refused("<fim_prefix>", _FIM),
    "fim_middle_token": Refused("<fim_middle>", _FIM),
    "fim_suffix_token": Refused("<fim_suffix>", _FIM),
    "fim_pad_token": Refused("<fim_pad>", _FIM),
    "fim_eod_token": Refused("<|endoftext|>", _FIM),
    "eod_mask_loss": Refused(
        False, "would remove ends of turns from the loss; leave it out: the masks of shards are final"
    ),
    "reset_position_ids": Refused(False, "is not needed, because positions begin at 0 in every sequence; leave it out"),
    "reset_attention_mask": Refused(False, "is not needed, because attention never crosses sequences; leave it out"),
    "dataloader_type": Refused(
        "single",
        "does not read rows in order, so a resumed run would repeat some; leave it out: every epoch is shuffled anyway",
    ),
    "data_sharding": Refused(
        True, "is for --dataloader-type cyclic, which repeats rows; leave it out", "--no-data-sharding"
    ),
    "varlen_sbhd_validation": Refused(
        False, "validates on rows with a different layout than single sequences; leave it out"
    ),
    "mock_data": Refused(False, "trains on mock data; leave it out, and pass shards with --data-path"),
    "sft_mock_dataset_config_json": Refused(None, _MADE_UP),
    "varlen_mock_dataset_config_json": Refused(None, _MADE_UP),
    "sft_tokenizer_prompt_format": Refused("nemotron-h-aligned", _FORMATTED),
    "chat_template": Refused(None, _FORMATTED),
    "sample_rate": Refused(
        1.0, "is not used by any dataset of Megatron; use the weights of a blend to control how often rows are used"
    ),
    "mask_prob": Refused(0.15, _BERT),
    "short_seq_prob": Refused(0.1, _BERT),
    "data_per_class_fraction": Refused(1.0, "is for image classification; leave it out"),
    "decoder_seq_length": Refused(None, "is for encoder-decoder models; use --seq-length"),
}

_TOKENIZER = "Megatron's tokenizer, which is not used for rows, because shards contain token ids"
_VOCABULARY = "the size of the model's vocabulary, compared with the vocabulary of the shards"
_LOADER = "the DataLoader of any dataset"
_LOOP = "the training and evaluation loop of any dataset"
_BATCHES = "the number of rows per step; their order is the same"
ELSEWHERE = {
    **dict.fromkeys(("vocab_size", "pad_vocab_size", "make_vocab_size_divisible_by"), _VOCABULARY),
    **dict.fromkeys(
        [
            *("vocab_file", "merge_file", "vocab_extra_ids", "tokenizer_type", "metadata_path", "special_tokens"),
            *("tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens"),
            *("tokenizer_sentencepiece_legacy", "tokenizer_sentencepiece_ignore_extra_whitespaces"),
            *("tokenizer_hf_no_use_fast", "tokenizer_hf_no_include_special_tokens", "trust_remote_code"),
            *("null_tokenizer_eod_id", "null_tokenizer_pad_id", "use_gigatoken"),
            *("use_tokenizer_model_from_checkpoint_args", "save_tokenizer_assets"),
        ],
        _TOKENIZER,
    ),
    **dict.fromkeys(("num_workers", "exit_signal_handler_for_dataloader"), _LOADER),
    **dict.fromkeys(
        [
            *("train_iters", "train_samples", "iterations_to_skip", "eval_interval", "test_mode"),
            *("validation_set_names", "phase_transition_iterations"),
        ],
        _LOOP,
    ),
    **dict.fromkeys(
        [
            *("rampup_batch_size", "step_batch_size_schedule", "decrease_batch_size_if_needed"),
            *("eval_global_batch_size", "batch_size"),
        ],
        _BATCHES,
    ),
    "encoder_seq_length": "another name of --seq-length, which Megatron sets from it",
    "allow_ambiguous_pad_tokens": "which padding tokens to mask; the loss masks of shards already do that",
    "per_dataset_sequences_path": "the number of documents in .idx files; the headers of shards have it",
}

# ---- errors ----


def require_arguments(args: Namespace, release: tuple[int, int] = RELEASE) -> None:
    """Raise FormatError, with one line per problem, if Megatron-LM would hang or train on something else.

    Args:
        args: Megatron's arguments; arguments unknown to the release can be missing.
        release: major and minor version of Megatron.
    """
    if complaints := [*_complaints(args, release), *_refused(args), *_conflicts(args)]:
        raise FormatError("\n".join(complaints))


def _refused(args: Namespace) -> Iterator[str]:
    for name, refused in REFUSED.items():
        if (value := getattr(args, name, None)) is None or value == refused.default:
            continue
        if name == "sft_mock_dataset_config_json" and getattr(args, "mock_data", False):
            continue  # set by Megatron itself
        shown = "" if isinstance(value, bool) else f" {value}"
        yield f"{refused.flag or '--' + name.replace('_', '-')}{shown} {refused.why}"


def _conflicts(args: Namespace) -> Iterator[str]:
    split, per_split = getattr(args, "split", None), [name for name in PER_SPLIT if getattr(args, name, None)]
    if split and per_split:
        named = per_split[0].replace("_", "-")
        yield f"--split {split} applies to --data-path, but --{named} is also given; leave one of them out"
    if getattr(args, "multiple_validation_sets", False) and not getattr(args, "full_validation", False):
        yield "--multiple-validation-sets: Megatron only supports it together with --full-validation; add that"


def _complaints(args: Namespace, release: tuple[int, int]) -> Iterator[str]:
    def of(name: str, default: Any) -> Any:
        value = getattr(args, name, default)
        return default if value is None else value

    number = ".".join(map(str, release))
    tensor, context = of("tensor_model_parallel_size", 1), of("context_parallel_size", 1)
    scheduled, rows = is_scheduled(args), of("micro_batch_size", 1)
    if not of("sft", True) and not scheduled and release >= (0, 17):
        yield (
            "--sft is missing: without it, Megatron does not pass the sequence boundaries to every rank, so sequences"
            " of a row would see each other; add --sft"
        )
    if of("create_attention_mask_in_dataloader", False):
        yield (
            "--no-create-attention-mask-in-dataloader is missing: with tensor parallelism, Megatron hangs waiting for"
            " an attention mask that packed rows do not have; add --no-create-attention-mask-in-dataloader"
        )
    if not of("calculate_per_token_loss", True):
        yield (
            "--calculate-per-token-loss is missing: otherwise every micro-batch has the same weight, no matter how"
            " few tokens it trains; add --calculate-per-token-loss"
        )
    if rows > 1 and release < (0, 19):
        yield (
            f"--micro-batch-size {rows}: Megatron {number} only supports packed rows with one row per micro-batch; use"
            " --micro-batch-size 1, or Megatron 0.19 or later"
        )
    if (evaluated := of("eval_micro_batch_size", rows)) != rows and tensor > 1:
        yield (
            f"--eval-micro-batch-size {evaluated}: with tensor parallelism, Megatron receives evaluation batches in"
            f" the shape of --micro-batch-size {rows}; make them equal"
        )
    if context > 1 and release < (0, 18):
        yield (
            f"--context-parallel-size {context}: Megatron {number} drops the boundaries of padded sequences; use"
            " --context-parallel-size 1, or Megatron 0.18 or later"
        )
    if tensor > 1 and release < (0, 17) and not _makes_room():
        yield (
            f"--tensor-model-parallel-size {tensor}: Megatron {number} hangs on ranks that do not allocate max_seqlen;"
            " change get_batch_on_this_tp_rank as described in docs/megatron.md, or use Megatron 0.17 or later"
        )
    if (stages := of("pipeline_model_parallel_size", 1)) > 2 and release < (0, 17):
        yield (
            f"--pipeline-model-parallel-size {stages}: Megatron {number} passes boundaries only to the first and the"
            " last stage; use at most 2, or Megatron 0.17 or later"
        )
    if of("hybrid_context_parallel", False):
        yield (
            "--hybrid-context-parallel splits rows at boundaries without padding, and loses sequences; use"
            " --context-parallel-size instead"
        )
    scheduler, dynamic = getattr(args, "sequence_packing_scheduler", None), of("dynamic_context_parallel", False)
    if (scheduled or dynamic) and scheduler != (wanted := "default_dynamic_cp" if dynamic else "dp_balanced"):
        yield (
            f"--sequence-packing-scheduler {scheduler}: single sequences are only supported with dp_balanced, or with"
            f" default_dynamic_cp and --dynamic-context-parallel; use --sequence-packing-scheduler {wanted}, or leave"
            " out both this option and --use-varlen-dataset"
        )
    ranks = sharing_ranks(args)
    if dynamic and ranks & (ranks - 1):
        yield (
            f"--dynamic-context-parallel: data-parallel x context-parallel size is {ranks}; Megatron divides sequences"
            " among 2, 4, 8 ... of these ranks, so choose a number of ranks that makes this a power of two"
        )
    if scheduled and (room := of("max_seqlen_per_dp_cp_rank", args.seq_length) * ranks) < args.seq_length:
        yield (
            f"--max-seqlen-per-dp-cp-rank allows {room} tokens (ranks that share a sequence: {ranks}), but"
            f" sequences have up to --seq-length {args.seq_length} tokens; raise the first or lower the second"
        )


def sharing_ranks(args: Namespace) -> int:
    """Return the maximum number of ranks that can share a sequence."""
    names = ["context_parallel_size"]
    if getattr(args, "dynamic_context_parallel", False):
        names.append("data_parallel_size")
    return math.prod(getattr(args, name, None) or 1 for name in names)


def _makes_room() -> bool:
    """Return whether all ranks of Megatron 0.16 receive ``max_seqlen``; this needs a patch of Megatron."""
    receive = getattr(sys.modules.get("megatron.training.utils"), "get_batch_on_this_tp_rank", None)
    # Unpatched, two tensors are received only under hybrid context parallelism: max_seqlen and an unrelated one.
    return receive is None or inspect.getsource(receive).count("if args.hybrid_context_parallel else None") < 2


def is_scheduled(args: Namespace) -> bool:
    """Return whether Megatron packs during training and needs single sequences."""
    return bool(getattr(args, "sequence_packing_scheduler", None) or getattr(args, "use_varlen_dataset", False))


def require_whole_rows(args: Namespace, pretraining: Sequence[str]) -> None:
    """Raise FormatError if Megatron's arguments require rows of pretraining data to be cut into documents.

    Args:
        args: Megatron's arguments.
        pretraining: the paths of pretraining data in the blend.
    """
    if pretraining and getattr(args, "dataloader_inter_document_masking", False):
        raise FormatError(
            f"--dataloader-inter-document-masking: not supported with {pretraining[0]}, whose rows are one segment in"
            " which documents see each other; leave it out"
        )


# ---- requested splits ----


def require_splits(args: Namespace, config: Any, num_samples: Sequence[int | None]) -> None:
    """Raise FormatError if Megatron will request rows of a split that has no data.

    Megatron does not report this itself. Without training data, it ends without training a step. Without validation
    data, it fails at the first evaluation.

    Args:
        args: Megatron's arguments.
        config: a ``PackedSFTDatasetConfig``.
        num_samples: requested rows of each split; None is one epoch, 0 is none.
    """
    per_split = config.blend_per_split is not None and any(config.blend_per_split)
    has_data = [bool(each) for each in (config.blend_per_split if per_split else config.split_matrix)]
    for split, wanted in zip(Split, num_samples, strict=True):
        blend = config.blend_per_split[split.value] if per_split else config.blend
        if wanted is None and has_data[split.value] and blend[1] is not None:
            raise FormatError(
                f"--full-validation reads all rows of the {split.name} split once, so weights of paths have no effect;"
                " leave the weights out, or use --train-data-path with weights and --valid-data-path without"
            )
    of_split = "assign a part of --split to it, such as --split 99,1,0"
    if not has_data[0] and num_samples[0] != 0 and not getattr(args, "skip_train", False):
        remedy = "pass shards with --train-data-path" if per_split else of_split
        raise FormatError(f"nothing to train on: {remedy}, or add --skip-train to only evaluate")
    eval_iters, full = getattr(args, "eval_iters", None), getattr(args, "full_validation", False)
    # Megatron always evaluates after the last step if --eval-iters is above 0.
    if has_data[1] or not (num_samples[1] or full or eval_iters):
        return
    if num_samples[1] == 0:
        raise FormatError(
            f"--start-eval-at-iter {getattr(args, 'start_eval_at_iter', None)} is after the last evaluation for which"
            " Megatron requests data, but Megatron still evaluates after the last step; lower it, or use --eval-iters"
            " 0"
        )
    remedy = "pass shards with --valid-data-path" if per_split else of_split
    evaluation = "--full-validation" if full else f"--eval-iters {eval_iters or 'above 0'}"
    leave = "leave it out" if full else "turn evaluation off with --eval-iters 0"
    raise FormatError(
        f"{evaluation}: there is no validation data, so Megatron would fail at the first evaluation; {remedy},"
        f" or {leave}"
    )


def require_rows(built: Sequence[Any], num_samples: Sequence[int | None]) -> None:
    """Raise FormatError on every rank if Megatron will request rows that a data set does not have.

    A blend without weights is read once; after that, Megatron ends with StopIteration. If a blend opens its indices
    only at the first row, they may be missing. All ranks must call this together, because only some of them have built
    the data sets.
    """
    complaints = [[*_short_of_rows(built, num_samples), *_without_indices(built)]]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(complaints, src=0)
    if complaints[0]:
        raise FormatError("\n".join(complaints[0]))


def _short_of_rows(built: Sequence[Any], num_samples: Sequence[int | None]) -> Iterator[str]:
    for split, data_set, wanted in zip(Split, built, num_samples, strict=True):
        if data_set is not None and not isinstance(data_set, list) and len(data_set) < (wanted or 0):
            yield (
                f"the {split.name} split has {len(data_set)} rows, but Megatron will request {wanted}: paths without"
                " weights are read only once; write WEIGHT PATH for each of them, or train or evaluate for fewer"
                " steps"
            )


def _without_indices(built: Sequence[Any]) -> Iterator[str]:
    members = [member for data_set in built for member in getattr(data_set, "datasets", [data_set])]
    rows = [getattr(getattr(member, "source", None), "dataset", None) for member in members]  # pretraining data only
    paths = [getattr(data_set, "path_to_dataset_index", None) for data_set in built]
    for path in (*paths, *(getattr(each, "path_to_shuffle_index", None) for each in rows)):
        if path is not None and not os.path.exists(path):
            yield (
                f"--dataloader-defer-npy-index-mmap: {path}, an index of the blend, does not exist; create it by"
                " running once without this flag and with the same --data-cache-path"
            )
            return
