"""Unexpected errors are reported in one sentence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from sample_packs import demo_samples, write_samples

from megatron_sft_idx.cli import verify
from megatron_sft_idx.cli.main import build_parser, main
from megatron_sft_idx.cli.streams import message_of
from megatron_sft_idx.errors import FormatError


class NoRoomError(MemoryError):
    """An error like pyarrow's."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "not enough memory"),
        (NoRoomError("malloc of size 9 failed"), "not enough memory (malloc of size 9 failed)"),
        (RecursionError("maximum recursion depth exceeded"), "the input is nested too deeply"),
    ],
)
def test_memory_and_depth(
    error: BaseException, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(verify, "verify_shard", fail)
    assert main(["verify", "x"]) == 1
    assert capsys.readouterr().err.startswith(f"megatron-sft-idx: error: {said}")


def test_an_error_of_a_rename_names_both_paths(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(OSError) as raised:
        os.replace(tmp_path / "file", tmp_path / "folder")
    assert message_of(raised.value) == f"{tmp_path}/file -> {tmp_path}/folder: Is a directory"


def test_a_number_beyond_all_disks_is_no_limit() -> None:
    required = "--watch x --tokenizer x --seq-length 8 --tokens-per-shard 8 --catalog x --max-ahead-gb 1e300"
    assert build_parser("produce").parse_args(["produce", *required.split()]).max_ahead_gb >= 2**63


def test_metadata_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(FormatError, match="metadata: nested too deeply"):
        write_samples(tmp_path / "x", demo_samples(), metadata={"deep": deep})
    assert list(tmp_path.iterdir()) == []
