"""The state at a job's prefix: nothing, parts or a corpus from an earlier job, or finished shards.

Parts are in the building folder of the prefix. Each has the digest of everything that determines its content as its
name, so a job reuses the parts that it would make, and makes the others. ``build.json`` has the options that determine
the parts. If one of them differs, all parts would be useless, and the job reports this before hours of work.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from megatron_sft_idx.chat.inputs import InputFile
from megatron_sft_idx.chat.template import MaskOptions
from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.layout.doubts import doubts
from megatron_sft_idx.packs.conditions import Condition, bind_all
from megatron_sft_idx.packs.source_names import shortest_names
from megatron_sft_idx.packs.split import refuse_other_splits
from megatron_sft_idx.shard import Shard, check_free, read_header
from megatron_sft_idx.shard.opening import missing_files
from megatron_sft_idx.storage.building import Building, require_removable
from megatron_sft_idx.storage.building_files import lost_files
from megatron_sft_idx.storage.local import StreamHash
from megatron_sft_idx.storage.publish import Place
from megatron_sft_idx.tokenize.bad_rows import BadRowLimit
from megatron_sft_idx.tokenize.cut import Cutting, first_pieces
from megatron_sft_idx.tokenize.encoding import EncodingOptions, RowEncoder
from megatron_sft_idx.tokenize.gather import output_prefixes, require_outputs_apart
from megatron_sft_idx.tokenize.plan import PackOptions
from megatron_sft_idx.tokenize.row_files import row_files
from megatron_sft_idx.tokenize.selection import Selection, file_weights

# Beginnings of differences in options that the fingerprint of a chat template also covers.
_IN_TEMPLATE = tuple(
    f"{name.replace('_', ' ')} " for name in ("template_kwargs", *(f.name for f in fields(MaskOptions)))
)
_WORK = "preprocess"
# The key of ``build.json`` for the options that determine the parts.
_ENCODING = "encoding"


@dataclass(frozen=True, slots=True)
class PreprocessOptions:
    """Input and options of one job.

    Attributes:
        inputs: files, globs and ``save_to_disk`` folders.
        prefix: prefix of the packed shard, or the beginning of the prefixes of several; "" for a dry run without one.
        encoding: how rows become sequences, without the weights of files.
        packing: how sequences become packs.
        engine: ``local`` runs tasks on this machine, ``ray`` on a Ray cluster. Does not change the output.
        ray_address: address of the cluster; None starts one on this machine, and stops it.
        workers: number of worker processes for tokenization; 0 for this process only, None for one per CPU. Does not
            change the output.
        output_shards: number of shards for the packs.
        overwrite: replace existing shards at the prefix.
        keep_corpus: keep the tokenised corpus next to the packed shard, at ``PREFIX.unpacked``.
        log_interval: number of rows between two lines of progress without a terminal; 0 for none.
        loss_weights: by FILE, a weight for the masks of the file's rows (``file_weights``).
        max_bad_rows: maximum number of skipped rows; None for no limit. Does not change the output.
        repeats: by FILE, how often the file's rows are trained on (``file_weights``).
    """

    inputs: Sequence[str]
    prefix: str
    encoding: EncodingOptions
    packing: PackOptions
    engine: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    workers: int | None = 0
    output_shards: int = 1
    overwrite: bool = False
    keep_corpus: bool = False
    log_interval: int = 0
    loss_weights: Mapping[str, float] = field(default_factory=dict)
    max_bad_rows: BadRowLimit | None = None
    repeats: Mapping[str, float] = field(default_factory=dict)

    def encoding_of(self, files: Sequence[InputFile]) -> EncodingOptions:
        """Return how rows of these files become sequences, with the files' weights. See ``file_weights`` for errors."""
        if not self.loss_weights:
            return self.encoding
        weights = tuple(file_weights("--loss-weight", self.loss_weights, [file.path for file in files]))
        return replace(self.encoding, loss_weights=weights if set(weights) != {1.0} else ())

    def packing_of(self, files: Sequence[InputFile]) -> PackOptions:
        """Return how sequences of these files become packs, with the files' weights.

        See ``file_weights`` for errors.
        """
        if not self.repeats:
            return self.packing
        # By the numbers of the files, because headers of shards must not contain paths.
        weights = file_weights("--repeat", self.repeats, [file.path for file in files])
        if self.encoding.rows.kind == "preference" and max(weights) > 1:
            raise FormatError(
                "--repeat: a preference pair can be trained on only once, because its pair number must be unique; use"
                " a weight of at most 1"
            )
        return replace(self.packing, selection=replace(self.packing.selection or Selection(), weights=weights))

    def expanded(self) -> tuple[list[InputFile], PreprocessOptions]:
        """Return the input files, and the options with weights by file number and conditions by file name.

        Raises:
            FormatError: an input does not exist or holds packs, or conditions are invalid.
        """
        files = row_files(self.inputs)
        paths, packing = [file.path for file in files], self.packing_of(files)
        conditions = [Condition.parse(text).named(paths) for text in packing.where]
        bind_all(conditions, self.column_specs(files), "--where")
        return files, replace(self, packing=replace(packing, where=tuple(map(str, conditions))))

    def check_outputs(self, files: Sequence[InputFile]) -> None:
        """Raise FormatError if shards or corpus would replace an input file, or be next to other splits."""
        inputs = [Place(file.path, "the input") for file in files]
        outputs = output_prefixes(self.prefix, self.output_shards, valid=self.has_valid)
        require_outputs_apart([*outputs, corpus_prefix(self.prefix)], inputs, self.encoding.columns)
        if self.output_shards > 1:
            refuse_other_splits(self.prefix, self.output_shards)

    def column_specs(self, files: Sequence[InputFile]) -> dict[str, ColumnSpec]:
        """Return the columns of the shards by name; ``source`` has these files, without fingerprints."""
        names = shortest_names([file.path for file in files])
        return self.encoding.column_specs([{"name": name} for name in names])

    @property
    def max_rows(self) -> int | None:
        """The maximum number of usable rows to take, from the first on; None for all."""
        return None if self.packing.selection is None else self.packing.selection.max_rows

    @property
    def has_valid(self) -> bool:
        """Whether there is a validation shard."""
        return self.packing.selection is not None and self.packing.selection.valid_fraction > 0


def corpus_prefix(prefix: str) -> str:
    """Return the prefix of the tokenised corpus that is kept next to a packed shard."""
    return prefix + ".unpacked"


class Job(NamedTuple):
    """One execution of ``preprocess``: its options, and everything prepared before the first row is read.

    Attributes:
        options: as given.
        files: the input files.
        encoder: converts their rows to sequences.
        cutting: how to divide the input.
        log: takes lines for people.
    """

    options: PreprocessOptions
    files: Sequence[InputFile]
    encoder: RowEncoder
    cutting: Cutting
    log: Callable[[str], None]

    @property
    def outputs(self) -> list[str]:
        """Prefixes of the packed shards."""
        return output_prefixes(self.prefix, self.options.output_shards, valid=self.options.has_valid)

    @property
    def corpus(self) -> str:
        """Prefix of the tokenised corpus."""
        return corpus_prefix(self.prefix)

    @property
    def prefix(self) -> str:
        """The beginning of its shards' prefixes, as an absolute path, so that tasks on other machines find it."""
        return os.path.abspath(self.options.prefix) if self.options.engine == "ray" else self.options.prefix

    @property
    def packing(self) -> dict[str, Any]:
        """How sequences become packs, in the form for ``noted_differences``."""
        return {"packing": self.options.packing.by_name()}

    def check_outputs(self) -> None:
        """Raise FormatError if the job may not write a shard. A shard that may be its own is no obstacle."""
        for prefix in self.outputs:
            self._check_output(prefix, lambda header: _shard_differences(header, self))

    def check_corpus(self) -> None:
        """Raise FormatError if the job may not write its corpus."""
        if self.options.keep_corpus:
            self._check_output(self.corpus, lambda header: _shard_differences(header, self, packed=False))

    def _check_output(self, prefix: str, differences_of: Callable[[Header], list[str]]) -> None:
        paths, overwrite = ShardPaths.of(prefix), self.options.overwrite
        may_be_own = not paths.missing()
        paths = paths.with_columns(self.encoder.options.columns).with_media(self.encoder.processor is not None)
        check_free(paths, overwrite=overwrite or may_be_own)
        if may_be_own and not overwrite and (differs := differences_of(read_header(prefix))):
            raise _other_shard_error(prefix, differs)


# ---- differences ----


def noted_differences(noted: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return how options, in groups by name, differ from those in a shard's header or ``build.json``."""
    earlier = {group: noted.get(group) for group in wanted}
    if "tokenizer" in wanted and "processor" in noted:  # an encoder without a processor does not have the group
        earlier["processor"] = noted["processor"]
    if isinstance(packing := earlier.get("packing"), Mapping):  # headers have more about it than its options
        earlier["packing"] = {name: packing.get(name) for name in wanted["packing"]}
    differs = list(differences(earlier, wanted))
    # The fingerprint of a template also covers options. If one of these differs, it need not be listed.
    others = [each for each in differs if not each.startswith("chat template ")]
    return others if any(each.startswith(_IN_TEMPLATE) for each in others) else differs


def differences(earlier: Any, wanted: Any, name: str = "") -> Iterator[str]:
    """Yield ``NAME was EARLIER, is WANTED`` for every value in nested objects that differs."""
    if isinstance(earlier, Mapping) and isinstance(wanted, Mapping):
        for key in sorted({*earlier, *wanted}):
            inner = key if name in ("", "options", "sharding", "input") else f"{name} {key}"
            yield from differences(earlier.get(key), wanted.get(key), inner.replace("_", " "))
    elif earlier != wanted:
        yield f"{name} was {earlier!r}, is {wanted!r}"


def _content_differences(header: Header, job: Job) -> list[str]:
    """Return how the content of the input, which is read completely, differs from a shard's header."""
    sources, stream = header.metadata.get("sources", {}), StreamHash()
    pieces = first_pieces(job.files, sources.get("pieces"))
    for content in job.encoder.content_of_pieces(pieces, sources.get("rows", 0)):
        stream.update(content.encode())
    earlier, now = sources.get("fingerprint"), stream.hex()
    return [] if earlier == now else [f"the content of the input was {earlier}, is {now}"]


def _shard_differences(header: Header, job: Job, *, packed: bool = True) -> list[str]:
    """Return how a shard (``packed`` or a corpus) differs from that of the job, without reading the input."""
    metadata = header.metadata
    if reasons := doubts(metadata):
        return reasons
    if packed:
        if differs := noted_differences(metadata, job.packing):
            return differs
        packing = metadata["packing"]
        if packing.get("source") != header.source:
            return ["it was packed from a different shard"]
    elif "packing" in metadata:
        return ["it is packed"]
    return noted_differences(metadata, job.encoder.describe())


def _other_shard_error(path: str, differs: Sequence[str]) -> FormatError:
    return FormatError(
        f"{path}: a complete shard already exists here, and was made differently: {'; '.join(differs)}; use another"
        " prefix, or pass --overwrite to replace the shard"
    )


# ---- what the job can reuse ----


def take_job(job: Job) -> tuple[Building, list[Header]]:
    """Take the building folder of a job. The caller must end with ``finish``, ``discard`` or ``close``.

    Shards of a killed job that only need renames are published first. Parts of an earlier job stay, unless they have
    other options and ``overwrite`` is given.

    Returns:
        The folder, and the headers of all packed shards if this same job was finished before.

    Raises:
        FormatError: another writer is active, existing files may not be replaced, or an interrupted job had other
            options that determine the parts.
    """
    _refuse_parts_folder(job.prefix)
    finished = False
    building = Building.take(job.prefix)
    try:
        # With --overwrite, too: the killed command is most likely the same.
        while building.is_done and not (job.options.overwrite and lost_files(job.prefix)):
            building.finish()
            finished, building = True, Building.take(job.prefix)
        job.check_outputs()
        job.check_corpus()
        # A job that replaces its own shards makes them again, unless it was killed while doing so.
        headers = find_finished(job, job.prefix) if finished or not job.options.overwrite else []
        if not headers and not job.options.overwrite:
            require_no_other_shard(job, job.prefix)
        if not headers:
            _keep_parts(job, building)
    except BaseException:
        building.release()
        raise
    return building, headers


def _keep_parts(job: Job, building: Building) -> None:
    """Begin the job in its folder, with all parts of an earlier job that may be useful."""
    encoding, earlier = job.encoder.describe_parts(), building.content
    if earlier is not None and earlier.get("work") == _WORK:
        if building.num_parts() and (differs := noted_differences(earlier.get(_ENCODING, {}), encoding)):
            if not job.options.overwrite:
                raise FormatError(
                    f"{building.folder}: contains parts of an interrupted preprocess run with a different option:"
                    f" {differs[0]}; use the old value to reuse the parts, or pass --overwrite to discard them"
                )
            building.remove_parts()
        building.clear_files()
        building.remove_torn_parts()
    else:
        if earlier is not None and not job.options.overwrite:
            require_removable(building)
        building.clear()
    building.begin({"work": _WORK, _ENCODING: encoding})


def _refuse_parts_folder(prefix: str) -> None:
    """Raise FormatError if an earlier version of this package left parts next to the prefix."""
    if os.path.isfile(f"{prefix}.parts/run.json"):
        raise FormatError(
            f"{prefix}.parts: contains unfinished work of an earlier version of this package; finish it with that"
            " version, or remove this folder"
        )


def find_finished(job: Job, prefix: str) -> list[Header]:
    """Return the headers of all packed shards at a local or remote prefix if this same job made them; else none.

    Also none if a corpus is to be kept and does not exist. The input is read for the comparison.

    Raises:
        FormatError: the shards at the prefixes are different, and may not be replaced.
    """
    options = job.options
    outputs = output_prefixes(prefix, options.output_shards, valid=options.has_valid)
    if any(map(missing_files, outputs)):
        return []
    headers = [read_header(output) for output in outputs]
    first, differs = headers[0].metadata.get("sources"), list[str]()
    for header in headers:
        of_sources = differences(header.metadata.get("sources"), first, "sources")
        differs = differs or _shard_differences(header, job) or [*of_sources]
    if differs := differs or _content_differences(headers[0], job):
        if options.overwrite:
            return []
        raise _other_shard_error(outputs[0], differs)
    return [] if options.keep_corpus and missing_files(corpus_prefix(prefix)) else headers


def require_no_other_shard(job: Job, prefix: str) -> None:
    """Raise FormatError if a local or remote prefix has another shard than the job would make.

    A shard of this same job may be there if it has several or was interrupted. In that case the input is read for the
    comparison.
    """
    options = job.options
    outputs = output_prefixes(prefix, options.output_shards, valid=options.has_valid)
    headers = {output: read_header(output) for output in outputs if not missing_files(output)}
    sources: Any = None
    for output, header in headers.items():
        differs = _shard_differences(header, job)
        if sources is None:
            differs = differs or _content_differences(header, job)
            sources = header.metadata["sources"] if not differs else None
        elif header.metadata.get("sources") != sources:
            differs = differs or ["it was made from different input"]
        if differs:
            raise _other_shard_error(output, differs)
    if options.keep_corpus and prefix != job.prefix and not missing_files(corpus := corpus_prefix(prefix)):
        header = read_header(corpus)
        if differs := _shard_differences(header, job, packed=False) or _content_differences(header, job):
            raise _other_shard_error(corpus, differs)


def find_corpus(job: Job) -> Shard | None:
    """Return the corpus of an earlier job if this job would make the same. FormatError: it cannot write its own."""
    if ShardPaths.of(job.corpus).missing():
        return None
    differs = ["it cannot be read"]
    with contextlib.suppress(SFTIndexError, OSError):
        shard = Shard(job.corpus)
        differs = _shard_differences(shard.header, job, packed=False) or _content_differences(shard.header, job)
        if not differs:
            return shard
    if job.options.keep_corpus and not job.options.overwrite:
        raise _other_shard_error(job.corpus, differs)
    return None
