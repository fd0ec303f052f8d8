"""Selecting sequences and weighting losses by columns, compared with a filter in plain Python."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import command
from columned import OPERATORS
from sample_packs import sample_of

from megatron_sft_idx.check import verify_shard
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout.column import PAIR, ColumnSpec
from megatron_sft_idx.packs import run as run_module
from megatron_sft_idx.packs.conditions import selected_sequences
from megatron_sft_idx.packs.merge import merge
from megatron_sft_idx.packs.split import SplitSize, split
from megatron_sft_idx.shard import Shard, ShardWriter, write_column
from megatron_sft_idx.tokenize import PackOptions, pack_shard
from megatron_sft_idx.tokenize.corpus import CorpusReader

# Name, unit of rows, dtype, width, alignment; and whether the column is attached later.
COLUMNS: list[tuple[str, Any, str, int, Any, bool]] = [
    ("rank", "sequence", "i2", 1, "token", False),
    ("score", "sequence", "f4", 1, "token", True),
    ("wide", "sequence", "u1", 2, "token", False),
    ("tw", "token", "f4", 1, "token", False),
    ("lw", "token", "f8", 1, "label", True),
    ("kind", "token", "i1", 1, "token", True),
    ("grade", "pack", "u1", 1, "token", False),
    ("quality", "pack", "f2", 1, "token", True),
]
FILES = {"files": [{"name": "a/t.jsonl"}, {"name": "b/t.jsonl"}]}


def value(chance: random.Random, dtype: str) -> float:
    return chance.choice([0, 1, 2, 3]) * (0.5 if dtype.startswith("f") else 1)


def write_random(prefix: Path, chance: random.Random, mask_dtype: Any, packs: int = 24) -> None:
    """Write a shard of random sequences with all columns. No token occurs twice."""
    first, number = chance.randrange(1000) * 1000, 0
    written = [each for each in COLUMNS if not each[5]]
    specs = {name: ColumnSpec(per, dtype, width, alignment) for name, per, dtype, width, alignment, _ in written}
    specs["source"] = ColumnSpec("sequence", "u4", 2, metadata=FILES)
    mask = [0, 1] if mask_dtype == np.uint8 else [0, 1, 0.5, 0.3]
    counts, fixed = Counter[str](), {"token_dtype": np.int32, "durable": False}
    with ShardWriter(prefix, columns=specs, mask_dtype=mask_dtype, capacity=64, **fixed) as writer:
        for _ in range(packs):
            lengths = [chance.randint(1, 6) for _ in range(chance.randint(1, 5))]
            pack = sample_of(
                lengths, lambda position: chance.choice(mask), lambda position, at=first + number: at + position
            )
            number += len(pack.tokens)
            rows = {"token": len(pack.tokens), "sequence": len(lengths), "pack": 1}
            columns = {
                name: np.array([value(chance, dtype) for _ in range(rows[per] * width)], dtype).reshape(
                    (-1, width) if width > 1 else -1
                )
                for name, per, dtype, width, _, _ in written
            }
            columns["source"] = np.array([[chance.randrange(2), n] for n in range(len(lengths))], np.uint32)
            writer.add_pack(pack.tokens, pack.label_mask, pack.starts, columns=columns)
            counts.update(rows)
    for name, per, dtype, width, alignment, attached in COLUMNS:
        if attached:
            values = np.array([value(chance, dtype) for _ in range(counts[per] * width)], dtype)
            write_column(prefix, name, values, per=per, alignment=alignment)


def sequences_with_columns(prefix: Path | str) -> list[dict[str, Any]]:
    """Return for every sequence its ids, its mask, and its rows of each column, as plain lists."""
    shard, found = Shard(prefix), []
    values = {name: column.values[:].tolist() for name, column in shard.columns.items()}
    specs = {name: column.spec for name, column in shard.columns.items()}
    token = sequence = 0
    for number, pack in enumerate(shard):
        ids, mask = pack["input_ids"].tolist(), pack["loss_mask"].tolist()
        for start, stop in pairwise(pack["seq_boundaries"].tolist()):
            rows = {
                "token": slice(token + start, token + stop),
                "sequence": slice(sequence, sequence + 1),
                "pack": slice(number, number + 1),
            }
            columns = {name: values[name][rows[spec.per]] for name, spec in specs.items()}
            found.append({"ids": ids[start:stop], "mask": mask[start:stop], **columns})
            sequence += 1
        token += len(ids)
    return found


def holds(sequence: dict[str, Any], name: str, op: str, wanted: float) -> bool:
    rows = [row if isinstance(row, list) else [row] for row in sequence[name]]
    return all(OPERATORS[op](each, wanted) for row in rows for each in row)


def weights_of(sequence: dict[str, Any], name: str) -> list[float]:
    """Return the weight of each label of a sequence. The last position predicts nothing, so its weight is 1."""
    _, per, _, _, alignment, _ = next(each for each in COLUMNS if each[0] == name)
    rows, length = sequence[name], len(sequence["ids"])
    if per != "token":
        return [rows[0]] * length
    shift = 1 if alignment == "token" else 0
    return [*(rows[label + shift] for label in range(length - 1)), 1.0]


def told(sequences: list[dict[str, Any]]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return sorted((tuple(one["ids"]), tuple(one["mask"])) for one in sequences)


def random_condition(chance: random.Random) -> tuple[str, str, float]:
    name, _, dtype, *_ = chance.choice(COLUMNS)
    return name, chance.choice([*OPERATORS]), value(chance, dtype)


def as_text(chance: random.Random, condition: tuple[str, str, float]) -> str:
    space = chance.choice(["", " ", "  "])
    return space.join(("", condition[0], condition[1], f"{condition[2]:g}", ""))


@pytest.mark.sample(4)
@pytest.mark.parametrize("mask_dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_packed_is_what_a_plain_filter_takes(
    seed: int, mask_dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(f"{seed} {mask_dtype}")
    monkeypatch.setattr(run_module, "WINDOW_TOKENS", 16)
    monkeypatch.setattr(CorpusReader, "window_tokens", 8)
    write_random(tmp_path / "x", chance, mask_dtype)
    write_random(tmp_path / "w", chance, mask_dtype)
    merge([tmp_path / "x", tmp_path / "w"], tmp_path / "both", durable=False)
    prefixes = {"x": [tmp_path / "x"], "both": [tmp_path / "both"]}
    prefixes["thirds"] = [Path(one) for one in split(tmp_path / "both", tmp_path / "s", SplitSize(shards=3)).prefixes]
    expected: list[dict[str, Any]] = []
    for number in range(6):
        conditions = [random_condition(chance) for _ in range(chance.choice([0, 1, 1, 2]))]
        weight = chance.choice([None, "rank", "score", "tw", "lw", "kind", "grade", "quality"])
        where = tuple(as_text(chance, condition) for condition in conditions)
        options = PackOptions(32, method="none", where=where, loss_weight_column=weight)
        for which, parts in prefixes.items():
            expected, found, dtypes, left_out = [], [], set[str](), 0
            for part, prefix in enumerate(parts):
                everything = sequences_with_columns(prefix)
                taken = [one for one in everything if all(holds(one, *condition) for condition in conditions)]
                shard = Shard(prefix)
                np.testing.assert_array_equal(selected_sequences(shard, where), [one in taken for one in everything])
                out = str(tmp_path / f"out-{number}-{which}-{part}")
                if not taken:
                    with pytest.raises(FormatError, match=r"none of \d+ sequences? matches --where "):
                        pack_shard(shard, out, options, lossy=True)
                    continue
                report = pack_shard(shard, out, options, lossy=True)
                assert verify_shard(out, full=True).ok
                header = Shard(out).header
                left_out += report.left_out
                for one in taken:
                    if weight is not None:
                        pairs = zip(one["mask"], weights_of(one, weight), strict=True)
                        one["mask"] = [float(np.float32(mask) * np.float32(each)) for mask, each in pairs]
                only_flags = all(mask in (0, 1) for one in taken for mask in one["mask"])
                wanted = "uint8" if only_flags and (weight or mask_dtype == np.uint8) else "float32"
                assert header.mask_dtype.name == wanted
                assert header.metadata.get("loss_weight_columns", []) == ([weight] if weight else [])
                assert header.metadata["packing"].get("loss_weight_column") == weight
                assert len(header.metadata["packing"].get("where", [])) == len(where)
                expected += taken
                found += sequences_with_columns(out)
                dtypes.add(wanted)
                # The values of the other columns are kept.
                by_ids = {tuple(one["ids"]): one for one in everything}
                for one in sequences_with_columns(out):
                    before = by_ids[tuple(one["ids"])]
                    assert {name: before[name] for name in one if name != "mask"} | {"mask": one["mask"]} == one
            assert told(found) == told(expected)


def test_trained_tokens_that_weights_leave_are_counted_and_untrained_sequences_dropped(tmp_path: Path) -> None:
    chance = random.Random(3)
    for number, weight in enumerate(("rank", "tw", "lw", "kind", "grade")):
        write_random(tmp_path / f"x{number}", chance, np.uint8)
        everything = sequences_with_columns(tmp_path / f"x{number}")
        left = [
            one
            for one in everything
            if any(mask * each for mask, each in zip(one["mask"], weights_of(one, weight), strict=True))
        ]
        out = tmp_path / f"y{number}"
        words = ("--lossy", "--loss-weight-column", weight, "--drop-untrained", "--seq-length", 40)
        done = command("pack", tmp_path / f"x{number}", *words, "--output-prefix", out)
        assert done.code == 0, done
        assert [ids for ids, _ in told(sequences_with_columns(out))] == [ids for ids, _ in told(left)]
        # If sequences are cut, lost tokens count only if their weight is above 0.
        done = command(
            *("pack", tmp_path / f"x{number}", "--lossy", "--loss-weight-column", weight, "--seq-length", 3),
            *("--overlong", "split", "--output-prefix", tmp_path / f"z{number}"),
        )
        header = Shard(tmp_path / f"z{number}").header
        trained = sum(
            mask * each > 0
            for one in everything
            for mask, each in zip(one["mask"], weights_of(one, weight), strict=True)
        )
        assert header.num_trained_tokens + header.metadata["packing"]["lost_trained_tokens"] == trained


def test_of_a_pair_both_sequences_are_taken_or_none(tmp_path: Path) -> None:
    chance = random.Random(1)
    with ShardWriter(tmp_path / "x", columns={"pair": PAIR}, durable=False) as writer:
        for number in range(30):
            rows = np.array([[number, 0], [number, 1]], np.uint32)
            writer.add_pack(list(range(6)), [1, 1, 0, 1, 1, 0], [0, 3], columns={"pair": rows})
    values = np.array([chance.randrange(3) for _ in range(60)], np.int8)
    write_column(tmp_path / "x", "score", values, per="sequence")
    wanted = [number for number in range(30) if min(values[2 * number : 2 * number + 2]) >= 1]
    options = PackOptions(64, where=("score >= 1",))
    report = pack_shard(Shard(tmp_path / "x"), str(tmp_path / "y"), options)
    assert report.left_out == 60 - 2 * len(wanted)
    numbers = Shard(tmp_path / "y").columns["pair"].values[:]
    assert sorted(numbers[::2, 0].tolist()) == wanted
    assert verify_shard(tmp_path / "y", full=True).ok


@pytest.mark.parametrize(
    ("dtype", "values", "said"),
    [
        ("f4", [1, -0.5], "pack 1, sequence 0: --loss-weight-column w: the weight is -0.5"),
        ("f8", [1, math.nan], "pack 1, sequence 0: --loss-weight-column w: the weight is nan"),
        ("f8", [math.inf, 1], "pack 0, sequence 0: --loss-weight-column w: the weight is inf"),
        ("f8", [1, 1e300], r"the weight is 1e\+300, expected a number of 0 or more that fits into float32"),
        ("f8", [1, 1e-300], "1 times 1e-300 becomes 0 in float32; use another weight"),
        ("f4", [1, 1e-30], "1e-30 times 1e-30 becomes 0 in float32; use another weight"),
        ("i1", [-1, 1], "pack 0, sequence 0: --loss-weight-column w: the weight is -1"),
    ],
)
def test_weights_that_cannot_be_are_refused_with_their_place(
    dtype: str, values: list[float], said: str, tmp_path: Path
) -> None:
    with ShardWriter(tmp_path / "x", mask_dtype=np.float32, durable=False) as writer:
        for mask in (1, 1e-30 if said.startswith("1e-30 times") else 1):
            writer.add_pack([1, 2, 3], [mask, 0, 0], [0])
    for name, per in (("w", "sequence"), ("p", "pack")):
        write_column(tmp_path / "x", name, np.array(values, dtype), per=per)
    for name in "wp":
        options = PackOptions(64, loss_weight_column=name)
        with pytest.raises(FormatError, match=said.replace("column w", f"column {name}")):
            pack_shard(Shard(tmp_path / "x"), str(tmp_path / "y"), options, lossy=True)
        assert not [*tmp_path.glob("y*")]
    # Excluded sequences may have any weight.
    if dtype == "f4" and values[1] < 0:
        options = PackOptions(64, loss_weight_column="w", where=("w >= 0",))
        assert pack_shard(Shard(tmp_path / "x"), str(tmp_path / "y"), options, lossy=True).sequences == 1


def test_a_value_of_a_token_that_nothing_predicts_is_no_weight(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        writer.add_pack([1, 2, 3, 4, 5], [1, 1, 0, 1, 0], [0, 3])
    nan = math.nan
    write_column(tmp_path / "x", "t", np.array([nan, 0.5, 2, nan, 3.0]), per="token")
    write_column(tmp_path / "x", "l", np.array([0.5, 2, nan, 3.0, nan]), per="token", alignment="label")
    for name in "tl":
        pack_shard(Shard(tmp_path / "x"), str(tmp_path / name), PackOptions(5, loss_weight_column=name))
        masks = sorted(one["mask"] for one in sequences_with_columns(tmp_path / name))
        assert masks == [[0.5, 2, 0], [3, 0]]
    write_column(tmp_path / "x", "t", np.array([1, nan, 2, 1, 3.0]), per="token", overwrite=True)
    with pytest.raises(FormatError, match=r"pack 0, sequence 0, token 1: .* the weight is nan"):
        pack_shard(Shard(tmp_path / "x"), str(tmp_path / "z"), PackOptions(5, loss_weight_column="t"))


def test_masks_are_multiplied_by_a_column_once(tmp_path: Path) -> None:
    write_random(tmp_path / "x", random.Random(0), np.uint8)
    metadata = {"tokenizer": {"fingerprint": "t", "vocab_size": None}, "chat_template": {"fingerprint": "c"}}
    with ShardWriter(tmp_path / "m", metadata={**metadata, "sources": {"fingerprint": "s"}}, durable=False) as writer:
        writer.add_pack([1, 2, 3], [1, 1, 0], [0])
    write_column(tmp_path / "m", "w", np.array([2.0]), per="sequence")
    write_column(tmp_path / "m", "v", np.array([0.25]), per="sequence")
    pack_shard(Shard(tmp_path / "m"), str(tmp_path / "y"), PackOptions(8, loss_weight_column="w"))
    with pytest.raises(FormatError, match="the masks were already multiplied by this column"):
        pack_shard(Shard(tmp_path / "y"), str(tmp_path / "z"), PackOptions(8, loss_weight_column="w"))
    pack_shard(Shard(tmp_path / "y"), str(tmp_path / "z"), PackOptions(8, loss_weight_column="v"))
    shard = Shard(tmp_path / "z")
    assert shard[0]["loss_mask"].tolist() == [0.5, 0.5, 0]
    assert shard.header.metadata["loss_weight_columns"] == ["w", "v"]
    # Tokenizer, template and rows in the header do not change.
    assert {name: shard.header.metadata[name] for name in metadata} == metadata
    assert shard.header.metadata["sources"] == {"fingerprint": "s"}


def test_a_merged_shard_is_not_weighted_twice(tmp_path: Path) -> None:
    for name in "ab":
        with ShardWriter(tmp_path / name, mask_dtype=np.float32, durable=False) as writer:
            writer.add_pack([1, 2, 3], [0.5, 1, 0], [0])
        write_column(tmp_path / name, "w", np.array([0.5]), per="sequence")
    pack_shard(Shard(tmp_path / "a"), str(tmp_path / "wa"), PackOptions(8, loss_weight_column="w"))
    pack_shard(Shard(tmp_path / "b"), str(tmp_path / "pb"), PackOptions(8))
    merge([str(tmp_path / "wa"), str(tmp_path / "pb")], str(tmp_path / "m"))
    assert Shard(tmp_path / "m").header.metadata["loss_weight_columns"] == ["w"]
    with pytest.raises(FormatError, match="the masks were already multiplied by this column"):
        pack_shard(Shard(tmp_path / "m"), str(tmp_path / "z"), PackOptions(8, loss_weight_column="w"))


@pytest.mark.parametrize("option", ["where", "loss_weight_column", ""])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_column_that_was_replaced_makes_another_shard(option: str, shards: int, tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        for _ in range(6):
            writer.add_pack([1, 2, 3], [1, 1, 0], [0])
    options = PackOptions(
        *(6,), **{"where": {"where": ("w > 0",)}, "loss_weight_column": {"loss_weight_column": "w"}}.get(option, {})
    )
    prefix = str(tmp_path / "y")
    write_column(tmp_path / "x", "w", np.array([1, 1, 1, 1, 0, 0.5]), per="sequence")
    assert not pack_shard(Shard(tmp_path / "x"), prefix, options, shards=shards).found
    assert pack_shard(Shard(tmp_path / "x"), prefix, options, shards=shards).found
    write_column(tmp_path / "x", "w", np.array([1, 0, 1, 1, 1, 0.5]), per="sequence", overwrite=True)
    with pytest.raises(FormatError, match="overwrite"):
        pack_shard(Shard(tmp_path / "x"), prefix, options, shards=shards)
    assert not pack_shard(Shard(tmp_path / "x"), prefix, options, shards=shards, overwrite=True).found


def test_columns_of_several_values_and_files_are_no_weights(tmp_path: Path) -> None:
    write_random(tmp_path / "x", random.Random(0), np.uint8)
    for name, width in (("wide", 2), ("source", 2)):
        words = ("--loss-weight-column", name, "--lossy", "--seq-length", 64, "--output-prefix", tmp_path / "y")
        refused = command("pack", tmp_path / "x", *words)
        assert (refused.code, f"column {name} has {width} values per row" in refused.err) == (2, True), refused


# ---- inspect ----


def test_inspect_lists_the_packs_with_selected_sequences(tmp_path: Path) -> None:
    write_random(tmp_path / "x", random.Random(5), np.uint8)
    shard, everything = Shard(tmp_path / "x"), sequences_with_columns(tmp_path / "x")
    owner = [number for number, pack in enumerate(shard) for _ in range(len(pack["seq_boundaries"]) - 1)]
    for where in (("rank >= 2",), ("tw<=1", "grade != 0"), ("source == b/t.jsonl",), ("source != ./b/t.jsonl",)):
        given = [word for condition in where for word in ("--where", condition)]
        found = command("inspect", tmp_path / "x", "--limit", 1000, "--json", *given)
        shown = json.loads(found.out)
        selected = selected_sequences(shard, where)
        counts = Counter(owner[number] for number in np.flatnonzero(selected))
        assert [(one["pack"], one["selected"]) for one in shown["matches"]] == sorted(counts.items())
        assert (shown["selected"], shown["packs"]) == (int(selected.sum()), len(counts))
        assert found.code == 0
        lines = command("inspect", tmp_path / "x", "--limit", 2, *given).out
        assert f"{selected.sum()} of {len(everything)} sequences, in {len(counts)} of {len(shard)} packs\n" in lines
        assert "stopped after 2 packs; raise --limit to see more" in lines
    files = [one["source"][0][0] for one in everything]
    assert selected_sequences(shard, ("source == b/t.jsonl",)).tolist() == [file == 1 for file in files]
    none = command("inspect", tmp_path / "x", "--where", "rank > 100")
    assert (none.code, " matches --where rank > 100" in none.out) == (1, True)


def test_inspect_searches_selected_sequences_only(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x", durable=False) as writer:
        for _ in range(4):
            writer.add_pack([7, 8, 9, 7], [1, 1, 0, 0], [0, 3])
    write_column(tmp_path / "x", "score", np.arange(8, dtype=np.int16), per="sequence")
    rows = np.array([[0, number // 4] for number in range(8)], np.uint32)
    write_column(tmp_path / "x", "source", rows, per="sequence", metadata={"files": [{"name": "a"}]})
    for words, key in ((("--row", "a:1"), "sequences"), (("--row", "a:2"), "sequences")):
        found = json.loads(command("inspect", tmp_path / "x", *words, "--where", "score>2", "--json").out)[key]
        first = 0 if words[1] == "a:1" else 4
        assert [2 * one["pack"] + one["sequence"] for one in found] == [n for n in range(first, first + 4) if n > 2]
    # An excluded row was still made into sequences.
    row = ("inspect", tmp_path / "x", "--row")
    left_out = command(*row, "a:1", "--where", "score > 2", "--where", "score > 3")
    said = "a:1: 4 sequences, all left out by --where score > 2 --where score > 3\n"
    assert (left_out.code, left_out.out) == (1, said)
    assert json.loads(command(*row, "a:1", "--where", "score > 3", "--json").out)["left_out"] == 4
    none = command(*row, "a:3", "--where", "score > 3")
    assert (none.code, "no sequence was made from a:3" in none.out) == (1, True), none
    for words in (("--pack", 0), ("--diff", tmp_path / "x"), ("--html", tmp_path / "p.html")):
        refused = command("inspect", tmp_path / "x", "--where", "score > 2", *words)
        assert (refused.code, "--where cannot be combined with --pack, --diff or --html" in refused.err) == (2, True)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("rank == 40000", "the column has dtype int16; the value must be a whole number from -32768 to 32767"),
        ("rank == 1.5", "the column has dtype int16; the value must be a whole number"),
        ("quality > 70000", "the number does not fit into float16, it would become inf"),
        ("score == good", "the column has dtype float32; the value must be a number"),
        ("score = 1", "expected 'NAME OP VALUE'"),
        ("source < a/t.jsonl", "a file can only be compared with == or !="),
        ("source == t.jsonl", "t.jsonl matches several files: a/t.jsonl, b/t.jsonl; use one of these names"),
        ("source == c.jsonl", "no input file matches c.jsonl; the input files are a/t.jsonl, b/t.jsonl"),
        ("nope == 1", "has no column nope; it has grade, kind, lw, quality, rank, score, source, tw, wide"),
    ],
)
def test_a_condition_that_cannot_be_is_wrong_usage(where: str, said: str, tmp_path: Path) -> None:
    write_random(tmp_path / "x", random.Random(0), np.uint8, packs=2)
    for words in (
        ("pack", tmp_path / "x", "--lossy", "--seq-length", 64, "--output-prefix", tmp_path / "y"),
        ("inspect", tmp_path / "x"),
    ):
        refused = command(*words, "--where", where)
        assert (refused.code, said in refused.err) == (2, True), refused
    assert not [*tmp_path.glob("y*")]
