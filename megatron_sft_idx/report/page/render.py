"""The page put together: what is shown is chosen here, how it looks stands in page.html, page.css and page.js."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup

from megatron_sft_idx.layout import Header
from megatron_sft_idx.report.marked import Decode, ids_as_text, shortened
from megatron_sft_idx.report.odd import counted
from megatron_sft_idx.report.page.shapes import bar_paths, histogram, profile
from megatron_sft_idx.report.page.viewer import ShownPack, shown_numbers, shown_pack, spread
from megatron_sft_idx.report.summary import fingerprints, losses, shard_nbytes
from megatron_sft_idx.report.survey import PERMILLE, Survey
from megatron_sft_idx.report.tally import Tally
from megatron_sft_idx.shard import Shard

__all__ = ["MAX_NBYTES", "make_page"]

MAX_NBYTES = 1_000_000
_DRAWN, _BINS = 48, 48
# Bytes for the viewer's text; where the rest of the page leaves no room for that, it is made again with less.
_TEXT_NBYTES = (520_000, 260_000, 60_000, 0)
_MOST_CHARACTERS = 400  # of a name or value: whoever wrote the shard decides how long they are


class Row(NamedTuple):
    """A pack drawn as a bar; lengths in tokens."""

    number: int
    bar: Markup
    length: int
    trained: int
    sequences: int


class Chart(NamedTuple):
    """A picture and what it says."""

    title: str
    caption: str
    svg: Markup


def make_page(shard: Shard, survey: Survey, decode: Decode | None = None) -> bytes:
    """The page of a shard, UTF-8, at most ``MAX_NBYTES``.

    Args:
        shard: the shard.
        survey: of it.
        decode: ids to text; None shows ids.
    """
    for text_nbytes in _TEXT_NBYTES:
        page = _template().render(**_context(shard, survey, decode, text_nbytes)).encode("utf-8", "replace")
        if len(page) <= MAX_NBYTES:
            return page
    raise AssertionError(f"{len(page)} bytes without any text")


def _context(shard: Shard, survey: Survey, decode: Decode | None, text_nbytes: int) -> dict[str, Any]:
    header = survey.header
    style, script = (Markup(_resource(name)) for name in ("page.css", "page.js"))
    context = {
        "name": shortened(os.path.basename(shard.prefix), _MOST_CHARACTERS),
        "command": f"megatron-sft-idx inspect {shlex.quote(shortened(shard.prefix, _MOST_CHARACTERS))} --pack",
        "header": header,
        "survey": survey,
        "style": style,
        "script": script,
        "style_hash": _csp_hash(style),
        "script_hash": _csp_hash(script),
        "origin": list(_origin(header)),
    }
    if not header.num_packs:
        return context
    drawn = spread(header.num_packs, _DRAWN)
    numbers = shown_numbers(survey, drawn)
    left = text_nbytes
    packs: list[ShownPack] = []
    for done, number in enumerate(numbers):
        packs.append(shown_pack(shard, number, decode or ids_as_text, left // (len(numbers) - done)))
        left -= packs[-1].nbytes
    return context | {
        "lede": _lede(survey),
        "figures": list(_figures(survey)),
        "rows": [_row(shard, number) for number in drawn],
        "charts": list(_charts(survey)),
        "cost": _cost(survey),
        "packs": packs,
        "linked": set(numbers),
        "anchors": _anchors(survey, packs),
        "decoded": decode is not None,
    }


def _anchors(survey: Survey, packs: list[ShownPack]) -> set[tuple[int, int]]:
    """Pack and number of the sequences that are both linked to and shown."""
    shown = {(pack.number, sequence.number) for pack in packs for sequence in pack.sequences}
    linked = {(place.pack, place.sequence) for odd in survey.odd for place in odd.places if place.sequence is not None}
    return shown & linked


def _row(shard: Shard, number: int) -> Row:
    pack = shard[number]
    ids, trained = pack["input_ids"], int(np.count_nonzero(pack["loss_mask"]))
    return Row(number, bar_paths(pack, shard.header.capacity), len(ids), trained, len(pack["seq_boundaries"]) - 1)


def _lede(survey: Survey) -> str:
    header = survey.header
    return (
        f"{counted(header.num_packs, 'pack')} of up to {header.capacity:,} tokens"
        f" {'hold' if header.num_packs > 1 else 'holds'} {counted(header.num_sequences, 'sequence')}."
        f" {100 * header.num_trained_tokens / header.num_tokens:.1f}% of their {header.num_tokens:,} tokens are"
        f" trained on, and {100 * survey.fill:.1f}% of all positions are filled."
    )


def _figures(survey: Survey) -> Iterator[tuple[str, str, str]]:
    header, counts = survey.header, survey.sequences
    masked = f"{header.num_masked_packs:,} all masked" if header.num_masked_packs else "none all masked"
    yield "packs", f"{header.num_packs:,}", masked
    yield "sequences", f"{header.num_sequences:,}", f"{counts.mean:.1f} a pack, at most {counts.largest:,}"
    yield (
        "tokens",
        _brief(header.num_tokens),
        f"{header.token_dtype.name}, {survey.sequence_lengths.mean:,.0f} a sequence",
    )
    share = 100 * header.num_trained_tokens / header.num_tokens
    yield "trained", f"{share:.1f}%", f"{_brief(header.num_trained_tokens)} tokens"
    yield "filled", f"{100 * survey.fill:.1f}%", f"of {header.capacity:,} positions"
    total = sum(shard_nbytes(header).values())
    yield "on disk", _bytes(total), f"{total / header.num_tokens:.2f} bytes a token"


def _brief(count: int) -> str:
    for size, name in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{_three_digits(count / size)} {name}"
    return f"{count:,}"


def _bytes(count: int) -> str:
    for size, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= size:
            return f"{_three_digits(count / size)} {name}"
    return f"{count} B"


def _three_digits(value: float) -> str:
    """At least three of them: 1.23, 12.3, 123, 1,023."""
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _charts(survey: Survey) -> Iterator[Chart]:
    header = survey.header
    yield _chart("Sequence length in tokens", survey.sequence_lengths, "tokens", "sequences")
    fill = survey.pack_lengths
    percent = 100 / header.capacity
    edges, counts = fill.histogram(_BINS, 0 if fill.quantile(0.02) * percent < 60 else fill.least, header.capacity)
    caption = (
        f"median {percent * fill.quantile(0.5):.1f}%, 5th percentile {percent * fill.quantile(0.05):.1f}%,"
        f" least {percent * fill.least:.1f}%"
    )
    yield Chart("Fill of a pack", caption, histogram(edges, counts, caption, unit="%", of="packs", scale=percent))
    trained = survey.trained
    edges, counts = trained.histogram(_BINS, 0, PERMILLE)
    sampled = "" if survey.complete else " (sampled)"
    caption = (
        f"median {trained.quantile(0.5) / 10:.1f}%, 5th percentile {trained.quantile(0.05) / 10:.1f}%,"
        f" least {trained.least / 10:.1f}%{sampled}"
    )
    svg = histogram(edges, counts, caption, unit="%", of="packs", scale=100 / PERMILLE)
    yield Chart("Trained share of a pack", caption, svg)
    yield _chart("Sequences in a pack", survey.sequences, "sequences", "packs")


def _chart(title: str, tally: Tally, unit: str, of: str) -> Chart:
    half, most = tally.quantile(0.5), tally.quantile(0.95)
    caption = f"median {half:,}, 95th percentile {most:,}, largest {tally.largest:,}"
    edges, counts = tally.histogram(_BINS, min(tally.least, 1), tally.largest)
    return Chart(title, caption, histogram(edges, counts, f"{title}: {caption}", unit=unit, of=of))


def _cost(survey: Survey) -> Chart:
    header, width = survey.header, survey.cost.width
    caption = (
        "Pairs of tokens that attend to each other, in order of the shard, the mean of all packs being 1×."
        f" The costliest pack costs {survey.cost_spread:.2f} times the mean."
    )
    if width > 1:
        caption += (
            f" The line is the mean of {width:,} packs; nine of ten of them lie in the band, none above the thin line."
        )
    return Chart("", caption, profile(survey.cost, header.num_packs, f"attention cost by pack: {caption}"))


def _origin(header: Header) -> Iterator[tuple[str, str | int]]:
    yield from ((name, shortened(value, _MOST_CHARACTERS)) for name, value in fingerprints(header).items())
    if header.rebuilt:
        yield "rebuilt", "the header was derived from the data; what only it knew is lost"
    yield "sequence multiple", header.sequence_multiple
    yield "pad id", "unknown" if header.pad_id is None else header.pad_id
    yield from losses(header).items()
    for block in ("options", "packing"):
        if isinstance(found := header.metadata.get(block), dict) and found:
            yield block, shortened(json.dumps(found, ensure_ascii=False), 4 * _MOST_CHARACTERS)
    yield from ((f"{suffix}, bytes", nbytes) for suffix, nbytes in shard_nbytes(header).items())


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["counted"] = counted
    return environment.from_string(_resource("page.html"))


@cache
def _resource(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _csp_hash(text: str) -> str:
    """What a content security policy calls a text that may stand in the page."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
