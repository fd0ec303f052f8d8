"""A pack as text, with the tokens that are trained on marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "PICTURES",
    "Decode",
    "ids_as_text",
    "mark_pack",
    "marked_runs",
    "on_one_line",
    "shortened",
    "trained_tokens",
]

GREEN, DIM, RESET = "\x1b[30;42m", "\x1b[2m", "\x1b[0m"
# Text comes from anywhere, and a terminal obeys escape codes: control characters are shown as their pictures, and what
# reorders or breaks lines unseen (bidirectional controls, Unicode's own line ends) by its number.
PICTURES: dict[int, int | str] = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
_UNSEEN = (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF)
PICTURES |= {code: f"<U+{code:04X}>" for code in _UNSEEN}
_LINE_PICTURES = PICTURES | {9: 0x2409, 10: 0x240A}

Decode = Callable[[list[int]], str]


def trained_tokens(loss_mask: NDArray[np.generic]) -> NDArray[np.float32]:
    """The token-aligned weights of one sequence, from its label-aligned mask.

    Args:
        loss_mask: one sequence's mask, [length]; its entry j weighs the prediction of token j + 1.

    Returns:
        float32 [length]: entry j is the weight that token j is trained with. The first token, which nothing
        predicts, has none.
    """
    weights = np.zeros(len(loss_mask), np.float32)
    weights[1:] = loss_mask[:-1]
    return weights


def mark_pack(
    ids: NDArray[np.integer],
    loss_mask: NDArray[np.generic],
    boundaries: Sequence[int] | NDArray[np.integer],
    decode: Decode,
    *,
    color: bool = False,
) -> str:
    """Renders a pack: a rule above every sequence, trained text marked, nothing left out.

    Consecutive tokens of one weight are decoded together, so that a character of several tokens stays whole.

    Args:
        ids: token ids of the pack, [length].
        loss_mask: label-aligned mask, [length].
        boundaries: ``[0, start_1, ..., length]``.
        decode: makes text of ids and keeps special tokens.
        color: mark with a green background for terminals, instead of ``[[`` and ``]]``.

    Returns:
        Lines of text; sequences are counted from 0. A weight other than 1 follows the marked text, as in
        ``[[text]]x0.5``.
    """
    lines = []
    for number, (start, stop) in enumerate(pairwise(boundaries)):
        weights = trained_tokens(loss_mask[start:stop])
        rule = (
            f"── sequence {number}, positions {start} to {stop - 1}, "
            f"{np.count_nonzero(weights)} of {stop - start} tokens trained ──"
        )
        lines.append(f"{DIM}{rule}{RESET}" if color else rule)
        lines.append("".join(_marked_runs(ids[start:stop], weights, decode, color)).removesuffix("\n"))
    return "\n".join(lines)


def ids_as_text(ids: Sequence[int] | NDArray[np.integer]) -> str:
    """Stands in for a tokenizer's decoding where there is none."""
    return "".join(f"{number} " for number in np.asarray(ids).tolist())


def on_one_line(text: str) -> str:
    """A text with every control character, ends of lines too, as its picture."""
    return text.translate(_LINE_PICTURES)


def shortened(text: str, most: int) -> str:
    """A text from a shard's metadata on one line: whoever wrote the shard decides what it holds and how long it is."""
    text = on_one_line(text[: most + 1])
    return text if len(text) <= most else text[: most - 1] + "…"


def marked_runs(
    ids: NDArray[np.integer], weights: NDArray[np.float32], decode: Decode
) -> Iterator[tuple[str, float, int]]:
    """One sequence as text, weight and tokens of each run of equal weights, control characters shown as pictures."""
    position = 0
    for weight, run in groupby(weights.tolist()):
        length = sum(1 for _ in run)
        yield decode(ids[position : position + length].tolist()).translate(PICTURES), weight, length
        position += length


def _marked_runs(ids: NDArray[np.integer], weights: NDArray[np.float32], decode: Decode, color: bool) -> Iterator[str]:
    for text, weight, _ in marked_runs(ids, weights, decode):
        if weight == 0:
            yield text
            continue
        # A background that runs over a line's end paints the rest of the line in many terminals.
        yield f"{GREEN}{text.replace(chr(10), f'{RESET}{chr(10)}{GREEN}')}{RESET}" if color else f"[[{text}]]"
        if weight != 1:
            yield f"x{weight:g}"
