"""All ways to make batches reject packs with images or audio, carry these, or read only text, as requested."""

from __future__ import annotations

import inspect
import json
import pickle
import pkgutil
from argparse import Namespace
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from blends import CAPACITY, build, config_of
from bridge_modules import OURS
from live_catalogs import loader
from media_processors import llava, png
from media_samples import MediaSample, media_samples, write_media
from sample_packs import write_samples
from torch.utils.data import ConcatDataset, DataLoader, Subset
from training_twin import lone_process, pretrain_script

from megatron_sft_idx.chat.inputs import JsonPiece
from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.dataset import SFTIndexedDataset
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.formats.packed_dataset import open_dataset
from megatron_sft_idx.layout.column import PAIR
from megatron_sft_idx.live import Catalog, Limits, ProducerState
from megatron_sft_idx.live.chunks import LiveChunks
from megatron_sft_idx.live.live_loader import LiveLoader
from megatron_sft_idx.shard import Shard, ShardWriter
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.tokenize import EncodingOptions, RowEncoder
from megatron_sft_idx.training.batch import BatchAssembler, whole_batch
from megatron_sft_idx.training.loader import BatchLoader
from megatron_sft_idx.training.media import keep_items
from megatron_sft_idx.training.provider import build_datasets, train_valid_test_datasets_provider
from megatron_sft_idx.training.rows import PackedBatchSampler, rows_of
from megatron_sft_idx.training.sources import JoinedPacks, PlannedPacks, PlanOptions, StoredPacks
from megatron_sft_idx.training.torch_packs import TorchPacks, as_torch

Batches = list[Any]
COUNT = 12


@pytest.fixture(scope="module", autouse=True)
def script() -> Iterator[ModuleType]:
    with lone_process() as module:
        yield module


def write_shards(folder: Path, *, media: bool) -> None:
    """Write two shards, one of pairs, and a catalog of two shards: the same packs with or without images and audio."""
    samples = [sample for sample in media_samples(1, 2 * COUNT) if len(sample.pack.tokens) <= CAPACITY]
    halves = {"a": samples[: len(samples) // 2], "b": samples[len(samples) // 2 :]}
    for name, packs in halves.items():
        _write(folder / name, packs, media)
    with ShardWriter(folder / "pairs", media=media, columns={"pair": PAIR}, capacity=CAPACITY) as writer:
        for number in range(4):
            items = {"media": media_samples(number, 1)[0].items[:0]} if media else {}
            pair = {"pair": [[number, 0], [number, 1]]}
            writer.add_pack([1 + number, 2, 3, 4], [1, 0, 1, 0], [0, 2], columns=pair, **items)  # type: ignore[arg-type]
    catalog = Catalog(folder / "catalog")
    (folder / "catalog").mkdir()
    _write(Path(catalog.shard_prefix(0)), halves["b"], False)  # the first shard has only text in both cases
    _write(Path(catalog.shard_prefix(1)), halves["a"], media)
    catalog.write_producer(ProducerState(Limits(CAPACITY, 8), published=2))
    catalog.write_end(2)


def _write(prefix: Path, samples: Sequence[MediaSample], media: bool) -> None:
    options = {"capacity": CAPACITY, "pad_id": 0, "token_dtype": np.int32}
    if media:
        write_media(prefix, samples, **options)
    else:
        write_samples(prefix, [sample.pack for sample in samples], **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("text", "media")}
    for name, folder in made.items():
        write_shards(folder, media=name == "media")
    return made


# ---- every way to make batches, as a function of a folder and options ----


class Anything:
    """Packs of an unknown class."""

    def __init__(self, packs: Any) -> None:
        self.packs = packs

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> Any:
        return self.packs[index]


def collated(dataset: TorchPacks) -> Batches:
    return list(DataLoader(dataset, batch_size=2, collate_fn=dataset.collate))


def of_torch(source_of: Callable[[Path], Any], **more: Any) -> Callable[..., Batches]:
    return lambda folder, **options: collated(as_torch(source_of(folder), **more, **options))


def shards_of(folder: Path) -> ShardSet:
    return ShardSet([str(folder / "a"), str(folder / "b")])


def assembled(source: Any, **options: Any) -> Batches:
    order = [[i, source.num_packs - 1 - i] for i in range(source.num_packs)]
    return list(BatchLoader(BatchAssembler(source, CAPACITY, **options), order, copy=True))


def in_workers(folder: Path, **options: Any) -> Batches:
    assembler = BatchAssembler(planned(folder), CAPACITY, **options)
    order = [[i, len(assembler) - 1 - i] for i in range(len(assembler))]
    return list(DataLoader(assembler, batch_sampler=order, collate_fn=whole_batch, num_workers=2))


def planned(folder: Path) -> PlannedPacks:
    return PlannedPacks(shards_of(folder), PlanOptions(CAPACITY), folder / "plans")


def every_row(dataset: Any, *, media: Any = None, **_: Any) -> Batches:
    """Return the rows of a data set. With a media step they come in batches, here of one row."""
    numbers = range(len(dataset))
    if media is None:
        return [dataset[number] for number in numbers]
    rows = rows_of(dataset)
    return [whole_batch(rows.__getitems__([number])) for number in numbers]


def of_megatron(*names: str, **more: Any) -> Callable[..., Batches]:
    def batches(folder: Path, **options: Any) -> Batches:
        (dataset, *_) = build(config_of(([str(folder / name) for name in names], None), **more, **options))
        return every_row(dataset, **options)

    return batches


def loaded(folder: Path, **options: Any) -> Batches:
    """Return the batches of a data set from a worker process and from a loader."""
    (dataset, *_) = build(config_of(([str(folder / "a"), str(folder / "b")], None), **options))
    rows = rows_of(dataset)
    one_rank = {"micro_batch_size": 1, "data_parallel_rank": 0, "data_parallel_size": 1}
    sampler = PackedBatchSampler(rows, consumed_samples=0, **one_rank)  # type: ignore[arg-type]
    copies = list(BatchLoader(rows.assembler, rows.micro_batches(sampler), copy=True))
    members = [pickle.loads(pickle.dumps(each)) for each in dataset.datasets]
    return [*copies, *(row for each in members for row in every_row(each, **options))]


def in_validation_alone(folder: Path, **options: Any) -> Batches:
    blends = [([str(folder / "catalog" / "shard-000000")], None), ([str(folder / "a")], None), None]
    valid = build(config_of(None, blend_per_split=blends, **options))[1]
    return every_row(valid, **options)


def arguments(folder: Path, **given: Any) -> Namespace:
    names = ("data_args_path", "train_data_path", "valid_data_path", "test_data_path", "per_split_data_args_path")
    unset = dict.fromkeys([*names, "data_cache_path"])
    usual = {"data_path": [str(folder / "a")], "seed": 5, "seq_length": CAPACITY, "split": "1,0,0"}
    return Namespace(**{**unset, **usual, "global_batch_size": 1, **given})


def provided(folder: Path, **options: Any) -> Batches:
    train, *_ = train_valid_test_datasets_provider([None, 0, 0], args=arguments(folder), **options)
    return every_row(train, **options)


def provided_by_arguments(folder: Path, **options: Any) -> Batches:
    """Return batches as in a script that adds ``--ignore-media`` to Megatron's arguments."""
    train, *_ = train_valid_test_datasets_provider([None, 0, 0], args=arguments(folder, **options))
    (again, *_) = build_datasets(arguments(folder, **options), [None, 0, 0])
    return [each[index] for each in (train, again) for index in range(len(each))]


def live(folder: Path, **options: Any) -> Batches:
    with loader(folder / "catalog", seq_length=CAPACITY, shuffle=False, **options) as batches:
        return [copied(batch) for batch in batches]


def copied(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in batch.items()}


def by_script(where: str, *more: str) -> Callable[..., Batches]:
    def batches(folder: Path, **options: Any) -> Batches:
        flags = ["--ignore-media"] * options.pop("ignore_media", False)
        assert not options
        command = ["--data-path", where.format(folder), "--seq-length", str(CAPACITY), "--vocab-size", "512", *more]
        seen: Batches = []

        def observe(batch: dict[str, torch.Tensor]) -> None:
            rows = range(len(batch["tokens"]))
            seen.extend({name: tensor[row].clone() for name, tensor in batch.items()} for row in rows)

        module = pretrain_script()
        module.pretrain(module.parse_arguments([*command, *flags]), observe)
        return seen

    return batches


def paired(folder: Path, **options: Any) -> Batches:
    source = StoredPacks(ShardSet([str(folder / "pairs")], columns=["pair"]))
    return list(BatchLoader(BatchAssembler(source, CAPACITY, columns=["pair"], **options), [[0, 1]], copy=True))


A_STEP = ("--train-iters", "1", "--global-batch-size", "4")
WAYS: dict[str, Callable[..., Batches]] = {
    "as_torch of a path": of_torch(lambda folder: folder / "a"),
    "as_torch of a list": of_torch(lambda folder: [folder / "a", folder / "b"]),
    "as_torch of a Shard": of_torch(lambda folder: Shard(folder / "a")),
    "as_torch of a SFTIndexedDataset": of_torch(lambda folder: SFTIndexedDataset(str(folder / "a"))),
    "as_torch of open_dataset": of_torch(lambda folder: open_dataset(folder / "a"), layout="padded"),
    "as_torch of a ShardSet": of_torch(shards_of, layout="padded"),
    "as_torch of a blend": of_torch(lambda folder: [0.5, folder / "a", 0.5, folder / "b"], num_packs=9),
    "as_torch of a Subset": of_torch(lambda folder: Subset(Shard(folder / "a"), [1, 0])),  # type: ignore[arg-type]
    "as_torch of a ConcatDataset": of_torch(
        lambda folder: ConcatDataset([Shard(folder / "a"), open_dataset(folder / "b")])  # type: ignore[list-item]
    ),
    "as_torch of a class that nobody knows": of_torch(lambda folder: Anything(Shard(folder / "a"))),
    "as_torch of pairs": of_torch(lambda folder: folder / "pairs", preferences=True),
    "TorchPacks": lambda folder, **options: collated(TorchPacks(Shard(folder / "a"), "padded", **options)),
    "StoredPacks": lambda folder, **options: assembled(StoredPacks(shards_of(folder)), **options),
    "StoredPacks of a part": lambda folder, **options: assembled(StoredPacks(shards_of(folder), 1, 4), **options),
    "StoredPacks, unpickled": lambda folder, **options: assembled(
        pickle.loads(pickle.dumps(StoredPacks(shards_of(folder)))), **options
    ),
    "PlannedPacks": lambda folder, **options: assembled(planned(folder), **options),
    "PlannedPacks, unpickled": lambda folder, **options: assembled(
        pickle.loads(pickle.dumps(planned(folder))), **options
    ),
    "JoinedPacks": lambda folder, **options: assembled(
        JoinedPacks([StoredPacks(ShardSet([str(folder / name)])) for name in "ab"]), **options
    ),
    "JoinedPacks of plans": lambda folder, **options: assembled(
        JoinedPacks([StoredPacks(ShardSet([str(folder / "b")])), planned(folder)]), **options
    ),
    "workers": in_workers,
    "pairs": paired,
    "PackedSFTDataset": of_megatron("a"),
    "PackedSFTDataset of a blend": of_megatron("a", "b"),
    "PackedSFTDataset, packed at start-up": of_megatron("a", index_only_packing=True),
    "PackedSFTDataset of single sequences": of_megatron("a", single_sequences=True),
    "rows and their loader": loaded,
    "validation alone": in_validation_alone,
    "provider": provided,
    "provider, by arguments": provided_by_arguments,
    "LiveLoader": live,
    "script": by_script("{}/a", *A_STEP),
    "script --repack": by_script("{}/a", "--repack", *A_STEP),
    "script of live data": by_script("live:{}/catalog", "--train-iters", "20", "--live-window", "0"),
}


def plain(batches: Batches) -> list[list[tuple[str, Any]]]:
    """Return batches in a form for comparison, sorted, because the order of an epoch depends on the id of the shard."""

    def value(of: Any) -> Any:
        return of.tolist() if isinstance(of, torch.Tensor | np.ndarray) else of

    found = [sorted((name, value(each)) for name, each in batch.items() if name != "dataset_id") for batch in batches]
    return sorted(found, key=repr)


@pytest.mark.parametrize("way", WAYS)
def test_media_are_refused_in_one_sentence_and_taken_as_text_with_leave(
    way: str, folders: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    make = WAYS[way]
    expected = plain(make(folders["text"]))
    with pytest.raises(FormatError) as caught:
        make(folders["media"])
    message = str(caught.value)
    assert message.count("contains images or audio") == 1
    assert "pass ignore_media=True (--ignore-media)" in message
    assert "\n" not in message
    assert "pass media=MediaInputs(FOLDER)" in message
    assert any(name in message for name in ("media", "pack 0"))
    found = plain(make(folders["media"], ignore_media=True))
    assert len(expected) > 0
    if way not in ("script", "script --repack"):  # their single step takes packs in an order that the shard determines
        assert found == expected
    assert len(found) == len(expected)
    assert plain(make(folders["text"], ignore_media=True)) == expected


# A user's script makes the media step itself; Megatron's packing scheduler forwards none.
CARRYING = [way for way in WAYS if "script" not in way and "single" not in way and "arguments" not in way]


def items_by_sequence(*prefixes: Path) -> dict[tuple[int, ...], list[tuple[str, int, int, bytes]]]:
    """Return the images and audio of every sequence in the shards, by its tokens."""
    found = {}
    for prefix in prefixes:
        for pack in Shard(prefix):
            bounds = pack["seq_boundaries"].tolist()
            for begin, end in pairwise(bounds):
                items = [item for item in pack.get("media", []) if begin <= item.start < end]
                key = tuple(pack["input_ids"][begin:end].tolist())
                found[key] = [(item.kind, item.start - begin, item.length, bytes(item.data)) for item in items]
    return found


def sequences_of(batch: dict[str, Any]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield row, first position and tokens of each sequence of a batch, or of one row without a batch dimension."""
    if "attention_mask" in batch:
        for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"], strict=True)):
            yield row, 0, tuple(ids[mask == 1].tolist())
        return
    if "input_ids" in batch:
        ids = batch["input_ids"][0].tolist()
        begins = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist()
        for begin, end in pairwise([*begins, len(ids)]):
            yield 0, begin, tuple(ids[begin:end])
        return
    for row, (ids, bounds) in enumerate(
        zip(batch["tokens"].reshape(-1, CAPACITY).tolist(), torch.atleast_2d(batch["cu_seqlens"]), strict=True)
    ):
        ends = bounds.unique().tolist()
        for begin, end in pairwise(ends):
            yield row, begin, tuple(ids[begin:end])


@pytest.mark.parametrize("way", CARRYING)
def test_batches_carry_the_media_of_their_sequences(way: str, folders: dict[str, Path]) -> None:
    """The rest of a batch equals the batch of the same chats without images and audio."""
    make, folder = WAYS[way], folders["media"]
    shards = ["catalog/shard-000000", "catalog/shard-000001"] if way == "LiveLoader" else ["a", "b", "pairs"]
    known = items_by_sequence(*(folder / shard for shard in shards))
    batches, num_items = make(folder, media=keep_items), 0
    for batch in batches:
        expected = []
        for number, (row, begin, ids) in enumerate(sequences_of(batch)):
            expected += [(kind, begin + at, *rest, row, number) for kind, at, *rest in known.get(ids, [])]
        found = [(item.kind, item.start, item.length, bytes(item.data), item.row) for item in batch.pop("media")]
        assert found == [each[:-1] for each in expected]
        num_items += len(found)
    assert (num_items > 0) == ("pairs" not in way)
    texts = make(folders["text"], media=keep_items)
    assert not any(batch.pop("media") for batch in texts)
    assert plain(batches) == plain(texts)


def test_every_source_of_batches_has_a_way_here() -> None:
    """A new class that provides packs for batches needs a line above."""
    found = set()
    for folder in ("training", "live"):
        package = import_module(f"megatron_sft_idx.{folder}")
        names = {f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)}
        for name in names.difference(OURS):  # these read packs through StoredPacks
            members = vars(import_module(name)).values()
            classes = [each for each in members if inspect.isclass(each)]
            found |= {each.__name__ for each in classes if inspect.isfunction(getattr(each, "segments", None))}
            found |= {each.__name__ for each in classes if hasattr(each, "may_not_come")}
    assert found == {
        *("StoredPacks", "PlannedPacks", "JoinedPacks", "OpenShards", "MixedPacks"),
        "PretrainingPacks",  # text only
        "LegacySource",  # a format without media
        "CatalogShards",
        "LiveChunks",  # below
        *("PackSource", "LiveShards"),  # base classes of the others
    }


def test_live_data_are_read_up_to_the_first_shard_with_media(folders: dict[str, Path]) -> None:
    """The producer adds a shard with media during training."""
    with loader(folders["media"] / "catalog", seq_length=CAPACITY, shuffle=False) as batches:
        count = len(Shard(Catalog(folders["media"] / "catalog").shard_prefix(0)))
        for _ in range(count):
            next(batches)
        state = batches.state_dict()
        with pytest.raises(FormatError, match=r"shard-000001: contains images or audio"):
            next(batches)
    goes_on = loader(folders["media"] / "catalog", seq_length=CAPACITY, shuffle=False, ignore_media=True)
    with goes_on as batches:
        batches.load_state_dict(state)
        rest = plain([{name: each.clone() for name, each in batch.items()} for batch in batches])
    whole = live(folders["text"])
    assert rest == plain(whole[count:])


def test_chats_with_images_in_live_chunks(tmp_path: Path) -> None:
    """Lines that a processor expands are chats with images, even without a shard."""
    folder = tmp_path / "llava"
    llava(folder)
    image = "data:image/png;base64," + b64encode(png(30, 40)).decode()
    parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": "?"}]
    row = {
        "messages": [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": [{"type": "text", "text": "the cat"}]},
        ]
    }
    line = json.dumps(row).encode() + b"\n"
    (tmp_path / "chunk_00000.jsonl").write_bytes(2 * line)
    options = EncodingOptions(str(folder), processor=str(folder), rows=RowOptions(media=True))
    shards = LiveChunks(str(tmp_path), Limits(256, 1), options, num_chunks=1)
    with (
        loader(shards, seq_length=256) as batches,
        pytest.raises(FormatError, match=r"chunk_00000\.jsonl: contains images"),
    ):
        next(batches)
    assert isinstance(batches, LiveLoader)
    piece = RowEncoder(options).encode(JsonPiece("x", 1, len(line), line, np.array([len(line) - 1]), False))
    assert len(piece.media[0]) == 1
    with loader(shards, seq_length=256, media=keep_items) as batches:
        for batch in batches:
            (item,) = batch["media"]
            assert (item.kind, item.start, item.length) == piece.media[0][0][:3]
            assert bytes(item.data) == png(30, 40)
    with loader(shards, seq_length=256, ignore_media=True) as batches:
        for batch in batches:
            assert batch["tokens"][0, : len(piece.input_ids)].tolist() == piece.input_ids.tolist()
            assert batch["loss_mask"].sum() == piece.loss_mask.sum()
