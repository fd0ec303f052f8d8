"""Other stores of the same packs with their images, for ``media_training.py``."""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import batches_peers
import numpy as np
import torch
from formats_peers import import_streaming
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

from megatron_sft_idx.shard import Shard

PACKS_PER_TAR, SHUFFLE_BUFFER = 100, 100
Stage = Literal["files", "pixels", "tensors"]  # what a batch has of its images
Images = Sequence[Any]  # of one pack: encoded files or arrays
Finish = Callable[[list[Any]], dict[str, Any]]  # images of a batch, in order, to what the batch has of them


class Row(NamedTuple):
    """One pack: token ids, label-aligned mask, boundaries, images."""

    ids: NDArray[Any]
    mask: NDArray[Any]
    bounds: NDArray[Any]
    images: Images


# ---- what becomes of images, for every way the same code ----


def decoded(file: Any) -> NDArray[np.uint8]:
    """The pixels of an encoded file, RGB, uint8 [height, width, 3]."""
    with Image.open(io.BytesIO(file)) as image:
        return np.array(image.convert("RGB"))


class Files:
    """Returns encoded files unchanged."""

    def __call__(self, images: list[Any]) -> dict[str, Any]:
        """Return the images of a batch."""
        return {"images": images}


class Pixels:
    """Decodes files, unless the store has done that."""

    def __call__(self, images: list[Any]) -> dict[str, Any]:
        """Return the images of a batch."""
        arrays = [image if isinstance(image, np.ndarray) else decoded(image) for image in images]
        # Tensors, because workers hand these over in shared memory, and arrays through a pipe.
        return {"images": [torch.from_numpy(array) for array in arrays]}


class Tensors:
    """Decodes files, unless the store has done that, and runs the image processor of a model."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoImageProcessor

        kind: Any = AutoImageProcessor
        self._processor = kind.from_pretrained(folder)

    def __call__(self, images: list[Any]) -> dict[str, Any]:
        """Return the images of a batch."""
        arrays = [image if isinstance(image, np.ndarray) else decoded(image) for image in images]
        return dict(self._processor(images=arrays, return_tensors="pt", input_data_format="channels_last"))


@dataclass(frozen=True)
class Collate:
    """Makes the batch that Megatron takes from rows, with images."""

    finish: Finish

    def __call__(self, rows: list[Row]) -> dict[str, Any]:
        """Return the batch of some rows."""
        batch: dict[str, Any] = dict(batches_peers.collate([(row.ids, row.mask, row.bounds) for row in rows]))
        return batch | self.finish([image for row in rows for image in row.images])


# ---- stores ----


class Store(NamedTuple):
    """One way to keep packs with images.

    Attributes:
        name: in the tables.
        files: the files on disk.
        open: makes the data set: ``ds[i]`` is a row, ``ds.__getitems__(list)`` several rows. An iterable data set
            chooses its own order.
    """

    name: str
    files: list[Path]
    open: Callable[[Stage], Dataset[Row]]


class _ArrowRows(Dataset[Row]):
    """A saved dataset with an Image feature: a batch at once, images decoded by it unless files are asked for."""

    def __init__(self, folder: Path, stage: Stage) -> None:
        import datasets

        self.rows = datasets.load_from_disk(str(folder))
        self.is_arrow = stage == "files"
        self.rows = self.rows.with_format("arrow" if self.is_arrow else "numpy")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, picked: list[int]) -> list[Row]:
        found = self.rows[picked]
        names = ("input_ids", "loss_mask", "seq_boundaries", "images")
        columns = [self._values(found[name]) if self.is_arrow else found[name] for name in names]
        return [Row(*row) for row in zip(*columns, strict=True)]

    @staticmethod
    def _values(column: Any) -> list[Any]:
        """The lists of an Arrow column: views of numbers, or bytes of files."""
        whole = column.combine_chunks()
        edges, values = whole.offsets.to_numpy(), whole.values
        is_files = hasattr(values, "field")
        items = values.field("bytes").to_pylist() if is_files else values.to_numpy()
        return [items[a:b] for a, b in pairwise(edges)]


def arrow(folder: Path, shard: Shard) -> Store:
    import datasets

    def items() -> Iterator[dict[str, Any]]:
        for pack in shard:
            images = [{"bytes": bytes(item.data), "path": None} for item in pack["media"]]
            tokens = {name: pack[name] for name in ("input_ids", "loss_mask", "seq_boundaries")}
            yield {**tokens, "images": images}

    types = {"input_ids": "int32", "loss_mask": "uint8", "seq_boundaries": "int32"}
    features: dict[str, Any] = {name: datasets.Sequence(datasets.Value(kind)) for name, kind in types.items()}
    features["images"] = datasets.Sequence(datasets.Image())
    datasets.disable_progress_bars()
    made = datasets.Dataset.from_generator(
        items, features=datasets.Features(features), cache_dir=str(folder / "arrow-cache")
    )
    made.save_to_disk(str(folder / "arrow"))
    return Store(
        f"datasets {datasets.__version__}, Image feature",
        sorted((folder / "arrow").rglob("*.arrow")),
        lambda stage: _ArrowRows(folder / "arrow", stage),
    )


class _MdsRows(Dataset[Row]):
    def __init__(self, folder: Path) -> None:
        self.rows = import_streaming().LocalDataset(str(folder))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Row:
        row = self.rows[i]
        images = [row["images"][a:b] for a, b in pairwise([0, *row["ends"].tolist()])]
        return Row(row["input_ids"], row["loss_mask"], row["seq_boundaries"], images)


def mds(folder: Path, shard: Shard) -> Store:
    streaming = import_streaming()
    columns = {"input_ids": "ndarray:int32", "loss_mask": "ndarray:uint8", "seq_boundaries": "ndarray:int32"}
    columns |= {"ends": "ndarray:int64", "images": "bytes"}
    with streaming.MDSWriter(out=str(folder / "mds"), columns=columns) as writer:
        for pack in shard:
            images = [bytes(item.data) for item in pack["media"]]
            ids = pack["input_ids"].astype(np.int32)  # of a small vocabulary they are uint16
            row = {"input_ids": ids, "loss_mask": pack["loss_mask"], "seq_boundaries": pack["seq_boundaries"]}
            writer.write({**row, "ends": np.cumsum([len(each) for each in images]), "images": b"".join(images)})
    name = f"mosaicml-streaming {streaming.__version__} (MDS)"
    return Store(name, sorted((folder / "mds").glob("*.mds")), lambda _: _MdsRows(folder / "mds"))


def write_tars(folder: Path, shard: Shard) -> list[Path]:
    """Write tar files of samples for webdataset and wids: arrays as bytes, followed by the images of a pack."""
    folder.mkdir()
    shards: list[dict[str, Any]] = []
    for first in range(0, len(shard), PACKS_PER_TAR):
        path = folder / f"{first:08}.tar"
        packs = range(first, min(first + PACKS_PER_TAR, len(shard)))
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in packs:
                pack = shard[number]
                files = {
                    "ids.bin": pack["input_ids"].astype(np.int32).tobytes(),
                    "mask.bin": pack["loss_mask"].tobytes(),
                    "bounds.bin": pack["seq_boundaries"].tobytes(),
                }
                files |= {f"{at}.jpg": bytes(item.data) for at, item in enumerate(pack["media"])}
                for name, data in files.items():
                    info = tarfile.TarInfo(f"{number:08}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        shards.append({"url": str(path), "nsamples": len(packs)})
    (folder / "index.json").write_text(json.dumps({"wids_version": 1, "name": "packs", "shardlist": shards}))
    return sorted(folder.glob("*.tar"))


def _row_of_sample(files: dict[str, bytes]) -> Row:
    """Return the row of a sample, from its files by suffix without the first dot."""
    images = [files[name] for name in sorted(name for name in files if name.endswith(".jpg"))]  # at most ten
    arrays = (np.frombuffer(files["ids.bin"], np.int32), np.frombuffer(files["mask.bin"], np.uint8))
    return Row(*arrays, np.frombuffer(files["bounds.bin"], np.int32), images)


class _WidsRows(Dataset[Row]):
    """Samples of tar files in any order, with an index made when each file is opened."""

    def __init__(self, folder: Path) -> None:
        from wids import ShardListDataset

        kind: Any = ShardListDataset
        # Files are read in place; with a cache folder, wids would copy them there.
        place = Path(folder)
        # It prints opened files to stderr.
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            self.samples = kind(
                str(place / "index.json"), base="", localname=str, transformations=[], lru_size=200, keep=True
            )
        for first in range(0, len(self.samples), PACKS_PER_TAR):
            self.samples[first]
        # Making the index has touched every file; so that its pages can be dropped from the page cache, none stays
        # in the map.
        for tar in self.samples.cache.lru.cache.values():
            tar.reader.mmapped_file.madvise(mmap.MADV_DONTNEED)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Row:
        sample = self.samples[i]
        return _row_of_sample({name[1:]: data.getvalue() for name, data in sample.items() if name[0] == "."})


class _WebRows(IterableDataset[Row]):
    """Tar files one after the other in random order, with samples shuffled in a buffer."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = [str(path) for path in files]

    def __iter__(self) -> Iterator[Row]:
        import webdataset

        samples: Iterable[dict[str, Any]] = (
            webdataset.WebDataset(self.files, shardshuffle=len(self.files), empty_check=False)
            .shuffle(SHUFFLE_BUFFER, initial=SHUFFLE_BUFFER)
            .repeat()
        )
        for sample in samples:
            yield _row_of_sample({name: data for name, data in sample.items() if name[:2] != "__"})


def tars(folder: Path, shard: Shard) -> list[Store]:
    """Return the two ways to read tar files."""
    from importlib.metadata import version

    files = write_tars(folder / "tar", shard)
    return [
        Store(f"wids {version('wids')}, tar files by an index", files, lambda _: _WidsRows(folder / "tar")),
        Store(f"webdataset {version('webdataset')}, tar files in a row", files, lambda _: _WebRows(files)),
    ]
