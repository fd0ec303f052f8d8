"""Packs as safe text: it shows which tokens are trained on, and cannot command a terminal."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, brief
from megatron_sft_idx.lines import PICTURES, on_one_line
from megatron_sft_idx.packs.run import windows
from megatron_sft_idx.shard import Pack, Shard
from megatron_sft_idx.storage.progress import Update

GREEN, YELLOW, DIM, RESET = "\x1b[30;42m", "\x1b[30;43m", "\x1b[2m", "\x1b[0m"
_CONTEXT = 40  # characters shown before and after a match
_MAX_CHARACTER_TOKENS = 8  # maximum number of tokens of one character

# Styles of a notebook's cell, legible on light and dark backgrounds.
_MARK = "color: inherit; background: rgba(30, 136, 209, .32); border-bottom: 1px solid #1e88d1"
_TEXT = "margin: .2em 0 1.4em; line-height: 1.5; white-space: pre-wrap; overflow-wrap: anywhere"

Decode = Callable[[list[int]], str]


def shown_nbytes(nbytes: int) -> str:
    """Return a size in readable form: ``1023 B``, ``1.5 KiB``."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def ids_as_text(ids: Sequence[int] | NDArray[np.integer]) -> str:
    """Return the ids themselves, as a ``Decode`` without a tokenizer."""
    return "".join(f"{number} " for number in np.asarray(ids).tolist())


# ---- one pack, marked ----


def trained_tokens(loss_mask: NDArray[np.generic]) -> NDArray[np.float32]:
    """The token-aligned weights of one sequence, from its label-aligned mask.

    Args:
        loss_mask: label-aligned mask of one sequence, [length]; entry j weighs the prediction of token j + 1.

    Returns:
        float32 [length]: entry j is the weight that token j is trained with. The first token, which nothing
        predicts, has weight 0.
    """
    weights = np.zeros(len(loss_mask), np.float32)
    weights[1:] = loss_mask[:-1]
    return weights


class HasPlace(Protocol):
    """An image or recording in a pack or sequence, such as a ``MediaItem``."""

    @property
    def kind(self) -> str:
        """``image`` or ``audio``."""

    @property
    def start(self) -> int:
        """Its first position."""

    @property
    def length(self) -> int:
        """Number of its positions."""


class Folded(NamedTuple):
    """The part of an image or recording that is in one sequence.

    Attributes:
        kind: ``image`` or ``audio``.
        start: its first position, counted from the first token of the sequence.
        length: number of its positions there.
        number: its number among the images and recordings of the pack.
    """

    kind: str
    start: int
    length: int
    number: int


def folded_in(media: Sequence[HasPlace], start: int, stop: int) -> list[Folded]:
    """Return the images and recordings of a pack at positions ``[start, stop)``, in order."""
    found = []
    for number, item in enumerate(media):
        first, last = max(item.start, start), min(item.start + item.length, stop)
        if first < last:
            found.append(Folded(item.kind, first - start, last - first, number))
    return found


def mark_pack(
    ids: NDArray[np.integer],
    loss_mask: NDArray[np.generic],
    boundaries: Sequence[int] | NDArray[np.integer],
    decode: Decode,
    *,
    sources: Sequence[str] = (),
    media: Sequence[HasPlace] = (),
    only: int | None = None,
    color: bool = False,
) -> str:
    """Render a pack: a line with positions and counts above each sequence, and trained text marked.

    Consecutive tokens of one weight are decoded together, so that a character of several tokens stays whole. The
    placeholder tokens of an image or recording are folded: ``<image x 576>``.

    Args:
        ids: token ids of the pack, [length].
        loss_mask: label-aligned mask, [length].
        boundaries: ``[0, start_1, ..., length]``.
        decode: converts ids to text and keeps special tokens.
        sources: what the line above each sequence says about its origin; empty if it is unknown.
        media: images and recordings of the pack, in order.
        only: number of the only sequence to render; None for all.
        color: mark with a green background for terminals, instead of ``[[`` and ``]]``.

    Returns:
        Lines of text; sequences are counted from 0. A weight other than 1 follows the marked text, as in
        ``[[text]]x0.5``.
    """
    lines = []
    for number, (start, stop) in enumerate(pairwise(boundaries)):
        if only not in (None, number):
            continue
        weights = trained_tokens(loss_mask[start:stop])
        rule = _rule(number, start, stop, weights, sources[number] if sources else "")
        lines.append(f"{DIM}{rule}{RESET}" if color else rule)
        spans = marked_spans(ids[start:stop], weights, decode, folded_in(media, start, stop))
        marked = (_marked(span.text, span.weight, color) for span in spans)
        lines.append("".join(marked).removesuffix("\n"))
    return "\n".join(lines)


class MarkedPack:
    """A readable pack: printed like ``mark_pack``; in a notebook with trained text highlighted."""

    def __init__(self, pack: Pack, decode: Decode) -> None:
        self._pack, self._decode = pack, decode

    def __repr__(self) -> str:
        pack = self._pack
        bounds, media = pack["seq_boundaries"].tolist(), pack.get("media", ())
        return mark_pack(pack["input_ids"], pack["loss_mask"], bounds, self._decode, media=media)

    def _repr_html_(self) -> str:
        pack, parts = self._pack, []
        for number, (start, stop) in enumerate(pairwise(pack["seq_boundaries"].tolist())):
            weights = trained_tokens(pack["loss_mask"][start:stop])
            folded = folded_in(pack.get("media", ()), start, stop)
            spans = marked_spans(pack["input_ids"][start:stop], weights, self._decode, folded)
            text = "".join(
                f'<mark style="{_MARK}" title="weight {weight:g}">{escape(text)}</mark>' if weight else escape(text)
                for text, weight, *_ in spans
            )
            parts.append(f'<small style="opacity: .75">{_rule(number, start, stop, weights)}</small>')
            parts.append(f'<pre style="{_TEXT}">{text}</pre>')
        return f"<div>{''.join(parts)}</div>"


def show_pack(pack: Pack, tokenizer: Any = None) -> MarkedPack:
    """Return a readable pack, to print or to show at the end of a notebook's cell; trained text is marked.

    Args:
        pack: ``ds[i]`` of any dataset of this package.
        tokenizer: the tokenizer of its ids: a local folder or file, or an object with ``decode``, such as one of
            transformers'; None shows ids.

    Raises:
        FormatError: there is no tokenizer at the path.

    Example:
        >>> from megatron_sft_idx import Shard
        >>> show_pack(Shard("data/sums")[0], "tools/demo/tokenizer")
        ── sequence 0, positions 0 to 18, 4 of 19 tokens trained ──
        <|im_start|>user
        What is 12 x 12?<|im_end|>
        <|im_start|>assistant
        [[144.<|im_end|>]]
    """
    if not isinstance(pack, Mapping) or not pack.keys() >= Pack.__required_keys__:
        raise FormatError(f"pack: expected ds[i] of a dataset of this package, found {brief(pack)}")
    if tokenizer is None:
        return MarkedPack(pack, ids_as_text)
    if isinstance(tokenizer, (str, os.PathLike)):
        from megatron_sft_idx.chat.tokenizer.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(os.fspath(tokenizer), backend="tokenizers")
    if not hasattr(tokenizer, "decode"):
        raise FormatError(f"tokenizer: expected a path, or an object with a decode method, found {brief(tokenizer)}")
    return MarkedPack(pack, tokenizer.decode)


def _rule(number: int, start: int, stop: int, weights: NDArray[np.float32], source: str = "") -> str:
    """Return the line above a sequence in ``mark_pack``."""
    trained, source = np.count_nonzero(weights), f" ({on_one_line(source)})" if source else ""
    return (
        f"── sequence {number}{source}, positions {start} to {stop - 1}, {trained} of {stop - start} tokens trained ──"
    )


class MarkedSpan(NamedTuple):
    """Tokens of one weight that are shown together.

    Attributes:
        text: with control characters as pictures; for placeholder tokens ``<image x 576>``.
        weight: training weight of the tokens.
        length: number of tokens.
        item: number in the pack of the image or recording to which these placeholders belong; None for text.
    """

    text: str
    weight: float
    length: int
    item: int | None = None


def marked_spans(
    ids: NDArray[np.integer], weights: NDArray[np.float32], decode: Decode, media: Sequence[Folded] = ()
) -> Iterator[MarkedSpan]:
    """Yield the spans of equal weight of one sequence; each of its images and recordings is a separate span."""
    position, shown = 0, np.full(len(ids), -1, np.int64)
    for number, item in enumerate(media):
        shown[item.start : item.start + item.length] = number
    end = " " if decode is ids_as_text else ""
    for (weight, number), span in groupby(zip(weights.tolist(), shown.tolist(), strict=True)):
        length = sum(1 for _ in span)
        if number < 0:
            text = decode(ids[position : position + length].tolist()).translate(PICTURES)
            yield MarkedSpan(text, weight, length)
        else:
            yield MarkedSpan(f"<{media[number].kind} x {length}>{end}", weight, length, media[number].number)
        position += length


def token_texts(ids: NDArray[np.integer], decode: Decode) -> list[tuple[str, list[int]]]:
    """Return the text of each token with control characters as pictures; tokens that share a character are joined.

    Each token is decoded together with the previous one, because some tokenizers drop the space at the beginning of a
    text. If the texts do not add up to that of all ids, the result is one text of all tokens.
    """
    texts: list[tuple[str, list[int]]] = []
    before: list[int] = []
    tokens: list[int] = []
    for token in ids.tolist():
        tokens.append(token)
        text = decode(before + tokens)[len(decode(before)) if before else 0 :]
        if len(tokens) == _MAX_CHARACTER_TOKENS or not text.endswith("\ufffd"):
            texts.append((text.translate(PICTURES), tokens))
            before, tokens = tokens, []
    whole = decode(ids.tolist()).translate(PICTURES)
    return texts if "".join(text for text, _ in texts) == whole else [(whole, ids.tolist())]


def _marked(text: str, weight: float, color: bool) -> str:
    if weight == 0:
        return text
    # A background that continues after the end of a line paints the rest of the line in many terminals.
    marked = f"{GREEN}{text.replace(chr(10), f'{RESET}{chr(10)}{GREEN}')}{RESET}" if color else f"[[{text}]]"
    return marked if weight == 1 else f"{marked}x{weight:g}"


# ---- search for a text in all packs ----


class Match(NamedTuple):
    """An occurrence of a text: numbers of the pack, of the sequence in it, and of the token at its beginning.

    ``trained`` is whether that token is trained on; ``before`` and ``after`` are the surrounding text.
    """

    pack: int
    sequence: int
    token: int
    trained: bool
    before: str
    text: str
    after: str

    def in_context(self, *, color: bool = False) -> str:
        """Return the found text with the text around it, on one line.

        The found text is between ``>>`` and ``<<``, or on a yellow background with ``color``. It never has the
        ``[[ ]]`` or the green background of trained tokens.
        """
        before, text, after = map(on_one_line, (self.before, self.text, self.after))
        return f"{before}{YELLOW}{text}{RESET}{after}" if color else f"{before}>>{text}<<{after}"


def find_text(
    shard: Shard,
    text: str,
    decode: Decode,
    *,
    selected: NDArray[np.bool_] | None = None,
    on_progress: Update | None = None,
) -> Iterator[Match]:
    """Yield every occurrence of a text in the decoded sequences, in order. None crosses the end of a sequence.

    Args:
        shard: the shard.
        text: the text to find, literally; not empty.
        decode: ids to text.
        selected: the sequences to search, bool [sequences]; None for all.
        on_progress: called after each window with its tokens and packs.
    """
    for window in windows(shard.files):
        ids, loss = window.content()
        for number, (start, stop) in enumerate(pairwise(window.bounds.tolist())):
            if selected is not None and not selected[window.first_sequence + number]:
                continue
            decoded = decode(ids[start:stop].tolist())
            at = decoded.find(text)
            while at >= 0:
                end = at + len(text)
                token = _token_at(ids[start:stop], decode, at)
                trained = token > 0 and bool(loss[start + token - 1])
                before, after = decoded[max(0, at - _CONTEXT) : at], decoded[end : end + _CONTEXT]
                yield Match(*window.locate(number), token, trained, before, text, after)
                at = decoded.find(text, end)
        if on_progress:
            on_progress(window.num_tokens, len(window))


def _token_at(ids: NDArray[Any], decode: Decode, at: int) -> int:
    """Return the token of a sequence in which character ``at`` of its text begins."""

    def text_of(token: int) -> str:
        return decode(ids[: token + 1].tolist())

    # If the last character is incomplete, decode shows replacement characters, so those at the end do not count.
    # Replacement characters in the text itself do not count either, so the result may be one token too late.
    token = bisect_right(range(len(ids) - 1), at, key=lambda token: len(text_of(token).rstrip("\ufffd")))
    while token > 0 and len(text_of(token - 1)) > at:
        token -= 1
    return token
