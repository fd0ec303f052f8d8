"""The tested build is the intended one: the checkout's own or the sanitized one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_sft_idx import _native

ROOT = Path(__file__).parent.parent.parent
# Set by `make sanitize` to the folder of the sanitized build.
FOLDER = os.environ.get("SFT_IDX_NATIVE_FOLDER")


def test_the_build_under_test_is_the_one_that_was_meant() -> None:
    path = Path(_native.__file__).resolve()
    meant = (ROOT / (FOLDER or "") / "megatron_sft_idx").resolve()
    if not FOLDER and not list(meant.glob("_native.*.so")):
        pytest.skip("nothing is compiled here: the package under test is the installed one")
    assert path.parent == meant
    assert (b"__asan_init" in path.read_bytes()) == bool(FOLDER)
