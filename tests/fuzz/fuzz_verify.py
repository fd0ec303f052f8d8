"""``verify`` always gives a report, and a shard without findings has no errors.

The input is a byte for missing files, then an input of ``fuzz_shard``.
"""

from __future__ import annotations

import json

import numpy as np
from fuzz.contract import put_files, scratch
from fuzz.fuzz_shard import split
from fuzz.repair import repair_shard
from reseal import reseal
from verify_twin import Arrays, slow_walk

from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import SUFFIXES
from megatron_sft_idx.shard import Shard

Files = dict[str, bytes]


def variants(data: bytes) -> list[Files]:
    """Return the files of an input: unchanged, with correct sizes, and with correct checksums."""
    files = split(data[1:])
    sized = repair_shard(files)
    missing = data[0] if data else 0
    return [
        {suffix: whole[suffix] for i, suffix in enumerate(SUFFIXES) if not missing >> i & 1}
        for whole in (files, sized, reseal(sized))
    ]


def run(data: bytes) -> None:
    folder = scratch("verify")
    prefix = str(folder / "x")
    for files in variants(data):
        put_files(folder, {"x" + suffix: content for suffix, content in files.items()})
        if not files:
            continue
        quick, full = verify_shard(prefix), verify_shard(prefix, full=True)
        for report in (quick, full):
            assert json.dumps(report.as_json())
            assert all(line.startswith(prefix) for line in report.lines())
            for finding in report.findings:
                assert finding.path in ShardPaths.of(prefix).all
                assert finding.offset is None or finding.offset >= 0
        if full.ok:
            assert quick.ok
            _hold_sound(prefix)


def _hold_sound(prefix: str) -> None:
    """Check that everything can be read, and that a slow check of all rules finds nothing."""
    shard = Shard(prefix)
    header, files = shard.header, shard.files
    lists = [np.asarray(array[:]).tolist() for array in (files.token_offsets, files.sequence_offsets, files.starts)]
    walked = slow_walk(Arrays(*lists, np.asarray(files.loss[:]).tolist(), header.capacity, header.sequence_multiple))
    assert not walked.breaches
    assert (walked.packs, walked.trained_tokens) == (header.num_packs, header.num_trained_tokens)
    assert (walked.masked_packs, walked.longest_pack) == (header.num_masked_packs, header.longest_pack)
    assert walked.most_sequences == header.most_sequences
    for number, pack in enumerate(shard):
        tokens = slice(*lists[0][number : number + 2])
        assert pack["input_ids"].tolist() == np.asarray(files.tokens[tokens]).tolist()
        assert (pack["input_ids"] >= 0).all()
        starts = lists[2][slice(*lists[1][number : number + 2])]
        assert pack["seq_boundaries"].tolist() == [*starts, len(pack["input_ids"])]
