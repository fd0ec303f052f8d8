"""``megatron-sft-idx convert`` and ``create-raw-index``: packed data in another format, and the raw index of a file."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterable
from typing import Any

from megatron_sft_idx.cli.options import Commands, add_command, add_log_interval, declare, local_path
from megatron_sft_idx.formats.bridge import Padding, summary_path
from megatron_sft_idx.formats.convert import ConvertOptions, ConvertReport, convert
from megatron_sft_idx.formats.modalities import create_raw_index
from megatron_sft_idx.formats.registry import READABLE, WRITABLE
from megatron_sft_idx.lines import found_unread, print_lines
from megatron_sft_idx.packs.run import MASK_ALIGNMENTS
from megatron_sft_idx.storage.progress import Progress

_HELP = """\
Convert packed SFT data from one format to another as a stream, then read the result back and compare it with SRC.

examples:
  a pickled .npy from NeMo or Megatron-Bridge to a shard:
    megatron-sft-idx convert old/train.npy data/train --to sft-idx

  the same for a file packed for 4096 tokens, with masks that mark the trained tokens themselves:
    megatron-sft-idx convert old/train.npy data/train --to sft-idx --seq-length 4096 --mask-alignment token

  many Parquet files to one shard, and back to one Parquet file:
    megatron-sft-idx convert 'data/part-*.parquet' data/train --to sft-idx
    megatron-sft-idx convert data/train data/train.parquet --to parquet --row-group-size 1000

  a .npy, and the file DST.json that Megatron-Bridge reads next to it:
    megatron-sft-idx convert data/train data/train.npy --to npy --no-columns

  packs of sequence multiple 8 for Megatron-Bridge, with stored padding; the end-of-sequence id is 2:
    megatron-sft-idx convert data/cp4 data/cp4.parquet --to parquet --pad-seq-to-mult 8 --eod-id 2 --no-columns

  a dataset on disk for LLaMA-Factory (tokenized_path) or TRL, which can be read with datasets.load_from_disk:
    megatron-sft-idx convert data/train data/train.hf --to save_to_disk --no-columns

  a stock Megatron dataset, to train on every token, or with the masks from a second dataset:
    megatron-sft-idx convert data/text_document data/all --to sft-idx --mask-rule all
    megatron-sft-idx convert data/text_document data/some --to sft-idx --mask-path data/masks

mask alignment: in a label mask, which Megatron-Bridge's collate expects, value j is 1 if predicting token j + 1 adds to
the loss. In a token mask, value j is 1 if token j itself is trained on. A rolled-right mask is a token mask that was
moved one position to the right over the whole pack when it was written. Results are always label-aligned. If a file
records that its masks are label-aligned, any other alignment is an error.

memory: a conversion takes less than 256 MiB of heap for data of any size. Only .npy takes more, about 40 bytes per
token, because it can only be unpickled as a whole. When writing .npy, --no-verify avoids that.

interruption: DST appears when the result is complete, was read back and is equal to SRC. Until then, an existing DST is
not changed. A killed conversion leaves the folder DST.building: run the same command again, which publishes a complete
result, or starts from the beginning.

loss: it is an error if DST cannot store something in SRC. --lossy leaves that out instead, and prints what it was.
.pbin cannot store loss masks and packs; memmap, parquet, jsonl-chunks and save_to_disk cannot store weights other than
0 and 1; npy, pbin, save_to_disk, and parquet padded for Megatron-Bridge cannot store columns. With several sources, a
column that some of them lack is left out too. --no-columns leaves out all columns and nothing else. npy, pbin and
jsonl-chunks do not keep the capacity.
"""
_RAW_HELP = """\
Write the raw index of a JSON-lines file: start and length of each row. The tools of Modalities and this package read
it. Every line is parsed once; blank lines are not rows.

examples:
  write chats.idx next to chats.jsonl, like `modalities data create_raw_index`:
    megatron-sft-idx create-raw-index chats.jsonl

  write the index to another place, and leave out lines that are not JSON:
    megatron-sft-idx create-raw-index chats.jsonl --output index/chats.idx --drop-faulty

  then, in Python, row 7 and eight parts of the file for eight readers:
    from megatron_sft_idx.formats.modalities import RawRows
    rows = RawRows("chats.jsonl")
    json.loads(rows[7]); rows.ranges(8)
"""

# Options that become keywords of a format's ``Reader`` and ``Writer``, with the format if only one has them.
_READER = ("mask_rule", "mask_path", "repair_merge")
_WRITER = {"row_group_size": "parquet", "samples_per_chunk": "jsonl-chunks"}

# Maximum number of notes to print, because each of thousands of files may have one.
_MAX_NOTES = 20


def add_parser(commands: Commands) -> None:
    """Add the commands ``convert`` and ``create-raw-index``."""
    parser = add_command(commands, "convert", "convert packed data from one format to another", _HELP, _convert)
    named_as_a_keyword: dict[str, Any] = {"from": {"dest": "source_format", "choices": READABLE}}
    declare(
        parser,
        """
        source SRC...  files, folders, prefixes or globs of one format
        destination DST  file, folder or prefix to write
        --to  format to write
        --from  format of SRC (default: detected from the content)
        --mask-alignment  alignment of the loss masks in SRC, see below (default: %(default)s)
        --mask-rule  for an SRC without masks: all trains on every token
        --mask-path PREFIX  for a stock dataset: another stock dataset, which contains its masks
        --repair-merge  for .pbin with an index that a merge has damaged: place documents by their lengths
        --seq-length N  maximum number of token positions in a pack (default: the value in SRC, or its longest pack)
        --row-group-size N  for --to parquet: packs per row group, fewer if they are long (default: 1000)
        --pad-seq-to-mult N  for --to parquet: pad sequences with --eod-id, as Megatron-Bridge expects for
            pad_seq_to_mult=N, and write DST.json for its packed_metadata_path; with 1, only DST.json is added
        --eod-id ID  the tokenizer's end-of-sequence id, used as padding
        --samples-per-chunk N  for --to jsonl-chunks: packs per file (default: 100)
        --no-columns  leave out all columns
        --lossy  leave out what the format of --to cannot store, and print what it was
        --overwrite  replace an existing DST, if it has the format of --to
        --no-verify  do not read the result back to compare it
        """,
        source=local_path,
        destination=local_path,
        to={"required": True, "choices": WRITABLE},
        mask_alignment={"choices": MASK_ALIGNMENTS, "default": "label"},
        mask_rule={"choices": ("all",)},
        repair_merge={"action": "store_const", "const": True},
        seq_length={"dest": "capacity"},
        eod_id=int,
        **named_as_a_keyword,
    )
    add_log_interval(parser, "packs")

    line = "index the rows of a JSON-lines file, for reading in any order"
    parser = add_command(commands, "create-raw-index", line, _RAW_HELP, _create_raw_index)
    declare(
        parser,
        """
        file FILE.jsonl  a file of JSON lines that is not compressed
        --output FILE.idx  path of the index (default: FILE.idx next to the file)
        --drop-faulty  leave out lines that are not JSON, and count them
        --overwrite  replace an existing raw index
        """,
        file=local_path,
    )
    add_log_interval(parser, "rows", 1_000_000)


def _convert(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if arguments.pad_seq_to_mult is not None and arguments.to != "parquet":
        parser.error("--pad-seq-to-mult needs --to parquet")
    if arguments.eod_id is not None and arguments.pad_seq_to_mult is None:
        parser.error("--eod-id needs --pad-seq-to-mult")
    padding = arguments.pad_seq_to_mult and Padding(arguments.pad_seq_to_mult, arguments.eod_id)
    options = ConvertOptions(
        source_format=arguments.source_format,
        mask_alignment=arguments.mask_alignment,
        capacity=arguments.capacity,
        overwrite=arguments.overwrite,
        lossy=arguments.lossy,
        verify=not arguments.no_verify,
        padding=padding,
        reader=_passed_options(arguments, _READER) | ({"columns": ()} if arguments.no_columns else {}),
        writer=_passed_options(arguments, _WRITER),
    )
    for name in options.writer:
        if arguments.to != _WRITER[name]:
            parser.error(f"--{name.replace('_', '-')} needs --to {_WRITER[name]}")
    with contextlib.ExitStack() as stack:

        def on_pass(pass_name: str, tokens: int) -> Any:
            stack.close()  # ends the bar of the previous pass
            bar = Progress(pass_name, tokens, unit="tok", log_interval=arguments.log_interval, items="packs")
            return stack.enter_context(bar).update

        report = convert(arguments.source, arguments.destination, arguments.to, options, on_pass=on_pass)
    print_lines(_report_lines(report, arguments.destination, arguments.to))
    if padding is not None or (arguments.to == "npy" and report.content.num_packs):
        print(f"wrote {summary_path(arguments.destination)}, for packed_metadata_path of Megatron-Bridge")


def _passed_options(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the options with these names that the user has passed."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def _report_lines(report: ConvertReport, destination: str, to: str) -> list[str]:
    content, count = report.content, len(report.paths)
    files = report.paths[0] if count == 1 else f"{report.paths[0]} and {count - 1} more"
    trained = 100 * content.num_trained_tokens / max(content.num_tokens, 1)
    return [
        f"read {files} as {report.source_format}",
        *(f"note: {note}" for note in report.notes[:_MAX_NOTES]),
        *([f"note: ... and {len(report.notes) - _MAX_NOTES} more"] if len(report.notes) > _MAX_NOTES else []),
        *(f"lost: {sentence}" for sentence in report.lost),
        f"{'found' if report.found else 'wrote'} {destination} as {to}: {content.num_packs:,} packs,"
        f" {content.num_sequences:,} sequences, {content.num_tokens:,} tokens, {trained:.1f}% trained on,"
        f" capacity {report.spec.capacity:,}",
        *([f"{destination}: {found_unread(destination)}"] if report.found else []),
        "read back and compared: equal" + (" except for what was lost" if report.lost else "")
        if report.verified
        else "not read back, because of --no-verify",
    ]


def _create_raw_index(arguments: argparse.Namespace, _parser: argparse.ArgumentParser) -> None:
    total = os.stat(arguments.file).st_size
    with Progress("indexing", total, unit="B", log_interval=arguments.log_interval, items="rows") as progress:
        report = create_raw_index(
            arguments.file,
            arguments.output,
            drop_faulty=arguments.drop_faulty,
            overwrite=arguments.overwrite,
            on_progress=progress.update,
        )
    line = f"wrote {report.index_path}: {report.num_rows:,} rows"
    if report.num_blank:
        line += f", blank lines left out: {report.num_blank:,}"
    if report.num_faulty:
        line += f", lines that are not JSON left out: {report.num_faulty:,}"
    print(line)
