"""Use another shard as the source of sequences: a tokenised corpus, or packs to repack."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.column import weighted_by
from megatron_sft_idx.layout.files import listed_columns
from megatron_sft_idx.packs.conditions import conditions_of, selected_sequences
from megatron_sft_idx.packs.run import fewer_tokens, nbytes_to_check, require_checksums
from megatron_sft_idx.packs.run_media import RunMedia
from megatron_sft_idx.packs.source_names import SOURCE, origin_name, source_names
from megatron_sft_idx.packs.split import refuse_other_splits
from megatron_sft_idx.shard import BuildOptions, Shard, pair_numbers
from megatron_sft_idx.shard.publication import job_folder, places_of
from megatron_sft_idx.shard.writer import MaskAlignment
from megatron_sft_idx.storage import require_local
from megatron_sft_idx.storage.building import Building
from megatron_sft_idx.storage.progress import show_progress
from megatron_sft_idx.tokenize.column_weights import Weights, require_weight_column
from megatron_sft_idx.tokenize.gather import ToPack, make_packs, output_prefixes, require_outputs_apart
from megatron_sft_idx.tokenize.plan import FileSequences, GatheredCuts, PackOptions, PlannedRun, SequenceReader
from megatron_sft_idx.tokenize.report import PackReport

# Number of bytes to check between two lines of progress without a terminal.
_CHECK_LOG_MIB = 1024


def pack_shard(
    source: Shard,
    prefix: str,
    options: PackOptions,
    *,
    shards: int = 1,
    overwrite: bool = False,
    log_interval: int = 0,
    lossy: bool = False,
    job: Building | None = None,
) -> PackReport:
    """Pack the sequences of a shard into one or several new shards at ``prefix``.

    Memory: about 40 bytes per sequence for the plan, and a few MiB for the tokens.

    Args:
        source: a tokenised corpus, or packs.
        prefix: prefix of the new shard, or the beginning of the prefixes of several.
        options: which sequences to pack, and how.
        shards: number of shards; their numbers of packs differ by at most one.
        overwrite: replace shards at the prefixes.
        log_interval: number of sequences between two lines of progress without a terminal; 0 for none.
        lossy: drop columns with one row per pack; otherwise they are an error.
        job: the building folder of the prefix, if the caller has taken it.

    Raises:
        SequenceError: sequences are longer than the capacity, and must not be dropped, truncated or split.
        CorruptShardError: the shard does not match its checksums; nothing is written.
        FormatError: an option is invalid, a condition or weight uses a column that the shard does not have, there is no
            sequence to pack, there is a column with one row per pack, or ``prefix`` is that of the source.
    """
    for path in (source.prefix, prefix):
        require_local(path, "packing")
    header, reader, groups = source.header, CorpusReader(source, lossy=lossy), pair_numbers(source)
    used = check_packing(source, options)
    media = source.media is not None
    paths = ShardPaths.of(source.prefix).with_columns(reader.columns).with_media(media)
    reads = places_of(paths, "the shard to be packed")
    require_outputs_apart(output_prefixes(prefix, shards), reads, reader.columns, media=media)
    if shards > 1:
        refuse_other_splits(prefix, shards)
    # Packs are read in the order of the plan, in which no checksum can be computed.
    watch = show_progress(_CHECK_LOG_MIB if log_interval else 0)
    columns = {name: column for name, column in source.columns.items() if name in {*reader.columns, *used}}
    with watch("checking", nbytes_to_check(source.files, columns)) as advance:
        require_checksums(source.files, columns, advance, source.media)
    # A tokenised corpus is identified by the fingerprint of its input, a packed shard by its id.
    identity = (None if "packing" in header.metadata else header.source) or header.shard_id.hex()
    # An attached column can be replaced without changing the shard.
    attached = sorted(columns.keys() - listed_columns(header.metadata).keys())
    checksums = {name: columns[name].header.checksum.hex() for name in attached}
    sequences = ToPack(
        reader,
        reader.lengths,
        source.prefix,
        BuildOptions(
            header.token_dtype,
            header.mask_dtype,
            capacity=None,
            sequence_multiple=1,
            pad_id=header.pad_id,
            metadata=header.metadata,
            media=media,
            columns={name: column.spec for name, column in reader.columns.items()},
        ),
        {"source": identity} | ({"attached_columns": checksums} if checksums else {}),
        groups,
        kept=selected_sequences(source, options.where) if options.where else None,
    )
    common: dict[str, Any] = {"shards": shards, "overwrite": overwrite, "log_interval": log_interval}
    if job is not None:
        made = make_packs(sequences, job, options, work="preprocess", **common)
    else:
        with job_folder(prefix, {"work": "pack"}, overwrite=overwrite) as own_job:
            made = make_packs(sequences, own_job, options, work="pack", **common)
    return replace(PackReport.of(made.headers, made.overlong), lost_columns=reader.lost_columns, found=made.found)


def check_packing(source: Shard, options: PackOptions) -> set[str]:
    """Return the columns of a shard that the options use for selecting or weighting sequences.

    Raises:
        FormatError: the column does not exist, has unsuitable values, or was already multiplied into the masks.
    """
    used, name = {test.column for test in conditions_of(source, options.where)}, options.loss_weight_column
    if name is None:
        return used
    require_weight_column(name, {each: column.spec for each, column in source.columns.items()}, source.prefix)
    if name in weighted_by(source.header.metadata):
        raise FormatError(
            f"{source.prefix}: --loss-weight-column {name}: the masks were already multiplied by this column; pack the"
            " shard that this one was packed from, or store the weights as a column with another name"
        )
    return {*used, name}


class CorpusReader(SequenceReader):
    """The sequences of a shard, independent of its packs.

    Args:
        source: the shard.
        lossy: drop columns with one row per pack; otherwise they are an error.

    Attributes:
        lengths: number of tokens of each sequence, int64 [sequences].
        columns: the columns with one row per sequence or token, by name.
        lost_columns: names of the dropped columns.
    """

    mask_alignment: MaskAlignment = "label"
    window_tokens = 1 << 20

    def __init__(self, source: Shard, *, lossy: bool = False) -> None:
        self._source, self._prefix = source, source.prefix
        self._tokens, self._loss = source.files.tokens[:], source.files.loss[:]
        self.mask_dtype = self.stored_dtype = self._loss.dtype
        self._bounds = source.sequence_bounds()
        self.lengths = np.diff(self._bounds)
        columns = dict(source.columns)
        self.lost_columns = sorted(name for name, column in columns.items() if column.spec.per == "pack")
        if self.lost_columns and not lossy:
            raise FormatError(
                f"{source.prefix}: columns {', '.join(self.lost_columns)} have one row per pack, so they do not fit"
                " the new packs; pass lossy (--lossy) to leave them out"
            )
        self.columns = {name: column for name, column in columns.items() if name not in self.lost_columns}
        specs = {name: column.spec for name, column in self.columns.items()}
        self.window_tokens = fewer_tokens(self.window_tokens, specs)

    def weigh_by(
        self, column: str, sequences: NDArray[np.int64], lengths: NDArray[np.int64], *, per_token: bool = False
    ) -> None:
        """See ``SequenceReader.weigh_by``. Columns with one row per token or pack can also be weights."""
        per_token = self._source.columns[column].spec.per == "token"
        super().weigh_by(column, sequences, lengths, per_token=per_token)

    def place_of(self, sequence: int) -> str:
        """Return the input line from which a sequence was made, if the shard has it; else pack and sequence."""
        if (names := source_names(self._source.columns)) is not None:
            return origin_name(names, self._source.columns[SOURCE].values[sequence : sequence + 1][0].tolist())
        offsets = self._source.files.sequence_offsets
        pack = int(np.searchsorted(offsets[:], sequence, "right")) - 1
        return f"{self._prefix}: pack {pack}, sequence {sequence - int(offsets[pack : pack + 1][0])}"

    def media_of(self, sequences: NDArray[np.int64]) -> RunMedia | None:
        """See ``SequenceReader.media_of``."""
        return self._media and self._media.taken(sequences)

    @cached_property
    def _media(self) -> RunMedia | None:
        """Images and audio of all sequences."""
        if (media := self._source.media) is None:
            return None
        return media.of_sequences(0, self._source.sequence_offsets, self._source.files.starts[:].astype(np.int64))

    def read(self, run: PlannedRun) -> GatheredCuts:
        """See ``SequenceReader.read``. Columns are in the order of their names in the shard."""
        ids, mask, of_sequences, media = super().read(run)
        lengths = run.lengths.astype(np.int64)
        ends = np.cumsum(lengths)
        # After a cut, the last label is missing. At the end of a whole sequence it is already 0 (rule P6).
        mask[ends - 1] = 0
        columns = {}
        for name, column in self.columns.items():
            spec, values = column.spec, of_sequences.get(name)
            if values is None:
                values = np.empty(len(ids), column.items_in_memory.dtype)
                starts = self._bounds[run.sequences] + (0 if run.begins is None else run.begins)
                # As bytes: rows may be of any width.
                first, nbytes, place = (each * spec.row_nbytes for each in (starts, lengths, ends - lengths))
                _native.gather_sequences(
                    column.items_in_memory.view(np.uint8), first, nbytes, place, values.view(np.uint8)
                )
            columns[name] = values.view(spec.dtype).reshape(spec.shape(len(values)))
        return GatheredCuts(ids, mask, columns, media)

    def _by_file(self, sequences: NDArray[np.int64]) -> Iterator[FileSequences]:
        order = np.argsort(sequences, kind="stable")
        ascending = sequences[order]
        of_sequences = {name: each for name, each in self.columns.items() if each.spec.per == "sequence"}
        columns = {name: column.items_in_memory[ascending] for name, column in of_sequences.items()}
        starts, lengths = self._bounds[ascending], self.lengths[ascending]
        weights = None if self.weighted_by is None else self._weights(ascending)
        yield FileSequences(self._prefix, order, starts, lengths, self._tokens, self._loss, columns, weights)

    def _weights(self, sequences: NDArray[np.int64]) -> Weights:
        assert self.weighted_by is not None
        column = self._source.columns[self.weighted_by]
        values, spec = column.items_in_memory, column.spec
        if spec.per == "token":
            # Value j of a label-aligned mask is about token j + 1, and so is row j of a label-aligned column.
            return Weights(values, of_sequences=False, shift=spec.alignment == "token")
        if spec.per == "pack":
            sequences = np.searchsorted(self._source.files.sequence_offsets[:], sequences, "right") - 1
        return Weights(values[sequences])
