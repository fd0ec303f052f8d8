"""The formats by name, format detection for a path, and several files of one format read as one (``JoinedReader``)."""

from __future__ import annotations

import dataclasses
import glob
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from inspect import signature
from typing import Any, TypeAlias

import numpy as np

from megatron_sft_idx.arguments import require_type
from megatron_sft_idx.errors import FormatError, SFTIndexError, ShardNotFoundError, brief
from megatron_sft_idx.formats.base import PackedReader, PackedSpec, PackedWriter
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.packs.provenance import joined_metadata
from megatron_sft_idx.packs.run import MaskAlignment, PackRun
from megatron_sft_idx.shard.opening import read_header, where_to_look
from megatron_sft_idx.shard.publication import check_free, finish_interrupted, places_of
from megatron_sft_idx.shard.reader import Pack
from megatron_sft_idx.shard.shard_set import distinct, find_prefixes, natural_key
from megatron_sft_idx.storage import is_remote, require_local
from megatron_sft_idx.storage.outputs import check_output, places_of_output
from megatron_sft_idx.storage.publish import Place, describe, head_of, places_at

Source: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"

# The module and a display description of each format. A module is imported only when a file is examined or written,
# because some need libraries that take a second to import.
_MODULES = {
    "sft-idx": ("sft_idx", "a packed SFT shard (X.seq.idx and four other files)"),
    "npy": ("npy", "a pickled .npy of packs"),
    "memmap": ("memmap", "a folder of padded arrays (manifest.json and five .npy files)"),
    "parquet": ("parquet", "a Parquet file of packs (input_ids, loss_mask, seq_start_id)"),
    "pbin": ("pbin", "a Modalities .pbin"),
    "jsonl-chunks": ("jsonl_chunks", "pre-packed JSONL chunks (chunk_00000.jsonl, ...)"),
    "save_to_disk": ("saved_dataset", "a Hugging Face dataset of packs, written by convert --to save_to_disk"),
    "megatron": ("stock", "a stock Megatron dataset (X.bin and X.idx, no masks)"),
}
READABLE = tuple(_MODULES)
# A stock dataset cannot hold masks or packs of several sequences. A shard is a stock dataset with more files.
WRITABLE = tuple(name for name in _MODULES if name != "megatron")
# Formats of several files with different suffixes: their path is the common prefix.
_PREFIX_FORMATS = ("sft-idx", "megatron")
_MAX_LISTED = 5


def _module(name: str) -> Any:
    """Return the module of a format. FormatError: the format does not exist."""
    if name not in _MODULES:
        raise FormatError(f"unknown format {name!r}; choose one of {', '.join(_MODULES)}")
    return import_module(f"megatron_sft_idx.formats.{_MODULES[name][0]}")


def options_of_reader(name: str) -> set[str]:
    """Return the names of the options of a format's reader, including ``mask_alignment``."""
    reader_class = _module(name).Reader
    return _keywords(reader_class) | _keywords(reader_class._open)


def _keywords(function: Any) -> set[str]:
    return {
        name for name, parameter in signature(function).parameters.items() if parameter.kind is parameter.KEYWORD_ONLY
    }


def open_reader(path: str, name: str, *, mask_alignment: MaskAlignment = "label", **options: Any) -> PackedReader:
    """Open one file, folder or shard. See the ``Reader`` of its format for the options.

    Raises:
        FormatError: the format or an option does not exist, or the path does not have this format.
    """
    if unknown := sorted(options.keys() - options_of_reader(name)):
        raise FormatError(f"{path}: a {name} source has no option {', '.join(unknown)}; leave it out")
    reader: PackedReader = _module(name).Reader(path, mask_alignment=mask_alignment, **options)
    return reader


def create(
    path: str, name: str, spec: PackedSpec, *, overwrite: bool = False, lossy: bool = False, **options: Any
) -> PackedWriter:
    """Begin to write one file, folder or shard. See the ``Writer`` of its format for the options.

    Raises:
        FormatError: the format does not exist or is read-only, an option does not exist, or ``path`` already exists.
    """
    writer_class = _writer_class(path, name)
    if unknown := sorted(options.keys() - _keywords(writer_class) - _keywords(writer_class._begin)):
        raise FormatError(f"{path}: {name} output has no option {', '.join(unknown)}; leave it out")
    writer: PackedWriter = writer_class(path, spec, overwrite=overwrite, lossy=lossy, **options)
    return writer


def check_destination(path: str, name: str, *, overwrite: bool) -> None:
    """Raise FormatError if ``create`` would reject the path. Called early, because reading sources can take minutes."""
    writer_class = _writer_class(path, name)
    if name == "sft-idx":
        # An existing shard may be identical to the one about to be made.
        finish_interrupted(path, overwrite=overwrite)
        check_free(ShardPaths.of(path), overwrite=overwrite or not ShardPaths.of(path).missing())
    else:
        folder = writer_class.is_folder
        check_output(path, writer_class.kind, overwrite=overwrite, folder=folder)


def _writer_class(path: str, name: str) -> Any:
    """Return the ``Writer`` of a format. FormatError: it is read-only, or the path is in an object store."""
    if name not in WRITABLE:
        raise FormatError(f"{path}: format {name!r} cannot be written; choose one of {', '.join(WRITABLE)}")
    require_local(path, f"writing {name}")
    return _module(name).Writer


def recognise(path: str) -> list[str]:
    """Return the names of the formats that the content at ``path`` may have: none, one, or several."""
    # Without a file or folder of this name, it can only be a prefix, and no other module has to be imported. Pipes and
    # devices are not opened, because reading them may never end.
    candidates = _MODULES if os.path.isfile(path) or os.path.isdir(path) else _PREFIX_FORMATS
    names: list[str] = []
    for name in candidates:
        # Every shard has the files of a stock dataset, but does not count as one.
        if not (name == "megatron" and "sft-idx" in names) and _module(name).recognise(path):
            names.append(name)
    return names


def resolve_source(source: Source, name: str | None = None) -> tuple[str, list[str]]:
    """Return the format of ``source``, and the paths to open: one or more, all of that format.

    A folder that has no format itself stands for its entries, a glob for its matches, both in numeric-aware order of
    their names. A list keeps its order. A path with or without one of a shard's suffixes stands for the shard. Several
    files of one shard in a list stand for the shard once.

    Args:
        source: path, glob, folder, or a list of these.
        name: name of the format; None to detect it from the content.

    Raises:
        ShardNotFoundError: the path does not exist.
        FormatError: no format or several formats match a path, or paths have different formats.
    """
    if not isinstance(source, str | os.PathLike | list | tuple):
        raise FormatError(f"source: {brief(source)}, expected a path, or a list of paths")
    for each in [source] if isinstance(source, str | os.PathLike) else source:
        require_type("source", each, str | os.PathLike)
    entries = [source] if isinstance(source, str | os.PathLike) else distinct(source)
    if not entries:
        raise FormatError("an empty list of paths; pass at least one")
    if name is not None:
        _module(name)
    matches = [match for entry in entries for match in _matches(os.fspath(entry), name)]
    formats = dict(reversed(matches))
    if len(formats) > 1:
        listed = ", ".join(f"{path} is {format_name}" for format_name, path in sorted(formats.items()))
        raise FormatError(f"{listed}; a dataset needs a single format: convert some, or open them separately")
    return matches[0][0], [path for _, path in matches]


def _matches(path: str, name: str | None) -> list[tuple[str, str]]:
    """Return format and path of everything for which one path, glob or folder stands, in order."""
    if is_remote(path):
        if name not in (None, "sft-idx"):
            require_local(path, f"reading {name}")
        return [("sft-idx", prefix) for prefix in find_prefixes(path)]
    if (match := _match(path, name)) is not None:
        return [match]
    entries: list[str] = []
    if os.path.isdir(path):
        entries = [os.path.join(path, entry) for entry in os.listdir(path) if not entry.startswith(".")]
    elif glob.has_magic(path):
        entries = glob.glob(path) or glob.glob(path + ".seq.idx") or glob.glob(path + ".idx")
    if matches := (_only_shards(entries) if name in (None, "sft-idx") else []) or _matches_among(entries, name):
        return matches
    if name is not None:
        return [(name, path)]  # the format's reader will report what is wrong with it
    raise _unknown_error(path, entries)


def _match(path: str, name: str | None) -> tuple[str, str] | None:
    """Return the format of a path, and the path to open; None if no format matches. FormatError: several do."""
    names = recognise(path) if name is None else [name] * _module(name).recognise(path)
    if len(names) > 1:
        listed = "; ".join(f"{one}: {_MODULES[one][1]}" for one in names)
        raise FormatError(f"{path}: could be one of several formats ({listed}); choose one with format (--from)")
    if not names:
        return None
    return names[0], prefix_of(path) if names[0] in _PREFIX_FORMATS else path


def _only_shards(paths: list[str]) -> list[tuple[str, str]]:
    """Return the shards to which files belong by name, without opening them; empty if a file belongs to no shard."""
    prefixes = {prefix_of(path) for path in paths if path.endswith(SUFFIXES[-1])}
    if any(prefix_of(path) not in prefixes for path in paths):
        return []
    return [("sft-idx", prefix) for prefix in sorted(prefixes, key=natural_key)]


def _matches_among(paths: list[str], name: str | None) -> list[tuple[str, str]]:
    """Return format and path of all detected files among a folder's entries or a glob's matches.

    Raises:
        FormatError: a file has the suffix of a detected file, but is not detected itself.
    """
    recognised: dict[str, str] = {}
    unrecognised = []
    for path in sorted(paths, key=natural_key):
        if recognised.get(prefix_of(path)) in _PREFIX_FORMATS:
            continue  # another file of a shard
        if (match := _match(path, name)) is not None:
            recognised[match[1]] = match[0]
        else:
            unrecognised.append(path)
    # A folder of data may contain any other files. But a file that is named like the data must be damaged data.
    suffixes = {".idx" if kind in _PREFIX_FORMATS else os.path.splitext(path)[1] for path, kind in recognised.items()}
    for path in unrecognised:
        if (suffix := os.path.splitext(path)[1]) and suffix in suffixes:
            kinds = ", ".join(sorted(set(recognised.values())))
            raise FormatError(
                f"{path}: by its name it belongs to the files next to it ({kinds}), but it has another format; it may"
                " be damaged or incomplete: restore it, or move it away"
            )
    return [(kind, path) for path, kind in recognised.items()]


def _unknown_error(path: str, entries: Sequence[str] = ()) -> SFTIndexError:
    """Return the error for a path of no known format: the known formats, and what is at the path instead."""
    if (paths := _shard_paths(path)) is not None and not is_remote(path) and not paths.missing():
        try:
            read_header(paths)
        except SFTIndexError as error:
            return error  # the files of a shard with a damaged or newer header
    formats = "; ".join(f"{name}: {words}" for name, (_, words) in _MODULES.items())
    if entries:
        names = ", ".join(os.path.basename(entry) for entry in sorted(entries, key=natural_key)[:_MAX_LISTED])
        there = (
            f"{len(entries)} entries, none with a known format: {names}{', ...' if len(entries) > _MAX_LISTED else ''}"
        )
    elif os.path.isfile(path):
        there = f"a file of {os.path.getsize(path)} bytes that begins with {head_of(os.path.realpath(path), 16)!r}"
    elif os.path.lexists(path):
        there = f"{describe(path)} without data"
    elif paths is None or glob.has_magic(path):
        there = "no file or folder of this name"
    else:
        return ShardNotFoundError(
            path, paths.missing(), f"there is no file or folder of this name; {where_to_look(paths)}"
        )
    return FormatError(
        f"{path}: no known packed data; found {there}. Looked for {formats}. Pass format (--from FORMAT) to see why it"
        " cannot be read as that format"
    )


def prefix_of(path: str) -> str:
    """Return the path without the suffix of a shard's file, if it has one."""
    paths = _shard_paths(path)
    return path if paths is None else paths.prefix


def _shard_paths(path: str) -> ShardPaths | None:
    """Return the shard whose prefix or file a path may be; None if its name is impossible for that."""
    try:
        return ShardPaths.of(path)
    except FormatError:
        return None


def places(path: str, name: str, role: str, *, written: bool = False) -> list[Place]:
    """Return the places of a path of a format, for ``require_apart``; its files need not exist.

    Args:
        path: path as the user gave it.
        name: name of the format.
        role: role of the path in error messages, such as "the destination".
        written: whether the path will be written; a folder is then one place.
    """
    if name not in _PREFIX_FORMATS:
        is_folder = written and _module(name).Writer.is_folder
        return places_of_output(path, role, folder=is_folder) if written else places_at(path, role)
    if written:
        return places_of(path, role, written=True)
    return [Place(file, role) for file in ShardPaths.of(path).all]


# An open reader may hold five maps, and some cluster file systems allow a process only about 590.
MAX_OPEN = 64


class JoinedReader:
    """Several files, folders or shards of one format, read as one.

    A file is opened when it is needed. Beyond ``max_open``, the least recently used one is closed. Each process opens
    its own files. Threads can share a joined reader; one of them reads at a time. It pickles as paths, options and
    identities. If the identity of a file has changed since, that is an error.

    Args:
        name: name of the format.
        paths: paths of one or more files, folders or shards.
        mask_alignment: alignment of their loss masks.
        max_open: maximum number of open files.
        options: options of the format's ``Reader``.

    Raises:
        FormatError: a file does not match its format.
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
        self.name, self.paths, self.mask_alignment, self.max_open = name, tuple(paths), mask_alignment, max_open
        self.options = dict(options or {})
        self._identities: tuple[str, ...] = ()
        self._forget_readers()
        readers = (self.reader(number) for number in range(len(self.paths)))
        identities_and_lengths = [(reader.identity, len(reader)) for reader in readers]
        self._identities = tuple(identity for identity, _ in identities_and_lengths)
        self.lengths = tuple(length for _, length in identities_and_lengths)

    def _forget_readers(self) -> None:
        """Reset the open readers. A forked process must not use its parent's, because both share file positions."""
        self._lock = threading.Lock()
        self._readers: dict[int, PackedReader] = {}
        self._closed_notes: dict[str, None] = {}  # notes of closed readers, each once and in order
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        # Without the cached spec and columns, which may be large: they are read again on demand.
        pickled = ("name", "paths", "mask_alignment", "max_open", "options", "_identities", "lengths")
        return {key: self.__dict__[key] for key in pickled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_readers()

    def reader(self, number: int) -> PackedReader:
        """Return reader ``number``, opened by this process. FormatError: the content of its file has changed."""
        with self._process_lock():
            return self._opened_reader(number)

    def read(self, number: int, index: int) -> Pack:
        """Return pack ``index`` of file ``number``."""
        with self._process_lock():
            return self._opened_reader(number).read(index)

    def _process_lock(self) -> threading.Lock:
        """Return the lock of this process; a forked process gets a new lock and no readers yet."""
        if self._process != os.getpid():
            self._forget_readers()
        return self._lock

    def _opened_reader(self, number: int) -> PackedReader:
        """Do the work of ``reader`` without the lock, which the caller must hold."""
        reader = self._readers.pop(number, None)
        if reader is None:
            reader = open_reader(self.paths[number], self.name, mask_alignment=self.mask_alignment, **self.options)
            if self._identities and (reader.identity, len(reader)) != (self._identities[number], self.lengths[number]):
                raise FormatError(
                    f"{reader.path}: the content has changed since this dataset was opened (now {reader.identity},"
                    f" then {self._identities[number]}); start again"
                )
            while len(self._readers) >= self.max_open:
                oldest = self._readers.pop(next(iter(self._readers)))
                self._closed_notes.update(dict.fromkeys(oldest.notes))
        self._readers[number] = reader  # at the end: readers are in the order of their last use
        return reader

    @cached_property
    def specs(self) -> list[PackedSpec]:
        """The spec of each file, which may need one pass over it."""
        return [self.reader(number).spec for number in range(len(self.paths))]

    @cached_property
    def spec(self) -> PackedSpec:
        """The spec of all files together. FormatError: they have different tokenizers."""
        return joined_spec(self.paths[0], self.specs)

    @property
    def unjoinable_columns(self) -> dict[str, str]:
        """Why columns of single files cannot be columns of all of them together: one sentence per name."""
        reasons = {}
        for path, spec in zip(self.paths, self.specs, strict=True):
            for name in spec.columns.keys() - self.spec.columns.keys():
                remedy = "convert such sources one by one, or merge them into one shard first (megatron-sft-idx merge)"
                reasons[name] = (
                    f"{path}: column {name} differs between the sources, or its numbers begin again in each source;"
                    f" {remedy}"
                )
        return dict(sorted(reasons.items()))

    @property
    def notes(self) -> list[str]:
        """The notes of the files opened so far, each sentence once."""
        with self._process_lock():
            notes = (note for reader in self._readers.values() for note in reader.notes)
            return list(self._closed_notes | dict.fromkeys(notes))

    def runs(self) -> Iterator[PackRun]:
        """Yield all packs of all files in order."""
        for number in range(len(self.paths)):
            yield from self.reader(number).runs()


def columns_in_common(specs: Sequence[Mapping[str, ColumnSpec]]) -> dict[str, ColumnSpec]:
    """Return the columns that every file has with the same spec.

    ``pair`` is excluded, because its numbers start again in each file.
    """
    if len(specs) == 1:
        return dict(specs[0])
    return {
        name: spec
        for name, spec in specs[0].items()
        if name != "pair" and all(other.get(name) == spec for other in specs)
    }


def require_one_tokenizer(path: str, stated: Iterable[tuple[int | None, Mapping[str, Any]]]) -> int | None:
    """Return the padding id of several files, which must have the same tokenizer.

    Args:
        path: path of the first file, for errors.
        stated: the padding id and the metadata of each file.

    Raises:
        FormatError: pad ids or fingerprints of tokenizers differ.
    """
    pad_ids, fingerprints = set[int](), set[str]()
    for pad_id, metadata in stated:
        tokenizer = metadata.get("tokenizer")
        fingerprint = tokenizer.get("fingerprint") if isinstance(tokenizer, Mapping) else None
        pad_ids |= set() if pad_id is None else {pad_id}
        fingerprints |= {fingerprint} if isinstance(fingerprint, str) else set()
    for shown, values in (("pad ids", pad_ids), ("tokenizers", fingerprints)):
        if len(values) > 1:
            listed = ", ".join(sorted(map(str, values)))
            raise FormatError(f"{path} and others: different {shown} ({listed}); read them separately")
    return next(iter(pad_ids), None)


def joined_spec(path: str, specs: Sequence[PackedSpec]) -> PackedSpec:
    """Return the spec of several files together. ``path`` is the path of the first file, for errors.

    Raises:
        FormatError: pad ids or fingerprints of tokenizers differ.
    """
    first = specs[0]
    capacity = max(spec.capacity for spec in specs)
    trained = [spec.num_trained_tokens for spec in specs]
    pad_id = require_one_tokenizer(path, [(spec.pad_id, spec.metadata) for spec in specs])
    return dataclasses.replace(
        first,
        num_packs=sum(spec.num_packs for spec in specs),
        num_sequences=sum(spec.num_sequences for spec in specs),
        num_tokens=sum(spec.num_tokens for spec in specs),
        longest_pack=max(spec.longest_pack for spec in specs),
        token_dtype=np.result_type(*{spec.token_dtype for spec in specs}),
        mask_dtype=np.result_type(*{spec.mask_dtype for spec in specs}),
        capacity=capacity,
        capacity_stated=any(spec.capacity_stated and spec.capacity == capacity for spec in specs),
        sequence_multiple=math.gcd(*(spec.sequence_multiple for spec in specs)),
        pad_id=pad_id,
        num_trained_tokens=None if None in trained else sum(map(int, filter(None, trained))),
        columns=columns_in_common([spec.columns for spec in specs]),
        media=any(spec.media for spec in specs),
        metadata=dict(first.metadata) if len(specs) == 1 else joined_metadata([spec.metadata for spec in specs])[0],
    )
