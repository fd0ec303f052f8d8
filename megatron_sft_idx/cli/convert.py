"""``megatron-sft-idx convert`` and ``create-raw-index``: packed data in another format, and the raw index of a file."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterable
from typing import Any

from megatron_sft_idx.cli.options import Verbs, add_log_interval, add_verb, declare, local_path
from megatron_sft_idx.formats.bridge import Padding, summary_path
from megatron_sft_idx.formats.convert import ConvertOptions, ConvertReport, convert
from megatron_sft_idx.formats.modalities import create_raw_index
from megatron_sft_idx.formats.registry import READABLE, WRITABLE
from megatron_sft_idx.lines import print_lines
from megatron_sft_idx.packs.run import MASK_ALIGNMENTS
from megatron_sft_idx.storage.progress import Progress

_HELP = """\
Convert packed SFT data from one format to another, in a stream; then read the result again and compare it with SRC.

examples:
  a pickled .npy, as NeMo and Megatron-Bridge wrote it, to a shard:
    megatron-sft-idx convert old/train.npy data/train --to sft-idx

  the same for a file that was packed for 4096 tokens, whose masks say which token is trained on:
    megatron-sft-idx convert old/train.npy data/train --to sft-idx --seq-length 4096 --mask-alignment token

  many Parquet files to one shard, and back to one Parquet file:
    megatron-sft-idx convert 'data/part-*.parquet' data/train --to sft-idx
    megatron-sft-idx convert data/train data/train.parquet --to parquet --row-group-size 1000

  a .npy, and the file DST.json that Megatron-Bridge reads next to it:
    megatron-sft-idx convert data/train data/train.npy --to npy --no-columns

  packs of sequence multiple 8 for Megatron-Bridge, which wants padding stored; the end-of-sequence id is 2:
    megatron-sft-idx convert data/cp4 data/cp4.parquet --to parquet --pad-seq-to-mult 8 --eod-id 2 --no-columns

  a dataset on disk for LLaMA-Factory (tokenized_path) or TRL, which datasets.load_from_disk reads:
    megatron-sft-idx convert data/train data/train.hf --to save_to_disk --no-columns

  a stock Megatron dataset, to train on every token, or with the masks that a second dataset holds:
    megatron-sft-idx convert data/text_document data/all --to sft-idx --mask-rule all
    megatron-sft-idx convert data/text_document data/some --to sft-idx --mask-path data/masks

mask alignment: in a label mask, which Megatron-Bridge's collate expects, value j says whether predicting token j + 1
counts. In a token mask, value j says whether token j itself is trained on. A rolled-right mask is a token mask that its
writer moved one place to the right over the whole pack. Results are always label-aligned. A file that says that its
masks are label-aligned is refused with any other alignment.

memory: a conversion takes less than 256 MiB of heap for data of any size. Only .npy takes more, some 40 bytes a token,
because it can only be unpickled whole. Where .npy is written, --no-verify avoids that.

interruption: DST appears when the result is whole, and was read again and found equal. Until then, what was at DST
before stays there. A conversion that was killed leaves the folder DST.building: give the same command again, which
finishes what was whole, or begins again.

loss: it is an error if DST has no place for something in SRC. --lossy leaves that out instead, and prints what it
was. .pbin has no place for loss masks and packs; memmap, parquet, jsonl-chunks and save_to_disk have none for weights
other than 0 and 1; npy, pbin, save_to_disk, and parquet padded for Megatron-Bridge have none for columns. A column that
some of several sources lack is left out too. --no-columns leaves out all columns and nothing else. npy, pbin and
jsonl-chunks do not keep the capacity.
"""
_RAW_HELP = """\
Write the raw index of a JSON-lines file: where each row begins and how long it is. The tools of Modalities read this
index, and this package does. Every line is parsed once; blank lines are not rows.

examples:
  write chats.idx beside chats.jsonl, as `modalities data create_raw_index` does:
    megatron-sft-idx create-raw-index chats.jsonl

  write the index elsewhere, and leave out lines that are not JSON:
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


def add_parser(verbs: Verbs) -> None:
    """Add the verbs ``convert`` and ``create-raw-index``."""
    parser = add_verb(verbs, "convert", "packed data of one format to another", _HELP, _convert)
    named_as_a_keyword: dict[str, Any] = {"from": {"dest": "source_format", "choices": READABLE}}
    declare(
        parser,
        """
        source SRC...  files, folders, prefixes or globs of one format
        destination DST  file, folder or prefix to write
        --to  format to write
        --from  format of SRC (default: recognised by its content)
        --mask-alignment  how the loss masks in SRC are aligned, see below (default: %(default)s)
        --mask-rule  for an SRC without masks: all trains on every token
        --mask-path PREFIX  for a stock dataset: another stock dataset, which holds its masks
        --repair-merge  for .pbin whose index a merge has damaged: place documents by their lengths
        --seq-length N  most token positions a pack may hold (default: what SRC says, or its longest pack)
        --row-group-size N  for --to parquet: packs in a row group, fewer where they are long (default: 1000)
        --pad-seq-to-mult N  for --to parquet: fill sequences up with --eod-id, as Megatron-Bridge expects them for
            pad_seq_to_mult=N, and write DST.json for its packed_metadata_path; with 1, only DST.json is added
        --eod-id ID  the tokenizer's end-of-sequence id, which sequences are filled up with
        --samples-per-chunk N  for --to jsonl-chunks: packs in a file (default: 100)
        --no-columns  leave out all columns
        --lossy  leave out what the format of --to has no place for, and print what it was
        --overwrite  replace what is at DST, if it is of the format of --to
        --no-verify  do not read the result again to compare it
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

    line = "index the rows of a JSON-lines file, to read them in any order"
    parser = add_verb(verbs, "create-raw-index", line, _RAW_HELP, _create_raw_index)
    declare(
        parser,
        """
        file FILE.jsonl  a file of JSON lines that is not compressed
        --output FILE.idx  where the index is written (default: FILE.idx beside the file)
        --drop-faulty  leave out lines that are not JSON, and count them
        --overwrite  replace the raw index that is at the output's path
        """,
        file=local_path,
    )
    add_log_interval(parser, "rows", 1_000_000)


def _convert(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if arguments.pad_seq_to_mult is not None and arguments.to != "parquet":
        parser.error("--pad-seq-to-mult is for --to parquet")
    if arguments.eod_id is not None and arguments.pad_seq_to_mult is None:
        parser.error("--eod-id is for --pad-seq-to-mult")
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
            parser.error(f"--{name.replace('_', '-')} is for --to {_WRITER[name]}")
    with contextlib.ExitStack() as stack:

        def on_pass(pass_name: str, tokens: int) -> Any:
            stack.close()  # ends the bar of the previous pass
            bar = Progress(pass_name, tokens, unit="tok", log_interval=arguments.log_interval, items="packs")
            return stack.enter_context(bar).update

        report = convert(arguments.source, arguments.destination, arguments.to, options, on_pass=on_pass)
    print_lines(_report_lines(report, arguments.destination, arguments.to))
    if padding is not None or (arguments.to == "npy" and report.content.num_packs):
        print(f"wrote {summary_path(arguments.destination)}, which Megatron-Bridge takes as packed_metadata_path")


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
        "read again and compared: the same" + (" but for what was lost" if report.lost else "")
        if report.verified
        else "not read again, as --no-verify says",
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
        line += f", lines that are no JSON left out: {report.num_faulty:,}"
    print(line)
