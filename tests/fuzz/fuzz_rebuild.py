"""``rebuild``: repaired shards verify, good files are not changed, and errors change nothing.

The input is one byte for the user's options, then an input of ``fuzz_verify``.
"""

from __future__ import annotations

from pathlib import Path

from fuzz.contract import put_files, scratch
from fuzz.fuzz_verify import Files, variants
from sample_packs import tree_of

from megatron_sft_idx.check import GivenFacts, Rebuilt, rebuild, verify_shard
from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.layout.files import SUFFIXES

_UNKNOWN = 128


def run(data: bytes) -> None:
    folder = scratch("rebuild")
    known = GivenFacts(eod_id=data[0] if data and data[0] < _UNKNOWN else None)
    for files in variants(data[1:]):
        before = {"x" + suffix: content for suffix, content in files.items()}
        put_files(folder, before)
        planned, done = (_rebuilt(folder, known, dry_run) for dry_run in (True, False))
        if isinstance(done, Rebuilt):
            assert isinstance(planned, Rebuilt)
            assert planned.files == done.files
            _hold_report(folder, done, before)
        else:
            assert contents(folder) == before
            if "every file could be restored to match the header" not in done:  # known only after everything is derived
                assert planned == done


def contents(folder: Path) -> Files:
    """Return all files in a folder and its subfolders, by path. Locks are left out."""
    return tree_of(folder)


def _rebuilt(folder: Path, known: GivenFacts, dry_run: bool) -> Rebuilt | str:
    """Return the report, or the error."""
    before = contents(folder)
    prefix = str(folder / "x")
    outcome: Rebuilt | str
    try:
        outcome = rebuild(prefix, known, dry_run=dry_run)
    except SFTIndexError as error:
        outcome = str(error)
        assert outcome.startswith(prefix)
    if dry_run:
        assert contents(folder) == before
    return outcome


def _hold_report(folder: Path, report: Rebuilt, before: Files) -> None:
    after = contents(folder)
    for file in report.files:
        name = Path(file.path).name
        if file.state != "rebuilt":
            assert after.get(name) == before.get(name)
        elif name in before:
            assert before[name] in (content for kept, content in after.items() if kept.startswith(f"{name}.damaged"))
    assert {name for name in after if ".damaged" not in name} <= {"x" + suffix for suffix in SUFFIXES}
    prefix = str(folder / "x")
    if report.whole:
        full = verify_shard(prefix, full=True)
        assert full.ok, full.findings
        again = rebuild(prefix)
        assert again.whole
        assert not again.changed
