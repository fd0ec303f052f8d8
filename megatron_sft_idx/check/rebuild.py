"""``rebuild`` makes a damaged shard complete again from its remaining files.

Indexes are restored from each other, from the data, or from the remains of a killed build. Columns cannot be derived
and stay unchanged. This module finds the damage and reports the result. ``restore`` restores files under a good header;
``derive`` makes both indexes if there is no good header. New files are written next to the old ones, and replace them
only when they are complete and synced.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron_sft_idx.check.accept import ACCEPT, accepted_findings, write_accepted
from megatron_sft_idx.check.derive import derive_indexes
from megatron_sft_idx.check.lengths import idx_lengths
from megatron_sft_idx.check.restore import GivenFacts, Repair, restore_under_header
from megatron_sft_idx.check.rules import Finding
from megatron_sft_idx.check.verify import Report, broken_columns, verify_shard
from megatron_sft_idx.errors import (
    CorruptShardError,
    FormatError,
    SFTIndexError,
    ShardNotFoundError,
    UnsupportedVersionError,
)
from megatron_sft_idx.layout import HEADER_FIXED_NBYTES, Header, ShardPaths
from megatron_sft_idx.layout.column import COLUMN, ColumnHeader
from megatron_sft_idx.layout.files import SEQ_IDX, column_of, listed_columns, listed_media
from megatron_sft_idx.layout.media_layout import MediaHeader
from megatron_sft_idx.shard.at_prefix import inode_of, with_present_files
from megatron_sft_idx.shard.media_reader import items_start
from megatron_sft_idx.shard.opening import columns_beside, read_header, read_start, where_to_look
from megatron_sft_idx.shard.publication import finish_interrupted, taken
from megatron_sft_idx.shard.recovery import Remains, find_remains, recover
from megatron_sft_idx.storage import require_local
from megatron_sft_idx.storage.building import Building, may_drop
from megatron_sft_idx.storage.building_files import lost_files
from megatron_sft_idx.storage.local import digest_file
from megatron_sft_idx.storage.progress import Watch, unwatched

# Kinds of work that write only some files of a shard.
_PARTLY = ("rebuild", "column", "removal")


@dataclass(frozen=True)
class FileState:
    """The result of a rebuild for one of the five files, or for a column.

    Attributes:
        path: path of the file.
        state: ``good``: left unchanged. ``rebuilt``. ``accepted``: damaged, with a new checksum. ``lost``: cannot be
            derived from the remaining files, or would make readers open damaged data. ``uncertain``: a column for other
            data than the present data, where it is unknown whether the column or the data changed.
        fault: the damage; empty for a good file.
        remedy: for a rebuilt file how it was restored, otherwise what the user can do.
    """

    path: str
    state: Literal["good", "rebuilt", "accepted", "lost", "uncertain"]
    fault: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Rebuilt:
    """The report of a rebuild.

    Attributes:
        prefix: prefix of the shard.
        files: the five files in the order of publication, then the columns.
        kept: the new names of files that were replaced.
        note: further information for the user.
        dry_run: nothing was written; the states ``rebuilt`` and ``accepted`` then mean what would be done.
        compared: whether the contents were compared with checksums from before the damage, not only with the rules.
    """

    prefix: str
    files: tuple[FileState, ...]
    kept: tuple[str, ...] = ()
    note: str = ""
    dry_run: bool = False
    compared: bool = True

    @property
    def whole(self) -> bool:
        """Whether the prefix has (or would have) a complete shard that keeps every rule, with all its columns."""
        return not any(file.state in ("lost", "uncertain") for file in self.files)

    @property
    def opens(self) -> bool:
        """Whether the five files are complete, or would be."""
        return not any(file.state == "lost" and column_of(file.path) is None for file in self.files)

    @property
    def changed(self) -> bool:
        """Whether anything was rebuilt or accepted, or would be."""
        return any(file.state in ("rebuilt", "accepted") for file in self.files)

    @property
    def uncertain(self) -> bool:
        """Whether data or columns have changed, and it is unknown which."""
        return any(file.state == "uncertain" for file in self.files)


def rebuild(
    prefix: str | os.PathLike[str],
    facts: GivenFacts | None = None,
    *,
    overwrite: bool = False,
    accept_contents: bool = False,
    dry_run: bool = False,
    watch: Watch = unwatched,
) -> Rebuilt:
    """Restore everything that can be derived of a shard with damaged or missing files.

    Every byte is read. A good file is never touched, and a file that is replaced is kept under another name. Memory use
    is up to 100 bytes per pack, and about 30 more per sequence if both indexes are lost.

    - With a good header of ``.seq.idx``, every other file is restored exactly or not at all. Nothing is restored that
      would make readers open a shard with another damaged file.
    - Without a good header, the indexes are derived from the data, and ``.seq.idx`` is marked as rebuilt. If several
      shards could have the same data, that is an error. Columns record the data that they were written for. It is an
      error, too, if that is not the present data.
    - If a killed build left packs in ``X.building``, these become the shard.
    - A column that is damaged, or listed and missing, is reported as lost. A derived ``.seq.idx`` lists no columns, so
      columns at the prefix count as attached from then on.

    Args:
        prefix: the path that the five files share.
        facts: facts about the shard that the user knows and the files no longer contain.
        overwrite: let the packs of a killed build replace the shard at the prefix. Also restart a rebuild that was
            killed during its renames and has lost a file since.
        accept_contents: if tokens, masks, starts or columns do not match their checksums and cannot be restored, write
            the shard again with the present contents. Its header then lists these files under ``accepted``.
        dry_run: only determine what would happen.
        watch: reports the progress of each stage.

    Raises:
        ShardNotFoundError: the prefix has no file of a shard.
        FormatError: the remaining files are not sufficient (the message says what is missing) or are inconsistent;
            another writer is active, or was killed while it removed the shard; a dry run finds a rebuild that was
            killed during its renames; every file is as its writer wrote it, and still breaks a rule; or files of a
            build that was complete have changed since.
        UnsupportedVersionError: the ``.seq.idx`` has a later version, and may be good.
        OSError: an error of the disk.
    """
    paths = ShardPaths.of(prefix)
    require_local(paths.prefix, "rebuild")
    begins_anew = (overwrite and _lost_a_file(paths)) or (accept_contents and _replaced_nothing_yet(paths))
    restored = _restore(paths, facts or GivenFacts(), overwrite, begins_anew, dry_run, watch)
    return _accept(paths, restored, dry_run, watch) if accept_contents and not restored.whole else restored


def _restore(
    paths: ShardPaths, facts: GivenFacts, overwrite: bool, begins_anew: bool, dry_run: bool, watch: Watch
) -> Rebuilt:
    """Rebuild what can be derived; see ``rebuild``. With ``begins_anew``, remains of a killed writer are dropped."""
    if (remains := None if begins_anew else find_remains(paths.prefix)) is not None:
        if remains.outputs and not remains.unpublished:
            return _finish_job(paths, remains, dry_run)
        has_shard = remains.is_complete and remains.work not in _PARTLY
        has_packs = remains.num_packs > 0 and remains.work != ACCEPT
        if has_shard or has_packs or (remains.options is not None and not paths.present()):
            return _recover_build(paths, remains, overwrite, dry_run, watch)
        _refuse_remains(paths, remains, dry_run=dry_run)
        if not dry_run:
            finish_interrupted(paths)
    if not paths.present():
        raise ShardNotFoundError(paths.prefix, list(paths.all), f"nothing to rebuild from; {where_to_look(paths)}")
    if dry_run:
        return _rebuild_files(paths, facts, watch, None)
    # All packs in the log may be lost. Then there is nothing to keep.
    has_nothing = remains is not None and not remains.num_parts
    with taken(paths.prefix, overwrite=begins_anew or has_nothing) as building:
        return _rebuild_files(paths, facts, watch, building)


def _lost_a_file(paths: ShardPaths) -> bool:
    """Return whether a rebuild was interrupted during its renames, and one of its new files has disappeared since."""
    with contextlib.suppress(FileNotFoundError), Building.take(paths.prefix, create=False, shared=True) as building:
        return building.is_whole and building.holds({"work": "rebuild"}) and bool(lost_files(paths.prefix))
    return False


def _replaced_nothing_yet(paths: ShardPaths) -> bool:
    """Return whether ``--accept-contents`` was killed when its files were complete, and before it renamed one."""
    with contextlib.suppress(FileNotFoundError), Building.take(paths.prefix, create=False, shared=True) as building:
        return building.is_done and building.holds({"work": ACCEPT}) and may_drop(paths.prefix)
    return False


def _finish_job(paths: ShardPaths, remains: Remains, dry_run: bool) -> Rebuilt:
    """Publish the outputs of a job that was killed after all of them were complete."""
    if not dry_run:
        finish_interrupted(paths)
    note = f"{len(remains.outputs)} outputs of a {remains.work} that was complete except for renaming its files"
    return Rebuilt(paths.prefix, (), (), note, dry_run)


def _refuse_remains(paths: ShardPaths, remains: Remains, *, dry_run: bool) -> None:
    """Raise FormatError if another command must finish the remains of a killed writer, or they are half renamed."""
    remedy = None
    if remains.work == "copy":
        remedy = "run the same copy again"
    elif remains.work == "removal" and remains.is_complete:
        remedy = (
            "run the command that removed the shard again to finish the removal; or, to keep the remaining files,"
            f" move this folder away and run megatron-sft-idx rebuild {paths.prefix}"
        )
    elif remains.is_complete and dry_run:
        remedy = f"finish it: megatron-sft-idx rebuild {paths.prefix}"
    if remedy is not None:
        raise FormatError(f"{paths.building}: left by an interrupted {remains.work}; {remedy}")


def _rebuild_files(paths: ShardPaths, facts: GivenFacts, watch: Watch, building: Building | None) -> Rebuilt:
    """Rebuild a shard without remains of a killed build; ``building`` is taken, or None for a dry run."""
    dry_run = building is None
    header, error = _read_header(paths)
    if header is None or paths.missing():
        _refuse_links(paths)  # before reading every byte, which may take hours
    faults, report = _faults(paths, header, error, watch)
    if header is not None and not faults:
        good = Rebuilt(paths.prefix, _states(paths, header, {}, {}, _by_path(report)), dry_run=dry_run)
        note = "nothing was rebuilt" if good.uncertain else "the five files are good, so nothing was rebuilt"
        return replace(good, note="nothing to do" if good.whole else note)
    _refuse_links(paths)
    broken, compared, notes, withheld = _by_path(report), True, list[str](), ""
    with contextlib.closing(Repair(paths, faults, facts, watch, building)) as repair:
        if header is None:
            how_restored, new_header = derive_indexes(repair)
            compared, notes = _compare_with_witnesses(paths, new_header)
            if dry_run:
                broken = {paths.column(name): found for name, found in broken_columns(paths.prefix, new_header).items()}
        else:
            _require_own_header(paths, header, faults)
            how_restored, new_header = restore_under_header(repair, header), header
            withheld = _damaged_and_readable(paths, header, faults.keys() - how_restored.keys())
            for path in how_restored if withheld else ():
                repair.reject(path)
        if not dry_run and faults.keys() <= how_restored.keys():
            # Before the files are published, because readers would open a shard that breaks a rule.
            report = _verified(paths, watch, "verifying", repair.unpublished)
            broken = _by_path(report)
            if header is None:
                _require_none(report, _of_five(report), *_CHANGED_MEANWHILE)
            else:
                _require_none(
                    report, _of_five(report), "every file could be restored to match the header", *_WRITTEN_SO
                )
        kept = repair.publish()
    states = _states(paths, new_header, faults, how_restored, broken, withheld)
    return Rebuilt(paths.prefix, states, tuple(kept), "; ".join(notes), dry_run, compared)


def _accept(paths: ShardPaths, restored: Rebuilt, dry_run: bool, watch: Watch) -> Rebuilt:
    """Accept the contents of a shard that could not be restored completely."""
    header = read_header(paths)
    wrong = accepted_findings(_verified(paths, watch, "reading"))
    if not dry_run:
        write_accepted(paths, header, wrong, watch)
    states = []
    for file in restored.files:
        if (fault := wrong.get(file.path)) is None:
            states.append(replace(file, state="good"))
        elif file.path == paths.idx:
            states.append(FileState(file.path, "rebuilt", fault.what, "from .seq.idx"))
        else:
            states.append(FileState(file.path, "accepted", fault.what, "kept as it is, with a new checksum"))
    note = f"the header {'would list' if dry_run else 'lists'} these files under 'accepted'"
    return Rebuilt(paths.prefix, tuple(states), restored.kept, note, dry_run, compared=False)


# ---- finding the damage ----


def _read_header(paths: ShardPaths) -> tuple[Header | None, SFTIndexError | None]:
    """Return the header of ``.seq.idx``, or the error of decoding it; neither if the file is missing."""
    for path in paths.present():
        if not os.path.isfile(path):
            raise FormatError(f"{path}: not a file; remove what is there, or choose the right prefix")
    try:
        return read_header(paths), None
    except ShardNotFoundError:
        return None, None
    except UnsupportedVersionError:
        raise
    except SFTIndexError as error:
        return None, error


def _refuse_links(paths: ShardPaths) -> None:
    """Raise FormatError if one of the five paths is a link: its target may belong to another shard."""
    for path in paths.all:
        inode_of(path)


def _faults(
    paths: ShardPaths, header: Header | None, error: SFTIndexError | None, watch: Watch
) -> tuple[dict[str, str], Report]:
    """Return the damage of the five files by path, and the report of their verification.

    A path without an entry is good, as far as the other files show.

    Raises:
        FormatError: every file, except perhaps ``.idx``, matches a good header and still breaks a rule. A new ``.idx``
            would let readers open it.
    """
    missing = {path: "missing (rule F1)" for path in paths.all if not os.path.lexists(path)}
    if header is None:
        faults = missing if error is None else missing | {paths.seq_idx: _fault_of(error)}
        if not {paths.idx, paths.tokens} & missing.keys():
            try:
                idx_lengths(paths.idx, os.stat(paths.tokens).st_size)
            except CorruptShardError as corrupt:
                faults[paths.idx] = _fault_of(corrupt)
        return faults, verify_shard(paths.prefix)
    report = _verified(paths, watch, "reading")
    faults = dict(missing)
    for finding in report.findings:
        if finding.rule in ("F2", "F3") and finding.path in paths.all:
            faults.setdefault(finding.path, finding.what)
    if faults.keys() <= {paths.idx}:
        sound = [finding for finding in _of_five(report) if finding.path not in faults]
        why, remedy = _WRITTEN_SO
        # Newly derived indexes are right only if the data is right, and .idx has the lengths of the packs.
        if not faults and {finding.path for finding in sound} <= {paths.idx, paths.seq_idx}:
            remedy = f"move {paths.seq_idx} away, so that the indexes are derived from the other files, or {remedy}"
        _require_none(report, sound, "every good file matches the header", why, remedy)
    return faults, report


def _fault_of(error: SFTIndexError) -> str:
    """Return the damage described by an error, without path and remedy."""
    if isinstance(error, CorruptShardError):
        return f"byte {error.offset}: {error.detail.split(';')[0]} (rule {error.rule})"
    return str(error).split(": ", 1)[-1].split(";")[0]


def _verified(
    paths: ShardPaths,
    watch: Watch,
    stage: str,
    unpublished: Mapping[str, str] | None = None,
    beside: Collection[str] | None = None,
) -> Report:
    """Run a full verification and return its report. See ``verify_shard`` for ``unpublished`` and ``beside``."""
    files = {path: path for path in with_present_files(paths).present()} | dict(unpublished or {})
    # A media file may be a link to nothing, which is a finding.
    with watch(stage, sum(os.stat(path).st_size for path in files.values() if os.path.exists(path))) as advance:
        # Enough findings for each column to have one of each rule.
        most = max(10, len(files))
        return verify_shard(paths.prefix, full=True, most=most, unpublished=unpublished, beside=beside, advance=advance)


def _by_path(report: Report) -> dict[str, Finding]:
    """Return the first finding about each file."""
    return {finding.path: finding for finding in reversed(report.findings)}


# Reasons why rules can be broken in intact files, and remedies.
_WRITTEN_SO = "it was written that way", "write it again"
_CHANGED_MEANWHILE = (
    "every pack was checked while it was read",
    "the files have changed since, or the disk returns different bytes each time",
    "nothing was published; run the same command again",
)


def _of_five(report: Report) -> list[Finding]:
    """Return the findings about the five files, without those about columns, images and audio."""
    five = ShardPaths(report.prefix).all
    return [finding for finding in report.findings if finding.path in five]


def _require_none(report: Report, findings: Sequence[Finding], what: str, why: str, remedy: str) -> None:
    """Raise FormatError if there are such findings in a report; ``what`` describes why there should be none."""
    if findings:
        first, places = findings[0], "1 place" if report.num_findings == 1 else f"{report.num_findings} places"
        raise FormatError(
            f"{report.prefix}: {what}, but rules are broken in {places}, so {why}; the first is"
            f" {first.where}: {first.what}; {remedy}"
        )


_RESTORE = "restore it from a copy, or make the shard again with --overwrite"
# Why a file was not derived, and what the user can do, by suffix.
_NOT_DERIVED = {
    ".idx": "first restore what is lost, then run again",
    ".bin": f"tokens cannot be derived; {_RESTORE}",
    ".loss.bin": f"loss masks cannot be derived; {_RESTORE}",
    ".seq.bin": f"sequence starts can only be derived if every pack has one sequence; {_RESTORE}",
    # Without the header, it would be derived with lengths that this header's checksum has just shown to be wrong.
    ".seq.idx": "no source of pack lengths reproduces the arrays that match its header: restore what is lost, or try"
    " --eod-id, then run again",
}


def _states(
    paths: ShardPaths,
    header: Header,
    faults: Mapping[str, str],
    how_restored: Mapping[str, str],
    broken: Mapping[str, Finding],
    withheld: str = "",
) -> tuple[FileState, ...]:
    """Return the states of the five files, and of the columns that exist at the prefix or are listed.

    ``broken`` are findings about columns, by path. If ``withheld`` names damaged files, nothing was restored in the
    end.
    """
    states = []
    for path in paths.all:
        fault = faults.get(path, "")
        if path in how_restored and withheld:
            remedy = (
                f"with this file, readers would open the damaged {withheld} without an error; {_NOT_DERIVED['.idx']}"
            )
            states.append(FileState(path, "lost", fault, remedy))
        elif path in how_restored:
            fault = fault or "not as Megatron writes it (rule I1)"
            states.append(FileState(path, "rebuilt", fault, how_restored[path]))
        elif fault:
            states.append(FileState(path, "lost", fault, _NOT_DERIVED[path.removeprefix(paths.prefix)]))
        else:
            states.append(FileState(path, "good"))
    is_doubted = header.rebuilt and header.shard_id not in _shards_beside(paths).values()
    beside = columns_beside([paths.prefix])[paths.prefix]
    for path in map(paths.column, sorted({*beside, *listed_columns(header.metadata)})):
        if (finding := broken.get(path)) and finding.rule == "C6" and is_doubted:
            states.append(FileState(path, "uncertain", finding.what, finding.remedy))
        elif finding:
            states.append(FileState(path, "lost", finding.what, f"a column cannot be derived; {finding.remedy}"))
        else:
            states.append(FileState(path, "good"))
    for path in (paths.media_data, paths.media_items) if listed_media(header.metadata) else ():
        if finding := broken.get(path):
            states.append(FileState(path, "lost", finding.what, finding.remedy))
        else:
            states.append(FileState(path, "good"))
    return tuple(states)


# ---- deciding which file is right ----


def _shards_beside(paths: ShardPaths) -> dict[str, bytes]:
    """Return the shard ids in intact headers of columns and of ``.media.items`` at the prefix, by path."""
    ids: dict[str, bytes] = {}
    for name in with_present_files(paths).columns:
        with contextlib.suppress(SFTIndexError):
            if (start := read_start(path := paths.column(name), COLUMN)) is not None:
                ids[path] = ColumnHeader.decode(start.raw, path).shard_id
    with contextlib.suppress(SFTIndexError):
        if (start := items_start(paths)) is not None:
            ids[paths.media_items] = MediaHeader.decode(start.raw, paths.media_items).shard_id
    return ids


def _compare_with_witnesses(paths: ShardPaths, header: Header) -> tuple[bool, list[str]]:
    """Compare a header that was derived from the data with other evidence of the original data.

    The evidence is in the columns, because a shard id follows from the checksums of the four data files, and in a
    damaged ``.seq.idx``, which may still contain these checksums.

    Returns:
        Whether one of them proves that the data is unchanged, and a note for the user.

    Raises:
        FormatError: all columns belong to other data.
    """
    start, values = read_start(paths.seq_idx, SEQ_IDX), {}
    if start is not None and len(start.raw) >= HEADER_FIXED_NBYTES:
        values = SEQ_IDX.values(start.raw)
    names = ("tokens", "loss", "idx", "starts")
    digests = zip(paths.data, names, header.digests, strict=True)
    differing = [path for path, name, digest in digests if values.get(f"{name}_checksum") != digest.checksum]
    ids = _shards_beside(paths)
    is_proven = not differing or header.shard_id in ids.values()
    if ids and not is_proven:
        path, shard_id = next(iter(ids.items()))
        raise FormatError(
            f"{path}: belongs to shard {shard_id.hex()}, but the other files would form shard {header.shard_id.hex()}"
            " (rule C6): either tokens, masks, starts or pack lengths have changed, or this file belongs to another"
            " shard; restore .seq.idx, or the changed file, from a copy; only if you are sure that this file belongs"
            " to another shard, move it away and run again"
        )
    notes = []
    if not is_proven and len(differing) < len(names):
        notes.append(
            f"{', '.join(differing)}: the checksum differs from the damaged .seq.idx, so either the file or the"
            " .seq.idx has changed"
        )
    if columns := [column[1] for column in map(column_of, ids) if column]:
        notes.append(f"the new .seq.idx lists no columns; {', '.join(columns)} remain as attached columns")
    return is_proven, notes


def _damaged_and_readable(paths: ShardPaths, header: Header, damaged: Collection[str]) -> str:
    """Return the names of the damaged files if readers would open a shard that has them, else "".

    Readers compare sizes but not checksums, so a restored index would hide known damage.
    """
    sizes = header.sizes(paths)
    is_read = all(os.path.exists(path) and os.stat(path).st_size == sizes[path] for path in damaged)
    return ", ".join(sorted(damaged)) if is_read else ""


def _require_own_header(paths: ShardPaths, header: Header, faults: Mapping[str, str]) -> None:
    """Raise FormatError if a column shows that the ``.seq.idx`` is wrong, because it belongs to another shard."""
    is_damaged = faults.keys() & {paths.tokens, paths.loss, paths.starts}
    others = {path: each for path, each in _shards_beside(paths).items() if each != header.shard_id}
    if is_damaged and others and all(map(os.path.exists, paths.data)):
        tokens, loss, idx, starts = tuple(map(digest_file, paths.data))
        found = replace(header, digests=(tokens, loss, idx, starts)).shard_id
        if witnesses := [path for path, shard_id in others.items() if shard_id == found]:
            raise FormatError(
                f"{paths.seq_idx}: belongs to shard {header.shard_id.hex()}, but according to {witnesses[0]} the other"
                f" files are shard {found.hex()} (rule C6); restore the right .seq.idx from a copy, or move this one"
                " away and run again to derive it from the other files"
            )


# ---- remains of a killed build ----


def _recover_build(paths: ShardPaths, remains: Remains, overwrite: bool, dry_run: bool, watch: Watch) -> Rebuilt:
    """Make a shard from the packs of a killed build. It is checked against every rule before it is published.

    FormatError: there are no packs, they were to replace a shard, or files have changed since they were complete.
    """
    is_complete, num_packs = remains.is_complete, remains.num_packs
    if not is_complete and remains.num_parts:
        raise FormatError(
            f"{paths.building}: contains parts of an interrupted preprocess; run that command again to continue; or,"
            f" to recover only the packs that were written, move {paths.building}/parts away first"
        )
    if not is_complete and not num_packs:
        raise FormatError(
            f"{paths.building}: the build was killed before it wrote a pack, so there is nothing to recover; build it"
            " again"
        )
    if paths.present() and not overwrite and (not is_complete or remains.replaces):
        raise FormatError(
            f"{paths.prefix}: there is a shard, and {paths.building} has {num_packs} packs of a killed {remains.work}"
            " that was replacing it; run that command again; or replace the shard with these packs (--overwrite); or"
            " remove the folder to rebuild the shard"
        )
    num_sequences, num_tokens = remains.num_sequences, remains.num_tokens
    broken: set[str] = set()

    def check(unpublished: Mapping[str, str]) -> None:
        report = _verified(paths, watch, "verifying", unpublished, remains.paths.columns)
        if not is_complete:
            _require_none(report, report.findings, *_CHANGED_MEANWHILE)
        five = ShardPaths(paths.prefix).all
        broken.update(found.path for found in report.findings if found.rule == "F3" or found.path not in five)
        if not broken or not broken <= {paths.idx, paths.seq_idx}:  # the header can restore only indexes
            what, why = "all files were complete", "they have changed since"
            again = "run the same copy again" if remains.work == "copy" else "build it again"
            remedy = f"nothing was published; {again} with overwrite (--overwrite)"
            _require_none(report, report.findings, what, why, remedy)

    if not dry_run:
        with watch("recovering", num_tokens) as advance:
            header = recover(paths.prefix, overwrite=overwrite or is_complete, check=check, progress=advance)
        num_packs, num_sequences, num_tokens = header.num_packs, header.num_sequences, header.num_tokens
    elif remains.unpublished is not None:
        check(remains.unpublished)
    kept: tuple[str, ...] = ()
    if broken and not dry_run:
        with taken(paths.prefix) as building:
            rebuilt = _rebuild_files(paths, GivenFacts(), watch, building)
        if not rebuilt.whole:
            return rebuilt
        kept = rebuilt.kept
    files = tuple(FileState(path, "rebuilt", remedy=f"from {paths.building}") for path in remains.paths.all)
    state = "complete except for renaming its files" if is_complete else "killed"
    note = f"from a {remains.work} that was {state}: {num_packs} packs, {num_sequences} sequences, {num_tokens} tokens"
    return Rebuilt(paths.prefix, files, kept, note, dry_run, compared=is_complete)
