"""The driver of a run on a cluster: hands out stretches, plans on lengths, hands out the plan."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.inputs.files import InputFile, expand_inputs, total_bytes
from megatron_sft_idx.errors import FormatError, SequenceError, SFTIndexError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.preprocess import source
from megatron_sft_idx.preprocess.corpus import CorpusReport, corpus_report, note_bad_row
from megatron_sft_idx.preprocess.distributed.cluster import Cluster, ray_cluster
from megatron_sft_idx.preprocess.distributed.state import RunFolder
from megatron_sft_idx.preprocess.distributed.stretches import Cutting, Stretch, cut_file
from megatron_sft_idx.preprocess.distributed.tasks import (
    MadePart,
    PartsTable,
    TokenisingJob,
    count_trained,
    digest_of,
    gather_shard,
    make_parts,
)
from megatron_sft_idx.preprocess.encoding import RowEncoder
from megatron_sft_idx.preprocess.identity import option_differences, packing_differences, shards_differences
from megatron_sft_idx.preprocess.outputs import Output, Packing, make_room, output_prefixes, plan_packs
from megatron_sft_idx.preprocess.pack import pack_report
from megatron_sft_idx.preprocess.progress import Progress
from megatron_sft_idx.preprocess.start import has_remains, require_not_output
from megatron_sft_idx.preprocess.summary import Summary, timed
from megatron_sft_idx.shard import check_free, read_header
from megatron_sft_idx.shard.prefix import is_set_aside, publish_all
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.hashing import StreamHash

if TYPE_CHECKING:
    from megatron_sft_idx.preprocess.pipeline import PreprocessOptions

__all__ = ["preprocess_on_ray"]


def preprocess_on_ray(options: PreprocessOptions, log: Callable[[str], None]) -> Summary:
    """As ``preprocess``, which calls this for ``engine="ray"``."""
    return _Run(options, log).run()


@dataclass(slots=True)
class _Tokenised:
    """What the driver knows once all parts are there: four bytes a sequence, and some hundred a part."""

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
    def __init__(self, options: PreprocessOptions, log: Callable[[str], None]) -> None:
        if options.keep_corpus:
            raise FormatError(
                f"{options.prefix}: --keep-corpus with --engine ray: there is no corpus, only parts in many files; use"
                " --engine local, or --packing none to make an unpacked shard that pack takes"
            )
        if is_remote(options.prefix):
            raise FormatError(
                f"{options.prefix}: --engine ray writes to a file system that all nodes share; name a prefix there, and"
                " copy the shards afterwards"
            )
        self.options, self.log = options, log
        self.prefix = os.path.abspath(options.prefix)
        self.outputs = output_prefixes(self.prefix, options.output_shards)
        self.folder = RunFolder.of(options.prefix)
        self.seconds: dict[str, float] = {}

    def run(self) -> Summary:
        with timed(self.seconds, "preparing"):
            files = expand_inputs(self.options.inputs)
            require_not_output(files, self.outputs)
            encoder = RowEncoder(self.options.encoding)
            cutting = Cutting.of(total_bytes(files), source.PIECE_NBYTES)
            if headers := self._found(files, encoder):
                self.log(f"{self.options.prefix}: done already, with the same input and options")
                return self._summary(corpus_report(headers[0]), headers, found=True)
        with self.folder.locked():
            replaces = self._begin(files, encoder, cutting)
            try:
                with ray_cluster(self.options.ray_address, self.options.workers, self.log) as cluster:
                    report, headers = self._make(cluster, files, encoder, cutting, replaces)
            except (SFTIndexError, OSError, KeyboardInterrupt, SystemExit):
                if self.folder.has_parts():
                    self.log(f"tokenised parts are kept at {self.folder.path}; pass --resume to go on with them")
                else:
                    self.folder.clear()
                raise
            self.folder.clear()
        return self._summary(report, headers)

    def _summary(self, report: CorpusReport, headers: Sequence[Header], *, found: bool = False) -> Summary:
        options = self.options
        return Summary(
            options.prefix, options.packing.capacity, report, pack_report(headers), self.seconds, found=found
        )

    def _found(self, files: Sequence[InputFile], encoder: RowEncoder) -> list[Header]:
        """The headers of all output shards where a run is resumed that was done; nothing where work is left."""
        if not self.options.resume or any(ShardPaths.of(prefix).missing() for prefix in self.outputs):
            return []
        if self.folder.exists:
            return []  # which may have been to replace them
        headers = [read_header(prefix) for prefix in self.outputs]
        _require_same(self.outputs[0], shards_differences(headers, encoder, files, self.options.packing))
        return headers

    def _begin(self, files: Sequence[InputFile], encoder: RowEncoder, cutting: Cutting) -> bool:
        """Check what is there, and note what this run is of; whether it may replace shards."""
        options = self.options
        if options.resume and self.folder.exists:
            replaces = self.folder.resume(files, encoder, cutting)
            if not replaces:
                self._require_same_outputs(encoder)
            self.log(f"resuming: parts at {self.folder.path} are used again where their input is the same")
            return replaces
        if options.resume:
            self._require_same_outputs(encoder)
            self.log(f"{options.prefix}: nothing to resume, starting from the beginning")
        elif not options.overwrite and self.folder.exists:
            raise FormatError(
                f"{self.folder.path}: left by a run that was interrupted; pass --resume to go on with it, or"
                " --overwrite to start anew"
            )
        for prefix in self.outputs:
            # Whether a shard that is there is one of this run is known once its input is read.
            check_free(ShardPaths.of(prefix), overwrite=options.overwrite or options.resume)
            if has_remains(prefix) and not options.overwrite:
                raise FormatError(
                    f"{ShardPaths.of(prefix).journal}: left by another run that was interrupted, or is at work still;"
                    " pass --overwrite to start anew"
                )
        self.folder.clear()
        self.folder.write(files, encoder, cutting, overwrite=options.overwrite)
        return options.overwrite

    def _require_same_outputs(self, encoder: RowEncoder) -> None:
        """Shards that are there may be of this run, as far as that is known before the input is read."""
        for prefix in self.outputs:
            if not ShardPaths.of(prefix).missing():
                found = read_header(prefix).metadata
                differs = packing_differences(found, self.options.packing) or option_differences(found, encoder)
                _require_same(prefix, differs)

    def _make(
        self, cluster: Cluster, files: Sequence[InputFile], encoder: RowEncoder, cutting: Cutting, replaces: bool
    ) -> tuple[CorpusReport, list[Header]]:
        with timed(self.seconds, "tokenising"):
            tokenised = self._tokenise(cluster, files, encoder, cutting)
        report = tokenised.report
        with timed(self.seconds, "planning"):
            table = tokenised.table()
            lengths = np.concatenate(tokenised.lengths).astype(np.int64)
            tokenised.lengths.clear()  # gigabytes of a large corpus
            packing = plan_packs(
                lengths, self.options.packing, shards=self.options.output_shards, source=self.options.prefix
            )
            outputs = list(
                packing.outputs(
                    self.prefix,
                    {
                        **encoder.describe(),
                        "sources": {
                            "fingerprint": tokenised.fingerprint,
                            "rows": report.rows,
                            "skipped": report.skipped,
                        },
                        "notes": report.notes,
                    },
                    tokenised.fingerprint,
                    _untrained_by_cut(cluster, table, packing),
                    token_dtype=encoder.token_dtype.name,
                    mask_dtype=table.mask_dtype,
                    pad_id=encoder.tokenizer.pad_id,
                )
            )
            make_room(outputs, overwrite=replaces, keep=not replaces)
        with timed(self.seconds, "gathering"):
            headers = self._gather(cluster, table, packing, outputs)
            publish_all([paths for output in outputs if is_set_aside(paths := ShardPaths.of(output.prefix))])
            return report, headers

    def _tokenise(
        self, cluster: Cluster, files: Sequence[InputFile], encoder: RowEncoder, cutting: Cutting
    ) -> _Tokenised:
        options = self.options
        encoding = dataclasses.replace(encoder.options, tokenizer=os.path.abspath(options.encoding.tokenizer))
        job = cluster.share(TokenisingJob(self.folder.path, encoding, digest_of(encoder), cutting))
        result = _Tokenised()
        pieces = StreamHash()
        lines: Counter[int] = Counter()
        cut: deque[Stretch] = deque()

        def stretches() -> Iterator[tuple[Any, Stretch]]:
            for number, file in enumerate(files):
                for stretch in cut_file(file, number, cutting):
                    cut.append(stretch)
                    yield job, stretch

        with Progress(
            "tokenising", total_bytes(files), unit="B", log_interval=options.log_interval, items="rows"
        ) as progress:

            def done(parts: list[MadePart]) -> None:
                for part in parts:
                    progress.update(part.info.num_bytes, part.info.rows)

            tasks = cluster.map_in_order(make_parts, stretches(), name_of=lambda item: _name_of(item[1]), done=done)
            with closing(tasks) as made:
                for parts in made:
                    stretch = cut.popleft()
                    for part in parts:
                        before = lines[stretch.number] if stretch.nbytes is not None else 0
                        self._take(result, part, stretch.name, before)
                        pieces.update("".join(part.info.pieces).encode())
                        lines[stretch.number] += part.info.lines
        result.fingerprint = pieces.hex()
        if not any(map(len, result.lengths)):
            report = result.report
            raise FormatError(
                f"{files[0].path}: no usable row in the input ({report.rows} rows, {report.skipped} skipped)"
            )
        result.report.notes = {name: count for name, count in sorted(result.notes.items()) if count}
        if result.reused:
            self.log(f"resuming: {result.reused:,} of {len(result.paths):,} parts were there already")
        return result

    def _take(self, result: _Tokenised, part: MadePart, name: str, before: int) -> None:
        """Take in one part, in the order of the input; ``before`` rows of its file are in others."""
        info, report = part.info, result.report
        report.rows += info.rows
        for position, reason in info.bad_rows:
            error = SequenceError(name, before + position, reason)
            note_bad_row(report, error, self.options.encoding.on_bad_row, self.log)
        report.skipped += info.skipped - len(info.bad_rows)
        result.notes.update(info.notes)
        if info.mask_dtype == "float32":
            result.mask_dtype = "float32"
        result.paths.append(part.path)
        result.lengths.append(part.lengths)
        result.reused += part.reused

    def _gather(self, cluster: Cluster, table: PartsTable, packing: Packing, outputs: Sequence[Output]) -> list[Header]:
        shared = cluster.share(table)
        total = len(packing.cuts.lengths)
        with Progress(
            "gathering", total, unit="seq", log_interval=self.options.log_interval, items="sequences"
        ) as progress:
            items = ((shared, output, _lean(packing, number)) for number, output in enumerate(outputs))
            return list(
                cluster.map_in_order(
                    gather_shard,
                    items,
                    name_of=lambda item: str(item[1].prefix),
                    done=lambda header: progress.update(header.num_sequences, header.num_sequences),
                )
            )


def _require_same(prefix: str, differs: Sequence[str]) -> None:
    if differs:
        raise FormatError(
            f"{prefix}: a finished shard is here, made from something else: {'; '.join(differs)}; pass --overwrite to"
            " replace it"
        )


def _name_of(stretch: Stretch) -> str:
    return stretch.name if stretch.nbytes is None else f"{stretch.name}, from byte {stretch.offset} on"


def _lean(packing: Packing, number: int) -> Any:
    """The packs of one shard, twelve bytes a sequence."""
    run = packing.run(number)
    selection = dataclasses.replace(run.selection, lengths=run.selection.lengths.astype(np.uint32))
    return dataclasses.replace(run, selection=selection)


def _untrained_by_cut(cluster: Cluster, table: PartsTable, packing: Packing) -> int:
    """Trained tokens right behind a cut: counted where the masks are."""
    sequences, positions = packing.cuts.parted, packing.cuts.parted_at
    order = np.argsort(sequences, kind="stable")
    sequences, positions = sequences[order], positions[order]
    cuts = np.searchsorted(sequences, table.bounds)
    items = (
        (table.paths[part], sequences[cuts[part] : cuts[part + 1]] - table.bounds[part],
         positions[cuts[part] : cuts[part + 1]])
        for part in np.flatnonzero(np.diff(cuts)).tolist()
    )  # fmt: skip
    return sum(cluster.map_in_order(count_trained, items, name_of=lambda item: str(item[0])))
