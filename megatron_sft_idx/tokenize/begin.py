"""What a job finds at its prefix: nothing, parts or a corpus that an earlier job made, or finished shards.

What is there is compared with what the job would make; where it differs, the job refuses it and names the difference.
The parts of a job lie in the folder ``PREFIX.parts``, whose ``run.json`` holds input and options, so that a person is
told what differs before hours of work. Each part also says what it was made from: parts of two jobs are never mixed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

from megatron_sft_idx.chat.inputs import InputFile
from megatron_sft_idx.chat.template import MaskOptions
from megatron_sft_idx.errors import CorruptShardError, FormatError, SFTIndexError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.packs.split import refuse_other_splits
from megatron_sft_idx.shard import Remains, Shard, check_free, find_remains, read_header
from megatron_sft_idx.shard.journal import lock_journal
from megatron_sft_idx.shard.publication import drop_build, publish_all
from megatron_sft_idx.shard.recovery import complete_header
from megatron_sft_idx.storage.local import read_beginning
from megatron_sft_idx.storage.publish import Kind, Place, describe, head_of, write_file
from megatron_sft_idx.tokenize.bad_rows import BadRowLimit
from megatron_sft_idx.tokenize.cut import Cutting, source_fingerprint
from megatron_sft_idx.tokenize.encoding import EncodingOptions, RowEncoder
from megatron_sft_idx.tokenize.gather import output_prefixes, require_outputs_apart
from megatron_sft_idx.tokenize.parts import PART_MAGIC
from megatron_sft_idx.tokenize.plan import PackOptions
from megatron_sft_idx.tokenize.row_files import row_files
from megatron_sft_idx.tokenize.selection import Selection, file_weights

_MAX_NBYTES = 1 << 28
# Beginnings of what ``differences`` says of options that the fingerprint of a chat template covers too.
_IN_TEMPLATE = tuple(
    f"{name.replace('_', ' ')} " for name in ("template_kwargs", *(f.name for f in fields(MaskOptions)))
)
_VERSION = 2
_SHARD = "finished shard"
_LOCK = "run.journal"
_BEGIN = b'{"version":'
_KIND = Kind("the record of a run", lambda path: head_of(path, len(_BEGIN)) == _BEGIN)
# Files of a job, whole or left by a kill: the lock, run.json, parts; and a file that is open somewhere on NFS.
_OURS = re.compile(
    r"run\.journal|run\.json|\.run\.json\.([0-9a-f]+\.)?tmp|\d+-\d+(\.[0-9a-f]+)?\.part(\.([0-9a-f]+\.)?tmp)?|\.nfs.+"
)


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
        resume: go on with an interrupted job of the same input and options.
        keep_corpus: keep the tokenised corpus beside the packed shard, at ``PREFIX.unpacked``.
        log_interval: rows between two lines of progress where there is no terminal; 0 for silence.
        loss_weights: ``FILE=WEIGHT`` entries: masks of the file's rows are multiplied by the weight.
        max_bad_rows: how many rows may be skipped; None for no limit. Changes no byte.
        repeats: ``FILE=WEIGHT`` entries: how often the file's rows are trained on (``file_weights``).
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
    resume: bool = False
    keep_corpus: bool = False
    log_interval: int = 0
    loss_weights: Sequence[str] = ()
    max_bad_rows: BadRowLimit | None = None
    repeats: Sequence[str] = ()

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
        """The files of the input, and the options with the weights of files by their numbers.

        Raises:
            FormatError: an input that is none, or holds packs.
        """
        files = row_files(self.inputs)
        return files, replace(self, packing=self.packing_of(files))

    def check_outputs(self, files: Sequence[InputFile]) -> None:
        """FormatError where shards or corpus would replace a file of the input, or lie beside other splits."""
        inputs = [Place(file.path, "the input") for file in files]
        outputs = output_prefixes(self.prefix, self.output_shards, valid=self.has_valid)
        require_outputs_apart([*outputs, corpus_prefix(self.prefix)], inputs, self.encoding.columns)
        if self.output_shards > 1:
            refuse_other_splits(self.prefix, self.output_shards)

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
        return output_prefixes(self.options.prefix, self.options.output_shards, valid=self.options.has_valid)

    @property
    def corpus(self) -> str:
        """Prefix of the tokenised corpus."""
        return corpus_prefix(self.options.prefix)

    @property
    def folder(self) -> PartsFolder:
        """The folder of its parts."""
        return PartsFolder.of(self.options.prefix)

    @property
    def packing(self) -> dict[str, Any]:
        """How sequences become packs, as ``noted_differences`` takes it."""
        return {"packing": asdict(self.options.packing)}

    def check_free(self, prefix: str, *, overwrite: bool) -> None:
        """FormatError where the job may not write a shard at this prefix."""
        check_free(ShardPaths.of(prefix).with_columns(self.encoder.options.columns), overwrite=overwrite)

    def state(self, *, overwrite: bool) -> JobState:
        """What ``run.json`` is to say of the job when it begins."""
        return JobState(
            [[file.path, file.num_bytes] for file in self.files],
            self.encoder.describe(),
            self.packing,
            [self.cutting.piece_nbytes, self.cutting.pieces],
            overwrite,
            self.options.keep_corpus,
        )


# ---- the folder of parts ----


@dataclass(frozen=True, slots=True)
class JobState:
    """Input and options of a job, and how far it has come: the content of ``run.json``.

    Attributes:
        inputs: path and size of each file.
        metadata: options that decide over tokens and masks, as headers hold them.
        packing: options that decide over packs.
        cutting: bytes of a piece, and pieces of a part.
        overwrite: whether shards may be replaced.
        keep_corpus: whether the corpus is kept.
        tokenized: whether all parts are finished.
    """

    inputs: list[list[Any]]
    metadata: dict[str, Any]
    packing: dict[str, Any]
    cutting: list[int]
    overwrite: bool
    keep_corpus: bool
    tokenized: bool = False


def _is_ours(entry: os.DirEntry[str]) -> bool:
    """Whether a job made this file, by its name and its first bytes; a kill may have left it empty or all zeros."""
    if not _OURS.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
        return False
    if entry.name == _LOCK or entry.name.startswith(".nfs"):
        return True
    expected = _BEGIN if "run.json" in entry.name else PART_MAGIC
    head = head_of(entry.path, len(expected))
    return not head.strip(b"\0") or expected.startswith(head)


@dataclass(frozen=True, slots=True)
class PartsFolder:
    """``PREFIX.parts``: the parts of one job, ``run.json``, and a lock. A job that finishes removes it.

    Attributes:
        path: of the folder.
    """

    path: str

    @classmethod
    def of(cls, prefix: str) -> PartsFolder:
        """The folder of the job that writes ``prefix``; its path is absolute."""
        return cls(os.path.abspath(prefix) + ".parts")

    @property
    def state_path(self) -> str:
        """Path of ``run.json``."""
        return os.path.join(self.path, "run.json")

    @property
    def has_state(self) -> bool:
        """Whether ``run.json`` is there and not empty: whether a job began and did not finish."""
        return os.path.lexists(self.state_path) and os.lstat(self.state_path).st_size > 0

    def check_is_ours(self) -> None:
        """FormatError where something else is at the folder's path, or the folder holds files that no job makes."""
        if os.path.lexists(self.path) and (os.path.islink(self.path) or not os.path.isdir(self.path)):
            raise FormatError(
                f"{self.path}: {describe(self.path)} is here, where the tokenised parts would be for a while; move it"
                " away, or choose another place for the output"
            )
        with contextlib.suppress(FileNotFoundError):
            if other := next((entry.name for entry in os.scandir(self.path) if not _is_ours(entry)), None):
                raise FormatError(
                    f"{self.path}: holds {other}, which is not of a run; the folder is made for one and removed after"
                    " it: move it away, or choose another place for the output"
                )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock; the folder is made first, and removed in the end where no ``run.json`` is in it.

        Raises:
            FormatError: as of ``check_is_ours``; or another process holds the lock.
        """
        self.check_is_ours()
        fd = None
        while fd is None:
            os.makedirs(self.path, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # a job that finished meanwhile removed the folder
                fd = lock_journal(ShardPaths(os.path.join(self.path, "run")), create=True)
        try:
            yield
        finally:
            try:
                if not self.has_state:
                    with contextlib.suppress(OSError):  # a folder with other files in it stays
                        self.clear()
                        os.unlink(os.path.join(self.path, _LOCK))
                        os.rmdir(self.path)
            finally:
                os.close(fd)

    def write(self, state: JobState) -> None:
        """Write ``run.json``, durably."""
        content = {"version": _VERSION, **asdict(state)}
        write_file(self.state_path, json.dumps(content).encode(), _KIND, overwrite=True)

    def read(self) -> JobState:
        """What ``run.json`` says; FormatError where it is not as a job of this version writes it."""
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            content = json.loads(read_beginning(self.state_path, _MAX_NBYTES))
            version, state = content.pop("version", None), JobState(**content)
            kinds = list(map(type, astuple(state)))
            files = {tuple(map(type, file)) for file in state.inputs}
            if version == _VERSION and kinds == [list, dict, dict, list, bool, bool, bool] and files <= {(str, int)}:
                return state
        raise FormatError(
            f"{self.state_path}: not a run of this command, or of another version of it; remove the folder"
            f" {self.path}, or pass --overwrite"
        )

    def clear(self) -> None:
        """Remove ``run.json`` and the parts. The caller must hold the lock, whose file stays."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.state_path)  # first: without it, what a kill leaves of the parts is not resumed
        self.remove_parts()

    def remove_parts(self) -> None:
        """Remove the parts; ``run.json`` stays. The caller must hold the lock."""
        for entry in os.scandir(self.path):
            if entry.path != self.state_path and entry.name != _LOCK and _is_ours(entry):
                with contextlib.suppress(FileNotFoundError):  # a task on another machine may have renamed it just now
                    os.unlink(entry.path)

    def has_parts(self) -> bool:
        """Whether any part is in the folder."""
        return any(entry.name.endswith(".part") for entry in os.scandir(self.path))


# ---- what differs ----


def noted_differences(noted: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """How options, in groups by name, differ from those that the header of a shard or the state of a job holds."""
    earlier = {group: noted.get(group) for group in wanted}
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
    sources = header.metadata.get("sources", {})
    earlier, now = sources.get("fingerprint"), source_fingerprint(job.files, sources.get("pieces"))
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
        if packing.get("source") != header.source or "sources" in packing:
            return ["it was packed from other packs, or from some of its sources"]
    elif "packing" in metadata:
        return ["it is packed"]
    return noted_differences(metadata, job.encoder.describe())


def _state_differences(earlier: JobState, job: Job, *, packing: bool) -> list[str]:
    """How the job differs from an interrupted one; in its packing too, if ``packing``."""
    wanted = job.state(overwrite=False)
    if differs := noted_differences(earlier.metadata, wanted.metadata):
        return differs
    if packing and (differs := noted_differences(earlier.packing, wanted.packing)):
        return differs
    for number, (before, now) in enumerate(zip_longest(earlier.inputs, wanted.inputs), 1):
        if before is None or now is None or before[1] != now[1]:
            was, to_be = (f"{file[0]} of {file[1]:,} bytes" if file else "none" for file in (before, now))
            return [f"file {number} was {was}, is {to_be}"]
    if earlier.cutting != wanted.cutting:
        return [f"the input was cut in {earlier.cutting}, is in {wanted.cutting}"]
    return []


def _interrupted_error(path: str) -> FormatError:
    return FormatError(
        f"{path}: left by a run that was interrupted, or is at work still; pass --resume to go on with it, or"
        " --overwrite to start anew"
    )


def _other_job_error(path: str, differs: Sequence[str]) -> FormatError:
    return FormatError(
        f"{path}: the interrupted run had other input or options: {'; '.join(differs)}; pass the same ones to go on, or"
        " --overwrite to start anew (a finished corpus of the same input is used again)"
    )


def _other_shard_error(path: str, differs: Sequence[str], what: str = "tokenised corpus") -> FormatError:
    also = " (a tokenised corpus of the same input is used again)" if what == _SHARD else ""
    return FormatError(
        f"{path}: a {what} is here, made from something else: {'; '.join(differs)}; pass --overwrite to replace"
        f" it{also}"
    )


# ---- what the job can go on with ----


def find_finished(job: Job) -> list[Header]:
    """With ``--resume``, the headers of all packed shards of an earlier job that finished; else none.

    None either where a corpus is to be kept and is not there. Shards that only had to be renamed when that job was
    killed are renamed now, if this job would make all of them.

    Raises:
        FormatError: the shards at the prefixes are others, and may not be replaced.
    """
    options = job.options
    if not options.resume:
        return []
    paths = [ShardPaths.of(prefix) for prefix in job.outputs]
    complete = [each for each in paths if (remains := _remains(each.prefix)) is not None and remains.is_complete]
    if any(each.missing() and each not in complete for each in paths):
        return []
    if len(complete) < len(paths) and job.folder.has_state and job.folder.read().overwrite:
        return []  # some may be those that are to be replaced
    headers = [complete_header(each) if each in complete else read_header(each) for each in paths]
    first, differs = headers[0].metadata.get("sources"), list[str]()
    for header in headers:
        of_sources = differences(header.metadata.get("sources"), first, "sources")
        differs = differs or _shard_differences(header, job) or [*of_sources]
    if differs := differs or _content_differences(headers[0], job):
        raise _other_shard_error(job.outputs[0], differs, _SHARD)
    if complete:
        publish_all(complete)
        job.log(f"resuming: {options.prefix} was complete but for renames, which are done now")
    return [] if options.keep_corpus and ShardPaths.of(job.corpus).missing() else headers


def begin(job: Job) -> tuple[JobState, Shard | None]:
    """Find out with what the job can go on, refuse what is in its way, and write ``run.json``.

    The caller must hold the lock of the folder of parts.

    ::

        what is there           plain                  --overwrite            --resume
        nothing                 begins                 begins                 begins, and says so
        some parts              refused                begins                 goes on
        all parts               goes on                goes on                goes on
        parts of another job    refused                begins                 refused
        the corpus of this job  is packed              is packed              is packed
        unfinished packs        refused                begins                 are made anew, if there are parts
        a shard                 refused                is replaced in the end is kept, if this job would make it

    Returns:
        What ``run.json`` says now; and the corpus, None where it must be made.

    Raises:
        FormatError: something is in the way and may not be replaced, or an interrupted job had other input or options.
    """
    options, folder, resume = job.options, job.folder, job.options.resume
    earlier, differs = _interrupted_job(job)
    replaces = (earlier is not None and earlier.overwrite) if resume else options.overwrite
    unfinished = _unfinished_shards(job, replaces=replaces)
    if (resume or replaces) and earlier is not None and earlier.keep_corpus:
        drop_build(ShardPaths.of(job.corpus))
    corpus = _find_corpus(job, overwrite=replaces)
    if resume and corpus is not None:
        job.log(f"resuming: the tokenised corpus at {job.corpus} is complete")
    elif resume:
        orphans = unfinished if earlier is None else []
        if (earlier is None or options.keep_corpus) and _remains(job.corpus) is not None:
            orphans = [job.corpus]
        if orphans:
            raise FormatError(
                f"{ShardPaths.of(orphans[0]).journal}: left by an interrupted build that is not of this command: there"
                f" are no parts of it at {folder.path}; recover it: megatron-sft-idx rebuild {orphans[0]}, or pass"
                " --overwrite to start anew"
            )
        if earlier is None:
            job.log(f"{options.prefix}: nothing to resume, starting from the beginning")
    tokenized = earlier is not None and earlier.tokenized and not differs
    if earlier is None:
        folder.clear()  # of a record that cannot be read, too
    elif corpus is not None or not (tokenized or resume):
        folder.remove_parts()
    state = replace(job.state(overwrite=replaces), tokenized=tokenized)
    if state != earlier:
        folder.write(state)
    return state, corpus


def _interrupted_job(job: Job) -> tuple[JobState | None, list[str]]:
    """What ``run.json`` says, if it is there, and how this job differs; FormatError where that may not be."""
    options, folder = job.options, job.folder
    if not folder.has_state:
        return None, []
    try:
        earlier = folder.read()
    except FormatError:
        if options.overwrite:
            return None, []
        raise
    differs = _state_differences(earlier, job, packing=options.resume and not earlier.tokenized)
    if options.resume and differs:
        raise _other_job_error(folder.state_path, differs)
    if not options.resume and not options.overwrite:
        if not earlier.tokenized:
            raise _interrupted_error(folder.path)
        if differs:
            raise _other_shard_error(folder.path, differs)
    return earlier, differs


def _unfinished_shards(job: Job, *, replaces: bool) -> list[str]:
    """Prefixes of packed shards that were left unfinished; FormatError where a shard may not be written there."""
    unfinished = []
    for prefix in job.outputs:
        if not job.options.resume:
            job.check_free(prefix, overwrite=replaces)
            continue
        paths = ShardPaths.of(prefix)
        if (remains := _remains(prefix)) is not None and not remains.is_complete:
            unfinished.append(prefix)
            if differs := noted_differences(remains.build_options.metadata, job.packing):
                raise _other_job_error(paths.journal, differs)
        # A shard that is there may be of this job, as far as its options tell; its input was not read yet.
        if not replaces and paths.missing():
            job.check_free(prefix, overwrite=False)
        elif not replaces and (differs := _shard_differences(read_header(prefix), job)):
            raise _other_shard_error(prefix, differs, _SHARD)
    if not job.options.resume and not replaces:
        for prefix in (*job.outputs, *([job.corpus] if job.options.keep_corpus else [])):
            if os.path.lexists(journal := ShardPaths.of(prefix).journal):
                raise _interrupted_error(journal)
    return unfinished


def _remains(prefix: str) -> Remains | None:
    """What an interrupted writer left at a prefix, None where its journal has no head; FormatError where it lives."""
    try:
        return find_remains(prefix)
    except CorruptShardError as error:
        if error.rule == "J1":
            return None
        raise


def _find_corpus(job: Job, *, overwrite: bool) -> Shard | None:
    """The corpus of an earlier job, if this one would make the same; FormatError where its own may not go there."""
    is_there, differs = not ShardPaths.of(job.corpus).missing(), ["it cannot be read"]
    if is_there:
        with contextlib.suppress(SFTIndexError, OSError):
            shard = Shard(job.corpus)
            differs = _shard_differences(shard.header, job, packed=False) or _content_differences(shard.header, job)
            if not differs:
                return shard
    if job.options.keep_corpus:
        if is_there and not overwrite:
            raise _other_shard_error(job.corpus, differs)
        job.check_free(job.corpus, overwrite=overwrite)
    return None
