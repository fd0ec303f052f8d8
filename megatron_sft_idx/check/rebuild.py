"""``rebuild``: what is left of a shard, to a shard again.

Indexes come back from each other, from the data, or from a killed build's journal; columns come back from nothing, and
are left as they are. ``restore`` says what can be brought back; here is what is
done about it: what is wrong is found, new files are written beside the old ones, and take their places complete, synced
and checked.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from megatron_sft_idx.check.lengths import idx_lengths
from megatron_sft_idx.check.restore import GivenFacts, Repair, derive_indexes, restore_under_header
from megatron_sft_idx.check.verify import Report, verify_shard
from megatron_sft_idx.errors import CorruptShardError, FormatError, SFTIndexError, ShardNotFoundError
from megatron_sft_idx.layout import Header, ShardPaths
from megatron_sft_idx.layout.column import listed_columns
from megatron_sft_idx.layout.files import MAX_HEADER_NBYTES, column_of
from megatron_sft_idx.shard.opening import read_header, where_to_look
from megatron_sft_idx.shard.publication import held, lock_journal, named_by, read_journal, with_present
from megatron_sft_idx.shard.recovery import Remains, adopt_remains, find_remains, recover
from megatron_sft_idx.storage import read_beginning, require_local
from megatron_sft_idx.storage.progress import Watch, unwatched

_AS_WRITTEN = "every file is as its header says"
# Read of any header; more only where it says that it is larger.
_USUAL_HEADER_NBYTES = 1 << 16


@dataclass(frozen=True)
class FileState:
    """One of the files of a shard: of the five, or a column.

    Attributes:
        path: of the file.
        state: ``good`` and left alone, ``rebuilt``, or ``lost``: it cannot be derived from what is left.
        fault: what was wrong; empty where it was good.
        remedy: how it was rebuilt, or what to do.
    """

    path: str
    state: Literal["good", "rebuilt", "lost"]
    fault: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Rebuilt:
    """What a rebuild found and did.

    Attributes:
        prefix: of the shard.
        files: the five, in the order of publication, then the columns.
        kept: where the files are that rebuilt ones took the place of.
        note: what else there is to say.
        dry_run: nothing was written; ``rebuilt`` then means that it would be.
    """

    prefix: str
    files: tuple[FileState, ...]
    kept: tuple[str, ...] = ()
    note: str = ""
    dry_run: bool = False

    @property
    def whole(self) -> bool:
        """Whether a complete, verified shard is at the prefix, or would be, with all its columns."""
        return not any(file.state == "lost" for file in self.files)

    @property
    def opens(self) -> bool:
        """Whether the five files are whole, or would be."""
        return not any(file.state == "lost" and column_of(file.path) is None for file in self.files)

    @property
    def changed(self) -> bool:
        """Whether anything was rebuilt, or would be."""
        return any(file.state == "rebuilt" for file in self.files)


def rebuild(
    prefix: str | os.PathLike[str],
    known: GivenFacts | None = None,
    *,
    copied: bool = False,
    dry_run: bool = False,
    watch: Watch = unwatched,
) -> Rebuilt:
    """Bring back what can be derived of a shard whose files are damaged or missing.

    Every byte is read. A good file is never touched, and a file that is replaced is kept under another name. With a
    good ``.seq.idx`` header every other file is brought back exactly or not at all. Without one the indexes are
    derived from the data and marked as rebuilt, except where the damaged header's own checksum proves what it said.
    Where a killed build left a journal, its complete packs become the shard. What is ambiguous is refused. A column
    that is damaged, or listed and not there, is said to be lost. Where the ``.seq.idx`` is derived and nothing proves
    what it listed, columns that belong to the shard are from then on like attached ones. Memory does not grow with the
    number of packs.

    Args:
        prefix: the path that the five files share.
        known: what the files do not say any more.
        copied: the journal and the temporary files of a killed build were copied here: take them for the build's.
        dry_run: only find out what would happen.
        watch: shows how far long work is.

    Raises:
        ShardNotFoundError: nothing of a shard is at the prefix.
        FormatError: what is left does not tell enough, or another writer is at work; says what is missing. Or no
            byte was changed since the shard was written, and it breaks a rule all the same.
        OSError: the disk says no.
    """
    paths = ShardPaths.of(prefix)
    require_local(paths.prefix, "rebuild")
    if copied and not dry_run:
        adopt_remains(paths)
    head = read_journal(paths)
    # A journal that is only a lock, or that of a killed rebuild, has nothing of a build.
    if os.path.lexists(paths.journal) and os.path.getsize(paths.journal) > 0:
        unfinished = head is not None and head.work == "rebuild" and head.done is None
        if not unfinished and (remains := find_remains(prefix)) is not None:
            return _recovered(paths, remains, dry_run, watch)
    if not paths.present():
        raise ShardNotFoundError(paths.prefix, list(paths.all), f"nothing to rebuild from; {where_to_look(paths)}")
    with _locked(paths, dry_run=dry_run) as lock:
        raw, header, error = _read_header(paths)
        faults, checked = _faults(paths, header, error, watch)
        if not faults:
            return _untouched(paths, header, checked, "", dry_run)
        with contextlib.closing(Repair(paths, faults, known or GivenFacts(), watch, lock)) as repair:
            if header is not None:
                done = restore_under_header(repair, header)
            elif missing := [path for path in (paths.tokens, paths.loss, paths.starts) if path in faults]:
                lost = "; ".join(f"{path} is missing: {_why_lost(paths, path, None)}" for path in missing)
                raise FormatError(f"{paths.prefix}: there is no good .seq.idx, and {lost} (rule F1)")
            else:
                done = derive_indexes(repair, raw, error)
            kept = repair.publish()
        note = ""
        if not dry_run and faults.keys() <= done.keys():
            _require_rules(paths, checked := _verified(paths, watch, "verifying"), "rebuilt")
            if header is None:
                header = read_header(paths)
                note = _unlisted(paths, header)
        return Rebuilt(paths.prefix, _states(paths, header, faults, done, checked), tuple(kept), note, dry_run)


# ---- what is wrong ----


def _read_header(paths: ShardPaths) -> tuple[bytes | None, Header | None, SFTIndexError | None]:
    """The first bytes of ``.seq.idx``, the header where it breaks no rule, and which one it breaks."""
    for path in paths.present():
        if not os.path.isfile(path):
            raise FormatError(f"{path}: not a file; remove what is there, or choose the right prefix")
    try:
        said = int.from_bytes(read_beginning(paths.seq_idx, 16)[12:], "little")
        raw = read_beginning(paths.seq_idx, min(max(said, _USUAL_HEADER_NBYTES), MAX_HEADER_NBYTES))
    except FileNotFoundError:
        return None, None, None
    try:
        return raw, Header.decode(raw, paths.seq_idx), None
    except SFTIndexError as error:
        return raw, None, error


def _faults(
    paths: ShardPaths, header: Header | None, error: SFTIndexError | None, watch: Watch
) -> tuple[dict[str, str], Report]:
    """What is wrong with the five files, by path, and all that was found.

    A path that is not in it is good, as far as can be told.

    Raises:
        FormatError: every file is what a good header says, and breaks a rule all the same.
    """
    missing = {path: "missing (rule F1)" for path in paths.all if not os.path.lexists(path)}
    if header is None:
        faults = missing if error is None else missing | {paths.seq_idx: _detail(error)}
        if not {paths.idx, paths.tokens} & missing.keys():
            try:
                idx_lengths(paths.idx, os.stat(paths.tokens).st_size)
            except CorruptShardError as corrupt:
                faults[paths.idx] = _detail(corrupt)
        return faults, verify_shard(paths.prefix)
    report = _verified(paths, watch, "reading")
    faults = dict(missing)
    for finding in report.findings:
        if finding.rule in ("F2", "F3"):
            faults.setdefault(finding.path, finding.what)
    if not faults:
        _require_rules(paths, report, _AS_WRITTEN)
    return faults, report


def _detail(error: SFTIndexError) -> str:
    """What is wrong, without the path and the remedy that stand in the message."""
    if isinstance(error, CorruptShardError):
        return f"byte {error.offset}: {error.detail.split(';')[0]} (rule {error.rule})"
    return str(error).split(": ", 1)[-1].split(";")[0]


def _verified(paths: ShardPaths, watch: Watch, what: str) -> Report:
    with watch(what, sum(os.stat(path).st_size for path in with_present(paths).present())) as advance:
        return verify_shard(paths.prefix, full=True, advance=advance)


def _require_rules(paths: ShardPaths, report: Report, what: str) -> None:
    """FormatError unless the five files keep every rule, which checksums alone do not tell."""
    if first := next((finding for finding in report.findings if column_of(finding.path) is None), None):
        raise FormatError(
            f"{paths.prefix}: {what}, and yet rules are broken in {report.num_findings} places: it was written so; the"
            f" first is byte {first.offset} of {first.path}: {first.what}; move {paths.seq_idx} away to have the"
            " indexes derived from the rest, or write it again"
        )


def _states(
    paths: ShardPaths, header: Header | None, faults: dict[str, str], done: dict[str, str], checked: Report
) -> tuple[FileState, ...]:
    """Of the five files, and of the columns that are there or listed, which nothing else holds."""
    states = []
    for path in paths.all:
        fault = faults.get(path, "")
        if path in done:
            states.append(FileState(path, "rebuilt", fault or "not as Megatron writes it (rule I1)", done[path]))
        elif fault:
            states.append(FileState(path, "lost", fault, _why_lost(paths, path, header)))
        else:
            states.append(FileState(path, "good"))
    broken = {finding.path: finding for finding in reversed(checked.findings)}
    paths = with_present(paths.with_columns({} if header is None else listed_columns(header.metadata)))
    for path in map(paths.column, paths.columns):
        if finding := broken.get(path):
            states.append(FileState(path, "lost", finding.what, f"a column cannot be derived; {finding.remedy}"))
        else:
            states.append(FileState(path, "good"))
    return tuple(states)


def _untouched(paths: ShardPaths, header: Header | None, checked: Report, more: str, dry_run: bool) -> Rebuilt:
    """The five files are good; columns may be lost."""
    found = Rebuilt(paths.prefix, _states(paths, header, {}, {}, checked), dry_run=dry_run)
    note = "nothing to do" if found.whole else "the five files are good, and nothing was rebuilt"
    return replace(found, note=note + more)


def _unlisted(paths: ShardPaths, header: Header) -> str:
    """What became of the columns of a shard whose ``.seq.idx`` is derived; empty where it lists them as before."""
    if not header.rebuilt:
        return ""
    notes = []
    if there := with_present(paths).columns:
        notes.append(f"the new .seq.idx lists no columns; {', '.join(there)} stay beside it, like attached ones")
    rebuilt = header.metadata.get("rebuilt")
    unproven = rebuilt.get("unproven", {}).get("metadata", {}) if isinstance(rebuilt, dict) else {}
    if gone := sorted(listed_columns(unproven).keys() - {*there}):
        notes.append(f"the damaged one listed {', '.join(gone)}, which are not here")
    return "; ".join(notes)


_NOT_DERIVED = {
    ".bin": "tokens cannot be derived; restore it from a copy",
    ".loss.bin": "loss masks cannot be derived; restore it from a copy",
    ".seq.bin": "sequence starts follow only where a good .seq.idx is there, and either every pack is one sequence or"
    " every sequence ends with the --eod-id and no other token has it; restore it from a copy",
    ".seq.idx": "no source of pack lengths gives the arrays that its header was written with: restore what is lost, try"
    " --eod-id, or move this file away to have it derived from the rest",
}


def _why_lost(paths: ShardPaths, path: str, header: Header | None) -> str:
    suffix = path.removeprefix(paths.prefix)
    if suffix == ".idx" or (suffix == ".seq.idx" and header is None):
        return "restore what is lost first, then run again"
    return _NOT_DERIVED[suffix]


@contextlib.contextmanager
def _locked(paths: ShardPaths, *, dry_run: bool) -> Iterator[int | None]:
    """The lock of a prefix where no build is half done; a dry run only asks whether one is at work, and yields None.

    Raises:
        FormatError: another writer is at work, or its folder may not be written.
    """
    if dry_run:
        with contextlib.suppress(FileNotFoundError):
            os.close(lock_journal(paths, create=False, shared=True))
        yield None
        return
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(held(paths))
        except PermissionError as error:
            raise FormatError(
                f"{paths.folder}: {error.strerror}: rebuilt files go beside the data, so this folder must be writable;"
                " --dry-run needs no such right"
            ) from None
        yield lock


# ---- what a killed build left ----


def _recovered(paths: ShardPaths, remains: Remains, dry_run: bool, watch: Watch) -> Rebuilt:
    """The shard of a killed build; nothing to do where that was to replace a shard which is here, and good.

    Raises:
        FormatError: there is nothing to recover. Or the shard that is here is damaged, and either may be wanted.
    """
    unpublished = os.path.lexists(paths.temporary(paths.seq_idx))
    replaces = unpublished and os.path.lexists(paths.seq_idx) and remains.head.work == "build"
    if paths.present() and (not remains.done or replaces):
        _, header, error = _read_header(paths)
        faults, checked = _faults(paths, header, error, watch)
        if faults:
            raise FormatError(
                f"{paths.prefix}: a damaged shard is here, and beside it what a killed build of {remains.num_packs}"
                " packs left that was to replace it; move the five files away to recover the build, or the .journal"
                " and .tmp files to rebuild the shard"
            )
        beside = f"{paths.journal} and the .tmp files are of a build that was to replace it: run it again to do so"
        return _untouched(paths, header, checked, f"; {beside}", dry_run)
    if not remains.done and not remains.num_packs:
        raise FormatError(
            f"{paths.journal}: the build was killed before it had written a pack, so there is nothing to recover;"
            " build it again with overwrite (--overwrite)"
        )
    what = f"{remains.num_packs} packs, {remains.num_sequences} sequences, {remains.num_tokens} tokens"
    how = f"from the journal of a build that was {'complete but for renames' if remains.done else 'killed'}: {what}"
    if not dry_run:
        with watch("recovering", remains.num_tokens) as advance:
            recover(paths.prefix, overwrite=remains.done, progress=advance)
        _require_rules(paths, _verified(paths, watch, "verifying"), "rebuilt")
    files = tuple(FileState(path, "rebuilt", remedy="from the journal") for path in named_by(paths, remains.head).all)
    return Rebuilt(paths.prefix, files, note=how, dry_run=dry_run)
