"""Rows that are already packed: the sequences of a row, and the conversations of a list of messages.

A tokenised row can contain several concatenated sequences. These fields give their bounds:

=====================  =============================================================================================
lengths                ``seq_lengths`` (TRL), ``seq_lens`` (NeMo Automodel), ``lengths`` and ``length`` if they are
                       lists, ``packed_seq_lens`` (OpenRLHF), ``sample_lengths``, ``sequence_lengths``
starts                 ``seq_start_id`` (NeMo, Megatron-Bridge)
bounds                 ``seq_boundaries`` (this package), ``cu_seqlens`` (Megatron) and its spellings, also with ``_q``,
                       ``_k``, ``_kv``; ``cumulative_len`` (XTuner), ``packing_params`` (LLaMA-Factory)
positions              ``position_ids`` that restart at 0 (ms-swift, LLaMA-Factory, transformers), ``input_pos``
numbers                ``attention_mask`` of 1, 1, 2, 2, 3 (LLaMA-Factory, Axolotl), ``seq_idx``, ``segment_ids``,
                       ``sequence_ids``, ``document_ids``
=====================  =============================================================================================

All fields of a row must agree. An ``attention_mask`` of only ones, and positions of a single row, do not define
sequences.

Padding after the last sequence is dropped if the row marks it: zeros in ``attention_mask``, -1 or 0 in the other
numbers, ``right_padding_length``, a ``_padded`` field next to a shorter one, or zeros at the end of ``position_ids``.
Trainers fill positions with zeros, and a sequence of one token has nothing to learn.

Megatron's ``--sft`` lines have several conversations in one list of messages. There each system message starts one.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.types import Conversation, RowError, TokenizedRow
from megatron_sft_idx.chat.values import Undecoded, parse_json

SystemStarts: TypeAlias = Literal["error", "conversation", "turn"]
_Bounds: TypeAlias = NDArray[np.int64]

_LENGTHS: Final = ("seq_lengths", "seq_lens", "packed_seq_lens", "sample_lengths", "sequence_lengths")
# A number under these names is the length of the row.
_PLAIN_LENGTHS: Final = ("lengths", "length")
_STARTS: Final = ("seq_start_id",)
_CUMULATIVE: Final = tuple(f"{name}{of}" for name in ("cu_seqlens", "cu_seq_lens") for of in ("", "_q", "_k", "_kv"))
_BOUNDS: Final = ("seq_boundaries", "sequence_boundaries", "cumulative_len", *_CUMULATIVE)
_PARAMETERS: Final = "packing_params"
_POSITIONS: Final = ("position_ids", "input_pos", "text_position_ids")
_NUMBERED: Final = ("attention_mask", "seq_idx", "segment_ids", "sequence_ids", "document_ids")
# Lengths and bounds including the padding after each sequence, and their counterparts without it.
_PADDED: Final = {
    **{f"{name}_padded": name for name in (*_LENGTHS, *_CUMULATIVE)},
    **{name: f"{name}_unpadded" for name in _CUMULATIVE},
}
_OF_LENGTHS: Final = frozenset({*_LENGTHS, *_PLAIN_LENGTHS, *(f"{name}_padded" for name in _LENGTHS)})
_OF_BOUNDS: Final = frozenset({*_BOUNDS, *(f"{name}{how}" for name in _CUMULATIVE for how in ("_padded", "_unpadded"))})
# Only packed rows have fields with these names.
_OF_PACKS_ALONE: Final = frozenset(
    {*_OF_LENGTHS, *_OF_BOUNDS, *_STARTS, _PARAMETERS, "seq_idx"} - {*_PLAIN_LENGTHS, "sequence_lengths"}
)
_ALL: Final = frozenset({*_OF_PACKS_ALONE, *_OF_LENGTHS, *_POSITIONS, *_NUMBERED})
_LEAVE_OUT: Final = "ignore the wrong one with --ignore-field NAME"
# LLaMA-Factory's number for no sequence, instead of an empty list.
_NO_SEQUENCE: Final = 1 << 32
_OF_MEDIA: Final = ("image_subseq_ids", "video_subseq_ids", "audio_subseq_ids")
# Error texts for a row that needs a decision, and how to decide.
UNDECIDED = "a system message comes after an assistant message in this row"
DECIDE = (
    "choose for the whole input: --system-starts conversation starts a new conversation, stored as a separate"
    " sequence, at each system message (like Megatron's --sft); --system-starts turn keeps one conversation with"
    " several system messages"
)


class Layout(NamedTuple):
    """The sequences of a tokenised row.

    Attributes:
        bounds: start of each sequence, and end of the last one, int64 [sequences + 1]. Tokens after it are padding.
        notes: counts for the summary, by name.
    """

    bounds: _Bounds
    notes: Mapping[str, int] = {}


class _Claim(NamedTuple):
    """The information in one field.

    Attributes:
        field: name of the field.
        bounds: bounds of the sequences. Padding may be a sequence, part of the last one, or not included.
    """

    field: str
    bounds: _Bounds


def read_layout(
    row: Mapping[str, Any], ids: NDArray[np.int64], trained: NDArray[np.bool_], *, token_aligned: bool
) -> Layout:
    """Return the sequences of a tokenised row according to its fields; one if it has no such fields.

    Args:
        row: a row with ``input_ids``.
        ids: its tokens, [tokens].
        trained: the positions marked in the row's masks, bool [tokens].
        token_aligned: whether masks mark the trained token itself, rather than the one before it.

    Raises:
        RowError: a field is invalid, two fields disagree, padding is trained on, or padding cannot be determined.
    """
    count = len(ids)
    if _ALL.isdisjoint(row):
        return Layout(np.array([0, count]))
    claims, ends = _read_claims(row, count)
    end = _agreed_end(ends, count)
    if (positions := _read_positions(row, count)) is not None:
        positions, end = _place_zeros(positions, claims, end, ids, trained)
        claims.append(positions)
    if end is None:
        end = count
    if end == count and not claims:
        return Layout(np.array([0, count]))
    bounds = _agreed_bounds(claims, end, count)
    if (at := _first(trained[end:])) is not None:
        raise RowError(
            f"padding is trained on: the row marks its last {count - end} tokens as padding, but trains on the"
            f" token at position {end + at}"
        )
    last = ids[bounds[-2] : end]
    if len(bounds) > 2 and len(last) > 1 and (last == last[0]).all() and not trained[bounds[-2] : end].any():
        raise RowError(
            f"the last of {len(bounds) - 1} sequences is the token {last[0]} repeated {len(last)} times, and is not"
            " trained on: is it padding? Leave it out, or mark it with zeros in attention_mask"
        )
    notes = {"packed_rows": 1} if len(bounds) > 2 else {}
    if token_aligned and row.get(_STARTS[0]) is not None and row.get("loss_mask") is not None:
        notes["rows_with_seq_start_id"] = 1
    return Layout(bounds, notes)


def refuse_pack_fields(row: Mapping[str, Any]) -> None:
    """Raise RowError if a row that is not read as tokens has bounds of sequences."""
    if not _OF_PACKS_ALONE.isdisjoint(row):
        for name in sorted(_OF_PACKS_ALONE.intersection(row)):
            if row[name] is not None:
                raise RowError(
                    f"{name} gives token positions of sequences, but the row has text instead of tokens: provide"
                    f" input_ids with a mask, or pass --ignore-field {name} to ignore it"
                )


# ---- single fields ----


def _read_claims(row: Mapping[str, Any], count: int) -> tuple[list[_Claim], dict[str, int]]:
    """Return the sequences in all fields except positions; and the start of padding, by field."""
    claims, ends = _read_bounds(row, count)
    for name in _STARTS:
        if row.get(name) is not None:
            claims.append(_Claim(name, _of_starts(row[name], name, count)))
    if row.get(_PARAMETERS) is not None:
        claim, ends[_PARAMETERS] = _of_parameters(row[_PARAMETERS], count)
        claims.append(claim)
    for name in _NUMBERED:
        if row.get(name) is not None and (numbered := _of_numbers(row[name], name, count)) is not None:
            of_sequences, is_padded = numbered
            if is_padded:
                ends[name] = int(of_sequences[-1])
            if name != "attention_mask" or len(of_sequences) > 2:
                claims.append(_Claim(name, of_sequences))
    return claims, ends


def _read_bounds(row: Mapping[str, Any], count: int) -> tuple[list[_Claim], dict[str, int]]:
    """Return the sequences in lengths and bounds; and the start of padding, from pairs with and without padding."""
    bounds: dict[str, _Bounds] = {}
    ends: dict[str, int] = {}
    for name in sorted((_OF_LENGTHS | _OF_BOUNDS).intersection(row)):
        value = row[name]
        if value is None or (name in _PLAIN_LENGTHS and isinstance(value, (int, float, Undecoded))):
            continue
        bounds[name] = _of_lengths(value, name, count) if name in _OF_LENGTHS else _of_bounds(value, name, count)
    for physical, logical in _PADDED.items():
        if physical in bounds and logical in bounds:
            ends[logical] = _end_of_pair(bounds.pop(physical), bounds[logical], physical, logical, count)
    for name in bounds:
        if name.endswith("_padded"):
            raise RowError(
                f"{name} includes the padding after each sequence, but {name.removesuffix('_padded')}, the bounds"
                " without padding, is missing: provide both; if there is no padding, rename the field to"
                f" {name.removesuffix('_padded')}"
            )
    return [_Claim(name, of_sequences) for name, of_sequences in bounds.items()], ends


def _of_lengths(value: Any, name: str, count: int) -> _Bounds:
    lengths = integers(value, name)
    if wrong := [length for length in lengths.tolist() if not 0 < length <= count]:
        raise RowError(f"{name} holds {wrong[0]}, expected lengths from 1 to {count}, the number of input_ids")
    return np.append(0, np.cumsum(lengths))


def _of_starts(value: Any, name: str, count: int) -> _Bounds:
    return _checked(np.append(integers(value, name), count), name, count)


def _of_bounds(value: Any, name: str, count: int) -> _Bounds:
    bounds = integers(value, name)
    if name in _BOUNDS and name not in _CUMULATIVE:
        return _checked(bounds, name, count)
    # Batches have the same number of entries in every row, filled with -1 or the last entry.
    bounds = bounds[: len(bounds) - _count_last(bounds == -1)]
    again = _count_last(bounds == bounds[-1]) if bounds.size else 0
    return _checked(bounds[: len(bounds) - max(again - 1, 0)], name, count)


def _checked(bounds: _Bounds, name: str, count: int) -> _Bounds:
    """Return bounds if they begin with 0, ascend, and end within the tokens. RowError: they do not."""
    if len(bounds) < 2 or bounds[0]:
        raise RowError(
            f"{name} begins with {bounds[0] if len(bounds) else 'nothing'}, expected 0, followed by more bounds"
        )
    if (at := _first(bounds[1:] <= bounds[:-1])) is not None:
        if at == len(bounds) - 2 and name in _STARTS:
            raise RowError(f"{name} holds {bounds[at]}, but there are {count} input_ids: no sequence can begin there")
        raise RowError(f"{name} does not ascend: {bounds[at]} is followed by {bounds[at + 1]}")
    if bounds[-1] > count:
        raise RowError(f"{name} holds {bounds[-1]}, but there are {count} input_ids")
    return bounds


def _end_of_pair(physical: _Bounds, logical: _Bounds, physical_in: str, logical_in: str, count: int) -> int:
    """Return the start of padding from bounds with and without it.

    RowError: padding before the end of the last sequence.
    """
    sequences = len(logical) - 1
    if physical[-1] != count:
        raise RowError(f"{physical_in} ends at {physical[-1]}, but there are {count} input_ids")
    is_tail = len(physical) - 1 in (sequences, sequences + 1) and physical[sequences] >= logical[-1]
    if not is_tail or (physical[:sequences] != logical[:sequences]).any():
        raise RowError(
            f"according to {logical_in} and {physical_in}, there is padding between sequences; remove the"
            " padding from the rows"
        )
    return int(logical[-1])


def _of_parameters(value: Any, count: int) -> tuple[_Claim, int]:
    """Return the claim of LLaMA-Factory's ``packing_params``, and the start of padding."""
    name = f"{_PARAMETERS}.sequence_boundaries"
    if not isinstance(value, Mapping) or value.get("sequence_boundaries") is None:
        raise RowError(f"{_PARAMETERS} is not an object with sequence_boundaries")
    for media in _OF_MEDIA:
        if value.get(media) is not None and (integers(value[media], f"{_PARAMETERS}.{media}") != _NO_SEQUENCE).any():
            raise RowError(f"{_PARAMETERS}.{media} means that the row has media, but packed rows can only contain text")
    padding = value.get("right_padding_length") or 0
    if not isinstance(padding, int) or not 0 <= padding < count:
        raise RowError(f"{_PARAMETERS}.right_padding_length is {padding!r:.40}, expected 0 to {count - 1}")
    unpadded = value.get("unpadded_length")
    if unpadded is not None and unpadded != count - padding:
        raise RowError(
            f"{_PARAMETERS} counts {unpadded!r:.40} tokens without padding and {padding} tokens of padding, but there"
            f" are {count} input_ids"
        )
    bounds = _checked(integers(value["sequence_boundaries"], name), name, count)
    return _Claim(name, bounds), count - padding


def _of_numbers(value: Any, name: str, count: int) -> tuple[_Bounds, bool] | None:
    """Return bounds from each token's sequence number, and whether padding follows. None: they define no sequences.

    Numbers of ``attention_mask`` begin with 1, and 0 is padding. Others may begin with 0; then -1 is padding.
    """
    is_mask = name == "attention_mask"
    try:
        numbers_of = _per_token(value, name, count)
    except RowError:
        if name in ("document_ids", "sequence_ids"):  # numbers of documents: one per row or document
            return None
        raise
    if is_mask and (numbers_of == 1).all():
        return None
    padding = 0 if is_mask or numbers_of[0] else -1
    end = count - _count_last(numbers_of == padding)
    inner = numbers_of[:end]
    if (at := _first(inner == padding)) is not None:
        raise RowError(
            f"{name} is {padding} (padding) at position {at}, but tokens follow: padding is only allowed at the end of"
            " a row; remove it"
        )
    if not end or inner[0] not in ((1,) if is_mask else (0, 1)):
        raise RowError(f"{name} begins with {numbers_of[0]}, expected {'1' if is_mask else '0 or 1'}")
    steps = np.diff(inner)
    if (at := _first((steps != 0) & (steps != 1))) is not None:
        raise RowError(
            f"{name} goes from {inner[at]} to {inner[at + 1]} at position {at + 1}, expected the same number, or the"
            " next one where a sequence begins"
        )
    return np.concatenate([[0], np.flatnonzero(steps) + 1, [end]]), end < count


def _read_positions(row: Mapping[str, Any], count: int) -> _Claim | None:
    """Return the positions of a row, in place of bounds, if it has any. RowError: two such fields differ."""
    found: _Claim | None = None
    for name in _POSITIONS:
        if row.get(name) is not None:
            positions = _per_token(row[name], name, count)
            if found is not None and not np.array_equal(found.bounds, positions):
                raise RowError(f"{found.field} and {name} disagree; {_LEAVE_OUT}")
            found = found or _Claim(name, positions)
    return found


def _place_zeros(
    claim: _Claim, others: Sequence[_Claim], end: int | None, ids: NDArray[np.int64], trained: NDArray[np.bool_]
) -> tuple[_Claim, int | None]:
    """Return bounds from positions, and the start of padding, which may be the zeros at their end.

    Args:
        claim: has positions in place of bounds.
        others: the claims of the other fields.
        end: start of padding from other fields; None if they do not define it.
        ids: ids of the row, [tokens].
        trained: see ``read_layout``.
    """
    name, positions = claim
    if end is not None:  # the content of padding is not used
        return _Claim(name, _of_positions(positions[:end], name)), end
    bounds, zeros = _of_positions(positions, name), _count_last(positions == 0)
    begin = len(positions) - zeros
    as_sequences, as_padding = _Claim(name, bounds), _Claim(name, bounds[bounds <= begin])
    if not zeros or (others and all(np.array_equal(each.bounds, bounds) for each in others)):
        return as_sequences, None
    if not begin and zeros > 1:
        raise RowError(
            f"{name} are all 0: does each sequence have one token? If not, pass --ignore-field {name} to ignore it"
        )
    if trained[begin:].any():
        return as_sequences, None
    # Starts do not define the end of the last sequence.
    counted = {int(each.bounds[-1]) for each in others if each.field not in _STARTS}
    if counted == {begin}:
        return as_padding, begin
    if counted or zeros == 1:
        return as_sequences, None
    if (ids[begin:] != ids[-1]).any():
        raise RowError(
            f"the last {zeros} {name} are 0, and their ids differ: are they sequences of one token, or padding? Leave"
            " them out, or mark padding with zeros in attention_mask"
        )
    return as_padding, begin


def _of_positions(positions: NDArray[np.int64], name: str) -> _Bounds:
    if positions[0]:
        raise RowError(f"{name} begins with {positions[0]}, expected 0")
    jumps = np.diff(positions) != 1
    if (at := _first(jumps & (positions[1:] != 0))) is not None:
        raise RowError(
            f"{name} goes from {positions[at]} to {positions[at + 1]} at position {at + 1}, expected"
            f" {positions[at] + 1}, or 0 where a sequence begins"
        )
    return np.concatenate([[0], np.flatnonzero(jumps) + 1, [len(positions)]])


# ---- agreement of all fields ----


def _agreed_end(ends: Mapping[str, int], count: int) -> int | None:
    """Return the start of padding, or None if no field defines it. RowError: two fields disagree."""
    if len(set(ends.values())) > 1:
        (one, first), (other, second) = sorted(ends.items(), key=lambda entry: entry[1])[:: len(ends) - 1]
        raise RowError(
            f"{one} and {other} disagree: of {count} input_ids, padding begins at {first} according to {one} and at"
            f" {second} according to {other}; {_LEAVE_OUT}"
        )
    return next(iter(ends.values()), None)


def _agreed_bounds(claims: Sequence[_Claim], end: int, count: int) -> _Bounds:
    """Return the bounds of the sequences before ``end``. RowError: two fields disagree, or one ends elsewhere."""
    agreed: _Claim | None = None
    for name, bounds in claims:
        if bounds[-1] not in (end, count):
            behind = "" if end == count else f", of which {count - end} are padding"
            raise RowError(
                f"{name} covers {bounds[-1]} tokens, but there are {count} input_ids{behind}: provide exactly the"
                " tokens that it covers, or mark padding with zeros in attention_mask"
            )
        if np.count_nonzero(bounds > end) > 1 and end not in bounds:
            raise RowError(
                f"{name} has a sequence boundary at {bounds[bounds > end][0]}, after the padding that begins at {end}:"
                " padding between sequences is not supported; remove it"
            )
        claim = _Claim(name, np.append(bounds[bounds < end], end))
        if agreed is not None and not np.array_equal(agreed.bounds, claim.bounds):
            raise RowError(
                f"{agreed.field} and {name} disagree: sequences begin at {_shown(agreed)} according to {agreed.field},"
                f" at {_shown(claim)} according to {name}; {_LEAVE_OUT}"
            )
        agreed = agreed or claim
    return np.array([0, end]) if agreed is None else agreed.bounds


def _shown(claim: _Claim) -> str:
    starts = claim.bounds[:-1].tolist()
    return ", ".join(map(str, starts[:8])) + (" ..." if len(starts) > 8 else "")


# ---- lists of numbers ----


def numbers(values: Any, key: str) -> NDArray[Any]:
    """Return a list of numbers or booleans, or JSON text of one, as an array. RowError: anything else."""
    if isinstance(values, str) and values.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            values = parse_json(values.encode())
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        array = np.array(None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "biuf"):
        raise RowError(f"{key} is not a flat list of numbers")
    return array


def integers(values: Any, key: str) -> NDArray[np.int64]:
    """Return a list of integers as an array. RowError: anything else."""
    array = numbers(values, key)
    if array.size and array.dtype.kind not in "iu":
        raise RowError(f"{key} is not a flat list of integers")
    if array.size and array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise RowError(f"{key} contains {array.max()}, which is not a token id")
    return array.astype(np.int64)


def _per_token(values: Any, name: str, count: int) -> NDArray[np.int64]:
    """Return one integer per token; booleans and integral floats are accepted."""
    array = numbers(values, name)
    if len(array) != count:
        raise RowError(f"{name} has {len(array)} entries for {count} input_ids")
    with np.errstate(invalid="ignore"):
        whole = array.astype(np.int64)
    if (whole != array).any():
        raise RowError(f"{name} is not a flat list of integers")
    return whole


def _count_last(is_so: NDArray[np.bool_]) -> int:
    """Return how many values at the end are true."""
    others = np.flatnonzero(~is_so)
    return len(is_so) - (int(others[-1]) + 1 if others.size else 0)


def _first(is_so: NDArray[np.bool_]) -> int | None:
    """Return the index of the first true value, or None."""
    return int(np.argmax(is_so)) if is_so.any() else None


# ---- the sequences of a row ----


class UndecidedError(RowError):
    """A system message comes after an assistant message, and the options do not define its meaning."""


def conversations_of(conversation: Conversation, system_starts: SystemStarts) -> list[Conversation]:
    """Return the conversations in a list of messages: one, or one per system message.

    With ``system_starts`` ``"conversation"``, each system message begins a conversation, as in Megatron's ``--sft``
    lines. All get the tools and template variables of the row. A conversation may be without an answer.

    Raises:
        UndecidedError: a system message comes after an assistant message, and ``system_starts`` is ``"error"``.
    """
    messages, weights = conversation.messages, conversation.weights
    starts = [at for at, message in enumerate(messages) if message["role"] == "system" and at]
    if not starts or system_starts == "turn":
        return [conversation]
    if system_starts == "error":
        if any(message["role"] == "assistant" for message in messages[: starts[-1]]):
            raise UndecidedError(f"{UNDECIDED}; {DECIDE}")
        return [conversation]
    conversation = conversation._replace(notes=Counter(conversation.notes) + Counter(split_at_system_messages=1))
    return [
        conversation._replace(messages=messages[start:stop], weights=weights[start:stop])
        for start, stop in pairwise([0, *starts, len(messages)])
    ]


def require_one(source: Conversation | TokenizedRow, system_starts: SystemStarts, what: str) -> None:
    """Raise RowError if a row that is judged as a whole has several sequences; ``what`` describes the judgement.

    Raises:
        UndecidedError: see ``conversations_of``.
    """
    if isinstance(source, TokenizedRow):
        if source.bounds is not None and len(source.bounds) > 2:
            raise RowError(f"the row has {len(source.bounds) - 1} sequences, but {what}")
    elif (count := len(conversations_of(source, system_starts))) > 1:
        raise RowError(
            f"with --system-starts conversation, the row has {count} conversations, but {what}; if it is one"
            " conversation with several system messages, pass --system-starts turn"
        )
