"""Recovery of a killed build: logged packs within its files become a valid shard, or nothing does.

The input is a byte for missing files, then the log and the unpublished files.
"""

from __future__ import annotations

import io

from fuzz.contract import put_files, refused, scratch
from fuzz.fuzz_rebuild import contents
from fuzz.pieces import split
from fuzz.repair import repair_json, repair_log

from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.shard import Shard, find_remains, recover
from megatron_sft_idx.shard.pack_log import read_blocks

FOLDER = "x.building/"
NAMES = tuple(FOLDER + name for name in ("build.json", "done.json", "packs", *SUFFIXES))


def run(data: bytes) -> None:
    folder = scratch("recover")
    prefix = str(folder / "x")
    missing, parts = data[0] if data else 0, split(data[1:], len(NAMES))
    for build, done, log in (parts[:3], (repair_json(parts[0]), repair_json(parts[1]), repair_log(parts[2]))):
        whole = dict(zip(NAMES, (build, done, log, *parts[3:]), strict=True))
        before = {name: content for i, (name, content) in enumerate(whole.items()) if not missing >> i & 1}
        put_files(folder, before)
        with refused(prefix):
            remains = find_remains(prefix)
            assert contents(folder) == before
            header = recover(prefix)
            assert remains is not None
            if remains.is_complete:
                for name, content in contents(folder).items():
                    assert before[FOLDER + name.removeprefix("x")] == content
            else:
                assert header.num_packs <= remains.num_packs
                _hold_recovered(prefix, before)
            continue
        assert "x.seq.idx" not in contents(folder)
        assert set(before) <= set(contents(folder))


def _hold_recovered(prefix: str, before: dict[str, bytes]) -> None:
    """Check that the shard has the first logged packs with unchanged data."""
    report = verify_shard(prefix, full=True)
    assert report.ok, report.findings
    log = io.BytesIO(before[FOLDER + "packs"])
    records = [record for block in read_blocks(log) for record in block.tolist()]
    shard = Shard(prefix)
    for pack, (length, sequences) in zip(shard, records, strict=False):
        assert (len(pack["input_ids"]), len(pack["seq_boundaries"]) - 1) == (length, sequences)
    assert len(shard) <= len(records)
    left = contents(scratch("recover"))
    assert set(left) == {"x" + suffix for suffix in SUFFIXES}
    for suffix in (".bin", ".loss.bin", ".seq.bin"):
        assert before[FOLDER + suffix].startswith(left["x" + suffix])
