"""``megatron-sft-idx inspect``: what a shard holds."""

from __future__ import annotations

import argparse
import glob
import json
import math
import os
import sys
from itertools import islice
from typing import Any

import numpy as np

from megatron_sft_idx.chat.tokenizer.tokenizer import load_tokenizer
from megatron_sft_idx.cli.options import (
    TOKENIZER_MODEL,
    HelpFormatter,
    Verbs,
    add_log_interval,
    in_color,
    natural,
    positive,
    writable,
)
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.inspect.diff import compare_shards, diff_lines
from megatron_sft_idx.inspect.origin import SOURCE, find_row, parse_place, sources_of
from megatron_sft_idx.inspect.page import PAGE, make_page
from megatron_sft_idx.inspect.summary import Survey, summary_dict, summary_lines, survey_shard
from megatron_sft_idx.inspect.text import (
    Decode,
    counted,
    find_text,
    ids_as_text,
    mark_pack,
    on_one_line,
    shortened,
    trained_tokens,
)
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.shard_set import find_prefixes
from megatron_sft_idx.storage.progress import Progress
from megatron_sft_idx.storage.publish import Place, check_place, files_of, require_apart, resolve, write_file

__all__ = ["add_parser"]

_EXAMPLES = """\
examples:
  counts, lengths, trained share, odd packs, fingerprints:
    megatron-sft-idx inspect data/train

  the same and some packs as a page for the browser, one file without network:
    megatron-sft-idx inspect data/train --tokenizer ./Qwen3-8B --html train.html

  one pack as text, the tokens that are trained on marked:
    megatron-sft-idx inspect data/train --tokenizer ./Qwen3-8B --pack 17

  where a text occurs:
    megatron-sft-idx inspect data/train --tokenizer ./Qwen3-8B --find 'as an AI'

  what differs between two shards, down to the mask of one token:
    megatron-sft-idx inspect data/train --diff data/train-again

Packs, sequences and tokens are counted from 0, lines of input files from 1. Memory does not grow with the shard.

exit code: 0 done, and for --find and --row found, for --diff equal; 1 not found, not equal, or bad data; 2 wrong usage.
"""


# Of a row of a column, in a line.
_MOST_VALUES = 8


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "inspect",
        help="what a shard holds: summary, packs as text, a page, a search, a comparison",
        description="Show what a shard holds.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("shard", metavar="PREFIX", help="prefix of the shard, or a folder or glob with one")
    parser.add_argument(
        "--tokenizer",
        TOKENIZER_MODEL,
        dest="tokenizer",
        metavar="PATH",
        help="folder or file of the tokenizer that made the ids, to show text; refused where the shard names another",
    )
    show = parser.add_mutually_exclusive_group()
    show.add_argument("--pack", type=natural, metavar="N", help="show pack N instead of the summary")
    show.add_argument("--row", metavar="FILE:LINE", help="show where the sequences are that a row was made into")
    show.add_argument("--find", metavar="TEXT", help="show where TEXT occurs in a sequence, letter by letter as it is")
    show.add_argument("--diff", metavar="OTHER", help="show what differs from the shard at this prefix")
    show.add_argument("--html", type=writable, metavar="FILE", help="write a page that needs nothing else")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.add_argument("--overwrite", action="store_true", help="replace the page that --html names")
    parser.add_argument(
        "--limit",
        type=positive,
        default=20,
        metavar="N",
        help="matches and differences to name; --find stops there (default: %(default)s)",
    )
    add_log_interval(parser, "packs", default=1_000_000)
    parser.set_defaults(run=_run, prints_result=True)


def _run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if arguments.find is not None and not arguments.tokenizer:
        parser.error("--find looks for text: say with --tokenizer what made the ids")
    if arguments.find == "":
        parser.error("--find: an empty text is everywhere")
    if arguments.html and arguments.json:
        parser.error("--html writes a page: leave out --json, or ask for it without --html")
    # By pread: the pages of a map would count as this process's memory.
    shard = Shard(_only_prefix(arguments.shard), backend="pread")
    decode = _decoder(shard, arguments.tokenizer)
    for what, show in (
        (arguments.pack, _show_pack),
        (arguments.row, _show_row),
        (arguments.find, _find),
        (arguments.diff, _diff),
        (arguments.html, _write_page),
    ):
        if what is not None:
            return show(shard, arguments, decode)
    found = _survey(shard, arguments)
    if arguments.json:
        _print_json(summary_dict(shard.prefix, found))
    else:
        print("\n".join(summary_lines(shard.prefix, found)))
    return 0


def _only_prefix(path: str) -> str:
    """The prefix, or that of the only shard in a folder or of a glob."""
    many = os.path.isdir(path) or glob.has_magic(path) or path.endswith("/")
    if not many or os.path.exists(f"{path}.seq.idx"):
        return path
    found = find_prefixes(path)
    if len(found) > 1:
        names = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")
        raise FormatError(f"{path}: {len(found):,} shards are here, one is inspected at a time; name it: {names}")
    return found[0]


def _decoder(shard: Shard, path: str | None) -> Decode | None:
    """Ids to text, by the tokenizer that made them. FormatError where it is another."""
    if path is None:
        return None
    tokenizer = load_tokenizer(path, backend="tokenizers")
    made = shard.header.tokenizer
    if made is None:
        print(f"{shard.prefix}: does not say which tokenizer made its ids; taking {path}", file=sys.stderr)
    elif made != tokenizer.fingerprint:
        raise FormatError(
            f"{path}: a tokenizer of fingerprint {tokenizer.fingerprint}, the ids of {shard.prefix} were made by"
            f" {shortened(made, 200)}; name that one, or leave --tokenizer out to see ids"
        )
    return tokenizer.decode


def _progress(shard: Shard, arguments: argparse.Namespace, what: str) -> Progress:
    """Of work that goes through the packs of a shard."""
    total, interval = shard.header.num_tokens, arguments.log_interval
    return Progress(what, total, unit="tokens", log_interval=interval, items="packs")


def _survey(shard: Shard, arguments: argparse.Namespace) -> Survey:
    with _progress(shard, arguments, "reading") as progress:
        return survey_shard(shard, tell=progress.update)


def _show_pack(shard: Shard, arguments: argparse.Namespace, decode: Decode | None) -> int:
    if arguments.pack >= len(shard):
        raise FormatError(f"{shard.prefix}: pack {arguments.pack}, the shard has {len(shard)}, counted from 0")
    pack = shard[arguments.pack]
    ids, mask, bounds = pack["input_ids"], pack["loss_mask"], pack["seq_boundaries"].tolist()
    sources = sources_of(shard, arguments.pack)
    if not arguments.json:
        print(mark_pack(ids, mask, bounds, decode or ids_as_text, sources=sources, color=in_color()))
        of_pack, of_sequences = _columns_of(shard, arguments.pack)
        for what, values in (("the pack", of_pack), *((f"sequence {i}", row) for i, row in enumerate(of_sequences))):
            if values:
                print(f"columns of {what}: " + ", ".join(f"{name} {_few(value)}" for name, value in values.items()))
        return 0
    sequences = []
    for sequence, (some, labels) in enumerate(shard.sequences(arguments.pack)):
        shown: dict[str, Any] = {"start": bounds[sequence], "input_ids": some.tolist()}
        shown["trained"] = trained_tokens(labels).astype(mask.dtype).tolist()
        shown |= {"source": sources[sequence]} if sources else {}
        sequences.append(shown | ({"text": decode(some.tolist())} if decode else {}))
    shown = {"prefix": shard.prefix, "pack": arguments.pack, "tokens": len(ids), "sequences": sequences}
    of_pack, of_sequences = _columns_of(shard, arguments.pack)
    for told, values in zip(sequences, of_sequences, strict=True):
        told.update({"columns": values} if values else {})
    _print_json(shown | ({"columns": of_pack} if of_pack else {}))
    return 0


def _columns_of(shard: Shard, pack: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Values of the columns that a pack has, and those that each of its sequences has besides its source, by name."""
    first, last = shard.sequence_offsets[pack : pack + 2].tolist()
    of_pack: dict[str, Any] = {}
    of_sequences: list[dict[str, Any]] = [{} for _ in range(last - first)]
    for name, column in shard.columns.items():
        if column.spec.per == "pack":
            of_pack[name] = column.values[pack : pack + 1].tolist()[0]
        elif column.spec.per == "sequence" and name != SOURCE:
            for values, row in zip(of_sequences, column.values[first:last].tolist(), strict=True):
                values[name] = row
    return of_pack, of_sequences


def _few(value: Any) -> str:
    """A value, or the first few of many."""
    if isinstance(value, list) and len(value) > _MOST_VALUES:
        return f"[{', '.join(map(str, value[:_MOST_VALUES]))}, ... {len(value):,} values]"
    return str(value)


def _find(shard: Shard, arguments: argparse.Namespace, decode: Decode | None) -> int:
    found = []
    with _progress(shard, arguments, "searching") as progress:
        matches = find_text(shard, arguments.find, decode or ids_as_text, tell=progress.update)
        for match in islice(matches, arguments.limit):
            from_row = sources_of(shard, match.pack)[match.sequence : match.sequence + 1]
            found.append(match._asdict() | ({"source": from_row[0]} if from_row else {}))
            if not arguments.json:
                before, text, after = map(on_one_line, (match.before, match.text, match.after))
                trained = ", trained" if match.trained else ""
                at = "".join(f" ({name})" for name in from_row)
                place = f"pack {match.pack}, sequence {match.sequence}{at}, token {match.token}{trained}"
                print(f"{place}: {before}[[{text}]]{after}", flush=True)
    stopped = len(found) == arguments.limit
    if arguments.json:
        _print_json({"prefix": shard.prefix, "find": arguments.find, "stopped_at_limit": stopped, "matches": found})
    elif not found:
        print(f"{shard.prefix}: not found in any of {shard.header.num_sequences:,} sequences")
    elif stopped:
        print(f"stopped after {len(found)}: --limit says how many")
    return 0 if found else 1


def _show_row(shard: Shard, arguments: argparse.Namespace, decode: Decode | None) -> int:
    del decode  # --pack shows the text
    found = list(islice(find_row(shard, *parse_place(shard, arguments.row)), arguments.limit))
    if arguments.json:
        places = [{"pack": pack, "sequence": sequence} for pack, sequence in found]
        _print_json({"prefix": shard.prefix, "row": arguments.row, "sequences": places})
    else:
        for pack, sequence in found:
            print(f"{arguments.row}: pack {pack}, sequence {sequence}")
        if not found:
            print(f"{shard.prefix}: no sequence was made from {arguments.row}")
    return 0 if found else 1


def _diff(shard: Shard, arguments: argparse.Namespace, decode: Decode | None) -> int:
    del decode  # ids are shown as numbers
    other = Shard(_only_prefix(arguments.diff), backend="pread")
    with _progress(shard, arguments, "comparing") as progress:
        comparison = compare_shards(shard, other, most=arguments.limit, tell=progress.update)
    if arguments.json:
        _print_json({"here": shard.prefix, "there": other.prefix, **comparison.to_dict()})
    else:
        print("\n".join(diff_lines(comparison, shard.prefix, other.prefix)))
    return 0 if comparison.same else 1


def _write_page(shard: Shard, arguments: argparse.Namespace, decode: Decode | None) -> int:
    path = resolve(arguments.html)
    tokenizer = files_of(arguments.tokenizer, "the tokenizer") if arguments.tokenizer else []
    shards = [Place(file, "a file of the shard") for file in ShardPaths.of(shard.prefix).all]
    require_apart([Place(path, "--html")], [*shards, *tokenizer])
    check_place(path, PAGE, overwrite=arguments.overwrite)
    found = _survey(shard, arguments)
    page = make_page(shard, found, decode)
    write_file(path, page, PAGE, overwrite=arguments.overwrite)
    of = "" if found.complete else f"; ids and masks sampled from {found.read_packs:,} packs"
    print(f"wrote {arguments.html}: {len(page):,} bytes, {counted(shard.header.num_packs, 'pack')}{of}")
    return 0


def _print_json(value: Any) -> None:
    print(json.dumps(_plain(value), indent=2))


def _plain(value: Any) -> Any:
    """A value as JSON knows it; of a damaged mask the numbers that it does not know by name: ``"nan"``, ``"inf"``."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    value = value.item() if isinstance(value, np.generic) else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
