"""``megatron-sft-idx produce``: convert chats to a catalog of shards that training reads while it grows."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math

from megatron_sft_idx.cli.options import Commands, add_command, declare, natural, preprocess_arguments
from megatron_sft_idx.cli.preprocess import add_bad_row_limit, add_mask_options, add_packing_options, add_row_options
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.lines import log_line, print_layout
from megatron_sft_idx.live import default_max_sequences
from megatron_sft_idx.produce import ProduceOptions, own_files, produce
from megatron_sft_idx.storage.publish import Place, places_at, require_apart
from megatron_sft_idx.tokenize import BadRowLimit, available_cpus, encoding_options, packing_options, reads_of

_HELP = """\
Tokenise and pack an input shard by shard, into a folder that training already reads.

examples:
  make shards of about 50 million tokens; training reads each shard as soon as it appears:
    megatron-sft-idx produce --input 'raw/*.jsonl' --tokenizer ./Qwen3-8B \\
        --seq-length 4096 --tokens-per-shard 50000000 --catalog data/live

  read input that is still being written: the files of a folder as they appear, until a file raw/_END appears:
    megatron-sft-idx produce --watch raw --tokenizer ./Qwen3-8B \\
        --seq-length 4096 --tokens-per-shard 50000000 --catalog data/live
  or read the output of another program, one JSON object per line:
    make-chats | megatron-sft-idx produce --input - --tokenizer ./Qwen3-8B \\
        --seq-length 4096 --tokens-per-shard 50000000 --catalog data/live

  use little disk: make at most 20 shards ahead of training, and remove shards that training has completed:
    megatron-sft-idx produce --input 'raw/*.jsonl' --tokenizer ./Qwen3-8B --seq-length 4096 \\
        --tokens-per-shard 50000000 --catalog data/live --max-ahead-shards 20 --keep-recent 0

If the command ended early for any reason, run it again: it continues the catalog, with the same bytes. No row is
missing and none is there twice. Options that do not change the output (--workers, --max-ahead-*, --max-bad-rows,
--keep-recent, --consumers) can have other values. If the input or another option differs, the command stops and prints
the difference; if the catalog is complete, only the sizes of the input files are compared. Input from a pipe must be
piped again from its beginning: rows that are already in a shard are compared and skipped. To start from the beginning,
use another folder.

A shard is completed when every consumer has saved a checkpoint that includes it. With --watch, write each file under a
name that begins with . or _ or ends in .tmp, .part or .partial, and rename it when it is complete. Files with other
names are read as soon as a later file or _END exists, or when their size has not changed for --settle seconds.

Training fixes the shape of its batches before it has seen the data. Therefore the maximum number of sequences in a pack
is fixed too: --max-sequences-per-pack, by default --seq-length / 32, but at least 64.

These shards have no columns, so they do not record the input row of a sequence, and --row-kind preference and kto are
rejected. preprocess writes such columns.
"""

# Options whose values are attributes of ``ProduceOptions`` with the same names.
_SAME_NAMES = (
    *("watch", "catalog", "tokens_per_shard", "workers", "max_ahead_shards", "consumers", "keep_recent", "ack_dir"),
    *("end_after", "settle"),
)


def add_parser(commands: Commands) -> None:
    """Add the command ``produce``."""
    parser = add_command(commands, "produce", "make shards from chats while training already reads them", _HELP, _run)
    group = parser.add_argument_group("input")
    declare(
        group.add_mutually_exclusive_group(required=True),
        """
        --input PATH...  files, globs, or save_to_disk folders; - reads JSON lines from a pipe
        --watch FOLDER  read the files of FOLDER as they appear, in the order of their names, until a file _END appears
        """,
    )
    declare(
        group,
        """
        --end-after SECONDS  with --watch: stop after this long without a new file (default: wait for _END)
        --settle SECONDS  with --watch: read the last file when its size has not changed for this long
            (default: %(default)s)
        """,
        end_after=_seconds,
        settle={"type": _seconds, "default": 5.0},
    )
    add_row_options(group)
    add_bad_row_limit(group, "a share is checked before each shard is published, over all rows of the catalog so far")
    add_mask_options(parser)
    add_packing_options(parser)
    declare(
        parser.add_argument_group("catalog"),
        """
        --catalog FOLDER  folder that the shards are written to
        --tokens-per-shard N  a shard ends as soon as it has N tokens, not counting tokens that packing leaves out; each
            shard is packed separately, so large shards have less padding
        --max-ahead-shards N  pause while N published shards are not completed (default: no limit)
        --max-ahead-gb G  pause while the shards that are not completed, plus the next one, would exceed G gigabytes; if
            other shards are not completed, the next one counts at most as much as the largest of them (default: no
            limit)
        --consumers N  number of training jobs that read the catalog; a shard is completed when all of them have
            completed it (default: %(default)s)
        --keep-recent N  remove completed shards except the N newest; 0 keeps none (default: remove nothing)
        --ack-dir FOLDER  folder for the acknowledgements of consumers, if they cannot write to the catalog
            (default: _acks in the catalog)
        """,
        catalog={"required": True},
        tokens_per_shard={"required": True},
        max_ahead_gb=_gigabytes,
        consumers=1,
        keep_recent=natural,
    )
    declare(
        parser.add_argument_group("running"),
        """
        --workers N  number of tokenising processes; 0 tokenises in the main process; the output does not depend on it
            (default: %(default)s)
        """,
        workers={"type": natural, "default": available_cpus()},
    )


def _seconds(text: str, unit: str = "seconds") -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text!r}: expected a number of {unit} above 0")


def _gigabytes(text: str) -> int:
    # The limit keeps the int finite and small; no disk has 10^18 gigabytes.
    return max(1, int(min(_seconds(text, "gigabytes"), 1e18) * 1e9))


def _run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if arguments.end_after is not None and arguments.watch is None:
        parser.error("--end-after needs --watch, because other input ends by itself")
    if arguments.input and "-" in arguments.input and len(arguments.input) > 1:
        parser.error("--input - reads all input from the pipe; remove the other inputs")
    try:
        packing = packing_options(vars(arguments))
        if packing.max_sequences_per_pack is None:
            packing = dataclasses.replace(packing, max_sequences_per_pack=default_max_sequences(packing.capacity))
        options = ProduceOptions(
            inputs=arguments.input or (),
            encoding=encoding_options(preprocess_arguments(arguments)),
            packing=packing,
            max_ahead_nbytes=arguments.max_ahead_gb,
            max_bad_rows=BadRowLimit.of(vars(arguments)),
            **{name: getattr(arguments, name) for name in _SAME_NAMES},
        )
    except FormatError as error:
        parser.error(str(error))
    reads = reads_of(options.inputs, options.encoding)
    if arguments.watch is not None:
        reads += [Place(arguments.watch, "--watch"), *places_at(arguments.watch, "the input")]
    require_apart([Place(path, "the catalog") for path in own_files(arguments.catalog)], reads)
    print_layout(produce(options, log=log_line))
