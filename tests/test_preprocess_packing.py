"""Overlong sequences, the corpus between two runs, and packing anew."""

from __future__ import annotations

import json
import random
from functools import partial

import numpy as np
import pytest
from chats import MADE, ROOT, command, files_of, preprocess, remains, sequences_of

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.tokenize import PackOptions, num_kept_tokens
from megatron_sft_idx.tokenize.plan import SequenceReader, plan_packs

LONG = [{"prompt": "Count.", "completion": " ".join(map(str, range(400)))}, {"prompt": "Hi", "completion": "Hello"}]


class LengthsAlone(SequenceReader):
    """A reader of sequences in which nothing is trained on."""

    def _by_file(self, sequences):
        return iter(())

    def count_trained(self, sequences, positions):
        return 0


def test_overlong_is_an_error_that_keeps_the_corpus_for_the_next_run(tmp_path):
    failed = preprocess(tmp_path / "x", rows=LONG, capacity=256)
    assert failed.code == 1
    assert "1 of 2 sequences are longer than 256 tokens, the longest has" in failed.err
    assert "--overlong drop, truncate or split" in failed.err
    assert remains(tmp_path) == ["x.parts"]
    again = preprocess(tmp_path / "x", "--overlong", "split", rows=LONG, capacity=256)
    assert again.code == 0, again
    assert "corpus reused" in again.out
    assert remains(tmp_path) == sorted(f"x{suffix}" for suffix in MADE)


def test_a_corpus_of_other_input_is_not_reused(tmp_path):
    assert preprocess(tmp_path / "x", rows=LONG, capacity=256).code == 1
    other = preprocess(tmp_path / "x", "--overlong", "drop", rows=LONG[::-1], capacity=256)
    assert other.code == 1
    assert "the content of the input was " in other.err
    other = preprocess(tmp_path / "x", "--overlong", "drop", "--append-eod", rows=LONG, capacity=256)
    assert other.code == 1
    assert "append eod was False, is True" in other.err
    assert preprocess(tmp_path / "x", "--overlong", "drop", "--overwrite", rows=LONG[::-1], capacity=256).code == 0


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


@pytest.mark.parametrize("overlong", ["drop", "truncate", "split"])
@pytest.mark.parametrize("workers", [0, 2])
def test_trained_tokens_are_in_the_shard_or_counted_as_lost(tmp_path, overlong, workers):
    words = random.Random(workers)
    rows = [{"prompt": "Say it.", "completion": "So be it."}]
    for _ in range(60):
        ids = [words.randrange(3, 200) for _ in range(words.randrange(2, 90))]
        rows.append({"input_ids": ids, "loss_mask": [words.choice([0, 1, 1, 0.5]) for _ in ids]})
    rest = ("--overlong", overlong, "--on-bad-row", "skip")

    def trained(name, *more, capacity=4096):
        done = preprocess(tmp_path / name, *more, "--summary", tmp_path / f"{name}.json", rows=rows, capacity=capacity)
        assert done.code == 0, done
        counts = json.loads((tmp_path / f"{name}.json").read_text())["packing"]
        stored = sum(np.count_nonzero(mask) for _, mask in sequences_of(tmp_path / name))
        return stored, counts, done

    whole, counts, _ = trained("whole", "--packing", "none", "--on-bad-row", "skip")
    assert counts["lost_trained_tokens"] == 0
    for capacity in (16, 33, 64):
        stored, counts, done = trained(f"cut{capacity}", *rest, "--workers", workers, capacity=capacity)
        assert stored + counts["lost_trained_tokens"] == whole
        assert counts["lost_trained_tokens"] > 0
        assert f"{counts['lost_trained_tokens']:,} trained tokens lost" in done.out
        # The same of packs that are made of an unpacked shard.
        prefix = tmp_path / f"packed{capacity}"
        summary = ("--summary", tmp_path / "packed.json", "--overwrite")
        done = command(
            "pack",
            tmp_path / "whole",
            "--seq-length",
            capacity,
            "--output-prefix",
            prefix,
            "--overlong",
            overlong,
            *summary,
        )
        assert done.code == 0, done
        packed = sum(np.count_nonzero(mask) for _, mask in sequences_of(prefix))
        lost = json.loads((tmp_path / "packed.json").read_text())["packing"]["lost_trained_tokens"]
        assert (packed, lost) == (stored, counts["lost_trained_tokens"])


def test_answers_that_truncation_cuts_off_are_counted(tmp_path):
    lines = (ROOT / "tests/rows/truncated_answers.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    whole = preprocess(tmp_path / "whole", "--packing", "none", rows=rows, capacity=4096)
    done = preprocess(tmp_path / "x", "--overlong", "truncate", rows=rows, capacity=64)
    assert (whole.code, done.code) == (0, 0), done
    trained = [sum(np.count_nonzero(mask) for _, mask in sequences_of(tmp_path / name)) for name in ("whole", "x")]
    assert trained[0] > trained[1]
    assert f"{trained[0] - trained[1]:,} trained tokens lost" in done.out


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
    # The corpus packed now is the shard that preprocess made then.
    assert command("pack", tmp_path / "x.unpacked", "--seq-length", 1024, "--output-prefix", tmp_path / "y").code == 0
    assert files_of(tmp_path / "x") == files_of(tmp_path / "y")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--packing", "none", "--packing-effort", "high"], "--packing-effort high goes with --packing auto, not none"),
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
        with pytest.raises(SequenceError, match="1 of 3 sequences are longer than 10 tokens"):
            planned(lengths, PackOptions(10), reader=reader)
