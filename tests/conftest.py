"""pytest configuration: repeatable property tests, skips for missing extras, samples of large matrices, a summary."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from sampling import sample, with_fewer_examples

from megatron_sft_idx import _native
from megatron_sft_idx.shard import shard_set

# Some tests use functions of test modules in other folders.
sys.path += sorted({str(path.parent) for path in Path(__file__).parent.glob("*/test_*.py")})

# The same examples in every run, on any machine, so that a failure is caused by the change that is tested. For new
# examples: HYPOTHESIS_PROFILE=default make test
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# Pages show when they were made, and tests compare pages made at different times.
os.environ["SOURCE_DATE_EPOCH"] = "1787564100"

# Restore Ctrl-C: a shell starts background jobs with SIGINT ignored, and tests need it in child processes.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    return f"native kernels: {_native.__file__}"


# Importing hundreds of modules allocates many objects but leaves little garbage.
gc.disable()


def pytest_collection_finish() -> None:
    """Exclude everything imported so far from garbage collection, here and in forks."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """Collect garbage after each module: torch kills a forked child that collects models trained by its parent."""
    yield
    gc.collect()


# Packages that a base install lacks. A test that needs a missing one is skipped.
_EXTRAS = (
    *("torch", "megatron", "pyarrow", "transformers", "zstandard", "boto3", "botocore", "multistorageclient"),
    *("tiktoken", "sentencepiece", "accelerate", "datasets", "PIL", "soundfile", "soxr"),
)
_MISSING = {name for name in _EXTRAS if find_spec(name) is None}


def _skip_if_missing(report: Any, place: str, complaint: object) -> None:
    """Turn a failure into a skip if Python's message, or our own, shows that an optional package is missing."""
    ours = r"(?:needs? ([\w-]+)[^\n]*|by ([\w-]+), which is not installed:) pip install 'megatron-sft-idx\["
    theirs = r"requires `([\w-]+)"  # the message of transformers for its Trainer
    named = re.findall(rf"No module named '(\w+)|{ours}|{theirs}", str(complaint))
    if report.failed and (missing := _MISSING.intersection(name.replace("-", "") for pair in named for name in pair)):
        report.outcome, report.longrepr = "skipped", (place, 0, f"{min(missing)} is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    _skip_if_missing(report, str(collector.path), report.longrepr)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    _skip_if_missing(report, str(item.path), call.excinfo and call.excinfo.value)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Mark all but `count` cases of a test marked ``sample(count)`` as slow, and reduce examples of property tests.

    make test-slow runs all cases and examples.
    """
    matrices: dict[str, list[pytest.Item]] = {}
    properties = set()
    for item in items:
        function = getattr(item, "function", None)
        if is_hypothesis_test(function):
            item.add_marker(pytest.mark.examples)
            properties.add(function)
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in matrices.values():
        marker = cases[0].get_closest_marker("sample")
        kept = {item.nodeid for item in sample(cases, marker.args[0])} if marker else set()
        for item in cases:
            if item.nodeid not in kept:
                item.add_marker(pytest.mark.slow)
    asked_for_slow = re.search(r"(?<!not )\bslow\b", config.option.markexpr)
    if not asked_for_slow and "HYPOTHESIS_PROFILE" not in os.environ:
        for function in properties:
            # The settings of a decorated function; hypothesis has no public name for them.
            whole = function._hypothesis_internal_use_settings
            function._hypothesis_internal_use_settings = with_fewer_examples(whole)


_LEFT_OUT = pytest.StashKey[int]()
_SENT = "tests left out"


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("cloud"):
            item.config.stash[_LEFT_OUT] = item.config.stash.get(_LEFT_OUT, 0) + 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    if sent := getattr(session.config, "workeroutput", None):
        sent[_SENT] = session.config.stash.get(_LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Count deselected tests if xdist's workers collected them; all workers deselect the same ones."""
    if sent := getattr(node, "workeroutput", None):
        node.config.stash[_LEFT_OUT] = sent[_SENT]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if (count := config.stash.get(_LEFT_OUT, 0)) and "not cloud" in config.option.markexpr:
        terminalreporter.write_line(f"LEFT OUT: {count} tests that need a real object store; make test-cloud runs them")


@pytest.fixture
def no_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every set have more shards than may be mapped."""
    monkeypatch.setattr(shard_set, "MAPPED_SHARDS", 0)


@pytest.fixture(params=["held", "reopened"])
def many(request: pytest.FixtureRequest, no_maps: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with sets that are not mapped, once with index arrays in memory and once without."""
    if request.param == "reopened":
        monkeypatch.setattr(shard_set, "MEMORY_NBYTES", 0)
    return str(request.param)
