"""The commands merge and split, and tools/merge_sft.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sample_packs import assert_holds, demo_samples, write_samples

from megatron_sft_idx.cli.main import main
from megatron_sft_idx.cli.options import nbytes
from megatron_sft_idx.shard import Shard, write_column
from megatron_sft_idx.storage.progress import show_progress

ROOT = Path(__file__).parents[2]


def write_numbered(folder: Path) -> None:
    """Write shards part-8 to part-11 of two packs each."""
    for i in range(4):
        write_samples(folder / f"part-{8 + i}", demo_samples(8)[2 * i : 2 * i + 2], capacity=64)


def test_a_folder_is_merged_in_the_order_of_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_numbered(tmp_path / "parts")
    assert main(["merge", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "m"), "--log-interval", "1"]) == 0
    assert_holds(Shard(tmp_path / "m"), demo_samples(8))
    out = capsys.readouterr().out
    assert f"wrote {tmp_path}/m\nshards merged   4\npacks           8\n" in out
    assert "note            not recorded in any shard, so not compared: pad id, tokenizer, chat template" in out
    assert main(["merge", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "m")]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"found {tmp_path}/m: already complete, ")
    assert f"; contents not checked: megatron-sft-idx verify --full {tmp_path}/m\n" in out


def test_globs_and_names_keep_the_order_of_the_command(tmp_path: Path) -> None:
    write_numbered(tmp_path)
    sources = [str(tmp_path / "part-10.seq.idx"), str(tmp_path / "part-?")]
    assert main(["merge", *sources, "--output-prefix", str(tmp_path / "m")]) == 0
    packs = demo_samples(8)
    assert_holds(Shard(tmp_path / "m"), packs[4:6] + packs[:4])


def test_a_pattern_that_the_shell_expanded_names_every_shard_once(tmp_path: Path) -> None:
    write_numbered(tmp_path)
    for name in ("part-8", "part-9"):
        write_column(tmp_path / name, "notes", np.arange(2), per="pack")
    files = sorted(str(path) for path in tmp_path.glob("part-?.*"))
    assert len(files) == 12
    assert main(["merge", *files, "--output-prefix", str(tmp_path / "m")]) == 0
    assert_holds(Shard(tmp_path / "m"), demo_samples(8)[:4])
    assert main(["copy", *files, f"{tmp_path}/copies/"]) == 0
    assert main(["convert", *files, f"{tmp_path}/converted", "--to", "sft-idx"]) == 0
    assert_holds(Shard(tmp_path / "converted"), demo_samples(8)[:4])
    twice = [str(tmp_path / "part-8")] * 2
    assert main(["merge", *twice, "--output-prefix", str(tmp_path / "n")]) == 0
    assert_holds(Shard(tmp_path / "n"), demo_samples(8)[:2] * 2)


def test_splitting_says_where_the_parts_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_samples(tmp_path / "x", demo_samples(8), capacity=64)
    command = ["split", str(tmp_path / "x"), "--packs", "3", "--output-prefix", str(tmp_path / "p" / "x")]
    assert main(command) == 0
    first, last = f"{tmp_path}/p/x-00000-of-00003", f"{tmp_path}/p/x-00002-of-00003"
    assert capsys.readouterr().out == f"parts           3\nfrom            {first}\nto              {last}\n"
    assert main(command) == 0
    assert "parts           3, 3 of them already existed" in capsys.readouterr().out


def test_a_mismatch_ends_with_1_and_both_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_samples(tmp_path / "a", demo_samples(3), capacity=64)
    write_samples(tmp_path / "b", demo_samples(3), capacity=32)
    command = ["merge", str(tmp_path / "a"), str(tmp_path / "b"), "--output-prefix", str(tmp_path / "m")]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert f"error: {tmp_path}/b: capacity 32, but 64 in {tmp_path}/a; " in error
    assert "--mixed-capacity" in error
    assert main([*command, "--mixed-capacity"]) == 0
    assert Shard(tmp_path / "m").header.capacity == 64


@pytest.mark.parametrize(
    "arguments",
    [
        ["merge"],
        ["merge", "a"],
        ["merge", "--output-prefix", "x"],
        ["split", "a", "--output-prefix", "x"],
        ["split", "a", "--output-prefix", "x", "--packs", "0"],
        ["split", "a", "--output-prefix", "x", "--packs", "1", "--shards", "1"],
        ["split", "a", "--output-prefix", "x", "--nbytes", "2 gigs"],
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: megatron-sft-idx" in capsys.readouterr().err


@pytest.mark.parametrize(("verb", "word"), [("merge", "--mixed-capacity"), ("split", "--nbytes 2GiB")])
def test_help_teaches_with_examples(verb: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "examples:" in out
    assert word in out


def test_sizes_are_read_with_their_units() -> None:
    assert [nbytes(text) for text in ("7", "2KB", "2KiB", "3 MB", "1GiB", "1TB")] == [
        7,
        2000,
        2048,
        3_000_000,
        1 << 30,
        10**12,
    ]


def test_a_line_of_progress_has_rate_and_time_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress(2)("merging", 5 << 20) as advance:
        for _ in range(10):
            advance(1 << 19)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(", ")[:2] for line in lines] == [
        ["merging: 2 MiB", "40.0%"],
        ["merging: 4 MiB", "80.0%"],
        ["merging: 5 MiB", "100.0%"],
    ]
    assert all("MiB/s" in line and line.endswith(" left") for line in lines)


def test_the_script_merges_and_after_the_word_split_splits(tmp_path: Path) -> None:
    write_numbered(tmp_path / "parts")

    def run(*arguments: str) -> str:
        command = [sys.executable, "-W", "error", str(ROOT / "tools" / "merge_sft.py"), *arguments]
        environment = {"PYTHONPATH": f"{ROOT}"}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=300).stdout

    assert "packs           8" in run(str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "m"))
    assert "parts           2" in run(
        "split", str(tmp_path / "m"), "--shards", "2", "--output-prefix", str(tmp_path / "p")
    )
    back = run("merge", str(tmp_path / "p-*"), "--output-prefix", str(tmp_path / "back"))
    assert "shards merged   2" in back
    assert Shard(tmp_path / "back").shard_id == Shard(tmp_path / "m").shard_id
