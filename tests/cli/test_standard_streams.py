"""Standard streams that are closed, full or gone: a run fails only if its printed output is its purpose."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from chats import preprocess
from hostile import RECIPES, Recipe, World, verbs, what, within

from megatron_sft_idx.cli.main import main

# Commands whose purpose is their output: exit code 1 if it is lost. All other recipes write files.
SHOWING = (
    *("verify <s>", "verify <s> --full --json"),
    *("inspect <s>", "inspect <s> --json", "inspect <s> --pack 0", "inspect <s> --diff <s>"),
    "inspect <s> --tokenizer <tok> --find w4",
    "preprocess --input <rows.jsonl> --tokenizer-model <tok> --seq-length 16 --output-prefix [out] --dry-run",
    "rebuild <lost> --dry-run",
    *("--version", "--help", *(f"{verb} --help" for verb in verbs())),
)
WRITING = tuple(text for text in RECIPES if "[" in text or "create" in text)
# Bad usage and bad data: their exit codes do not change either.
FAILING = ("verify <rows.jsonl>", "merge <s> --output-prefix [s]", "nonsense", "pack <s>", "inspect <s> --diff <t>")

ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


class Left(NamedTuple):
    code: int
    out: str
    err: str
    made: dict[str, Any]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield World(tmp_path_factory.mktemp("streams"))


def run(world: World, text: str, **streams: str) -> Left:
    """Run a recipe in a fork.

    ``streams`` gives states for descriptors: ``closed``, ``full`` or ``gone``; default: files.
    """
    here, recipe = world.fresh(), Recipe(text)
    before = world.look()
    said = {name: world.root.with_name(name) for name in ("stdout", "stderr")}
    for path in said.values():
        path.write_bytes(b"")
    if (child := os.fork()) == 0:
        code = 120
        try:
            os.chdir(here)
            for number, name in enumerate(("stdin", "stdout", "stderr")):
                _redirect(number, streams.get(name, ""), said.get(name, Path(os.devnull)))
            code = _as_python_does(recipe.argv())
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    after = world.look()
    made = {name: what(entry) for name, entry in after.items() if before.get(name) != entry}
    return Left(status, said["stdout"].read_text(), said["stderr"].read_text(), made)


def _redirect(number: int, state: str, path: Path) -> None:
    """Give a descriptor its state, and set the stream in ``sys`` like a starting interpreter."""
    stream = None
    if state == "closed":
        os.close(number)
    else:
        if state == "gone":
            reader, fd = os.pipe()
            os.close(reader)
        else:
            fd = os.open("/dev/full" if state == "full" else path, os.O_RDWR | os.O_APPEND)
        os.dup2(fd, number)
        os.close(fd)
        stream = open(number, "r" if number == 0 else "w", buffering=1 if number == 2 else -1, closefd=False)  # noqa: SIM115
    setattr(sys, ("stdin", "stdout", "stderr")[number], stream)


def _as_python_does(argv: list[str]) -> int:
    """Return the exit code of a process that runs ``main``: 120 if a stream cannot be flushed at the end."""
    try:
        code = main(argv)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        code = 99
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            code = 120
    return code


def without_seconds(made: dict[str, Any]) -> dict[str, Any]:
    """Return files by content, without durations."""
    return {name: entry if name != "here/said.json" else None for name, entry in made.items()}


@pytest.fixture(scope="module")
def calm(world: World) -> dict[str, Left]:
    return {}


def as_without(world: World, calm: dict[str, Left], text: str) -> Left:
    if text not in calm:
        calm[text] = run(world, text)
    return calm[text]


@pytest.mark.sample(12)
@pytest.mark.parametrize("state", ["closed", "full", "gone"])
@pytest.mark.parametrize("text", [*WRITING, *SHOWING, *FAILING])
def test_stderr_never_fails_a_run(world: World, calm: dict[str, Left], text: str, state: str) -> None:
    wanted, found = as_without(world, calm, text), run(world, text, stderr=state)
    assert found.code == wanted.code
    assert without_seconds(found.made) == without_seconds(wanted.made)
    if "seconds" not in wanted.out:
        assert found.out == wanted.out


@pytest.mark.sample(8)
@pytest.mark.parametrize("state", ["closed", "full", "gone"])
@pytest.mark.parametrize("text", WRITING)
def test_a_run_that_writes_files_does_not_fail_for_stdout(
    world: World, calm: dict[str, Left], text: str, state: str
) -> None:
    wanted, found = as_without(world, calm, text), run(world, text, stdout=state)
    assert (wanted.code, found.code) == (0, 0), found.err
    assert without_seconds(found.made) == without_seconds(wanted.made)
    assert ("standard output: No space left on device" in found.err) == (state == "full")


@pytest.mark.sample(8)
@pytest.mark.parametrize("text", SHOWING)
def test_what_cannot_be_shown_is_an_error_where_showing_is_the_purpose(world: World, text: str) -> None:
    for state in ("closed", "full"):
        found = run(world, text, stdout=state)
        assert (found.code, found.err.count("\n"), found.made) == (1, 1, {}), found
        assert found.err.startswith("megatron-sft-idx: error: standard output: ")
    found = run(world, text, stdout="gone")
    assert (found.code, found.err, found.made) == (1, "", {})


@pytest.mark.sample(12)
@pytest.mark.parametrize("text", WRITING)
def test_no_stream_at_all(world: World, calm: dict[str, Left], text: str) -> None:
    """This is the case under a daemon: no file of the run may get one of the three closed descriptor numbers."""
    wanted, found = as_without(world, calm, text), run(world, text, stdin="closed", stdout="closed", stderr="closed")
    assert (wanted.code, found.code) == (0, 0), wanted.err
    assert without_seconds(found.made) == without_seconds(wanted.made)


@pytest.mark.parametrize("verb", ["produce --catalog [live] --tokens-per-shard 20", "preprocess --output-prefix [out]"])
def test_a_closed_stdin_is_no_empty_input(world: World, verb: str) -> None:
    found = run(world, f"{verb} --input - --tokenizer-model <tok> --seq-length 16 --workers 0", stdin="closed")
    assert found.code == 1
    assert "standard input" in found.err


def test_every_command_is_here() -> None:
    assert {text.split()[0] for text in (*WRITING, *SHOWING)} >= verbs().keys()


def test_an_error_comes_after_the_lines_above_it(tmp_path: Path) -> None:
    assert preprocess(tmp_path / "x", rows=[ROW]).code == 0
    (tmp_path / "x.bin").unlink()
    command = [sys.executable, "-m", "megatron_sft_idx", "rebuild", str(tmp_path / "x")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    said = done.stdout.splitlines()
    assert "x.bin: lost: " in done.stdout
    assert "error: " in said[-1]
    assert said[-1].endswith("see the lines above")


def test_streams_of_a_caller_are_left_alone_and_descriptors_put_back(capfd: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with pytest.raises(SystemExit):
        main(["--version"])
    assert (sys.stdout, sys.stderr) == before
    text = io.StringIO()
    sys.stdout = text
    try:
        with pytest.raises(SystemExit):
            main(["--version"])
    finally:
        sys.stdout = before[0]
    assert text.getvalue() == capfd.readouterr().out != ""


def test_a_pipe_that_is_full_for_a_moment_is_waited_for(world: World) -> None:
    """Some parents make their end of the pipe non-blocking, and thereby the child's."""
    with within(world.fresh()):
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        command = [sys.executable, "-m", "megatron_sft_idx", "inspect", "s", "--diff", "t", "--limit", "9999", "--json"]
        child = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, env={"PYTHONPATH": ":".join(sys.path)})
        os.write(writer, b" " * 65536)
        os.close(writer)
        with open(reader, "rb") as end:
            shown = end.read()
        assert child.stderr is not None
        assert (child.wait(), child.stderr.read()) == (1, b"")
        child.stderr.close()
    assert shown.strip().endswith(b"}")
