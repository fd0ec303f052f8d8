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
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_sft_idx.chat.inputs import total_bytes
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.layout import Header
from megatron_sft_idx.layout.column import PAIR, ColumnSpec
from megatron_sft_idx.shard import Shard, ShardWriter, read_header
from megatron_sft_idx.shard.journal import locked_outputs
from megatron_sft_idx.storage.progress import Progress
from megatron_sft_idx.tokenize.bad_rows import TooManyBadRowsError
from megatron_sft_idx.tokenize.begin import Job, PreprocessOptions, begin, find_finished
from megatron_sft_idx.tokenize.corpus import pack_shard
from megatron_sft_idx.tokenize.cut import Cutting, Stretch, cut_input
from megatron_sft_idx.tokenize.encoding import RowEncoder
from megatron_sft_idx.tokenize.gather import ToPack, make_packs, write_packs
from megatron_sft_idx.tokenize.local import Local, available_cpus
from megatron_sft_idx.tokenize.parts import (
    MadePart,
    PartSettings,
    PartsReader,
    PartsSoFar,
    make_last_part,
    make_parts,
    parts_of,
    remember_encoder,
)
from megatron_sft_idx.tokenize.plan import PlannedRun
from megatron_sft_idx.tokenize.ray import Cluster, ray_cluster
from megatron_sft_idx.tokenize.report import CorpusReport, PackReport, Summary
from megatron_sft_idx.tokenize.row_files import compare_libraries, require_decided_rows
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
    seconds: dict[str, float] = {}
    try:
        with contextlib.ExitStack() as stack:
            with _timed("preparing", seconds):
                files, options = options.expanded()
                options.check_outputs(files)
                require_decided_rows(files, options.encoding.rows, options.max_rows)
                local: Local | None = None
                if options.engine == "local":
                    # Workers import their modules while this process goes on.
                    workers = available_cpus() if options.workers is None else options.workers
                    local = stack.enter_context(Local(workers))
                job = Job(options, files, RowEncoder(options.encoding_of(files)), Cutting.of(files), log)
                finished = find_finished(job)
            if finished:
                headers, report = finished, CorpusReport.of(finished[0])
                _require_few_bad_rows(options, report)
                _remove_leftovers(job)
            else:
                with job.folder.locked():
                    headers, report = _make(job, lambda: local or stack.enter_context(_cluster(job)), seconds)
                    job.folder.clear()
    finally:
        remember_encoder(None)
    return Summary(
        options.prefix,
        options.packing.capacity,
        report,
        PackReport.of(headers[: options.output_shards]),
        seconds,
        found=bool(finished),
        shards=options.output_shards,
        valid=PackReport.of(headers[-1:]) if options.has_valid else None,
    )


def _make(
    job: Job, start_engine: Callable[[], Local | Cluster], seconds: dict[str, float]
) -> tuple[list[Header], CorpusReport]:
    """Tokenise, or take the corpus that an earlier job kept; then pack. Headers of the shards, and counts of rows."""
    options, (state, corpus) = job.options, begin(job)
    on_bad_row, max_rows = options.encoding.on_bad_row, options.max_rows
    limit = options.max_bad_rows
    parts = PartsSoFar(CorpusReport(), on_bad_row, job.log, files=len(job.files), max_rows=max_rows, limit=limit)
    if corpus is None:
        with _timed("tokenising", seconds), _parts_kept(job, parts):
            compare_libraries(job.encoder, job.files, max_rows)
            engine = start_engine()
            _tokenize(job, engine, parts)
            job.folder.write(replace(state, tokenized=True))
    else:
        seconds["tokenising"], parts.report = 0.0, CorpusReport.of(corpus.header)
        _require_few_bad_rows(options, parts.report)
    with _timed("packing", seconds), _corpus_kept(job):
        common: dict[str, Any] = {"shards": options.output_shards, "overwrite": state.overwrite}
        common |= {"resume": options.resume, "log_interval": options.log_interval}
        if corpus is None:
            sequences = _to_pack(job, parts)
            if not options.keep_corpus:
                # Tasks on other machines find the shards by their whole paths.
                prefix = os.path.abspath(options.prefix) if isinstance(engine, Cluster) else options.prefix
                return make_packs(sequences, prefix, options.packing, engine=engine, **common), parts.report
            _join(job, sequences, overwrite=state.overwrite)
            job.folder.remove_parts()
            corpus = Shard(job.corpus)
        pack_shard(corpus, options.prefix, options.packing, **common)
        return [read_header(prefix) for prefix in job.outputs], parts.report


def _require_few_bad_rows(options: PreprocessOptions, report: CorpusReport) -> None:
    """TooManyBadRowsError where an earlier job skipped more rows than this one may."""
    if options.max_bad_rows is not None:
        options.max_bad_rows.require(report, report.rows, options.prefix)


def _cluster(job: Job) -> contextlib.AbstractContextManager[Cluster]:
    return ray_cluster(job.options.ray_address, job.options.workers, job.log)


@contextlib.contextmanager
def _timed(stage: str, seconds: dict[str, float]) -> Iterator[None]:
    start = time.monotonic()
    yield
    seconds[stage] = time.monotonic() - start


# ---- what a later job can use ----


class _InputChangedError(FormatError):
    """The input is not what an interrupted job read of it; the parts of that job stay for when it is restored."""


@contextlib.contextmanager
def _parts_kept(job: Job, parts: PartsSoFar) -> Iterator[None]:
    """Where the block fails, keep the parts if a later job can use them, and log where they are; else remove them."""
    folder = job.folder
    try:
        yield
    except _InputChangedError:
        raise
    except BaseException as error:
        is_of_input = isinstance(error, (FormatError, SequenceError)) and not isinstance(error, TooManyBadRowsError)
        disk_is_full = isinstance(error, OSError) and error.errno in _DISK_FULL
        if is_of_input or disk_is_full or not folder.has_parts():
            folder.clear()
            raise
        rows = f"{parts.report.rows:,} rows are kept at {folder.path}"
        if isinstance(error, Exception):
            job.log(f"{rows}; pass --resume to go on with them")
        else:
            job.log(f"interrupted; {rows}: pass --resume to go on, or --overwrite to start anew")
        raise


@contextlib.contextmanager
def _corpus_kept(job: Job) -> Iterator[None]:
    """Where the block fails, log where the tokenised corpus is."""
    try:
        yield
    except BaseException as error:
        where = job.folder.path if job.folder.has_parts() else job.corpus
        job.log(f"the tokenised corpus is kept at {where}; the next run with the same input goes on from it")
        if not isinstance(error, Exception):
            job.log("pass --resume to go on, or --overwrite to start anew")
        raise


def _remove_leftovers(job: Job) -> None:
    """Remove parts and locks of a job that finished and was killed before it did; other folders stay."""
    options, folder = job.options, job.folder
    job.log(f"{options.prefix}: done already, with the same input and options")
    if options.output_shards > 1 or options.has_valid:
        with contextlib.suppress(FormatError, OSError), locked_outputs(options.prefix):
            pass
    with contextlib.suppress(FormatError, OSError):
        if os.listdir(folder.path):
            with folder.locked():
                folder.clear()


# ---- tokenise ----


def _tokenize(job: Job, engine: Local | Cluster, parts: PartsSoFar) -> None:
    """Make a part of each stretch of the input, or use that of an interrupted job.

    Raises:
        SequenceError: a row cannot be used, and none may be skipped.
        TooManyBadRowsError: more rows cannot be used than the job may skip.
        FormatError: the input has no usable row, or has changed since an interrupted job read it.
    """
    options, report = job.options, parts.report
    # Tasks on other machines find the tokenizer by its whole path.
    encoding = replace(job.encoder.options, tokenizer=os.path.abspath(job.encoder.options.tokenizer))
    shared = PartSettings(
        job.folder.path, encoding, job.encoder.digest, job.cutting, options.overwrite, options.max_rows
    )
    remember_encoder(encoding, job.encoder)
    attempts = parts_of(job.folder.path)
    pending: deque[Stretch] = deque()  # those whose parts are not there yet

    def stretches() -> Iterator[Stretch]:
        readers = engine.workers if isinstance(engine, Cluster) else 0
        for stretch in cut_input(job.files, job.cutting, readers=readers):
            if parts.has_enough:
                return
            # The pieces of the last part may be needed again.
            pending.append(stretch if options.max_rows is not None else replace(stretch, dealt=()))
            yield replace(stretch, attempts=attempts.get((stretch.number, stretch.part), ()))

    def show(made: list[MadePart]) -> None:
        for part in made:
            (progress.count_earlier if part.reused else progress.update)(part.info.num_bytes, part.info.rows)

    with (
        Progress(
            "tokenising", total_bytes(job.files), unit="B", log_interval=options.log_interval, items="rows"
        ) as progress,
        contextlib.closing(
            engine.map_in_order(make_parts, shared, stretches(), name_of=str, on_result=show)
        ) as results,
    ):
        for made in results:
            stretch = pending.popleft()
            for number, made_part in enumerate(made):
                if parts.has_enough:
                    break
                part = made_part
                before = stretch.before(parts.lines[stretch.number])
                if part.changed is not None:
                    raise _changed_error(job, f"{stretch.name}, from row {before + 1} on,", *part.changed)
                if parts.missing is not None and not part.info.has_rows_for(parts.missing):
                    part = make_last_part(replace(shared, max_rows=parts.missing), stretch, number)
                if options.resume and not part.reused and parts.num_reused == len(parts.paths):
                    job.log(f"resuming after {report.rows:,} rows")
                parts.add(part, stretch.name, stretch.number, before)
    parts.require_few_bad_rows(job.files[0].path, at_end=True)
    if not any(map(len, parts.lengths)):
        raise FormatError(
            f"{job.files[0].path}: no usable row in the input ({report.rows} rows, {report.skipped} skipped)"
        )
    report.notes, report.reused = parts.notes, parts.num_reused == len(parts.paths)
    if parts.num_reused:
        job.log(f"resuming: {parts.num_reused:,} of {len(parts.paths):,} parts were there already")


def _changed_error(job: Job, what: str, then: str, now: str) -> _InputChangedError:
    return _InputChangedError(
        f"{job.folder.path}: {what} is not what the interrupted run read: the content of the input was {then}, is"
        f" {now}; restore it to go on, or pass --overwrite to start anew"
    )


# ---- gather ----


def _columns(job: Job, parts: PartsSoFar) -> dict[str, ColumnSpec]:
    """The columns that shards will have."""
    # Names without folders, as text also where a name's bytes are none.
    names = (os.fsencode(os.path.basename(file.path)) for file in job.files)
    files = [
        {"name": name.decode(errors="backslashreplace"), "fingerprint": fingerprint.hex()}
        for name, fingerprint in zip(names, parts.file_fingerprints, strict=True)
    ]
    known = {
        "source": lambda: ColumnSpec("sequence", np.uint32, 2, metadata={"files": files}),
        "label": lambda: ColumnSpec("sequence", np.uint8),
        "pair": lambda: PAIR,
    }
    return {name: known[name]() for name in job.encoder.options.columns}


def _to_pack(job: Job, parts: PartsSoFar) -> ToPack:
    """The sequences of all parts, and which of them are selected."""
    options, selection = job.options, job.options.packing.selection
    sources: dict[str, Any] = {"fingerprint": parts.fingerprint.hex()}
    sources |= {"rows": parts.report.rows, "skipped": parts.report.skipped}
    if selection is not None and selection.max_rows is not None:
        sources["pieces"] = parts.num_pieces
    sequences = ToPack.of_parts(parts, job.encoder, options.prefix, sources, columns=_columns(job, parts))
    if selection is None or not selection.of_rows or options.keep_corpus:
        return sequences
    reader = sequences.reader
    assert isinstance(reader, PartsReader)
    files = np.repeat(np.array(parts.places)[:, 0], np.diff(reader.table.bounds))
    selected = select_rows(reader.column("content", 5), files, selection, options.packing.seed)
    return replace(sequences, selected=selected)


def _join(job: Job, sequences: ToPack, *, overwrite: bool) -> None:
    """Write the corpus: packs of one sequence or pair, in the order of the input."""
    numbers, per_pack = np.arange(len(sequences.lengths) + 1), 1 if sequences.groups is None else 2
    longest, interval = per_pack * int(sequences.lengths.max()), job.options.log_interval
    run = PlannedRun(numbers[::per_pack], numbers[:-1], None, sequences.lengths.astype(np.uint32), longest)
    with (
        Progress("joining", len(run.lengths), unit="seq", log_interval=interval, items="sequences") as progress,
        ShardWriter.begin(job.corpus, sequences.build, overwrite=overwrite) as writer,
    ):
        write_packs(sequences.reader, run, writer, progress.update)
