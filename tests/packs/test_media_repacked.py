"""Images and audio when sequences are selected, weighted, cut and repacked, compared with a naive implementation."""

from __future__ import annotations

import base64
import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import command
from media_processors import llava_of_any_size, png
from media_samples import MediaSample, media_samples, write_media

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.columns import write_column
from megatron_sft_idx.tokenize import PackOptions, num_kept_tokens
from megatron_sft_idx.tokenize.corpus import CorpusReader, pack_shard

Item = tuple[str, int, int, bytes]


@dataclass(frozen=True)
class Plain:
    """A sequence with its label-aligned mask, and its items relative to its first token."""

    ids: tuple[int, ...]
    mask: tuple[float, ...]
    items: tuple[Item, ...]


def plain_of(packs: Any) -> list[Plain]:
    """Return the sequences of packs, one after the other."""
    found = []
    for pack in packs:
        ids, mask = pack["input_ids"].tolist(), pack["loss_mask"].tolist()
        for start, stop in pairwise(pack["seq_boundaries"].tolist()):
            inside = [item for item in pack["media"] if start <= item.start < stop]
            items = tuple((item.kind, item.start - start, item.length, bytes(item.data)) for item in inside)
            found.append(Plain(tuple(ids[start:stop]), tuple(mask[start:stop]), items))
        assert len(pack["media"]) == sum(
            len(one.items) for one in found[len(found) - len(pack["seq_boundaries"]) + 1 :]
        )
    return found


def assert_holds_only(prefix: Path, expected: list[Plain]) -> None:
    """Check that a shard has these sequences in packs of any order, and only the files that they use."""
    assert Counter(plain_of(Shard(prefix))) == Counter(expected)
    assert command("verify", prefix, "--full").code == 0
    shown = {data for one in expected for *_, data in one.items}
    assert Path(f"{prefix}.media.data").stat().st_size == sum(map(len, shown))
    media = Shard(prefix).media
    assert media is not None
    assert {bytes(media.data(number)) for number in range(len(media))} == shown


def written(folder: Path, seed: int, count: int = 25) -> tuple[Path, list[Plain], list[MediaSample]]:
    samples = media_samples(seed, count)
    write_media(folder / "x", samples, capacity=64)
    return folder / "x", plain_of(Shard(folder / "x")), samples


# ---- conditions and weights ----


@pytest.mark.parametrize("seed", range(15))
def test_kept_sequences_keep_their_items_and_others_leave_no_file(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    prefix, sequences, _ = written(tmp_path, seed)
    scores = [draw.randint(0, 4) for _ in sequences]
    weights = [draw.choice([0.0, 0.5, 1.0, 2.0]) for _ in sequences]
    write_column(prefix, "score", np.array(scores, np.int32), per="sequence")
    write_column(prefix, "weight", np.array(weights, np.float32), per="sequence")
    least, is_weighted = draw.randint(0, 3), draw.random() < 0.7
    options: list[object] = ["--where", f"score >= {least}"]
    options += ["--loss-weight-column", "weight"] if is_weighted else []
    given = ["--seq-length", draw.choice([16, 40, 64]), "--packing", draw.choice(["auto", "none", "first-fit-shuffle"])]
    found = command("pack", prefix, *given, *options, "--output-prefix", tmp_path / "y")
    kept = [
        Plain(one.ids, tuple(value * weight for value in one.mask) if is_weighted else one.mask, one.items)
        for one, score, weight in zip(sequences, scores, weights, strict=True)
        if score >= least
    ]
    if max(len(one.ids) for one in kept) > given[1]:
        assert found.code == 1
        return
    assert found.code == 0, found.err
    assert_holds_only(tmp_path / "y", kept)


@pytest.mark.parametrize("seed", range(5))
def test_weights_of_tokens_leave_items_alone(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    prefix, sequences, _ = written(tmp_path, seed)
    weights = [draw.choice([0.0, 1.0, 3.0]) for one in sequences for _ in one.ids]
    write_column(prefix, "weight", np.array(weights, np.float32), per="token", alignment="label")
    found = command(
        "pack", prefix, "--seq-length", 64, "--loss-weight-column", "weight", "--output-prefix", tmp_path / "y"
    )
    assert found.code == 0, found.err
    expected, begin = [], 0
    for one in sequences:
        own = weights[begin : begin + len(one.ids)]
        begin += len(one.ids)
        expected.append(Plain(one.ids, tuple(a * b for a, b in zip(one.mask, own, strict=True)), one.items))
    assert_holds_only(tmp_path / "y", expected)


def test_where_no_sequence_with_media_is_kept_there_is_no_file(tmp_path: Path) -> None:
    prefix, sequences, _ = written(tmp_path, 3)
    write_column(prefix, "has", np.array([len(one.items) for one in sequences], np.int32), per="sequence")
    given = ["--seq-length", 64, "--where", "has == 0", "--output-prefix", tmp_path / "y"]
    assert command("pack", prefix, *given).code == 0
    assert_holds_only(tmp_path / "y", [one for one in sequences if not one.items])


# ---- sequences that are too long ----


def cut_naively(sequences: list[Plain], longest: int, overlong: str) -> tuple[list[Plain], int]:
    """Return the sequences to pack, and the number of sequences dropped because a cut would divide an item."""
    out, parted = [], 0
    for one in sequences:
        if len(one.ids) <= longest:
            out.append(one)
            continue
        if overlong == "drop":
            continue
        begins = range(0, len(one.ids), longest) if overlong == "split" else [0]
        edges = [edge for begin in begins for edge in (begin, min(begin + longest, len(one.ids)))]
        if any(start < edge < start + length for edge in edges for _, start, length, _ in one.items):
            parted += 1
            continue
        for begin in begins:
            end = min(begin + longest, len(one.ids))
            mask = (*one.mask[begin : end - 1], 0)
            inside = [each for each in one.items if begin <= each[1] < end]
            items = tuple((kind, start - begin, length, data) for kind, start, length, data in inside)
            out.append(Plain(one.ids[begin:end], mask, items))
    return out, parted


@pytest.mark.parametrize("overlong", ["drop", "truncate", "split"])
@pytest.mark.parametrize("seed", range(8))
def test_no_item_is_cut_and_the_counts_are_true(tmp_path: Path, seed: int, overlong: Any) -> None:
    draw = random.Random(seed)
    prefix, sequences, _ = written(tmp_path, seed)
    options = PackOptions(draw.choice([3, 5, 8]), overlong=overlong, seed=seed)
    expected, parted = cut_naively(sequences, options.capacity, overlong)
    lengths = np.array([len(one.ids) for one in sequences])
    assert num_kept_tokens(lengths, options, CorpusReader(Shard(prefix))) == sum(len(one.ids) for one in expected)
    report = pack_shard(Shard(prefix), str(tmp_path / "y"), options)
    assert_holds_only(tmp_path / "y", expected)
    assert report.dropped_media_sequences == parted
    assert report.overlong == int((lengths > options.capacity).sum())
    assert report.dropped_tokens == sum(lengths) - sum(len(one.ids) for one in expected)
    trained = [sum(map(bool, (value for one in of for value in one.mask))) for of in (sequences, expected)]
    assert report.lost_trained_tokens == trained[0] - trained[1]
    assert (f"{parted:,} dropped, because the cut would go" in report.describe_overlong()) == (parted > 0)


def test_where_every_sequence_would_be_parted_nothing_is_left(tmp_path: Path) -> None:
    from media_samples import item_of, media_sample

    write_media(tmp_path / "x", [media_sample([9], [item_of("image", 1, 6)])])
    with pytest.raises(FormatError, match="no sequence is left to pack"):
        pack_shard(Shard(tmp_path / "x"), str(tmp_path / "y"), PackOptions(4, overlong="truncate"))
    lengths = np.array([9])
    assert not num_kept_tokens(lengths, PackOptions(4, overlong="truncate"), CorpusReader(Shard(tmp_path / "x")))


# ---- output of a dry run ----


@pytest.mark.parametrize("overlong", ["truncate", "split", "drop"])
def test_a_dry_run_has_the_figures_of_the_run(tmp_path: Path, overlong: str) -> None:
    processor = tmp_path / "processor"
    llava_of_any_size(processor)
    draw = random.Random(2)
    files = ["data:image/png;base64," + base64.b64encode(png(14 * k, 28, k)).decode() for k in range(1, 9)]
    rows = []
    for _ in range(60):
        parts = ["hello " * draw.randint(0, 4), "<image>" * draw.randint(0, 2), " the"]
        chat = [{"role": "user", "content": "".join(parts)}, {"role": "assistant", "content": "hi"}]
        rows.append({"messages": chat, "images": draw.choices(files, k=parts[1].count("<image>"))})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--input", tmp_path / "rows.jsonl", "--tokenizer-model", processor, "--processor", processor]
    given += ["--seq-length", 24, "--overlong", overlong, "--workers", 0, "--output-prefix", tmp_path / "x"]
    told = command("preprocess", *given, "--dry-run", "--full")
    assert told.code == 0, told.err
    done = command("preprocess", *given, "--summary", tmp_path / "summary.json")
    assert done.code == 0, done.err
    packing = json.loads((tmp_path / "summary.json").read_text())["packing"]
    line = re.search(r"^packs +([\d,]+) \((\S+)\), ([\d.]+)% filled", told.out, re.M)
    assert line is not None
    assert (int(line[1]), line[2], float(line[3])) == (
        packing["packs"],
        packing["method"],
        round(100 * packing["fill"], 3),
    )
    dropped = re.search(r"^  dropped +([\d,]+) sequences", told.out, re.M)
    assert (int(dropped[1]) if dropped else 0) == packing["dropped_media_sequences"]
    assert (packing["dropped_media_sequences"] > 0) == (overlong != "drop")
