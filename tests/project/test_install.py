"""Using the package in the folder of a clone, next to stray files, without Megatron, and with type checkers."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import FunctionType

import pytest
from chats import CHATS, TOKENIZER, command
from troubles import quoted

import megatron_sft_idx

ROOT = Path(__file__).parents[2]
WHERE = "import megatron_sft_idx as m; from megatron_sft_idx import Shard, _native; print(m.__file__, _native.__file__)"
# Types for which no value is wrong, or types of Megatron, which checkers cannot see.
ANYTHING = ("Any", "Split")
# Names of modules that Python or dependencies import. Files with these names in the current folder are unrelated.
STRAYS = ("json", "logging", "numpy", "pickle", "random", "signal", "socket", "statistics", "tempfile")


def python(*arguments: object, cwd: Path, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program like a user, without the Python variables of this test run."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command_line = [sys.executable, *map(str, arguments)]
    return subprocess.run(command_line, cwd=cwd, env=clean, input=text, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide the sources as in a clone, without compiled files."""
    folder = tmp_path_factory.mktemp("clone")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "megatron_sft_idx", folder / "megatron_sft_idx", ignore=ignored)
    return folder


@pytest.mark.parametrize("way", ["file", "-c", "stdin", "-m"])
def test_in_the_folder_of_a_clone_the_package_is_the_installed_one(clone: Path, way: str) -> None:
    (clone / "program.py").write_text(WHERE)
    run = {
        "file": lambda: python("program.py", cwd=clone),
        "-c": lambda: python("-c", WHERE, cwd=clone),
        "stdin": lambda: python("-", cwd=clone, text=WHERE),
        "-m": lambda: python("-m", "megatron_sft_idx", "--version", cwd=clone),
    }[way]()
    assert run.returncode == 0, run.stderr
    if way == "-m":
        assert run.stdout == f"megatron-sft-idx {megatron_sft_idx.__version__}\n"
    else:
        assert {Path(path).parent for path in run.stdout.split()} == {Path(megatron_sft_idx.__file__).parent}


def test_a_clone_beside_no_installed_package_says_how_to_compile_it(clone: Path) -> None:
    # -S leaves site-packages out.
    run = python("-S", "-c", "import megatron_sft_idx", cwd=clone)
    assert run.returncode == 1
    found = f"{clone}: sources whose C++ is not compiled for Python 3.{sys.version_info.minor}"
    assert run.stderr.splitlines()[-1] == f"ImportError: {found}: pip install --editable {clone}"
    assert any(message in run.stderr for message in quoted("docs/troubleshooting.md", "Installing"))


def test_processes_of_ours_take_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in STRAYS:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stray file was imported')")
    monkeypatch.chdir(tmp_path)
    # Python 3.10 cannot keep the current folder out of the path of processes started by multiprocessing.
    workers = 1 if sys.version_info >= (3, 11) else 0
    made = command(
        *(
            "preprocess",
            "--input",
            CHATS,
            "--tokenizer-model",
            TOKENIZER,
            "--seq-length",
            1024,
            "--earlier-reasoning",
            "drop",
        ),
        *("--output-prefix", "x", "--workers", workers),
    )
    assert made.code == 0, made.err
    read = python(str(ROOT / "tools/bench_read.py"), "x", "--packs", "2", "--log-interval", "0", cwd=tmp_path)
    assert read.returncode == 0, read.stderr
    assert "recommended: " in read.stdout
    assert "ended with code" not in read.stdout
    assert "a stray file was imported" not in read.stderr
    assert "a stray file was imported" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "program",
    [
        "from megatron_sft_idx import *",
        "from megatron_sft_idx import SFTIndexedDataset",
        "import megatron_sft_idx as m; m.PackedSFTDataset",
        f"import runpy; runpy.run_path({str(ROOT / 'tools/pretrain_sft.py')!r}, run_name='__main__')",
    ],
)
@pytest.mark.parametrize("missing", ["torch", "megatron"])
def test_without_megatron_one_line_says_what_brings_it(program: str, missing: str, tmp_path: Path) -> None:
    if missing == "megatron":
        pytest.importorskip("torch")
    run = python("-c", f"import sys; sys.modules[{missing!r}] = None\n{program}", cwd=tmp_path)
    assert run.returncode == 1
    lines = run.stderr.splitlines()
    assert lines[-1].endswith(f"needs {missing}, which is not installed: pip install 'megatron-sft-idx[megatron]'")
    assert len(lines) == 1 or "runpy" not in program
    told = [message for message in quoted("docs/troubleshooting.md", "Installing") if message.startswith("needs ")]
    assert [message.replace("torch", missing) in lines[-1] for message in told] == [True]


def test_type_checkers_know_every_public_name() -> None:
    """``__init__`` imports exactly the public names for type checkers, from the same modules as at run time."""
    tree = ast.parse(Path(megatron_sft_idx.__file__).read_text(encoding="utf-8"))
    found = {
        (name.asname, f"{node.module}.{name.name}")
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    homes = megatron_sft_idx._HOMES.items()
    assert found == {(name, f"megatron_sft_idx.{home}.{name}") for name, home in homes}


def parameters_of(function: object, *, bound: bool) -> list[inspect.Parameter]:
    """Return the parameters of a call, without ``self``."""
    try:
        found = list(inspect.signature(function).parameters.values())  # type: ignore[arg-type]
    except ValueError:  # an exception with any arguments
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each for each in found[bound:] if each.kind not in variadic]


def probes() -> Iterator[tuple[str, str, bool]]:
    """Yield name, call, and whether it is wrong, for every argument of every public function, method and class."""
    for name in megatron_sft_idx.__all__:
        public = getattr(megatron_sft_idx, name)
        functions = [(name, f"m.{name}", public, False)]
        if isinstance(public, type):
            functions += [
                (f"{name}.{method}", f"x_{name}.{method}", getattr(public, method), isinstance(value, FunctionType))
                for method, value in vars(public).items()
                if not method.startswith("_") and isinstance(value, (FunctionType, classmethod, staticmethod))
            ]
        for label, call, function, bound in functions:
            parameters = parameters_of(function, bound=bound)
            needed = [each.name for each in parameters if each.default is each.empty]
            # Fields that a data class inherits from Megatron are declared there.
            own = inspect.get_annotations(function) if is_dataclass(function) else {each.name for each in parameters}
            yield label, f"{call}({', '.join(f'{each}=anything' for each in needed)})", False
            if len(own) == len(parameters):
                yield label, f"{call}({', '.join(f'{each}=anything' for each in [*needed, 'no_such'])})", True
            for each in parameters:
                if each.name in own and each.annotation not in ANYTHING:
                    given = {**dict.fromkeys(needed, "anything"), each.name: "wrong"}
                    yield f"{label}({each})", f"{call}({', '.join(map('='.join, given.items()))})", True


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, tuple[str, bool]]]:
    """Provide a program with all probes, each in a separate function, and the probe on each line."""
    given = ", ".join(f"x_{name}: m.{name}" for name in megatron_sft_idx.__all__)
    lines = ["from typing import Any", "import megatron_sft_idx as m", "class Wrong: ...", "wrong = Wrong()"]
    found = {}
    for number, (label, call, is_wrong) in enumerate(probes()):
        used = f"x_{call.partition('.')[0].removeprefix('x_')}"
        holder = f"{used}: m.{used[2:]}, " if f"{used}: " in given else ""
        lines += [f"def p{number}({holder}anything: Any) -> None:", f"    {call}"]
        found[len(lines)] = (label, is_wrong)
    assert len(found) > 300
    path = tmp_path_factory.mktemp("probes") / "probes.py"
    path.write_text("\n".join(lines) + "\n")
    return path, found


def assert_only_wrong_ones(lines: set[int], found: dict[int, tuple[str, bool]]) -> None:
    assert [found[line][0] for line in found if found[line][1] and line not in lines] == []
    assert [found.get(line, line) for line in sorted(lines) if line not in found or not found[line][1]] == []


def test_mypy_reports_every_wrong_argument(probed: tuple[Path, dict[int, tuple[str, bool]]]) -> None:
    pytest.importorskip("mypy")
    path, found = probed
    run = python("-m", "mypy", "--no-pretty", path, cwd=ROOT)
    assert run.returncode == 1, run.stderr
    errors = re.findall(r"probes\.py:(\d+): error: ", run.stdout)
    assert_only_wrong_ones(set(map(int, errors)), found)


@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not in the PATH: npm install --global pyright")
def test_pyright_reports_every_wrong_argument(probed: tuple[Path, dict[int, tuple[str, bool]]]) -> None:
    path, found = probed
    (path.parent / "pyrightconfig.json").write_text(json.dumps({"include": [path.name], "extraPaths": [str(ROOT)]}))
    command_line = ["pyright", "--outputjson", "--pythonpath", sys.executable]
    run = subprocess.run(command_line, cwd=path.parent, capture_output=True, text=True, check=False)
    told = [each for each in json.loads(run.stdout)["generalDiagnostics"] if each["severity"] == "error"]
    assert_only_wrong_ones({each["range"]["start"]["line"] + 1 for each in told}, found)
