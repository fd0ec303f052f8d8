"""Tokenised rows that are already packed: their sequences are found in every form, and contradictions are errors."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from chats import TOKENIZER, command, preprocess, sequences_of, write_rows
from object_folders import serve_folder
from productions import produced, tokens_of

from megatron_sft_idx import preprocess as preprocess_rows
from megatron_sft_idx.chat.chat_rows import to_sequence_source
from megatron_sft_idx.chat.preferences import read_judged
from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.chat.types import RowError, TokenizedRow
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.tokenize import row_files

# Rows as written by TRL's pack_dataset and NeMo.
TRL = [
    {"input_ids": [5, 6, 7, 8, 14], "labels": [-100, 6, 7, 8, 14], "seq_lengths": [4, 1]},
    {"input_ids": [11, 12, 13, 9, 10], "labels": [-100, 12, 13, -100, 10], "seq_lengths": [3, 2]},
]
NEMO = {"input_ids": [5, 6, 7, 8, 9, 10], "loss_mask": [0, 1, 1, 0, 1, 1], "seq_start_id": [0, 3]}
PAD = 2
Sequence = tuple[list[int], list[int]]


def read(row: dict[str, Any], alignment: str = "token") -> list[Sequence]:
    """Return the sequences of a row: ids and token-aligned masks."""
    source = to_sequence_source(row, RowOptions(mask_alignment=alignment))
    assert isinstance(source, TokenizedRow)
    assert source.bounds is not None
    return [
        (source.input_ids[a:b].tolist(), source.loss_mask[a:b].astype(int).tolist())
        for a, b in itertools.pairwise(source.bounds.tolist())
    ]


def refused(row: dict[str, Any], alignment: str = "token") -> str:
    with pytest.raises(RowError) as caught:
        to_sequence_source(row, RowOptions(mask_alignment=alignment))
    return str(caught.value)


# ---- known packs, in every form ----


class Pack(NamedTuple):
    """Sequences with their token-aligned masks, followed by padding tokens."""

    sequences: list[Sequence]
    padding: int

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids, _ in self.sequences]

    @property
    def bounds(self) -> list[int]:
        return [0, *itertools.accumulate(self.lengths)]

    @property
    def total(self) -> int:
        return self.bounds[-1] + self.padding

    def numbers(self, first: int, padding: int) -> list[int]:
        named = [first + number for number, length in enumerate(self.lengths) for _ in range(length)]
        return named + [padding] * self.padding

    def positions(self, behind: str) -> list[int]:
        of_padding = {
            "zeros": [0] * self.padding,
            "again": list(range(self.padding)),
            "on": list(range(self.lengths[-1], self.lengths[-1] + self.padding)),
        }
        return [at for length in self.lengths for at in range(length)] + of_padding[behind]


def merged(values: list[int], padding: int) -> list[int]:
    return [*values[:-1], values[-1] + padding]


def forms(pack: Pack) -> dict[str, dict[str, Any]]:
    """Return the fields in which trainers store the starts of a pack's sequences, by name of the form."""
    lengths, bounds, padding, total = pack.lengths, pack.bounds, pack.padding, pack.total
    zeros = {"attention_mask": [1] * bounds[-1] + [0] * padding}
    if not padding:
        found: dict[str, dict[str, Any]] = {
            **{name: {name: lengths} for name in ("seq_lengths", "seq_lens", "lengths", "length", "packed_seq_lens")},
            **{name: {name: bounds} for name in ("seq_boundaries", "cu_seqlens", "cu_seq_lens_q", "cumulative_len")},
            "NeMo": {"seq_start_id": bounds[:-1]},
            "Megatron": {"cu_seqlens": bounds + [total] * 3},
            "-1 behind": {"cu_seqlens": bounds + [-1] * 2},
            "ours": {"seq_boundaries": bounds, "position_ids": pack.positions("zeros"), "lengths": lengths},
            "flattened": {
                **{"position_ids": pack.positions("zeros"), "seq_idx": pack.numbers(0, -1)},
                **{"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": max(lengths)},
            },
            "TRL": {"seq_lengths": lengths, "attention_mask": [1] * total},
        }
        if lengths[-1] > 1:
            found["ms-swift"] = {"position_ids": pack.positions("zeros"), "length": total, "channel": ["a"]}
    else:
        found = {
            "TRL, padded": {"seq_lengths": lengths, **zeros},
            "ms-swift, padded": {"position_ids": pack.positions("zeros"), **zeros},
            "positions go on": {"position_ids": pack.positions("on"), **zeros},
            "a segment of padding": {"cu_seqlens": [*bounds, total], **zeros},
            "in the last sequence": {"cu_seqlens": merged(bounds, padding), **zeros},
            "starts": {"seq_start_id": [*bounds[:-1], bounds[-1]], **zeros},
            "Automodel": {
                **{"seq_lens": lengths, "seq_lens_padded": merged(lengths, padding)},
                **{"position_ids": pack.positions("on")},
            },
            "Megatron-Bridge": {
                "cu_seqlens": [*bounds, bounds[-1]],
                "cu_seqlens_padded": [*bounds, total],
            },
            "NeMo, unpadded": {"cu_seqlens": merged(bounds, padding), "cu_seqlens_unpadded": bounds},
            "LLaMA-Factory": {
                "packing_params": {
                    **{"sequence_boundaries": [*bounds, total], "right_padding_length": padding},
                    **{f"{kind}_subseq_ids": [1 << 32] for kind in ("image", "video", "audio")},
                },
                "attention_mask": pack.numbers(1, 0),
                "position_ids": pack.positions("zeros"),
                "images": None,
            },
            "seq_idx": {"seq_idx": pack.numbers(0, -1)},
        }
        if padding > 1 and lengths[-1] > 1:
            found["LLaMA-Factory, not neat"] = {
                "position_ids": pack.positions("zeros"),
                "attention_mask": [1] * total,
            }
    found["Axolotl"] = {"attention_mask": pack.numbers(1, 0), "position_ids": pack.positions("zeros")}
    found["numbers"] = {"attention_mask": pack.numbers(1, 0)}
    found["segments"] = {"segment_ids": pack.numbers(1, 0)}
    return found


def masks(pack: Pack, alignment: str) -> list[dict[str, Any]]:
    """Return the masks of a pack in every form: labels, numbers."""
    ids = [token for tokens, _ in pack.sequences for token in tokens] + [PAD] * pack.padding
    marks: list[int] = []
    labels: list[int] = []
    for tokens, mask in pack.sequences:
        named = [token if is_trained else -100 for token, is_trained in zip(tokens, mask, strict=True)]
        marks += mask if alignment == "token" else [*mask[1:], 0]
        labels += named if alignment == "token" else [*named[1:], -100]
    marks, labels = marks + [0] * pack.padding, labels + [-100] * pack.padding
    return [
        {"input_ids": ids, "labels": labels},
        {"input_ids": ids, "loss_mask": marks},
        {"input_ids": ids, "labels": ids, "completion_mask": marks},
        {"input_ids": ids, "assistant_masks": [bool(mark) for mark in marks]},
    ]


def some_pack(draws: random.Random, longest: int = 9, *, padded: bool = True) -> Pack:
    sequences = []
    for _ in range(draws.randint(2, 5)):
        length = draws.randint(1, longest)
        ids = draws.choices(range(5, 900), k=length)
        sequences.append((ids, [0, *draws.choices((0, 1), k=length - 1)]))
    if len(sequences[-1][0]) > 1:
        sequences[-1][1][-1] = 1
    return Pack(sequences, draws.choice((0, 0, 1, 2, 3, 7)) if padded else 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("alignment", ["token", "label"])
def test_a_pack_in_any_form_becomes_its_sequences(alignment: str) -> None:
    draws = random.Random(alignment)
    seen: set[str] = set()
    for _ in range(150):
        pack = some_pack(draws)
        for name, fields in forms(pack).items():
            for tokens in masks(pack, alignment):
                before = json.dumps(row := tokens | fields)
                assert read(row, alignment) == pack.sequences, (name, row)
                assert json.dumps(row) == before
            seen.add(name)
    assert len(seen) > 25


@pytest.mark.parametrize("alignment", ["token", "label"])
def test_any_two_forms_of_one_pack_agree_and_of_two_packs_do_not(alignment: str) -> None:
    draws, together, apart = random.Random(f"two {alignment}"), 0, 0
    for _ in range(300):
        pack = some_pack(draws)
        (one, fields), (other, more) = draws.sample(list(forms(pack).items()), 2)
        row = draws.choice(masks(pack, alignment)) | fields
        if all(row.get(key, value) == value for key, value in more.items()):
            assert read(row | more, alignment) == pack.sequences, (one, other, row, more)
            together += 1
        # The same tokens with other boundaries.
        ids = [token for tokens, _ in pack.sequences for token in tokens]
        marks = [mark for _, mask in pack.sequences for mark in mask]
        cuts = sorted(draws.sample(range(1, len(ids)), draws.randint(1, min(3, len(ids) - 1)))) if len(ids) > 1 else []
        if [0, *cuts, len(ids)] == pack.bounds:
            continue
        elsewhere = Pack([(ids[a:b], marks[a:b]) for a, b in itertools.pairwise([0, *cuts, len(ids)])], pack.padding)
        _, also = draws.choice(list(forms(elsewhere).items()))
        new = {key: value for key, value in also.items() if key != "attention_mask"}
        if new and new.keys().isdisjoint(row):
            refused(new | row, alignment)
            apart += 1
    assert together > 50
    assert apart > 50


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"seq_lengths": [3, 2]}, "seq_lengths covers 5 tokens, but there are 6 input_ids"),
        ({"seq_lengths": [3, 4]}, "seq_lengths covers 7 tokens, but there are 6 input_ids"),
        ({"seq_lengths": [3, 0, 3]}, "seq_lengths holds 0, expected lengths from 1 to 6"),
        ({"seq_lengths": [7, -1]}, "seq_lengths holds 7, expected"),
        ({"seq_lengths": [2**62, 2**62]}, "seq_lengths holds 4611686018427387904, expected"),
        ({"seq_lengths": []}, "seq_lengths covers 0 tokens"),
        ({"seq_lengths": 6}, "seq_lengths is not a flat list of numbers"),
        ({"seq_lengths": [[3, 3]]}, "seq_lengths is not a flat list of numbers"),
        ({"seq_lengths": [3.0, 3.0]}, "seq_lengths is not a flat list of integers"),
        ({"seq_lengths": "3 3"}, "seq_lengths is not a flat list"),
        ({"seq_start_id": [1, 3]}, "seq_start_id begins with 1, expected 0"),
        ({"seq_start_id": []}, "seq_start_id begins with 6, expected 0"),
        ({"seq_start_id": [0, 3, 3]}, "seq_start_id does not ascend: 3 is followed by 3"),
        ({"seq_start_id": [0, 4, 3]}, "seq_start_id does not ascend: 4 is followed by 3"),
        ({"seq_start_id": [0, 6]}, "seq_start_id holds 6, but there are 6 input_ids"),
        ({"seq_boundaries": [0, 3]}, "seq_boundaries covers 3 tokens, but there are 6"),
        ({"seq_boundaries": [0, 3, 6, 6]}, "seq_boundaries does not ascend: 6 is followed by 6"),
        ({"seq_boundaries": [0]}, "seq_boundaries begins with 0, expected 0, followed by more bounds"),
        ({"cu_seqlens": [0, 3, 3, 6]}, "cu_seqlens does not ascend: 3 is followed by 3"),
        ({"cu_seqlens": [0, 3, 8]}, "cu_seqlens holds 8, but there are 6"),
        ({"cu_seqlens": [0, 3, -1, 6]}, "cu_seqlens does not ascend: 3 is followed by -1"),
        ({"cu_seqlens": [-1, -1]}, "cu_seqlens begins with nothing"),
        ({"position_ids": [0, 1, 2, 1, 2, 3]}, "position_ids goes from 2 to 1 at position 3, expected 3, or 0"),
        ({"position_ids": [0, 1, 2, 0, 2, 3]}, "position_ids goes from 0 to 2 at position 4, expected 1, or 0"),
        ({"position_ids": [2, 3, 4, 0, 1, 2]}, "position_ids begins with 2, expected 0"),
        ({"position_ids": [0, 1, 2, 0, 1]}, "position_ids has 5 entries for 6 input_ids"),
        ({"position_ids": [0, 1, 2, 0, 1, 2.5]}, "position_ids is not a flat list of integers"),
        ({"position_ids": [0, 1, 2, 0, 1, float("nan")]}, "position_ids is not a flat list of integers"),
        ({"position_ids": [[0, 1, 2, 0, 1, 2]] * 3}, "position_ids is not a flat list of numbers"),
        ({"position_ids": [0] * 6}, "position_ids are all 0"),
        ({"attention_mask": [1, 1, 2, 2, 1, 1]}, "attention_mask goes from 2 to 1 at position 4"),
        ({"attention_mask": [1, 1, 1, 3, 3, 3]}, "attention_mask goes from 1 to 3 at position 3"),
        ({"attention_mask": [2, 2, 2, 3, 3, 3]}, "attention_mask begins with 2, expected 1"),
        ({"attention_mask": [0, 1, 1, 1, 1, 1]}, "attention_mask is 0 (padding) at position 0, but tokens follow"),
        ({"attention_mask": [1, 1, 0, 1, 1, 1]}, "attention_mask is 0 (padding) at position 2, but tokens follow"),
        ({"attention_mask": [0] * 6}, "attention_mask begins with 0, expected 1"),
        ({"attention_mask": [1, 1, 1, 2, 2, 0]}, "padding is trained on: the row marks its last 1 tokens as padding"),
        ({"seq_idx": [1, 1, 1, 3, 3, 3]}, "seq_idx goes from 1 to 3"),
        ({"seq_idx": [5, 5, 5, 6, 6, 6]}, "seq_idx begins with 5, expected 0 or 1"),
        (
            {"seq_lengths": [3, 3], "seq_start_id": [0, 2]},
            "seq_lengths and seq_start_id disagree: sequences begin at 0, 3",
        ),
        ({"seq_lengths": [3, 3], "position_ids": [0, 1, 2, 3, 4, 5]}, "seq_lengths and position_ids disagree"),
        ({"seq_lengths": [3, 3], "attention_mask": [1, 1, 2, 2, 2, 2]}, "seq_lengths and attention_mask disagree"),
        ({"cu_seqlens": [0, 3, 6], "cu_seqlens_padded": [0, 4, 6]}, "there is padding between sequences"),
        (
            {"cu_seqlens_padded": [0, 3, 6]},
            "cu_seqlens_padded includes the padding after each sequence, but cu_seqlens",
        ),
        ({"cu_seqlens": [0, 3, 5], "cu_seqlens_padded": [0, 3, 5]}, "cu_seqlens_padded ends at 5, but there are 6"),
        ({"position_ids": [0, 1, 0, 1, 2, 3], "input_pos": [0, 1, 2, 3, 4, 5]}, "position_ids and input_pos disagree"),
        ({"packing_params": [0, 3, 6]}, "packing_params is not an object with sequence_boundaries"),
        (
            {"packing_params": {"sequence_boundaries": [0, 3, 6], "right_padding_length": 6}},
            "packing_params.right_padding_length is 6, expected 0 to 5",
        ),
        (
            {"packing_params": {"sequence_boundaries": [0, 3, 6], "image_subseq_ids": [0]}},
            "packing_params.image_subseq_ids means that the row has media",
        ),
        (
            {"packing_params": {"sequence_boundaries": [0, 3, 6], "unpadded_length": 4}},
            "packing_params counts 4 tokens without padding and 0 tokens of padding, but there are 6",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(fields: dict[str, Any], reason: str) -> None:
    row = {"input_ids": [5, 6, 7, 8, 9, 10], "labels": [-100, 6, 7, -100, 9, 10]}
    assert refused(row | fields).startswith(reason) or reason in refused(row | fields)


def test_padding_that_no_field_marks_is_refused_if_it_looks_like_some() -> None:
    row = {"input_ids": [5, 6, 7, 8, 2, 2, 2], "labels": [-100, 6, -100, 8, -100, -100, -100]}
    for fields in ({"seq_lengths": [2, 2, 3]}, {"position_ids": [0, 1, 0, 1, 0, 1, 2]}, {"cu_seqlens": [0, 2, 4, 7]}):
        assert "the last of 3 sequences is the token 2 repeated 3 times, and is not trained on" in refused(row | fields)
        assert len(read(row | fields | {"attention_mask": [1, 1, 1, 1, 0, 0, 0]})) == 2
    # Zeros after positions are padding if one token is repeated there.
    assert len(read(row | {"position_ids": [0, 1, 0, 1, 0, 0, 0]})) == 2
    differ = row | {"input_ids": [5, 6, 7, 8, 2, 3, 4], "position_ids": [0, 1, 0, 1, 0, 0, 0]}
    assert "the last 3 position_ids are 0, and their ids differ" in refused(differ)
    assert len(read(differ | {"seq_lengths": [2, 2, 1, 1, 1]})) == 5
    # A last sequence of one token counts as a sequence, and so do zeros that are trained on.
    assert len(read({"input_ids": [5, 6, 7], "labels": [-100, 6, -100], "position_ids": [0, 1, 0]})) == 2
    assert len(read({"input_ids": [5, 6, 7, 7], "labels": [-100, 6, 7, 7], "position_ids": [0, 1, 0, 0]})) == 3


def test_label_aligned_masks_are_not_moved_over_borders() -> None:
    row = {"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]}
    assert read(row | {"loss_mask": [0, 1, 0, 1, 0]}, "label") == [([5, 6, 7], [0, 0, 1]), ([8, 9], [0, 1])]
    assert "loss_mask is 1 at position 2, the last of sequence 1, expected 0" in refused(
        row | {"loss_mask": [0, 1, 1, 1, 0]}, "label"
    )
    assert "labels is 8 at position 2, the last of sequence 1, expected -100" in refused(
        row | {"labels": [6, 7, 8, 9, -100]}, "label"
    )
    assert read(row | {"labels": [6, 7, -100, 9, -100]}, "label") == [([5, 6, 7], [0, 1, 1]), ([8, 9], [0, 1])]
    assert "look shifted by one" in refused(row | {"labels": [6, 7, -100, 9, -100]})


def test_fields_of_packs_next_to_text_are_refused() -> None:
    chat = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}
    for fields in ({"seq_lengths": [2]}, {"cu_seqlens": [0, 2]}, {"seq_start_id": [0]}, {"seq_boundaries": [0, 1]}):
        (name,) = fields
        with pytest.raises(RowError, match=f"{name} gives token positions of sequences"):
            to_sequence_source(chat | fields)
        to_sequence_source(chat | dict.fromkeys(fields))
    # In rows of chats, fields with these names mean something else.
    to_sequence_source(chat | {"length": 2, "lengths": [1, 1], "position_ids": [0, 0], "segment_ids": ["a"]})


def test_names_of_documents_are_no_numbers_of_sequences() -> None:
    row = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
    for ids in (["a", "b"], [7], "x", 3, [0.5, 1, 2]):
        assert len(read(row | {"document_ids": ids})) == 1
    assert len(read(row | {"document_ids": [0, 0, 1]})) == 2
    assert len(read(row | {"length": 3, "lengths": 3})) == 1
    assert len(read(row | {"position_ids": [0, 1, 2], "attention_mask": [1, 1, 1]})) == 1
    assert read(row | {"attention_mask": [1, 1, 1]}) == [([5, 6, 7], [0, 1, 1])]


# ---- a slow oracle: all layouts that a short row could have ----


def layouts(count: int) -> list[tuple[list[int], int]]:
    """Return all possible boundaries in ``count`` tokens, with the start of padding."""
    found = []
    for end in range(1, count + 1):
        for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, end), n) for n in range(end)):
            found.append(([0, *cuts, end], end))
    return found


def may_say(name: str, value: list[int], bounds: list[int], end: int, count: int) -> bool:
    """Return whether a field with this value is correct for a layout."""
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    behind = count - end
    if name == "seq_lengths":
        return value in ([lengths, [*lengths, behind], merged(lengths, behind)] if behind else [lengths])
    if name == "seq_start_id":
        return value in ([bounds[:-1], bounds] if behind else [bounds[:-1]])
    if name == "attention_mask":
        plain = [1] * end + [0] * behind
        numbered = [n + 1 for n, length in enumerate(lengths) for _ in range(length)] + [0] * behind
        return value in (plain, numbered, [1] * count)
    assert name == "position_ids"
    positions = [at for length in lengths for at in range(length)]
    return value[:end] == positions


def marks_padding(fields: dict[str, list[int]], bounds: list[int], count: int) -> bool:
    """Return whether one of the fields shows that the tokens after the last sequence are padding."""
    zeros = [0] * (count - bounds[-1])
    by_mask = fields.get("attention_mask", [1])[-len(zeros) :] == zeros
    lengths = fields.get("seq_lengths")
    # By positions only: not if lengths include the rest; and a single zero may be a sequence.
    by_positions = (
        fields.get("position_ids", [1])[-len(zeros) :] == zeros and fields["position_ids"][bounds[-1] - 1] != 0
    )
    return by_mask or (by_positions and (sum(lengths) == bounds[-1] if lengths else len(zeros) > 1))


def test_what_is_read_is_the_one_layout_that_all_fields_allow() -> None:
    draws = random.Random(0)
    outcomes, reasons = {"read": 0, "none": 0, "refused": 0}, Counter[str]()
    for _ in range(6000):
        count = draws.randint(2, 6)
        bounds, end = draws.choice(layouts(count))
        lengths, behind = [b - a for a, b in itertools.pairwise(bounds)], count - end
        fields = {
            "seq_lengths": draws.choice([lengths, [*lengths, behind] if behind else lengths]),
            "seq_start_id": bounds[:-1],
            "attention_mask": draws.choice(
                [
                    [1] * count,
                    [1] * end + [0] * behind,
                    [n + 1 for n, length in enumerate(lengths) for _ in range(length)] + [0] * behind,
                ]
            ),
            "position_ids": [at for length in lengths for at in range(length)] + [0] * behind,
        }
        fields = {name: list(fields[name]) for name in draws.sample(list(fields), draws.randint(1, 3))}
        if draws.random() < 0.5:  # damage one field
            name = draws.choice(list(fields))
            fields[name][draws.randrange(len(fields[name]))] = draws.randint(0, count)
        ids = [*range(10, 10 + end), *[PAD] * behind]
        row = {"input_ids": ids, "loss_mask": [1] * end + [0] * behind, **fields}
        allowed = [
            (some, until)
            for some, until in layouts(count)
            if not any(row["loss_mask"][until:])
            and all(may_say(name, value, some, until, count) for name, value in fields.items())
            and (until == count or marks_padding(fields, some, count))
        ]
        try:
            source = to_sequence_source(row)
        except RowError as error:
            outcomes["refused" if allowed else "none"] += 1
            reasons[str(error).split(": ")[0]] += bool(allowed)
            continue
        assert isinstance(source, TokenizedRow)
        found = source.bounds.tolist()
        assert (found, found[-1]) in allowed, (row, found, allowed)
        outcomes["read"] += 1
    assert outcomes["read"] > 2000
    assert outcomes["none"] > 1000
    assert outcomes["refused"] < 300
    # Rows with possible padding, or with two possible readings.
    two_ways = r"position_ids are all 0|the last .* not trained on|the last \d+ position_ids are 0"
    assert [reason for reason, count in reasons.items() if count and not re.match(two_ways, reason)] == []


def test_junk_in_any_field_is_refused_or_read_as_sequences() -> None:
    draws = random.Random(7)
    fields = [name for pack in (some_pack(draws), some_pack(draws)) for form in forms(pack).values() for name in form]
    odd = [
        None,
        True,
        -1,
        0,
        2,
        5,
        7,
        2**31,
        2**63 - 1,
        -(2**63),
        2**64,
        10**400,
        0.5,
        1e300,
        float("nan"),
        "x",
        [],
        {},
    ]
    counts = Counter[str]()
    for _ in range(8000):
        count = draws.randint(1, 7)
        row: dict[str, Any] = {"input_ids": [7] * count, "loss_mask": [draws.randint(0, 1) for _ in range(count)]}
        for name in draws.sample([*fields, "packing_params"], draws.choice((1, 1, 1, 2))):
            value: Any = [draws.choice((0, 1, 1, 2)) for _ in range(draws.choice((1, count, draws.randint(1, 7))))]
            if draws.random() < 0.5:
                value[draws.randrange(len(value))] = draws.choice(odd)
            if name == "packing_params" and draws.random() < 0.8:
                value = {"sequence_boundaries": value, "right_padding_length": draws.choice(odd)}
            row[name] = draws.choice(odd) if draws.random() < 0.1 else value
        for alignment in ("token", "label"):
            try:
                source = to_sequence_source(row, RowOptions(mask_alignment=alignment))
            except RowError:
                counts["refused"] += 1
                continue
            assert isinstance(source, TokenizedRow)
            bounds = source.bounds.tolist()
            assert bounds == sorted({0, *bounds})
            assert bounds[-1] == len(source.input_ids) == len(source.loss_mask)
            counts["read"] += 1
    assert counts["read"] > 200


# ---- all uses of rows ----


def labelled(pack: Pack) -> dict[str, Any]:
    return masks(pack, "token")[0]


def packed_rows(seed: int, count: int) -> tuple[list[dict[str, Any]], list[list[Sequence]]]:
    """Return rows of packs in all forms, and the sequences of each."""
    draws = random.Random(seed)
    rows, sequences = [], []
    for number in range(count):
        pack = some_pack(draws, 12)
        of_pack = list(forms(pack).values())
        rows.append(labelled(pack) | of_pack[number % len(of_pack)])
        sequences.append(pack.sequences)
    return rows, sequences


def trained(sequences: list[Sequence]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return sorted((tuple(ids), tuple(mask)) for ids, mask in sequences)


def stored(prefix: Path) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return sorted((tuple(ids.tolist()), tuple(mask.tolist())) for ids, mask in sequences_of(prefix))


@pytest.mark.parametrize("workers", [0, 2])
def test_all_sequences_of_packed_rows_are_in_the_shard_with_their_rows(tmp_path: Path, workers: int) -> None:
    rows, sequences = packed_rows(1, 120)
    done = preprocess(tmp_path / "x", "--workers", workers, rows=rows, capacity=64)
    assert done.code == 0, done.err
    assert stored(tmp_path / "x") == trained([one for of_row in sequences for one in of_row])
    assert "120 rows with several concatenated sequences" in done.out
    shard, found = Shard(tmp_path / "x", columns=("source",)), {}
    for number in range(len(shard)):
        for (ids, _), (file, row) in zip(shard.sequences(number), shard[number]["source"].tolist(), strict=True):
            assert file == 0
            found.setdefault(row, []).append(tuple(ids.tolist()))
    for row, of_row in enumerate(sequences):
        assert sorted(found[row]) == sorted(tuple(ids) for ids, _ in of_row)
    shown = command("inspect", tmp_path / "x", "--row", "rows.jsonl:8")
    assert shown.code == 0, shown.err
    assert len(shown.out.splitlines()) == len(sequences[7])


def test_the_same_bytes_from_python_and_from_parquet(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows, sequences = packed_rows(2, 60)
    names = {name: None for row in rows for name in row}
    pq.write_table(pa.Table.from_pylist([names | row for row in rows]), tmp_path / "rows.parquet")
    done = preprocess(tmp_path / "x", "--input", tmp_path / "rows.parquet", capacity=64)
    assert done.code == 0, done.err
    arrays = [{key: np.array(value) if key == "input_ids" else value for key, value in row.items()} for row in rows]
    preprocess_rows(iter(arrays), tokenizer=TOKENIZER, output_prefix=tmp_path / "y", seq_length=64, workers=0)
    expected = trained([one for of_row in sequences for one in of_row])
    assert stored(tmp_path / "x") == stored(tmp_path / "y") == expected


def test_rows_are_selected_whole_and_duplicates_are_of_equal_borders(tmp_path: Path) -> None:
    rows, sequences = packed_rows(3, 80)
    again = rows + rows[:30]
    done = preprocess(tmp_path / "x", "--dedup", "exact", "--valid-fraction", 0.3, rows=again, capacity=64)
    assert done.code == 0, done.err
    both = [*stored(tmp_path / "x"), *stored(tmp_path / "x.valid")]
    assert sorted(both) == trained([one for of_row in sequences for one in of_row])
    valid = set(stored(tmp_path / "x.valid"))
    for of_row in sequences:
        assert len({(tuple(ids), tuple(mask)) in valid for ids, mask in of_row}) == 1
    # The same tokens with other boundaries are another row; the same boundaries in another form are the same row.
    one = {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8]}
    equal = [one | {"seq_lengths": [2, 2]}, one | {"position_ids": [0, 1, 0, 1]}, one | {"cu_seqlens": [0, 2, 4]}]
    other = [one | {"seq_lengths": [1, 3]}, one | {"seq_lengths": [4]}, one]
    done = preprocess(tmp_path / "y", "--dedup", "exact", rows=[*equal, *other], capacity=64)
    assert "duplicates    3 left out" in done.out
    assert len(stored(tmp_path / "y")) == 5


def test_packed_rows_with_every_other_option(tmp_path: Path) -> None:
    rows, sequences = packed_rows(4, 40)
    everything = [one for of_row in sequences for one in of_row]
    done = preprocess(tmp_path / "dry", "--dry-run", "--full", rows=rows, capacity=64)
    assert done.code == 0, done.err
    assert f"40: {len(everything)} sequences" in done.out
    for overlong in ("drop", "truncate", "split"):
        done = preprocess(tmp_path / overlong, "--overlong", overlong, rows=rows, capacity=8)
        assert done.code == 0, done.err
        long = [one for one in everything if len(one[0]) > 8]
        count = {"drop": -len(long), "truncate": 0, "split": sum((len(ids) - 1) // 8 for ids, _ in long)}[overlong]
        assert len(stored(tmp_path / overlong)) == len(everything) + count
    done = preprocess(tmp_path / "eod", "--append-eod", "--max-rows", 10, rows=rows, capacity=64)
    assert done.code == 0, done.err
    ends = {ids[-1] for ids, _ in stored(tmp_path / "eod")}
    assert len(ends) == 1
    assert len(stored(tmp_path / "eod")) == sum(map(len, sequences[:10]))
    made = produced(tmp_path / "live", "--input", write_rows(tmp_path / "rows.jsonl", rows))
    assert made.code == 0, made.err
    assert tokens_of(tmp_path / "live").total() == len(everything)
    bad = [*rows, TRL[0] | {"seq_lengths": [4, 2]}]
    done = preprocess(tmp_path / "bad", rows=bad, capacity=64)
    assert done.code == 1
    assert "rows.jsonl:41: seq_lengths covers 6 tokens, but there are 5 input_ids" in done.err
    done = preprocess(tmp_path / "bad", "--on-bad-row", "skip", rows=bad, capacity=64)
    assert done.code == 0
    assert len(stored(tmp_path / "bad")) == len(everything)


def test_rows_of_trl_and_nemo(tmp_path: Path) -> None:
    assert preprocess(tmp_path / "x", rows=TRL, capacity=64).code == 0
    assert [
        (ids.tolist(), mask.tolist()) for ids, mask in sorted(sequences_of(tmp_path / "x"), key=lambda s: -len(s[0]))
    ] == [
        ([5, 6, 7, 8], [0, 1, 1, 1]),
        ([11, 12, 13], [0, 1, 1]),
        ([9, 10], [0, 1]),
        ([14], [0]),
    ]
    done = preprocess(tmp_path / "y", rows=[NEMO], capacity=64)
    assert stored(tmp_path / "y") == [((5, 6, 7), (0, 1, 1)), ((8, 9, 10), (0, 1, 1))]
    assert "1 row with seq_start_id and loss_mask: if NeMo or Megatron-Bridge packed the input" in done.out
    assert "the last of sequence 1" in refused(NEMO, "label")


def test_a_packed_row_has_no_one_verdict() -> None:
    row = {**TRL[1], "label": True}
    with pytest.raises(RowError, match="the row has 2 sequences, but label is the label of one answer"):
        read_judged(row, RowOptions(kind="kto"))


# ---- files of packs that this package wrote ----


@pytest.mark.parametrize("form", ["parquet", "jsonl-chunks"])
def test_a_file_of_our_packs_is_refused_with_commands_that_work(tmp_path: Path, form: str, monkeypatch: Any) -> None:
    if form == "parquet":
        pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    rows, sequences = packed_rows(5, 20)
    assert preprocess(tmp_path / "x", rows=rows, capacity=64).code == 0
    made = command("convert", "x", "packs 1.parquet" if form == "parquet" else "packs 1", "--to", form)
    assert made.code == 0, made.err
    file = "packs 1.parquet" if form == "parquet" else "packs 1/chunk_00000.jsonl"
    catalog = tmp_path / "live"
    for done in (
        preprocess(tmp_path / "y", "--input", file, "--on-bad-row", "skip"),
        preprocess(tmp_path / "y", "--input", file, "--dry-run"),
        produced(catalog, "--input", file),
    ):
        assert done.code == 1
        assert f"{file}: contains packs written by megatron-sft-idx, not rows" in done.err
        assert f"megatron-sft-idx convert '{file}' PREFIX --to sft-idx" in done.err
    assert not list(tmp_path.glob("y*"))
    if form == "jsonl-chunks":  # lines passed by a program are rows of packs
        lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
        preprocess_rows(lines, tokenizer=TOKENIZER, output_prefix=tmp_path / "z", seq_length=64, workers=0)
        assert stored(tmp_path / "z") == trained([one for of_row in sequences for one in of_row])
    done = command("convert", file, "PREFIX", "--to", "sft-idx")
    assert done.code == 0, done.err
    done = command("pack", "PREFIX", "--seq-length", 128, "--output-prefix", "OTHER")
    assert done.code == 0, done.err
    assert stored(tmp_path / "OTHER") == trained([one for of_row in sequences for one in of_row])


def test_our_packs_are_known_as_an_arrow_file_and_in_a_bucket_and_packs_of_others_are_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "store").mkdir()
    url = serve_folder(tmp_path / "store", tmp_path / "msc.json", monkeypatch)
    rows, sequences = packed_rows(6, 20)
    assert preprocess(tmp_path / "x", rows=rows, capacity=64).code == 0
    assert command("convert", tmp_path / "x", tmp_path / "store/ours.parquet", "--to", "parquet").code == 0
    table = pq.read_table(tmp_path / "store/ours.parquet")
    for kind, opened in (("file", pa.ipc.new_file), ("stream", pa.ipc.new_stream)):
        with opened(tmp_path / f"store/{kind}.arrow", table.schema) as writer:
            writer.write_table(table)
    for name in ("ours.parquet", "file.arrow", "stream.arrow"):
        for path in (f"{url}/{name}", tmp_path / "store" / name):
            with pytest.raises(FormatError, match="contains packs written by megatron-sft-idx, not rows"):
                row_files([str(path)])
    (tmp_path / "watched").mkdir()
    (tmp_path / "watched/1.parquet").write_bytes((tmp_path / "store/ours.parquet").read_bytes())
    (tmp_path / "watched/_END").touch()
    done = produced(tmp_path / "live", "--watch", tmp_path / "watched")
    assert done.code == 1
    assert "1.parquet: contains packs written by megatron-sft-idx" in done.err
    # Without the metadata, the writer of the file is unknown.
    pq.write_table(table.replace_schema_metadata(None), tmp_path / "others.parquet")
    done = preprocess(tmp_path / "y", "--input", tmp_path / "others.parquet", "--mask-alignment", "label", capacity=64)
    assert done.code == 0, done.err
    assert stored(tmp_path / "y") == trained([one for of_row in sequences for one in of_row])
