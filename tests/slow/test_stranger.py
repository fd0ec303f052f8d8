"""A stranger clones the repository and pastes the README from top to bottom, each line as it stands."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from doc_blocks import ROOT, RUN, blocks_of, complaint, outputs, paste

pytestmark = pytest.mark.slow


def test_the_readme_in_a_clean_clone(tmp_path: Path) -> None:
    folder = tmp_path / "clone"
    git = ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder)]
    if subprocess.run(git, capture_output=True, check=False).returncode:
        pytest.skip("not a git checkout, so there is nothing to clone")
    blocks = blocks_of("README.md")
    # A stranger's environment has nothing of this run's. Of the test suite, which takes its time and is at work
    # already, one module is enough to see that `make test` runs.
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("PY")}
    environment["PYTEST_ADDOPTS"] = "tests/test_house.py"
    pasted = [block for block in blocks if block.kind in {*RUN, "sh install", "sh slow", "sh ray"}]
    said = paste(pasted, folder, environment, 3600)
    wrong = [complaint(shown, said[block]) for block, shown in outputs(blocks) if block in said]
    assert not any(wrong), "\n\n".join(filter(None, wrong))
