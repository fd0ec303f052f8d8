"""What a killed build left: the packs of its journal, as far as its files reach, become a sound shard, or nothing.

The input is a byte that says which files are missing, then the journal and the temporary files.
"""

from __future__ import annotations

import io

from fuzz.contract import put_files, refused, scratch
from fuzz.fuzz_rebuild import contents
from fuzz.pieces import split
from fuzz.repair import repair_journal

from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.shard import Shard, find_remains, recover
from megatron_sft_idx.shard.journal import PACK, read_blocks, read_head
from megatron_sft_idx.shard.recovery import adopt_remains

NAMES = ("x.journal", "x.bin.tmp", "x.loss.bin.tmp", "x.seq.bin.tmp", "x.idx.tmp", "x.seq.idx.tmp")


def run(data: bytes) -> None:
    folder = scratch("recover")
    prefix = str(folder / "x")
    missing, parts = data[0] if data else 0, split(data[1:], len(NAMES))
    for journal in (parts[0], repair_journal(parts[0])):
        whole = dict(zip(NAMES, (journal, *parts[1:]), strict=True))
        before = {name: content for i, (name, content) in enumerate(whole.items()) if not missing >> i & 1}
        put_files(folder, before)
        with refused(prefix):
            adopt_remains(ShardPaths(prefix))
        before = contents(folder)
        with refused(prefix):
            remains = find_remains(prefix)
            assert contents(folder) == before
            header = recover(prefix)
            assert remains is not None
            if remains.is_complete:
                published = {name.removesuffix(".tmp"): before[name] for name in NAMES[1:] if name in before}
                assert all(published[name] == content for name, content in contents(folder).items())
            else:
                assert header.num_packs <= remains.num_packs
                _hold_recovered(prefix, before)
            continue
        assert "x.seq.idx" not in contents(folder)
        assert set(before) <= set(contents(folder))


def _hold_recovered(prefix: str, before: dict[str, bytes]) -> None:
    """The shard holds the first packs of the journal, and their data as it was."""
    report = verify_shard(prefix, full=True)
    assert report.ok, report.findings
    stream = io.BytesIO(before["x.journal"])
    read_head(stream, "x.journal")
    records = [record for block in read_blocks(stream) if block.kind == PACK for record in block.records.tolist()]
    shard = Shard(prefix)
    for pack, (length, sequences) in zip(shard, records, strict=False):
        assert (len(pack["input_ids"]), len(pack["seq_boundaries"]) - 1) == (length, sequences)
    assert len(shard) <= len(records)
    left = contents(scratch("recover"))
    assert set(left) == {"x" + suffix for suffix in SUFFIXES}
    for name in ("x.bin", "x.loss.bin", "x.seq.bin"):
        assert before[f"{name}.tmp"].startswith(left[name])
