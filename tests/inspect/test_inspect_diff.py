"""Reported differences between two shards, compared with the changes made."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import command
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_packs import Sample, sample_of, samples, write_samples
from test_report_counts import random_packs

from megatron_sft_idx.inspect import diff
from megatron_sft_idx.inspect.diff import compare_shards, set_difference
from megatron_sft_idx.packs import run as runs
from megatron_sft_idx.shard import Shard


def compared(folder: Path, here: list[Sample], there: list[Sample], **options: Any) -> Any:
    write_samples(folder / "here", here, capacity=64, overwrite=True)
    write_samples(folder / "there", there, **{"capacity": 64, "overwrite": True, **options})
    return compare_shards(
        Shard(folder / "here", backend="pread"), Shard(folder / "there", backend="pread"), max_named=5
    )


def flipped(prefix: Path, position: int) -> None:
    path = Path(f"{prefix}.loss.bin")
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("position", [0, 77, -1])
def test_one_changed_mask_bit_is_found_and_named(
    tmp_path: Path, position: int, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs = random_packs(40)
    for name in ("here", "there"):
        write_samples(tmp_path / name, packs, capacity=64)
    position %= Shard(tmp_path / "here").header.num_tokens
    flipped(tmp_path / "there", position)
    if small:
        monkeypatch.setattr(runs, "WINDOW_TOKENS", 30)
    offsets = np.cumsum([0, *(len(p.tokens) for p in packs)])
    pack = int(np.searchsorted(offsets, position, "right")) - 1
    at = position - int(offsets[pack])
    sequence = max(i for i, start in enumerate(packs[pack].starts) if start <= at)
    value = int(packs[pack].label_mask[at])

    assert not compare_shards(Shard(tmp_path / "here"), Shard(tmp_path / "there"), max_named=0).same
    found = json.loads(command("inspect", tmp_path / "here", "--diff", tmp_path / "there", "--json").out)
    assert (found["same"], found["differing_packs"], found["masks"], found["tokens"]) == (False, 1, 1, 0)
    assert found["first"] == [
        {
            "what": "mask",
            "pack": pack,
            "sequence": sequence,
            "token": at - packs[pack].starts[sequence],
            "position": at,
            "here": value,
            "there": 1 - value,
        }
    ]
    outcome = command("inspect", tmp_path / "here", "--diff", tmp_path / "there")
    assert outcome.code == 1
    assert "one of them was changed after it was written" in outcome.out
    assert f"pack {pack}, sequence {sequence}, token {at - packs[pack].starts[sequence]} (position {at}" in outcome.out


def test_equal_shards_are_equal_whatever_their_dtypes(tmp_path: Path) -> None:
    packs = random_packs(20)
    found = compared(tmp_path, packs, packs, token_dtype=np.uint16, mask_dtype=np.float32, capacity=99)
    assert found.same
    assert found.header["token dtype"] == ("int32", "uint16")
    assert found.header["mask dtype"] == ("uint8", "float32")
    assert found.header["capacity"] == (64, 99)
    assert command("inspect", tmp_path / "here", "--diff", tmp_path / "there").code == 0


@settings(max_examples=40)
@given(st.data())
def test_every_change_of_ids_and_masks_is_counted(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("diff")
    here = data.draw(samples(least=1))
    there, changes = [], 0
    for pack in here:
        tokens, mask = list(pack.tokens), list(pack.mask)
        for at in range(len(tokens)):
            if data.draw(st.booleans() if len(tokens) < 9 else st.just(at == 3)):
                tokens[at] = (tokens[at] + 1) % 65536
                changes += 1
        there.append(Sample(tokens, mask, pack.starts))
    found = compared(folder, here, there)
    assert (found.tokens, found.masks, found.reshaped) == (changes, 0, 0)
    assert found.differing_packs == sum(a.tokens != b.tokens for a, b in zip(here, there, strict=True))
    assert len(found.first) == min(changes, 5)


def test_other_boundaries_and_lengths_are_named(tmp_path: Path) -> None:
    here = [sample_of([3, 4], lambda p: p % 2, lambda p: p) for _ in range(4)]
    there = list(here)
    there[1] = sample_of([2, 5], lambda p: p % 2, lambda p: p)
    there[2] = sample_of([3, 4, 1], lambda p: p % 2, lambda p: p)
    there[3] = sample_of([3, 4], lambda p: p % 2, lambda p: p + (p == 5))
    found = compared(tmp_path, here, there)
    assert (found.reshaped, found.differing_packs, found.tokens) == (2, 3, 1)
    assert [(one.what, one.pack, one.here, one.there) for one in found.first] == [
        ("boundaries", 1, [0, 3], [0, 2]),
        ("length", 2, 7, 8),
        ("token", 3, 5, 6),
    ]
    text = command("inspect", tmp_path / "here", "--diff", tmp_path / "there").out
    assert "pack 1: sequences begin at [0, 3] here, at [0, 2] there" in text


@pytest.mark.parametrize("parts", [1 << 22, 30])
def test_the_first_differences_are_named_in_order(tmp_path: Path, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "WINDOW_TOKENS", parts)
    here = [sample_of([4], lambda p: 1, lambda p: p) for _ in range(12)]
    there = [sample_of([4], lambda p: int(p > 2), lambda p: 7 + p) for _ in range(12)]
    there[1] = there[9] = sample_of([3, 2], lambda p: 1, lambda p: p)
    found = compared(tmp_path, here, there)
    # The mask is label-aligned: its entry 1 refers to token 2.
    assert [(one.what, one.pack, one.position) for one in found.first] == [
        *(("token", 0, 0), ("mask", 0, 0), ("token", 0, 1), ("mask", 0, 1), ("token", 0, 2))
    ]
    assert (found.reshaped, found.tokens, found.masks) == (2, 40, 20)


def test_the_same_sequences_packed_otherwise_are_recognised(tmp_path: Path) -> None:
    here = random_packs(30)
    there = [Sample(pack.tokens[a:b], pack.mask[a:b], [0]) for pack in here[::-1] for a, b in pairwise(pack.bounds)]
    found = compared(tmp_path, here, there)
    assert not found.same
    assert found.sequences is not None
    assert found.sequences.same
    assert found.sequences.shared == sum(len(pack.starts) for pack in here)
    assert "packed differently" in command("inspect", tmp_path / "here", "--diff", tmp_path / "there").out
    assert found.to_dict()["sequences"]["other_mask"] == 0


def test_sequences_of_one_shard_only_and_masks_that_changed_are_counted(tmp_path: Path) -> None:
    def one(number: int, trained: int = 1) -> Sample:
        return sample_of([4], lambda p: trained, lambda p: 10 * number + p)

    here = [one(i) for i in range(10)]
    there = [one(20), *(one(i, int(i != 3)) for i in range(9)), one(2)]
    found = compared(tmp_path, here, there).sequences
    # 9 is only in the first shard, 20 and the second 2 only in the other one, 3 has another mask.
    assert (found.shared, found.other_mask, found.only_here, found.only_there) == (8, 1, 1, 2)
    assert found.first_here == [(3, 0), (9, 0)]
    assert found.first_there == [(0, 0), (4, 0)]


def test_large_shards_are_compared_by_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packs = [sample_of([4], lambda p: 1, lambda p, i=i: (97 * i + p) % 65536) for i in range(400)]
    write_samples(tmp_path / "here", packs)
    write_samples(tmp_path / "there", packs[::-1])
    monkeypatch.setattr(diff, "_MAX_HASHES", 64)
    here, there = (Shard(tmp_path / name) for name in ("here", "there"))
    found = set_difference(here, there, 5)
    assert found.share < 1
    assert 0 < found.shared < 400
    assert found.same


def test_packs_in_another_order_are_recognised_though_their_shapes_are_the_same(tmp_path: Path) -> None:
    packs = [sample_of([3, 4], lambda p: 1, lambda p, i=i: 10 * i + p) for i in range(30)]
    found = compared(tmp_path, packs, packs[::-1])
    assert (found.reshaped, found.tokens > 5) == (0, True)
    assert found.sequences.same
    text = command("inspect", tmp_path / "here", "--diff", tmp_path / "there").out
    assert "both contain the same 60 sequences, packed differently" in text
    assert "was changed after it was written" not in text


def test_a_pack_that_was_put_in_is_named(tmp_path: Path) -> None:
    packs = [sample_of([3, 4], lambda p: 1, lambda p, i=i: 10 * i + p) for i in range(9)]
    new = sample_of([7], lambda p: 1, lambda p: 999 + p)
    found = compared(tmp_path, packs, [*packs[:4], new, *packs[4:]]).sequences
    assert (found.shared, found.only_here, found.only_there) == (18, 0, 1)
    assert (found.first_here, found.first_there) == ([], [(4, 0)])
    text = command("inspect", tmp_path / "here", "--diff", tmp_path / "there").out
    assert "  pack 4, sequence 0 there: no equal sequence here\n" in text
    compared(tmp_path, packs, [*packs[:4], packs[1], *packs[4:]])
    text = command("inspect", tmp_path / "here", "--diff", tmp_path / "there").out
    assert "18 in both, 0 in both with different masks, 0 only here, 2 only there\n  pack " in text


def test_a_changed_id_in_a_shard_written_anew_is_no_damage(tmp_path: Path) -> None:
    packs = random_packs(9)
    there = [
        Sample([7 + pack.tokens[0], *pack.tokens[1:]], pack.mask, pack.starts) if i == 4 else pack
        for i, pack in enumerate(packs)
    ]
    found = compared(tmp_path, packs, there)
    assert (found.tokens, found.first[0].pack, list(found.header)) == (1, 4, ["shard id"])
    text = command("inspect", tmp_path / "here", "--diff", tmp_path / "there").out
    assert "was changed after it was written" not in text
    assert "1 pack differs: 0 mask values and 1 id in packs with the same boundaries" in text


def test_packs_that_only_one_has(tmp_path: Path) -> None:
    packs = random_packs(9)
    found = compared(tmp_path, packs, packs[:5])
    assert not found.same
    assert (found.packs, found.differing_packs) == ((9, 5), 0)
    assert found.sequences is not None
    assert found.sequences.only_here == sum(len(pack.starts) for pack in packs[5:])
    write_samples(tmp_path / "empty", [])
    assert command("inspect", tmp_path / "here", "--diff", tmp_path / "empty").code == 1
