"""The formats by name, and what is at a path, told by its content."""

from __future__ import annotations

import dataclasses
import glob
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from inspect import signature
from typing import Any, TypeAlias

import numpy as np

from megatron_sft_idx.errors import FormatError, SFTIndexError, ShardNotFoundError
from megatron_sft_idx.formats.base import MaskAlignment, PackedReader, PackedSpec, PackedWriter
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.packs.run import PackRun
from megatron_sft_idx.shard.opening import where_to_look
from megatron_sft_idx.shard.publication import check_free, places_of
from megatron_sft_idx.shard.reader import Pack
from megatron_sft_idx.shard.shard_set import find_prefixes, natural_key
from megatron_sft_idx.storage import is_remote, open_regular, require_local
from megatron_sft_idx.storage.publish import Place, check_place, places_at, resolve

Source: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"

# The module of each format, and what it is in a few words. A module is imported when a file is looked at or written:
# some need libraries that take a second to import.
_MODULES = {
    "sft-idx": ("sft_idx", "a packed SFT shard (X.seq.idx and four files beside it)"),
    "npy": ("npy", "a pickled .npy of packs"),
    "memmap": ("memmap", "a folder of padded arrays (manifest.json and five .npy files)"),
    "parquet": ("parquet", "a Parquet file of packs (input_ids, loss_mask, seq_start_id)"),
    "pbin": ("pbin", "a Modalities .pbin"),
    "jsonl-chunks": ("jsonl_chunks", "pre-packed JSONL chunks (chunk_00000.jsonl and on)"),
    "megatron": ("stock", "a stock Megatron dataset (X.bin and X.idx, no masks)"),
}
READABLE = tuple(_MODULES)
# A stock dataset has no place for masks or for sequences inside a pack, and shards are stock datasets already.
WRITABLE = tuple(name for name in _MODULES if name != "megatron")
# Formats whose paths are prefixes: several files that differ in their suffixes.
_PREFIX_FORMATS = ("sft-idx", "megatron")
_MAX_LISTED = 5


def _module(name: str) -> Any:
    """The module of a format; FormatError where there is no such format."""
    if name not in _MODULES:
        raise FormatError(f"format {name!r}: there is none of this name, choose one of {', '.join(_MODULES)}")
    return import_module(f"megatron_sft_idx.formats.{_MODULES[name][0]}")


def options_of_reader(name: str) -> set[str]:
    """Names of the options that the reader of a format has, ``mask_alignment`` among them."""
    made = _module(name).Reader
    return _keywords(made) | _keywords(made._open)


def _keywords(made: Any) -> set[str]:
    return {name for name, of in signature(made).parameters.items() if of.kind is of.KEYWORD_ONLY}


def open_reader(path: str, name: str, *, mask_alignment: MaskAlignment = "label", **options: Any) -> PackedReader:
    """The reader of one file, folder or shard; options are those of its format.

    Raises:
        FormatError: no such format, an option that it does not have, or a path that is not of it.
    """
    if unknown := sorted(options.keys() - options_of_reader(name)):
        raise FormatError(f"{path}: a {name} source has no option {', '.join(unknown)}; leave it out")
    reader: PackedReader = _module(name).Reader(path, mask_alignment=mask_alignment, **options)
    return reader


def create(
    path: str, name: str, spec: PackedSpec, *, overwrite: bool = False, allow_loss: bool = False, **options: Any
) -> PackedWriter:
    """The writer of one file, folder or shard; options are those of its format.

    Raises:
        FormatError: no such format, one that is only read, or something is at ``path`` already.
    """
    if name not in WRITABLE:
        raise FormatError(f"{path}: format {name!r} is not written; choose one of {', '.join(WRITABLE)}")
    require_local(path, f"writing {name}")
    made = _module(name).Writer
    if unknown := sorted(options.keys() - _keywords(made) - _keywords(made._begin)):
        raise FormatError(f"{path}: {name} output has no option {', '.join(unknown)}; leave it out")
    writer: PackedWriter = made(path, spec, overwrite=overwrite, allow_loss=allow_loss, **options)
    return writer


def check_destination(path: str, name: str, *, overwrite: bool) -> None:
    """FormatError where ``create`` would refuse the place: a source may be read for minutes before that is called."""
    if name == "sft-idx":
        check_free(ShardPaths.of(path), overwrite=overwrite)
    elif name in WRITABLE:
        made = _module(name).Writer
        check_place(resolve(path, folder=made.folder), made.kind, overwrite=overwrite, folder=made.folder)


def recognise(path: str) -> list[str]:
    """Formats that the content at ``path`` is of: none, one, or several."""
    # Where no file and no folder has this name, it can only be a prefix; the others need not be imported. A pipe or a
    # device is not opened: that may never end.
    names = _MODULES if os.path.isfile(path) or os.path.isdir(path) else _PREFIX_FORMATS
    found: list[str] = []
    for name in names:
        # A shard has a stock dataset's files too, and is none.
        if not (name == "megatron" and "sft-idx" in found) and _module(name).recognise(path):
            found.append(name)
    return found


def resolve_source(source: Source, name: str | None = None) -> tuple[str, list[str]]:
    """The format of what ``source`` names, and the paths to open, which are one or more of that one format.

    A folder that is no format of its own stands for what lies right in it, a glob for what it matches; both in
    numeric-aware order of their names. A list keeps its own order. A path with or without one of a shard's suffixes
    stands for the shard.

    Args:
        source: path, glob, folder, or a list of these.
        name: the format, where it is known; None has it recognised by content.

    Raises:
        ShardNotFoundError: nothing at all has this name.
        FormatError: nothing known is there, a path could be two things, or paths are of different formats.
    """
    entries = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not entries:
        raise FormatError("an empty list of paths; name at least one")
    if name is not None:
        _module(name)
    found = [pair for entry in entries for pair in _matches(os.fspath(entry), name)]
    formats = dict(reversed(found))
    if len(formats) > 1:
        listed = ", ".join(f"{path} is {kind}" for kind, path in sorted(formats.items()))
        raise FormatError(f"{listed}; one dataset is of one format: convert some, or open them one by one")
    return found[0][0], [path for _, path in found]


def _matches(path: str, name: str | None) -> list[tuple[str, str]]:
    """Formats and paths of what one entry stands for, in order."""
    if is_remote(path):
        if name not in (None, "sft-idx"):
            require_local(path, f"reading {name}")
        return [("sft-idx", prefix) for prefix in find_prefixes(path)]
    if (itself := _match(path, name)) is not None:
        return [itself]
    inside: list[str] = []
    if os.path.isdir(path):
        inside = [os.path.join(path, entry) for entry in os.listdir(path) if not entry.startswith(".")]
    elif glob.has_magic(path):
        inside = glob.glob(path) or glob.glob(path + ".seq.idx") or glob.glob(path + ".idx")
    if found := (_only_shards(inside) if name in (None, "sft-idx") else []) or _matches_among(inside, name):
        return found
    if name is not None:
        return [(name, path)]  # its reader says what is wrong with it
    raise _unknown_error(path, inside)


def _match(path: str, name: str | None) -> tuple[str, str] | None:
    """Format and path of the one thing that a path is, None where it is nothing known."""
    found = recognise(path) if name is None else [name] * _module(name).recognise(path)
    if len(found) > 1:
        listed = "; ".join(f"{kind}: {_MODULES[kind][1]}" for kind in found)
        raise FormatError(f"{path}: could be several things ({listed}); say which with format (--from)")
    for kind in found:
        return kind, prefix_of(path) if kind in _PREFIX_FORMATS else path
    return None


def _only_shards(paths: list[str]) -> list[tuple[str, str]]:
    """The shards that all of these files are of, told by their names: there may be thousands. Else nothing."""
    found = {prefix_of(path) for path in paths if path.endswith(SUFFIXES[-1])}
    if any(prefix_of(path) not in found for path in paths):
        return []
    return [("sft-idx", prefix) for prefix in sorted(found, key=natural_key)]


def _matches_among(paths: list[str], name: str | None) -> list[tuple[str, str]]:
    """What is known among the entries of a folder or the matches of a glob."""
    known: dict[str, str] = {}
    unknown = []
    for path in sorted(paths, key=natural_key):
        if known.get(prefix_of(path)) in _PREFIX_FORMATS:
            continue  # another file of a shard
        if (one := _match(path, name)) is not None:
            known[one[1]] = one[0]
        else:
            unknown.append(path)
    # A file beside the data may be anything, but one that is named like the data and is not like it is damaged.
    suffixes = {".idx" if kind in _PREFIX_FORMATS else os.path.splitext(path)[1] for path, kind in known.items()}
    for path in unknown:
        if (suffix := os.path.splitext(path)[1]) and suffix in suffixes:
            kinds = ", ".join(sorted(set(known.values())))
            raise FormatError(
                f"{path}: it is named like what is beside it, which is {kinds}, but it is no such thing;"
                " it may be damaged or incomplete: restore it, or move it away"
            )
    return [(kind, path) for path, kind in known.items()]


def _unknown_error(path: str, tried: Sequence[str] = ()) -> SFTIndexError:
    """What was looked for, and what is there instead."""
    looked = "; ".join(f"{name}: {words}" for name, (_, words) in _MODULES.items())
    if tried:
        names = ", ".join(os.path.basename(entry) for entry in sorted(tried, key=natural_key)[:_MAX_LISTED])
        there = f"{len(tried)} entries, none of them known: {names}{', ...' if len(tried) > _MAX_LISTED else ''}"
    elif os.path.isfile(path):
        with open_regular(path) as file:
            head = file.read(16)
        there = f"a file of {os.path.getsize(path)} bytes that begins with {head!r}"
    elif os.path.isdir(path):
        there = "an empty folder"
    elif os.path.lexists(path):
        there = "neither a file nor a folder"
    elif not glob.has_magic(path) and (paths := _shard_paths(path)) is not None:
        return ShardNotFoundError(path, paths.missing(), f"nothing else has this name either; {where_to_look(paths)}")
    else:
        there = "nothing of this name"
    return FormatError(
        f"{path}: no known packed data; found {there}. Looked for {looked}."
        " Say which it is with format (--from) to hear what is wrong with it"
    )


def prefix_of(path: str) -> str:
    """The path without one of the suffixes that a shard's files have."""
    paths = _shard_paths(path)
    return path if paths is None else paths.prefix


def _shard_paths(path: str) -> ShardPaths | None:
    """The files of a shard that this may be a path of; None for a folder, or nothing but a suffix."""
    try:
        return ShardPaths.of(path)
    except FormatError:
        return None


def places(path: str, name: str, role: str, *, written: bool = False) -> list[Place]:
    """The files that a path of a format stands for, there or not, for ``require_apart``.

    Args:
        path: as the user gave it.
        name: of the format.
        role: what the path is to the run, for sentences.
        written: it is going to be written: a folder as a whole.
    """
    if name not in _PREFIX_FORMATS:
        return [Place(path, role, folder=_module(name).Writer.folder)] if written else places_at(path, role)
    if written:
        return places_of(path, role, written=True)
    return [Place(file, role) for file in ShardPaths.of(path).all]


# An open reader may hold five maps, and some cluster file systems refuse a process more than about 590 of them.
MAX_OPEN = 64


class JoinedReader:
    """Readers of one format side by side, opened when needed, the one unused for longest closed first.

    Each process opens its own; threads may share one, and then read one after the other. It pickles as paths, options
    and identities, and finds the same content when it is unpickled, or says that it is not the same.

    Args:
        name: the format.
        paths: of one or more.
        mask_alignment: of the loss masks in them.
        max_open: how many are held open at once.
        options: of the format's reader.

    Raises:
        FormatError: they do not go together, or one is not what its format says.
    """

    def __init__(
        self,
        name: str,
        paths: Sequence[str],
        *,
        mask_alignment: MaskAlignment = "label",
        max_open: int = MAX_OPEN,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if max_open < 1:
            raise FormatError(f"max_open {max_open}: at least one file has to be open to be read")
        self.name, self.paths, self.mask_alignment, self.max_open = name, tuple(paths), mask_alignment, max_open
        self.options = dict(options or {})
        self._identities: tuple[str, ...] = ()
        self._begin()
        readers = (self.reader(number) for number in range(len(self.paths)))
        found = [(reader.identity, len(reader)) for reader in readers]
        self._identities = tuple(identity for identity, _ in found)
        self.lengths = tuple(length for _, length in found)

    def _begin(self) -> None:
        """Hold nothing open. A forked process must not use what was: file positions and locks would be shared."""
        self._lock = threading.Lock()
        self._readers: dict[int, PackedReader] = {}
        self._closed_notes: dict[str, None] = {}  # notes of readers closed by now, each once and in order
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        # What was learned of the content is found again where it is asked for.
        kept = ("name", "paths", "mask_alignment", "max_open", "options", "_identities", "lengths")
        return {key: self.__dict__[key] for key in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def reader(self, number: int) -> PackedReader:
        """Reader ``number``, open; it belongs to this process. FormatError where its file is another one by now."""
        with self._process_lock():
            return self._opened_reader(number)

    def read(self, number: int, index: int) -> Pack:
        """Pack ``index`` of file ``number``."""
        with self._process_lock():
            return self._opened_reader(number).read(index)

    def _process_lock(self) -> threading.Lock:
        """The lock of this process."""
        if self._process != os.getpid():
            self._begin()
        return self._lock

    def _opened_reader(self, number: int) -> PackedReader:
        reader = self._readers.pop(number, None)
        if reader is None:
            reader = open_reader(self.paths[number], self.name, mask_alignment=self.mask_alignment, **self.options)
            if self._identities and (reader.identity, len(reader)) != (self._identities[number], self.lengths[number]):
                raise FormatError(
                    f"{reader.path}: the content is another one than when this dataset was opened"
                    f" ({reader.identity}, then {self._identities[number]}); it was written anew: start again"
                )
            while len(self._readers) >= self.max_open:
                oldest = self._readers.pop(next(iter(self._readers)))
                self._closed_notes.update(dict.fromkeys(oldest.notes))
        self._readers[number] = reader  # last: in the order of their use
        return reader

    @cached_property
    def spec(self) -> PackedSpec:
        """What is known of all of them together.

        Raises:
            FormatError: they come from different tokenizers.
        """
        return joined_spec(self.paths[0], [self.reader(number).spec for number in range(len(self.paths))])

    @cached_property
    def unjoinable_columns(self) -> dict[str, str]:
        """Columns of the files that cannot be one of all of them, by name: a sentence each."""
        specs = [self.reader(number).columns for number in range(len(self.paths))]
        joined, apart = joined_columns(specs), {}
        for path, columns in zip(self.paths, specs, strict=True):
            for name in columns.keys() - joined.keys():
                remedy = "sources with it are converted one by one, or made one shard first (merge)"
                apart[name] = f"{path}: column {name} is not that of all sources, or counts anew in each; {remedy}"
        return dict(sorted(apart.items()))

    @property
    def notes(self) -> list[str]:
        """What was understood of the files opened so far; each sentence once."""
        with self._process_lock():
            open_now = (note for reader in self._readers.values() for note in reader.notes)
            return list(self._closed_notes | dict.fromkeys(open_now))

    def runs(self) -> Iterator[PackRun]:
        """All packs of all files in order, each file closed before the next is opened."""
        for number in range(len(self.paths)):
            yield from self.reader(number).runs()


def joined_columns(specs: Sequence[Mapping[str, ColumnSpec]]) -> dict[str, ColumnSpec]:
    """The columns that packs of several files have as one: alike in all, and with no numbers that begin anew."""
    if len(specs) == 1:
        return dict(specs[0])
    return {
        name: spec
        for name, spec in specs[0].items()
        if name != "pair" and all(other.get(name) == spec for other in specs)
    }


def joined_spec(path: str, specs: Sequence[PackedSpec]) -> PackedSpec:
    """What is known of files together, the first of which is at ``path``. FormatError: of different tokenizers."""
    first = specs[0]
    trained = [spec.num_trained_tokens for spec in specs]
    pads = {spec.pad_id for spec in specs} - {None}
    said = (spec.metadata.get("tokenizer") for spec in specs)
    prints = (tokenizer.get("fingerprint") for tokenizer in said if isinstance(tokenizer, Mapping))
    tokenizers = {fingerprint for fingerprint in prints if isinstance(fingerprint, str)}
    for what, values in (("pad ids", pads), ("tokenizers", tokenizers)):
        if len(values) > 1:
            listed = ", ".join(sorted(map(str, values)))
            raise FormatError(f"{path} and others: different {what} ({listed}); keep them apart")
    return dataclasses.replace(
        first,
        num_packs=sum(spec.num_packs for spec in specs),
        num_sequences=sum(spec.num_sequences for spec in specs),
        num_tokens=sum(spec.num_tokens for spec in specs),
        longest_pack=max(spec.longest_pack for spec in specs),
        token_dtype=np.result_type(*{spec.token_dtype for spec in specs}),
        mask_dtype=np.result_type(*{spec.mask_dtype for spec in specs}),
        capacity=max(spec.capacity for spec in specs),
        sequence_multiple=math.gcd(*(spec.sequence_multiple for spec in specs)),
        pad_id=next(iter(pads), None),
        num_trained_tokens=None if None in trained else sum(map(int, filter(None, trained))),
        columns=joined_columns([spec.columns for spec in specs]),
        # What all of them say.
        metadata={
            key: value
            for key, value in first.metadata.items()
            if all(key in spec.metadata and spec.metadata[key] == value for spec in specs)
        },
    )
