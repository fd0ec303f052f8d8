"""Run commands that people use with Megatron-LM through its parser and checks, our provider, and its data loaders.

``python tests/megatron_habits.py`` prints one line per command: that it works, the error that rejects it, or Megatron's
own error. It uses the installed Megatron or, if MEGATRON_LM is set, that checkout. With arguments, only commands that
contain one of them are run. The exit code is 1 if a command ends in an unexpected way.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__" and "MEGATRON_LM" in os.environ:
    sys.path.insert(0, os.environ["MEGATRON_LM"])

import numpy as np
import torch
from megatron_setups import FLAGS, LENGTH, MODELS, TINY, prepare

from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.training.megatron_arguments import REFUSED

# Groups of Megatron's parser with only arguments about data, and words in the names of other such arguments.
GROUPS = ("data and dataloader", "validation", "tokenizer", "sft", "varlen dataset")
WORDS = re.compile(
    r"(^|-)(data|dataloader|datasets?|samples?|batch|seqlen|packing|tokenizer|epochs?|mask|split|shuffle|seed)(-|$)"
)
# Groups for models and tasks that do not use packed data.
OTHER_GROUPS = ("inference", "rl", "biencoder", "fault injector", "one logger")
# Arguments with one of these words that are not about data.
NOT_DATA = (
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "tp_comm_split_ag"),
    *("tp_comm_split_rs", "muon_split_qkv", "batch_invariant_mode", "data_parallel_random_init"),
    *("data_parallel_sharding_strategy", "lr_decay_samples", "lr_wsd_decay_samples", "lr_warmup_samples"),
    *("mask_type", "mask_factor", "iter_per_epoch", "dino_warmup_teacher_temp_epochs", "te_rng_tracker"),
)
# Values for arguments. All choices of an argument are tried; the default value is 1.
VALUES = {
    "seq_length": str(LENGTH),
    "encoder_seq_length": None,
    "data_path": "{}/chats",
    "train_data_path": None,
    "valid_data_path": None,
    "test_data_path": None,
    "split": "90,10,0",
    "data_cache_path": "{}/cache",
    "object_storage_cache_path": "{}/cache",
    "data_args_path": None,
    "per_split_data_args_path": None,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": "2047",
    "padded_vocab_size": "2048",
    "rampup_batch_size": "4 4 80",
    "step_batch_size_schedule": "0:4",
    "global_batch_size": "8",
    "train_iters": "10",
    "train_samples": None,
    "eval_iters": "0",
    "mock_data": None,
    "sample_rate": "0.5",
    "data_per_class_fraction": "0.5",
    "eval_interval": "5",
    "start_eval_at_iter": "10",
    "eval_global_batch_size": "8",
    "mid_level_dataset_surplus": "0.1",
    "phase_transition_iterations": None,
    "per_dataset_sequences_path": "{}/counts.json",
    "sequence_packing_scheduler": None,
    "use_varlen_dataset": None,
    "max_seqlen_per_dp_cp_rank": str(LENGTH),
    "special_tokens": "<a>",
    "validation_set_names": None,
    "multiple_validation_sets": None,
    "dataloader_fast_cache_load": None,
    "dataloader_defer_npy_index_mmap": None,
    "skip_train": None,
    "full_validation": None,
}


@dataclass(frozen=True)
class Habit:
    """A command.

    Attributes:
        words: arguments after ``BASE`` and the shards. ``{}`` is replaced by the folder of data. ``!`` before a flag
            removes the flag and its value from ``BASE``.
        expected: ``works``, ``refused`` (by us), or ``Megatron`` (its own parser or checks reject it).
        says: text that the message of a rejected command must contain.
        data: the shards; None if ``words`` name them.
        ranks: number of processes that Megatron assumes; one is enough to test rejections.
    """

    words: str
    expected: str = "works"
    says: str = ""
    data: str | None = "--data-path {}/chats"
    ranks: int = 1


BASE = [*TINY, *MODELS["GPT"], *FLAGS]
WRITTEN = [
    Habit(""),
    # splits
    Habit("--split 90,10,0 --eval-iters 2"),
    Habit("--split 999,1,0 --eval-iters 2", "refused", "--eval-iters 0"),
    Habit("--split 1,0,0 --eval-iters 2", "refused", "--split 99,1,0"),
    Habit("--split 100 --eval-iters 2", "refused", "--split 99,1,0"),
    Habit("--split 0,100,0", "refused", "nothing to train on"),
    Habit("--split 969,30,1"),
    Habit("--split 969,30,1 --eval-iters 2", "refused", "--split 99,1,0"),
    Habit("--split 90,10,0,0", "refused", "three numbers"),
    Habit("--split train", "refused", "split 'train'"),
    Habit("--full-validation", "refused", "--full-validation"),
    Habit("--full-validation --split 90,10,0"),
    Habit("--skip-train --split 90,10,0 --eval-iters 2"),
    Habit("--skip-train --split 1,0,0 --eval-iters 2", "refused", "--eval-iters"),
    Habit("--eval-iters 2 --start-eval-at-iter 4000 --split 90,10,0", "refused", "--start-eval-at-iter 4000"),
    # blends
    Habit("--data-path 0.3 {}/chats 0.7 {}/others", data=None),
    Habit("--data-path 30 {}/chats 70 {}/others", data=None),
    Habit("--data-path {}/chats {}/others", data=None),
    Habit("--data-path {}/chats {}/others --train-iters 4000", "refused", "WEIGHT PATH", data=None),
    Habit("--data-path 0.3 {}/chats {}/others", "refused", "has no weight", data=None),
    Habit("--data-path {}/chats 0.3 {}/others 0.7", "refused", "in front of its path", data=None),
    Habit("--data-path 0 {}/chats 1 {}/others", "refused", "weight", data=None),
    Habit("--data-path -1 {}/chats 2 {}/others", "refused", "weight", data=None),
    Habit("--data-path 0.3,{}/chats,0.7,{}/others", "refused", "{}/others", data=None),
    Habit("--data-path 0.5 {}/chats 0.5 {}/others --full-validation --split 90,10,0", "refused", "weights", data=None),
    Habit("--data-path {}/chats {}/others --full-validation --split 90,10,0", data=None),
    # files and folders
    Habit("--data-path {}/none", "refused", "check the prefix", data=None),
    Habit("--data-path {}/chats.seq.idx", data=None),
    Habit("--data-path {}/chats.bin", data=None),
    Habit("--data-path {}/shards", data=None),
    Habit("--data-path {}/empty", "refused", "contains no shard", data=None),
    Habit("--data-path {}/stock", "refused", "pretrain:{}/stock", data=None),
    Habit("--data-path {}/stock.bin", "refused", "pretrain:{}/stock", data=None),
    Habit("--data-path {}/stock.idx", "refused", "pretrain:{}/stock", data=None),
    Habit("--data-path {}/chats.jsonl", "refused", "megatron-sft-idx preprocess --input {}/chats.jsonl", data=None),
    Habit("--data-path {}/rows.parquet", "refused", "megatron-sft-idx preprocess --input {}/rows.parquet", data=None),
    Habit("--data-path {}/packs.npy", "refused", "megatron-sft-idx convert {}/packs.npy", data=None),
    Habit("--data-path {}/arrow", "refused", "megatron-sft-idx preprocess --input {}/arrow", data=None),
    Habit("--data-path {}/jsonls", "refused", "megatron-sft-idx preprocess --input '{}/jsonls/*.jsonl'", data=None),
    Habit("--data-path {}/tokenizer", "refused", "contains no shard", data=None),
    Habit("--data-path somebody/chats", "refused", "somebody/chats", data=None),
    # separate data per split, and data from files
    Habit("--train-data-path {}/chats", "refused", "--split 1,0,0", data=None),
    Habit("!--split --train-data-path {}/chats", data=None),
    Habit("!--split --train-data-path {}/chats --eval-iters 2", "refused", "--valid-data-path", data=None),
    Habit("!--split --train-data-path {}/chats --valid-data-path {}/others --eval-iters 2", data=None),
    Habit("!--split --valid-data-path {}/others --eval-iters 2", "refused", "--train-data-path", data=None),
    Habit("!--split --valid-data-path {}/others --eval-iters 2 --skip-train", data=None),
    Habit(
        "!--split --train-data-path {}/chats --valid-data-path {}/others {}/chats --full-validation"
        " --multiple-validation-sets --validation-set-names a b",
        data=None,
    ),
    Habit(
        "!--split --train-data-path {}/chats --valid-data-path {}/others {}/chats --multiple-validation-sets"
        " --eval-iters 1",
        "refused",
        "--full-validation",
        data=None,
    ),
    Habit("--multiple-validation-sets --full-validation --split 90,10,0"),
    Habit("!--split --per-split-data-args-path {}/splits.json --eval-iters 2", data=None),
    Habit("!--split --per-split-data-args-path {}/train.json", data=None),
    Habit("!--split --per-split-data-args-path {}/paths.txt", "refused", "{}/paths.txt", data=None),
    Habit("!--split --per-split-data-args-path {}/none.json", "refused", "{}/none.json", data=None),
    Habit("--data-args-path {}/paths.txt", data=None),
    Habit("--data-args-path {}/none.txt", "refused", "{}/none.txt", data=None),
    Habit("--data-args-path {}/splits.json", "refused", "--data-args-path", data=None),
    Habit("--data-args-path {}/paths.txt", "Megatron"),
    Habit("", "refused", "--data-path", data=None),
    Habit("--mock-data", "refused", "--mock-data", data=None),
    Habit("--mock-data", "Megatron"),
    # steps and batches
    Habit("--rampup-batch-size 4 4 80 --train-samples 160 --global-batch-size 8 !--train-iters"),
    Habit("--train-samples 80 !--train-iters"),
    Habit("--train-samples 80 --phase-transition-iterations 10 !--train-iters"),
    Habit("--iterations-to-skip 2 3"),
    Habit("--global-batch-size 8 --micro-batch-size 2"),
    Habit("--num-workers 2"),
    Habit("--seq-length 512", "refused", "sequence_length is 512"),
    Habit("--seq-length 272 --max-position-embeddings 544", "refused", "sequence_length is 272"),
    Habit("--encoder-seq-length 544 !--seq-length"),
    Habit("--seq-length 545 --max-position-embeddings 1090 --context-parallel-size 2", "Megatron", ranks=2),
    Habit("--context-parallel-size 2", "refused", "--sequence-multiple 4", ranks=2),
    Habit("--data-path {}/padded --context-parallel-size 2", data=None, ranks=2),
    Habit("--tensor-model-parallel-size 2", ranks=2),
    # required flags, and flags of caches
    Habit("!--sft", "refused", "--sft"),
    Habit("!--calculate-per-token-loss", "refused", "--calculate-per-token-loss"),
    Habit("!--no-create-attention-mask-in-dataloader", "refused", "--no-create-attention-mask-in-dataloader"),
    Habit("--data-cache-path {}/cache --dataloader-defer-npy-index-mmap"),
    Habit("--dataloader-defer-npy-index-mmap", "refused", "--data-cache-path"),
    Habit("--dataloader-fast-cache-load --data-cache-path {}/cache", "refused", "--data-path"),
    Habit("!--split --train-data-path {}/chats --dataloader-fast-cache-load", "refused", "--data-cache", data=None),
    Habit("!--split --train-data-path {}/chats --dataloader-fast-cache-load --data-cache-path {}/cache", data=None),
    Habit(
        "--data-path 1 {}/chats 2 {}/others --data-cache-path {}/none --dataloader-defer-npy-index-mmap",
        "refused",
        "--dataloader-defer-npy-index-mmap",
        data=None,
    ),
    # tokenizers
    Habit("--vocab-size 1000", "refused", "--vocab-size"),
    Habit("--tokenizer-type HuggingFaceTokenizer --tokenizer-model {}/tokenizer"),
    Habit(
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model {}/tokenizer2", "refused", "the tokenizer of this job"
    ),
]


def arguments_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the arguments of Megatron's parser about data, by name.

    If several set the same value, return the first.
    """
    found: dict[str, argparse.Action] = {}
    for group in parser._action_groups:
        for action in group._group_actions:
            named = any(WORDS.search(option.removeprefix("--")) for option in action.option_strings)
            if group.title in GROUPS or (named and group.title not in OTHER_GROUPS and action.dest not in NOT_DATA):
                found.setdefault(action.dest, action)
    return found


def megatron_parser() -> argparse.ArgumentParser:
    """Return the parser of the imported Megatron."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return parser


def generated(arguments: dict[str, argparse.Action]) -> Iterator[Habit]:
    """Yield a command for each argument about data, and for each of its choices."""
    for name, action in arguments.items():
        flag = action.option_strings[0]
        values: list[str | None] = [VALUES.get(name, "1")]
        if action.nargs == 0:
            values = [""]
        elif action.choices and name not in VALUES:
            values = [str(each) for each in action.choices]
        for value in values:
            if name in VALUES and VALUES[name] is None:
                continue  # in WRITTEN, together with the arguments that it needs
            refused = name in REFUSED and (value == "" or value != str(REFUSED[name].default))
            yield Habit(
                f"{flag} {value}".strip(), "refused" if refused else "works or Megatron", flag if refused else ""
            )


# ---- files that the commands use ----


def write_world(folder: Path) -> None:
    """Write shards, and other files that people pass instead of shards."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from chats import CHATS, TOKENIZER
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prepare(folder)
    for name in ("empty", "shards", "jsonls", "arrow"):
        (folder / name).mkdir()
    for file in folder.glob("chats.*"):
        (folder / "shards" / file.name).write_bytes(file.read_bytes())
    builder = IndexedDatasetBuilder(str(folder / "stock.bin"), dtype=np.int32)
    for _ in range(50):
        builder.add_document(torch.arange(100), [100])
    builder.finalize(str(folder / "stock.idx"))
    for name in ("chats.jsonl", "jsonls/chats.jsonl"):
        (folder / name).write_bytes(CHATS.read_bytes())
    np.save(folder / "packs.npy", np.array([{"input_ids": [1, 2], "seq_start_id": [0], "loss_mask": [0, 1]}]))
    table = pa.table({"messages": [[{"role": "user", "content": "a"}]]})
    pq.write_table(table, folder / "rows.parquet")
    with pa.ipc.new_stream(folder / "arrow/data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    (folder / "arrow/state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder / "arrow/dataset_info.json").write_text("{}")
    for name in ("tokenizer", "tokenizer2"):
        (folder / name).mkdir()
        for file in TOKENIZER.iterdir():
            (folder / name / file.name).write_bytes(file.read_bytes())
    other = json.loads((folder / "tokenizer2/tokenizer.json").read_text(encoding="utf-8"))
    other["added_tokens"] = [*other["added_tokens"], {**other["added_tokens"][-1], "id": 2000, "content": "<|more|>"}]
    (folder / "tokenizer2/tokenizer.json").write_text(json.dumps(other), encoding="utf-8")
    both = {"train": f"0.5 {folder}/chats 0.5 {folder}/others", "valid": [f"{folder}/others"], "test": None}
    (folder / "splits.json").write_text(json.dumps(both))
    (folder / "train.json").write_text(json.dumps({"train": [f"{folder}/chats"]}))
    (folder / "paths.txt").write_text(f"0.5 {folder}/chats\n0.5 {folder}/others\n")
    (folder / "counts.json").write_text("{}")


# ---- running them ----


@dataclass(frozen=True)
class Found:
    """The outcome of a command, ``works``, ``refused``, ``Megatron`` or ``fails``, and its message."""

    how: str
    said: str = ""


def command_of(habit: Habit, folder: Path) -> list[str]:
    """Return the arguments of a command."""
    words = [*BASE, *(habit.data or "").split()]
    for word in habit.words.split():
        if not word.startswith("!"):
            words.append(word)
            continue
        begin = end = words.index(word[1:])
        while end + 1 < len(words) and not words[end + 1].startswith("--"):
            end += 1
        del words[begin : end + 1]
    return [word.replace("{}", str(folder)) for word in words]


def run(argv: list[str], ranks: int = 1) -> Found:
    """Parse and check arguments as Megatron does, build its data loaders, and read the first batches."""
    from megatron.training import arguments, training

    from megatron_sft_idx.training.provider import train_valid_test_datasets_provider

    said, handed_over = io.StringIO(), False

    def provider(sizes: Any, vp_stage: int | None = None) -> list[Any]:
        nonlocal handed_over
        built = train_valid_test_datasets_provider(sizes, vp_stage)
        handed_over = True
        return built

    provider.is_distributed = True  # type: ignore[attr-defined]
    with contextlib.ExitStack() as entered:
        entered.enter_context(mock.patch.object(sys, "argv", ["pretrain_gpt.py", *argv]))
        entered.enter_context(mock.patch.dict(os.environ, {"WORLD_SIZE": str(ranks), "RANK": "0"}))
        entered.enter_context(contextlib.redirect_stdout(io.StringIO()))
        entered.enter_context(contextlib.redirect_stderr(said))
        # Process groups are made only once, because each has threads that never end.
        entered.enter_context(mock.patch.object(training, "destroy_model_parallel"))
        entered.callback(training.destroy_global_state)
        try:
            args = arguments.parse_and_validate_args()
        except SystemExit:
            return Found("Megatron", said.getvalue().strip().splitlines()[-1].partition("error: ")[2])
        except Exception as error:
            return Found("Megatron", f"{type(error).__name__}: {error}")
        training.update_train_iters(args)
        args.iteration = 0
        try:
            train, valid, _ = training.build_train_valid_test_data_iterators(provider)
            if args.do_train:
                assert next(train)["tokens"].shape[1] == args.seq_length
            if args.do_valid:
                for each in valid if isinstance(valid, list) else [valid]:
                    assert next(each)["tokens"].shape[1] == args.seq_length
        except SFTIndexError as error:
            return Found("refused", str(error))
        except Exception as error:
            return Found("fails", f"{type(error).__name__}: {error}{' (after our provider)' * handed_over}")
        return Found("works" if args.do_train or args.skip_train else "fails", "" if train else "no training")


def is_as_expected(habit: Habit, found: Found, folder: Path) -> bool:
    """Return whether a command ended as expected, with an error that names the wrong argument."""
    return found.how in habit.expected.split(" or ") and habit.says.replace("{}", str(folder)) in found.said


@contextlib.contextmanager
def one_rank() -> Iterator[Path]:
    """Set up one process as all ranks, without the GPU that Megatron requires. Yield a folder with all data."""
    from megatron.core import parallel_state
    from megatron_pretrain import without_cuda

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_world(folder)
        store = torch.distributed.FileStore(str(folder / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            with without_cuda():
                parallel_state.initialize_model_parallel()
                yield folder
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def line_of(habit: Habit, found: Found, folder: Path, good: bool) -> str:
    """Return a line of the table: a command and its outcome."""
    command = " ".join(filter(None, [habit.data, habit.words])).replace("{}/", "")
    said = found.said.replace(f"{folder}/", "").replace("\n", " / ")
    return f"{'' if good else '!! '}{command} | {found.how} | {said}"


def main(parts: list[str]) -> int:
    from megatron.core import package_info

    logging.disable()
    wrong, counts = 0, dict.fromkeys(("works", "refused", "Megatron", "fails"), 0)
    habits = [*WRITTEN, *generated(arguments_of(megatron_parser()))]
    with one_rank() as folder:
        for habit in habits:
            if parts and not any(part in f"{habit.data} {habit.words}" for part in parts):
                continue
            found = run(command_of(habit, folder), habit.ranks)
            good = is_as_expected(habit, found, folder)
            counts[found.how] += 1
            wrong += not good
            print(line_of(habit, found, folder, good), flush=True)
    listed = ", ".join(f"{count} {how}" for how, count in counts.items())
    print(f"Megatron {package_info.__version__}: {sum(counts.values())} commands: {listed}; {wrong} not as expected")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
