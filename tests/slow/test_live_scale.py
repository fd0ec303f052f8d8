"""Jobs of several sizes follow one another on a thousand ranks and a hundred thousand shards; each pack comes once."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from live_catalogs import MemoryShards, walk
from test_streaming_order import gone_on

from megatron_sft_idx.live.acks import ConsumerAcks, completed
from megatron_sft_idx.live.live_order import Deal, RankState, states_from_json, states_to_json
from megatron_sft_idx.live.live_walk import OwnPacks

pytestmark = pytest.mark.slow

SHARDS = 100_000
# Number of ranks of each job, and of packs per rank; the last job runs to the end.
JOBS = ((1000, 64), (700, 48), (1000, 80), (1, 32_000), (999, 10**9))


def test_every_pack_comes_once_and_completed_shards_were_read() -> None:
    counts = np.random.default_rng(5).integers(0, 6, SHARDS)
    # All packs are numbered consecutively; these are the first numbers of each shard.
    begins = np.concatenate([[0], np.cumsum(counts)])
    shards = MemoryShards(counts.tolist())
    times_read = np.zeros(begins[-1], np.int64)
    states = [RankState(Deal(size=JOBS[0][0], window=3), rank) for rank in range(JOBS[0][0])]
    for job, (size, packs_of_rank) in enumerate(JOBS):
        if job:
            states = states_from_json(json.loads(json.dumps(states_to_json(states))))
            states = gone_on(states, size, window=1 + job % 3)
        reached = []
        for state in states:
            packs, behind = OwnPacks(shards, wait=lambda shard: shard < SHARDS).take(state, packs_of_rank)
            np.add.at(times_read, begins[packs[:, 0]] + packs[:, 1], 1)
            reached.append(behind)
        states = reached
        acks = [ConsumerAcks("", "train", 1).of(state) for state in states]
        done = np.array(completed({"train": acks}, 1, range(SHARDS)), np.int64)
        unread_before = np.concatenate([[0], np.cumsum(times_read == 0)])
        assert (unread_before[begins[done + 1]] == unread_before[begins[done]]).all(), "completed, and not read"
        assert times_read.max() == 1
        assert 0 < len(done) <= SHARDS
    assert (times_read == 1).all()
    assert len(done) == SHARDS


def test_ranks_find_the_same_end_by_themselves() -> None:
    """Each rank counts the packs of all ranks; a few ranks represent the thousand."""
    counts = np.random.default_rng(6).integers(0, 6, SHARDS).tolist()
    most = max(sum(counts[rank::1000]) for rank in range(1000))
    for rank in (0, 1, 500, 999):
        state = RankState(Deal(size=1000, window=4), rank, batch_rows=16, step_rows=32)
        taken = list(walk(MemoryShards(counts), state))
        assert len(taken) == -(-most // 32) * 2
        real = itertools.chain.from_iterable(batch.shards[: 16 - batch.num_masked] for batch in taken)
        assert sum(1 for _ in real) == sum(counts[rank::1000])
