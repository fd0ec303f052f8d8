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
import errno
import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.inputs import InputFile, expand_inputs, total_bytes
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.column import PAIR, ColumnSpec
from megatron_sft_idx.packs.split import refuse_other_splits
from megatron_sft_idx.shard import Shard, ShardWriter
from megatron_sft_idx.shard.publication import parts_held
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.hashing import StreamHash
from megatron_sft_idx.storage.progress import Progress
from megatron_sft_idx.storage.publish import (
    Kind,
    Place,
    check_place,
    head_of,
    resolve,
    write_file,
)
from megatron_sft_idx.tokenize.begin import Job, PreprocessOptions, begin, corpus_prefix, find_done
from megatron_sft_idx.tokenize.cut import Cutting, Stretch, cut_input
from megatron_sft_idx.tokenize.encoding import RowEncoder
from megatron_sft_idx.tokenize.gather import (
    Output,
    PackedRun,
    Packing,
    PackReport,
    drop_build,
    gather_shard,
    output_prefixes,
    pack_shard,
    plan_packs,
    publish_shards,
    require_outputs_apart,
    write_packs,
    write_shard,
)
from megatron_sft_idx.tokenize.local import Local, available_cpus
from megatron_sft_idx.tokenize.parts import (
    MAX_LISTED,
    MadePart,
    PartsReader,
    PartsTable,
    TokenizingJob,
    make_parts,
    parts_of,
    remember_encoder,
)
from megatron_sft_idx.tokenize.ray import Cluster, ray_cluster
from megatron_sft_idx.tokenize.selection import Selection, file_weights, select_rows

__all__ = ["CorpusReport", "Summary", "check_summary", "make_shards"]

# Bad rows that are shown as they come.
_MAX_SHOWN = 20
# Nothing fits any more: all that this run has made is given back.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def make_shards(options: PreprocessOptions, log: Callable[[str], None] = lambda line: None) -> Summary:
    """Make the packed shards; see ``PreprocessOptions``.

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


def _with_weights(options: PreprocessOptions, files: Sequence[InputFile]) -> PreprocessOptions:
    """The options, with the weights of files by their numbers: what a shard says of itself has no paths."""
    if not options.input_weights:
        return options
    weights = file_weights("--input-weight", options.input_weights, [file.path for file in files])
    if options.encoding.rows.kind == "preference" and max(weights) > 1:
        raise FormatError("--input-weight: a preference pair is trained on once, as its number says; ask for 1 at most")
    selection = replace(options.packing.selection or Selection(), weights=weights)
    return replace(options, packing=replace(options.packing, selection=selection))


# A prefix, the number of its shards, the sequences in them, None for all, and counts of the rows that these are of.
_Share = tuple[str, int, NDArray[np.int64] | None, dict[str, int]]


class _Run:
    def __init__(self, options: PreprocessOptions, log: Callable[[str], None], stack: contextlib.ExitStack) -> None:
        begin_at = time.monotonic()
        files = expand_inputs(options.inputs)
        options = _with_weights(options, files)
        outputs = output_prefixes(options.prefix, options.output_shards, valid=options.has_valid)
        prefixes = [*outputs, corpus_prefix(options.prefix)]
        inputs = [Place(file.path, "the input") for file in files]
        require_outputs_apart(prefixes, inputs, options.encoding.columns)
        self.options, self.log, self.stack = options, log, stack
        self.pool: Local | None = None
        if options.engine == "local":
            # Workers import meanwhile what they need.
            workers = available_cpus() if options.workers is None else options.workers
            self.pool = stack.enter_context(Local(workers))
        self.encoder = RowEncoder(options.encoding_of(files))
        self.job = Job(options, files, self.encoder, Cutting.of(files), log)
        self.folder = self.job.folder
        self.done = find_done(self.job)
        self.seconds = {"preparing": time.monotonic() - begin_at}
        # What is known once all parts are there: four bytes a sequence, and some hundred a part.
        self.report = CorpusReport()
        self.paths: list[str] = []
        self.lengths: list[NDArray[np.uint32]] = []
        # Of each part, the number of its file and how many rows of that are in others; of each file, its content.
        self.places: list[tuple[int, int]] = []
        self.contents = [StreamHash() for _ in files]
        self.columns: dict[str, ColumnSpec] = {}
        self.mask_dtype = "uint8"
        self.fingerprint = ""
        self.pieces = 0
        self.valid: PackReport | None = None
        self.reused = 0
        self.keep_parts = False  # whatever ends the run

    def run(self) -> Summary:
        if self.done:
            return self._found(self.done)
        with self.folder.locked():
            self.state, corpus, anew = begin(self.job)
            try:
                if corpus is None:
                    packing = self._make(anew=anew)
                else:
                    self.seconds["tokenising"] = 0.0
                    self.report = CorpusReport.of(corpus.header)
                    with self._timed("packing"):
                        packing = self._pack_corpus(corpus)
            except BaseException as error:
                self._end_badly(error)
                raise
            self.folder.clear()
        return self._summary(packing)

    def _found(self, headers: Sequence[Header]) -> Summary:
        self.log(f"{self.options.prefix}: done already, with the same input and options")
        # The run may have been killed as it removed its lock and its parts; a folder of somebody else stays.
        if len(headers) > 1:
            with contextlib.suppress(FormatError, OSError), parts_held(self.options.prefix):
                pass
        with contextlib.suppress(FormatError, OSError):
            if os.listdir(self.folder.path):
                with self.folder.locked():
                    self.folder.clear()
        self.report = CorpusReport.of(headers[0])
        return self._summary(self._report(headers), found=True)

    def _report(self, headers: Sequence[Header]) -> PackReport:
        """Of the shards to train on; that of the other one is kept."""
        shards = self.options.output_shards
        self.valid = PackReport.of(headers[shards:]) if headers[shards:] else None
        return PackReport.of(headers[:shards])

    def _summary(self, packing: PackReport, *, found: bool = False) -> Summary:
        options = self.options
        counts = (options.packing.capacity, self.report, packing, self.seconds)
        return Summary(options.prefix, *counts, found=found, shards=options.output_shards, valid=self.valid)

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        begin_at = time.monotonic()
        yield
        self.seconds[stage] = time.monotonic() - begin_at

    def _end_badly(self, error: BaseException) -> None:
        """Keep what can be gone on with, and say where it is; give the rest of the space back."""
        where, interrupted = self.folder.path, not isinstance(error, Exception)
        if "tokenising" in self.seconds:
            kept = where if self.folder.has_parts() else self.job.corpus
            self.log(f"the tokenised corpus is kept at {kept}; the next run with the same input goes on from it")
            if interrupted:
                self.log("pass --resume to go on, or --overwrite to start anew")
            return
        of_input = isinstance(error, (FormatError, SequenceError))
        full = isinstance(error, OSError) and error.errno in _FULL
        if not self.folder.has_parts() or not (self.keep_parts or not (of_input or full)):
            self.folder.clear()
            return
        rows = f"{self.report.rows:,} rows are kept at {where}"
        if interrupted:
            self.log(f"interrupted; {rows}: pass --resume to go on, or --overwrite to start anew")
        elif not self.keep_parts:
            self.log(f"{rows}; pass --resume to go on with them")

    def _make(self, *, anew: bool) -> PackReport:
        options = self.options
        engine: Local | Cluster = self.pool or self.stack.enter_context(
            ray_cluster(options.ray_address, options.workers, self.log)
        )
        with self._timed("tokenising"):
            self._tokenize(engine, anew=anew)
            self.folder.write(replace(self.state, tokenized=True))
        bounds, bases = np.cumsum([0, *map(len, self.lengths)], dtype=np.int64), {}
        if options.encoding.source:
            bases["source"] = np.array(self.places, np.uint32)
            self.columns["source"] = _source_column(self.job.files, self.contents)
        if "label" in options.encoding.columns:
            bases["label"] = np.zeros(len(self.paths), np.uint8)
            self.columns["label"] = ColumnSpec("sequence", np.uint8)
        if pairs := "pair" in options.encoding.columns:
            self.columns["pair"] = PAIR
        table = PartsTable(self.paths, bounds, self.mask_dtype, bases, pairs)
        lengths = np.concatenate(self.lengths).astype(np.int64)
        self.lengths.clear()  # gigabytes of a large corpus
        sources: dict[str, Any] = {
            "fingerprint": self.fingerprint,
            "rows": self.report.rows,
            "skipped": self.report.skipped,
        }
        if self.selection.max_rows is not None:
            sources["pieces"] = self.pieces
        metadata = {**self.encoder.describe(), "sources": sources, "notes": self.report.notes}
        with self._timed("packing"):
            if not options.keep_corpus:
                return self._gather(engine, table, lengths, metadata)
            self._join(table, lengths, metadata)
            self.folder.remove_parts()
            return self._pack_corpus(Shard(self.job.corpus))

    @property
    def selection(self) -> Selection:
        """Of the rows; where none is asked for, one that takes all."""
        return self.options.packing.selection or Selection()

    def _has_enough(self) -> bool:
        """Whether no more rows are asked for than those that the parts taken hold."""
        most = self.selection.max_rows
        return most is not None and self.report.rows - self.report.skipped >= most

    def _progress(self, what: str, total: int, *, unit: str = "seq", items: str = "sequences") -> Progress:
        return Progress(what, total, unit=unit, log_interval=self.options.log_interval, items=items)

    # ---- tokenise ----

    def _tokenize(self, engine: Local | Cluster, *, anew: bool) -> None:
        job, report = self.job, self.report
        # Tasks on other machines find the tokenizer by its whole path.
        encoding = replace(self.encoder.options, tokenizer=os.path.abspath(self.encoder.options.tokenizer))
        shared = TokenizingJob(self.folder.path, encoding, self.encoder.digest, job.cutting, anew)
        remember_encoder(encoding, self.encoder)
        there = parts_of(self.folder.path)
        pieces = StreamHash()
        lines: Counter[int] = Counter()
        cut: deque[Stretch] = deque()

        def stretches() -> Iterator[Stretch]:
            readers = engine.workers if isinstance(engine, Cluster) else 0
            for stretch in cut_input(job.files, job.cutting, readers=readers):
                if self._has_enough():
                    return
                cut.append(replace(stretch, dealt=()))
                yield replace(stretch, found=there.get((stretch.number, stretch.part), ()))

        with self._progress("tokenising", total_bytes(job.files), unit="B", items="rows") as progress:

            def done(parts: list[MadePart]) -> None:
                for part in parts:
                    (progress.found if part.reused else progress.update)(part.info.num_bytes, part.info.rows)

            with contextlib.closing(
                engine.map_in_order(make_parts, shared, stretches(), name_of=str, done=done)
            ) as tasks:
                for parts in tasks:
                    stretch = cut.popleft()
                    for part in parts:
                        if self._has_enough():
                            break
                        before = lines[stretch.number] if stretch.nbytes is not None else 0
                        self._take(part, stretch.name, before)
                        self.places.append((stretch.number, lines[stretch.number]))
                        for stream in (pieces, self.contents[stretch.number]):
                            stream.update("".join(part.info.pieces).encode())
                        lines[stretch.number] += part.info.lines
        self.fingerprint = pieces.hex()
        if not any(map(len, self.lengths)):
            raise FormatError(
                f"{job.files[0].path}: no usable row in the input ({report.rows} rows, {report.skipped} skipped)"
            )
        report.notes = {name: count for name, count in sorted(report.notes.items()) if count}
        report.reused = self.reused == len(self.paths)
        if self.reused:
            self.log(f"resuming: {self.reused:,} of {len(self.paths):,} parts were there already")

    def _take(self, part: MadePart, name: str, before: int) -> None:
        """Take in one part, in the order of the input; ``before`` rows of its file are in others."""
        info, report = part.info, self.report
        if part.changed is not None:
            self.keep_parts = True
            raise FormatError(
                f"{self.folder.path}: {name}, from row {before + 1} on, is not what the interrupted run read: the"
                f" content of the input was {part.changed[0]}, is {part.changed[1]}; restore it to go on, or pass"
                " --overwrite to start anew"
            )
        if self.options.resume and not part.reused and self.reused == len(self.paths):
            self.log(f"resuming after {report.rows:,} rows")
        bad_rows = (SequenceError(name, before + position, reason) for position, reason in info.bad_rows)
        report.add(info.rows, bad_rows, info.straddling, self.options.encoding.on_bad_row, self.log)
        report.skipped += info.skipped - len(info.bad_rows)
        for note, count in info.notes.items():
            report.notes[note] += count
        if info.mask_dtype == "float32":
            self.mask_dtype = "float32"
        self.paths.append(part.path)
        self.pieces += len(info.pieces)
        self.lengths.append(part.lengths)
        self.reused += part.reused

    # ---- gather ----

    def _gather(
        self, engine: Local | Cluster, table: PartsTable, lengths: NDArray[np.int64], metadata: dict[str, Any]
    ) -> PackReport:
        options, reader = self.options, PartsReader(table)
        pairs = np.arange(len(lengths)) // 2 if table.pairs else None
        prefix = os.path.abspath(options.prefix) if isinstance(engine, Cluster) else options.prefix
        outputs: list[Output] = []
        runs: list[tuple[Packing, int]] = []
        for name, shards, chosen, selected in self._shares(prefix, reader):
            packing = plan_packs(
                lengths,
                options.packing,
                shards=shards,
                source=options.prefix,
                groups=pairs,
                chosen=chosen,
                selected=selected,
                reader=reader,
            )
            outputs += packing.outputs(
                name,
                metadata,
                self.fingerprint,
                reader.count_trained(packing.cuts.parted, packing.cuts.parted_at),
                token_dtype=self.encoder.token_dtype.name,
                mask_dtype=table.mask_dtype,
                pad_id=self.encoder.tokenizer.pad_id,
                overwrite=self.state.overwrite,
                columns=self.columns,
            )
            runs += [(packing, number) for number in range(shards)]
        total = sum(len(packing.cuts.lengths) for packing, number in runs if not number)
        with self._progress("packing", total) as progress:

            def write(numbers: Sequence[int]) -> Iterator[Header]:
                tasks = ((outputs[number], runs[number][0].run(runs[number][1])) for number in numbers)
                # One alone is written here, where its progress can be seen; a cluster's disks are for its nodes.
                if isinstance(engine, Local) and (len(numbers) == 1 or not engine.workers):
                    yield from (write_shard(reader, *task, progress.update) for task in tasks)
                    return
                yield from engine.map_in_order(
                    gather_shard,
                    table,
                    tasks,
                    name_of=lambda task: task[0].prefix,
                    done=lambda header: progress.update(header.num_sequences, header.num_sequences),
                )

            return self._report(publish_shards(options.prefix, outputs, write, keep=options.resume))

    def _shares(self, prefix: str, reader: PartsReader) -> Iterator[_Share]:
        """What is packed by a plan of its own: what is trained on, and what is kept apart to validate with."""
        if not self.selection.of_rows:
            yield prefix, self.options.output_shards, None, {}
            return
        files = np.repeat(np.array(self.places)[:, 0], np.diff(reader.bounds))
        chosen = select_rows(reader.column("content", 5), files, self.selection, self.options.packing.seed)
        yield prefix, self.options.output_shards, chosen.train, chosen.counts
        if self.options.has_valid:
            yield output_prefixes(prefix, 1, valid=True)[-1], 1, chosen.valid, chosen.counts

    def _join(self, table: PartsTable, lengths: NDArray[np.int64], metadata: dict[str, Any]) -> None:
        """Join the parts, in the order of the input, into an unpacked shard; pairs stay together there too."""
        if self.options.resume:
            drop_build(ShardPaths.of(self.job.corpus))
        numbers, together = np.arange(len(lengths) + 1), 2 if table.pairs else 1
        longest = together * int(lengths.max())
        run = PackedRun(numbers[::together], numbers[:-1], None, lengths.astype(np.uint32), longest)
        with (
            self._progress("joining", len(lengths)) as progress,
            ShardWriter(
                self.job.corpus,
                token_dtype=self.encoder.token_dtype,
                mask_dtype=np.dtype(table.mask_dtype),
                pad_id=self.encoder.tokenizer.pad_id,
                overwrite=self.state.overwrite,
                metadata=metadata,
                columns=self.columns,
            ) as writer,
        ):
            write_packs(PartsReader(table), run, writer, progress.update)

    def _pack_corpus(self, corpus: Shard) -> PackReport:
        options = self.options
        return pack_shard(
            corpus,
            options.prefix,
            options.packing,
            shards=options.output_shards,
            overwrite=self.state.overwrite,
            keep=options.resume,
            log_interval=options.log_interval,
        )


def _source_column(files: Sequence[InputFile], contents: Sequence[StreamHash]) -> ColumnSpec:
    """What the column ``source`` is: it names files without their folders, as text whatever bytes a name has."""
    names = [os.fsencode(os.path.basename(file.path)).decode(errors="backslashreplace") for file in files]
    listed = [{"name": name, "fingerprint": one.hex()} for name, one in zip(names, contents, strict=True)]
    return ColumnSpec("sequence", np.uint32, 2, metadata={"files": listed})


# ---- what became of the input, for people and for programs ----


_SELECTED = (
    ("max_rows", "first", "taken, the rest left out by --max-rows"),
    ("duplicates", "duplicates", "left out by --dedup, which say what an earlier row says"),
    ("not_sampled", "not sampled", "left out by --sample"),
    ("valid", "validation", "kept apart by --valid-fraction"),
    ("weighted_out", "weighted out", "left out by --input-weight"),
    ("repeats", "repeats", "of rows, by --input-weight"),
    ("train", "to train on", "rows"),
    ("untrained_sequences", "untrained", "sequences, or cuts of them, left out: no token to train on"),
)
_NOTES = {
    "content_empty": "messages without a content rendered with an empty one: the chat template fails without",
    "content_left_out": "messages without a content rendered without one, as transformers does",
    "content_none": "messages without a content rendered with null for it: the chat template fails without",
    "control_tokens_read_by_template": "control tokens in the data that the chat template itself reads, left to it",
    "first_token_masks_dropped": "masks on a sequence's first token dropped: nothing predicts it",
    "literals": "control tokens in the data kept as text",
    "no_end_of_turn": "answers without an end-of-turn token: the chat template writes none",
    "reasoning_dropped": "messages whose reasoning the chat template leaves out",
    "straddling": "trained tokens that begin before their span (--span-by-span avoids them)",
    "straddling_header": "of these bring characters of a header in (--straddling exclude does not train them)",
    "straddling_left_out": "tokens that begin before their span, not trained",
    "tool_arguments_converted": "tool calls whose arguments became text or an object, as the chat template expects",
    "words_placed_by_search": "answers whose words were found by search in what the chat template made of them",
}
# The first key of the file, by which it is recognized.
_MARK = {"written_by": "megatron-sft-idx"}
_BEGIN = json.dumps(_MARK, indent=2).removesuffix("\n}").encode()
_KIND = Kind("a summary", lambda path: head_of(path, len(_BEGIN)) == _BEGIN)


def check_summary(path: str, *, overwrite: bool) -> None:
    """FormatError where a summary could not be written here: asked before hours of work, of which it is to tell."""
    check_place(resolve(path), _KIND, overwrite=overwrite)


@dataclass(slots=True)
class CorpusReport:
    """What became of the input.

    Attributes:
        rows: rows read, bad ones included.
        skipped: rows that could not be used.
        bad_rows: the first ten thousand of them, as messages.
        notes: counts by name: tokens that straddle a span's edge, control tokens kept as text, and so on.
        reused: the corpus was there already, made from the same input and options.
        straddling: a token that brought characters of a header into what is trained on, once one was met.
    """

    rows: int = 0
    skipped: int = 0
    bad_rows: list[str] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=Counter)
    reused: bool = False
    straddling: str = ""

    @classmethod
    def of(cls, header: Header) -> CorpusReport:
        """What the header of a finished corpus, or of a shard packed from it, remembers."""
        sources = header.metadata["sources"]
        return cls(sources["rows"], sources["skipped"], [], header.metadata["notes"], reused=True)

    def add(
        self,
        rows: int,
        bad_rows: Iterable[SequenceError],
        straddling: str,
        on_bad_row: str,
        log: Callable[[str], None],
    ) -> None:
        """Count some rows, and say which are skipped.

        Raises:
            SequenceError: there is a bad row, and bad rows are not skipped.
        """
        self.rows += rows
        if straddling and not self.straddling:
            self.straddling = straddling
            log(
                f"warning: tokens such as {straddling!r} begin in what the chat template writes before an answer and"
                " are trained on, as transformers trains on them; --straddling exclude leaves them out"
            )
        for error in bad_rows:
            if on_bad_row == "error":
                raise SequenceError(
                    error.source, error.position, f"{error.reason}; --on-bad-row skip goes on without it"
                )
            self.skipped += 1
            if len(self.bad_rows) < MAX_LISTED:
                self.bad_rows.append(str(error))
            if self.skipped <= _MAX_SHOWN:
                log(f"skipped {error}")
            elif self.skipped == _MAX_SHOWN + 1:
                log("skipped more rows, which are not shown")


@dataclass(slots=True)
class Summary:
    """Counts of one run, and seconds by stage.

    Attributes:
        prefix: of the packed shard.
        capacity: of its packs.
        corpus: what became of the input; None where only packing ran.
        packing: what became of the sequences.
        seconds: by stage.
        found: the shard was there already; nothing was written.
        shards: how many the packs are cut into.
        options: what the run was told, or went by where it was told nothing.
        valid: what became of the sequences that are kept apart, in a shard of their own; None where there are none.
    """

    prefix: str
    capacity: int
    corpus: CorpusReport | None
    packing: PackReport
    seconds: dict[str, float] = field(default_factory=dict)
    found: bool = False
    shards: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    valid: PackReport | None = None

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_dict(self) -> dict[str, Any]:
        """All counts as plain values."""
        return asdict(self)

    def write(self, path: str, *, overwrite: bool = False) -> None:
        """Write ``to_dict`` as JSON, with a first key that says what it is.

        Raises:
            FormatError: something is there that is no summary, or may not be replaced.
        """
        text = json.dumps({**_MARK, **self.to_dict()}, indent=2, ensure_ascii=False) + "\n"
        # Paths may hold bytes that are no UTF-8, which JSON has an escape for.
        write_file(path, text.encode(errors="backslashreplace"), _KIND, overwrite=overwrite)

    def lines(self) -> list[str]:
        """The summary as a person reads it."""
        packing = self.packing
        which = f"-*-of-{self.shards:05d}" if self.shards > 1 else ""
        lines = [f"{'found' if self.found else 'wrote'} {self.prefix}{which}"]
        if (corpus := self.corpus) is not None:
            reused = " (corpus reused: same input and options)" if corpus.reused else ""
            lines.append(f"rows            {corpus.rows:,}{reused}")
            if corpus.skipped:
                lines.append(f"  skipped       {corpus.skipped:,}")
        selected = packing.selected
        lines += [f"  {name:<14}{selected[key]:,} {what}" for key, name, what in _SELECTED if selected.get(key)]
        lines += [
            f"sequences       {packing.sequences:,}",
            f"packs           {packing.packs:,} (no packing has fewer than {packing.lower_bound:,}; {packing.method})",
            f"tokens          {packing.tokens:,}",
            f"trained tokens  {packing.trained_tokens:,} ({_percent(packing.trained_tokens, packing.tokens)})",
            f"fill            {100 * packing.fill:.3f}% of {self.capacity:,} positions a pack",
            f"a pack has      up to {packing.longest:,} tokens, {packing.most_sequences:,} sequences",
        ]
        if packing.left_out:
            lines.append(f"left out        {packing.left_out:,} sequences of other sources")
        if packing.overlong:
            lines.append(
                f"overlong        {packing.overlong:,} sequences: {packing.dropped_tokens:,} tokens dropped,"
                f" {packing.untrained_by_cut:,} labels lost to cuts"
            )
        if packing.lost_columns:
            names = ", ".join(packing.lost_columns)
            lines.append(f"lost            columns {names}: they have a row a pack of the source")
        if packing.masked_packs:
            lines.append(
                f"warning         {packing.masked_packs:,} packs have no token to train on: inspect names them,"
                " --drop-untrained leaves such sequences out"
            )
        if (valid := self.valid) is not None:
            lines.append(
                f"validation      {valid.sequences:,} sequences, {valid.tokens:,} tokens, {valid.trained_tokens:,}"
                f" trained, in {valid.packs:,} packs: {self.prefix}.valid"
            )
        for name, count in (corpus.notes if corpus else {}).items():
            lines.append(f"note            {count:,} {_NOTES.get(name, name.replace('_', ' '))}")
        lines.append("seconds         " + ", ".join(f"{stage} {taken:.1f}" for stage, taken in self.seconds.items()))
        return lines


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "0%"
