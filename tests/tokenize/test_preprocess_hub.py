"""``preprocess --download``: names of the hub, read by its own library from an existing cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from chats import CHATS, TOKENIZER, files_of, preprocess, remains

COMMIT = "0123456789" * 4


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a cache like a download. In offline mode, the library does not use the network."""
    home = tmp_path_factory.mktemp("home")
    for name in ("models--demo--tok", "datasets--demo--chats"):
        (home / "hub" / name / "refs").mkdir(parents=True)
        (home / "hub" / name / "refs/main").write_text(COMMIT)
    shutil.copytree(TOKENIZER, home / f"hub/models--demo--tok/snapshots/{COMMIT}")
    data = home / f"hub/datasets--demo--chats/snapshots/{COMMIT}/data"
    data.mkdir(parents=True)
    blob = shutil.copy(CHATS, home / "hub/datasets--demo--chats/blob")
    (data / "train-0.jsonl").symlink_to(blob)
    (data / "test-0.jsonl").write_text("not to be read")
    return home


def run(folder: Path, home: Path, *given: str) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, "-m", "megatron_sft_idx", "preprocess", *given, "--seq-length", "1024"]
    script += ["--earlier-reasoning", "drop", "--workers", "0", "--output-prefix", "x"]
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    return subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("revision", ["", f"@{COMMIT}"])
def test_names_are_what_they_stand_for(revision: str, home: Path, tmp_path: Path) -> None:
    data = f"demo/chats{revision}/data/train-*.jsonl"
    made = run(tmp_path, home, "--input", data, "--tokenizer", f"demo/tok{revision}", "--download")
    assert made.returncode == 0, made.stderr
    assert preprocess(tmp_path / "y", "--input", next(home.rglob("train-*.jsonl"))).code == 0
    assert files_of(tmp_path / "x") == files_of(tmp_path / "y")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ("--input", "demo/chats", "--tokenizer", "demo/tok", "--download"),
            "demo/chats: choose files of this dataset",
        ),
        (("--input", str(CHATS), "--tokenizer", "demo/other", "--download"), "--download demo/other: "),
        (("--input", str(CHATS), "--tokenizer", "demo/tok"), "preprocess --download does it"),
    ],
)
def test_what_is_not_there_is_said_in_a_sentence(given: tuple[str, ...], said: str, home: Path, tmp_path: Path) -> None:
    made = run(tmp_path, home, *given)
    assert made.returncode in (1, 2)
    assert said in made.stderr
    assert "Traceback" not in made.stderr
    assert remains(tmp_path) == []


def test_without_the_library_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused = preprocess(tmp_path / "x", "--download", "--tokenizer-model", "demo/tok")
    assert (refused.code, "pip install huggingface_hub" in refused.err) == (1, True)
