"""Read the fenced blocks of README.md and docs/*.md, and paste them into a shell from top to bottom.

The words after a fence give the kind of a block. GitHub uses the first word and ignores the rest:

====================  ================================================================================
``sh``                commands, pasted as they are; all have to succeed
``sh fails``          a command that has to fail
``sh WORD``           commands that need more than this package, a key of ``ELSEWHERE``; so for ``python WORD``
``python``            a separate program, run in the same folder
``text``              what the block before prints, see ``complaint``
``KIND of its own``   a key of what the caller can check otherwise
====================  ================================================================================
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]

RUN = {"sh", "sh fails", "python"}
_BRIDGE = "needs Megatron-Bridge: tests/training/test_bridge_recipe.py, in make test-megatron"
# Kinds of blocks that other tests run, with the reason.
ELSEWHERE = {
    "sh install": "makes environments from the package index: make test-slow",
    "sh slow": "takes several training processes: make test-slow",
    "sh ray": "needs Ray: make test-ray",
    "sh cloud": "needs an object store: make test-cloud",
    "sh bridge": _BRIDGE,
    "python bridge": _BRIDGE,
    "python bridge-dataset": _BRIDGE,
    "python bridge-vlm": "needs Megatron-Bridge: tests/training/test_bridge_vlm.py, in make test-megatron",
    "sh bridge-names": "names of the reader's own files",
    "sh bridge-gpu": "trains with Megatron-Bridge on GPUs, which no test has",
}


@dataclass(frozen=True)
class Block:
    """A fenced block: page and line, the words after the fence, and the lines inside."""

    page: str
    line: int
    kind: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


class Said(NamedTuple):
    """The output of a pasted block."""

    out: str
    err: str


# Runs a Python block and returns what it printed.
Program = Callable[[Block], Said]


def blocks_of(page: str) -> list[Block]:
    """Return all fenced blocks of a page, without the indentation of their fence."""
    found: list[Block] = []
    fence: re.Match[str] | None = None
    lines: list[str] = []
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
        mark = re.fullmatch(r"( *)```(.*)", line)
        if fence is None:
            fence, lines = mark, []
        elif mark and not mark[2]:
            text = "".join(f"{inner.removeprefix(fence[1])}\n" for inner in lines)
            found.append(Block(page, number - len(lines), fence[2].strip(), text))
            fence = None
        else:
            lines.append(line)
    assert fence is None, f"{page}: a block is not closed"
    return found


def outputs(blocks: Sequence[Block]) -> Iterator[tuple[Block, Block]]:
    """Yield each block with the block that shows its output."""
    return ((block, shown) for block, shown in pairwise(blocks) if shown.kind == "text")


def clone(folder: Path) -> Path:
    """Copy the parts of a clone that pasted commands need. The package under test takes precedence over its sources."""
    ignored = shutil.ignore_patterns("bench", "__pycache__", "*.so")
    for name in ("tools", "megatron_sft_idx"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    return folder


def fast_environment(folder: Path) -> dict[str, str]:
    """Return environment variables with which commands use this interpreter and the package under test."""
    programs = folder / ".programs"
    if not programs.exists():
        programs.mkdir()
        modules = {"megatron-sft-idx": "-m megatron_sft_idx", "torchrun": "-m torch.distributed.run", "python": ""}
        for name, module in modules.items():
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
            (programs / name).chmod(0o755)
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    # One thread: more threads wait for each other if tests run in parallel.
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def paste(
    blocks: Sequence[Block],
    folder: Path,
    environment: Mapping[str, str],
    seconds: float,
    program: Program | None = None,
) -> dict[Block, Said]:
    """Paste blocks into a shell that runs in ``folder``. Raise AssertionError if one does not end as it should.

    ``program``, if given, runs the Python blocks; a new shell is started after each of them.
    """
    said: dict[Block, Said] = {}
    for apart, some in groupby(blocks, lambda block: program is not None and block.kind == "python"):
        if apart and program:
            said.update((block, program(block)) for block in some)
        else:
            said.update(_in_one_shell(list(some), folder, environment, seconds))
    return said


def _in_one_shell(
    blocks: Sequence[Block], folder: Path, environment: Mapping[str, str], seconds: float
) -> dict[Block, Said]:
    # Outside of the clone, because a pasted test reads every file in the clone.
    said = Path(tempfile.mkdtemp())
    script = ["set -e"]
    for number, block in enumerate(blocks):
        script.append(f"exec >{said}/{number}.out 2>{said}/{number}.err </dev/null")
        if block.kind == "python":
            # The block is run from a file here; piped or passed with -c, it must print the same.
            (said / f"{number}.py").write_text(block.text, encoding="utf-8")
            # The folder ``data`` is restored before the block is run again.
            script += [f"rm -rf {said}/data; cp -a data {said}/data || true"]
            script += [f"cp {said}/{number}.py block.py", "python block.py", "program=$(cat block.py)"]
            for way in ('python -c "$program"', "python - < block.py"):
                script += [f"rm -rf data; cp -a {said}/data data || true"]
                script += [f"{way} | sed '/^seconds/d' | diff - <(sed '/^seconds/d' {said}/{number}.out)"]
            script.append("rm block.py")
        elif block.kind == "sh fails":
            script.append(f"if (\n{block.text}) then\necho it succeeded >&2\nexit 1\nfi")
        else:
            script.append(block.text)
    run = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=folder, env=dict(environment), timeout=seconds, check=False
    )
    begun = [block for number, block in enumerate(blocks) if (said / f"{number}.out").exists()]
    texts = {
        block: Said(*((said / f"{number}.{end}").read_text(encoding="utf-8") for end in Said._fields))
        for number, block in enumerate(begun)
    }
    shutil.rmtree(said)
    if run.returncode:
        block = begun[-1]
        raise AssertionError(f"{block.place}: exit code {run.returncode}\n{block.text}{''.join(texts[block])}")
    return texts


def complaint(shown: Block, said: Said) -> str | None:
    """Return None if a block shows the real output of stdout or of stderr, otherwise a message.

    A line ``...`` matches any lines, and ``...`` at the end of a line matches the rest of the line. All other lines
    must occur unchanged and in order. Exceptions: seconds (``0.4 s``, and any line that begins with ``seconds``) may
    differ, and numbers with four decimals, such as losses, may differ by one percent.
    """
    lines = [line.rstrip() for line in shown.text.splitlines()]
    if any(_follows(lines, [line.rstrip() for line in stream.splitlines()]) for stream in said):
        return None
    return f"{shown.place}: shown\n{shown.text}\nprinted\n{said.out}{said.err}"


def _follows(shown: Sequence[str], found: Sequence[str]) -> bool:
    """Return whether ``shown`` matches all of ``found``, with gaps only at ``...``."""
    if not shown:
        return not found
    if shown[0].strip() == "...":
        return any(_follows(shown[1:], found[begin:]) for begin in range(len(found) + 1))
    return bool(found) and _same(shown[0], found[0]) and _follows(shown[1:], found[1:])


def _same(shown: str, found: str) -> bool:
    if shown.endswith("..."):
        cut = shown.removesuffix("...").rstrip()
        return found.startswith(cut)
    if shown.startswith("seconds"):
        shown, found = (re.sub(r"\d+\.\d+", "0.0", line) for line in (shown, found))
    shown, found = (re.sub(r"\d+\.\d+ s\b", "0.0 s", line) for line in (shown, found))
    decimals = re.compile(r"\d+\.\d{4}\b")
    if decimals.sub("", shown) != decimals.sub("", found):
        return False
    pairs = zip(decimals.findall(shown), decimals.findall(found), strict=True)
    return all(abs(float(a) - float(b)) <= 0.01 * abs(float(a)) for a, b in pairs)
