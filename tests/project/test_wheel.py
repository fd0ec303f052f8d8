"""The source distribution has all files of the checkout; its wheel has only the compiled package."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_what_is_distributed_is_complete_and_imports_alone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    clone = ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(source)]
    if subprocess.run(clone, capture_output=True, check=False).returncode:
        pytest.skip("not a git checkout, so there is nothing to build cleanly from")
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=source, capture_output=True, check=True)
    (distribution,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(distribution) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=source, capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in listed if not name.startswith(".")} <= held
    pip = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(distribution)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(tmp_path / "installed")
    committed = {str(path.relative_to(source)) for path in (source / "megatron_sft_idx").rglob("*") if path.is_file()}
    compiled = {name for name in names if name.startswith("megatron_sft_idx/_native.") and name.endswith(".so")}
    assert len(compiled) == 1
    assert names - compiled == committed

    program = "import megatron_sft_idx._native as native; print(native.__file__)"
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path / "installed", capture_output=True, check=True)
    assert run.stdout.decode().strip() == str(tmp_path / "installed" / min(compiled))
