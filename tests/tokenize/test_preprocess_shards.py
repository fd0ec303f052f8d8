"""``--output-shards``: ``preprocess`` and ``pack`` divide one plan into shards, also after interruptions."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from chats import CHATS, MADE, command, files_of, preprocess, remains
from interrupted_runs import be_quick
from kills import killed_at

from megatron_sft_idx import open_dataset
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.tokenize import PackOptions, gather, pack_shard

PARTS = [f"x-0000{number}-of-00003" for number in range(3)]
THREE = ("--output-shards", 3)


@pytest.fixture(scope="module", autouse=True)
def quick():
    with pytest.MonkeyPatch.context() as patch:
        be_quick(patch)
        yield


def test_shards_hold_the_packs_of_one_in_their_order(tmp_path):
    assert preprocess(tmp_path / "one" / "x").code == 0
    done = preprocess(tmp_path / "three" / "x", *THREE, "--keep-corpus")
    assert done.code == 0, done
    assert "packs           42 " in done.out
    whole, cut = Shard(tmp_path / "one" / "x"), open_dataset(str(tmp_path / "three" / "x-*"))
    assert len(cut) == len(whole) == 42
    for number in range(42):
        for key, value in whole[number].items():
            assert np.array_equal(cut[number][key], value)
    packing = [Shard(tmp_path / "three" / name).header.metadata["packing"] for name in PARTS]
    assert [one.pop("part")["first_pack"] for one in packing] == [0, 14, 28]
    assert packing == [whole.header.metadata["packing"]] * 3
    packed = command(
        "pack",
        tmp_path / "three" / "x.unpacked",
        "--seq-length",
        1024,
        "--output-prefix",
        tmp_path / "pack" / "x",
        *THREE,
    )
    assert packed.code == 0, packed
    for name in PARTS:
        assert files_of(tmp_path / "pack" / name) == files_of(tmp_path / "three" / name)


def test_more_shards_than_packs_are_refused(tmp_path):
    refused = preprocess(tmp_path / "x", "--output-shards", 43)
    assert (refused.code, "42 packs are too few for --output-shards 43" in refused.err) == (1, True)


def test_another_number_of_shards_beside_them_is_refused(tmp_path):
    assert preprocess(tmp_path / "x", *THREE).code == 0
    refused = preprocess(tmp_path / "x", "--output-shards", 2)
    assert (refused.code, "-of-00003.seq.idx" in refused.err) == (1, True)
    packing = ("--seq-length", 1024, "--output-prefix", tmp_path / "x", "--output-shards", 2)
    refused = command("pack", tmp_path / PARTS[0], *packing)
    assert (refused.code, "-of-00003.seq.idx" in refused.err) == (1, True)
    again = preprocess(tmp_path / "x", *THREE, "--seed", 3)
    assert (again.code, "packing seed was 0, is 3" in again.err) == (1, True)


def killed_over_the_second(prefix, *options):
    """Return whether the run was killed while it wrote its second shard."""
    write_packs, written = gather.write_packs, []

    def dies(*arguments):
        written.append(arguments)
        if len(written) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        write_packs(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "write_packs", dies)
        return killed_at(10**9, lambda: preprocess(prefix, *options))


def test_new_shards_are_never_beside_those_they_replace(tmp_path):
    prefix, seed = tmp_path / "x", ("--seed", 3)
    assert preprocess(prefix, *THREE).code == 0
    before = {name: files_of(tmp_path / name) for name in PARTS}
    assert killed_over_the_second(prefix, *THREE, *seed, "--overwrite")
    # The old shards stay until all new ones are complete, also if a mistyped option is rejected.
    for slip in (("--seed", 5), seed):
        assert preprocess(prefix, *THREE, *slip).code == 1
        assert {name: files_of(tmp_path / name) for name in PARTS} == before
    assert preprocess(prefix, *THREE, *seed, "--overwrite").code == 0
    assert preprocess(tmp_path / "calm" / "x", *THREE, *seed).code == 0
    assert {name: files_of(tmp_path / name) for name in PARTS} == {
        name: files_of(tmp_path / "calm" / name) for name in PARTS
    }


def test_shards_that_are_done_are_kept_and_the_others_made(tmp_path):
    assert preprocess(tmp_path / "calm" / "x", *THREE).code == 0
    prefix = tmp_path / "shot" / "x"
    assert killed_over_the_second(prefix, *THREE)
    first = os.stat(prefix.parent / f"{PARTS[0]}.building/.bin").st_ino
    assert preprocess(prefix, *THREE).code == 0
    assert os.stat(prefix.parent / f"{PARTS[0]}.bin").st_ino == first
    assert remains(prefix.parent) == sorted(f"{name}{suffix}" for name in PARTS for suffix in MADE)
    for name in PARTS:
        assert files_of(prefix.parent / name) == files_of(tmp_path / "calm" / name)
    found = preprocess(prefix, *THREE)
    assert (found.code, found.out.startswith("found ")) == (0, True)


def test_a_shard_that_was_lost_is_made_again(tmp_path):
    prefix = tmp_path / "x"
    assert preprocess(prefix, *THREE, "--input", CHATS).code == 0
    before = {name: files_of(tmp_path / name) for name in PARTS}
    for suffix in MADE:
        (tmp_path / f"{PARTS[1]}{suffix}").unlink()
    assert preprocess(prefix, *THREE, "--input", CHATS).code == 0
    assert {name: files_of(tmp_path / name) for name in PARTS} == before


def test_a_pack_goes_on_with_what_an_interrupted_one_set_aside(tmp_path, monkeypatch):
    assert preprocess(tmp_path / "x", "--packing", "none").code == 0
    packing = str(tmp_path / "y"), PackOptions(capacity=1024)
    write_shard, written = gather.write_shard, []

    def interrupted(*arguments, **more):
        if written:
            raise KeyboardInterrupt
        written.append(write_shard(*arguments, **more))
        return written[0]

    with monkeypatch.context() as patch:
        patch.setattr(gather, "write_shard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pack_shard(Shard(tmp_path / "x"), *packing, shards=2)
    assert [name for name in remains(tmp_path) if name.startswith("y")] == ["y-00000-of-00002.building", "y.building"]
    first = os.stat(tmp_path / "y-00000-of-00002.building/.bin").st_ino
    pack_shard(Shard(tmp_path / "x"), *packing, shards=2)
    assert os.stat(tmp_path / "y-00000-of-00002.bin").st_ino == first
    assert not [name for name in remains(tmp_path) if name.endswith(".building")]
    assert pack_shard(Shard(tmp_path / "x"), *packing, shards=2).found
