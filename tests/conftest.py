"""Says which build of the native kernels is tested, and what was left out; makes property tests repeatable."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest
from hypothesis import settings

from megatron_sft_idx import _native
from megatron_sft_idx.shards import budgets

# The same examples in every run, so that a failure is of the change that is tested, and not of a machine that had much
# else to do. Another profile looks further: HYPOTHESIS_PROFILE=default make test
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# Whoever runs the tests may ignore Ctrl-C, as shells let their background jobs do; tests and their children do not.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    return f"native kernels: {_native.__file__}"


_LEFT_OUT = pytest.StashKey[int]()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("cloud"):
            item.config.stash[_LEFT_OUT] = item.config.stash.get(_LEFT_OUT, 0) + 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if (count := config.stash.get(_LEFT_OUT, 0)) and "not cloud" in config.option.markexpr:
        terminalreporter.write_line(f"LEFT OUT: {count} tests that need a real object store; make test-cloud runs them")


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
