"""``verify --full`` accepts every published shard, even if the API is misused."""

from __future__ import annotations

import os
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_sft_idx import SFTIndexedDatasetBuilder
from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.errors import SequenceError, SFTIndexError
from megatron_sft_idx.formats.convert import ConvertOptions, convert
from megatron_sft_idx.formats.registry import WRITABLE
from megatron_sft_idx.layout.column import PAIR, ColumnSpec
from megatron_sft_idx.shard import Shard, ShardWriter, write_column, writer

SOURCE = ColumnSpec("sequence", np.uint32, 2, metadata={"files": [{"name": "a"}, {"name": "b"}]})


def vocabulary(size: object) -> dict[str, Any]:
    return {"tokenizer": {"vocab_size": size}}


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("given", [np.uint16, np.int32, np.int64, list])
def test_an_id_beyond_the_vocabulary_is_refused(dtype: Any, given: Any, tmp_path: Path) -> None:
    ids = [0, 99, 100, 5]
    tokens = ids if given is list else np.array(ids, given)
    shard = ShardWriter(tmp_path / "x", token_dtype=dtype, metadata=vocabulary(100))
    shard.add_pack([0, 99, 64, 5], [0, 1, 1, 0], [0])
    with pytest.raises(
        SequenceError, match=r"pack 1: position 2 has id 100, but the vocabulary has 100 tokens \(rule P9\)"
    ):
        shard.add_pack(tokens, [0, 1, 1, 0], [0])
    shard.abandon()
    assert os.listdir(tmp_path) == []
    builder = SFTIndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=dtype, metadata=vocabulary(100))
    with pytest.raises(SequenceError, match="rule P9"):
        builder.add_pack(tokens, [0, 1, 1, 0], [0])
    del builder
    assert os.listdir(tmp_path) == []


def test_long_runs_and_copies_of_shards_are_held_to_the_vocabulary_too(tmp_path: Path) -> None:
    ids = np.arange(200_000, dtype=np.int32) % 1000
    with ShardWriter(tmp_path / "x", capacity=1 << 18) as shard:
        shard.add_pack(ids, np.zeros(len(ids), np.uint8), [0])
    for size, is_good in ((1000, True), (999, False)):
        options = {"metadata": vocabulary(size), "durable": False}
        for add in (
            lambda to: to.add_shard(Shard(tmp_path / "x", backend="pread")),
            lambda to: to.add_pack(ids, np.zeros(len(ids), np.uint8), [0]),
        ):
            refused = pytest.raises(SequenceError, match=r"id 999, but the vocabulary has 999 tokens \(rule P9\)")
            with (
                nullcontext() if is_good else refused,
                ShardWriter(tmp_path / f"y{size}", overwrite=True, **options) as shard,
            ):
                add(shard)
    assert verify_shard(tmp_path / "y1000", full=True).ok
    assert not (tmp_path / "y999.seq.idx").exists()


@pytest.mark.parametrize("name", WRITABLE)
def test_conversions_hold_ids_to_the_vocabulary_that_the_source_names(name: str, tmp_path: Path) -> None:
    """The source was written without this check."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "vocab_size_of", lambda metadata: None)
        with ShardWriter(tmp_path / "x", metadata=vocabulary(5)) as shard:
            shard.add_pack([4, 5, 1], [1, 0, 0], [0])
    assert {finding.rule for finding in verify_shard(tmp_path / "x", full=True).findings} == {"P9"}
    with pytest.raises(SequenceError, match=r"id 5, but the vocabulary has 5 tokens \(rule P9\)"):
        convert(str(tmp_path / "x"), str(tmp_path / "out"), name, ConvertOptions(lossy=True))
    assert not list(tmp_path.glob("out*"))


def test_the_vocabulary_is_known_before_the_first_pack(tmp_path: Path) -> None:
    shard = ShardWriter(tmp_path / "x")
    shard.add_pack([7, 8], [1, 0], [0])
    shard.metadata |= vocabulary(5)
    with pytest.raises(SFTIndexError, match=r"tokenizer.vocab_size is now 5, but ids were checked against None"):
        shard.finalize()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("spec", "rows", "message"),
    [
        (SOURCE, [[0, 1], [2, 0]], r"sequence 1 is from file 2, expected a number below 2 \(rule C9\)"),
        (PAIR, [[3, 0], [4, 1]], r"have \[\[3, 0\], \[4, 1\]\], expected \[n, 0\] and \[n, 1\] \(rule C10\)"),
        (PAIR, [[3, 1], [3, 0]], "rule C10"),
    ],
)
def test_rows_that_their_columns_name_forbids_are_refused(
    spec: ColumnSpec, rows: Any, message: str, tmp_path: Path
) -> None:
    name = "pair" if spec is PAIR else "source"
    with pytest.raises(SequenceError, match=message), ShardWriter(tmp_path / "x", columns={name: spec}) as shard:
        shard.add_pack([1, 2], [0, 0], [0, 1], columns={name: rows})
    assert os.listdir(tmp_path) == []


def test_half_a_pair_is_refused_where_the_shard_ends(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x", columns={"pair": PAIR}) as shard:
        shard.add_pack([1, 2], [0, 0], [0], columns={"pair": [[3, 0]]})
        shard.add_pack([1, 2], [0, 0], [0], columns={"pair": [[3, 1]]})
    assert verify_shard(tmp_path / "x", full=True).ok
    shard = ShardWriter(tmp_path / "y", columns={"pair": PAIR})
    shard.add_pack([1, 2], [0, 0], [0], columns={"pair": [[3, 0]]})
    with pytest.raises(SequenceError, match=r"the last pair has no rejected sequence, \[\[3, 0\]\]"):
        shard.finalize()
    with pytest.raises(SFTIndexError, match="column source: expected uint32 values of width 2"):
        ShardWriter(tmp_path / "y", columns={"source": ColumnSpec("sequence", np.uint32, 2)})
    assert not list(tmp_path.glob("y*"))


# ---- random misuse ----


class Misuse:
    """Draws arguments that are mostly right and sometimes random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def maybe(self, good: Any, *odd: Any) -> Any:
        return self.random.choice(odd) if self.random.random() < 0.08 else good

    def metadata(self) -> Any:
        size = self.maybe(self.random.choice([None, 50, 300, 70_000]), 0, -1, True, "9", 1.5, [], 2**70)
        good = {"tokenizer": {"vocab_size": size}, "notes": []}
        odd = (
            {},
            None,
            {"tokenizer": 5},
            {1: 2},
            {"x": float("nan")},
            {"columns": {"a": "b"}},
            {"x": object()},
            [],
            "x",
        )
        return self.maybe(good, *odd)

    def columns(self) -> Any:
        specs: dict[str, Any] = {}
        for name, spec in (
            ("source", SOURCE),
            ("pair", PAIR),
            ("score", ColumnSpec("token", "f4")),
            ("n", ColumnSpec("pack", "u1")),
        ):
            if self.random.random() < 0.3:
                specs[name] = self.maybe(spec, ColumnSpec("sequence", "u4", 2), ColumnSpec("pack", "f8"))
        return self.maybe(specs, None, {"loss": SOURCE}, {"A": SOURCE}, {"a/b": SOURCE})

    def pack(self) -> tuple[Any, Any, Any]:
        lengths = [self.random.randint(1, 6) for _ in range(self.random.choice([1, 2, 2, 4]))]
        total, starts = sum(lengths), [sum(lengths[:i]) for i in range(len(lengths))]
        ids = [self.random.randint(0, 49) for _ in range(total)]
        mask = [self.random.randint(0, 1) for _ in range(total)]
        for start, length in zip(starts, lengths, strict=True):
            mask[start + length - 1] = self.maybe(0, 1)
        place = self.random.randrange(total)
        ids[place] = self.maybe(ids[place], 50, 299, 65535, 65536, -1, 2**31, 2**40)
        mask[place] = self.maybe(mask[place], 2, -1, 0.5, float("nan"), float("inf"), 1e-50, 1e39, True)
        starts = self.maybe(starts, [], [1], [0, 0], [0, total], [0, total + 1], starts[::-1], [-1])
        as_given = self.random.choice([list, np.array, lambda values: np.array(values, np.float64)])
        return np.array(ids), as_given(mask), starts

    def rows(self, spec: ColumnSpec, rows: int, first: int) -> Any:
        numbers = np.arange(first, first + rows)
        if spec.kind == PAIR.kind and "files" not in spec.metadata:
            good: Any = np.stack([numbers // 2, numbers % 2], 1)
        elif spec.width == 2:
            good = np.stack([numbers % 2, numbers], 1)
        else:
            good = numbers % 100
        return self.maybe(good, good[::-1], good + 1, good[:-1], np.zeros(rows), None, good.tolist(), -good)


def attempt(seed: int, folder: Path) -> tuple[list[Path], int]:
    """Run one random session. Return the prefixes of published shards, and the number of rejected calls."""
    draw, refused = Misuse(seed), 0
    prefix = folder / f"s{seed}"
    try:
        columns = draw.columns()
        options = {
            "token_dtype": draw.maybe(draw.random.choice([np.uint16, np.int32]), np.int64, "x", None),
            "mask_dtype": draw.maybe(draw.random.choice([np.uint8, np.float32]), np.float64, "x"),
            "capacity": draw.maybe(draw.random.choice([None, 32]), 0, -1, 3, 2**40, 1.5, True),
            "sequence_multiple": draw.maybe(draw.random.choice([1, 4]), 0, -1, 2**31, "2"),
            "pad_id": draw.maybe(draw.random.choice([None, 0]), -1, 2**40, "0"),
            "metadata": draw.metadata(),
            "columns": columns,
            "durable": False,
        }
        writing = ShardWriter(prefix, **options)
    except (SFTIndexError, TypeError, ValueError):
        return [], 1
    sequences = packs = 0
    for _ in range(draw.random.randint(0, 5)):
        try:
            tokens, mask, starts = draw.pack()
            counts = {"token": (len(tokens), 0), "sequence": (len(starts), sequences), "pack": (1, packs)}
            values = {name: draw.rows(spec, *counts[spec.per]) for name, spec in (columns or {}).items()}
            writing.add_pack(tokens, mask, starts, mask_alignment=draw.maybe("label", "token", "x"), columns=values)
            sequences, packs = sequences + len(starts), packs + 1
        except (SFTIndexError, TypeError, ValueError):
            refused += 1
    try:
        writing.metadata = draw.maybe(writing.metadata, {}, {"tokenizer": {"vocab_size": 7}}, {"x": {1}})
        writing.finalize()
    except (SFTIndexError, TypeError, ValueError):
        return [], refused + 1
    for _ in range(draw.random.randint(0, 2)):
        spec = draw.random.choice([PAIR, SOURCE, ColumnSpec("token", "f4")])
        rows = {"token": Shard(prefix).header.num_tokens, "sequence": Shard(prefix).header.num_sequences}[spec.per]
        try:
            name = draw.maybe("late", "source", "pair", "seq", "A")
            metadata = draw.maybe(dict(spec.metadata), {}, {"files": 5}, {"x": float("inf")})
            write_column(prefix, name, draw.rows(spec, rows, 0), per=spec.per, metadata=metadata)
        except (SFTIndexError, TypeError, ValueError):
            refused += 1
    published = [prefix]
    try:
        convert(str(prefix), f"{prefix}-again", "sft-idx", ConvertOptions(capacity=draw.maybe(None, 1, 64)))
        published.append(Path(f"{prefix}-again"))
    except (SFTIndexError, TypeError, ValueError):
        refused += 1
    return published, refused


def run_sessions(seeds: range, folder: Path) -> tuple[int, int]:
    shards = refused = 0
    for seed in seeds:
        published, refusals = attempt(seed, folder)
        for prefix in published:
            report = verify_shard(prefix, full=True)
            assert report.ok, (seed, [str(finding) for finding in report.findings])
        shards, refused = shards + len(published), refused + refusals
    return shards, refused


def test_what_is_published_is_verified_however_the_api_is_misused(tmp_path: Path) -> None:
    shards, refused = run_sessions(range(300), tmp_path)
    assert min(shards, refused) > 100


@pytest.mark.slow
def test_many_more_misuses(tmp_path: Path) -> None:
    shards, refused = run_sessions(range(1000, 11_000), tmp_path)
    print(f"10,000 sessions: {shards:,} shards published and verified, {refused:,} calls refused")
