"""``inspect`` of a million packs needs bounded memory and makes a small page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_shard_scale import MIB, measure, write_many

pytestmark = pytest.mark.slow

INSPECT = """
import resource
from megatron_sft_idx.cli.main import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
main(["inspect", sys.argv[1], *sys.argv[2:], "--log-interval", "0"])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("million") / "x"
    write_many(prefix, 10**6, length=100)
    return prefix


def grown(*arguments: object) -> int:
    """Return the growth of the process in KiB; the command's output is discarded."""
    quiet = INSPECT.replace("main([", "sys.stdout, out = open('/dev/null', 'w'), sys.stdout; main([")
    return measure(quiet.replace("print(", "sys.stdout = out; print("), *map(str, arguments))[0]


def test_the_page_of_a_million_packs(million: Path, tmp_path: Path) -> None:
    assert grown(million, "--html", tmp_path / "x.html") * 1024 < 200 * MIB
    assert (tmp_path / "x.html").stat().st_size < 10**6


def test_a_changed_bit_among_a_hundred_million(million: Path, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx", ".seq.bin", ".seq.idx"):
        (tmp_path / f"x{suffix}").symlink_to(f"{million}{suffix}")
    mask = np.zeros(10**8, np.uint8)
    mask[77_777_777] = 1
    mask.tofile(tmp_path / "x.loss.bin")
    assert grown(million, "--diff", tmp_path / "x") * 1024 < 200 * MIB
