"""``--row-kind preference`` and ``kto``: pairs stay together, and verdicts are stored in columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import TOKENIZER, command, preprocess, sequences_of, write_rows

from megatron_sft_idx.shard import Shard

PREFERENCE, KTO = ("--row-kind", "preference"), ("--row-kind", "kto")


def words(*counts: int) -> list[str]:
    return [" ".join(f"w{i * 7 + n}" for i in range(count)) for n, count in enumerate(counts)]


def pairs(count: int, longest: int = 40, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of every common shape, with answers of different lengths."""
    rows: list[dict[str, Any]] = []
    for number, lengths in enumerate(np.random.default_rng(seed).integers(1, longest, (count, 3)).tolist()):
        prompt, chosen, rejected = (f"{number} {text}" for text in words(*lengths))
        shapes = [
            {"prompt": prompt, "chosen": f"yes {chosen}", "rejected": f"no {rejected}"},
            {
                "conversations": [{"from": "human", "value": prompt}],
                "chosen": {"from": "gpt", "value": f"yes {chosen}"},
                "rejected": {"from": "gpt", "value": f"no {rejected}"},
            },
            {
                name: [{"role": "user", "content": prompt}, {"role": "assistant", "content": f"{word} {answer}"}]
                for name, word, answer in (("chosen", "yes", chosen), ("rejected", "no", rejected))
            },
        ]
        rows.append(shapes[number % 3])
    return rows


def columned(prefix: Path) -> dict[str, bytes]:
    """Return the bytes of a shard, including columns."""
    return {
        path.name.removeprefix(prefix.name): path.read_bytes()
        for path in prefix.parent.glob(f"{prefix.name}.*")
        if "unpacked" not in path.name
    }


def pairs_of(prefix: Path) -> dict[int, tuple[bytes, bytes, bytes, bytes]]:
    """Return ids and masks of chosen and rejected by pair number. Check that each pack holds only complete pairs."""
    shard, found = Shard(prefix, columns=("pair",)), {}
    for number in range(len(shard)):
        column, sequences = shard[number]["pair"], shard.sequences(number)
        assert column[::2, 0].tolist() == column[1::2, 0].tolist()
        assert column[:, 1].tolist() == [0, 1] * (len(column) // 2)
        for at in range(0, len(sequences), 2):
            both = (array.tobytes() for one in sequences[at : at + 2] for array in one)
            assert found.setdefault(int(column[at, 0]), made := tuple(both)) == made
    return found


def test_a_row_is_two_sequences_beside_each_other_of_which_the_answers_are_trained(tmp_path):
    rows = pairs(40)
    done = preprocess(tmp_path / "x", *PREFERENCE, "--keep-corpus", rows=rows, capacity=512)
    assert done.code == 0, done
    found, whole = pairs_of(tmp_path / "x"), pairs_of(tmp_path / "x.unpacked")
    assert found == whole
    assert sorted(found) == list(range(40))
    assert [len(Shard(tmp_path / "x.unpacked").sequences(number)) for number in range(40)] == [2] * 40
    # The same conversations as separate chats, trained on the answer.
    for kind in ("chosen", "rejected"):
        alone = [
            {"prompt": [{"role": "user", "content": _prompt(row)}], "completion": [_answer(row[kind])]} for row in rows
        ]
        assert preprocess(tmp_path / kind, "--packing", "none", rows=alone, capacity=512).code == 0
        for number, (ids, mask) in enumerate(Shard(tmp_path / kind).sequences(i)[0] for i in range(40)):
            at = 0 if kind == "chosen" else 2
            assert (ids.tobytes(), mask.tobytes()) == found[number][at : at + 2]


def _prompt(row: dict[str, Any]) -> str:
    if "prompt" in row:
        return str(row["prompt"])
    return str(row["conversations"][0]["value"] if "conversations" in row else row["chosen"][0]["content"])


def _answer(answer: Any) -> dict[str, Any]:
    if isinstance(answer, list):
        return dict(answer[1])
    return {"role": "assistant", "content": answer if isinstance(answer, str) else answer["value"]}


@pytest.mark.parametrize("packing", ["auto", "sequential", "first-fit-shuffle", "none"])
@pytest.mark.parametrize("multiple", [1, 8])
def test_every_way_to_pack_keeps_pairs(tmp_path, packing, multiple):
    options = (*PREFERENCE, "--packing", packing, "--sequence-multiple", multiple, "--output-shards", 3)
    done = preprocess(tmp_path / "x", *options, rows=pairs(50), capacity=512)
    assert (done.code, "\nsequences       100 in 50 pairs\n" in done.out) == (0, True), done
    assert ("rounded up to a multiple of 8\n" in done.out) == (multiple == 8)
    found = [pairs_of(tmp_path / f"x-0000{number}-of-00003") for number in range(3)]
    assert sorted(pair for one in found for pair in one) == list(range(50))


def test_pack_keeps_pairs_together(tmp_path):
    assert preprocess(tmp_path / "x", *PREFERENCE, "--keep-corpus", rows=pairs(50), capacity=512).code == 0
    before = pairs_of(tmp_path / "x")
    for source in ("x", "x.unpacked"):
        done = command("pack", tmp_path / source, "--seq-length", 2048, "--output-prefix", tmp_path / f"{source}-2k")
        assert done.code == 0, done
        assert pairs_of(tmp_path / f"{source}-2k") == before
        refused = command(
            *("pack", tmp_path / source, "--seq-length", 64, "--overlong", "split", "--output-prefix", tmp_path / "y")
        )
        assert refused.code == 1
        assert "--overlong split would separate a pair" in refused.err
    assert command("pack", tmp_path / "x.unpacked", "--seq-length", 512, "--output-prefix", tmp_path / "y").code == 0
    assert columned(tmp_path / "x") == columned(tmp_path / "y")


def test_an_overlong_answer_takes_its_pair_with_it(tmp_path):
    rows = pairs(12)
    rows[3]["rejected"] = "no " + words(400)[0]
    failed = preprocess(tmp_path / "x", *PREFERENCE, rows=rows, capacity=512)
    assert failed.code == 1
    assert "1 of 12 pairs is longer than 512 tokens: rows.jsonl:4 (" in failed.err
    assert "choose --overlong drop, or a larger --seq-length" in failed.err
    for overlong in ("truncate", "split"):
        refused = preprocess(tmp_path / "x", *PREFERENCE, "--overlong", overlong, rows=rows, capacity=512)
        assert refused.code == 1
        assert f"--overlong {overlong} would separate a pair" in refused.err
    refused = preprocess(tmp_path / "x", *PREFERENCE, "--max-sequences-per-pack", 1, rows=rows, capacity=512)
    assert refused.code == 1
    assert "--max-sequences-per-pack 1 would separate every pair; use 2 or more" in refused.err
    summary = tmp_path / "s.json"
    done = preprocess(tmp_path / "x", *PREFERENCE, "--overlong", "drop", "--summary", summary, rows=rows, capacity=512)
    assert done.code == 0, done
    assert sorted(pairs_of(tmp_path / "x")) == [0, 1, 2, *range(4, 12)]
    assert json.loads(summary.read_text())["packing"]["overlong"] == 2


def test_workers_and_a_second_start_change_no_byte(tmp_path):
    rows = pairs(60)
    for name, workers in (("a", 0), ("b", 2)):
        assert preprocess(tmp_path / name / "x", *PREFERENCE, "--workers", workers, rows=rows, capacity=512).code == 0
    failed = preprocess(tmp_path / "c" / "x", *PREFERENCE, rows=rows, capacity=64)
    assert failed.code == 1
    again = preprocess(tmp_path / "c" / "x", *PREFERENCE, rows=rows, capacity=512)
    assert again.code == 0, again
    assert columned(tmp_path / "a" / "x") == columned(tmp_path / "b" / "x") == columned(tmp_path / "c" / "x")


@pytest.mark.parametrize("row", [{"prompt": "Q", "completion": "A"}, {"prompt": "Q", "chosen": "A", "rejected": "A"}])
def test_a_row_that_is_no_pair_is_a_bad_row(tmp_path, row):
    rows = [*pairs(3), row]
    failed = preprocess(tmp_path / "x", *PREFERENCE, rows=rows)
    assert failed.code == 1
    assert "rows.jsonl:4: " in failed.err
    assert preprocess(tmp_path / "x", *PREFERENCE, "--on-bad-row", "skip", rows=rows).code == 0
    assert sorted(pairs_of(tmp_path / "x")) == [0, 1, 2]


def test_pairs_and_verdicts_are_made_only_where_they_are_asked_for(tmp_path):
    refused = preprocess(tmp_path / "x", rows=pairs(1))
    assert refused.code == 1
    assert "--row-kind preference" in refused.err
    refused = preprocess(tmp_path / "x", rows=[{"prompt": "Q", "completion": "A", "label": True}])
    assert refused.code == 1
    assert "--row-kind kto" in refused.err
    for kind in (PREFERENCE, KTO):
        refused = preprocess(tmp_path / "x", *kind, "--train-on", "all", rows=pairs(1))
        assert refused.code == 1
        assert "trains only on the answers; leave out --train-on all" in refused.err


def test_a_label_stands_beside_its_answer(tmp_path):
    rows = [
        {"prompt": f"Q {n}", "completion": f"{'good' if n % 3 else 'bad'} {n}", "label": bool(n % 3)} for n in range(30)
    ]
    assert preprocess(tmp_path / "x", *KTO, "--keep-corpus", rows=rows, capacity=128).code == 0
    assert command("pack", tmp_path / "x", "--seq-length", 512, "--output-prefix", tmp_path / "y").code == 0
    told = {}
    for name in ("x", "y", "x.unpacked"):
        shard = Shard(tmp_path / name, columns=("label",))
        assert shard.columns["label"].spec.kind == ("sequence", "|u1", 1, "token")
        labels = np.concatenate([shard[number]["label"] for number in range(len(shard))]).tolist()
        told[name] = sorted(
            (ids.tobytes(), label) for (ids, _), label in zip(sequences_of(tmp_path / name), labels, strict=True)
        )
    assert told["x"] == told["y"] == told["x.unpacked"]
    assert [label for _, label in told["x"]].count(0) == 10
    corpus = Shard(tmp_path / "x.unpacked", columns=("label",))
    assert [int(corpus[number]["label"][0]) for number in range(30)] == [int(n % 3 > 0) for n in range(30)]


def test_pairs_beside_the_row_they_come_from(tmp_path):
    assert preprocess(tmp_path / "x", *PREFERENCE, "--source", rows=pairs(20), capacity=512).code == 0
    shard = Shard(tmp_path / "x", columns=("pair", "source"))
    for number in range(len(shard)):
        assert shard[number]["source"].tolist() == [[0, pair] for pair, _ in shard[number]["pair"].tolist()]
    lines = command("inspect", tmp_path / "x", "--pack", 0).out.splitlines()
    titles = [line.partition(", positions ")[0] for line in lines if line.startswith("── ")]
    for at, (pair, rejected) in enumerate(shard[0]["pair"].tolist()):
        name = f"rows.jsonl:{pair + 1}, pair {pair}, {'rejected' if rejected else 'chosen'}"
        assert titles[at] == f"── sequence {at} ({name})"


def test_a_file_of_somebody_at_the_place_of_a_column_is_told_before_the_work(tmp_path):
    (tmp_path / "x.pair.col").write_text("mine")
    refused = preprocess(tmp_path / "x", *PREFERENCE, rows=pairs(3))
    assert refused.code == 1
    assert "x.pair.col" in refused.err
    assert (tmp_path / "x.pair.col").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "x.pair.col"]


def test_a_catalog_takes_no_pairs(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", pairs(3))
    options = ("--tokenizer", TOKENIZER, "--seq-length", 256, "--tokens-per-shard", 512, *PREFERENCE)
    refused = command("produce", "--input", rows, *options, "--catalog", tmp_path / "c")
    assert refused.code == 1
    assert "--row-kind preference needs columns, which the shards of a catalog do not have" in refused.err
