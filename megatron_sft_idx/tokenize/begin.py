"""What a job finds at its prefix: nothing, parts or a corpus that an earlier job made, or finished shards.

Parts lie in the building folder of the prefix, each named by a digest of what decides its content, so a job uses those
that are as it would make them, and makes the others. ``build.json`` holds the options that decide over parts: where one
of them differs, all parts would be of no use, and the job says so before hours of work.
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

# Beginnings of what ``differences`` says of options that the fingerprint of a chat template covers too.
_IN_TEMPLATE = tuple(
    f"{name.replace('_', ' ')} " for name in ("template_kwargs", *(f.name for f in fields(MaskOptions)))
)
_WORK = "preprocess"
# The key of ``build.json`` under which the options lie that decide over parts.
_ENCODING = "encoding"


@dataclass(frozen=True, slots=True)
class PreprocessOptions:
    """Input and options of one job.

    Attributes:
        inputs: files, globs and ``save_to_disk`` folders.
        prefix: of the packed shard, or what the prefixes of several begin with; "" for a dry run without one.
        encoding: how rows become sequences, without the weights of files.
        packing: how sequences become packs.
        engine: ``local`` runs tasks on this machine, ``ray`` on a Ray cluster. Changes no byte of the output.
        ray_address: of the cluster; None starts one on this machine, and stops it.
        workers: processes that tokenise; 0 for this process alone, None for one a processor. Changes no byte.
        output_shards: how many shards the packs are cut into.
        overwrite: replace what is at the prefix.
        keep_corpus: keep the tokenised corpus beside the packed shard, at ``PREFIX.unpacked``.
        log_interval: rows between two lines of progress where there is no terminal; 0 for silence.
        loss_weights: by FILE, a weight that the masks of the file's rows are multiplied by (``file_weights``).
        max_bad_rows: how many rows may be skipped; None for no limit. Changes no byte.
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
        """How rows of these files become sequences, their weights included; errors as of ``file_weights``."""
        if not self.loss_weights:
            return self.encoding
        weights = tuple(file_weights("--loss-weight", self.loss_weights, [file.path for file in files]))
        return replace(self.encoding, loss_weights=weights if set(weights) != {1.0} else ())

    def packing_of(self, files: Sequence[InputFile]) -> PackOptions:
        """How sequences of these files become packs, their weights included; errors as of ``file_weights``."""
        if not self.repeats:
            return self.packing
        # By the numbers of the files: headers of shards must not hold paths.
        weights = file_weights("--repeat", self.repeats, [file.path for file in files])
        if self.encoding.rows.kind == "preference" and max(weights) > 1:
            raise FormatError("--repeat: a preference pair is trained on once, as its number says; ask for 1 at most")
        return replace(self.packing, selection=replace(self.packing.selection or Selection(), weights=weights))

    def expanded(self) -> tuple[list[InputFile], PreprocessOptions]:
        """The files of the input, and the options with weights by the numbers of files, and conditions by their names.

        Raises:
            FormatError: an input that is none, or holds packs; or conditions that cannot be.
        """
        files = row_files(self.inputs)
        paths, packing = [file.path for file in files], self.packing_of(files)
        conditions = [Condition.parse(text).named(paths) for text in packing.where]
        bind_all(conditions, self.column_specs(files), "--where")
        return files, replace(self, packing=replace(packing, where=tuple(map(str, conditions))))

    def check_outputs(self, files: Sequence[InputFile]) -> None:
        """FormatError where shards or corpus would replace a file of the input, or lie beside other splits."""
        inputs = [Place(file.path, "the input") for file in files]
        outputs = output_prefixes(self.prefix, self.output_shards, valid=self.has_valid)
        require_outputs_apart([*outputs, corpus_prefix(self.prefix)], inputs, self.encoding.columns)
        if self.output_shards > 1:
            refuse_other_splits(self.prefix, self.output_shards)

    def column_specs(self, files: Sequence[InputFile]) -> dict[str, ColumnSpec]:
        """The columns that shards have, by name; ``source`` names these files, without fingerprints."""
        names = shortest_names([file.path for file in files])
        return self.encoding.column_specs([{"name": name} for name in names])

    @property
    def max_rows(self) -> int | None:
        """How many usable rows are taken, from the first on; None for all."""
        return None if self.packing.selection is None else self.packing.selection.max_rows

    @property
    def has_valid(self) -> bool:
        """Whether there is a shard to validate with."""
        return self.packing.selection is not None and self.packing.selection.valid_fraction > 0


def corpus_prefix(prefix: str) -> str:
    """Prefix of the tokenised corpus that is kept beside a packed shard."""
    return prefix + ".unpacked"


class Job(NamedTuple):
    """One execution of ``preprocess``: its options, and what was made of them before the first row is read.

    Attributes:
        options: as given.
        files: the files of the input.
        encoder: turns their rows into sequences.
        cutting: how the input is cut.
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
        """What the prefixes of its shards begin with. Tasks on other machines find it by its whole path."""
        return os.path.abspath(self.options.prefix) if self.options.engine == "ray" else self.options.prefix

    @property
    def packing(self) -> dict[str, Any]:
        """How sequences become packs, as ``noted_differences`` takes it."""
        return {"packing": self.options.packing.by_name()}

    def check_outputs(self) -> None:
        """FormatError where the job may not write a shard; one that it may find to be its own is not in its way."""
        for prefix in self.outputs:
            self._check_output(prefix, lambda header: _shard_differences(header, self))

    def check_corpus(self) -> None:
        """FormatError where the job may not write its corpus."""
        if self.options.keep_corpus:
            self._check_output(self.corpus, lambda header: _shard_differences(header, self, packed=False))

    def _check_output(self, prefix: str, differences_of: Callable[[Header], list[str]]) -> None:
        paths, overwrite = ShardPaths.of(prefix), self.options.overwrite
        may_be_own = not paths.missing()
        paths = paths.with_columns(self.encoder.options.columns).with_media(self.encoder.processor is not None)
        check_free(paths, overwrite=overwrite or may_be_own)
        if may_be_own and not overwrite and (differs := differences_of(read_header(prefix))):
            raise _other_shard_error(prefix, differs)


# ---- what differs ----


def noted_differences(noted: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """How options, in groups by name, differ from those that the header of a shard or ``build.json`` holds."""
    earlier = {group: noted.get(group) for group in wanted}
    if "tokenizer" in wanted and "processor" in noted:  # an encoder without one does not name the group
        earlier["processor"] = noted["processor"]
    if isinstance(packing := earlier.get("packing"), Mapping):  # of which headers say more than its options
        earlier["packing"] = {name: packing.get(name) for name in wanted["packing"]}
    differs = list(differences(earlier, wanted))
    # The fingerprint of a template covers options too: where one of these differs, it need not be named.
    others = [each for each in differs if not each.startswith("chat template ")]
    return others if any(each.startswith(_IN_TEMPLATE) for each in others) else differs


def differences(earlier: Any, wanted: Any, name: str = "") -> Iterator[str]:
    """``NAME was EARLIER, is WANTED`` for every value in nested objects that differs."""
    if isinstance(earlier, Mapping) and isinstance(wanted, Mapping):
        for key in sorted({*earlier, *wanted}):
            inner = key if name in ("", "options", "sharding", "input") else f"{name} {key}"
            yield from differences(earlier.get(key), wanted.get(key), inner.replace("_", " "))
    elif earlier != wanted:
        yield f"{name} was {earlier!r}, is {wanted!r}"


def _content_differences(header: Header, job: Job) -> list[str]:
    """How the content of the input, all of which is read, differs from what the header of a shard says of it."""
    sources, stream = header.metadata.get("sources", {}), StreamHash()
    pieces = first_pieces(job.files, sources.get("pieces"))
    for content in job.encoder.content_of_pieces(pieces, sources.get("rows", 0)):
        stream.update(content.encode())
    earlier, now = sources.get("fingerprint"), stream.hex()
    return [] if earlier == now else [f"the content of the input was {earlier}, is {now}"]


def _shard_differences(header: Header, job: Job, *, packed: bool = True) -> list[str]:
    """How a shard, which is ``packed`` or a corpus, differs from that of the job; the input is not read."""
    metadata = header.metadata
    if "recovered" in metadata:
        return ["it was recovered from an interrupted build, and may lack packs"]
    if "accepted" in metadata:
        return ["it was rebuilt with contents that do not have their checksums"]
    if packed:
        if differs := noted_differences(metadata, job.packing):
            return differs
        packing = metadata["packing"]
        if packing.get("source") != header.source:
            return ["it was packed from other packs"]
    elif "packing" in metadata:
        return ["it is packed"]
    return noted_differences(metadata, job.encoder.describe())


def _other_shard_error(path: str, differs: Sequence[str]) -> FormatError:
    return FormatError(
        f"{path}: a finished shard is here, made from something else: {'; '.join(differs)}; pass --overwrite to replace"
        " it"
    )


# ---- what the job can go on with ----


def take_job(job: Job) -> tuple[Building, list[Header]]:
    """Take the building folder of a job; the caller must end with ``finish``, ``discard`` or ``close``.

    Shards that only had to be renamed when an earlier job was killed appear first. Parts of an earlier job stay, unless
    they are of other options and ``overwrite`` is given.

    Returns:
        The folder, and the headers of all packed shards if this very job was finished before.

    Raises:
        FormatError: another writer is at work, something is in the way and may not be replaced, or an interrupted job
            had other options that decide over parts.
    """
    _refuse_parts_folder(job.prefix)
    finished = False
    building = Building.take(job.prefix)
    try:
        # With --overwrite too: the command that was killed is most likely this one.
        while building.is_done and not (job.options.overwrite and lost_files(job.prefix)):
            building.finish()
            finished, building = True, Building.take(job.prefix)
        job.check_outputs()
        job.check_corpus()
        # A job that is to replace its own shards makes them again, unless it was killed as it did.
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
    """Begin the job in its folder, with those parts of an earlier job that may be of use."""
    encoding, earlier = job.encoder.describe_parts(), building.content
    if earlier is not None and earlier.get("work") == _WORK:
        if building.num_parts() and (differs := noted_differences(earlier.get(_ENCODING, {}), encoding)):
            if not job.options.overwrite:
                raise FormatError(
                    f"{building.folder}: holds parts of an interrupted preprocess with another option: {differs[0]};"
                    " give the same one to go on with them, or pass --overwrite to drop them"
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
    """FormatError if an earlier version of this package left parts next to the prefix."""
    if os.path.isfile(f"{prefix}.parts/run.json"):
        raise FormatError(
            f"{prefix}.parts: unfinished work of an earlier version of this package; finish it with that version, or"
            " remove this folder"
        )


def find_finished(job: Job, prefix: str) -> list[Header]:
    """The headers of all packed shards at a prefix, local or remote, if this very job made them; else none.

    None either where a corpus is to be kept and is not there. The input is read, to compare it.

    Raises:
        FormatError: the shards at the prefixes are others, and may not be replaced.
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
    """FormatError if another shard than the job would make is at a prefix, local or in a store.

    One of this very job may be there, if it has several or was interrupted. If there is any, the input is read, to
    compare it.
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
            differs = differs or ["its input was another"]
        if differs:
            raise _other_shard_error(output, differs)
    if options.keep_corpus and prefix != job.prefix and not missing_files(corpus := corpus_prefix(prefix)):
        header = read_header(corpus)
        if differs := _shard_differences(header, job, packed=False) or _content_differences(header, job):
            raise _other_shard_error(corpus, differs)


def find_corpus(job: Job) -> Shard | None:
    """The corpus of an earlier job, if this one would make the same; FormatError where its own may not go there."""
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
