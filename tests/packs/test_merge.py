"""``merge``: the same packs in the same order, and errors for shards that do not fit together."""

from __future__ import annotations

import dataclasses
import os
import resource
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from merges import merged, rewrite_header, write_parts
from sample_packs import assert_holds, demo_samples, five_files, folder_of, samples, write_samples

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.packs import provenance as origin
from megatron_sft_idx.shard import Shard, ShardWriter, read_header

# ---- output ----


@settings(max_examples=60, deadline=None)
@given(data=st.data(), token_dtype=st.sampled_from([np.uint16, np.int32]), weights=st.booleans())
def test_merging_is_writing_all_packs_into_one_shard(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, token_dtype: Any, weights: bool
) -> None:
    folder = tmp_path_factory.mktemp("merge")
    packs = data.draw(samples(token_dtype=token_dtype, weights=weights))
    cuts = data.draw(st.lists(st.integers(0, len(packs)), max_size=4))
    options = {"token_dtype": token_dtype, "mask_dtype": np.float32 if weights else np.uint8, "pad_id": 7}
    sources = write_parts(folder, packs, cuts, **options)
    report = merged(sources, folder / "m")
    expected = write_samples(folder / "whole", packs, capacity=64, **options)
    found = five_files(folder / "m")
    assert {**five_files(folder / "whole"), ".seq.idx": found[".seq.idx"]} == found
    assert dataclasses.replace(report.header, metadata={}) == dataclasses.replace(expected, metadata={})
    assert read_header(folder / "m") == report.header
    assert_holds(Shard(folder / "m"), packs)


def test_the_order_is_the_one_given(tmp_path: Path) -> None:
    packs = demo_samples(9)
    a, b, c = write_parts(tmp_path, packs, [2, 5])
    report = merged([c, a, b, a], tmp_path / "m")
    assert_holds(Shard(tmp_path / "m"), packs[5:] + packs[:2] + packs[2:5] + packs[:2])
    assert any("given more than once" in note for note in report.notes)


def test_a_hundred_uneven_shards_with_few_files_open(tmp_path: Path) -> None:
    packs = demo_samples(300)
    sources = write_parts(tmp_path, packs, sorted((i * i * 7) % 301 for i in range(99)))
    assert len(sources) == 100
    assert any(read_header(source).num_packs == 0 for source in sources)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 24, hard))
    try:
        merged(sources, tmp_path / "m")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert_holds(Shard(tmp_path / "m"), packs)


def test_stock_megatron_reads_the_merged_tokens(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    packs = demo_samples(12)
    merged(write_parts(tmp_path, packs, [3, 3, 7]), tmp_path / "m")
    stock = IndexedDataset(str(tmp_path / "m"))
    assert [stock[i].tolist() for i in range(len(stock))] == [pack.tokens for pack in packs]
    assert stock.document_indices.tolist() == list(range(13))


def write_many(prefix: Path, packs: int, length: int) -> str:
    ones = np.ones(packs, np.int64)
    with ShardWriter(prefix, token_dtype=np.uint16, capacity=100_000, durable=False) as writer:
        total = packs * length
        writer.add_packs(np.zeros(total, np.uint16), np.zeros(total, np.uint8), 0 * ones, length * ones, ones)
    return str(prefix)


@pytest.mark.parametrize(("small", "large"), [((100_000, 3), (400_000, 3)), ((20, 50_000), (100, 50_000))])
def test_the_heap_does_not_grow_with_packs_or_tokens(
    tmp_path: Path, small: tuple[int, int], large: tuple[int, int]
) -> None:
    peaks = []
    for name, size in (("warm", small), ("small", small), ("large", large)):
        source = write_many(tmp_path / name, *size)
        tracemalloc.start()
        merged([source, source], tmp_path / f"{name}-m")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < peaks[1] + (256 << 10)
    assert peaks[2] < 8 << 20


# ---- shards that do not fit together ----

TOKENIZER = {"tokenizer": {"fingerprint": "aaa", "vocab_size": 1000}, "chat_template": {"fingerprint": "ttt"}}
DIFFERENT = [
    ("token dtype", {"token_dtype": np.uint16}, "uint16", "int32"),
    ("mask dtype", {"mask_dtype": np.float32}, "float32", "uint8"),
    ("capacity", {"capacity": 65}, "65", "64"),
    ("sequence multiple", {"sequence_multiple": 2}, "2", "1"),
    ("pad id", {"pad_id": 0}, "0", "5"),
    ("tokenizer", {"metadata": TOKENIZER | {"tokenizer": {"fingerprint": "bbb"}}}, "bbb", "aaa"),
    ("chat template", {"metadata": TOKENIZER | {"chat_template": {"fingerprint": "uuu"}}}, "uuu", "ttt"),
    (
        "chat template",
        {"metadata": TOKENIZER | {"chat_template": {"fingerprint": "ttt", "tools_fingerprint": "vvv"}}},
        "ttt, with tools vvv",
        "ttt",
    ),
]


@pytest.mark.parametrize(("field", "change", "found", "expected"), DIFFERENT)
def test_a_mismatch_is_refused_with_both_values_before_anything_is_written(
    tmp_path: Path, field: str, change: dict[str, Any], found: str, expected: str
) -> None:
    options = {"capacity": 64, "pad_id": 5, "metadata": TOKENIZER}
    write_samples(tmp_path / "a", demo_samples(3), **options)
    write_samples(tmp_path / "empty", [], **options)
    write_samples(tmp_path / "b", demo_samples(3), **(options | change))
    before = folder_of(tmp_path)
    with pytest.raises(FormatError) as caught:
        merged([str(tmp_path / name) for name in ("a", "empty", "b")], tmp_path / "m")
    assert str(caught.value).startswith(f"{tmp_path}/b: {field} {found}, but {expected} in {tmp_path}/a; ")
    assert folder_of(tmp_path) == before


def test_capacities_and_templates_may_differ_where_that_is_asked_for(tmp_path: Path) -> None:
    packs = demo_samples(6)
    write_samples(tmp_path / "a", packs[:3], capacity=64, metadata=TOKENIZER)
    write_samples(tmp_path / "b", packs[3:], metadata=TOKENIZER | {"chat_template": {"fingerprint": "uuu"}})
    sources = [str(tmp_path / "b"), str(tmp_path / "a")]
    report = merged(sources, tmp_path / "m", mixed_capacity=True, mixed_templates=True)
    assert report.header.capacity == 64
    assert report.header.metadata["tokenizer"] == TOKENIZER["tokenizer"]
    assert "chat_template" not in report.header.metadata
    assert "chat template: differs between the shards, as allowed by an option" in report.notes
    assert "capacity: differs between the shards, as allowed by an option" in report.notes
    assert_holds(Shard(tmp_path / "m"), packs[3:] + packs[:3])


def test_what_a_shard_does_not_record_matches_all_and_is_said(tmp_path: Path) -> None:
    write_samples(tmp_path / "a", demo_samples(2), capacity=64)
    write_samples(tmp_path / "b", demo_samples(2), capacity=64, pad_id=5, metadata=TOKENIZER)
    write_samples(tmp_path / "c", demo_samples(2), capacity=64, metadata={"tokenizer": [1], "chat_template": None})
    write_samples(tmp_path / "d", [])  # an empty shard without a capacity
    a, b, c, d = (str(tmp_path / name) for name in "abcd")
    report = merged([a, b, c, d], tmp_path / "m")
    assert report.header.pad_id == 5
    assert report.header.capacity == 64
    assert report.header.metadata | TOKENIZER == report.header.metadata
    assert f"{a} and 2 more: tokenizer not recorded, assumed to be the same as in {b}" in report.notes
    assert f"{d}: capacity not recorded, assumed to be the same as in {a}" in report.notes
    (note,) = merged([a, a], tmp_path / "n").notes[:1]
    assert note == "not recorded in any shard, so not compared: pad id, tokenizer, chat template"


def test_a_rebuilt_source_makes_the_merged_shard_a_rebuilt_one(tmp_path: Path) -> None:
    a, b = write_parts(tmp_path, demo_samples(4), [2])
    rewrite_header(b, rebuilt=True)
    assert merged([a, b], tmp_path / "m").header.rebuilt
    assert not merged([a], tmp_path / "n").header.rebuilt


# ---- origin of the packs ----


def test_the_header_lists_the_sources_also_through_merges_of_merges(tmp_path: Path) -> None:
    packs = demo_samples(10)
    about = {"sources": {"fingerprint": "f" * 32, "rows": 3}, "notes": {"literals": 1}, "options": {"seed": 1}}
    sources = write_parts(tmp_path, packs, [2, 2, 7], metadata=about)
    metadata = merged(sources, tmp_path / "m").header.metadata
    entries = [
        {
            "shard_id": header.shard_id.hex(),
            "source": "f" * 32,
            "first_pack": 0,
            "num_packs": header.num_packs,
            "num_sequences": header.num_sequences,
            "num_tokens": header.num_tokens,
        }
        for header in map(read_header, sources)
    ]
    del entries[1]  # the empty shard
    assert metadata == {"format_writer": 1, "options": {"seed": 1}, "origin": entries}
    left, right = str(tmp_path / "left"), str(tmp_path / "right")
    merged(sources[:3], left)
    merged(sources[3:], right)
    merged([left, right], tmp_path / "nested")
    assert five_files(tmp_path / "nested") == five_files(tmp_path / "m")


def test_a_list_of_sources_too_long_for_a_header_names_the_merges_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = write_parts(tmp_path, demo_samples(8), [1, 2, 3, 4])
    left, right = str(tmp_path / "left"), str(tmp_path / "right")
    merged(sources[:2], left)
    merged(sources[2:], right)
    monkeypatch.setattr("megatron_sft_idx.packs.merge.MAX_RUNS", 3)
    header = merged([left, right], tmp_path / "m").header
    ids = [entry["shard_id"] for entry in header.metadata[origin.ORIGIN]]
    assert ids == [read_header(prefix).shard_id.hex() for prefix in (left, right)]
    with pytest.raises(FormatError, match="5 shards are too many: a header can list 3; merge groups of them first"):
        merged(sources, tmp_path / "n")


def test_as_many_sources_as_are_listed_fit_a_header(tmp_path: Path) -> None:
    runs = [origin.OriginRun(f"{i:032x}", "f" * 32, 0, 10**9, 10**10, 10**13) for i in range(origin.MAX_RUNS)]
    header = write_samples(tmp_path / "a", [])
    assert dataclasses.replace(header, metadata={origin.ORIGIN: list(map(dataclasses.asdict, runs))}).nbytes < 16 << 20


@pytest.mark.parametrize("bad", [None, 3, [3], [{}], [{"shard_id": "x"}], "text", {"a": 1}, []])
def test_an_origin_that_somebody_else_wrote_is_not_believed(tmp_path: Path, bad: Any) -> None:
    write_samples(tmp_path / "a", demo_samples(3), metadata={"origin": bad})
    header = read_header(tmp_path / "a")
    assert origin.origin_runs(header) == [origin.own_run(header)]
    for other in ({"num_tokens": 1}, {"shard_id": ["x"]}, {"source": 3}, {"first_pack": -1}, {"first_pack": 0.0}):
        wrong = dataclasses.asdict(origin.own_run(header)) | other
        assert origin.origin_runs(dataclasses.replace(header, metadata={"origin": [wrong]})) == [origin.own_run(header)]
