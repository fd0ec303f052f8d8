"""Chats in, packed shards out, on this machine or on a cluster: the same bytes.

::

    this process                        tasks, here or anywhere
    cut the input into stretches   ->   tokenise a stretch              ->  a part: lengths, ids, masks
    plan all packs on lengths      <-   lengths, four bytes a sequence
    share the plan out             ->   gather an output shard          <-  parts
                                                                        ->  five files a shard

A task makes a part, whole or not there, so it may be done twice, and what an interrupted run has made is used again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.inputs import InputFile, expand_inputs, total_bytes
from megatron_sft_idx.chat.pieces import iter_pieces
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.packs.split import refuse_other_splits
from megatron_sft_idx.shard import Shard, ShardWriter, check_free
from megatron_sft_idx.shard.prefix import places_of
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.hashing import StreamHash
from megatron_sft_idx.storage.progress import Progress
from megatron_sft_idx.storage.publish import Place, require_apart
from megatron_sft_idx.tokenize.begin import (
    Job,
    PreprocessOptions,
    Start,
    begin,
    corpus_prefix,
    find_done,
)
from megatron_sft_idx.tokenize.cut import Cutting, Stretch, cut_input
from megatron_sft_idx.tokenize.encoding import EncodingOptions, RowEncoder
from megatron_sft_idx.tokenize.gather import (
    GatherTask,
    PartsReader,
    PartsTable,
    count_trained,
    drop_build,
    gather_shard,
    pack_shard,
    parted_by_part,
    publish_shards,
    write_packs,
    write_shard,
)
from megatron_sft_idx.tokenize.local import Local, available_cpus
from megatron_sft_idx.tokenize.outcome import CorpusReport, PackReport, Summary, timed
from megatron_sft_idx.tokenize.parts import (
    MadePart,
    TokenizingJob,
    digest_of,
    make_parts,
    parts_of,
    remember_encoder,
)
from megatron_sft_idx.tokenize.plan import PackedRun, Selection, output_prefixes, plan_packs
from megatron_sft_idx.tokenize.ray import Cluster, ray_cluster
from megatron_sft_idx.tokenize.run_folder import RunFolder

__all__ = ["Preview", "preprocess", "preview"]

_Engine = Local | Cluster
_SAMPLE_NBYTES = 1 << 18
# Nothing fits any more: all that this run has made is given back.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def preprocess(options: PreprocessOptions, log: Callable[[str], None] = lambda line: None) -> Summary:
    """Make the packed shard; see ``PreprocessOptions``.

    The tokenised parts are kept when packing fails, and a later run with the same input and encoding goes on from them.

    Raises:
        SFTIndexError: an input, a row, an option, or something in the way at the prefix.
        OSError: the disk says no.
    """
    if options.output_shards > 1:
        refuse_other_splits(options.prefix, options.output_shards)
    if options.engine == "ray" and is_remote(options.prefix):
        raise FormatError(
            f"{options.prefix}: --engine ray writes to a file system that all nodes share; name a prefix there, and"
            " copy the shards afterwards"
        )
    try:
        with contextlib.ExitStack() as stack:
            return _Run(options, log, stack).run()
    finally:
        remember_encoder(None)


@dataclass(slots=True)
class _Tokenized:
    """What is known once all parts are there: four bytes a sequence, and some hundred a part."""

    paths: list[str] = field(default_factory=list)
    lengths: list[NDArray[np.uint32]] = field(default_factory=list)
    report: CorpusReport = field(default_factory=CorpusReport)
    notes: Counter[str] = field(default_factory=Counter)
    fingerprint: str = ""
    mask_dtype: str = "uint8"
    reused: int = 0

    def table(self) -> PartsTable:
        bounds = np.cumsum([0, *map(len, self.lengths)], dtype=np.int64)
        return PartsTable(self.paths, bounds, self.mask_dtype)


class _Run:
    def __init__(self, options: PreprocessOptions, log: Callable[[str], None], stack: contextlib.ExitStack) -> None:
        self.options, self.log, self.stack = options, log, stack
        self.pool: Local | None = None
        self.folder = RunFolder.of(options.prefix)
        self.corpus = corpus_prefix(options.prefix)
        self.seconds: dict[str, float] = {}
        self.tokenized = _Tokenized()
        self.keep_parts = False  # whatever ends the run

    def run(self) -> Summary:
        with timed(self.seconds, "preparing"):
            files = expand_inputs(self.options.inputs)
            outputs = output_prefixes(self.options.prefix, self.options.output_shards)
            written = [
                place for path in (*outputs, self.corpus) for place in places_of(path, "the output", written=True)
            ]
            require_apart(written, [Place(file.path, "the input") for file in files])
            if self.options.engine == "local":
                # Workers import meanwhile what they need.
                workers = self.options.workers
                self.pool = self.stack.enter_context(Local(available_cpus() if workers is None else workers))
            encoder = RowEncoder(self.options.encoding)
            job = Job(self.options, files, encoder, Cutting.of(files), self.log)
            if done := find_done(job):
                return self._found(done)
        with self.folder.locked():
            start = begin(job)
            try:
                report, packing = self._make(job, start)
            except BaseException as error:
                self._end_badly(error)
                raise
            self.folder.clear()
        return self._summary(report, packing)

    def _found(self, headers: Sequence[Header]) -> Summary:
        self.log(f"{self.options.prefix}: done already, with the same input and options")
        # The run may have been killed as it removed its parts; a folder of somebody else stays.
        with contextlib.suppress(FormatError, OSError):
            if os.listdir(self.folder.path):
                with self.folder.locked():
                    self.folder.clear()
        return self._summary(CorpusReport.of(headers[0]), PackReport.of(headers), found=True)

    def _summary(self, report: CorpusReport, packing: PackReport, *, found: bool = False) -> Summary:
        options = self.options
        return Summary(options.prefix, options.packing.capacity, report, packing, self.seconds, found=found)

    def _end_badly(self, error: BaseException) -> None:
        """Keep what can be gone on with, and say where it is; give the rest of the space back."""
        where, interrupted = self.folder.path, not isinstance(error, Exception)
        if "tokenising" in self.seconds:
            kept = self.corpus if not self.folder.has_parts() else where
            self.log(f"the tokenised corpus is kept at {kept}; the next run with the same input goes on from it")
            if interrupted:
                self.log("pass --resume to go on, or --overwrite to start anew")
            return
        of_input = isinstance(error, (FormatError, SequenceError))
        full = isinstance(error, OSError) and error.errno in _FULL
        if not self.folder.has_parts() or not (self.keep_parts or not (of_input or full)):
            self.folder.clear()
            return
        rows = f"{self.tokenized.report.rows:,} rows are kept at {where}"
        if interrupted:
            self.log(f"interrupted; {rows}: pass --resume to go on, or --overwrite to start anew")
        elif not self.keep_parts:
            self.log(f"{rows}; pass --resume to go on with them")

    def _make(self, job: Job, start: Start) -> tuple[CorpusReport, PackReport]:
        if start.corpus is not None:
            self.seconds["tokenising"] = 0.0
            with timed(self.seconds, "packing"):
                return CorpusReport.of(start.corpus.header), self._pack_corpus(start.corpus, start)
        options = self.options
        engine: _Engine = self.pool or self.stack.enter_context(
            ray_cluster(options.ray_address, options.workers, self.log)
        )
        with timed(self.seconds, "tokenising"):
            self._tokenize(engine, job, start)
            self.folder.write(dataclasses.replace(start.state, tokenized=True))
        table, report = self.tokenized.table(), self.tokenized.report
        lengths = np.concatenate(self.tokenized.lengths).astype(np.int64)
        self.tokenized.lengths.clear()  # gigabytes of a large corpus
        with timed(self.seconds, "packing"):
            if not job.options.keep_corpus:
                return report, self._gather(engine, job, start, table, lengths)
            self._join(job, start, table, lengths)
            self.folder.remove_parts()
            return report, self._pack_corpus(Shard(self.corpus), start)

    # ---- tokenise ----

    def _tokenize(self, engine: _Engine, job: Job, start: Start) -> None:
        result, log_interval = self.tokenized, self.options.log_interval
        there = parts_of(self.folder.path)
        shared = TokenizingJob(
            self.folder.path, _everywhere(job.encoder), digest_of(job.encoder), job.cutting, start.anew
        )
        remember_encoder(shared.encoding, job.encoder)
        pieces = StreamHash()
        lines: Counter[int] = Counter()
        cut: deque[Stretch] = deque()

        def stretches() -> Iterator[Stretch]:
            readers = engine.workers if isinstance(engine, Cluster) else 0
            for stretch in cut_input(job.files, job.cutting, readers=readers):
                cut.append(dataclasses.replace(stretch, dealt=()))
                yield dataclasses.replace(stretch, found=there.get((stretch.number, stretch.part), ()))

        with Progress(
            "tokenising", total_bytes(job.files), unit="B", log_interval=log_interval, items="rows"
        ) as progress:

            def done(parts: list[MadePart]) -> None:
                for part in parts:
                    (progress.found if part.reused else progress.update)(part.info.num_bytes, part.info.rows)

            with closing(engine.map_in_order(make_parts, shared, stretches(), name_of=str, done=done)) as tasks:
                for parts in tasks:
                    stretch = cut.popleft()
                    for part in parts:
                        before = lines[stretch.number] if stretch.nbytes is not None else 0
                        self._take(part, stretch.name, before)
                        pieces.update("".join(part.info.pieces).encode())
                        lines[stretch.number] += part.info.lines
        result.fingerprint, report = pieces.hex(), result.report
        if not any(map(len, result.lengths)):
            raise FormatError(
                f"{job.files[0].path}: no usable row in the input ({report.rows} rows, {report.skipped} skipped)"
            )
        report.notes = {name: count for name, count in sorted(result.notes.items()) if count}
        report.reused = result.reused == len(result.paths)
        if result.reused:
            self.log(f"resuming: {result.reused:,} of {len(result.paths):,} parts were there already")

    def _take(self, part: MadePart, name: str, before: int) -> None:
        """Take in one part, in the order of the input; ``before`` rows of its file are in others."""
        info, result = part.info, self.tokenized
        if part.changed is not None:
            self.keep_parts = True
            raise FormatError(
                f"{self.folder.path}: {name}, from row {before + 1} on, is not what the interrupted run read: the"
                f" content of the input was {part.changed[0]}, is {part.changed[1]}; restore it to go on, or pass"
                " --overwrite to start anew"
            )
        if self.options.resume and not part.reused and result.reused == len(result.paths):
            self.log(f"resuming after {result.report.rows:,} rows")
        bad_rows = (SequenceError(name, before + position, reason) for position, reason in info.bad_rows)
        result.report.add(info.rows, bad_rows, info.straddling, self.options.encoding.on_bad_row, self.log)
        result.report.skipped += info.skipped - len(info.bad_rows)
        result.notes.update(info.notes)
        if info.mask_dtype == "float32":
            result.mask_dtype = "float32"
        result.paths.append(part.path)
        result.lengths.append(part.lengths)
        result.reused += part.reused

    def _metadata(self, job: Job) -> dict[str, Any]:
        """Of the headers of all shards that come of the parts."""
        report = self.tokenized.report
        sources = {"fingerprint": self.tokenized.fingerprint, "rows": report.rows, "skipped": report.skipped}
        return {**job.encoder.describe(), "sources": sources, "notes": report.notes}

    # ---- gather ----

    def _gather(
        self, engine: _Engine, job: Job, start: Start, table: PartsTable, lengths: NDArray[np.int64]
    ) -> PackReport:
        options = self.options
        packing = plan_packs(lengths, options.packing, shards=options.output_shards, source=options.prefix)
        behind_cuts = parted_by_part(table, packing.cuts.parted, packing.cuts.parted_at)
        counts = engine.map_in_order(count_trained, None, behind_cuts, name_of=lambda cut: cut.path)
        outputs = list(
            packing.outputs(
                os.path.abspath(options.prefix) if isinstance(engine, Cluster) else options.prefix,
                self._metadata(job),
                self.tokenized.fingerprint,
                sum(counts),
                token_dtype=job.encoder.token_dtype.name,
                mask_dtype=table.mask_dtype,
                pad_id=job.encoder.tokenizer.pad_id,
            )
        )
        replaces, total, interval = start.state.overwrite, len(packing.cuts.lengths), options.log_interval
        with Progress("packing", total, unit="seq", log_interval=interval, items="sequences") as progress:

            def write(numbers: Sequence[int]) -> Iterator[Header]:
                # One alone is written here, where its progress can be seen; a cluster's disks are for its nodes.
                if isinstance(engine, Local) and (len(numbers) == 1 or not engine.workers):
                    reader = PartsReader(table)
                    for number in numbers:
                        run = packing.run(number)
                        yield write_shard(reader, outputs[number], run, overwrite=replaces, progress=progress.update)
                    return
                tasks = (GatherTask(outputs[number], packing.run(number), replaces) for number in numbers)
                yield from engine.map_in_order(
                    gather_shard,
                    table,
                    tasks,
                    name_of=lambda task: task.output.prefix,
                    done=lambda header: progress.update(header.num_sequences, header.num_sequences),
                )

            headers = publish_shards(options.prefix, outputs, write, overwrite=replaces, keep=options.resume)
        return PackReport.of(headers)

    def _join(self, job: Job, start: Start, table: PartsTable, lengths: NDArray[np.int64]) -> None:
        """Join the parts, in the order of the input, into an unpacked shard."""
        if self.options.resume:
            drop_build(ShardPaths.of(self.corpus))
        everything = Selection(np.arange(len(lengths)), None, lengths.astype(np.uint32))
        run = PackedRun(np.arange(len(lengths) + 1), everything, int(lengths.max()))
        interval = self.options.log_interval
        with (
            Progress("joining", len(lengths), unit="seq", log_interval=interval, items="sequences") as progress,
            ShardWriter(
                self.corpus,
                token_dtype=job.encoder.token_dtype,
                mask_dtype=np.dtype(table.mask_dtype),
                pad_id=job.encoder.tokenizer.pad_id,
                overwrite=start.state.overwrite,
                metadata=self._metadata(job),
            ) as writer,
        ):
            write_packs(PartsReader(table), run, writer, progress.update)

    def _pack_corpus(self, corpus: Shard, start: Start) -> PackReport:
        options = self.options
        return pack_shard(
            corpus,
            options.prefix,
            options.packing,
            shards=options.output_shards,
            overwrite=start.state.overwrite,
            keep=options.resume,
            log_interval=options.log_interval,
        )


def _everywhere(encoder: RowEncoder) -> EncodingOptions:
    """Its options, as tasks on other machines are told them."""
    return dataclasses.replace(encoder.options, tokenizer=os.path.abspath(encoder.options.tokenizer))


# ---- a look at what a run would do ----


@dataclass(frozen=True, slots=True)
class Preview:
    """A run's first rows.

    Attributes:
        files: all inputs.
        rows: rows looked at: those in the first quarter MiB of input.
        bad_rows: which of them cannot be used, and why.
        lengths: tokens of each sequence they make, int64 [sequences].
        trained_tokens: how many of those tokens are trained on.
        overlong: sequences longer than the capacity.
        first_ids: ids of the first sequence.
        first_mask: its label-aligned mask.
        decode: ids to text.
    """

    files: Sequence[InputFile]
    rows: int
    bad_rows: Sequence[SequenceError]
    lengths: NDArray[np.int64]
    trained_tokens: int
    overlong: int
    first_ids: NDArray[Any]
    first_mask: NDArray[Any]
    decode: Callable[[Sequence[int]], str]


def preview(options: PreprocessOptions) -> Preview:
    """Check everything a run needs, and encode its first rows.

    Raises:
        SFTIndexError: an input, an option, or something in the way at the prefix.
    """
    files = expand_inputs(options.inputs)
    encoder = RowEncoder(options.encoding)
    for prefix in output_prefixes(options.prefix, options.output_shards):
        check_free(ShardPaths.of(prefix), overwrite=options.overwrite)
    pieces = [encoder.encode(piece) for piece in islice(iter_pieces(files, piece_nbytes=_SAMPLE_NBYTES), 1)]
    lengths = np.concatenate([np.empty(0, np.int64), *(piece.lengths for piece in pieces)])
    first = int(lengths[0]) if len(lengths) else 0
    mask = pieces[0].loss_mask if pieces else np.empty(0, np.uint8)
    return Preview(
        files=files,
        rows=sum(piece.rows for piece in pieces),
        bad_rows=[error for piece in pieces for error in piece.bad_rows],
        lengths=lengths,
        trained_tokens=int(np.count_nonzero(mask)),
        overlong=int((lengths > options.packing.longest_sequence).sum()),
        first_ids=pieces[0].input_ids[:first] if first else np.empty(0, np.int32),
        first_mask=np.append(mask[1:first], mask.dtype.type(0)) if first else mask,
        decode=encoder.tokenizer.decode,
    )
