"""What is left of a shard, to a shard again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_sft_idx.errors import FormatError, ShardNotFoundError
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.rebuild.derive import derive
from megatron_sft_idx.rebuild.options import Known
from megatron_sft_idx.rebuild.replace import Replacement
from megatron_sft_idx.rebuild.restore import restore
from megatron_sft_idx.rebuild.survey import Survey, survey
from megatron_sft_idx.rebuild.watch import Watch, unwatched
from megatron_sft_idx.shard.opening import where_to_look
from megatron_sft_idx.shard.prefix import held, lock_journal, read_journal
from megatron_sft_idx.shard.recovery import Remains, adopt_remains, find_remains, recover
from megatron_sft_idx.storage import require_local
from megatron_sft_idx.verify import verify_shard

__all__ = ["FileState", "Report", "rebuild"]

_AS_WRITTEN = "every file is as its header says"


@dataclass(frozen=True)
class FileState:
    """One of the five files.

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
class Report:
    """What a rebuild found and did.

    Attributes:
        prefix: of the shard.
        files: the five, in the order of publication.
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
        """Whether a complete, verified shard is at the prefix, or would be."""
        return not any(file.state == "lost" for file in self.files)

    @property
    def changed(self) -> bool:
        """Whether anything was rebuilt, or would be."""
        return any(file.state == "rebuilt" for file in self.files)


def rebuild(
    prefix: str | os.PathLike[str],
    known: Known | None = None,
    *,
    copied: bool = False,
    dry_run: bool = False,
    watch: Watch = unwatched,
) -> Report:
    """Bring back what can be derived of a shard whose files are damaged or missing.

    Every byte is read. A good file is never touched, and a file that is replaced is kept under another name. With a
    good ``.seq.idx`` header every other file is brought back exactly or not at all. Without one the indexes are
    derived from the data and marked as rebuilt, except where the damaged header's own checksum proves what it said.
    Where a killed build left a journal, its complete packs become the shard. What is ambiguous is refused. Memory does
    not grow with the number of packs.

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
    known = known or Known()
    if copied and not dry_run:
        adopt_remains(paths)
    if _has_remains(paths) and (remains := find_remains(prefix)) is not None:
        return _recovered(paths, remains, dry_run, watch)
    if not paths.present():
        raise ShardNotFoundError(paths.prefix, list(paths.all), f"nothing to rebuild from; {where_to_look(paths)}")
    with _locked(paths, dry_run=dry_run) as lock:
        found = survey(paths, watch)
        if not found.faults:
            _verify(paths, watch, _AS_WRITTEN)
            return Report(paths.prefix, _states(found, {}), note="nothing to do", dry_run=dry_run)
        return _rebuilt(found, known, lock, watch)


def _rebuilt(found: Survey, known: Known, lock: int | None, watch: Watch) -> Report:
    paths, header, dry_run = found.paths, found.header, lock is None
    with Replacement(paths, lock) as new:
        if header is not None:
            done = restore(found, header, known, new, watch)
        else:
            _require_data(found)
            header, done = derive(found, known, new, watch)
        new.check(header)
        kept = new.publish()
    states = _states(found, done)
    report = Report(paths.prefix, states, tuple(kept), dry_run=dry_run)
    if report.whole and not dry_run:
        _verify(paths, watch)
    return report


def _states(found: Survey, done: dict[str, str]) -> tuple[FileState, ...]:
    def state(path: str) -> FileState:
        fault = found.faults.get(path, "")
        if path in done:
            return FileState(path, "rebuilt", fault or "not as Megatron writes it (rule I1)", done[path])
        return FileState(path, "lost", fault, _why_lost(found, path)) if fault else FileState(path, "good")

    return tuple(state(path) for path in found.paths.all)


def _why_lost(found: Survey, path: str) -> str:
    paths = found.paths
    if path == paths.tokens:
        return "tokens cannot be derived; restore it from a copy"
    if path == paths.loss:
        return "loss masks cannot be derived; restore it from a copy"
    if path == paths.starts:
        return (
            "sequence starts follow only where a good .seq.idx is there, and either every pack is one sequence or"
            " every sequence ends with the --eod-id and no other token has it; restore it from a copy"
        )
    if path == paths.seq_idx and found.header is not None:
        return (
            "no source of pack lengths gives the arrays that its header was written with: restore what is lost, try"
            " --eod-id, or move this file away to have it derived from the rest"
        )
    return "restore what is lost first, then run again"


def _require_data(found: Survey) -> None:
    """FormatError where no header is left and one of the three data files is missing."""
    paths = found.paths
    missing = [path for path in (paths.tokens, paths.loss, paths.starts) if path in found.faults]
    if missing:
        lost = "; ".join(f"{path} is missing: {_why_lost(found, path)}" for path in missing)
        raise FormatError(f"{paths.prefix}: there is no good .seq.idx, and {lost} (rule F1)")


def _verify(paths: ShardPaths, watch: Watch, what: str = "rebuilt") -> None:
    """FormatError unless the shard that is at a prefix keeps every rule, which checksums alone do not tell."""
    done = 0
    with watch("verifying", sum(os.stat(path).st_size for path in paths.all)) as advance:

        def on_progress(now: int, _total: int) -> None:
            nonlocal done
            advance(now - done)
            done = now

        report = verify_shard(paths.prefix, full=True, on_progress=on_progress)
    if not report.ok:
        first = report.findings[0]
        raise FormatError(
            f"{paths.prefix}: {what}, and yet rules are broken in {report.num_findings} places: it was written so; the"
            f" first is byte {first.offset} of {first.path}: found {first.found}, expected {first.expected} (rule"
            f" {first.rule}); move {paths.seq_idx} away to have the indexes derived from the rest, or write it again"
        )


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


def _has_remains(paths: ShardPaths) -> bool:
    """Whether a build or a copy has written a journal: not one that is only a lock, or that of a killed rebuild."""
    head = read_journal(paths)
    if head is not None and head.work == "rebuild" and head.done is None:
        return False
    return os.path.lexists(paths.journal) and os.path.getsize(paths.journal) > 0


def _recovered(paths: ShardPaths, remains: Remains, dry_run: bool, watch: Watch) -> Report:
    """The shard of a killed build."""
    unpublished = os.path.lexists(paths.temporary(paths.seq_idx))
    replaces = unpublished and os.path.lexists(paths.seq_idx) and remains.head.work == "build"
    if paths.present() and (not remains.done or replaces):
        return _left_alone(paths, remains, dry_run, watch)
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
        _verify(paths, watch)
    files = tuple(FileState(path, "rebuilt", remedy="from the journal") for path in paths.all)
    return Report(paths.prefix, files, note=how, dry_run=dry_run)


def _left_alone(paths: ShardPaths, remains: Remains, dry_run: bool, watch: Watch) -> Report:
    """Nothing to do where a good shard is beside the remains of a build that was to replace it.

    Raises:
        FormatError: the shard is damaged, and either may be the one that is wanted.
    """
    found = survey(paths, watch)
    beside = f"{paths.journal} and the .tmp files are of a build that was to replace it: run it again to do so"
    if not found.faults:
        _verify(paths, watch, _AS_WRITTEN)
        return Report(paths.prefix, _states(found, {}), note=f"nothing to do; {beside}", dry_run=dry_run)
    raise FormatError(
        f"{paths.prefix}: a damaged shard is here, and beside it what a killed build of {remains.num_packs} packs left"
        " that was to replace it; move the five files away to recover the build, or the .journal and .tmp files to"
        " rebuild the shard"
    )
