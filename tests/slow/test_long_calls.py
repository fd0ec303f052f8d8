"""Signals during real long calls: packing of tens of millions of sequences, and a checksum of a large file."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from interruptions import ended_within, started, wait_for_line

pytestmark = pytest.mark.slow

_PROGRAM = """
import sys, threading
import numpy as np
from megatron_sft_idx.cli.signals import ending_on_signals
from megatron_sft_idx.packing import pack_sequences
from megatron_sft_idx.storage.local import StreamHash, digest_file

lengths = np.random.default_rng(0).integers(1, 4096, 40_000_000)
work = {
    "packing": lambda: pack_sequences(lengths, 4096, method="first-fit-shuffle"),
    "file": lambda: [digest_file(sys.argv[2]) for _ in range(1000)],
    "bytes": lambda: [StreamHash().update(lengths.view(np.uint8)) for _ in range(1000)],
}[sys.argv[1]]
with ending_on_signals(is_program=True):
    threading.Timer(0.5, print, ["begun"], {"file": sys.stderr, "flush": True}).start()
    work()
    print("ended", file=sys.stderr)
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("work", ["packing", "file", "bytes"])
def test_a_long_call_ends_within_seconds(tmp_path: Path, work: str, sent: signal.Signals) -> None:
    with open(tmp_path / "large", "wb") as file:
        file.truncate(1 << 33)
    with started("-c", _PROGRAM, work, tmp_path / "large") as process:
        wait_for_line(process, "begun")
        begin = time.monotonic()
        process.send_signal(sent)
        said = ended_within(process, 60)
    assert time.monotonic() - begin < 8
    assert "ended" not in said
    assert process.returncode in (128 + sent, -sent)  # without the program, Ctrl-C is Python's default
