"""Where a run begins: with nothing, with the parts or the corpus that an earlier run of the same input made, or done.

What is there is compared with what this run would make, and refused, by name, where it differs. The folder of a run's
parts, ``PREFIX.parts``, says in ``run.json`` what the run is of. Parts say for themselves what they were made from, so
those of two runs are never mixed; ``run.json`` is for telling a person what differs before hours of work.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

from megatron_sft_idx.chat.inputs import InputFile
from megatron_sft_idx.errors import CorruptShardError, FormatError, SFTIndexError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.shard import Remains, Shard, check_free, find_remains, read_header, recover
from megatron_sft_idx.shard.publication import is_set_aside, lock_journal, publish_all
from megatron_sft_idx.storage.local import read_beginning
from megatron_sft_idx.storage.publish import Kind, describe, head_of, write_file
from megatron_sft_idx.tokenize.cut import Cutting, source_fingerprint
from megatron_sft_idx.tokenize.encoding import EncodingOptions, RowEncoder
from megatron_sft_idx.tokenize.gather import drop_build, output_prefixes
from megatron_sft_idx.tokenize.parts import PART_MAGIC
from megatron_sft_idx.tokenize.plan import PackOptions, file_weights

_MAX_NBYTES = 1 << 28
# Options, as ``differences`` calls them, that decide over what a chat template makes of a row.
_IN_TEMPLATE = ("allow control tokens ", "partial markers ", "template ", "train on ", "turns ")
_VERSION = 2
_SHARD = "finished shard"
_LOCK = "run.journal"
_BEGIN = b'{"version":'
_KIND = Kind("the record of a run", lambda path: head_of(path, len(_BEGIN)) == _BEGIN)
# The lock, what the run is of, parts, and what a kill left of them; a file that is open somewhere on NFS.
_OURS = re.compile(
    r"run\.journal|run\.json|\.run\.json\.([0-9a-f]+\.)?tmp|\d+-\d+(\.[0-9a-f]+)?\.part(\.([0-9a-f]+\.)?tmp)?|\.nfs.+"
)


@dataclass(frozen=True, slots=True)
class PreprocessOptions:
    """One run.

    Attributes:
        inputs: files, globs and ``save_to_disk`` folders.
        prefix: where the packed shard goes, or what the prefixes of several begin with.
        encoding: rows to sequences, but for the weights of files.
        packing: sequences to packs.
        engine: ``local`` runs on this machine, ``ray`` on a Ray cluster. Changes no byte of the output.
        ray_address: of the cluster; None starts one on this machine, and stops it.
        workers: tokenising processes; 0 tokenises in this one, None takes all processors. Changes no byte.
        output_shards: how many shards the packs are cut into.
        overwrite: replace what is at the prefix.
        resume: go on with a run that was interrupted, if it was of the same input and options.
        keep_corpus: leave the tokenised corpus beside the packed shard, at ``PREFIX.unpacked``.
        log_interval: rows between two lines of progress where there is no terminal; 0 for silence.
        source_weights: ``FILE=WEIGHT``: what masks of rows of a file of the input are multiplied with.
        input_weights: ``FILE=WEIGHT``, how often the rows of a file are trained on (``file_weights``).
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
    source_weights: Sequence[str] = ()
    input_weights: Sequence[str] = ()

    def encoding_of(self, files: Sequence[InputFile]) -> EncodingOptions:
        """Rows to sequences, with the weights of these files; errors as of ``file_weights``."""
        each = tuple(file_weights("--source-weight", self.source_weights, [file.path for file in files]))
        return replace(self.encoding, source_weights=each if set(each) != {1.0} else ())

    @property
    def has_valid(self) -> bool:
        """Whether conversations are kept apart, in a shard of their own."""
        return self.packing.selection is not None and self.packing.selection.valid_fraction > 0


def corpus_prefix(prefix: str) -> str:
    """Where the tokenised corpus of a packed shard lies."""
    return prefix + ".unpacked"


class Job(NamedTuple):
    """What a run is of.

    Attributes:
        options: as given.
        files: the input.
        encoder: rows to sequences.
        cutting: of the input.
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
        """Prefix of the tokenised corpus, where it is kept."""
        return corpus_prefix(self.options.prefix)

    @property
    def folder(self) -> PartsFolder:
        """Of the parts."""
        return PartsFolder.of(self.options.prefix)

    def check_free(self, prefix: str, *, overwrite: bool) -> None:
        """FormatError where this run may not write a shard at a prefix of its own."""
        check_free(ShardPaths.of(prefix).with_columns(self.encoder.options.columns), overwrite=overwrite)

    def state(self, *, overwrite: bool) -> JobState:
        """What the folder says of it."""
        return JobState(
            [[file.path, file.num_bytes] for file in self.files],
            self.encoder.describe(),
            {"packing": asdict(self.options.packing)},
            [self.cutting.piece_nbytes, self.cutting.pieces],
            overwrite,
            self.options.keep_corpus,
        )


# ---- the folder of a run ----


@dataclass(frozen=True, slots=True)
class JobState:
    """What a run is of, and how far it has come, for telling a person what differs before hours of work.

    Attributes:
        inputs: path and size of each file.
        metadata: all that decides over tokens and masks, as in a header.
        packing: what decides over packs.
        cutting: bytes a piece, and pieces a part.
        overwrite: shards may be replaced.
        keep_corpus: the corpus is a result too.
        tokenized: all parts are there.
    """

    inputs: list[list[Any]]
    metadata: dict[str, Any]
    packing: dict[str, Any]
    cutting: list[int]
    overwrite: bool
    keep_corpus: bool
    tokenized: bool = False


def _is_ours(entry: os.DirEntry[str]) -> bool:
    """Whether a run made this, by its name and by what it begins with; a kill may have left it empty."""
    if not _OURS.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
        return False
    if entry.name == _LOCK or entry.name.startswith(".nfs"):
        return True
    begin = _BEGIN if "run.json" in entry.name else PART_MAGIC
    found = head_of(entry.path, len(begin))
    return not found.strip(b"\0") or begin.startswith(found)


@dataclass(frozen=True, slots=True)
class PartsFolder:
    """``PREFIX.parts``: the parts of one run, and in ``run.json`` what it is of, where it may be gone on with.

    Attributes:
        path: of the folder.
    """

    path: str

    @classmethod
    def of(cls, prefix: str) -> PartsFolder:
        """The folder of the run that makes ``prefix``, absolute."""
        return cls(os.path.abspath(prefix) + ".parts")

    @property
    def state_path(self) -> str:
        """Of the file that says what the run is of."""
        return os.path.join(self.path, "run.json")

    @property
    def exists(self) -> bool:
        """Whether an interrupted run left it."""
        return os.path.lexists(self.state_path) and os.lstat(self.state_path).st_size > 0

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other drivers out; the folder is made where it is missing, and goes where nothing is left to resume.

        Raises:
            FormatError: another driver is at work, or the folder is not of such runs.
        """
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
        fd = None
        while fd is None:
            os.makedirs(self.path, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # a driver that ended meanwhile took the folder with it
                fd = lock_journal(ShardPaths(os.path.join(self.path, "run")), create=True)
        try:
            yield
        finally:
            try:
                if not self.exists:
                    with contextlib.suppress(OSError):  # a folder in which somebody put something else stays
                        self.clear()
                        os.unlink(os.path.join(self.path, _LOCK))
                        os.rmdir(self.path)
            finally:
                os.close(fd)

    def write(self, state: JobState) -> None:
        """Say what the run is of, durably."""
        content = {"version": _VERSION, **asdict(state)}
        write_file(self.state_path, json.dumps(content).encode(), _KIND, overwrite=True)

    def read(self) -> JobState:
        """What the run is of that left this folder. FormatError where that is no such run."""
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
        """Remove the parts, and what says what they are of; the lock, which is held, stays."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.state_path)  # first: a kill on the way leaves nothing that seems worth resuming
        self.remove_parts()

    def remove_parts(self) -> None:
        """Remove the parts alone."""
        for entry in os.scandir(self.path):
            if entry.path != self.state_path and entry.name != _LOCK and _is_ours(entry):
                os.unlink(entry.path)

    def has_parts(self) -> bool:
        """Whether any work is done that can be gone on with."""
        return any(entry.name.endswith(".part") for entry in os.scandir(self.path))


# ---- what differs ----


def option_differences(found: Mapping[str, Any], encoder: RowEncoder) -> list[str]:
    """What of the options that decide over tokens and masks is another in ``found``, a header's metadata."""
    wanted = encoder.describe()
    differs = list(differences({key: found.get(key) for key in wanted}, wanted))
    # A template's fingerprint covers options too: where one of those is named, it says no more.
    others = [each for each in differs if not each.startswith("chat template ")]
    return others if any(each.startswith(_IN_TEMPLATE) for each in others) else differs


def packing_differences(found: Mapping[str, Any], packing: PackOptions) -> list[str]:
    """What of the packing options is another in ``found``: a packed shard's metadata, or what a run has noted."""
    noted, wanted = found.get("packing"), asdict(packing)
    packed = {key: noted.get(key) for key in wanted} if isinstance(noted, dict) else None
    return list(differences(packed, wanted, "packing"))


def differences(found: Any, wanted: Any, name: str = "") -> Iterator[str]:
    """``name was this, is that`` of every value in nested objects."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        for key in sorted({*found, *wanted}):
            inner = key if name in ("", "options") else f"{name} {key}"
            yield from differences(found.get(key), wanted.get(key), inner.replace("_", " "))
    elif found != wanted:
        yield f"{name} was {found!r}, is {wanted!r}"


def _content_differences(header: Header, job: Job) -> list[str]:
    """What of the input's content, which is read for it, is another than the header of a shard says."""
    sources = header.metadata.get("sources", {})
    found, wanted = sources.get("fingerprint"), source_fingerprint(job.files, sources.get("pieces"))
    return [] if found == wanted else [f"the content of the input was {found}, is {wanted}"]


def _shard_differences(metadata: Mapping[str, Any], job: Job) -> list[str]:
    """What of the options is another in the header of a packed shard; its input is not read for it."""
    return packing_differences(metadata, job.options.packing) or option_differences(metadata, job.encoder)


def _state_differences(there: JobState, job: Job, *, packing: bool) -> list[str]:
    """What of an interrupted run was another; ``packing`` too, where that is not to be decided anew."""
    wanted = job.state(overwrite=False)
    if differs := option_differences(there.metadata, job.encoder):
        return differs
    if packing and (differs := packing_differences(there.packing, job.options.packing)):
        return differs
    for number, (found, now) in enumerate(zip_longest(there.inputs, wanted.inputs), 1):
        if found is None or now is None or found[1] != now[1]:
            was, to_be = (f"{file[0]} of {file[1]:,} bytes" if file else "none" for file in (found, now))
            return [f"file {number} was {was}, is {to_be}"]
    if there.cutting != wanted.cutting:
        return [f"the input was cut in {there.cutting}, is in {wanted.cutting}"]
    return []


def _interrupted(path: str) -> FormatError:
    return FormatError(
        f"{path}: left by a run that was interrupted, or is at work still; pass --resume to go on with it, or"
        " --overwrite to start anew"
    )


def _had_other(path: str, differs: Sequence[str]) -> FormatError:
    return FormatError(
        f"{path}: the interrupted run had other input or options: {'; '.join(differs)}; pass the same ones to go on, or"
        " --overwrite to start anew (a finished corpus of the same input is used again)"
    )


def _is_other(path: str, differs: Sequence[str], what: str = "tokenised corpus") -> FormatError:
    also = " (a tokenised corpus of the same input is used again)" if what == _SHARD else ""
    return FormatError(
        f"{path}: a {what} is here, made from something else: {'; '.join(differs)}; pass --overwrite to replace"
        f" it{also}"
    )


# ---- what is there ----


def find_done(job: Job) -> list[Header]:
    """The headers of all packed shards where a run is resumed that was done; renames that are left are done now.

    Raises:
        FormatError: the shards that are there are others, and not to be replaced.
    """
    if not job.options.resume:
        return []
    paths = [ShardPaths.of(prefix) for prefix in job.outputs]
    waiting = [each for each in paths if is_set_aside(each)]
    renamed: list[str] = []
    if waiting and all(each in waiting or not each.missing() for each in paths):
        # Shards of a run appear together.
        publish_all(waiting)
        renamed.append(job.options.prefix)
    for prefix in job.outputs:
        if not is_set_aside(ShardPaths.of(prefix)) and (left := _remains(prefix)) is not None and left.done:
            recover(prefix, overwrite=True)  # it had leave to replace what it replaces
            renamed.append(prefix)
    for prefix in renamed:
        job.log(f"resuming: {prefix} was complete but for renames, which are done now")
    if any(each.missing() for each in paths) or (job.folder.exists and job.folder.read().overwrite):
        return []
    headers = [read_header(prefix) for prefix in job.outputs]
    first, differs = headers[0].metadata.get("sources"), list[str]()
    for found in (header.metadata for header in headers):
        differs = differs or _shard_differences(found, job) or [*differences(found.get("sources"), first, "sources")]
    if differs := differs or _content_differences(headers[0], job):
        raise _is_other(job.outputs[0], differs, _SHARD)
    return headers


def begin(job: Job) -> tuple[JobState, Shard | None, bool]:
    """Find out what there is to go on with, once the folder of parts is held, and note there what the run is of.

    ::

        what is there           plain                  --overwrite            --resume
        nothing                 begins                 begins                 begins, and says so
        some parts              refused                begins                 goes on
        all parts               goes on                goes on                goes on
        parts of another run    refused                begins                 refused
        the corpus of this run  is packed              is packed              is packed
        packs half made         refused                begins                 are made anew, if there are parts
        a shard                 refused                is replaced in the end is kept, if it is of this run

    Returns:
        The state of the run; the finished corpus, None where it is to be made; and whether parts whose input has
        changed are made anew.

    Raises:
        FormatError: something is in the way and may not be replaced, or an interrupted run was of another input or
            other options.
    """
    options, folder, resume = job.options, job.folder, job.options.resume
    there, differs = _interrupted_run(job)
    replaces = (there is not None and there.overwrite) if resume else options.overwrite
    half_made = _half_made(job, replaces=replaces)
    if resume and there is not None and there.keep_corpus:
        drop_build(ShardPaths.of(job.corpus))
    corpus = _find_corpus(job, overwrite=replaces)
    if resume and corpus is not None:
        job.log(f"resuming: the tokenised corpus at {job.corpus} is complete")
    elif resume and there is None:
        if orphans := [job.corpus] if _remains(job.corpus) is not None else half_made:
            raise FormatError(
                f"{ShardPaths.of(orphans[0]).journal}: left by an interrupted build that is not of this command: there"
                f" are no parts at {folder.path}; recover it: megatron-sft-idx rebuild {orphans[0]}, or pass"
                " --overwrite to start anew"
            )
        job.log(f"{options.prefix}: nothing to resume, starting from the beginning")
    tokenized = there is not None and there.tokenized and not differs
    if there is None or not (tokenized or resume) or (corpus is not None and not resume):
        folder.clear()
    state = replace(job.state(overwrite=replaces), tokenized=tokenized)
    if state != there or not folder.exists:
        folder.write(state)
    return state, corpus, options.overwrite


def _interrupted_run(job: Job) -> tuple[JobState | None, list[str]]:
    """What the folder says, and what differs, where that is to be begun anew; FormatError where it may not be."""
    options, folder = job.options, job.folder
    if not folder.exists:
        return None, []
    try:
        there = folder.read()
    except FormatError:
        if options.overwrite:
            return None, []
        raise
    differs = _state_differences(there, job, packing=options.resume and not there.tokenized)
    if options.resume and differs:
        raise _had_other(folder.state_path, differs)
    if not options.resume and not options.overwrite:
        if not there.tokenized:
            raise _interrupted(folder.path)
        if differs:
            raise _is_other(folder.path, differs)
    return there, differs


def _half_made(job: Job, *, replaces: bool) -> list[str]:
    """Prefixes of packed shards that were being written. FormatError where something may not be written or packed."""
    half_made = []
    for prefix in job.outputs:
        if not job.options.resume:
            job.check_free(prefix, overwrite=replaces)
            continue
        paths = ShardPaths.of(prefix)
        if (left := _remains(prefix)) is not None and not left.done:
            half_made.append(prefix)
            if differs := packing_differences(left.build_options.metadata, job.options.packing):
                raise _had_other(paths.journal, differs)
        # Shards that are there may be of this run, as far as is known before its input is read.
        if not replaces and paths.missing():
            job.check_free(prefix, overwrite=False)
        elif not replaces and (differs := _shard_differences(read_header(prefix).metadata, job)):
            raise _is_other(prefix, differs, _SHARD)
    if not job.options.resume and not replaces:
        for prefix in (*job.outputs, *([job.corpus] if job.options.keep_corpus else [])):
            if os.path.lexists(journal := ShardPaths.of(prefix).journal):
                raise _interrupted(journal)
    return half_made


def _remains(prefix: str) -> Remains | None:
    """What an interrupted build left here, where its journal has a head; FormatError where a living writer has it."""
    try:
        return find_remains(prefix)
    except CorruptShardError as error:
        if error.rule == "J1":
            return None
        raise


def _find_corpus(job: Job, *, overwrite: bool) -> Shard | None:
    """The corpus that an earlier run was told to keep, if it is what this run would make.

    Raises:
        FormatError: something else is in the place of the one that this run is to keep, and may not be replaced.
    """
    is_there, differs = not ShardPaths.of(job.corpus).missing(), ["it cannot be read"]
    if is_there:
        with contextlib.suppress(SFTIndexError, OSError):
            shard = Shard(job.corpus)
            metadata = shard.header.metadata
            differs = option_differences(metadata, job.encoder) or ["it is packed"] * ("packing" in metadata)
            if not (differs := differs or _content_differences(shard.header, job)):
                return shard
    if job.options.keep_corpus:
        if is_there and not overwrite:
            raise _is_other(job.corpus, differs)
        job.check_free(job.corpus, overwrite=overwrite)
    return None
