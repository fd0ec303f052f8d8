"""``megatron-sft-idx inspect``: show the contents of a shard."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.cli.options import (
    Commands,
    add_command,
    add_log_interval,
    declare,
    in_color,
    natural,
    writable,
)
from megatron_sft_idx.cli.parsers import Collected
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.inspect.diff import compare_shards, diff_lines
from megatron_sft_idx.inspect.origin import find_row, last_row, parse_origin, sequence_titles, sources_of
from megatron_sft_idx.inspect.page import PAGE, make_page
from megatron_sft_idx.inspect.shown_media import sequence_of, shown_items
from megatron_sft_idx.inspect.summary import Survey, summary_dict, summary_lines, survey_shard
from megatron_sft_idx.inspect.text import (
    Decode,
    find_text,
    ids_as_text,
    mark_pack,
    trained_tokens,
)
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.lines import counted, on_one_line, print_layout, print_lines, shortened
from megatron_sft_idx.packs.conditions import conditions_of, selected_sequences
from megatron_sft_idx.packs.source_names import SOURCE
from megatron_sft_idx.shard import Pack, Shard
from megatron_sft_idx.shard.shard_set import find_prefixes
from megatron_sft_idx.storage.outputs import check_output, write_file
from megatron_sft_idx.storage.progress import Progress
from megatron_sft_idx.storage.publish import Place, places_at, require_apart, resolve

_HELP = """\
Show the content of a shard.

examples:
  show counts, lengths, the share of trained tokens, odd packs, and fingerprints:
    megatron-sft-idx inspect data/train

  write the same, with some packs, as an HTML page, one file that needs no network:
    megatron-sft-idx inspect data/train --tokenizer ./Qwen3-8B --html train.html

  show one pack as text, and mark the tokens that are trained on:
    megatron-sft-idx inspect data/train --tokenizer ./Qwen3-8B --pack 17

  find a text:
    megatron-sft-idx inspect data/train --tokenizer ./Qwen3-8B --find 'as an AI'

  list the packs that contain sequences of one input file:
    megatron-sft-idx inspect data/train --where 'source == chats.jsonl'

  show the differences between two shards, down to the mask of one token:
    megatron-sft-idx inspect data/train --diff data/train-again

Packs, sequences and tokens are counted from 0, rows of input files from 1. Memory use does not depend on the size of
the shard.

exit code: 0 if shown, found (--find, --row, --where) or equal (--diff: packs, columns and media, not headers); 1 if not
found, not equal, or bad data; 2 for wrong usage.
"""
# Maximum number of values to print from one row of a column.
_MAX_VALUES = 8


def add_parser(commands: Commands) -> None:
    """Add the command ``inspect``."""
    line = "show the content of a shard: summary, packs as text, HTML page, search, comparison"
    parser = add_command(commands, "inspect", line, _HELP, _inspect, product=lambda arguments: not arguments.html)
    declare(
        parser,
        """
        shard PREFIX  prefix of the shard, or a folder or glob with one shard
        --tokenizer, --tokenizer-model PATH  folder or file of the tokenizer that made the ids, to show text; it is an
            error if the shard was made with another tokenizer
        """,
    )
    declare(
        parser.add_mutually_exclusive_group(),
        """
        --pack N  show pack N instead of the summary, with trained tokens in [[ ]]
        --row FILE:LINE  list the packs that contain sequences of this input row, and with --tokenizer show their text,
            with trained tokens in [[ ]]; rows are counted from 1: the line of JSON lines, the item of the array in a
            .json file
        --find TEXT  list all places with exactly this text, marked as >>TEXT<<
        --diff OTHER  show the differences from the shard at this prefix
        --html FILE  write an HTML page to this file
        """,
        pack=natural,
        html=writable,
    )
    declare(
        parser,
        """
        --where CONDITION  list the packs with sequences that meet this condition, such as 'score >= 0.5' or
            'source == b/train.jsonl': a column, one of == != < <= > >=, and a value; if repeated, all conditions must
            hold; with --find or --row, search only these sequences
        --json  print one JSON document instead of text
        --overwrite  replace an existing page of --html
        --limit N  maximum number of matches, packs or differences to print (default: %(default)s)
        """,
        where={"action": Collected, "default": ()},
        limit=20,
    )
    add_log_interval(parser, "packs", default=1_000_000)


def _inspect(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if arguments.find is not None and not arguments.tokenizer:
        parser.error("--find needs --tokenizer PATH (the tokenizer the shard was made with)")
    if arguments.find == "":
        parser.error("--find: the text is empty; pass the text to search for")
    if arguments.html and arguments.json:
        parser.error("--html and --json cannot be combined; leave one of them out")
    if arguments.where and (arguments.pack is not None or arguments.diff is not None or arguments.html is not None):
        parser.error("--where cannot be combined with --pack, --diff or --html")
    # ``pread``, because the pages of a map would count as memory of this process.
    shard = Shard(_only_prefix(arguments.shard), backend="pread")
    decode = _decoder(shard, arguments.tokenizer)
    selected = _selected(shard, arguments, parser)
    if arguments.pack is not None:
        return _show_pack(shard, arguments, decode)
    if arguments.row is not None:
        return _show_row(shard, arguments, decode, selected)
    if arguments.find is not None:
        return _find(shard, arguments, decode or ids_as_text, selected)
    if selected is not None:
        return _show_selected(shard, arguments, selected)
    if arguments.diff is not None:
        return _diff(shard, arguments)
    if arguments.html is not None:
        return _write_page(shard, arguments, decode)
    survey = _survey(shard, arguments)
    _print_result(arguments, summary_dict(shard.prefix, survey), summary_lines(shard.prefix, survey))
    return 0


def _only_prefix(path: str) -> str:
    """Return the prefix of the only shard at ``path``: a prefix, a folder or a glob.

    Raises:
        FormatError: there are several shards.
    """
    prefixes = find_prefixes(path)
    if len(prefixes) > 1:
        names = ", ".join(prefixes[:5]) + (", ..." if len(prefixes) > 5 else "")
        raise FormatError(
            f"{path}: {len(prefixes):,} shards found, but only one can be inspected at a time; pass one of: {names}"
        )
    return prefixes[0]


def _decoder(shard: Shard, path: str | None) -> Decode | None:
    """Return a function from ids to text that uses the tokenizer at ``path``; None without a path.

    Raises:
        FormatError: the shard's ids are from another tokenizer.
    """
    if path is None:
        return None
    from megatron_sft_idx.chat.tokenizer.tokenizer import (
        load_tokenizer,  # imported late: most commands need no tokenizer
    )

    tokenizer = load_tokenizer(path, backend="tokenizers")
    fingerprint = shard.header.tokenizer
    if fingerprint is None:
        print(f"{shard.prefix}: does not record which tokenizer made its ids; using {path}", file=sys.stderr)
    elif fingerprint != tokenizer.fingerprint:
        raise FormatError(
            f"{path}: a tokenizer of fingerprint {tokenizer.fingerprint}, but the ids of {shard.prefix} were made with"
            f" {shortened(fingerprint, 200)}; pass that tokenizer, or leave --tokenizer out to see ids"
        )
    return tokenizer.decode


def _selected(shard: Shard, arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> NDArray[np.bool_] | None:
    """Return the sequences for which all conditions of ``--where`` hold, bool [sequences]; None without any."""
    if not arguments.where:
        return None
    try:
        conditions_of(shard, arguments.where)
    except FormatError as error:
        parser.error(str(error))
    with _progress(shard, arguments, "selecting") as progress:
        return selected_sequences(shard, arguments.where, on_progress=progress.update)


def _show_selected(shard: Shard, arguments: argparse.Namespace, selected: NDArray[np.bool_]) -> int:
    offsets = shard.sequence_offsets
    sums = np.append(0, np.cumsum(selected))[offsets]
    counts, sizes = np.diff(sums), np.diff(offsets)
    packs = np.flatnonzero(counts)
    named = [
        {"pack": pack, "selected": int(counts[pack]), "sequences": int(sizes[pack])}
        for pack in packs[: arguments.limit].tolist()
    ]
    total = int(counts.sum())
    lines = [f"{total:,} of {counted(len(selected), 'sequence')}, in {len(packs):,} of {counted(len(sizes), 'pack')}"]
    lines += [f"pack {one['pack']}: {one['selected']:,} of {counted(one['sequences'], 'sequence')}" for one in named]
    is_cut_off = len(packs) > len(named)
    lines += [f"stopped after {len(named)} packs; raise --limit to see more"] if is_cut_off else []
    nothing = [
        (f"{shard.prefix}: none of {len(selected):,} sequences matches --where {' --where '.join(arguments.where)}")
    ]
    value = {"prefix": shard.prefix, "where": [*arguments.where], "selected": total, "packs": len(packs)}
    _print_result(arguments, value | {"stopped_at_limit": is_cut_off, "matches": named}, lines if total else nothing)
    return 0 if total else 1


def _progress(shard: Shard, arguments: argparse.Namespace, stage: str) -> Progress:
    """Return the progress of a pass over all packs of a shard."""
    total, interval = shard.header.num_tokens, arguments.log_interval
    return Progress(stage, total, unit="tokens", log_interval=interval, items="packs")


def _survey(shard: Shard, arguments: argparse.Namespace) -> Survey:
    with _progress(shard, arguments, "reading") as progress:
        return survey_shard(shard, on_progress=progress.update)


def _show_pack(shard: Shard, arguments: argparse.Namespace, decode: Decode | None) -> int:
    number = arguments.pack
    if number >= len(shard):
        raise FormatError(
            f"{shard.prefix}: there is no pack {number}; the shard has {len(shard)} packs, counted from 0"
        )
    pack, sources = shard[number], sources_of(shard, number)
    ids, bounds = pack["input_ids"], pack["seq_boundaries"].tolist()
    first, last = shard.sequence_offsets[number : number + 2].tolist()
    of_pack: dict[str, Any] = {}
    of_sequences: list[dict[str, Any]] = [{} for _ in range(last - first)]
    for name, column in shard.columns.items():
        if column.spec.per == "pack":
            of_pack[name] = column.values[number : number + 1].tolist()[0]
        elif column.spec.per == "sequence" and name != SOURCE:
            for values, row in zip(of_sequences, column.values[first:last].tolist(), strict=True):
                values[name] = row
    if not arguments.json:
        print_layout(_marked(shard, number, pack, decode or ids_as_text))
    lines: list[str] = []
    shown: dict[str, Any] = {"prefix": shard.prefix, "pack": number, "tokens": len(ids), "sequences": []}
    if of_pack:
        shown["columns"] = of_pack
        lines.append(f"columns of the pack: {_listed(of_pack)}")
    for i, (sequence_ids, labels) in enumerate(shard.sequences(number)):
        trained = trained_tokens(labels).astype(labels.dtype).tolist()
        sequence = {"start": bounds[i], "input_ids": sequence_ids.tolist(), "trained": trained}
        if sources:
            sequence["source"] = sources[i]
        if decode:
            sequence["text"] = decode(sequence["input_ids"])
        if of_sequences[i]:
            sequence["columns"] = of_sequences[i]
            lines.append(f"columns of sequence {i}: {_listed(of_sequences[i])}")
        shown["sequences"].append(sequence)
    if shard.media is not None:
        items = [(sequence_of(bounds, item.start), item) for item in shown_items(shard, number)]
        shown["media"] = [item.as_dict(sequence) for sequence, item in items]
        lines += [item.line(at, sequence) for at, (sequence, item) in enumerate(items)]
    _print_result(arguments, shown, lines)
    return 0


def _marked(shard: Shard, number: int, pack: Pack, decode: Decode, only: int | None = None) -> str:
    """Return pack ``number``, or ``only`` one of its sequences, as text with trained tokens marked."""
    ids, mask, bounds = pack["input_ids"], pack["loss_mask"], pack["seq_boundaries"].tolist()
    titles, media = sequence_titles(shard, number), pack.get("media", ())
    return mark_pack(ids, mask, bounds, decode, sources=titles, media=media, only=only, color=in_color())


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_abbreviated(value)}" for name, value in values.items())


def _abbreviated(value: Any) -> str:
    """Return a value, or the first few of many."""
    if isinstance(value, list) and len(value) > _MAX_VALUES:
        return f"[{', '.join(map(str, value[:_MAX_VALUES]))}, ... {len(value):,} values]"
    return str(value)


def _find(
    shard: Shard, arguments: argparse.Namespace, decode: Decode, selected: NDArray[np.bool_] | None = None
) -> int:
    named = []
    with _progress(shard, arguments, "searching") as progress:
        matches = find_text(shard, arguments.find, decode, selected=selected, on_progress=progress.update)
        for match in islice(matches, arguments.limit):
            from_row = sources_of(shard, match.pack)[match.sequence : match.sequence + 1]
            named.append(match._asdict() | ({"source": from_row[0]} if from_row else {}))
            if not arguments.json:
                trained = ", trained" if match.trained else ""
                at = "".join(f" ({name})" for name in from_row)
                place = f"pack {match.pack}, sequence {match.sequence}{at}, token {match.token}{trained}"
                print_layout(f"{on_one_line(place)}: {match.in_context(color=in_color())}")
        is_cut_off = next(matches, None) is not None
    end = [f"stopped after {len(named)} matches; raise --limit to see more"] if is_cut_off else []
    searched = shard.header.num_sequences if selected is None else int(selected.sum())
    nothing = [f"{shard.prefix}: not found in any of {searched:,} sequences"]
    value = {"prefix": shard.prefix, "find": arguments.find, "stopped_at_limit": is_cut_off, "matches": named}
    _print_result(arguments, value, end if named else nothing)
    return 0 if named else 1


def _show_row(
    shard: Shard, arguments: argparse.Namespace, decode: Decode | None, selected: NDArray[np.bool_] | None
) -> int:
    origin = parse_origin(shard, arguments.row)
    sequences = list(islice(find_row(shard, *origin, selected=selected), arguments.limit + 1))
    named: list[dict[str, Any]] = []
    for number, sequence in sequences[: arguments.limit]:
        one: dict[str, Any] = {"pack": number, "sequence": sequence}
        named.append(one)
        if not arguments.json:
            print_lines([f"{arguments.row}: pack {number}, sequence {sequence}"])
        if decode is not None:
            pack = shard[number]
            start, stop = pack["seq_boundaries"][sequence : sequence + 2]
            one["text"] = decode(pack["input_ids"][start:stop].tolist())
            if not arguments.json:
                print_layout(_marked(shard, number, pack, decode, only=sequence))
    is_cut_off = len(sequences) > len(named)
    end = [f"stopped after {len(named)} sequences; raise --limit to see more"] if is_cut_off else []
    value = {"prefix": shard.prefix, "row": arguments.row, "stopped_at_limit": is_cut_off, "sequences": named}
    nothing = f"{shard.prefix}: no sequence was made from {arguments.row}"
    if selected is not None and not named and (left_out := sum(1 for _ in find_row(shard, *origin))):
        value["left_out"] = left_out
        nothing = f"{arguments.row}: {counted(left_out, 'sequence')}, all left out by --where"
        nothing += f" {' --where '.join(arguments.where)}"
    elif not named:
        last = last_row(shard, origin[0]) + 1
        if origin[1] < last:
            nothing += "; the row was skipped as a bad row, left out by an option, or is in another shard of the job"
        else:
            nothing += f"; the last row of this file in this shard is {last}" if last else ", nor from any other row"
    _print_result(arguments, value, end if named else [nothing])
    return 0 if named else 1


def _diff(shard: Shard, arguments: argparse.Namespace) -> int:
    other = Shard(_only_prefix(arguments.diff), backend="pread")
    with _progress(shard, arguments, "comparing") as progress:
        comparison = compare_shards(shard, other, max_named=arguments.limit, on_progress=progress.update)
    value = {"here": shard.prefix, "there": other.prefix, **comparison.to_dict()}
    _print_result(arguments, value, diff_lines(comparison, shard.prefix, other.prefix))
    return 0 if comparison.same else 1


def _write_page(shard: Shard, arguments: argparse.Namespace, decode: Decode | None) -> int:
    path = resolve(arguments.html)
    tokenizer = places_at(arguments.tokenizer, "the tokenizer") if arguments.tokenizer else []
    shards = [Place(file, "a file of the shard") for file in ShardPaths.of(shard.prefix).all]
    require_apart([Place(path, "--html")], [*shards, *tokenizer])
    check_output(path, PAGE, overwrite=arguments.overwrite)
    survey = _survey(shard, arguments)
    page = make_page(shard, survey, decode, tokenizer=arguments.tokenizer)
    write_file(path, page, PAGE, overwrite=arguments.overwrite)
    print(f"wrote {arguments.html}: {len(page):,} bytes, {counted(shard.header.num_packs, 'pack')}")
    return 0


def _print_result(arguments: argparse.Namespace, value: Any, lines: Iterable[str]) -> None:
    """Print ``value`` as JSON with ``--json``, else ``lines``."""
    if arguments.json:
        print_layout(json.dumps(_plain(value), indent=2))
    else:
        print_lines(lines)


def _plain(value: Any) -> Any:
    """Return a value that JSON can represent; other numbers, as in a damaged mask, become ``"nan"`` and ``"inf"``."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    value = value.item() if isinstance(value, np.generic) else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
