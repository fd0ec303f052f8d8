"""``rebuild`` makes a shard whole again from what is left of it.

Indexes come back from each other, from the data, or from what a killed build left. Columns cannot be derived and are
left as they are. This module finds what is wrong and reports what was done; ``restore`` brings files back under a good
header, ``derive`` makes both indexes where there is none. New files are written beside the old ones, and take their
places only when they are complete and synced.
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
from megatron_sft_idx.storage.building import Building
from megatron_sft_idx.storage.building_files import lost_files
from megatron_sft_idx.storage.local import digest_file
from megatron_sft_idx.storage.progress import Watch, unwatched

# Work that writes some files of a shard.
_PARTLY = ("rebuild", "column", "removal")


@dataclass(frozen=True)
class FileState:
    """What a rebuild found and did about one of the five files, or a column.

    Attributes:
        path: of the file.
        state: ``good`` and left alone; ``rebuilt``; ``lost``, since it cannot be derived from what is left, or would
            have readers open what is damaged; or ``uncertain``: a column of other data than is here, where nothing
            tells whether it is the column or the data that has changed.
        fault: what was wrong; empty for a good file.
        remedy: of a rebuilt file how it came back, else what the user can do.
    """

    path: str
    state: Literal["good", "rebuilt", "lost", "uncertain"]
    fault: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Rebuilt:
    """The report of a rebuild.

    Attributes:
        prefix: of the shard.
        files: the five, in the order of publication, then the columns.
        kept: the names under which replaced files still are.
        note: what else the user should know.
        dry_run: nothing was written; the state ``rebuilt`` then means that the file would be.
        compared: whether the contents were held to checksums from before the damage, not only to the rules.
    """

    prefix: str
    files: tuple[FileState, ...]
    kept: tuple[str, ...] = ()
    note: str = ""
    dry_run: bool = False
    compared: bool = True

    @property
    def whole(self) -> bool:
        """Whether a complete shard that keeps every rule is at the prefix, or would be, with all its columns."""
        return not any(file.state in ("lost", "uncertain") for file in self.files)

    @property
    def opens(self) -> bool:
        """Whether the five files are whole, or would be."""
        return not any(file.state == "lost" and column_of(file.path) is None for file in self.files)

    @property
    def changed(self) -> bool:
        """Whether anything was rebuilt, or would be."""
        return any(file.state == "rebuilt" for file in self.files)

    @property
    def uncertain(self) -> bool:
        """Whether data or columns have changed, and nothing tells which."""
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
    """Bring back what can be derived of a shard whose files are damaged or missing.

    Every byte is read. A good file is never touched, and a file that is replaced is kept under another name. It takes
    up to 100 bytes of memory a pack; where both indexes are lost, some 30 a sequence too.

    - With a good header of ``.seq.idx``, every other file is brought back exactly or not at all; and none that would
      have readers open a shard of which another file is damaged.
    - Without one, the indexes are derived from the data, and ``.seq.idx`` is marked as rebuilt. If several shards could
      have given the same data, none is chosen: that is an error. Columns name the data that they were written for, and
      if that is other data than is here, it is an error too.
    - Where a killed build left packs in ``X.building``, these become the shard.
    - A column that is damaged, or listed and missing, is reported as lost. A derived ``.seq.idx`` lists none, so those
      at the prefix count as attached from then on.

    Args:
        prefix: the path that the five files share.
        facts: what the user knows of the shard and the files do not say any more.
        overwrite: let the packs of a killed build replace the shard that is at the prefix; and begin a rebuild anew
            that was killed among its renames and has lost a file since.
        accept_contents: if tokens, masks, starts or columns do not have their checksums, and nothing brings them back,
            write the shard again with what is there. Its header then lists these files under ``accepted``.
        dry_run: only find out what would happen.
        watch: shows the progress of each stage.

    Raises:
        ShardNotFoundError: nothing of a shard is at the prefix.
        FormatError: the files that are left do not tell enough, and the message says what is missing; or they do not
            belong together. Or another writer is at work, or was killed while it removed the shard, or a dry run finds
            a rebuild that was killed among its renames. Or every file is what its writer wrote, and breaks a rule all
            the same; or those of a build that was complete have changed since.
        UnsupportedVersionError: the ``.seq.idx`` is of a later version, which may be good.
        OSError: of the disk.
    """
    paths = ShardPaths.of(prefix)
    require_local(paths.prefix, "rebuild")
    if accept_contents:
        restored = rebuild(prefix, facts, overwrite=overwrite, dry_run=dry_run, watch=watch)
        return restored if restored.whole else _accept(paths, restored, dry_run, watch)
    begins_anew = overwrite and _lost_a_file(paths)
    if (remains := None if begins_anew else find_remains(prefix)) is not None:
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
    facts = facts or GivenFacts()
    if dry_run:
        return _rebuild_files(paths, facts, watch, None)
    # Packs that were noted may all be lost, and then there is nothing to keep.
    has_nothing = remains is not None and not remains.num_parts
    with taken(paths.prefix, overwrite=begins_anew or has_nothing) as building:
        return _rebuild_files(paths, facts, watch, building)


def _lost_a_file(paths: ShardPaths) -> bool:
    """Whether a rebuild was interrupted among its renames, and a file that it had made is gone since."""
    with contextlib.suppress(FileNotFoundError), Building.take(paths.prefix, create=False, shared=True) as building:
        return building.is_whole and building.holds({"work": "rebuild"}) and bool(lost_files(paths.prefix))
    return False


def _finish_job(paths: ShardPaths, remains: Remains, dry_run: bool) -> Rebuilt:
    """Let the outputs of a job appear that was killed when all of them were whole."""
    if not dry_run:
        finish_interrupted(paths)
    note = f"{len(remains.outputs)} outputs of a {remains.work} that was complete but for renames"
    return Rebuilt(paths.prefix, (), (), note, dry_run)


def _refuse_remains(paths: ShardPaths, remains: Remains, *, dry_run: bool) -> None:
    """FormatError if what a killed writer left is to be finished by another command, or is half renamed."""
    remedy = None
    if remains.work == "copy":
        remedy = "run the same copy again"
    elif remains.work == "removal" and remains.is_complete:
        remedy = (
            "run the command that removed it again, which finishes it; or, to keep what is left, move this folder away"
            f" and run megatron-sft-idx rebuild {paths.prefix}"
        )
    elif remains.is_complete and dry_run:
        remedy = f"run it again: megatron-sft-idx rebuild {paths.prefix}"
    if remedy is not None:
        raise FormatError(f"{paths.building}: left by a {remains.work} that was interrupted; {remedy}")


def _rebuild_files(paths: ShardPaths, facts: GivenFacts, watch: Watch, building: Building | None) -> Rebuilt:
    """``rebuild`` where no killed build is in the way; ``building`` is taken, None for a dry run."""
    dry_run = building is None
    header, error = _read_header(paths)
    if header is None or paths.missing():
        _refuse_links(paths)  # before every byte is read, which may take hours
    faults, report = _faults(paths, header, error, watch)
    if header is not None and not faults:
        good = Rebuilt(paths.prefix, _states(paths, header, {}, {}, _by_path(report)), dry_run=dry_run)
        note = "nothing was rebuilt" if good.uncertain else "the five files are good, and nothing was rebuilt"
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
            # Before the files appear, because readers open a shard that breaks a rule.
            report = _verified(paths, watch, "verifying", repair.unpublished)
            broken = _by_path(report)
            if header is None:
                _require_none(report, _of_five(report), *_CHANGED_MEANWHILE)
            else:
                _require_none(report, _of_five(report), "every file could be as its header says", *_WRITTEN_SO)
        kept = repair.publish()
    states = _states(paths, new_header, faults, how_restored, broken, withheld)
    return Rebuilt(paths.prefix, states, tuple(kept), "; ".join(notes), dry_run, compared)


def _accept(paths: ShardPaths, restored: Rebuilt, dry_run: bool, watch: Watch) -> Rebuilt:
    """Accept the contents of a shard of which a rebuild could not bring back everything."""
    header = read_header(paths)
    wrong = accepted_findings(_verified(paths, watch, "reading"))
    if not dry_run:
        write_accepted(paths, header, wrong, watch)
    how = "accepted as it is, under a new checksum"
    states = []
    for file in restored.files:
        fault = wrong.get(file.path)
        states.append(FileState(file.path, "rebuilt", fault.what, how) if fault else replace(file, state="good"))
    note = f"the header {'would list' if dry_run else 'lists'} these files under 'accepted'"
    return Rebuilt(paths.prefix, tuple(states), restored.kept, note, dry_run, compared=False)


# ---- what is wrong ----


def _read_header(paths: ShardPaths) -> tuple[Header | None, SFTIndexError | None]:
    """The header of ``.seq.idx``, or else the error of decoding it; neither if the file is missing."""
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
    """FormatError if one of the five names is a link: what it leads to may be another shard's."""
    for path in paths.all:
        inode_of(path)


def _faults(
    paths: ShardPaths, header: Header | None, error: SFTIndexError | None, watch: Watch
) -> tuple[dict[str, str], Report]:
    """What is wrong with the five files, by path, and the report of their verification.

    A path that is not in it is good, as far as the other files tell.

    Raises:
        FormatError: every file but perhaps ``.idx`` is what a good header says, and breaks a rule all the same. A new
            ``.idx`` would let readers open it.
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
        # Derived anew, indexes can be right only where the data is, and .idx has the lengths of the packs.
        if not faults and {finding.path for finding in sound} <= {paths.idx, paths.seq_idx}:
            remedy = f"move {paths.seq_idx} away to have the indexes derived from the rest, or {remedy}"
        _require_none(report, sound, "every good file is as its header says", why, remedy)
    return faults, report


def _fault_of(error: SFTIndexError) -> str:
    """What an error says is wrong, without the path and the remedy."""
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
    """The report of a full verification; ``unpublished`` and ``beside`` as of ``verify_shard``."""
    files = {path: path for path in with_present_files(paths).present()} | dict(unpublished or {})
    # Of images and audio there may be a link to nothing, which is a finding.
    with watch(stage, sum(os.stat(path).st_size for path in files.values() if os.path.exists(path))) as advance:
        # So many that each column has one of each rule.
        most = max(10, len(files))
        return verify_shard(paths.prefix, full=True, most=most, unpublished=unpublished, beside=beside, advance=advance)


def _by_path(report: Report) -> dict[str, Finding]:
    """The first finding about each file."""
    return {finding.path: finding for finding in reversed(report.findings)}


# How rules can be broken all the same, and what to do.
_WRITTEN_SO = "it was written so", "write it again"
_CHANGED_MEANWHILE = (
    "every pack was checked as it was read",
    "the files changed meanwhile, or the disk gives back other bytes each time",
    "nothing was published; run the same command again",
)


def _of_five(report: Report) -> list[Finding]:
    """The findings about the five files. Those about columns, images and audio are not."""
    five = ShardPaths(report.prefix).all
    return [finding for finding in report.findings if finding.path in five]


def _require_none(report: Report, findings: Sequence[Finding], what: str, why: str, remedy: str) -> None:
    """FormatError if there are such findings in a report, which ``what`` should exclude."""
    if findings:
        first, places = findings[0], "1 place" if report.num_findings == 1 else f"{report.num_findings} places"
        raise FormatError(
            f"{report.prefix}: {what}, and yet rules are broken in {places}: {why}; the first is byte {first.offset} of"
            f" {first.path}: {first.what}; {remedy}"
        )


# Why a file was not derived, and what the user can do, by suffix.
_NOT_DERIVED = {
    ".idx": "restore what is lost first, then run again",
    ".bin": "tokens cannot be derived; restore it from a copy",
    ".loss.bin": "loss masks cannot be derived; restore it from a copy",
    ".seq.bin": "sequence starts follow only where every pack is one sequence; restore it from a copy",
    # Derived without its header, it would have lengths that the checksum in this header has just proven to be wrong.
    ".seq.idx": "no source of pack lengths gives the arrays that its header was written with: restore what is lost, or"
    " try --eod-id, then run again",
}


def _states(
    paths: ShardPaths,
    header: Header,
    faults: Mapping[str, str],
    how_restored: Mapping[str, str],
    broken: Mapping[str, Finding],
    withheld: str = "",
) -> tuple[FileState, ...]:
    """The states of the five files, and of the columns that are at the prefix or listed.

    ``broken`` are findings about columns, by path. Where ``withheld`` names damaged files, nothing was restored after
    all.
    """
    states = []
    for path in paths.all:
        fault = faults.get(path, "")
        if path in how_restored and withheld:
            remedy = f"readers would open {withheld} with it, as if nothing was wrong; {_NOT_DERIVED['.idx']}"
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


# ---- which file is believed ----


def _shards_beside(paths: ShardPaths) -> dict[str, bytes]:
    """The shard ids in whole headers of columns and of ``.media.items`` at the prefix, by path."""
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
    """Hold a header that was derived from the data to what else tells what the data was.

    That are the columns, as a shard id follows from the checksums of the four data files, and what is left of a damaged
    ``.seq.idx``, which may have these checksums still.

    Returns:
        Whether one of them proves that the data is as it was, and what to say.

    Raises:
        FormatError: all columns are those of other data.
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
            f"{path}: of shard {shard_id.hex()}, and the other files would be shard"
            f" {header.shard_id.hex()} (rule C6): tokens, masks, starts or pack lengths have changed, or this file is"
            " another shard's; restore .seq.idx, or what has changed, from a copy; only if you know that this file is"
            " not of this shard, move it away, and run again"
        )
    notes = []
    if not is_proven and len(differing) < len(names):
        notes.append(f"the damaged .seq.idx has other checksums of {', '.join(differing)}: it or they have changed")
    if columns := [column[1] for column in map(column_of, ids) if column]:
        notes.append(f"the new .seq.idx lists no columns; {', '.join(columns)} stay beside it, like attached ones")
    return is_proven, notes


def _damaged_and_readable(paths: ShardPaths, header: Header, damaged: Collection[str]) -> str:
    """The names of the damaged files, if readers would open a shard that has them; else nothing.

    Readers compare sizes and no checksums: an index that is brought back would hide what is known to be damaged.
    """
    sizes = header.sizes(paths)
    is_read = all(os.path.exists(path) and os.stat(path).st_size == sizes[path] for path in damaged)
    return ", ".join(sorted(damaged)) if is_read else ""


def _require_own_header(paths: ShardPaths, header: Header, faults: Mapping[str, str]) -> None:
    """FormatError if it is not the data that is wrong but the ``.seq.idx``, which is another shard's, by a column."""
    is_damaged = faults.keys() & {paths.tokens, paths.loss, paths.starts}
    others = {path: each for path, each in _shards_beside(paths).items() if each != header.shard_id}
    if is_damaged and others and all(map(os.path.exists, paths.data)):
        tokens, loss, idx, starts = tuple(map(digest_file, paths.data))
        found = replace(header, digests=(tokens, loss, idx, starts)).shard_id
        if witnesses := [path for path, shard_id in others.items() if shard_id == found]:
            raise FormatError(
                f"{paths.seq_idx}: of shard {header.shard_id.hex()}, and the other files are shard {found.hex()}, as"
                f" {witnesses[0]} says (rule C6); restore the right one from a copy, or move this one away and run"
                " again to have it derived from them"
            )


# ---- what a killed build left ----


def _recover_build(paths: ShardPaths, remains: Remains, overwrite: bool, dry_run: bool, watch: Watch) -> Rebuilt:
    """Make a shard of a killed build's packs, which keeps every rule before it appears.

    FormatError: there are no packs, or they were to replace a shard, or files have changed since they were complete.
    """
    is_complete, num_packs = remains.is_complete, remains.num_packs
    if not is_complete and remains.num_parts:
        raise FormatError(
            f"{paths.building}: holds parts of an interrupted preprocess; run that command again, which goes on with"
            f" them; or, to have the packs alone that were written, move {paths.building}/parts away first"
        )
    if not is_complete and not num_packs:
        raise FormatError(
            f"{paths.building}: the build was killed before it had written a pack, so there is nothing to recover;"
            " build it again"
        )
    if paths.present() and not overwrite and (not is_complete or remains.replaces):
        raise FormatError(
            f"{paths.prefix}: a shard is here, and in {paths.building} the {num_packs} packs of a killed"
            f" {remains.work} that was to replace it; run that command again; or put these packs in its place"
            " (--overwrite); or remove this folder to rebuild the shard"
        )
    num_sequences, num_tokens = remains.num_sequences, remains.num_tokens
    broken: set[str] = set()

    def check(unpublished: Mapping[str, str]) -> None:
        report = _verified(paths, watch, "verifying", unpublished, remains.paths.columns)
        if not is_complete:
            _require_none(report, report.findings, *_CHANGED_MEANWHILE)
        five = ShardPaths(paths.prefix).all
        broken.update(found.path for found in report.findings if found.rule == "F3" or found.path not in five)
        if not broken or not broken <= {paths.idx, paths.seq_idx}:  # the header brings back indexes, and nothing else
            what, why = "its folder says that all files are complete", "they were changed since"
            again = "run the same copy again" if remains.work == "copy" else "build it again"
            remedy = f"nothing was published; {again} with overwrite (--overwrite)"
            # Wrong checksums first, since the other findings may be their effects.
            findings = sorted(report.findings, key=lambda found: found.rule not in ("F3", "C7", "M13"))
            _require_none(report, findings, what, why, remedy)

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
    state = "complete but for renames" if is_complete else "killed"
    note = f"from a {remains.work} that was {state}: {num_packs} packs, {num_sequences} sequences, {num_tokens} tokens"
    return Rebuilt(paths.prefix, files, kept, note, dry_run, compared=is_complete)
