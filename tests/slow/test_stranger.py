"""A new user clones the repository and pastes the README and then the pages, line by line."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from doc_blocks import PAGES, ROOT, RUN, blocks_of, complaint, outputs, paste

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("install", ["pip install", "pip install --editable"])
def test_the_readme_in_a_clean_clone(tmp_path: Path, install: str) -> None:
    folder = tmp_path / "clone"
    git = ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder)]
    if subprocess.run(git, capture_output=True, check=False).returncode:
        pytest.skip("not a git checkout, so there is nothing to clone")
    pages = [blocks_of(page) for page in PAGES]
    blocks = [block for page in pages for block in page]
    # The environment has no variables of this test run. One test module is enough to show that `make test` works; the
    # whole suite would take too long.
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("PY")}
    environment["PYTEST_ADDOPTS"] = "tests/project/test_house.py"
    pasted = [block for block in blocks if block.kind in {*RUN, "sh install", "sh slow", "sh ray"}]
    if "--editable" in install:  # runs the quick commands with the package compiled in the clone
        pasted = [block for block in pasted if block.kind in RUN or "pip install" in block.text]
        pasted = [replace(block, text=block.text.replace(" '.[", " --editable '.[")) for block in pasted]
    said = paste(pasted, folder, environment, 3600)
    wrong = [complaint(shown, said[block]) for page in pages for block, shown in outputs(page) if block in said]
    assert not any(wrong), "\n\n".join(filter(None, wrong))
    # `make` compiles in the clone; a package installed by pip without --editable is elsewhere.
    assert list(folder.glob("megatron_sft_idx/_native.*.so"))
