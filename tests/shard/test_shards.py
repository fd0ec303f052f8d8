"""Many shards as one: finding them by name, exact indexing, and errors if they do not fit together."""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_packs import Sample, assert_holds, assert_is, demo_samples, samples, write_samples

from megatron_sft_idx.errors import FormatError, ShardNotFoundError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.shard import Shard, ShardWriter
from megatron_sft_idx.shard.shard_set import ShardSet, find_prefixes

PACKS = demo_samples(23)


def write(folder: Path, sizes: dict[str, int], **options: Any) -> list[Sample]:
    """Write shards of these sizes from PACKS, in order, and return the written packs."""
    done = 0
    for name, size in sizes.items():
        write_samples(folder / name, PACKS[done : done + size], **{"capacity": 64, **options})
        done += size
    return PACKS[:done]


def names(prefixes: list[str]) -> list[str]:
    return [Path(prefix).name for prefix in prefixes]


# ---- finding ----


def test_folders_and_globs_are_in_numeric_order(tmp_path: Path) -> None:
    tmp_path = tmp_path / "some folder"
    tmp_path.mkdir()
    order = ["a-2", "a-9", "a-10", "a-99999", "a-100000", "b-1"]
    shuffled = random.Random(0).sample(order, len(order))
    write(tmp_path, dict.fromkeys(shuffled, 1))
    assert names(find_prefixes(tmp_path)) == order
    assert names(find_prefixes(f"{tmp_path}/*")) == order
    assert names(find_prefixes(f"{tmp_path}/a-*")) == order[:-1]
    assert names(find_prefixes(f"{tmp_path}/a-?")) == order[:2]
    assert names(find_prefixes(f"{tmp_path}/a-1*.bin")) == ["a-10", "a-100000"]
    assert names(find_prefixes(f"{tmp_path.parent}/some*")) == order
    assert names(find_prefixes([tmp_path / "b-1", f"{tmp_path}/a-?"])) == ["b-1", "a-2", "a-9"]


def test_a_prefix_may_look_like_a_glob_and_a_file_stands_for_its_shard(tmp_path: Path) -> None:
    write(tmp_path, {"run[1]": 3, "run1": 2})
    assert names(find_prefixes(tmp_path / "run[1]")) == ["run[1]"]
    assert names(find_prefixes(tmp_path / "run[1].seq.idx")) == ["run[1]"]
    assert names(find_prefixes(tmp_path / "run[0-9]")) == ["run1"]


def test_a_shard_may_have_the_name_of_a_folder_beside_it(tmp_path: Path) -> None:
    write_samples(tmp_path / "x", demo_samples(1))
    (tmp_path / "x").mkdir()
    assert find_prefixes(tmp_path / "x") == [f"{tmp_path}/x"]
    with pytest.raises(ShardNotFoundError, match="directly contains no shard"):
        find_prefixes(f"{tmp_path}/x/")
    write_samples(tmp_path / "x/y", demo_samples(1))
    with pytest.raises(FormatError, match=r"pass either .*x\.seq\.idx or .*x/$"):
        find_prefixes(tmp_path / "x")
    assert find_prefixes(f"{tmp_path}/x/") == [f"{tmp_path}/x/y"]
    assert find_prefixes(f"{tmp_path}/x.seq.idx") == [f"{tmp_path}/x"]


def test_a_lock_beside_a_folder_is_no_shard_with_its_name(tmp_path: Path) -> None:
    """Commands that write several shards have such a lock."""
    write_samples(tmp_path / "x/y", demo_samples(1))
    (tmp_path / "x.building").mkdir()
    (tmp_path / "x.building" / "lock").touch()
    assert find_prefixes(tmp_path / "x", incomplete=True) == [f"{tmp_path}/x/y"]


def test_incomplete_ones_are_found_where_they_are_looked_for(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder, {"a-2": 1, "a-10": 1, "a-9": 1})
    for lost in ("a-2.seq.idx", "a-2.loss.bin", "a-10.seq.idx", "a-10.seq.bin"):
        (folder / lost).unlink()
    with ShardWriter(folder / "killed") as writer:
        writer.add_pack([1, 2], [1, 0], [0])
        writer.complete()
        writer.suspend()
    for other in ("stock.bin", "stock.idx", "a-2.journal"):
        (folder / other).touch()
    for other in ("_producer.building", "a-2-parts.building", "notes.building"):
        (folder / other).mkdir()
    (folder / "notes.building" / "build.json").write_text('{"of": "somebody"}')
    everything = ["a-2", "a-9", "a-10", "killed"]
    for source in (folder, f"{folder}/*", f"{tmp_path}/d*"):
        assert names(find_prefixes(source, incomplete=True)) == everything
        assert names(find_prefixes(source)) == ["a-9"]
    for glob, found in (("a-?", everything[:2]), ("*.bin", everything[:3]), ("k*", ["killed"]), ("kille?", ["killed"])):
        assert names(find_prefixes(folder / glob, incomplete=True)) == found
    assert names(find_prefixes(folder / "killed.building", incomplete=True)) == ["killed"]
    with pytest.raises(ShardNotFoundError, match="no shard and no folder"):
        find_prefixes(folder / "[_s]*", incomplete=True)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ShardNotFoundError, match="contains no shard"):
        find_prefixes(tmp_path)
    with pytest.raises(ShardNotFoundError, match="no shard and no folder"):
        find_prefixes(tmp_path / "*.bin")
    with pytest.raises(FormatError, match="empty list"):
        find_prefixes([])
    with pytest.raises(FormatError, match="empty list"):
        ShardSet([])
    with pytest.raises(ShardNotFoundError, match=r"/x: no shard here, missing \S*/x\.bin and the other four"):
        ShardSet.open(tmp_path / "x")
    write(tmp_path, {"x": 3})
    (tmp_path / "x.bin").unlink()
    (tmp_path / "x.seq.idx").rename(tmp_path / "y.seq.idx")
    with pytest.raises(ShardNotFoundError, match=r"missing .*y\.bin"):
        ShardSet.open(tmp_path)[0]


# ---- indexing ----


@settings(max_examples=15, deadline=None)
@given(st.lists(samples(), min_size=1, max_size=4))
def test_packs_count_through_all_shards(tmp_path_factory: pytest.TempPathFactory, groups: list[list[Sample]]) -> None:
    folder = tmp_path_factory.mktemp("set")
    for i, packs in enumerate(groups):
        write_samples(folder / f"s{i}", packs, token_dtype=np.uint16, capacity=64)
    everything = [pack for packs in groups for pack in packs]
    found = ShardSet.open(folder)
    assert len(found) == len(everything)
    assert found.num_sequences == sum(len(pack.starts) for pack in everything)
    assert found.total("num_tokens") == sum(len(pack.tokens) for pack in everything)
    for i, pack in enumerate(everything):
        assert_is(found[i], pack)
        assert_is(found[i - len(everything)], pack)
    for outside in (len(everything), -len(everything) - 1):
        with pytest.raises(IndexError):
            found[outside]
    for pack, sample in zip(found, everything, strict=True):
        assert_is(pack, sample)


# ---- pickling ----


def test_it_pickles_as_paths_and_ids(tmp_path: Path) -> None:
    packs = write(tmp_path, {"a": 5, "b": 0, "c": 6})
    found = ShardSet.open(tmp_path)
    found[7]
    raw = pickle.dumps(found)
    assert len(raw) < 200 + sum(map(len, found.prefixes))
    again = pickle.loads(raw)
    assert again.fingerprint == found.fingerprint
    for i, pack in enumerate(packs):
        assert_is(again[i], pack)


def test_a_shard_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, {"a": 3, "b": 3})
    found = ShardSet.open(tmp_path)
    raw = pickle.dumps(found)
    write_samples(tmp_path / "b", PACKS[10:13], capacity=64, overwrite=True)
    with pytest.raises(FormatError, match="another shard has replaced it: start again"):
        found[4]
    with pytest.raises(FormatError, match="/a and 1 other: the content has changed since this dataset was opened"):
        len(pickle.loads(raw))
    assert ShardSet.open(tmp_path).fingerprint != found.fingerprint


def test_the_fingerprint_is_of_content_and_order_not_of_paths(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    write(tmp_path / "x", {"a": 3, "b": 3})
    write(tmp_path / "y", {"c": 3, "d": 3})
    first, second = ShardSet.open(tmp_path / "x"), ShardSet.open(tmp_path / "y")
    assert first.fingerprint == second.fingerprint
    assert ShardSet(first.prefixes[::-1]).fingerprint != first.fingerprint


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EPERM, errno.ENODEV])
def test_shards_are_read_where_the_process_gets_no_more_maps(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs = write(tmp_path, {"a": 3, "b": 4})

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(mmap, "mmap", refuse)
    assert_holds(ShardSet.open(tmp_path), packs)
    with pytest.raises(OSError, match=r"a\.seq\.idx"):
        Shard(tmp_path / "a")


# ---- shards that do not fit together ----


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            {"token_dtype": np.uint16},
            {"token_dtype": np.int32},
            "tokens are int32, but uint16 in .*/a; write all shards with",
        ),
        ({"capacity": 64}, {"capacity": 48}, "capacity is 48, but 64 in .*/a; pack them again with"),
        ({"pad_id": 1}, {"pad_id": 2}, "pad id is 2, but 1 in .*/a; they come from different tokenizers"),
        (
            {"metadata": {"tokenizer": {"fingerprint": "f1"}}},
            {"metadata": {"tokenizer": {"fingerprint": "f2"}}},
            "tokenizer is f2, but f1 in .*/a; they come from different tokenizers",
        ),
    ],
)
def test_shards_that_do_not_go_together(tmp_path: Path, first: Any, second: Any, message: str) -> None:
    write(tmp_path, {"a": 3}, **first)
    write(tmp_path, {"b": 3}, **second)
    with pytest.raises(FormatError, match=message):
        ShardSet.open(tmp_path)


def test_a_corpus_may_have_any_capacity_and_unknown_values_agree_with_all(tmp_path: Path) -> None:
    write(tmp_path, {"a": 3}, capacity=64, pad_id=1)
    write(tmp_path, {"b": 3}, capacity=48)
    write(tmp_path, {"empty": 0}, capacity=None)  # its capacity is the length of its longest pack: 0
    assert len(ShardSet.open(tmp_path, same_capacity=False)) == 6
    assert len(ShardSet.open([tmp_path / "a", tmp_path / "empty"])) == 3


@pytest.mark.parametrize("name", ["", ".", "..", "sub/..", "sub/", "./", ".bin", "..seq.idx"])
def test_a_folder_is_no_prefix(name: str) -> None:
    with pytest.raises(FormatError, match="not a prefix; pass a shard inside a folder"):
        ShardPaths.of(name)
