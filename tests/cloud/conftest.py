"""The object store for the tests of this folder: started once, with a separate bucket for each test."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
from faults import COUNTS, Faults
from swift_server import SwiftServer, serving

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def swift_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwiftServer]:
    """Provide the running server. A test that kills one of its four processes must start it again."""
    with serving(tmp_path_factory.mktemp("swift")) as server:
        yield server


@pytest.fixture
def swift(swift_server: SwiftServer, monkeypatch: pytest.MonkeyPatch) -> SwiftServer:
    """Start all four processes, and set an environment in which S3 clients find them and no settings of the user."""
    swift_server.start()
    for name in list(os.environ):
        if name.startswith(("AWS_", "MSC_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name, value in swift_server.environment().items():
        monkeypatch.setenv(name, value)
    return swift_server


@pytest.fixture
def s3(swift: SwiftServer) -> Any:
    """Provide a boto3 client to read and damage objects."""
    boto3 = pytest.importorskip("boto3", reason="pip install 'megatron-sft-idx[cloud]'")
    return boto3.session.Session().client("s3")


@pytest.fixture
def bucket(s3: Any) -> str:
    """Provide the name of an empty bucket."""
    name = f"bucket-{os.getpid()}-{next(_NUMBERS)}"
    s3.create_bucket(Bucket=name)
    return name


@pytest.fixture
def faults(request: pytest.FixtureRequest) -> Faults:
    """Provide the counts of faults caused by tests; they are printed at the end of the run."""
    return request.config.stash.setdefault(COUNTS, Faults())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if (counts := config.stash.get(COUNTS, None)) and not terminalreporter.stats.get("failed"):
        terminalreporter.section("faults")
        for line in counts.lines():
            terminalreporter.write_line(line)
