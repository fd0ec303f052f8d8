"""Packs as a Hugging Face dataset: a folder that ``datasets.load_from_disk`` reads, for LLaMA-Factory and TRL.

===================  ==================================================================================
``data-*.arrow``     an Arrow stream; each row is a pack, with the fields below, lists of int32
``dataset_info.json``  the fields and their types; and under ``megatron_sft_idx`` the package metadata, with
                     the rows of a record batch and where in the stream each of these begins
``state.json``       names the Arrow file, and has a fingerprint of it
===================  ==================================================================================

All rows have the length of the longest pack, rounded up to a multiple of 8, as LLaMA-Factory's collator wants them.

==================  ===================================================================================
``input_ids``       token ids; in padding 0
``labels``          the ids again where they are trained, else -100; not shifted, as models of transformers do that
``attention_mask``  the number of the token's sequence in its row, from 1 on; in padding 0
``position_ids``    restart at 0 with every sequence, and with the padding
``seq_lengths``     tokens in each sequence, then the length of the padding, if there is any
==================  ===================================================================================

Only folders written by this package are read; other datasets on disk go through ``preprocess``. Every field is checked
against the others. The Arrow file is not mapped: if it is truncated during reading, that is an error, not a SIGBUS.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.formats.base import (
    PackCounts,
    PackedReader,
    PackedSpec,
    PackedWriter,
    encode_json,
    file_identity,
    int_within,
    read_json_object,
    recogniser,
)
from megatron_sft_idx.formats.parquet import list_field, pyarrow_errors
from megatron_sft_idx.layout.files import MAX_COUNT
from megatron_sft_idx.packs.run import RUN_TOKENS, PackRun, first_true
from megatron_sft_idx.shard.reader import Pack
from megatron_sft_idx.storage import open_regular
from megatron_sft_idx.storage.local import HashedFile
from megatron_sft_idx.storage.publish import Kind

if TYPE_CHECKING:
    import pyarrow as pa

_DATA, _INFO, _STATE = "data-00000-of-00001.arrow", "dataset_info.json", "state.json"
_TOKEN_FIELDS = ("input_ids", "labels", "attention_mask", "position_ids")
_FIELDS = (*_TOKEN_FIELDS, "seq_lengths")
_KEY, _VERSION = "megatron_sft_idx", 1
_UNTRAINED = -100
_ROW_MULTIPLE = 8
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def _schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema([(name, pa.list_(pa.int32())) for name in _FIELDS])


def _read_info(folder: str) -> dict[str, Any]:
    """Return the package metadata of a folder. FormatError: it has none. OSError: there is no such file."""
    path = os.path.join(folder, _INFO)
    values = read_json_object(path)[0].get(_KEY)
    if not isinstance(values, dict):
        raise FormatError(
            f"{path}: no entry {_KEY!r}: the dataset was not written by convert --to save_to_disk, or another program"
            f" saved it again; use preprocess --input {folder} for any other dataset on disk"
        )
    if values.get("version") != _VERSION:
        raise FormatError(f"{path}: {_KEY!r} is not of version {_VERSION}; upgrade megatron-sft-idx")
    return values


@recogniser
def recognise(path: str) -> bool:
    """Return whether a folder is a dataset written by this package."""
    return os.path.isdir(path) and bool(_read_info(path))


@recogniser
def _is_file_of_folder(path: str) -> bool:
    """Return whether a file is one of the three files of such a folder."""
    folder, name = os.path.split(path)
    return name in (_DATA, _INFO, _STATE) and bool(_read_info(folder))


class Reader(PackedReader):
    """A folder written by this package. Each process opens its own reader; threads can share one.

    Reading one pack decodes its record batch, about 16 MiB, which is cached for the next read.

    Raises:
        SFTIndexError: pyarrow is not installed.
    """

    label_only = "labels define the trained tokens, and models shift them; leave mask alignment {!r} out"

    def _open(self) -> None:
        self.alignment = "token"
        self._lock = threading.Lock()
        self._held: tuple[int, PackRun] | None = None
        try:
            values = self._package_metadata = _read_info(self.path)
            self._data = os.path.join(self.path, _DATA)
            self.identity = file_identity(os.path.join(self.path, _INFO), self._data)
            size = os.stat(self._data).st_size
        except OSError as error:
            raise FormatError(f"{error.filename}: {error.strerror}; expected a folder with {_INFO}, {_DATA}") from None
        names = {
            "num_packs": 0,
            "num_sequences": 0,
            "num_tokens": 0,
            "longest_pack": 0,
            "row_length": 1,
            "batch_rows": 1,
        }
        counts = {name: int_within(values, name, minimum, MAX_COUNT) for name, minimum in names.items()}
        if wrong := [name for name, count in counts.items() if count is None]:
            raise FormatError(f"{self.path}: {wrong[0]} in {_INFO} is {values.get(wrong[0])!r}, expected a count")
        self._counts = {name: count for name, count in counts.items() if count is not None}
        self.num_packs = self._counts["num_packs"]
        places: Any = values.get("batches")
        batches = -(-self.num_packs // self._counts["batch_rows"])
        good = isinstance(places, list) and len(places) == batches + 1 and all(type(place) is int for place in places)
        if not good or places[0] < 1 or places != sorted({*places}) or places[-1] > size:
            raise FormatError(
                f"{self.path}: {_INFO} does not give a position in {_DATA} for each of {batches} record batches"
            )
        self._places: list[int] = places
        with pyarrow_errors(self._data, "Arrow"):
            import pyarrow as pa

            self._schema = pa.ipc.read_schema(pa.py_buffer(self._bytes(0, places[0])))
            if not self._schema.equals(_schema()):
                raise FormatError(f"{self._data}: its fields are {self._schema}, expected {_schema()}")
        token_dtype = np.uint16 if values.get("token_dtype") == "uint16" else np.int32
        self._dtypes = np.dtype(token_dtype), np.dtype(np.uint8)
        names_of_counts = "num_sequences", "num_tokens", "longest_pack"
        self.spec = self._make_spec(*(self._counts[name] for name in names_of_counts))

    def _bytes(self, start: int, stop: int) -> bytes:
        with open_regular(self._data) as file:
            file.seek(start)
            data = file.read(stop - start)
        if len(data) != stop - start:
            raise FormatError(f"{self._data}: truncated while it was read; copy or write it again")
        return data

    def read(self, index: int) -> Pack:
        """Return pack ``index``, as views of the decoded batch. All packs of the batch are checked."""
        number, row = divmod(index, self._counts["batch_rows"])
        with self._lock:
            if self._held is None or self._held[0] != number:
                self._held = number, self._batch(number)
            run = self._held[1]
        return run.pack(row)

    def _runs(self) -> Iterator[PackRun]:
        counts = PackCounts()
        for number in range(len(self._places) - 1):
            counts.add(run := self._batch(number))
            yield run
        found = counts.num_packs, counts.num_sequences, counts.num_tokens, counts.longest_pack
        expected = tuple(self._counts[name] for name in ("num_packs", "num_sequences", "num_tokens", "longest_pack"))
        if found != expected:
            raise FormatError(
                f"{self.path}: packs, sequences, tokens, longest pack are {found}, but {expected} in {_INFO}"
            )

    def _batch(self, number: int) -> PackRun:
        """The packs of a record batch, all checked."""
        import pyarrow as pa

        first = number * self._counts["batch_rows"]
        rows = min(self._counts["batch_rows"], self.num_packs - first)
        with pyarrow_errors(self._data, "Arrow"):
            message = pa.py_buffer(self._bytes(*self._places[number : number + 2]))
            batch = pa.ipc.read_record_batch(message, self._schema)
            batch.validate(full=True)
            if batch.num_rows != rows:
                raise FormatError(f"{self._data}: record batch {number} has {batch.num_rows} rows, expected {rows}")
            fields = {name: list_field(batch.column(name), self.path, name, first) for name in _FIELDS}
        return self._checked(first, self._run_of(first, fields))

    def _run_of(self, first: int, fields: dict[str, tuple[NDArray[Any], NDArray[np.int64]]]) -> PackRun:
        """Convert rows to packs with token-aligned masks. SequenceError: the fields of a row contradict each other."""
        length = self._counts["row_length"]
        lengths, segments = fields["seq_lengths"]
        for name in _TOKEN_FIELDS:
            self._require(first, name, fields[name][1] == length)
        self._require(first, "seq_lengths", segments > 0)
        lengths = lengths.astype(np.int64)
        rows = np.repeat(np.arange(len(segments)), segments)
        bad_rows = np.zeros(len(segments), np.bool_)
        bad_rows[rows[(lengths < 1) | (lengths > length)]] = True
        self._require(first, "seq_lengths", ~bad_rows)
        last = np.cumsum(segments) - 1
        ends = np.cumsum(lengths)
        self._require(first, "seq_lengths", np.diff(np.append(0, ends[last])) == length)

        ids, labels, numbers, positions = (fields[name][0].reshape(-1, length) for name in _TOKEN_FIELDS)
        padding = (numbers == 0).sum(1)
        ordinals = np.arange(len(lengths)) - np.repeat(last + 1 - segments, segments) + 1
        ordinals[last[padding > 0]] = 0
        as_numbers = np.repeat(ordinals, lengths).reshape(-1, length)
        as_positions = (np.arange(ids.size) - np.repeat(ends - lengths, lengths)).reshape(-1, length)
        is_token = as_numbers > 0
        trained = labels != _UNTRAINED
        self._require(first, "attention_mask", (numbers == as_numbers).all(1) & is_token.any(1))
        self._require(first, "position_ids", (positions == as_positions).all(1))
        self._require(first, "labels", (~trained | ((labels == ids) & is_token)).all(1))
        is_sequence = ordinals > 0
        starts = (ends - lengths) % length
        return PackRun(
            ids[is_token],
            trained[is_token],
            starts[is_sequence],
            length - padding,
            segments - (padding > 0),
        )

    def _require(self, first: int, name: str, good: NDArray[np.bool_]) -> None:
        """Raise SequenceError, with the name of the field, at the first row that is not good."""
        if (row := first_true(~good)) is not None:
            raise SequenceError(
                self.path, first + row, f"{name} contradicts the other fields; the folder is damaged: write it again"
            )


class Writer(PackedWriter):
    """Writes a folder for ``datasets.load_from_disk``, without the library ``datasets``.

    The same packs give the same bytes with the same version of pyarrow.
    """

    format = "save_to_disk"
    reader, kind = Reader, Kind("a Hugging Face dataset of packs", _is_file_of_folder)
    is_folder = True
    binary_masks = True

    def _begin(self, spec: PackedSpec) -> None:
        self._row_length = -(-max(spec.longest_pack, 1) // _ROW_MULTIPLE) * _ROW_MULTIPLE
        self._batch_rows = max(1, RUN_TOKENS // self._row_length)
        self._values: dict[str, Any] = {
            "version": _VERSION,
            "token_dtype": spec.token_dtype.name,
            "num_packs": spec.num_packs,
            "num_sequences": spec.num_sequences,
            "row_length": self._row_length,
            "batch_rows": self._batch_rows,
            **spec.package_metadata(),
        }
        encode_json(self._path, self._values)  # reports now what the folder could not store at the end
        with pyarrow_errors(self._path, "Arrow"):
            self._schema = _schema()
            beginning = self._schema.serialize().to_pybytes()
        itemsize = np.dtype(np.int32).itemsize
        row_nbytes = len(_TOKEN_FIELDS) * itemsize * self._row_length
        self._make_output(row_nbytes * spec.num_packs + itemsize * spec.num_sequences, 3)
        self._file = HashedFile(self._output.open(_DATA))
        self._file.write(beginning)
        self._places = [len(beginning)]
        self._held: list[PackRun] = []
        self._num_held = 0

    def _append(self, run: PackRun) -> None:
        if run.pack_lengths.max(initial=0) > self._row_length:
            raise FormatError(
                f"{self._path}: a pack is longer than the {self._row_length} positions in the spec of this writer"
            )
        first = 0
        while first < len(run):
            last = min(len(run), first + self._batch_rows - self._num_held)
            self._held.append(run.subrun(first, last))
            self._num_held += last - first
            first = last
            if self._num_held == self._batch_rows:
                self._write_batch()

    def _write_batch(self) -> None:
        """Write the pending packs as one record batch."""
        import pyarrow as pa

        run = PackRun.joined(self._held)
        self._held, self._num_held = [], 0
        packs, length = len(run), self._row_length
        padding = length - run.pack_lengths
        # The padding of a pack is one more segment after its sequences.
        is_padded = padding > 0
        ends_of_packs = run.sequence_offsets[1:]
        segment_lengths = np.insert(run.sequence_lengths(), ends_of_packs[is_padded], padding[is_padded])
        segments = run.pack_sequences + is_padded
        last = np.cumsum(segments) - 1
        numbers = np.arange(len(segment_lengths)) - np.repeat(last + 1 - segments, segments) + 1
        numbers[last[is_padded]] = 0
        starts = np.cumsum(segment_lengths) - segment_lengths
        attention_mask = np.repeat(numbers, segment_lengths).astype(np.int32)
        positions = (np.arange(packs * length) - np.repeat(starts, segment_lengths)).astype(np.int32)
        is_token = attention_mask > 0
        ids, labels = np.zeros(packs * length, np.int32), np.full(packs * length, _UNTRAINED, np.int32)
        ids[is_token] = run.tokens
        trained = np.flatnonzero(run.loss_mask)
        labels[np.flatnonzero(is_token)[trained + 1]] = run.tokens[trained + 1]
        row_ends = np.arange(packs + 1, dtype=np.int32) * length
        lists = [pa.ListArray.from_arrays(row_ends, values) for values in (ids, labels, attention_mask, positions)]
        lists.append(
            pa.ListArray.from_arrays(np.append(0, last + 1).astype(np.int32), segment_lengths.astype(np.int32))
        )
        data = pa.RecordBatch.from_arrays(lists, schema=self._schema).serialize()
        self._file.write(memoryview(data))
        self._places.append(self._places[-1] + data.size)

    def _finish(self) -> None:
        if self._held:
            self._write_batch()
        self._file.write(_END_OF_STREAM)
        self._file.file.close()
        feature = {"feature": {"dtype": "int32", "_type": "Value"}, "length": -1, "_type": "Sequence"}
        info = {
            "citation": "",
            "description": "",
            "features": dict.fromkeys(_FIELDS, feature),
            "homepage": "",
            "license": "",
            _KEY: {**self._values, "batches": self._places},
        }
        state: dict[str, Any] = {
            "_data_files": [{"filename": _DATA}],
            "_fingerprint": self._file.hex()[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        for name, values in (_INFO, info), (_STATE, state):
            with closing(self._output.open(name)) as file:
                file.write(json.dumps(values, indent=2).encode() + b"\n")
