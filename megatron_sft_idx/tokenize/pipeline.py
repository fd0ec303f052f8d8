"""A job from its input to published shards, on this machine or on a cluster, with the same bytes.

::

    this process                        tasks, here or anywhere
    cut the input into stretches   ->   tokenise a stretch              ->  a part: lengths, ids, masks
    plan all packs on lengths      <-   lengths, four bytes a sequence
    share the plan out             ->   gather an output shard          <-  parts
                                                                        ->  five files a shard

A task writes a part whole or not at all. So a task may run twice, and a job uses the parts of an interrupted one again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.inputs import expand_inputs, total_bytes
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.layout import Header
from megatron_sft_idx.layout.column import PAIR, ColumnSpec
from megatron_sft_idx.shard import BuildOptions, Shard, ShardWriter, read_header
from megatron_sft_idx.shard.journal import locked_outputs
from megatron_sft_idx.storage.local import StreamHash
from megatron_sft_idx.storage.progress import Progress
from megatron_sft_idx.tokenize.begin import Job, JobState, PreprocessOptions, begin, find_finished
from megatron_sft_idx.tokenize.corpus import pack_shard
from megatron_sft_idx.tokenize.cut import Cutting, Stretch, cut_input
from megatron_sft_idx.tokenize.encoding import RowEncoder
from megatron_sft_idx.tokenize.gather import ToPack, make_packs, write_packs
from megatron_sft_idx.tokenize.local import Local, available_cpus
from megatron_sft_idx.tokenize.parts import (
    MadePart,
    PartSettings,
    PartsReader,
    PartsTable,
    make_parts,
    parts_of,
    remember_encoder,
)
from megatron_sft_idx.tokenize.plan import PlannedRun
from megatron_sft_idx.tokenize.ray import Cluster, ray_cluster
from megatron_sft_idx.tokenize.report import CorpusReport, PackReport, Summary
from megatron_sft_idx.tokenize.selection import select_rows

# Errors of a full disk: the parts of the job are removed, whose space others may need.
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def make_shards(options: PreprocessOptions, log: Callable[[str], None] = lambda line: None) -> Summary:
    """Make packed shards as ``options`` say; ``log`` takes lines for people.

    Where packing fails the parts are kept, and a later job with the same input and encoding uses them.

    Raises:
        SFTIndexError: an input, a row or an option that cannot be used, or files at the prefix that may not go.
        OSError: of the file system.
    """
    try:
        with contextlib.ExitStack() as stack:
            return _Preprocessing(options, log, stack).run()
    finally:
        remember_encoder(None)


class _InputChangedError(FormatError):
    """The input is not what an interrupted job read of it; the parts of that job stay for when it is restored."""


class _Preprocessing:
    """The work of one job, and how far it has come."""

    def __init__(self, options: PreprocessOptions, log: Callable[[str], None], stack: contextlib.ExitStack) -> None:
        self.start = time.monotonic()
        files = expand_inputs(options.inputs)
        options.require_outputs(files)
        self.options = options = replace(options, packing=options.packing_of(files))
        self.log, self.stack = log, stack
        # Which rows are packed; None for all of them.
        self.selection = options.packing.selection
        self.max_rows = None if self.selection is None else self.selection.max_rows
        self.engine: Local | Cluster | None = None
        if options.engine == "local":
            # Workers import their modules while this process goes on.
            workers = available_cpus() if options.workers is None else options.workers
            self.engine = stack.enter_context(Local(workers))
        self.encoder = RowEncoder(options.encoding_of(files))
        self.job = Job(options, files, self.encoder, Cutting.of(files), log)
        self.folder = self.job.folder
        self.seconds: dict[str, float] = {}
        self.report = CorpusReport()
        # Of each part of the job so far, in the order of the input: its path, the tokens of each of its sequences, the
        # number of its file, and how many rows of that file are in parts before it.
        self.paths: list[str] = []
        self.lengths: list[NDArray[np.uint32]] = []
        self.files_and_rows: list[tuple[int, int]] = []
        # Fingerprints of the whole input and of each file, and pieces they are of.
        self.fingerprint, self.file_fingerprints = StreamHash(), [StreamHash() for _ in files]
        self.pieces = 0
        self.reused_parts = 0
        self.mask_dtype = "uint8"
        self.is_tokenized = False  # all of the input

    def run(self) -> Summary:
        options, finished = self.options, find_finished(self.job)
        self.seconds["preparing"] = time.monotonic() - self.start
        if finished:
            self._clean_up()
            headers, self.report = finished, CorpusReport.of(finished[0])
        else:
            with self.folder.locked():
                state, corpus = begin(self.job)
                try:
                    headers = self._make(state, corpus)
                except BaseException as error:
                    self._after_failure(error)
                    raise
                self.folder.clear()
        return Summary(
            options.prefix,
            options.packing.capacity,
            self.report,
            PackReport.of(headers[: options.output_shards]),
            self.seconds,
            found=bool(finished),
            shards=options.output_shards,
            valid=PackReport.of(headers[-1:]) if options.has_valid else None,
        )

    def _clean_up(self) -> None:
        """Remove parts and locks of a job that finished and was killed before it did; other folders stay."""
        self.log(f"{self.options.prefix}: done already, with the same input and options")
        if self.options.output_shards > 1 or self.options.has_valid:
            with contextlib.suppress(FormatError, OSError), locked_outputs(self.options.prefix):
                pass
        with contextlib.suppress(FormatError, OSError):
            if os.listdir(self.folder.path):
                with self.folder.locked():
                    self.folder.clear()

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[stage] = time.monotonic() - start

    def _after_failure(self, error: BaseException) -> None:
        """Keep parts or corpus where a later job can use them, and log where; else remove the parts."""
        where, interrupted = self.folder.path, not isinstance(error, Exception)
        if self.is_tokenized:
            kept = where if self.folder.has_parts() else self.job.corpus
            self.log(f"the tokenised corpus is kept at {kept}; the next run with the same input goes on from it")
            if interrupted:
                self.log("pass --resume to go on, or --overwrite to start anew")
            return
        if isinstance(error, _InputChangedError):
            return
        is_of_input = isinstance(error, (FormatError, SequenceError))
        disk_is_full = isinstance(error, OSError) and error.errno in _DISK_FULL
        if is_of_input or disk_is_full or not self.folder.has_parts():
            self.folder.clear()
            return
        rows = f"{self.report.rows:,} rows are kept at {where}"
        if interrupted:
            self.log(f"interrupted; {rows}: pass --resume to go on, or --overwrite to start anew")
        else:
            self.log(f"{rows}; pass --resume to go on with them")

    # ---- tokenise ----

    def _has_enough(self) -> bool:
        """Whether the parts so far hold all rows that ``--max-rows`` asks for."""
        return self.max_rows is not None and self.report.rows - self.report.skipped >= self.max_rows

    def _tokenize(self, engine: Local | Cluster) -> None:
        job, report, interval = self.job, self.report, self.options.log_interval
        # Tasks on other machines find the tokenizer by its whole path.
        encoding = replace(self.encoder.options, tokenizer=os.path.abspath(self.encoder.options.tokenizer))
        shared = PartSettings(self.folder.path, encoding, self.encoder.digest, job.cutting, self.options.overwrite)
        remember_encoder(encoding, self.encoder)
        attempts = parts_of(self.folder.path)
        # Lines of each file in the parts so far; and stretches whose parts are not there yet.
        lines: Counter[int] = Counter()
        pending: deque[Stretch] = deque()

        def stretches() -> Iterator[Stretch]:
            readers = engine.workers if isinstance(engine, Cluster) else 0
            for stretch in cut_input(job.files, job.cutting, readers=readers):
                if self._has_enough():
                    return
                pending.append(replace(stretch, dealt=()))
                yield replace(stretch, attempts=attempts.get((stretch.number, stretch.part), ()))

        def count(parts: list[MadePart]) -> None:
            for part in parts:
                (progress.count_earlier if part.reused else progress.update)(part.info.num_bytes, part.info.rows)

        with (
            Progress("tokenising", total_bytes(job.files), unit="B", log_interval=interval, items="rows") as progress,
            contextlib.closing(
                engine.map_in_order(make_parts, shared, stretches(), name_of=str, on_result=count)
            ) as results,
        ):
            for parts in results:
                stretch = pending.popleft()
                for part in parts:
                    if self._has_enough():
                        break
                    self._add(part, stretch, lines[stretch.number])
                    lines[stretch.number] += part.info.lines
        if not any(map(len, self.lengths)):
            raise FormatError(
                f"{job.files[0].path}: no usable row in the input ({report.rows} rows, {report.skipped} skipped)"
            )
        report.notes = {name: count for name, count in sorted(report.notes.items()) if count}
        report.reused = self.reused_parts == len(self.paths)
        if self.reused_parts:
            self.log(f"resuming: {self.reused_parts:,} of {len(self.paths):,} parts were there already")

    def _add(self, part: MadePart, stretch: Stretch, lines_before: int) -> None:
        """Add the next part in the order of the input, made of this stretch; earlier parts hold ``lines_before`` lines.

        An error where the input has changed since an interrupted job read it, and for bad rows that are not skipped.
        """
        info, report = part.info, self.report
        # Rows of a range of bytes are numbered from 1 on, others as they are in the file.
        first = lines_before if stretch.nbytes is not None else 0
        if part.changed is not None:
            raise _InputChangedError(
                f"{self.folder.path}: {stretch.name}, from row {first + 1} on, is not what the interrupted run read:"
                f" the content of the input was {part.changed[0]}, is {part.changed[1]}; restore it to go on, or pass"
                " --overwrite to start anew"
            )
        if self.options.resume and not part.reused and self.reused_parts == len(self.paths):
            self.log(f"resuming after {report.rows:,} rows")
        bad_rows = (SequenceError(stretch.name, first + position, reason) for position, reason in info.bad_rows)
        report.add(info.rows, bad_rows, info.straddling, self.options.encoding.on_bad_row, self.log)
        report.skipped += info.skipped - len(info.bad_rows)
        for note, count in info.notes.items():
            report.notes[note] = report.notes.get(note, 0) + count
        if info.mask_dtype == "float32":
            self.mask_dtype = "float32"
        self.paths.append(part.path)
        self.lengths.append(part.lengths)
        self.files_and_rows.append((stretch.number, lines_before))
        for stream in (self.fingerprint, self.file_fingerprints[stretch.number]):
            stream.update("".join(info.pieces).encode())
        self.pieces += len(info.pieces)
        self.reused_parts += part.reused

    # ---- gather ----

    def _columns(self) -> tuple[dict[str, ColumnSpec], dict[str, NDArray[Any]]]:
        """The columns to be written, and the ``bases`` of ``PartsTable`` for those whose values lie in parts."""
        columns, bases = {}, {}
        for name in self.options.encoding.columns:
            if name == "source":
                # Names without folders, as text also where a name's bytes are none.
                names = (os.fsencode(os.path.basename(file.path)) for file in self.job.files)
                listed = [
                    {"name": name.decode(errors="backslashreplace"), "fingerprint": fingerprint.hex()}
                    for name, fingerprint in zip(names, self.file_fingerprints, strict=True)
                ]
                columns["source"] = ColumnSpec("sequence", np.uint32, 2, metadata={"files": listed})
                bases["source"] = np.array(self.files_and_rows, np.uint32)
            elif name == "label":
                columns["label"] = ColumnSpec("sequence", np.uint8)
                bases["label"] = np.zeros(len(self.files_and_rows), np.uint8)
            else:  # PartsReader makes its values, the numbers of the pairs
                columns["pair"] = PAIR
        return columns, bases

    def _sequences(self) -> ToPack:
        """The sequences of all parts, and which of them are selected."""
        columns, bases = self._columns()
        bounds = np.cumsum([0, *map(len, self.lengths)], dtype=np.int64)
        lengths = np.concatenate(self.lengths).astype(np.int64)
        self.lengths.clear()  # gigabytes in a large job
        sources: dict[str, Any] = {"fingerprint": self.fingerprint.hex()}
        sources |= {"rows": self.report.rows, "skipped": self.report.skipped}
        if self.max_rows is not None:
            sources["pieces"] = self.pieces
        build = BuildOptions(
            self.encoder.token_dtype,
            np.dtype(self.mask_dtype),
            capacity=None,
            sequence_multiple=1,
            pad_id=self.encoder.tokenizer.pad_id,
            metadata={**self.encoder.describe(), "sources": sources, "notes": self.report.notes},
            columns=columns,
        )
        reader = PartsReader(PartsTable(self.paths, bounds, self.mask_dtype, bases, "pair" in columns))
        groups, selected = np.arange(len(lengths)) // 2 if "pair" in columns else None, None
        if self.selection is not None and self.selection.of_rows and not self.options.keep_corpus:
            files = np.repeat(np.array(self.files_and_rows)[:, 0], np.diff(bounds))
            selected = select_rows(reader.column("content", 5), files, self.selection, self.options.packing.seed)
        return ToPack(reader, lengths, self.options.prefix, build, {"source": sources["fingerprint"]}, groups, selected)

    def _make(self, state: JobState, corpus: Shard | None) -> list[Header]:
        """Tokenise where there is no corpus; make the shards of the parts, or of the corpus where that is kept."""
        options = self.options
        if corpus is not None:
            self.is_tokenized, self.seconds["tokenising"] = True, 0.0
            self.report = CorpusReport.of(corpus.header)
            with self._timed("packing"):
                return self._pack(corpus, state)
        engine = self.engine or self.stack.enter_context(ray_cluster(options.ray_address, options.workers, self.log))
        with self._timed("tokenising"):
            self._tokenize(engine)
            self.folder.write(replace(state, tokenized=True))
            self.is_tokenized = True
        with self._timed("packing"):
            sequences = self._sequences()
            if options.keep_corpus:
                self._join(sequences, state)
                self.folder.remove_parts()
                return self._pack(Shard(self.job.corpus), state)
            return make_packs(
                sequences,
                # Tasks on other machines find the shards by their whole paths.
                os.path.abspath(options.prefix) if isinstance(engine, Cluster) else options.prefix,
                options.packing,
                shards=options.output_shards,
                overwrite=state.overwrite,
                resume=options.resume,
                engine=engine,
                log_interval=options.log_interval,
            )

    def _join(self, sequences: ToPack, state: JobState) -> None:
        """Write the corpus: packs of one sequence or pair, in the order of the input."""
        numbers, per_pack = np.arange(len(sequences.lengths) + 1), 1 if sequences.groups is None else 2
        longest, interval = per_pack * int(sequences.lengths.max()), self.options.log_interval
        run = PlannedRun(numbers[::per_pack], numbers[:-1], None, sequences.lengths.astype(np.uint32), longest)
        with (
            Progress("joining", len(run.lengths), unit="seq", log_interval=interval, items="sequences") as progress,
            ShardWriter.begin(self.job.corpus, sequences.build, overwrite=state.overwrite) as writer,
        ):
            write_packs(sequences.reader, run, writer, progress.update)

    def _pack(self, corpus: Shard, state: JobState) -> list[Header]:
        """Make the shards of the corpus."""
        options = self.options
        pack_shard(
            corpus,
            options.prefix,
            options.packing,
            shards=options.output_shards,
            overwrite=state.overwrite,
            resume=options.resume,
            log_interval=options.log_interval,
        )
        return [read_header(prefix) for prefix in self.job.outputs]
