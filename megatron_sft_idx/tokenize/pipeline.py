"""A job from its input to published shards, on this machine or on a cluster, with the same result.

::

    this process                        tasks, here or anywhere
    cut the input into stretches   ->   tokenise a stretch              ->  a part: lengths, ids, masks
    plan all packs on lengths      <-   lengths, 4 bytes per sequence
    share the plan out             ->   gather an output shard          <-  parts
                                                                        ->  five files per shard

A task writes a part completely or not at all. So a task may run twice, and a job reuses the parts of an interrupted
one.
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
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.lines import counted
from megatron_sft_idx.packs.conditions import Condition, bind_all, holding, whole_pairs
from megatron_sft_idx.packs.source_names import shortest_names
from megatron_sft_idx.shard import Shard, ShardWriter, read_header
from megatron_sft_idx.storage.building import Building, holds_packs_of_program
from megatron_sft_idx.storage.progress import Progress
from megatron_sft_idx.tokenize.bad_rows import TooManyBadRowsError
from megatron_sft_idx.tokenize.begin import (
    Job,
    PreprocessOptions,
    find_corpus,
    find_finished,
    require_no_other_shard,
    take_job,
)
from megatron_sft_idx.tokenize.corpus import pack_shard
from megatron_sft_idx.tokenize.cut import Cutting, Stretch, cut_input
from megatron_sft_idx.tokenize.encoding import RowEncoder
from megatron_sft_idx.tokenize.gather import MadePacks, ToPack, make_packs, write_packs
from megatron_sft_idx.tokenize.local import Local, available_cpus
from megatron_sft_idx.tokenize.parts import (
    MadePart,
    PartSettings,
    PartsReader,
    PartsSoFar,
    make_last_part,
    make_parts,
    remember_encoder,
)
from megatron_sft_idx.tokenize.plan import PlannedRun
from megatron_sft_idx.tokenize.ray import Cluster, ray_cluster
from megatron_sft_idx.tokenize.report import CorpusReport, PackReport, Summary
from megatron_sft_idx.tokenize.row_files import compare_libraries, look_at_rows
from megatron_sft_idx.tokenize.selection import select_rows

_AGAIN = "run the same command again to continue from there"
# Errors of a full disk: the parts of the job are removed, because others may need the space.
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def make_shards(
    options: PreprocessOptions, log: Callable[[str], None] = lambda line: None, *, published: str = ""
) -> Summary:
    """Make packed shards according to ``options``; ``log`` takes lines for people.

    A later job with the same input and encoding reuses the parts of an interrupted one.

    Args:
        options: options of the job.
        log: takes lines for people.
        published: the prefix to which the shards are uploaded; "" if they stay local. Existing shards of this same job
            are not made again.

    Raises:
        SFTIndexError: an input, a row or an option is unusable, or files at the prefix may not be removed.
        OSError: an error of the file system.
    """
    seconds: dict[str, float] = {}
    try:
        with contextlib.ExitStack() as stack:
            with _timed("preparing", seconds):
                files, options = options.expanded()
                options.check_outputs(files)
                look_at_rows(files, options.encoding, options.max_rows)
                local: Local | None = None
                if options.engine == "local":
                    # Workers import their modules while this process continues.
                    workers = available_cpus() if options.workers is None else options.workers
                    local = stack.enter_context(Local(workers))
                job = Job(options, files, RowEncoder(options.encoding_of(files)), Cutting.of(files), log)
                headers = [] if options.overwrite or not published else find_finished(job, published)
                is_uploaded = bool(headers)
                if not is_uploaded:
                    if published and not options.overwrite:
                        require_no_other_shard(job, published)
                    building, headers = take_job(job)
                    stack.callback(building.close)
            found = bool(headers)
            made = MadePacks(headers, found)
            if found:
                report = CorpusReport.of(headers[0])
                _require_few_bad_rows(options, report)
                if not is_uploaded and not holds_packs_of_program(building):
                    building.discard()
            else:
                made, report = _make(job, building, lambda: local or stack.enter_context(_cluster(job)), seconds)
    finally:
        remember_encoder(None)
    return Summary(
        options.prefix,
        options.packing.capacity,
        report,
        PackReport.of(made.headers[: options.output_shards], made.overlong),
        seconds,
        found=found,
        shards=options.output_shards,
        valid=PackReport.of(made.headers[-1:], made.valid_overlong) if options.has_valid else None,
    )


def _make(
    job: Job, building: Building, start_engine: Callable[[], Local | Cluster], seconds: dict[str, float]
) -> tuple[MadePacks, CorpusReport]:
    """Tokenise, or use the corpus of an earlier job; then pack. Return the shards, and counts of rows."""
    options = job.options
    on_bad_row, max_rows = options.encoding.on_bad_row, options.max_rows
    limit = options.max_bad_rows
    parts = PartsSoFar(CorpusReport(), on_bad_row, job.log, files=len(job.files), max_rows=max_rows, limit=limit)
    with _parts_kept(job, building, had_parts=building.num_parts() > 0):
        corpus = find_corpus(job)
        if corpus is None:
            with _timed("tokenising", seconds):
                compare_libraries(job.encoder, job.files, max_rows)
                engine = start_engine()
                _tokenize(job, building, engine, parts)
        else:
            job.log(f"the tokenised corpus at {job.corpus} is complete")
            seconds["tokenising"], parts.report = 0.0, CorpusReport.of(corpus.header)
            _require_few_bad_rows(options, parts.report)
            building.remove_parts()
    with _timed("packing", seconds), _corpus_kept(job, building):
        common: dict[str, Any] = {"shards": options.output_shards, "overwrite": options.overwrite}
        common |= {"log_interval": options.log_interval}
        if corpus is None:
            sequences = _to_pack(job, parts)
            if not options.keep_corpus:
                made = make_packs(sequences, building, options.packing, work="preprocess", engine=engine, **common)
                return made, parts.report
            _join(job, sequences)
            building.remove_parts()
            corpus = Shard(job.corpus)
        packed = pack_shard(corpus, job.prefix, options.packing, job=building, **common)
        headers = [read_header(prefix) for prefix in job.outputs]
        return MadePacks(headers, packed.found, packed.overlong_rows), parts.report


def _require_few_bad_rows(options: PreprocessOptions, report: CorpusReport) -> None:
    """Raise TooManyBadRowsError if an earlier job skipped more rows than this one may."""
    if options.max_bad_rows is not None:
        options.max_bad_rows.require(report, report.rows, options.prefix)


def _cluster(job: Job) -> contextlib.AbstractContextManager[Cluster]:
    return ray_cluster(job.options.ray_address, job.options.workers, job.log)


@contextlib.contextmanager
def _timed(stage: str, seconds: dict[str, float]) -> Iterator[None]:
    start = time.monotonic()
    yield
    seconds[stage] = time.monotonic() - start


# ---- reuse by a later job ----


@contextlib.contextmanager
def _parts_kept(job: Job, building: Building, *, had_parts: bool) -> Iterator[None]:
    """If the block fails, keep the parts if a later job can use them, and log their location; else remove them.

    Parts of an earlier job stay, unless the disk is full.
    """
    try:
        yield
    except BaseException as error:
        is_of_input = isinstance(error, (FormatError, SequenceError)) and not isinstance(error, TooManyBadRowsError)
        disk_is_full = isinstance(error, OSError) and error.errno in _DISK_FULL
        if (is_of_input and not had_parts) or disk_is_full or not building.num_parts():
            building.discard()
            raise
        interrupted = "" if isinstance(error, Exception) else "interrupted; "
        again = _AGAIN
        if isinstance(error, TooManyBadRowsError):
            again = "with a larger --max-bad-rows, the command continues from there"
        job.log(f"{interrupted}{counted(building.num_parts(), 'part')} kept in {building.folder}; {again}")
        raise


@contextlib.contextmanager
def _corpus_kept(job: Job, building: Building) -> Iterator[None]:
    """If the block fails, log the location of the tokenised sequences."""
    try:
        yield
    except BaseException:
        if building.num_parts():
            job.log(f"the tokenised sequences are kept in {building.folder}; {_AGAIN}")
        elif not ShardPaths.of(job.corpus).missing():
            job.log(f"the tokenised sequences are kept in {job.corpus}; {_AGAIN}")
        raise


# ---- tokenise ----


def _tokenize(job: Job, building: Building, engine: Local | Cluster, parts: PartsSoFar) -> None:
    """Make a part of each stretch of the input, or reuse that of an interrupted job.

    Raises:
        SequenceError: a row is unusable, and none may be skipped.
        TooManyBadRowsError: more rows are unusable than the job may skip.
        FormatError: the input has no usable row.
    """
    options, report = job.options, parts.report
    os.makedirs(building.parts, exist_ok=True)
    # As an absolute path, so that tasks on other machines find the tokenizer.
    encoding = replace(job.encoder.options, tokenizer=os.path.abspath(job.encoder.options.tokenizer))
    folder = os.path.abspath(building.parts)
    shared = PartSettings(folder, encoding, job.encoder.digest, job.cutting, options.max_rows)
    remember_encoder(encoding, job.encoder)
    pending: deque[Stretch] = deque()  # stretches whose parts are not finished yet

    def stretches() -> Iterator[Stretch]:
        readers = engine.workers if isinstance(engine, Cluster) else 0
        for stretch in cut_input(job.files, job.cutting, readers=readers):
            if parts.has_enough:
                return
            # The pieces of the last part may be needed again.
            pending.append(stretch if options.max_rows is not None else replace(stretch, dealt=()))
            yield stretch

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
                if parts.missing is not None and not part.info.has_rows_for(parts.missing):
                    part = make_last_part(replace(shared, max_rows=parts.missing), stretch, number)
                parts.add(part, stretch.name, stretch.number, before)
    parts.require_few_bad_rows(job.files[0].path, at_end=True)
    if not any(map(len, parts.lengths)):
        raise report.no_usable_row(job.files[0].path)
    report.notes, report.reused = parts.notes, parts.num_reused == len(parts.paths)
    if parts.num_reused:
        job.log(f"{parts.num_reused:,} of {counted(len(parts.paths), 'part')} reused")


# ---- gather ----


def _columns(job: Job, parts: PartsSoFar) -> dict[str, ColumnSpec]:
    """Return the columns of the shards."""
    names = shortest_names([file.path for file in job.files])
    files = [
        {"name": name, "fingerprint": fingerprint.hex()}
        for name, fingerprint in zip(names, parts.file_fingerprints, strict=True)
    ]
    return job.encoder.options.column_specs(files)


def _to_pack(job: Job, parts: PartsSoFar) -> ToPack:
    """Return the sequences of all parts, and which of them to pack."""
    options, selection = job.options, job.options.packing.selection
    sources: dict[str, Any] = {"fingerprint": parts.fingerprint.hex()}
    sources |= {"rows": parts.report.rows, "skipped": parts.report.skipped}
    if selection is not None and selection.max_rows is not None:
        sources["pieces"] = parts.num_pieces
    columns = _columns(job, parts)
    sequences = ToPack.of_parts(parts, job.encoder, options.prefix, sources, columns=columns)
    if options.keep_corpus:  # the corpus has all sequences
        return sequences
    reader = sequences.reader
    assert isinstance(reader, PartsReader)
    if options.packing.where:
        tests = bind_all(map(Condition.parse, options.packing.where), columns, "--where")
        values = {test.column: reader.column(test.column) for test in tests}
        kept = holding(tests, values, len(sequences.lengths))
        sequences = replace(sequences, kept=kept if sequences.groups is None else whole_pairs(kept))
    if selection is None or not selection.of_rows:
        return sequences
    files = np.repeat(np.array(parts.places)[:, 0], np.diff(reader.table.bounds))
    selected = select_rows(reader.column("content"), files, selection, options.packing.seed)
    return replace(sequences, selected=selected)


def _join(job: Job, sequences: ToPack) -> None:
    """Write the corpus: packs of one sequence or pair each, in the order of the input."""
    numbers, per_pack = np.arange(len(sequences.lengths) + 1), 1 if sequences.groups is None else 2
    longest, interval = per_pack * int(sequences.lengths.max()), job.options.log_interval
    run = PlannedRun(numbers[::per_pack], numbers[:-1], None, sequences.lengths.astype(np.uint32), longest)
    with (
        Progress("joining", len(run.lengths), unit="seq", log_interval=interval, items="sequences") as progress,
        ShardWriter.begin(job.corpus, sequences.build, work="preprocess", overwrite=job.options.overwrite) as writer,
    ):
        write_packs(sequences.reader, run, writer, progress.update)
