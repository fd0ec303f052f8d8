"""One line of a chunk: fields held against each other, and labels as a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron_sft_idx.formats.base import PackRun
from megatron_sft_idx.formats.checks import checked_run

__all__ = ["FIELDS", "UNTRAINED", "Line", "parse", "run_of"]

FIELDS = ("input_ids", "labels", "position_ids", "lengths", "pack_length", "num_samples")
# What labels hold where nothing is trained: PyTorch's index to ignore.
UNTRAINED = -100


class Line(NamedTuple):
    """One pack.

    Attributes:
        tokens: ids, integers [length].
        trained: token-aligned mask, bool [length].
        lengths: tokens in each sequence, int64 [sequences].
    """

    tokens: NDArray[Any]
    trained: NDArray[np.bool_]
    lengths: NDArray[np.int64]

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each sequence begins."""
        return np.cumsum(self.lengths) - self.lengths


def parse(raw: bytes) -> Line:
    """The pack in one line. ValueError says which field is wrong, and how."""
    row = orjson.loads(raw)
    if not isinstance(row, dict):
        raise ValueError(f"found {type(row).__name__}, expected an object with {', '.join(FIELDS)}")
    if missing := [name for name in FIELDS if name not in row]:
        chats = "; chats that are not tokenised yet go through preprocess, live ones need --tokenizer-model"
        remedy = chats if "messages" in row else ""
        raise ValueError(f"no {', '.join(missing)}; every line has {', '.join(FIELDS)}{remedy}")
    tokens, labels, positions, lengths = (_integers(row[name], name) for name in FIELDS[:4])
    _check_counts(row, len(tokens), len(labels), len(positions), lengths)
    expected = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    if (wrong := positions != expected).any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"position_ids[{at}] is {positions[at]}, expected {expected[at]}: they start again at 0 with every"
            " sequence of lengths"
        )
    trained = labels != UNTRAINED
    if (wrong := trained & (labels != tokens)).any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"labels[{at}] is {labels[at]} where input_ids has {tokens[at]}; a label is -100 or the id at its own"
            " place, labels that are shifted already have to be shifted back"
        )
    return Line(tokens, trained, lengths)


def run_of(path: str, first_pack: int, lines: Sequence[Line]) -> PackRun:
    """The packs of one or more lines as a checked run; path and number of the first pack are for errors.

    Raises:
        SequenceError: a rule is broken, with the number of the pack.
    """
    return checked_run(
        path,
        first_pack,
        np.concatenate([line.tokens for line in lines]),
        np.concatenate([line.trained for line in lines]),
        np.concatenate([line.starts for line in lines]),
        [len(line.tokens) for line in lines],
        [len(line.lengths) for line in lines],
        mask_alignment="token",
        token_dtype=np.int32,
    )


def _check_counts(row: dict[str, Any], tokens: int, labels: int, positions: int, lengths: NDArray[np.int64]) -> None:
    """ValueError unless everything that can be counted is the same."""
    if not len(lengths) or (lengths < 1).any() or (lengths > tokens).any():
        raise ValueError(f"lengths {lengths[:20].tolist()}, expected one or more sequences of 1 to {tokens} tokens")
    total = int(lengths.sum())
    counts = {"input_ids": tokens, "labels": labels, "position_ids": positions, "pack_length": row["pack_length"]}
    for name, count in counts.items():
        if type(count) is not int or count != total:
            what = "is" if name == "pack_length" else "has as many entries:"
            raise ValueError(f"{name} {what} {count!r}, the sum of lengths is {total}")
    if type(row["num_samples"]) is not int or row["num_samples"] != len(lengths):
        raise ValueError(f"num_samples is {row['num_samples']!r}, there are {len(lengths)} lengths")


def _integers(value: Any, name: str) -> NDArray[np.int64]:
    # Types first: numpy takes true for 1 among numbers.
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError(f"{name} is no list of whole numbers")
    try:
        return np.fromiter(value, np.int64, len(value))  # several times faster than numpy.array on a list
    except OverflowError:
        raise ValueError(f"{name} holds numbers that are far outside any id or length") from None
