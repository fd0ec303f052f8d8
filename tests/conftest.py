"""Says in pytest's header which build of the native kernels is tested; makes property tests repeatable."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

from megatron_sft_idx import _native
from megatron_sft_idx.shards import budgets

# The same examples in every run, so that a failure is of the change that is tested. Another profile looks further:
# HYPOTHESIS_PROFILE=default make test
settings.register_profile("repeatable", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# Whoever runs the tests may ignore Ctrl-C, as shells let their background jobs do; tests and their children do not.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    return f"native kernels: {_native.__file__}"


@pytest.fixture
def no_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any set has more shards than are mapped."""
    monkeypatch.setattr(budgets.MAPPED_SHARDS, "most", 0)


@pytest.fixture(params=["held", "reopened"])
def many(request: pytest.FixtureRequest, no_maps: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Sets are not mapped, and are held in memory or not even that."""
    if request.param == "reopened":
        monkeypatch.setattr(budgets.MEMORY_NBYTES, "most", 0)
    return str(request.param)
