"""Run tests with every Python from 3.10 to 3.13 that is found in the PATH or in pyenv's folder.

``python tests/matrix.py megatron`` runs the tests of Megatron's interfaces, training and live data with each Python and
the Megatron that constraints.txt has for it. Each Python has its own environment next to .venv, which is created once
and reused. ``python tests/matrix.py trainers`` runs the tests of each trainer in an environment with that trainer and
Python 3.11. ``python tests/matrix.py media`` runs the tests of processors that need torchvision, with Python 3.12.
``python tests/matrix.py base`` runs all tests in an environment without Megatron or any other extra.
``python tests/matrix.py wheels`` makes a source distribution, builds a wheel of it for each Python, and tries every
wheel in a fresh environment.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
MADE_FROM = ("pyproject.toml", "setup.py", "constraints.txt")
TESTS = (
    "megatron_faces",
    "bridge_*",
    "training_*",
    "live_*",
    "streaming_*",
    "chunk_folder",
    "pretrain_script",
    "pretrain_runner",
    "docstring_examples",
)
# Installed without its dependencies, which are CUDA kernels and 30 packages. Its data modules need only datasets, and
# its Qwen-VL models need the others in this list.
BRIDGE = {"3.12": ("megatron-bridge", ("datasets", "einops", "omegaconf", "qwen-vl-utils", "torchvision"))}
# Trainers whose collators are tested, with Python 3.11, for which torch has a small build. TRL is installed with all of
# its dependencies. The others require CUDA kernels, servers and web interfaces, so they are installed without
# dependencies, plus the packages that the tested modules import. A version is given if constraints.txt has another one
# or none.
TRAINERS = {
    "trl": ("trl==1.16.0", ()),
    "torchtitan": (
        "torchtitan==0.3.0",
        (
            "datasets",
            "einops",
            "spmd-types==0.2.3",
            "torch-checkpointing==0.1.1",
            "torchdata==0.11.0",
            "triton",
            "tyro",
        ),
    ),
    "nemo-automodel": ("nemo-automodel==0.7.0", ("datasets", "torchdata==0.11.0", "transformers==5.18.0")),
    "llamafactory": (
        "llamafactory==0.9.5",
        (
            *(
                "accelerate==1.11.0",
                "av",
                "datasets==4.0.0",
                "dill==0.3.8",
                "fsspec==2025.3.0",
                "huggingface-hub==1.23.0",
            ),
            *("multiprocess==0.70.16", "omegaconf", "peft==0.18.1", "tokenizers==0.22.2", "transformers==5.6.0"),
            "trl==0.24.0",
        ),
    ),
    "verl": (
        "verl==0.9.1",
        (
            *(
                "accelerate",
                "codetiming",
                "datasets==4.0.0",
                "dill==0.3.8",
                "fsspec==2025.3.0",
                "huggingface-hub==1.23.0",
            ),
            *("hydra-core", "multiprocess==0.70.16", "peft==0.18.1", "ray", "tensordict==0.10.0", "tokenizers==0.22.2"),
            *("torchdata==0.11.0", "transformers==5.10.2"),
        ),
    ),
}
# Tests whether a Python can make environments and compile: some shims of pyenv do not run, and a system's Python can
# lack headers.
PROBE = """
import ensurepip, os, sys, sysconfig, venv
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
print("{}.{}".format(*sys.version_info))
"""
TRY = """
import sys
from megatron_sft_idx import Shard, _native
(pack,) = Shard(sys.argv[1])
assert _native.__file__.startswith(sys.prefix), _native.__file__
print(f"{len(pack['input_ids'])} tokens, {pack['loss_mask'].sum()} trained")
"""
VERSIONS_OF = """
import sys
from importlib.metadata import version
print(*(f"{name} {version(name)}" for name in sys.argv[1:]), sep=", ")
"""
CHAT = '{"messages": [{"role": "user", "content": "Good morning!"}, {"role": "assistant", "content": "Bonjour !"}]}\n'


def candidates(version: str) -> Iterator[Path]:
    """Yield paths where a Python of this version can be, the most likely first."""
    for folder in os.get_exec_path():
        yield Path(folder, f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(pyenv.glob(f"versions/{version}.*/bin/python"))


def find(version: str) -> Path | None:
    """Return a working Python of this version, if there is one."""
    for path in candidates(version):
        if path.exists():
            probed = subprocess.run([path, "-I", "-c", PROBE], capture_output=True, text=True, check=False)
            if probed.stdout.strip() == version:
                return path
    return None


def pip(python: Path | str, *arguments: object) -> None:
    """Run pip quietly, with the versions of constraints.txt, also in its build environments.

    A version in an argument takes precedence over constraints.txt.
    """
    named = {argument.partition("==")[0] for argument in map(str, arguments) if "==" in argument}
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    command = [python, "-m", "pip", "-qq", "--disable-pip-version-check", *map(str, arguments)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.writelines(line for line in lines if line.partition("==")[0] not in named)
        constraints.flush()
        subprocess.run(command, env={**os.environ, "PIP_CONSTRAINT": constraints.name}, cwd=ROOT, check=True)


def environment(name: str, found: Path, *packages: str, alone: str | None = None) -> Path:
    """Return the Python of an environment with this package (editable) and others.

    It is made once, and when they change.

    The package ``alone`` is installed without its dependencies.
    """
    folder = ROOT / name
    python, stamp = folder / "bin" / "python", folder / "made-from"
    made_from = [*((ROOT / path).read_bytes() for path in MADE_FROM), repr((packages, alone)).encode()]
    wanted = hashlib.sha256(b"".join(made_from)).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"setting up {name}, which takes minutes, and many with a torch for CUDA", flush=True)
        subprocess.run([found, "-m", "venv", folder], check=True)
        pip(python, "install", "setuptools", "pybind11")
        pip(python, "install", "--no-build-isolation", *packages)
        if alone is not None:
            pip(python, "install", "--no-deps", alone)
        stamp.write_text(wanted)
    subprocess.run([python, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=ROOT, check=True)
    return python


def run_tests(what: str, python: Path, arguments: list[str]) -> str:
    """Run pytest and return the result as one line. Its first word shows success or failure."""
    print(what, flush=True)
    options = ["-p", "no:cacheprovider", "--numprocesses", "2", "--dist", "loadfile"]
    command = [python, "-m", "pytest", *options, *arguments]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    last = ""
    for line in run.stdout:
        print(line, end="", flush=True)
        last = line.strip() or last
    return f"{'bad' if run.wait() else 'good'}: {what}: {last}"


def against_megatron(pythons: dict[str, Path]) -> Iterator[str]:
    """Yield the result for each Python and its Megatron."""
    files = [str(path) for name in TESTS for path in sorted((ROOT / "tests").glob(f"*/test_{name}.py"))]
    for version, found in pythons.items():
        bridge, beside = BRIDGE.get(version, (None, ()))
        if version == "{}.{}".format(*sys.version_info) and bridge is None:  # .venv has everything except Bridge
            python = Path(sys.executable)
        else:
            packages = ("--editable", ".[test]", *beside)
            python = environment(f".venv-megatron-{version}", found, *packages, alone=bridge)
        # A missing package is an error here. Otherwise its tests would be skipped, and the result would look good.
        names = ["megatron-core", "torch", *filter(None, [bridge])]
        asked = subprocess.run([python, "-c", VERSIONS_OF, *names], capture_output=True, text=True, check=True)
        yield run_tests(f"Python {version}, {asked.stdout.strip()}", python, ["-m", "not cloud", *files])


def against_trainers(pythons: dict[str, Path]) -> Iterator[str]:
    """Yield the result for each trainer, tested through its own collator and loader."""
    if (found := pythons.get("3.11")) is None:
        return
    tools = ("--editable", ".", "hypothesis", "pyarrow", "pytest", "pytest-xdist", "torch")
    for name, (trainer, packages) in TRAINERS.items():
        whole = name == "trl"
        asked = (*tools, *packages, *([trainer] if whole else []))
        python = environment(f".venv-trainer-{name}", found, *asked, alone=None if whole else trainer)
        file = f"tests/trainers/test_trainer_{name.removeprefix('nemo-')}.py"
        yield run_tests(f"Python 3.11, {trainer}", python, ["-rP", file])


def with_torchvision(pythons: dict[str, Path]) -> Iterator[str]:
    """Yield the result for models with processors that need torchvision."""
    if (found := pythons.get("3.12")) is None:
        return
    tools = ("--editable", ".[media,parquet]", "hypothesis", "pytest", "pytest-xdist", "torch", "torchvision")
    python = environment(".venv-media-3.12", found, *tools)
    asked = subprocess.run(
        [python, "-c", VERSIONS_OF, "torch", "torchvision", "transformers"], capture_output=True, text=True, check=True
    )
    yield run_tests(f"Python 3.12, {asked.stdout.strip()}", python, ["-rP", "tests/media_models"])


def without_extras(pythons: dict[str, Path]) -> Iterator[str]:
    """Yield the result of all tests with only the required dependencies, for this Python only."""
    del pythons
    tools = ("hypothesis", "pytest", "pytest-xdist")
    python = environment(".venv-base", Path(sys.executable), "--editable", ".", *tools)
    yield run_tests("without Megatron or any extra", python, ["tests"])


def make_wheels(pythons: dict[str, Path]) -> Iterator[str]:
    """Yield the result for the source distribution and for each wheel."""
    out = ROOT / "dist"
    shutil.rmtree(out, ignore_errors=True)
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-W", "ignore", "-c", build, out], cwd=ROOT, capture_output=True, check=True)
    (source,) = out.iterdir()
    yield f"good: {source.name}, {source.stat().st_size / 1e6:.1f} MB: the wheels were made from it"
    for version, found in pythons.items():
        with tempfile.TemporaryDirectory() as temporary:
            yield _make_wheel(version, found, source, Path(temporary))


def _make_wheel(version: str, found: Path, source: Path, here: Path) -> str:
    """Build one wheel from the source distribution, repair it, and try it in a fresh environment."""
    subprocess.run([found, "-m", "venv", here / "env"], check=True)
    programs, python = here / "env" / "bin", here / "env" / "bin" / "python"
    pip(python, "wheel", "--no-deps", "--wheel-dir", here, source)
    (plain,) = here.glob("*.whl")
    repair = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", here / "repaired", plain]
    tools = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    subprocess.run(repair, env=tools, capture_output=True, text=True, check=True)
    (wheel,) = (here / "repaired").iterdir()
    pip(python, "install", wheel)
    (here / "chat.jsonl").write_text(CHAT)
    arguments = ["--tokenizer-model", ROOT / "tools/demo/tokenizer", "--seq-length", "64", "--output-prefix", "x"]
    steps = {
        "preprocessed": [programs / "megatron-sft-idx", "preprocess", "--input", "chat.jsonl", *arguments],
        "verified": [programs / "megatron-sft-idx", "verify", "x", "--full"],
        "read": [python, "-c", TRY, "x"],
    }
    for step, command in steps.items():
        run = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
        if run.returncode:
            return f"bad: {wheel.name}: {step}: {run.stderr.strip()}"
    shutil.copy(wheel, source.parent)
    return f"good: {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB: {', '.join(steps)}: {run.stdout.strip()}"


TASKS = {
    "megatron": against_megatron,
    "trainers": against_trainers,
    "media": with_torchvision,
    "base": without_extras,
    "wheels": make_wheels,
}


def main(task: str) -> int:
    """Run a task, print its results, and list the missing Pythons."""
    found = {version: find(version) for version in VERSIONS}
    pythons = {version: path for version, path in found.items() if path}
    outcomes = []
    try:
        for outcome in TASKS[task](pythons):
            outcomes.append(outcome)
    except subprocess.CalledProcessError as error:
        outcomes.append(f"bad: {error} {error.stderr or ''}")
    print(*outcomes, sep="\n")
    if missing := [version for version in VERSIONS if version not in pythons]:
        print(f"not found, neither in the PATH nor under pyenv's folder: Python {', '.join(missing)}")
    return int(any(outcome.startswith("bad") for outcome in outcomes) or not outcomes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
