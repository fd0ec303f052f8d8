"""Images and audio in batches: their positions, their order, and the tensors of ``MediaInputs``."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blends import build, config_of, write_packs
from hypothesis import given, settings
from hypothesis import strategies as st
from media_processors import llava, png, qwen2_audio, wav
from media_samples import item_of, media_samples, reseal_media, seven_files, with_entry, write_media
from object_folders import serve_folder
from PIL import Image
from torch.utils.data import DataLoader

from megatron_sft_idx.errors import CorruptShardError, FormatError
from megatron_sft_idx.layout.media_layout import MediaItem
from megatron_sft_idx.live import Catalog, Limits, ProducerState
from megatron_sft_idx.live.live_loader import LiveConfig, LiveLoader
from megatron_sft_idx.shard import Shard, ShardWriter
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.batch import BatchAssembler, whole_batch
from megatron_sft_idx.training.loader import BatchLoader
from megatron_sft_idx.training.media import BatchItem, MediaBatch, MediaInputs, keep_items
from megatron_sft_idx.training.rows import EncoderCost, PackedBatchSampler, rows_of
from megatron_sft_idx.training.sources import PlannedPacks, PlanOptions, StoredPacks, find_items
from megatron_sft_idx.training.torch_packs import as_torch

CAPACITY = 64


def write_random(prefix: Path, seed: int, count: int = 30) -> str:
    write_media(prefix, media_samples(seed, count), capacity=CAPACITY, pad_id=0, token_dtype=np.int32)
    return str(prefix)


# ---- found by the positions of tokens ----


def by_reading_packs(shard: Shard, starts: Sequence[int], lengths: Sequence[int]) -> list[tuple[Any, ...]]:
    """The slow twin of ``find_items``: read every pack, and search all sequences for each item."""
    places = [
        (int(begin) + item.start, item)
        for begin, pack in zip(shard.token_offsets, shard, strict=False)
        for item in pack["media"]
    ]
    return [
        (number, position - start, item.length, item.kind, bytes(item.data))
        for number, (start, length) in enumerate(zip(starts, lengths, strict=True))
        for position, item in places
        if start <= position < start + length
    ]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_items_are_found_for_any_sequences_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, seed: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("found")
    shard = Shard(write_random(folder / "x", seed, 8))
    source = StoredPacks(ShardSet([str(folder / "x")]))
    packs = data.draw(st.lists(st.integers(0, len(shard) - 1), min_size=1, max_size=6))
    segments = source.segments(np.array(packs))
    found = find_items(source, segments)
    columns = found.segments, *found.items
    media = [
        (number, start, length, {1: "image", 2: "audio"}[kind], bytes(found.finders[0].bytes_of_each([blob])[blob]))
        for number, start, length, kind, blob in zip(*(each.tolist() for each in columns), strict=True)
    ]
    assert media == by_reading_packs(shard, segments.starts.tolist(), segments.lengths.tolist())


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [("starts", 3, "M6"), ("lengths", 0, "M6"), ("lengths", 4, "M7"), ("kinds", 9, "M8"), ("blobs", 5, "M9")],
)
def test_places_that_break_a_rule_are_errors(tmp_path: Path, name: str, value: int, rule: str) -> None:
    """All checksums are correct, so only the rules can detect it."""
    with ShardWriter(tmp_path / "x", media=True, capacity=CAPACITY, durable=False) as writer:
        writer.add_pack(range(8), [0] * 8, [0, 4], media=[item_of("image", 0, 2), item_of("image", 2, 1)])
    damaged = reseal_media(with_entry(seven_files(tmp_path / "x"), name, 0, value))
    for suffix, data in damaged.items():
        Path(f"{tmp_path / 'x'}{suffix}").write_bytes(data)
    assembler = BatchAssembler(StoredPacks(ShardSet([str(tmp_path / "x")])), CAPACITY, media=keep_items)
    with pytest.raises(CorruptShardError, match=rf"\(rule {rule}\)"):
        assembler.assemble([0])


# ---- positions in rows ----


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1000), multiple=st.sampled_from([1, 2, 3, 4, 8]), planned=st.booleans())
def test_padding_stands_between_sequences_and_never_inside_an_item(
    tmp_path_factory: pytest.TempPathFactory, seed: int, multiple: int, planned: bool
) -> None:
    """Sequences are padded to a multiple inside their row, for context parallelism: an item keeps its tokens together,
    inside the tokens of its sequence."""
    folder = tmp_path_factory.mktemp("rows")
    shards = ShardSet([write_random(folder / "x", seed, 6)])
    length = 240
    source: Any = PlannedPacks(shards, PlanOptions(length, multiple)) if planned else StoredPacks(shards)
    assembler = BatchAssembler(source, length, sequence_multiple=multiple, media=keep_items, padding_mask=True)
    batch = assembler.assemble(range(len(assembler)))
    tokens_of = {}
    for pack in Shard(folder / "x"):
        for begin, end in pairwise(pack["seq_boundaries"].tolist()):
            for item in pack["media"]:
                if begin <= item.start < end:
                    tokens = pack["input_ids"][item.start : item.start + item.length].tolist()
                    tokens_of.setdefault((item.kind, bytes(item.data)), []).append(tokens)
    bounds = batch["cu_seqlens_padded"] if multiple > 1 else batch["cu_seqlens"]
    for item in batch["media"]:
        inside = slice(item.start, item.start + item.length)
        assert not batch["padding_mask"][item.row, inside].any()
        begins = bounds[item.row].unique().tolist()
        assert any(begin <= item.start and item.start + item.length <= end for begin, end in pairwise(begins))
        tokens_of[item.kind, bytes(item.data)].remove(batch["tokens"][item.row, inside].tolist())
        assert not batch["loss_mask"][item.row, max(item.start - 1, 0) : item.start + item.length - 1].any()
    assert not any(tokens_of.values())


# ---- the order, on any ranks ----


def carried(dataset: Any, ranks: int, micro: int, batch: int, consumed: int = 0, **options: Any) -> list[Any]:
    """Return the items of each global batch by row, from all ranks together."""
    rows, steps = rows_of(dataset), list[list[Any]]()
    for rank in range(ranks):
        sampler = PackedBatchSampler(
            rows,
            consumed_samples=consumed,
            micro_batch_size=micro,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            global_batch_size=batch,
            **options,
        )
        made = list(BatchLoader(rows.assembler, rows.micro_batches(sampler), copy=True))
        each = batch // (ranks * micro)
        for number, one in enumerate(made):
            step = number // each
            steps += [[]] * (step + 1 - len(steps))
            steps[step] = [*steps[step], *by_row(one)]
    return [sorted(step) for step in steps]


def by_row(batch: dict[str, Any]) -> list[Any]:
    """Return for each row its tokens and its items in order."""
    rows: list[list[Any]] = [[] for _ in batch["tokens"]]
    for item in batch["media"]:
        rows[item.row].append((item.kind, item.start, item.length, bytes(item.data)))
    return [(tokens.tolist(), items) for tokens, items in zip(batch["tokens"], rows, strict=True)]


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("planned", [False, True])
def test_a_run_goes_on_with_the_same_media_on_other_ranks(tmp_path: Path, planned: bool, balance: bool) -> None:
    """The data is a shuffled blend of shards with media and with text only. The run stops in the middle of an epoch."""
    paths = [
        write_random(tmp_path / "a", 1),
        write_packs(tmp_path / "text", 20, capacity=CAPACITY),
        write_random(tmp_path / "b", 2),
    ]
    blend = paths, [0.5, 0.2, 0.3]
    (dataset, *_) = build(
        config_of(blend, sequence_length=CAPACITY, media=keep_items, index_only_packing=planned), (96, 0, 0)
    )
    whole = carried(dataset, 2, 2, 12, balance_attention=balance)
    assert len(whole) == 8
    assert sum(len(items) for step in whole for _, items in step) > 50
    for ranks, micro in ((1, 4), (3, 2), (6, 1), (2, 3)):
        assert carried(dataset, ranks, micro, 12, consumed=36, balance_attention=balance) == whole[3:]


def test_of_a_remote_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far").mkdir()
    near = write_random(tmp_path / "far" / "x", 5)
    root = serve_folder(tmp_path / "far", tmp_path / "msc.json", monkeypatch)
    batches = {}
    for prefix in (near, f"{root}/x"):
        source = StoredPacks(ShardSet([prefix]))
        order = np.random.default_rng(1).permutation(source.num_packs).reshape(-1, 5)
        loader = BatchLoader(BatchAssembler(source, CAPACITY, media=keep_items), order, copy=True)
        batches[prefix] = [by_row(batch) for batch in loader]
    assert batches[near] == batches[f"{root}/x"]
    assert sum(len(items) for batch in batches[near] for _, items in batch)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 1, 2)])
def test_live_data_go_on_with_all_media_on_other_ranks(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """Every pack comes once, with its images and audio, for any number of ranks before and after."""
    catalog = Catalog(tmp_path)
    expected = []
    for number in range(4):
        prefix = catalog.shard_prefix(number)
        write_random(Path(prefix), number, 9)
        for pack in Shard(prefix):
            items = [(item.kind, item.start, item.length, bytes(item.data)) for item in pack["media"]]
            tokens = pack["input_ids"].tolist()
            expected.append((tokens + [0] * (CAPACITY - len(tokens)), items))
    catalog.write_producer(ProducerState(Limits(CAPACITY, 8), published=4))
    catalog.write_end(4)
    found: list[Any] = []
    states: list[Any] = []
    for size in sizes:
        after = []
        for rank in range(size):
            config = LiveConfig(rank, size, CAPACITY, window=2, media=keep_items)
            with LiveLoader(tmp_path, config) as batches:
                if states:
                    batches.load_state_dict(states)
                for batch in islice(batches, None if size == sizes[-1] else 3):
                    found += by_row(batch)
                after.append(batches.state_dict())
        states = json.loads(json.dumps(after))
    # Rows that fill the last step come twice.
    assert {repr(row) for row in found} == {repr(row) for row in expected}


# ---- costs of encoders ----


def test_the_work_of_encoders_is_dealt_out_evenly_too(tmp_path: Path) -> None:
    """Packs have equal lengths, so by attention they would count as equal."""
    rng = np.random.default_rng(3)
    numbers = rng.integers(0, 30, 64)
    with ShardWriter(tmp_path / "x", media=True, capacity=CAPACITY, pad_id=0, durable=False) as writer:
        for count in numbers.tolist():
            kinds = ["image" if at % 2 else "audio" for at in range(count)]
            items = [MediaItem(kind, 2 * at, 2, b"x") for at, kind in enumerate(kinds)]  # type: ignore[arg-type]
            writer.add_pack(range(60), [0] * 60, [0], media=items)
    images, audio = numbers // 2, numbers - numbers // 2
    real_work = 50_000 * images + 7_200_000 * audio
    costs = {"image": 100, "audio": EncoderCost(7.2, per_item=30)}
    spreads = {}
    for name, options in (("default", {}), ("own", {"media_costs": costs}), ("text", {"media_costs": {}})):
        (dataset, *_) = build(config_of(str(tmp_path / "x"), sequence_length=CAPACITY, media=keep_items, **options))
        rows = rows_of(dataset)
        packs = rows.packs(np.arange(64))
        an_image, a_recording = {"default": (50_000, 7_200_000), "own": (200, 44), "text": (0, 0)}[name]
        work = an_image * images + a_recording * audio
        found = rows.sample_costs(np.arange(64))
        assert found.tolist() == (3600 + work[packs]).tolist()
        assert pickle.loads(pickle.dumps(rows)).sample_costs(np.arange(64)).tolist() == found.tolist()
        of_ranks = []
        for rank in range(4):
            one = {"micro_batch_size": 4, "data_parallel_rank": rank, "data_parallel_size": 4, "global_batch_size": 64}
            sampler = PackedBatchSampler(rows, consumed_samples=0, balance_attention=True, **one)  # type: ignore[arg-type]
            of_ranks.append(sum(int(real_work[rows.packs(samples)].sum()) for samples in sampler))
        spreads[name] = (max(of_ranks) - min(of_ranks)) / max(of_ranks)
    assert spreads["default"] < 0.02
    assert spreads["text"] > 0.1  # in the original order if encoders cost nothing


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"images": 5}, "unknown kind 'images'; the kinds are image, audio"),
        ({"image": -1}, "-1 for image, expected numbers from 0"),
        ({"image": float("nan")}, "nan for image"),
        ({"audio": float("inf")}, "inf for audio"),
        ({"audio": "5"}, "'5' for audio"),
        ({"image": True}, "True for image"),
        (5, "5, expected a dict"),
    ],
)
def test_costs_that_say_nothing_are_errors(tmp_path: Path, costs: Any, message: str) -> None:
    """Ranks would be balanced by unintended numbers, or by the smallest integer."""
    path = write_random(tmp_path / "x", 1)
    with pytest.raises(FormatError, match=f"media_costs: {message}"):
        config_of(path, sequence_length=CAPACITY, media=keep_items, media_costs=costs)


def test_options_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    path = write_random(tmp_path / "x", 1)
    for make in (
        lambda **options: BatchAssembler(StoredPacks(ShardSet([path])), CAPACITY, **options),
        lambda **options: as_torch(path, **options),
        lambda **options: config_of(path, sequence_length=CAPACITY, **options),
        lambda **options: LiveConfig(0, 1, CAPACITY, **options),
    ):
        with pytest.raises(FormatError, match="media and ignore_media cannot be combined"):
            make(media=keep_items, ignore_media=True)
    with pytest.raises(FormatError, match="media_costs only apply to batches with images"):
        config_of(path, sequence_length=CAPACITY, ignore_media=True, media_costs={"image": 5})
    with pytest.raises(FormatError, match="media: Megatron's packing scheduler"):
        config_of(path, sequence_length=CAPACITY, media=keep_items, single_sequences=True)


@pytest.mark.parametrize("media", ["data/processor", MediaInputs, True, [keep_items], 5])
def test_what_is_no_media_step_is_refused_at_once(tmp_path: Path, media: Any) -> None:
    path = write_random(tmp_path / "x", 1)
    for make in (
        lambda: BatchAssembler(StoredPacks(ShardSet([path])), CAPACITY, media=media),
        lambda: as_torch(path, media=media),
        lambda: config_of(path, sequence_length=CAPACITY, media=media),
    ):
        with pytest.raises(FormatError, match=r"media: .*, expected MediaInputs\(FOLDER\)"):
            make()


@pytest.mark.parametrize(
    ("made", "message"), [(None, "returned None, expected a dict"), ({"loss_mask": 1, "labels": 1}, "returned 'l")]
)
def test_steps_add_to_a_batch_and_replace_nothing(tmp_path: Path, made: Any, message: str) -> None:
    path = write_random(tmp_path / "x", 1)
    packs = as_torch(path, media=lambda batch: made)
    with pytest.raises(FormatError, match=f"media: the step {message}"):
        packs.collate([packs[0]])
    with pytest.raises(FormatError, match=f"media: the step {message}"):
        BatchAssembler(StoredPacks(ShardSet([path])), CAPACITY, media=lambda batch: made).assemble([0])


# ---- rows one by one ----


class Chosen(torch.utils.data.Dataset[Any]):
    """Some samples of a data set that a ``DataLoader`` can only request one by one."""

    def __init__(self, dataset: Any, samples: Sequence[int]) -> None:
        self.dataset, self.samples = dataset, samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.samples[index]]


def test_rows_that_are_stacked_one_by_one_do_not_lose_their_images(tmp_path: Path) -> None:
    """torch stacks rows by the names in the first row. A blend of Megatron returns single rows."""

    def counted(batch: MediaBatch) -> dict[str, Any]:
        return {"count": torch.tensor([len(batch.items)])} if batch.items else {}

    paths = [write_random(tmp_path / "a", 1), write_packs(tmp_path / "text", 20, capacity=CAPACITY)]
    (blend, *_) = build(config_of((paths, [0.5, 0.5]), sequence_length=CAPACITY, media=counted), (40, 0, 0))
    has_items = ["count" in rows_of(blend).assembler.rows([pack]).media for pack in rows_of(blend).packs(range(40))]
    text, image = has_items.index(False), has_items.index(True)
    for samples in ([text, image], [image, text], [image], [text]):
        with pytest.raises(FormatError, match=r"rows_of\(dataset\)"):
            next(iter(DataLoader(Chosen(blend, samples), batch_size=2)))


def test_rows_of_a_blend_whose_index_was_not_opened_yet(tmp_path: Path) -> None:
    """With defer_npy_index_mmap, Megatron opens the index only when a sample is read, which is an error here."""
    paths = [write_random(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 2))]
    (blend, *_) = build(config_of((paths, [0.5, 0.5]), sequence_length=CAPACITY, media=keep_items), (40, 0, 0))
    expected = rows_of(blend).packs(range(40)).tolist()
    for name in ("dataset_index", "dataset_sample_index"):
        np.save(tmp_path / f"{name}.npy", getattr(blend, name))
        setattr(blend, f"path_to_{name}", tmp_path / f"{name}.npy")
        setattr(blend, name, None)
    blend.config.defer_npy_index_mmap = True
    assert rows_of(blend).packs(range(40)).tolist() == expected


# ---- MediaInputs ----


def media_batch(tokens: Sequence[int], items: Sequence[MediaItem]) -> MediaBatch:
    """Return a batch of one row with one sequence."""
    placed = [BatchItem(item.kind, item.start, item.length, item.data, 0, 0) for item in items]
    ids = torch.tensor([tokens])
    zero = np.zeros(1, np.int64)
    return MediaBatch(ids, torch.arange(len(tokens))[None], zero, zero, np.array([len(tokens)]), placed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processor") / "llava"


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    return llava(folder)


@pytest.fixture(scope="module")
def inputs(processor: Any, folder: Path) -> MediaInputs:
    from transformers import LlavaConfig

    return MediaInputs(folder, LlavaConfig())


def of_images(processor: Any, files: Sequence[bytes]) -> MediaBatch:
    number = int(processor.image_token_id)
    tokens, items = [7], []
    for data in files:
        items.append(MediaItem("image", len(tokens), 16, data))
        tokens += [number] * 16 + [8]
    return media_batch(tokens, items)


def test_tensors_are_those_of_the_processor(processor: Any, inputs: MediaInputs) -> None:
    files = [png(40 + n, 70 - n, seed=n) for n in range(5)]
    made = inputs(of_images(processor, files))
    images = [Image.open(io.BytesIO(data)).convert("RGB") for data in files]
    expected = processor(images=images, text="<image>" * 5, return_tensors="pt")["pixel_values"]
    assert list(made) == ["pixel_values"]
    assert torch.equal(made["pixel_values"], expected)
    swapped = inputs(of_images(processor, [files[1], files[0], *files[2:]]))
    assert not torch.equal(swapped["pixel_values"], expected)
    assert inputs(of_images(processor, [])) == {}


def test_images_are_turned_upright(processor: Any, inputs: MediaInputs) -> None:
    image = Image.open(io.BytesIO(png(60, 40)))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned, plain = io.BytesIO(), io.BytesIO()
    image.save(turned, "PNG", exif=exif)
    image.transpose(Image.Transpose.ROTATE_270).save(plain, "PNG")
    found = [inputs(of_images(processor, [each.getvalue()]))["pixel_values"] for each in (turned, plain)]
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("form", "rate", "channels"), [("WAV", 16_000, 1), ("WAV", 44_100, 2), ("FLAC", 8_000, 1), ("OGG", 22_050, 1)]
)
def test_recordings_are_read_as_transformers_reads_them(tmp_path: Path, form: str, rate: int, channels: int) -> None:
    from transformers import Qwen2AudioConfig
    from transformers.audio_utils import load_audio

    processor = qwen2_audio(tmp_path / "audio")
    data = wav(9_001, rate, seed=4, form=form, channels=channels)
    (tmp_path / "x").write_bytes(data)
    samples = load_audio(str(tmp_path / "x"), sampling_rate=16_000, backend="soundfile")
    assert samples.dtype == np.float32
    expected = processor(audio=[samples], text="<|AUDIO|>", sampling_rate=16_000, return_tensors="pt")
    ids = expected["input_ids"][0].tolist()
    number = processor.tokenizer.convert_tokens_to_ids("<|AUDIO|>")
    item = MediaItem("audio", ids.index(number), ids.count(number), data)
    made = MediaInputs(tmp_path / "audio", Qwen2AudioConfig())(media_batch(ids, [item]))
    assert made.keys() == {"input_features", "feature_attention_mask"}
    for name, values in made.items():
        assert torch.equal(values, expected[name])


def test_what_cannot_be_is_an_error(processor: Any, folder: Path, inputs: MediaInputs, tmp_path: Path) -> None:
    from transformers import BertConfig, LlavaConfig

    fits = of_images(processor, [png(30, 30)])
    short = fits._replace(items=[BatchItem("image", 1, 15, fits.items[0].data, 0, 0)])
    with pytest.raises(FormatError, match=r"expands it to 16 positions, but the shard has 15; use the processor"):
        inputs(short)
    with pytest.raises(FormatError, match=r"image at position 1 of row 0: the image cannot be decoded"):
        inputs(of_images(processor, [png(30, 30)[:200]]))
    with pytest.raises(FormatError, match="does not support audio"):
        inputs(fits._replace(items=[BatchItem("audio", 1, 16, wav(100), 0, 0)]))
    with pytest.raises(FormatError, match=r"no config\.json of the model"):
        MediaInputs(folder)
    with pytest.raises(FormatError, match="transformers cannot load a processor"):
        MediaInputs(tmp_path, LlavaConfig())
    with pytest.raises(FormatError, match="transformers cannot load a configuration"):
        MediaInputs(folder, tmp_path)
    hybrid = LlavaConfig(
        text_config={"model_type": "qwen3_5_text", "layer_types": ["linear_attention"] * 4, "num_hidden_layers": 4}
    )
    with pytest.raises(FormatError, match=r"has layers of the type linear_attention, in which .* would see each other"):
        MediaInputs(folder, hybrid)
    with pytest.raises(FormatError, match="supports neither images nor audio"):
        MediaInputs(processor.tokenizer, BertConfig())
    with pytest.raises(FormatError, match="threads 0"):
        MediaInputs(folder, LlavaConfig(), threads=0)


def test_it_goes_to_workers(processor: Any, inputs: MediaInputs, tmp_path: Path) -> None:
    """It pickles as its folder, and a fork does not wait for threads of the parent."""
    assert len(pickle.dumps(inputs)) < 5_000
    files = [png(30 + n, 50, seed=n) for n in range(6)]
    whole = of_images(processor, files)
    with ShardWriter(tmp_path / "x", media=True, capacity=200, pad_id=0, durable=False) as writer:
        for _ in range(4):
            ids = whole.tokens[0].tolist()
            writer.add_pack(ids, [0] * len(ids), [0], media=list(whole.items))
    expected = inputs(whole)["pixel_values"]
    assembler = BatchAssembler(StoredPacks(ShardSet([str(tmp_path / "x")])), 200, media=inputs)
    for workers, context in ((0, None), (2, "fork"), (1, "spawn")):
        loader = DataLoader(
            assembler,
            batch_sampler=[[0, 1], [2]],
            collate_fn=whole_batch,
            num_workers=workers,
            multiprocessing_context=context,
        )
        batches = list(loader)
        assert torch.equal(batches[0]["pixel_values"], torch.cat([expected, expected]))
        assert torch.equal(batches[1]["pixel_values"], expected)
        assert batches[0]["tokens"].shape == (2, 200)
    dataset = as_torch(tmp_path / "x", media=inputs)
    for batch in DataLoader(dataset, batch_size=2, collate_fn=dataset.collate, num_workers=2):
        assert torch.equal(batch["pixel_values"], torch.cat([expected, expected]))
    with pytest.raises(FormatError, match="collate_fn=whole_batch"):
        next(iter(DataLoader(assembler, batch_size=2)))
    with pytest.raises(FormatError, match="collate_fn=whole_batch"):
        assembler[1]


def test_a_placeholder_that_a_text_spells_is_an_error(processor: Any, inputs: MediaInputs) -> None:
    """The model would insert features there: of the next image, or of none. Padding does not count as text."""
    number = int(processor.image_token_id)
    fits = of_images(processor, [png(30, 30)])
    tokens = torch.cat([fits.tokens, torch.tensor([[number]])], dim=1)
    padding = inputs(fits._replace(tokens=tokens, position_ids=torch.zeros_like(tokens)))
    assert torch.equal(padding["pixel_values"], inputs(fits)["pixel_values"])
    spelt = fits._replace(tokens=tokens, lengths=fits.lengths + 1)
    for batch in (spelt, spelt._replace(items=[])):
        with pytest.raises(FormatError, match=r"of row 0: the placeholder '<image>' has no image"):
            inputs(batch)


def test_a_model_around_another_is_told_from_it(processor: Any, folder: Path, tmp_path: Path) -> None:
    """A language model by itself counts positions in one dimension, unlike the multimodal model around it."""
    from transformers import LlamaConfig, LlavaConfig, Qwen2_5OmniConfig, Qwen2_5OmniThinkerConfig

    for config in (LlamaConfig(), Qwen2_5OmniConfig()):
        with pytest.raises(FormatError, match="does not accept pixel_values, which LlavaProcessor returns"):
            MediaInputs(folder, config)
    qwen2_audio(tmp_path / "audio")
    with pytest.raises(FormatError, match="LlavaModel does not accept input_features"):
        MediaInputs(tmp_path / "audio", LlavaConfig())
    assert "three-dimensional" in repr(MediaInputs(folder, Qwen2_5OmniThinkerConfig()))
