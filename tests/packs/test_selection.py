"""Rows that are dropped, repeated or held out: the selection depends on their content, not on workers or run."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import CHATS, MADE, files_of, preprocess, remains, sequences_of, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupted_runs import be_quick
from kills import killed_at

from megatron_sft_idx.chat.types import Conversation
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.shard import Shard, read_header
from megatron_sft_idx.tokenize.selection import Selection, draw_lots, file_weights, row_hash, select_rows

ALL = ("--dedup", "exact", "--sample", 0.8, "--valid-fraction", 0.2, "--repeat", "*.jsonl=1.5", "--shuffle")


def contents_of(rows: list[tuple[int, int]]) -> np.ndarray:
    """Return the contents of sequences, for rows given as (content, number of sequences)."""
    made = []
    for says, sequences in rows:
        key = np.frombuffer(np.random.default_rng(says).bytes(16), "<u4")
        made += [[*key.tolist(), number] for number in range(sequences)]
    return np.array(made, np.uint32).reshape(-1, 5)


def rows_of(rows: list[tuple[int, int]], sequences: np.ndarray) -> list[int]:
    """Return the rows of these sequences. Check that each row is complete, contiguous and in order."""
    owner = [(row, number) for row, (_, count) in enumerate(rows) for number in range(count)]
    found, numbers = [], iter(sequences.tolist())
    for first in numbers:
        row, number = owner[first]
        assert number == 0
        assert [owner[next(numbers)] for _ in range(rows[row][1] - 1)] == [(row, n) for n in range(1, rows[row][1])]
        found.append(row)
    return found


def select(rows: list[tuple[int, int]], seed: int = 0, **options: Any) -> tuple[list[int], list[int], dict[str, int]]:
    contents = contents_of(rows)
    files = np.repeat(np.arange(len(rows)) % 2, [count for _, count in rows])
    found = select_rows(contents, files, Selection(**options), seed)
    return rows_of(rows, found.train), rows_of(rows, found.valid), found.counts


SOME = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3)), min_size=1, max_size=80)


@settings(deadline=None, max_examples=60)
@given(SOME, st.integers(0, 3), st.integers(1, 100))
def test_the_first_of_rows_that_say_the_same_is_taken_as_a_set_would(rows, seed, most):
    seen: set[int] = set()
    wanted = [number for number, (says, _) in enumerate(rows[:most]) if not (says in seen or seen.add(says))]
    train, valid, counts = select(rows, seed, dedup="exact", max_rows=most)
    assert (train, valid) == (wanted, [])
    assert counts["duplicates"] == min(most, len(rows)) - len(wanted)


@settings(deadline=None, max_examples=60)
@given(SOME, st.integers(0, 3), st.floats(0.1, 0.9))
def test_no_row_and_no_copy_of_one_is_on_both_sides_of_a_split(rows, seed, share):
    try:
        train, valid, counts = select(rows, seed, valid_fraction=share)
    except FormatError:  # all are on one side
        return
    assert sorted(train + valid) == list(range(len(rows)))
    assert not {rows[row][0] for row in train} & {rows[row][0] for row in valid}
    assert (counts["train"], counts["valid"]) == (len(train), len(valid))


@settings(deadline=None, max_examples=60)
@given(SOME, st.randoms(use_true_random=False), st.integers(0, 3))
def test_a_rows_lot_does_not_depend_on_the_other_rows(rows, chance, seed):
    def sides(given):
        try:
            train, valid, _ = select(given, seed, valid_fraction=0.4, sample=0.7)
        except FormatError:
            return None
        return {given[row][0] for row in train}, {given[row][0] for row in valid}

    mixed = chance.sample(rows, len(rows))
    assert sides(rows) == sides(mixed)
    if (whole := sides(rows)) and (half := sides(rows[::2])):
        assert half[0] <= whole[0]
        assert half[1] <= whole[1]


def test_shares_are_what_was_asked_for_larger_samples_hold_smaller_ones_and_seeds_differ():
    rows = [(number, 1) for number in range(4000)]
    samples = {share: set(select(rows, sample=share)[0]) for share in (0.1, 0.3, 0.9)}
    for share, taken in samples.items():
        assert abs(len(taken) / len(rows) - share) < 0.03
    assert samples[0.1] < samples[0.3] < samples[0.9]
    _, valid, _ = select(rows, valid_fraction=0.1)
    _, other, _ = select(rows, 1, valid_fraction=0.1)
    # Random choices for different purposes or seeds are independent.
    for independent in (samples[0.1], set(other)):
        assert abs(len(set(valid) & independent) / len(valid) - 0.1) < 0.06


def test_lots_are_even_though_only_one_half_of_the_keys_differ():
    low = np.stack([np.arange(8000, dtype=np.uint64), np.zeros(8000, np.uint64)], 1)
    for keys in (low, low[:, ::-1]):
        counts, _ = np.histogram(draw_lots(keys, 0, "sample"), 20, (0, 1))
        assert counts.sum() == 8000
        assert abs(counts - 400).max() < 100


@pytest.mark.parametrize("weight", [0, 0.25, 1, 1.5, 2, 3.1])
def test_a_weight_is_how_often_rows_of_a_file_come(weight):
    rows = [(number, 1 + number % 3) for number in range(2000)]
    train, _, counts = select(rows, weights=[weight, 1.0])
    times = Counter(train)
    weighted = [times[row] for row in range(0, len(rows), 2)]
    assert {times[row] for row in range(1, len(rows), 2)} == {1}
    assert set(weighted) <= {int(weight), int(weight) + (weight % 1 > 0)}
    assert abs(np.mean(weighted) - weight) < 0.06
    assert counts["weighted_out"] == weighted.count(0)
    assert counts["repeats"] == sum(max(count - 1, 0) for count in weighted)
    # A row is repeated only after all others have come.
    assert len(set(train[: len(times)])) == len(times)


def test_a_shuffle_is_a_permutation_of_whole_rows():
    rows = [(number, 1 + number % 3) for number in range(500)]
    train, _, _ = select(rows, shuffle=True)
    assert train != sorted(train) == list(range(500))
    assert select(rows, 1, shuffle=True)[0] != train


def test_weights_find_their_files():
    files = ["raw/a.jsonl", "raw/b.jsonl", "c.parquet"]
    assert file_weights("--weight", {"raw": 2, "c.parquet": 0.5}, files) == [2, 2, 0.5]
    assert file_weights("--weight", {"*.jsonl": 1.5}, files) == [1.5, 1.5, 1]
    assert file_weights("--weight", {"a.jsonl": np.float32(2)}, files) == [2, 1, 1]
    assert file_weights("--weight", {"data[1].jsonl": 2}, ["data[1].jsonl", "data1.jsonl"]) == [2, 1]
    for name, weight, said in (
        ("d.jsonl", 2, "no input file matches"),
        ("", 2, "expected FILE=WEIGHT"),
        ("raw/a.jsonl", -1, "expected FILE=WEIGHT"),
        ("raw/a.jsonl", float("nan"), "expected FILE=WEIGHT"),
        ("raw/a.jsonl", 1001, "expected FILE=WEIGHT"),
        ("raw/a.jsonl", True, "expected FILE=WEIGHT"),
        ("raw/a.jsonl", "2", "expected FILE=WEIGHT"),
    ):
        with pytest.raises(FormatError, match=said):
            file_weights("--weight", {name: weight}, files)
    with pytest.raises(FormatError, match=r"raw/a\.jsonl already has a weight"):
        file_weights("--weight", {"raw": 2, "raw/a.jsonl": 3}, files)


@pytest.mark.parametrize("entry", ["a.jsonl", "=2", "a.jsonl=x", "a.jsonl=1 a.jsonl=2"])
def test_a_weight_of_the_command_that_is_none(entry: str, tmp_path: Path) -> None:
    refused = preprocess(tmp_path / "x", "--repeat", *entry.split(), rows=[])
    assert refused.code == 2
    assert re.search(r"argument --repeat: .*(expected FILE=WEIGHT|is given twice)", refused.err)


def test_rows_say_the_same_whatever_they_are_called():
    from megatron_sft_idx.chat.chat_rows import to_sequence_source

    def hashed(row):
        return row_hash([to_sequence_source(row)]).tobytes()

    turns = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes."}]
    spoken = [{"from": "human", "value": "Is it?"}, {"from": "gpt", "value": "Yes."}]
    same = [{"messages": turns}, {"id": 7, "conversations": spoken}, {"instruction": "Is it?", "output": "Yes."}]
    assert len({hashed(row) for row in same}) == 1
    weighted = [turns[0], {**turns[1], "weight": 0.5}]
    system = [{"role": "system", "content": ""}, *turns]
    tools = {"messages": turns, "tools": [{"name": "f"}]}
    odd = {"messages": [{**turns[0], "seen": 2**70, "said": "\ud800"}, turns[1]]}
    ids = [{"input_ids": [1, 2], "loss_mask": mask} for mask in ([0, 1], [0, 0.5])]
    others = [same[0], {"messages": weighted}, {"messages": system}, tools, odd, *ids]
    assert len({hashed(row) for row in others}) == len(others)


def test_answers_that_are_judged_otherwise_are_no_duplicates_and_share_their_lot():
    hashes = [row_hash([Conversation([{"role": "user", "content": "?"}], [1.0])], label) for label in (0, 1)]
    contents = np.array([[*words, 0] for words in hashes], np.uint32)
    assert len(select_rows(contents, np.zeros(2, int), Selection(dedup="exact"), 0).train) == 2
    keys = np.ascontiguousarray(contents[:, :4]).view("<u8")
    assert len(set(draw_lots(keys, 0, "valid"))) == 1


# ---- whole runs ----


def chats() -> list[Any]:
    return [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()]


def both(prefix: Path) -> list[dict[str, bytes]]:
    return [files_of(prefix), files_of(Path(f"{prefix}.valid"))]


def said(prefix: Path) -> list[set[bytes]]:
    """Return the sequences on each side."""
    return [{ids.tobytes() for ids, _ in sequences_of(at)} for at in (prefix, Path(f"{prefix}.valid"))]


def test_a_run_counts_what_a_naive_set_counts_and_splits_without_a_leak(tmp_path):
    rows = [*chats(), *({**row, "id": number} for number, row in enumerate(chats()[:100]))]
    random.Random(0).shuffle(rows)
    summary = tmp_path / "summary.json"
    done = preprocess(tmp_path / "x", "--dedup", "exact", "--valid-fraction", 0.2, "--summary", summary, rows=rows)
    assert done.code == 0, done.err
    unique = {json.dumps(row["messages"], sort_keys=True) for row in rows}
    counts = json.loads(summary.read_text())
    selected = counts["packing"]["selected"]
    assert selected["duplicates"] == len(rows) - len(unique)
    assert selected["train"] + selected["valid"] == len(unique)
    assert counts["packing"]["sequences"] + counts["valid"]["sequences"] == len(unique)
    assert f"duplicates    {selected['duplicates']} left out" in done.out
    assert f"validation      {selected['valid']} sequences" in done.out
    train, valid = said(tmp_path / "x")
    assert not train & valid
    assert Shard(tmp_path / "x.valid").header.num_sequences == selected["valid"]
    # Repeated rows change the counts, but not the side of a row.
    preprocess(tmp_path / "y", "--valid-fraction", 0.2, rows=rows)
    assert said(tmp_path / "y") == [train, valid]


def test_the_turns_of_a_conversation_stay_on_one_side(tmp_path):
    turns = ("--earlier-reasoning", "split", "--overlong", "split", "--seq-length", 200)
    assert preprocess(tmp_path / "x", *turns, "--valid-fraction", 0.3, "--packing", "none").code == 0
    assert preprocess(tmp_path / "y", *turns, "--packing", "none").code == 0
    everything = [ids.tobytes() for ids, _ in sequences_of(tmp_path / "y")]
    sides = [[ids.tobytes() for ids, _ in sequences_of(tmp_path / name)] for name in ("x", "x.valid")]
    assert sorted(sides[0] + sides[1]) == sorted(everything)


def test_the_first_rows_are_taken_and_no_more_are_read_than_must_be(tmp_path, monkeypatch):
    be_quick(monkeypatch)
    assert preprocess(tmp_path / "all/x", "--packing", "none").code == 0
    everything = [ids.tolist() for ids, _ in sequences_of(tmp_path / "all/x")]
    summaries = []
    for workers in (0, 2):
        at, summary = tmp_path / f"{workers}/x", tmp_path / f"{workers}.json"
        given = ("--max-rows", 10, "--packing", "none", "--workers", workers, "--summary", summary)
        done = preprocess(at, *given)
        assert done.code == 0, done.err
        assert [ids.tolist() for ids, _ in sequences_of(at)] == everything[:10]
        assert preprocess(at, *given).out.startswith("found ")
        summaries.append({name: json.loads(summary.read_text())[name] for name in ("packing", "valid")})
    assert files_of(tmp_path / "0/x") == files_of(tmp_path / "2/x")
    assert summaries[0] == summaries[1]
    assert 10 <= read_header(tmp_path / "0/x").metadata["sources"]["rows"] < len(everything) / 2


def test_workers_shards_and_a_kill_change_nothing(tmp_path, monkeypatch):
    be_quick(monkeypatch)
    source = write_rows(tmp_path / "rows.jsonl", [*chats()[:40], *chats()[:10]])
    given = ("--input", source, *ALL, "--drop-untrained", "--output-shards", 2)
    assert preprocess(tmp_path / "calm/x", *given).code == 0
    names = ["x-00000-of-00002", "x-00001-of-00002", "x.valid"]
    calm = [files_of(tmp_path / "calm" / name) for name in names]
    assert preprocess(tmp_path / "two/x", *given, "--workers", 2).code == 0
    assert [files_of(tmp_path / "two" / name) for name in names] == calm
    step = 3
    for step in itertools.count(3, 23):
        at = tmp_path / f"step-{step}"
        at.mkdir()
        if not killed_at(step, lambda at=at: preprocess(at / "x", *given)):
            break
        resumed = preprocess(at / "x", *given)
        assert resumed.code == 0, resumed.err
        assert [files_of(at / name) for name in names] == calm
        assert remains(at) == sorted(name + suffix for name in names for suffix in MADE)
    assert step > 60


@pytest.mark.parametrize("changed", [("--sample", 0.7), ("--valid-fraction", 0.3), ("--seed", 1), ("--shuffle",)])
def test_a_run_may_go_on_with_another_selection(changed, tmp_path, monkeypatch):
    be_quick(monkeypatch)
    source = write_rows(tmp_path / "rows.jsonl", chats()[:40])
    given = ("--input", source, "--valid-fraction", 0.2)
    assert killed_at(20, lambda: preprocess(tmp_path / "x", *given))
    assert [*tmp_path.glob("x.building/parts/*.part")]
    other = (*given, *changed)
    done = preprocess(tmp_path / "x", *other)
    assert (done.code, "parts reused" in done.err) == (0, True), done
    assert preprocess(tmp_path / "calm", *other).code == 0
    for end in ("", ".valid"):
        assert files_of(tmp_path / f"x{end}") == files_of(tmp_path / f"calm{end}")
    found = preprocess(tmp_path / "x", *other)
    assert found.out.startswith("found ")
    assert "used for validation (--valid-fraction)" in found.out
    assert ".valid\n" in found.out


def test_pairs_are_chosen_as_a_whole(tmp_path):
    turn, answers = {"role": "user", "content": "Is it?"}, ("Yes.", "No, it is not.")
    rows = [
        {"prompt": [{**turn, "content": f"Is it {n // 2}?"}], "chosen": answers[n % 2], "rejected": answers[1 - n % 2]}
        for n in range(60)
    ]
    given = ("--row-kind", "preference", "--valid-fraction", 0.3, "--sample", 0.7, "--dedup", "exact")
    done = preprocess(tmp_path / "x", *given, rows=[*rows, *rows[:20]])
    assert done.code == 0, done.err
    assert "duplicates    20 left out" in done.out
    numbers = [Shard(at, columns=["pair"]).columns["pair"].values[:] for at in (tmp_path / "x", tmp_path / "x.valid")]
    for pairs in numbers:
        assert (pairs[::2, 0] == pairs[1::2, 0]).all()
        assert (pairs[:, 1] == np.arange(len(pairs)) % 2).all()
    assert not set(numbers[0][:, 0].tolist()) & set(numbers[1][:, 0].tolist())
    refused = preprocess(tmp_path / "y", "--row-kind", "preference", "--repeat", "*=2", rows=rows)
    assert (refused.code, "a preference pair can be trained on only once" in refused.err) == (1, True)


@pytest.mark.parametrize("corpus", [(), ("--keep-corpus",)])
def test_what_trains_nothing_is_left_out(corpus, tmp_path):
    given = ("--overlong", "split", "--seq-length", 48, *corpus)
    assert preprocess(tmp_path / "x", *given).code == 0
    plain = preprocess(tmp_path / "y", *given, "--overwrite")
    said = "without a token to train on: inspect lists such packs, --drop-untrained leaves such sequences out"
    assert said in plain.out
    dropped = preprocess(tmp_path / "z", *given, "--drop-untrained")
    assert "warning" not in dropped.out
    shard, whole = Shard(tmp_path / "z"), Shard(tmp_path / "x")
    assert shard.header.num_masked_packs == 0
    assert shard.header.num_trained_tokens == whole.header.num_trained_tokens
    untrained = [ids for ids, mask in sequences_of(tmp_path / "x") if not mask.any()]
    counts = shard.header.metadata["packing"]["selected"]
    assert counts["untrained_sequences"] == len(untrained) == whole.header.num_sequences - shard.header.num_sequences
    assert counts["untrained_tokens"] == sum(map(len, untrained))
    assert f"untrained     {len(untrained)} sequences" in dropped.out
    assert all(mask.any() for _, mask in sequences_of(tmp_path / "z"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--sample", 0), "--sample 0.0: expected a share"),
        (("--sample", 1.5), "--sample 1.5: expected a share"),
        (("--sample", "nan"), "--sample nan: expected a share"),
        (("--valid-fraction", -0.1), "--valid-fraction -0.1: expected a share"),
        (("--valid-fraction", 1), "leaves no rows for training"),
        (("--valid-fraction", 1e-9), "is left to validate with"),
        (("--sample", 1e-9), "is left to train on"),
        (("--max-rows", 5, "--keep-corpus"), "--keep-corpus stores the sequences of all rows"),
        (("--repeat", "other.jsonl=2"), "no input file matches"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(options, said, tmp_path):
    refused = preprocess(tmp_path / "x", *options)
    assert refused.code in (1, 2)
    assert said in refused.err
    # The next run can use the tokenised parts.
    assert set(remains(tmp_path)) <= {"x.building"}
