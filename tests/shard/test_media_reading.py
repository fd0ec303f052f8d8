"""Images and audio of packs: every data set class and backend returns them, and reads only what a pack needs."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from media_samples import (
    MediaSample,
    array_places,
    array_values,
    as_plain,
    item_of,
    media_field,
    media_sample,
    media_samples,
    reseal_media,
    seven_files,
    with_entry,
    write_media,
)
from object_folders import serve_folder
from sample_packs import write_samples
from shard_folders import files_of, maps_of

from megatron_sft_idx.dataset import SFTIndexedDataset
from megatron_sft_idx.errors import CorruptShardError
from megatron_sft_idx.formats.packed_dataset import open_dataset
from megatron_sft_idx.formats.sft_idx import Reader
from megatron_sft_idx.packs.run import PackRun, checked_runs
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.local import PreadArray, ReopenedArray
from megatron_sft_idx.storage.remote.msc import MultiStorage

PATIENCE_SECONDS = 300
BACKENDS = ["mmap", "pread", "reopen"]
WAYS = [*BACKENDS, "bucket mmap", "bucket pread", "bucket reopen"]
# Each function takes the path of a shard and the options of Shard.
CLASSES: dict[str, Callable[..., Any]] = {
    "Shard": Shard,
    "SFTIndexedDataset": lambda path, **options: SFTIndexedDataset(str(path), **options),
    "open_dataset": open_dataset,
    "open_dataset of a list": lambda path, **options: open_dataset([str(path)] * 2, **options),
    "ShardSet": lambda path, **options: ShardSet([str(path)], **options),
}


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str, str]:
    """Provide the folder to write to, the path to read from, and the backend."""
    backend = request.param.removeprefix("bucket ")
    folder = tmp_path / "files"
    folder.mkdir()
    if backend == request.param:
        return folder, str(folder), backend
    return folder, serve_folder(folder, tmp_path / "msc.json", monkeypatch), backend


# ---- the same items ----


@pytest.mark.parametrize("root", WAYS, indirect=True)
@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_gives_the_items_of_each_pack(root: tuple[Path, str, str], kind: str) -> None:
    folder, place, backend = root
    samples = media_samples(7, 9)
    write_media(folder / "x", samples)
    expected = [as_plain(sample.items) for sample in samples]
    dataset = CLASSES[kind](f"{place}/x", backend=backend)
    expected *= len(dataset) // len(samples)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 600 + 4 * len(place)
    for each in (dataset, pickle.loads(pickled)):
        for index in [4, 0, -1, 4, len(expected) - 1]:
            assert as_plain(each[index]["media"]) == expected[index]
            for item in each[index]["media"]:
                assert isinstance(item.data, memoryview)
                assert item.data.readonly
        assert [as_plain(pack["media"]) for pack in each] == expected
    if kind != "ShardSet":
        assert [as_plain(pack["media"]) for pack in dataset[2:7]] == expected[2:7]
        with pytest.raises(ValueError, match="step 2"):
            dataset[0:4:2]
    assert [] in expected


@pytest.mark.parametrize("root", WAYS, indirect=True)
@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind != "ShardSet"])
def test_copies_hold_on_to_no_file(root: tuple[Path, str, str], kind: str) -> None:
    folder, place, backend = root
    samples = media_samples(8, 5)
    write_media(folder / "x", samples)
    dataset = CLASSES[kind](f"{place}/x", backend=backend, copy=True)
    for pack, sample in zip(dataset, samples * (len(dataset) // len(samples)), strict=True):
        assert as_plain(pack["media"]) == as_plain(sample.items)
        assert all(type(item.data) is bytes for item in pack["media"])
        assert pack["input_ids"].flags.writeable
        assert type(pack["media"]) is list


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mapped", [True, False])
def test_sets_have_the_key_where_the_shard_has_media(
    tmp_path: Path, backend: Any, mapped: bool, request: pytest.FixtureRequest
) -> None:
    """Small sets of many shards are read into memory, but not if that would lose the media."""
    if not mapped:
        request.getfixturevalue("no_maps")
    samples = media_samples(3, 8)
    write_media(tmp_path / "s0", samples[:3])
    write_samples(tmp_path / "s1", [sample.pack for sample in samples[3:5]])
    write_media(tmp_path / "s2", samples[5:])
    for dataset in (ShardSet.open(tmp_path, backend=backend, alike=False), open_dataset(tmp_path, backend=backend)):
        for each in (dataset, pickle.loads(pickle.dumps(dataset))):
            for index, (pack, sample) in enumerate(zip(each, samples, strict=True)):
                assert ("media" in pack) == (not 3 <= index < 5)
                assert as_plain(pack.get("media", sample.items)) == as_plain(sample.items)
                assert pack["input_ids"].tolist() == sample.pack.tokens
    write_samples(tmp_path / "text" / "s0", [sample.pack for sample in samples])
    alone = ShardSet.open(tmp_path / "text")
    assert (alone.in_memory is None) == mapped
    assert "media" not in alone[0]


def _items_of(dataset: Any, index: int) -> list[Any]:
    return as_plain(dataset[index]["media"])


# A process that is spawned imports Megatron, which takes seconds.
@pytest.mark.parametrize(
    ("root", "method"),
    [*((way, "fork") for way in WAYS), ("mmap", "spawn"), ("bucket pread", "spawn")],
    indirect=["root"],
)
def test_another_process_reads_the_same(root: tuple[Path, str, str], method: str) -> None:
    folder, place, backend = root
    samples = media_samples(7, 9)
    write_media(folder / "x", samples)
    datasets = [make(f"{place}/x", backend=backend) for make in CLASSES.values()]
    for dataset in datasets:
        dataset[0]  # a fork inherits open files
    with multiprocessing.get_context(method).Pool(1) as pool:
        for dataset in datasets:
            found = pool.apply_async(_items_of, (dataset, 4)).get(PATIENCE_SECONDS)
            assert found == as_plain(samples[4].items)


def test_runs_and_readers_of_a_format_give_them_too(tmp_path: Path) -> None:
    samples = media_samples(11, 30)
    write_media(tmp_path / "x", samples)
    expected = [as_plain(sample.items) for sample in samples]
    reader, shard = Reader(tmp_path / "x"), Shard(tmp_path / "x")
    assert [as_plain(reader.read(index)["media"]) for index in range(30)] == expected
    runs = list(checked_runs(shard.files, {}, lambda nbytes: None, shard.media))
    for run in (PackRun.joined(runs), *runs):
        assert [as_plain(run.pack(index)["media"]) for index in range(len(run))] == expected[: len(run)]
        part = run.subrun(3, 5)
        assert [as_plain(part.pack(index)["media"]) for index in range(2)] == expected[3:5]
        one = run.subrun(4, 5)
        assert as_plain(one.pack(0)["media"]) == expected[4]
    write_samples(tmp_path / "text", [sample.pack for sample in samples])
    assert "media" not in Reader(tmp_path / "text").read(0)


@pytest.mark.parametrize("read", [Reader.read, Shard.__getitem__], ids=["Reader", "Shard"])
@pytest.mark.parametrize(
    ("array", "value", "rule"), [("starts", 500, "M6"), ("lengths", 0, "M6"), ("kinds", 3, "M8"), ("blobs", 9, "M9")]
)
def test_an_item_that_cannot_be_one_is_an_error_with_its_place(
    tmp_path: Path, read: Callable[[Any, int], Any], array: str, value: int, rule: str
) -> None:
    samples = [media_sample([4], [item_of("image", 1, 2)]), media_sample([6], [item_of("audio", 0, 3, b"wave")])]
    write_media(tmp_path / "x", samples)
    files = reseal_media(with_entry(seven_files(tmp_path / "x"), array, 1, value))
    for suffix, raw in files.items():
        (tmp_path / f"x{suffix}").write_bytes(raw)
    opened = Reader(tmp_path / "x") if read is Reader.read else Shard(tmp_path / "x")
    assert as_plain(read(opened, 0)["media"]) == as_plain(samples[0].items)
    begin, code, _ = array_places(files[".media.items"])["starts" if array == "lengths" else array]
    place = begin + {"I": 4, "B": 1}[code]
    with pytest.raises(CorruptShardError, match=rf"x\.media\.items: byte {place}: .*rule {rule}"):
        read(opened, 1)


# ---- bytes that are read ----


class Touched(NamedTuple):
    """A range of bytes that was read: suffix of the file, start and end."""

    suffix: str
    begin: int
    end: int


@contextmanager
def touched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Touched]]:
    """Provide the ranges of ``.media.data`` and ``.media.items`` read by system calls or requests to a store."""
    found: list[Touched] = []

    def note(path: str, begin: int, nbytes: int) -> None:
        for suffix in (".media.data", ".media.items"):
            if path.endswith(suffix) and nbytes:
                found.append(Touched(suffix, begin, begin + nbytes))

    pread, reopened, get = PreadArray.read_bytes, ReopenedArray.read_bytes, MultiStorage.get

    def noted_pread(self: PreadArray, offset: int, out: Any) -> None:
        note(self._path, self._offset + offset, len(out))
        pread(self, offset, out)

    def noted_reopened(self: ReopenedArray, offset: int, out: Any) -> None:
        note(self._path, self.offset + offset, len(out))
        reopened(self, offset, out)

    def noted_get(self: MultiStorage, key: str, offset: int, nbytes: int, etag: str | None) -> bytes:
        note(key, offset, nbytes)
        return get(self, key, offset, nbytes, etag)

    with monkeypatch.context() as patch:
        patch.setattr(PreadArray, "read_bytes", noted_pread)
        patch.setattr(ReopenedArray, "read_bytes", noted_reopened)
        patch.setattr(MultiStorage, "get", noted_get)
        yield found


def bytes_in(ranges: list[Touched], suffix: str) -> set[int]:
    return {byte for each in ranges if each.suffix == suffix for byte in range(each.begin, each.end)}


def own_bytes(items: bytes, pack: int) -> dict[str, set[int]]:
    """Return the bytes of the two files that belong to one pack, computed from the arrays in FORMAT.md."""
    places, sizes = array_places(items), {"q": 8, "I": 4, "B": 1, "16s": 16}

    def entries(name: str, first: int, last: int) -> set[int]:
        begin, code, _ = places[name]
        return set(range(begin + sizes[code] * first, begin + sizes[code] * last))

    first, last = array_values(items, "item_offsets")[pack : pack + 2]
    blobs, offsets = array_values(items, "blobs")[first:last], array_values(items, "blob_offsets")
    own = entries("item_offsets", pack, pack + 2)
    for name in ("starts", "lengths", "kinds", "blobs"):
        own |= entries(name, first, last)
    for blob in blobs:
        own |= entries("blob_offsets", blob, blob + 2)
    data = {byte for blob in blobs for byte in range(offsets[blob], offsets[blob + 1])}
    return {".media.items": own, ".media.data": data}


def of_many_files(count: int = 24) -> list[MediaSample]:
    """Return packs with none, one and several items, including files of earlier packs, and one file twice."""
    packs, known = [], list[bytes]()
    for number in range(count):
        files = [b"%d of %d " % (each, number) * (30 + number) for each in range(number % 4)]
        files += known[number // 2 : number // 2 + number % 3] + files[:1]
        known += files
        packs.append(media_sample([3 * len(files) + 2], [item_of("image", 3 * i, 2, f) for i, f in enumerate(files)]))
    return packs


@pytest.mark.parametrize("root", [way for way in WAYS if way != "mmap"], indirect=True)
def test_a_cold_read_of_a_pack_touches_its_own_bytes_alone(
    root: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For maps, the kernel decides what is read (see test_media_writer.py)."""
    folder, place, backend = root
    samples = of_many_files()
    write_media(folder / "x", samples)
    items = seven_files(folder / "x")[".media.items"]
    header_nbytes, most = media_field(items, "header_nbytes"), 0
    for kind, make in CLASSES.items():
        for index in range(len(samples)):
            with touched(monkeypatch) as ranges:
                dataset = make(f"{place}/x", backend=backend)
                if kind.endswith("ShardSet"):
                    dataset.shard(0)
                elif kind.startswith("open_dataset"):
                    dataset._files.shards.open_shards([0])
                opened = [*ranges]
                del ranges[:]
                found = as_plain(dataset[index]["media"])
            assert found == as_plain(samples[index].items)
            assert not bytes_in(opened, ".media.data")
            ends = array_places(items)
            at_ends = {
                byte
                for name, count in (("item_offsets", len(samples)), ("blob_offsets", ends["blob_hashes"][2]))
                for entry in (0, count)
                for byte in range(ends[name][0] + 8 * entry, ends[name][0] + 8 * entry + 8)
            }
            # Opening reads the header (at least one small request) and the ends of two arrays.
            behind = bytes_in(opened, ".media.items") - set(range(header_nbytes)) - at_ends
            assert not behind or (is_remote(place) and max(behind) < 16 << 10)
            own = own_bytes(items, index)
            assert bytes_in(ranges, ".media.items") <= own[".media.items"]
            assert bytes_in(ranges, ".media.data") == own[".media.data"]
            data = sorted((each.begin, each.end) for each in ranges if each.suffix == ".media.data")
            assert all(end <= begin for (_, end), (begin, _) in pairwise(data))  # nothing is read twice
            most = max(most, len(own[".media.data"]))
    assert most > 0


@pytest.mark.parametrize("root", ["pread", "bucket pread"], indirect=True)
def test_files_that_lie_together_are_read_at_once(root: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, place, backend = root
    images = [item_of("image", 2 * i, 1, bytes([i]) * 50) for i in range(20)]
    write_media(folder / "x", [media_sample([40], images), media_sample([40], images[5:])])
    shard = Shard(f"{place}/x", backend=backend)
    for index in (0, 1):
        with touched(monkeypatch) as ranges:
            shard[index]
        assert [each.suffix for each in ranges].count(".media.data") == 1
        assert [each.suffix for each in ranges].count(".media.items") == 6
    with touched(monkeypatch) as ranges:
        write_media(folder / "y", [media_sample([2], []), media_sample([40], images)])
        shard = Shard(f"{place}/y", backend=backend)
        del ranges[:]
        assert shard[0]["media"] == []
    assert [each.suffix for each in ranges] == [".media.items"]


@pytest.mark.parametrize(("backend", "maps", "files"), [("mmap", 6, 6), ("pread", 0, 7), ("reopen", 1, 0)])
def test_an_open_shard_holds_one_map_or_descriptor_of_each_of_its_files(
    tmp_path: Path, backend: Any, maps: int, files: int
) -> None:
    write_media(tmp_path / "x", media_samples(1, 9))
    shard = Shard(tmp_path / "x", backend=backend)
    assert np.sum([len(pack["media"]) for pack in shard]) > 0
    assert maps_of(tmp_path) <= maps
    assert files_of(tmp_path) <= files
