"""A shard as one self-contained HTML page: no network, under 1 MB whatever the shard.

What is shown is chosen here, and drawn as inline SVG; how it looks stands in page.html, page.css and page.js.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from megatron_sft_idx.inspect.origin import SOURCE, sources_of
from megatron_sft_idx.inspect.summary import PERMILLE, Survey, column_lines, fingerprints, losses
from megatron_sft_idx.inspect.tally import Tally
from megatron_sft_idx.inspect.text import (
    Decode,
    counted,
    ids_as_text,
    marked_spans,
    shortened,
    token_texts,
    trained_tokens,
)
from megatron_sft_idx.shard import Pack, Shard
from megatron_sft_idx.storage.publish import Kind, head_of

MAX_NBYTES = 1_000_000
# How page.html begins, by which a page is recognised.
_BEGIN = b'<!doctype html>\n<html lang="en">\n<head>\n<meta name="generator" content="megatron-sft-idx inspect">\n'
PAGE = Kind("a page of inspect", lambda path: head_of(path, len(_BEGIN)) == _BEGIN)
_DRAWN, _BINS = 48, 48
# Bytes for the viewer's text. A page that is too large is made again with the next of these.
_TEXT_NBYTES = (640_000, 320_000, 60_000, 0)
# Bytes of markup for a span, and for a sequence, beside its text.
_SPAN_NBYTES, _SEQUENCE_NBYTES = 24, 260
# Files in the table of sources; sequences that the page finds by their line, some 10 bytes each.
_MAX_FILES, _MAX_LOCATED = 40, 20_000
# Bytes of the names of all files, by which the page can tell a file of the input from a misspelt one.
_MAX_NAMES_NBYTES = 100_000
_MAX_CHARACTERS = 400  # of a name or value: whoever wrote the shard decides how long they are
# How many colours the style sheet has; the sequences of a pack take them in turn.
_HUES = 4
_BAR_WIDTH = 1000.0
_BAR, _PALE = (0, 16), (5, 6)  # top and height: what is trained on is tall as well as dark
_MAX_SPANS = 200


class DrawnPack(NamedTuple):
    """A pack drawn as a bar; lengths in tokens."""

    number: int
    bar: Markup
    length: int
    trained: int
    sequences: int

    @property
    def share(self) -> str:
        """How much of the pack is trained on: ``none``, per cent, or ``all`` but the first token of each sequence."""
        if not self.trained:
            return "none"
        return "all" if self.trained >= self.length - self.sequences else _percent(self.trained, self.length)


class ShownSequence(NamedTuple):
    """A sequence as text, or its beginning.

    Attributes:
        number, start, stop: its number and its positions in the pack.
        trained, hidden: how many of its tokens are trained on, and how many at its end are not shown.
        spans: texts of equal weight, with the weight.
        source: name of its origin; empty where that is not known.
        ids: the ids of its tokens, as ``_spelled`` writes them.
    """

    number: int
    start: int
    stop: int
    trained: int
    spans: Sequence[tuple[str, float]]
    hidden: int
    source: str
    ids: str

    @property
    def share(self) -> str:
        """How much of the sequence is trained on."""
        return _percent(self.trained, self.stop - self.start)


class ShownPack(NamedTuple):
    """A pack in the viewer: all its sequences or the first few, which take ``nbytes`` of the page."""

    drawn: DrawnPack
    sequences: Sequence[ShownSequence]
    nbytes: int


class Chart(NamedTuple):
    """A picture, and its numbers in words."""

    title: str
    caption: str
    svg: Markup


def make_page(shard: Shard, survey: Survey, decode: Decode | None = None) -> bytes:
    """The page of a shard, UTF-8, at most ``MAX_NBYTES``.

    Args:
        shard: the shard.
        survey: the shard's, all windows added.
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
        "name": shortened(os.path.basename(shard.prefix), _MAX_CHARACTERS),
        "command": f"megatron-sft-idx inspect {shlex.quote(shortened(shard.prefix, _MAX_CHARACTERS))} --pack",
        "header": header,
        "survey": survey,
        "style": style,
        "script": script,
        "style_hash": _csp_hash(style),
        "script_hash": _csp_hash(script),
        "origin": list(_origin(survey)),
    }
    if not header.num_packs:
        return context
    drawn = _spread(header.num_packs, _DRAWN)
    remarks = [remark for oddity in survey.odd for remark in oddity.remarks]
    # The first packs, the odd ones, and those drawn.
    numbers = sorted({*range(min(header.num_packs, 3)), *(remark.pack for remark in remarks), *drawn})
    free_nbytes = text_nbytes
    packs: list[ShownPack] = []
    for number in numbers:
        share = free_nbytes // (len(numbers) - len(packs))
        packs.append(_shown_pack(shard, number, decode or ids_as_text, share))
        free_nbytes -= packs[-1].nbytes
    shown = {(pack.drawn.number, sequence.number) for pack in packs for sequence in pack.sequences}
    files = [] if survey.sources is None else sorted(survey.sources.table(), key=lambda file: -file.tokens)
    return context | {
        "lede": _lede(survey),
        "figures": list(_figures(survey)),
        "rows": [pack.drawn for pack in packs if pack.drawn.number in drawn],
        "charts": list(_charts(survey)),
        "packs": packs,
        # Pack and number of the sequences that are shown.
        "anchors": shown,
        "files": files[:_MAX_FILES],
        "files_left": len(files) - len(files[:_MAX_FILES]),
        "places": _origins_json(shard, survey),
        "decoded": decode is not None,
    }


def _origins_json(shard: Shard, survey: Survey) -> Markup:
    """JSON by which page.js finds the sequences of a line: names of files; file and row of each sequence; pack sizes.

    What is too large for the page is null: ``files``, and of very many files ``names``.
    """
    if survey.names is None:
        return Markup("null")
    names = survey.names if len(json.dumps(survey.names)) <= _MAX_NAMES_NBYTES else None
    origins: dict[str, Any] = {"names": names, "files": None}
    if survey.header.num_sequences <= _MAX_LOCATED and len(survey.names) <= _MAX_FILES:
        values = shard.columns[SOURCE].values[:]
        origins |= {"files": values[:, 0].tolist(), "rows": values[:, 1].tolist()}
        origins["counts"] = np.diff(shard.sequence_offsets).tolist()
    # No name may end the script element that holds it.
    return Markup(json.dumps(origins, separators=(",", ":")).replace("<", "\\u003c"))


def _spread(count: int, max_numbers: int) -> list[int]:
    """Up to ``max_numbers`` of the numbers below ``count``, evenly spread, the first and the last among them."""
    return sorted(set(np.linspace(0, count - 1, min(count, max_numbers)).round().astype(int).tolist()))


def _percent(part: int, whole: int) -> str:
    """A share in per cent; 0% and 100% are said of nothing and of all only."""
    share = 100 * part / whole
    return f"{min(max(share, 0.1), 99.9):.1f}%" if 0 < part < whole else f"{share:.0f}%"


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
    total = sum(survey.nbytes.values())
    yield "on disk", _bytes(total), f"{total / header.num_tokens:.2f} bytes a token"


def _brief(count: int) -> str:
    sizes = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"))
    return _three_digits(count, sizes) or f"{count:,}"


def _bytes(count: int) -> str:
    sizes = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
    return _three_digits(count, sizes) or f"{count} B"


def _three_digits(count: int, sizes: Iterable[tuple[int, str]]) -> str | None:
    """In the largest unit that it reaches, with three digits at least: 1.23, 12.3, 123, 1,023; None below all units."""
    for size, name in sizes:
        if count >= size:
            value = count / size
            return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {name}"
    return None


def _charts(survey: Survey) -> Iterator[Chart]:
    fill, capacity = survey.pack_lengths, survey.header.capacity
    yield _count_chart("Sequence length in tokens", survey.sequence_lengths, "tokens", "sequences")
    low = 0 if fill.quantile(0.02) < 0.6 * capacity else fill.least
    sampled = "" if survey.complete else " (sampled)"
    yield _share_chart("Trained share of a sequence", survey.sequence_trained, 0, PERMILLE, "sequences", sampled)
    yield _share_chart("Fill of a pack", fill, low, capacity, "packs")
    yield _share_chart("Trained share of a pack", survey.trained, 0, PERMILLE, "packs", sampled)
    yield _count_chart("Sequences in a pack", survey.sequences, "sequences", "packs")
    yield _cost_chart(survey.cost)


def _count_chart(title: str, tally: Tally, unit: str, of: str) -> Chart:
    half, most = tally.quantile(0.5), tally.quantile(0.95)
    caption = f"median {half:,}, 95th percentile {most:,}, largest {tally.largest:,}"
    classes = tally.histogram(_BINS, min(tally.least, 1), tally.largest)
    return Chart(title, caption, histogram(*classes, f"{title}: {caption}", unit=unit, of=of))


def _cost_chart(cost: Tally) -> Chart:
    """Pairs of tokens that attend to each other, as multiples of the mean of all packs."""
    half, most, largest = (value / cost.mean for value in (cost.quantile(0.5), cost.quantile(0.95), cost.largest))
    caption = f"1× is the mean: median {half:.2f}×, 95th percentile {most:.2f}×, largest {largest:.2f}×"
    classes = cost.histogram(_BINS, 0, cost.largest)
    svg = histogram(*classes, caption, unit="×", of="packs", scale=1 / cost.mean)
    return Chart("Attention cost of a pack", caption, svg)


def _share_chart(title: str, tally: Tally, low: int, whole: int, of: str, remark: str = "") -> Chart:
    """A histogram of values from ``low`` on, as per cent of ``whole``."""
    percent = 100 / whole
    least, half, few = (percent * value for value in (tally.least, tally.quantile(0.5), tally.quantile(0.05)))
    caption = f"median {half:.1f}%, 5th percentile {few:.1f}%, least {least:.1f}%{remark}"
    classes = tally.histogram(_BINS, low, whole)
    return Chart(title, caption, histogram(*classes, caption, unit="%", of=of, scale=percent))


def _origin(survey: Survey) -> Iterator[tuple[str, str | int]]:
    header = survey.header
    yield from ((name, shortened(value, _MAX_CHARACTERS)) for name, value in fingerprints(header).items())
    if header.rebuilt:
        yield "rebuilt", "the header was derived from the data; what only it knew is lost"
    yield "sequence multiple", header.sequence_multiple
    yield "pad id", "unknown" if header.pad_id is None else header.pad_id
    yield from losses(header).items()
    for block in ("options", "packing"):
        if isinstance(values := header.metadata.get(block), dict) and values:
            yield block, shortened(json.dumps(values, ensure_ascii=False), 4 * _MAX_CHARACTERS)
    yield from ((f"{suffix}, bytes", nbytes) for suffix, nbytes in survey.nbytes.items())
    yield from column_lines(survey)


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
    """The name by which a content security policy allows a script or style of this text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# ---- the packs that are shown as text ----


def _shown_pack(shard: Shard, number: int, decode: Decode, nbytes: int) -> ShownPack:
    """A pack whose sequences take about ``nbytes`` of the page at most."""
    free_nbytes = nbytes
    pack, sources = shard[number], sources_of(shard, number)
    ids, mask = pack["input_ids"], pack["loss_mask"]
    shown: list[ShownSequence] = []
    for index, (start, stop) in enumerate(pairwise(pack["seq_boundaries"].tolist())):
        free_nbytes -= _SEQUENCE_NBYTES
        if free_nbytes <= 0:
            break
        weights = trained_tokens(mask[start:stop])
        # A token takes a byte at least: of those behind ``free_nbytes`` none is shown.
        spans, tokens, used, spelled = _cut(ids[start:stop][:free_nbytes], weights[:free_nbytes], decode, free_nbytes)
        free_nbytes -= used
        trained = int(np.count_nonzero(weights))
        source = sources[index] if sources else ""
        shown.append(ShownSequence(index, start, stop, trained, spans, stop - start - tokens, source, spelled))
    bar, trained = bar_paths(pack, shard.header.capacity), int(np.count_nonzero(mask))
    drawn = DrawnPack(number, bar, len(ids), trained, len(pack["seq_boundaries"]) - 1)
    return ShownPack(drawn, shown, nbytes - max(free_nbytes, 0))


def _cut(
    ids: NDArray[np.integer], weights: NDArray[np.float32], decode: Decode, nbytes: int
) -> tuple[list[tuple[str, float]], int, int, str]:
    """The spans that fit into ``nbytes`` of the page, the number of their tokens, the bytes they take, and their ids.

    Of the first span that does not fit, the beginning is shown, and none of its tokens counted.
    """
    spans: list[tuple[str, float]] = []
    spelled: list[str] = []
    tokens = used = 0
    for text, weight, length in marked_spans(ids, weights, decode):
        size = len(str(escape(text)).encode("utf-8", "replace")) + _SPAN_NBYTES
        span_ids = (
            "" if decode is ids_as_text or used + size > nbytes else _spelled(ids[tokens : tokens + length], decode)
        )
        if used + size + len(span_ids) > nbytes:
            # A character becomes 5 bytes at most.
            spans.append((text[: max(0, nbytes - used) // 5], weight))
            return spans, tokens, nbytes, " ".join(spelled)
        spans.append((text, weight))
        spelled.append(span_ids)
        tokens, used = tokens + length, used + size + len(span_ids)
    return spans, tokens, used, " ".join(spelled)


def _spelled(ids: NDArray[np.integer], decode: Decode) -> str:
    """Length and ids of each text that is whole tokens, for page.js: ``4.9ix 1.2f+3g``, ids in base 36."""
    return " ".join(
        f"{len(text)}.{'+'.join(np.base_repr(token, 36).lower() for token in tokens)}"
        for text, tokens in token_texts(ids, decode)
    )


# ---- pictures: numbers in, markup out ----


def bar_paths(pack: Pack, capacity: int) -> Markup:
    """A pack as paths in a box of 1000 x 16: sequences in different hues, tall and dark where trained on.

    A pack of more than 200 spans is drawn by 200 samples.
    """
    scale = _BAR_WIDTH / max(capacity, 1)
    paths: dict[tuple[int, bool], list[str]] = {}
    for start, stop, sequence, trained, last in _drawn_spans(pack):
        x, width = start * scale, (stop - start) * scale
        # A gap behind each sequence, for those who do not see its hue.
        width = max(width - 1.5, 0.75 * width) if last else width
        top, height = _BAR if trained else _PALE
        paths.setdefault((sequence % _HUES, trained), []).append(
            f"M{x:.1f} {top}h{max(width, 0.5):.1f}v{height}H{x:.1f}z"
        )
    return joined(
        element("path", class_=f"{'t' if trained else 'u'}{hue}", d="".join(parts))
        for (hue, trained), parts in sorted(paths.items())
    )


def _drawn_spans(pack: Pack) -> Iterator[tuple[int, int, int, bool, bool]]:
    """Start, stop, sequence, whether trained, and whether it ends the sequence, of each span of one colour."""
    bounds = pack["seq_boundaries"].astype(np.int64)
    trained = trained_tokens(pack["loss_mask"]) > 0
    trained[bounds[:-1]] = False
    length = len(trained)
    changes = np.zeros(length + 1, np.bool_)
    changes[bounds] = True
    changes[1:length] |= trained[1:] != trained[:-1]
    edges = np.flatnonzero(changes)
    if len(edges) > _MAX_SPANS:
        edges = np.unique(np.linspace(0, length, _MAX_SPANS + 1).astype(np.int64))
    middles = (edges[:-1] + edges[1:]) // 2
    sequences = np.searchsorted(bounds, middles, "right") - 1
    kinds = trained[middles]
    begins = np.flatnonzero(np.diff(sequences * 2 + kinds, prepend=-1))
    ends = np.append(begins[1:], len(middles))
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        sequence = int(sequences[begin])
        last = end == len(middles) or int(sequences[end]) != sequence
        yield int(edges[begin]), int(edges[end]), sequence, bool(kinds[begin]), last


_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BASE = 480, 190, 46, 462, 168  # half of the last number lies behind the right end


def histogram(
    edges: NDArray[np.int64], counts: NDArray[np.int64], label: str, *, unit: str, of: str, scale: float = 1.0
) -> Markup:
    """A histogram: the share of each class in per cent.

    Args:
        edges: edges of the classes, whole numbers, [classes + 1].
        counts: how many values each class has, [classes].
        label: the picture in words, for screen readers.
        unit: unit of the edges, after ``scale``.
        of: what is counted, in the plural.
        scale: what an edge is multiplied with to be shown.
    """
    shares = 100 * counts / max(1, int(counts.sum()))
    top, first, last = float(shares.max(initial=0.0)), float(edges[0]), float(edges[-1])

    def across(value: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (value - first) / max(last - first, 1e-9)

    def up(share: float) -> float:
        return _BASE - (_BASE - 10) * share / max(top, 1e-9)

    def line(name: str, y: float) -> Markup:
        return element("line", class_=name, x1=_LEFT, x2=_RIGHT, y1=y, y2=y)

    grid, marks = [], []
    for value, text in nice_ticks(0, top, 4):
        grid.append(line("grid", up(value)))
        marks.append(element("text", text + "%", class_="y", x=_LEFT - 6, y=up(value) + 3.5))
    sign = unit if unit in "%×" else ""
    # A class of one value is named in its middle, one of several where it begins.
    low, high, middle = edges[0] * scale, edges[-1] * scale, 0.5 if edges[1] - edges[0] == 1 and scale == 1 else 0.0
    for value, text in nice_ticks(low, high - 2 * middle, 6, whole=scale == 1):
        if low <= value:
            marks.append(element("text", text + sign, class_="x", x=across(value / scale + middle), y=_HEIGHT - 6))
    for (begin, end), share, count in zip(pairwise(edges.tolist()), shares.tolist(), counts.tolist(), strict=True):
        if not count:
            continue
        greatest, digits = ((end - 1) * scale, 6) if scale == 1 else (end * scale, 3)
        span = f"{begin * scale:,.{digits}g}"
        span += f" to {greatest:,.{digits}g}" if greatest > begin * scale else ""
        title = element("title", f"{span} {unit}: {count:,} {of} ({share:.2g}%)")
        y = min(up(share), _BASE - 1)  # what is above zero can be seen
        width = max(across(end) - across(begin) - 1, 0.8)
        marks.append(element("rect", title, class_="bar", x=across(begin), y=y, width=width, height=_BASE - y))
    content = joined([*grid, *marks, line("axis", _BASE)])
    return element("svg", content, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=label)


def element(name: str, content: str = "", **attributes: str | float) -> Markup:
    """``<name ...>content</name>``.

    Args:
        name: the element's.
        content: its text, escaped unless it is markup.
        **attributes: ``_`` at the end of a name is dropped, any other becomes ``-``; numbers get one digit behind
            the point, which is a tenth of a pixel.
    """
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    written = joined(
        Markup(' {}="{}"').format(key, value if isinstance(value, str) else number(value)) for key, value in pairs
    )
    return Markup("<{}{}>{}</{}>").format(name, written, content, name)


def number(value: float) -> str:
    """A number with one decimal, which is left out where it is 0."""
    return f"{value:.1f}".removesuffix(".0")


def joined(parts: Iterable[Markup]) -> Markup:
    """Markup end to end."""
    return Markup("").join(parts)


def nice_ticks(low: float, high: float, max_steps: int, *, whole: bool = False) -> list[tuple[float, str]]:
    """At most ``max_steps`` + 1 round values from ``low`` to ``high``, whole on request, and as they are written."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [(low, _written(low, 1.0, abs(low)))]
    raw = max(span / max_steps, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(k * step, _written(k * step, step, last * step)) for k in range(first, last + 1)]


def _written(value: float, step: float, largest: float) -> str:
    """A tick's value, in the unit of the ``largest`` of its axis."""
    for least, size, letter in ((1e9, 1e9, " G"), (1e6, 1e6, " M"), (1e4, 1e3, " k")):
        if largest >= least:
            return f"{value / size:.{_digits(step / size)}f}{letter}" if value else "0"
    return f"{value:,.{_digits(step)}f}"


def _digits(step: float) -> int:
    """The decimals by which ticks that are a ``step`` apart differ."""
    return next((digits for digits in range(4) if abs(step * 10**digits - round(step * 10**digits)) < 1e-6), 4)
