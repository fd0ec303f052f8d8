"""Overlong sequences, the corpus kept between runs, and repacking."""

from __future__ import annotations

import json
import random
import re
from functools import partial

import numpy as np
import pytest
from chats import MADE, ROOT, command, files_of, preprocess, remains, sequences_of

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.tokenize import PackOptions, num_kept_tokens, output_prefixes
from megatron_sft_idx.tokenize.plan import SequenceReader, find_overlong, plan_packs

LONG = [{"prompt": "Count.", "completion": " ".join(map(str, range(400)))}, {"prompt": "Hi", "completion": "Hello"}]


class LengthsAlone(SequenceReader):
    """A reader of sequences without trained tokens."""

    def _by_file(self, sequences):
        return iter(())

    def count_trained(self, sequences, positions):
        return 0


def test_overlong_is_an_error_that_keeps_the_corpus_for_the_next_run(tmp_path):
    failed = preprocess(tmp_path / "x", rows=LONG, capacity=256)
    assert failed.code == 1
    assert "1 of 2 sequences is longer than 256 tokens: rows.jsonl:1 (" in failed.err
    assert "--overlong drop, truncate or split" in failed.err
    assert remains(tmp_path) == ["x.building"]
    again = preprocess(tmp_path / "x", "--overlong", "split", rows=LONG, capacity=256)
    assert again.code == 0, again
    assert "corpus reused" in again.out
    assert remains(tmp_path) == sorted(f"x{suffix}" for suffix in MADE)


def test_parts_of_other_input_or_options_are_not_used(tmp_path):
    assert preprocess(tmp_path / "x", rows=LONG, capacity=256).code == 1
    other = preprocess(tmp_path / "x", "--overlong", "drop", "--append-eod", rows=LONG, capacity=256)
    assert other.code == 1
    assert "append eod was False, is True" in other.err
    other = preprocess(tmp_path / "x", "--overlong", "drop", rows=LONG[::-1], capacity=256)
    assert (other.code, "reused" in other.out + other.err) == (0, False), other


@pytest.mark.parametrize("multiple", [1, 16])
def test_overlong_drop_truncate_split(tmp_path, multiple):
    assert preprocess(tmp_path / "whole", "--packing", "none", rows=LONG, capacity=4096).code == 0
    (long, long_mask), (short, short_mask) = sequences_of(tmp_path / "whole")

    def run(overlong):
        done = preprocess(
            tmp_path / overlong, "--overlong", overlong, "--packing", "sequential", "--sequence-multiple", multiple,
            "--summary", tmp_path / f"{overlong}.json", rows=LONG, capacity=250,
        )  # fmt: skip
        assert done.code == 0, done
        return sequences_of(tmp_path / overlong), json.loads((tmp_path / f"{overlong}.json").read_text())["packing"]

    limit = 250 // multiple * multiple
    dropped, counts = run("drop")
    assert [ids.tolist() for ids, _ in dropped] == [short.tolist()]
    assert (counts["overlong"], counts["dropped_tokens"]) == (1, len(long))
    assert counts["lost_trained_tokens"] == np.count_nonzero(long_mask[1:])

    truncated, counts = run("truncate")
    assert [ids.tolist() for ids, _ in truncated] == [long[:limit].tolist(), short.tolist()]
    assert truncated[0][1].tolist() == long_mask[:limit].tolist()
    assert (counts["overlong"], counts["dropped_tokens"]) == (1, len(long) - limit)
    assert counts["lost_trained_tokens"] == np.count_nonzero(long_mask[limit:])

    split, counts = run("split")
    assert np.concatenate([ids for ids, _ in split]).tolist() == [*long.tolist(), *short.tolist()]
    cuts = range(limit, len(long), limit)
    expected = long_mask.copy()
    expected[list(cuts)] = 0  # nothing in the same sequence predicts the first token after a cut
    assert np.concatenate([mask for _, mask in split]).tolist() == [*expected.tolist(), *short_mask.tolist()]
    assert (counts["overlong"], counts["dropped_tokens"]) == (1, 0)
    assert counts["lost_trained_tokens"] == sum(int(long_mask[cut] != 0) for cut in cuts)


# Words in messages for the ways of losing trained tokens.
WAYS = {"drop": "dropping", "truncate": "truncation", "split": "splitting"}


@pytest.mark.parametrize(("overlong", "stored", "lost"), [("drop", 5, 40), ("truncate", 5, 40), ("split", 45, 0)])
def test_answers_that_lie_behind_the_cut_are_counted(tmp_path, overlong, stored, lost):
    rows = ROOT / "tests/rows/truncated_answers.jsonl"
    done = preprocess(tmp_path / "x", "--input", rows, "--overlong", overlong, capacity=64)
    assert done.code == 0, done
    assert f", {lost} trained tokens lost to {WAYS[overlong]}\n" in done.out
    assert Shard(tmp_path / "x").header.num_trained_tokens == stored


def mixed_rows(seed):
    """Return chats and rows of ids with weights, of random lengths."""
    draw = random.Random(seed)
    for _ in range(40):
        ids = [draw.randrange(3, 200) for _ in range(draw.randrange(2, 90))]
        yield {"input_ids": ids, "loss_mask": [draw.choice([0, 1, 1, 0.5]) for _ in ids]}
        words = [" ".join(draw.choices(["tea", "red", "seven", "on"], k=draw.randrange(1, 40))) for _ in range(4)]
        yield {"messages": [{"role": ("user", "assistant")[at % 2], "content": of} for at, of in enumerate(words)]}


def pairs_of_answers(seed):
    """Return preference pairs of random lengths."""
    draw = random.Random(seed)
    for number in range(60):
        chosen, rejected = (" ".join(["so"] * draw.randrange(1, 40)) for _ in range(2))
        yield {"prompt": f"{number}?", "chosen": f"{chosen} yes", "rejected": f"{rejected} no"}


# Rows, and options that are used with and without a limit.
JOBS = [
    pytest.param(mixed_rows, (), id="all rows"),
    pytest.param(mixed_rows, ("--repeat", "*.jsonl=2.5", "--dedup", "exact", "--shuffle"), id="repeated rows"),
    pytest.param(mixed_rows, ("--valid-fraction", 0.3, "--sample", 0.8), id="validation"),
    pytest.param(mixed_rows, ("--drop-untrained", "--sequence-multiple", 4), id="no untrained ones"),
    pytest.param(mixed_rows, ("--train-on", "all", "--span-by-span", "--append-eod"), id="all trained"),
    pytest.param(mixed_rows, ("--loss-weight", "*.jsonl=0.25", "--keep-corpus", "--output-shards", 2), id="weights"),
    pytest.param(pairs_of_answers, ("--row-kind", "preference"), id="pairs"),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("make", "options"), JOBS)
@pytest.mark.parametrize("workers", [0, 2])
def test_trained_tokens_are_in_the_shard_or_counted_as_lost(tmp_path, make, options, workers):
    """The oracle is the number of nonzero weights of the same rows without cuts."""
    rows = [*make(workers)]

    def counted(prefix, done):
        """Return the trained tokens stored and counted as lost, for training and validation together."""
        assert done.code == 0, done
        summary = json.loads((tmp_path / "summary.json").read_text())
        for shard, part in (("", "packing"), (".valid", "valid")):
            if counts := summary[part]:
                prefixes = output_prefixes(f"{prefix}{shard}", summary["shards"])
                masks = [mask for one in prefixes for _, mask in sequences_of(one)]
                yield sum(map(np.count_nonzero, masks)), counts["lost_trained_tokens"]
                if counts["overlong"]:
                    assert f" {counts['lost_trained_tokens']:,} trained tokens lost to {WAYS[overlong]}\n" in done.out

    common = (*options, "--summary", tmp_path / "summary.json", "--overwrite")
    overlong = ""
    done = preprocess(tmp_path / "whole", *common, "--max-sequences-per-pack", 4, rows=rows, capacity=4096)
    whole = [*counted(tmp_path / "whole", done)]
    assert [lost for _, lost in whole] == [0] * len(whole)
    for overlong in ["drop"] if make is pairs_of_answers else [*WAYS]:
        for capacity in (64, 80) if make is pairs_of_answers else (33,) if workers else (33, 64):
            cut = (*common, "--overlong", overlong, "--workers", workers)
            done = preprocess(tmp_path / "cut", *cut, rows=rows, capacity=capacity)
            found = [*counted(tmp_path / "cut", done)]
            assert [stored + lost for stored, lost in found] == [stored for stored, _ in whole]
            assert all(lost for _, lost in found)


@pytest.mark.parametrize("overlong", [*WAYS])
def test_pack_counts_lost_trained_tokens_as_preprocess_does(tmp_path, overlong):
    for seed in range(3):
        cut = ("--overlong", overlong, "--summary", tmp_path / "summary.json", "--overwrite", "--seq-length", 33 + seed)
        rows = [*mixed_rows(seed)]
        source = tmp_path / f"all{seed}"
        assert preprocess(source, "--packing", "none", rows=rows, capacity=4096).code == 0
        direct = preprocess(tmp_path / "direct", *cut, rows=rows)
        counts = json.loads((tmp_path / "summary.json").read_text())["packing"]
        packed = command("pack", source, "--output-prefix", tmp_path / "packed", *cut)
        assert packed.code == direct.code == 0, packed
        found = json.loads((tmp_path / "summary.json").read_text())["packing"]
        names = ("overlong", "dropped_tokens", "lost_trained_tokens", "trained_tokens")
        assert [found[name] for name in names] == [counts[name] for name in names]
        whole = Shard(source).header.num_trained_tokens
        assert whole == counts["lost_trained_tokens"] + Shard(tmp_path / "packed").header.num_trained_tokens
        assert f" {counts['lost_trained_tokens']:,} trained tokens lost to {WAYS[overlong]}\n" in packed.out


def test_pack_repacks_packs_without_tokens_lost(tmp_path):
    assert preprocess(tmp_path / "x", "--keep-corpus").code == 0
    for source in ("x", "x.unpacked"):
        done = command("pack", tmp_path / source, "--seq-length", 2048, "--output-prefix", tmp_path / f"{source}-2k")
        assert done.code == 0, done
        assert "rows" not in done.out
    whole = sorted((ids.tobytes(), mask.tobytes()) for ids, mask in sequences_of(tmp_path / "x.unpacked"))
    for prefix in ("x", "x-2k", "x.unpacked-2k"):
        assert sorted((a.tobytes(), m.tobytes()) for a, m in sequences_of(tmp_path / prefix)) == whole
    assert len(Shard(tmp_path / "x-2k")) < len(Shard(tmp_path / "x"))
    # Packing the corpus gives the same shard as preprocess.
    assert command("pack", tmp_path / "x.unpacked", "--seq-length", 1024, "--output-prefix", tmp_path / "y").code == 0
    assert files_of(tmp_path / "x") == files_of(tmp_path / "y")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--packing", "none", "--packing-effort", "high"], "--packing-effort high needs --packing auto, not none"),
        (["--sequence-multiple", "512"], "--seq-length 256 is below --sequence-multiple 512"),
    ],
)
def test_options_that_no_plan_can_keep_are_told_before_anything_is_tokenised(tmp_path, options, said):
    refused = preprocess(tmp_path / "x", *options, rows=LONG, capacity=256)
    assert (refused.code, said in refused.err, remains(tmp_path)) == (2, True, []), refused
    refused = command("pack", tmp_path / "x", "--seq-length", 256, *options, "--output-prefix", tmp_path / "y")
    assert (refused.code, said in refused.err) == (2, True), refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"overlong": "Drop"}, "overlong: 'Drop', choose one of error, drop, truncate, split"),
        ({"method": "best"}, "method: 'best', choose one of auto, best-fit, .*, none"),
        ({"effort": "High"}, "effort: 'High', choose one of normal, high"),
        ({"capacity": 0}, "capacity: 0, expected a whole number from 1 to 2147483647"),
        ({"capacity": True}, "capacity: True, expected a whole number"),
        ({"capacity": 100.0}, "capacity: 100.0, expected a whole number"),
        ({"sequence_multiple": 0}, "sequence_multiple: 0, expected a whole number from 1"),
        ({"max_sequences_per_pack": 0}, "max_sequences_per_pack: 0, expected a whole number from 1"),
        ({"seed": -1}, "seed: -1, expected a whole number from 0"),
    ],
)
def test_a_program_is_told_of_options_that_are_none_before_a_sequence_is_cut(options, said):
    with pytest.raises(FormatError, match=said):
        PackOptions(**{"capacity": 10} | options)


def test_the_tokens_that_are_kept_are_those_of_the_plan():
    lengths, reader = np.array([5, 25, 3]), LengthsAlone()
    for overlong, kept in (("drop", 8), ("truncate", 18), ("split", 33)):
        options = PackOptions(10, overlong=overlong)
        assert num_kept_tokens(lengths, options, reader) == kept
        assert plan_packs(lengths, options, shards=1, name="x").run.lengths.sum() == kept
    for planned in (num_kept_tokens, partial(plan_packs, shards=1, name="x")):
        with pytest.raises(
            SequenceError, match=r"1 of 3 sequences is longer than 10 tokens: sequence 1 \(25 tokens\);"
        ):
            planned(lengths, PackOptions(10), reader=reader)


def long_rows(*numbers):
    return [{"prompt": "Count.", "completion": " ".join(map(str, range(number)))} for number in numbers]


def test_overlong_rows_are_named_longest_first(tmp_path):
    rows = long_rows(5, 200, 300, 5, 250, 220, 400)
    failed = preprocess(tmp_path / "x", rows=rows, capacity=256)
    named = re.search(r"5 of 7 sequences are longer than 256 tokens: (.*) and 2 more; choose --overlong", failed.err)
    assert named, failed
    places = re.findall(r"(\S+) \((\d+) tokens\)", named[1])
    assert [place for place, _ in places] == ["rows.jsonl:7", "rows.jsonl:3", "rows.jsonl:5"]
    assert preprocess(tmp_path / "x", "--dry-run", rows=rows, capacity=256).out.count(named[1]) == 1
    assert preprocess(tmp_path / "x", "--dry-run", "--full", rows=rows, capacity=256).out.count(named[1]) == 1

    given = ("--overlong", "drop", "--keep-corpus", "--summary", tmp_path / "s.json")
    made = preprocess(tmp_path / "x", *given, rows=rows, capacity=256)
    assert re.search("^overlong        5 sequences dropped: ", made.out, re.M), made
    assert f"  longest       {named[1]}\n" in made.out
    listed = json.loads((tmp_path / "s.json").read_text())["packing"]["overlong_rows"]
    assert [[place, int(tokens)] for place, tokens in places] == listed[:3]
    assert [place for place, _ in listed[3:]] == ["rows.jsonl:6", "rows.jsonl:2"]
    dry = preprocess(tmp_path / "y", "--overlong", "drop", "--dry-run", "--full", rows=rows, capacity=256)
    assert f"  overlong      5 sequences, the longest: {named[1]}\n" in dry.out
    again = command("pack", tmp_path / "x.unpacked", "--seq-length", 256, "--output-prefix", tmp_path / "z")
    assert (again.code, named[1] in again.err) == (1, True)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([1, 1, 2, 3], r"4 of 5 .*: r:1 \(40 tokens\), r:2 \(38 tokens\), r:3 \(37 tokens\); choose"),
        ([1, 1, 1, 1], r"4 of 5 .*: r:1 \(40 tokens\); choose"),
        ([1, 2, 1, 3, 4, 4], r"6 of 7 .*: r:1 \(40 tokens\), r:2 \(39 tokens\), r:3 \(37 tokens\) and 2 more; choose"),
    ],
)
def test_a_row_with_several_overlong_sequences_is_named_once(rows, said):
    lengths = np.array([*range(40, 40 - len(rows), -1), 5])
    with pytest.raises(SequenceError, match=said):
        find_overlong(lengths, None, PackOptions(10), "x", lambda number: f"r:{rows[number]}")


def test_one_overlong_sequence_is_counted_in_the_singular(tmp_path):
    made = preprocess(tmp_path / "x", "--no-source", "--overlong", "split", rows=long_rows(5, 300), capacity=256)
    assert re.search(
        r"^overlong        1 sequence split: 0 tokens left out, \d+ trained tokens? lost", made.out, re.M
    ), made
    assert re.search(r"^  longest       sequence 1 \(\d+ tokens\)$", made.out, re.M), made
