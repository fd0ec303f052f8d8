"""A shard as one HTML page that can be mailed and opened anywhere. It needs no network and is under 1 MB for any shard.

This module selects what to show, and where; page.html, page.css and page.js draw it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from megatron_sft_idx import __version__
from megatron_sft_idx.errors import FormatError, brief
from megatron_sft_idx.inspect.origin import sequence_titles
from megatron_sft_idx.inspect.shown_media import Thumbnail, Thumbnails, blobs_of, shown_items
from megatron_sft_idx.inspect.summary import PERMILLE, Survey, column_lines, losses, media_lines, provenance
from megatron_sft_idx.inspect.tally import Tally
from megatron_sft_idx.inspect.text import (
    Decode,
    Folded,
    MarkedSpan,
    folded_in,
    ids_as_text,
    marked_spans,
    shown_nbytes,
    token_texts,
    trained_tokens,
)
from megatron_sft_idx.lines import counted, shortened
from megatron_sft_idx.shard import Pack, Shard
from megatron_sft_idx.storage.local import is_remote
from megatron_sft_idx.storage.publish import Kind, head_of

MAX_NBYTES = 1_000_000
# The beginning of page.html, used to recognise a page.
_BEGIN = b'<!doctype html>\n<html lang="en">\n<head>\n<meta name="generator" content="megatron-sft-idx inspect">\n'
PAGE = Kind("a page of inspect", lambda path: head_of(path, len(_BEGIN)) == _BEGIN)
_DRAWN, _BINS = 48, 48
# Initial number of tokens in the viewer. A page that is too large is made again with half as many.
_SHOWN_TOKENS = 60_000
# Number of tokens for which the HTML around each sequence, and each image or recording, counts.
_SEQUENCE_TOKENS, _ITEM_TOKENS = 20, 30
_MAX_FILES = 40  # in the table of sources
_MAX_CHARACTERS = 400  # of a name or value, whose length is up to the writer of the shard
# Number of colours in the style sheet; the sequences of a pack use them in turn.
_HUES = 4
_BAR_WIDTH = 1000.0
_BAR, _PALE = (0, 16), (5, 6)  # top and height of trained parts, which are tall as well as dark, and of the others
_MAX_SPANS = 200


class Picture(NamedTuple):
    """An image or recording on the page: a box with text, and with a thumbnail if there is one.

    Attributes:
        facts: kind, size and bytes.
        note: why there is no thumbnail, and where the same file is; may be empty.
        thumbnail: the thumbnail of an image.
    """

    facts: str
    note: str
    thumbnail: Thumbnail | None


class ShownSequence(NamedTuple):
    """A sequence as text, or the beginning of one.

    Attributes:
        number, start, stop: its number in the pack, and its positions there.
        trained, hidden: number of its trained tokens, and of the tokens at its end that are not shown.
        spans: texts of equal weight, and images and recordings.
        source: name of its origin; "" if it is unknown.
        ids: the ids of its tokens, in the form of ``_spelled``.
    """

    number: int
    start: int
    stop: int
    trained: int
    spans: Sequence[MarkedSpan]
    hidden: int
    source: str
    ids: str

    @property
    def share(self) -> str:
        """Return the trained fraction of the sequence."""
        return _percent(self.trained, self.stop - self.start)


class ShownPack(NamedTuple):
    """A pack on the page: a bar, and text in the viewer.

    Attributes:
        number: number of the pack.
        bar: classes and outlines of the paths of its bar.
        length, trained: number of its tokens, and of its trained tokens.
        num_sequences: number of its sequences.
        sequences: all of them, or the first few, as text.
        pictures: images and recordings in the shown sequences.
    """

    number: int
    bar: list[tuple[str, str]]
    length: int
    trained: int
    num_sequences: int
    sequences: Sequence[ShownSequence]
    pictures: Sequence[Picture]

    @property
    def is_cut(self) -> bool:
        """Whether some of its tokens are not shown."""
        return self.num_sequences > len(self.sequences) or any(sequence.hidden for sequence in self.sequences)

    @property
    def share(self) -> str:
        """Return the trained fraction: ``none``, per cent, or ``all`` except the first token of each sequence."""
        if not self.trained:
            return "none"
        return "all" if self.trained >= self.length - self.num_sequences else _percent(self.trained, self.length)


class Chart(NamedTuple):
    """A histogram with its layout in the picture drawn by page.html.

    Attributes:
        title: name of its values.
        caption: its numbers as text.
        bars: left end, top, width, height and tooltip of the bar of each nonempty class.
        rows: height and text of each line of the grid.
        marks: position and text of each mark of the horizontal axis.
    """

    title: str
    caption: str
    bars: list[tuple[float, float, float, float, str]]
    rows: list[tuple[float, str]]
    marks: list[tuple[float, str]]


def make_page(
    shard: Shard, survey: Survey, decode: Decode | None = None, *, tokenizer: str | os.PathLike[str] | None = None
) -> bytes:
    """Return the page of a shard, UTF-8, at most ``MAX_NBYTES``.

    The page shows when it was made. If the environment variable ``SOURCE_DATE_EPOCH`` is set to a number of seconds
    since 1970, it shows this time instead, so that the same shard gives the same bytes.

    Args:
        shard: the shard.
        survey: the counts of the shard, with all windows added.
        decode: ids to text; None shows ids.
        tokenizer: path of the tokenizer of ``decode``, for the commands on the page.

    Raises:
        FormatError: ``SOURCE_DATE_EPOCH`` is not a number of seconds.
    """
    made, commands = _now(), _Commands.of(shard.prefix, tokenizer)
    max_tokens, thumbnails = _SHOWN_TOKENS, Thumbnails()
    while True:
        thumbnails.begin()
        context = _context(shard, survey, decode, max_tokens, thumbnails)
        page = _template().render(**context, made=made, commands=commands).encode("utf-8", "replace")
        if len(page) <= MAX_NBYTES:
            return page
        assert max_tokens, f"{len(page)} bytes without any text"
        max_tokens //= 2


def _now() -> str:
    """Return the time that the page shows, such as ``2026-08-24 09:30 UTC``."""
    fixed = os.environ.get("SOURCE_DATE_EPOCH", "")
    if fixed and not re.fullmatch("[0-9]{1,11}", fixed):
        raise FormatError(f"SOURCE_DATE_EPOCH: {brief(fixed)}, expected a number of seconds since 1970, or nothing")
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(int(fixed) if fixed else time.time()))


class _Commands(NamedTuple):
    """Beginnings of commands that the page shows. Their paths are absolute, so they work in any folder.

    Attributes:
        path: path of the shard.
        inspect: prints ids, or needs none.
        inspect_text: prints text if the tokenizer is known, else ids.
    """

    path: str
    inspect: str
    inspect_text: str

    @classmethod
    def of(cls, prefix: str, tokenizer: str | os.PathLike[str] | None) -> _Commands:
        path = prefix if is_remote(prefix) else os.path.abspath(prefix)
        inspect = f"megatron-sft-idx inspect {_quoted(path)}"
        option = "" if tokenizer is None else f" --tokenizer {_quoted(os.path.abspath(tokenizer))}"
        return cls(shortened(path, _MAX_CHARACTERS), inspect, inspect + option)


def _quoted(word: str) -> str:
    return shlex.quote(shortened(word, _MAX_CHARACTERS))


def _context(
    shard: Shard, survey: Survey, decode: Decode | None, max_tokens: int, thumbnails: Thumbnails
) -> dict[str, Any]:
    header = survey.header
    style, script = (Markup(_resource(name)) for name in ("page.css", "page.js"))
    context = {
        "name": shortened(os.path.basename(shard.prefix), _MAX_CHARACTERS),
        "path": shortened(shard.prefix, _MAX_CHARACTERS),
        "version": __version__,
        "header": header,
        "survey": survey,
        "style": style,
        "script": script,
        "style_hash": _csp_hash(style),
        "script_hash": _csp_hash(script),
        "origin": list(_origin(survey)),
        "media": shard.media is not None,
    }
    if not header.num_packs:
        return context
    drawn = _spread(header.num_packs, _DRAWN)
    remarks = [remark for oddity in survey.odd for remark in oddity.remarks]
    # The first packs, the odd ones, and those drawn.
    numbers = sorted({*range(min(header.num_packs, 3)), *(remark.pack for remark in remarks), *drawn})
    packs = []
    for done, number in enumerate(numbers):
        # The unused part of a pack's share of pictures is distributed to later packs.
        share = thumbnails.nbytes // (len(numbers) - done)
        pictures = _Pictures(shard, number, thumbnails, share)
        packs.append(_shown_pack(shard, number, decode or ids_as_text, max_tokens // len(numbers), pictures))
    shown = {(pack.number, sequence.number) for pack in packs for sequence in pack.sequences}
    files = [] if survey.sources is None else sorted(survey.sources.table(), key=lambda file: -file.tokens)
    sources = [sequence.source for pack in packs for sequence in pack.sequences if sequence.source]
    return context | {
        "nbytes": sum(survey.nbytes.values()),
        "rows": [pack for pack in packs if pack.number in drawn],
        "charts": list(_charts(survey)),
        "packs": packs,
        # Pack and number of the shown sequences.
        "anchors": shown,
        # A pack for the command that prints one: the first that is not on the page.
        "other_pack": next((number for number in range(header.num_packs) if number not in numbers), 0),
        # An input line for the command that finds its sequences.
        "line": next(
            (_quoted(source) for source in sources if source.rpartition(":")[0] in (survey.names or ())), None
        ),
        "sources_shown": bool(sources),
        "files": files[:_MAX_FILES],
        "files_left": len(files) - len(files[:_MAX_FILES]),
        "decoded": decode is not None,
    }


def _spread(count: int, max_numbers: int) -> list[int]:
    """Return up to ``max_numbers`` of the numbers below ``count``, evenly spread, including the first and the last."""
    return sorted(set(np.linspace(0, count - 1, min(count, max_numbers)).round().astype(int).tolist()))


def _percent(part: int, whole: int) -> str:
    """Return a fraction in per cent. 0% and 100% mean nothing and all: one token out of a million is 0.1%."""
    share = 100 * part / whole
    return f"{min(max(share, 0.1), 99.9):.1f}%" if 0 < part < whole else f"{share:.0f}%"


def _brief(count: int) -> str:
    return f"{count:,}" if count < 10**6 else f"{count / 10**6:,.1f} million"


def _charts(survey: Survey) -> Iterator[Chart]:
    """Yield six histograms. A caption has the median and the important end of the distribution."""
    capacity, fill, cost = survey.header.capacity, survey.pack_lengths, survey.cost

    def counts(title: str, tally: Tally, unit: str, of: str) -> Chart:
        median, largest = tally.quantile(0.5), tally.largest
        caption = f"median {median:,}, 95th percentile {tally.quantile(0.95):,}, largest {largest:,}"
        # On a linear axis, half of the values would share a tenth of the picture.
        if is_spread := tally.least > 0 and largest >= 10 * median:
            caption += "; logarithmic axis"
        return histogram(title, caption, tally, min(tally.least, 1), largest, unit=unit, of=of, logarithmic=is_spread)

    def shares(title: str, tally: Tally, low: int, whole: int, of: str) -> Chart:
        half, few, least = (100 * value / whole for value in (tally.quantile(0.5), tally.quantile(0.05), tally.least))
        caption = f"median {half:.1f}%, 5th percentile {few:.1f}%, least {least:.1f}%"
        return histogram(title, caption, tally, low, whole, unit="%", of=of, scale=100 / whole)

    yield counts("Sequence length in tokens", survey.sequence_lengths, "tokens", "sequence")
    yield shares("Trained share of a sequence", survey.sequence_trained, 0, PERMILLE, "sequence")
    low = 0 if fill.quantile(0.02) < 0.6 * capacity else fill.least
    yield shares("Fill of a pack", fill, low, capacity, "pack")
    yield shares("Trained share of a pack", survey.trained, 0, PERMILLE, "pack")
    yield counts("Sequences in a pack", survey.sequences, "sequences", "pack")
    half, most, largest = (value / cost.mean for value in (cost.quantile(0.5), cost.quantile(0.95), cost.largest))
    caption = f"1× is the mean: median {half:.2f}×, 95th percentile {most:.2f}×, largest {largest:.2f}×"
    title = "Attention cost of a pack"
    yield histogram(title, caption, cost, 0, cost.largest, unit="×", of="pack", scale=1 / cost.mean)


def _origin(survey: Survey) -> Iterator[tuple[str, str | int]]:
    header = survey.header
    yield from provenance(header)
    yield "sequence multiple", header.sequence_multiple
    yield "pad id", "unknown" if header.pad_id is None else header.pad_id
    yield from losses(header).items()
    for block in ("options", "packing"):
        if isinstance(values := header.metadata.get(block), dict) and values:
            yield block, shortened(json.dumps(values, ensure_ascii=False), 4 * _MAX_CHARACTERS)
    yield from ((f"{suffix}, bytes", nbytes) for suffix, nbytes in survey.nbytes.items())
    yield from column_lines(survey.shard)
    yield from media_lines(survey.shard)


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"counted": counted, "brief": _brief, "shown_nbytes": shown_nbytes}
    environment.filters["pixels"] = lambda value: f"{value:.1f}".removesuffix(".0")
    return environment.from_string(_resource("page.html"))


@cache
def _resource(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _csp_hash(text: str) -> str:
    """Return the hash that identifies a script or style of this text in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# ---- the packs shown as text ----


def _shown_pack(shard: Shard, number: int, decode: Decode, max_tokens: int, pictures: _Pictures) -> ShownPack:
    """Return a pack with the text of at most ``max_tokens`` tokens, minus ``_SEQUENCE_TOKENS`` per shown sequence.

    An image or recording counts as ``_ITEM_TOKENS``, and is shown completely or not at all.
    """
    pack, titles = shard[number], sequence_titles(shard, number)
    ids, mask, media = pack["input_ids"], pack["loss_mask"], pack.get("media", [])
    shown: list[ShownSequence] = []
    num_items = 0
    for index, (start, stop) in enumerate(pairwise(pack["seq_boundaries"].tolist())):
        max_tokens -= _SEQUENCE_TOKENS
        if max_tokens <= 0:
            break
        folded = folded_in(media, start, stop)
        end, max_tokens = _shown_end(folded, stop - start, max_tokens)
        folded = [item for item in folded if item.start < end]
        end += start
        weights = trained_tokens(mask[start:stop])
        spans = list(marked_spans(ids[start:end], weights[: end - start], decode, folded))
        num_items = max([num_items, *(item.number + 1 for item in folded)])
        trained = int(np.count_nonzero(weights))
        spelled = "" if decode is ids_as_text else _spelled(ids[start:end], spans, decode)
        source = titles[index] if titles else ""
        shown.append(ShownSequence(index, start, stop, trained, spans, stop - end, source, spelled))
    bar, trained = bar_paths(pack, shard.header.capacity), int(np.count_nonzero(mask))
    sequences = len(pack["seq_boundaries"]) - 1
    return ShownPack(number, bar, len(ids), trained, sequences, shown, pictures.first(num_items))


def _shown_end(media: Sequence[Folded], length: int, max_tokens: int) -> tuple[int, int]:
    """Return how many tokens of a sequence are shown, and how many of ``max_tokens`` are left."""
    position = 0
    for item in media:
        text = item.start - position
        if text + _ITEM_TOKENS > max_tokens:
            break
        max_tokens -= text + _ITEM_TOKENS
        position = item.start + item.length
    else:
        text = min(length - position, max_tokens)
        return position + text, max_tokens - text
    text = min(item.start - position, max_tokens)
    return position + text, 0


class _Pictures:
    """The images and recordings of a pack; all thumbnails together have ``share`` bytes."""

    def __init__(self, shard: Shard, pack: int, thumbnails: Thumbnails, share: int) -> None:
        self._shard, self._pack, self._thumbnails, self._share = shard, pack, thumbnails, share

    def first(self, count: int) -> list[Picture]:
        """Return the first ``count`` of them."""
        media = self._shard.media
        if media is None:
            return []
        pictures, share = [], self._share
        blobs = blobs_of(media, self._pack).tolist()
        for item, blob in zip(shown_items(self._shard, self._pack, count), blobs, strict=False):
            notes, thumbnail = [item.problem] if item.problem else [], None
            if item.kind == "image" and not item.problem:
                made = self._thumbnails.of(media, blob, share)
                if isinstance(made, Thumbnail):
                    thumbnail, share = made, share - len(made.uri)
                elif made is not None:
                    notes.append(made)
            if item.same_as is not None:
                notes.append(f"the same file as item {item.same_as[1]} of pack {item.same_as[0]}")
            pictures.append(Picture(item.facts, ", ".join(notes), thumbnail))
        return pictures


def _spelled(ids: NDArray[np.integer], spans: Sequence[MarkedSpan], decode: Decode) -> str:
    """Encode ids for page.js: in ``4.9ix 1.2f+3g`` four characters are one token, the next is two; ids in base 36.

    Ids of images and recordings are omitted.
    """
    parts = []
    for span in spans:
        for text, tokens in token_texts(ids[: span.length], decode) if span.item is None else ():
            parts.append(f"{len(text)}.{'+'.join(np.base_repr(token, 36).lower() for token in tokens)}")
        ids = ids[span.length :]
    return " ".join(parts)


# ---- pictures ----


def bar_paths(pack: Pack, capacity: int) -> list[tuple[str, str]]:
    """Return a pack's bar, 1000 x 16: class of each SVG path, such as ``t2`` for trained tokens of hue 2, and outline.

    A pack of more than 200 spans is drawn with 200 samples.
    """
    scale = _BAR_WIDTH / max(capacity, 1)
    paths: dict[tuple[int, bool], list[str]] = {}
    for start, stop, sequence, trained, last in _drawn_spans(pack):
        x, width = start * scale, (stop - start) * scale
        # A gap after each sequence, for people who do not see its hue.
        width = max(width - 1.5, 0.75 * width) if last else width
        top, height = _BAR if trained else _PALE
        paths.setdefault((sequence % _HUES, trained), []).append(
            f"M{x:.1f} {top}h{max(width, 0.5):.1f}v{height}H{x:.1f}z"
        )
    return [(f"{'t' if trained else 'u'}{hue}", "".join(parts)) for (hue, trained), parts in sorted(paths.items())]


def _drawn_spans(pack: Pack) -> Iterator[tuple[int, int, int, bool, bool]]:
    """Yield the spans of one colour: start, stop, sequence, whether it is trained, whether it ends the sequence."""
    bounds = pack["seq_boundaries"].astype(np.int64)
    trained = trained_tokens(pack["loss_mask"]) != 0
    trained[bounds[:-1]] = False
    length = len(trained)
    changes = np.zeros(length + 1, np.bool_)
    changes[bounds] = True
    changes[1:length] |= trained[1:] != trained[:-1]
    edges = np.flatnonzero(changes)
    if len(edges) > _MAX_SPANS:
        edges = np.unique(np.linspace(0, length, _MAX_SPANS + 1).astype(np.int64))
    for begin, end in pairwise(edges.tolist()):
        middle = (begin + end) // 2
        sequence = int(np.searchsorted(bounds, middle, "right")) - 1
        yield begin, end, sequence, bool(trained[middle]), end in bounds


# The ends of the axes in the picture drawn by page.html. Half of the axis's last number is to the right of _RIGHT.
_LEFT, _RIGHT, _BASE = 46, 462, 168


def histogram(
    title: str,
    caption: str,
    tally: Tally,
    low: int,
    high: int,
    *,
    unit: str,
    of: str,
    scale: float = 1.0,
    logarithmic: bool = False,
) -> Chart:
    """Return the fraction of each class of values from ``low`` to ``high``, in per cent.

    Args:
        title: name of the values.
        caption: what a reader should know about the values.
        tally: the values.
        low: beginning of the axis.
        high: end of the axis.
        unit: unit of the values, after ``scale``.
        of: the counted things, in the singular.
        scale: factor for displayed values.
        logarithmic: whether the axis is logarithmic; it then reaches from the smallest to the largest value.
    """
    edges, counts = tally.logarithmic_histogram() if logarithmic else tally.histogram(_BINS, low, high)
    total = int(counts.sum())
    shares = 100 * counts / max(1, total)
    top, first, last = float(shares.max(initial=0.0)), float(edges[0]), float(edges[-1])

    def across(value: float) -> float:
        along = math.log(value / first) / math.log(last / first) if logarithmic else (value - first) / (last - first)
        return _LEFT + (_RIGHT - _LEFT) * along

    def up(share: float) -> float:
        return _BASE - (_BASE - 10) * share / max(top, 1e-9)

    sign = unit if unit in "%×" else ""
    # A class of one value is labelled in its middle, a class of several at its beginning.
    middle = 0.5 if edges[1] - edges[0] == 1 and scale == 1 and not logarithmic else 0.0
    if logarithmic:
        ticks = logarithmic_ticks(first, high, 6)
    else:
        ticks = nice_ticks(first * scale, high * scale, 6, whole=scale == 1)
    marks = [(across(value / scale + middle), text + sign) for value, text in ticks if first * scale <= value]
    bars = []
    for (begin, end), share, count in zip(pairwise(edges.tolist()), shares.tolist(), counts.tolist(), strict=True):
        if not count:
            continue
        greatest, digits = (min(end - 1, high), 6) if scale == 1 else (min(end, high) * scale, 3)
        span = f"{begin * scale:,.{digits}g}"
        span += f" to {greatest:,.{digits}g}" if greatest > begin * scale else ""
        y = min(up(share), _BASE - 1)  # anything above zero must be visible
        width = max(across(end) - across(begin) - 1, 0.8)
        bars.append(
            (
                across(begin),
                y,
                width,
                _BASE - y,
                f"{span}{sign or f' {unit}'}: {counted(count, of)} ({_percent(count, total)})",
            )
        )
    return Chart(title, caption, bars, [(up(value), f"{text}%") for value, text in nice_ticks(0, top, 4)], marks)


def nice_ticks(low: float, high: float, max_steps: int, *, whole: bool = False) -> list[tuple[float, str]]:
    """Return at most ``max_steps`` + 1 round values (integers if ``whole``) from ``low`` to ``high``, with texts."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [(low, _written(low, 1.0))]
    raw = max(span / max_steps, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [(k * step, _written(k * step, step)) for k in range(first, last + 1)]


def logarithmic_ticks(low: float, high: float, max_steps: int) -> list[tuple[float, str]]:
    """Return powers of ten from ``low`` to ``high``, with texts; also 2 and 5 times these if there are few enough."""
    powers = [10**power for power in range(math.ceil(math.log10(high)) + 1)]
    for factors in ((1, 2, 5), (1, 3), (1,)):
        values = [value for power in powers for factor in factors if low <= (value := power * factor) <= high]
        if len(values) <= max_steps + 1:
            break
    return [(float(value), f"{value:,}") for value in values]


def _written(value: float, step: float) -> str:
    """Return a tick's value, with enough decimals to distinguish ticks that are a ``step`` apart."""
    digits = next((digits for digits in range(4) if abs(step * 10**digits - round(step * 10**digits)) < 1e-6), 4)
    return f"{value:,.{digits}f}"
