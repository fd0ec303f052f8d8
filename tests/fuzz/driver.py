"""Run fuzz targets for some seconds each: ``python tests/fuzz/driver.py [TARGET ...] --seconds 600``.

Every target runs in a separate process. New inputs go to ``build/fuzz/NAME``, and inputs that broke the contract to
``build/fuzz/findings``. After a fix, move such an input to ``tests/fuzz/corpus/NAME``, where the test suite replays it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from fuzz.contract import memory_folder  # noqa: E402 - the folders above are where it is found
from fuzz.targets import CORPUS, TARGETS, load  # noqa: E402

WORK = TESTS.parent / "build/fuzz"
# atheris leaks about 30 KB per input in an instrumented target, so the limit is far above the need of one input.
SECONDS_PER_INPUT, MIB = 20, 6000


class Outcome(NamedTuple):
    """The result of one run of a target."""

    name: str
    code: int
    executions: int
    coverage: int
    peak_mib: int
    inputs: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all by default")
    parser.add_argument("--seconds", type=int, default=600, help="for each target (600)")
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time (1)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.targets) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    if arguments.inside:
        return fuzz(arguments.targets[0], arguments.seconds)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        names = arguments.targets or list(TARGETS)
        outcomes = list(pool.map(lambda name: in_a_process(name, arguments.seconds), names))
    return max(outcome.code != 0 for outcome in outcomes)


def in_a_process(name: str, seconds: int) -> Outcome:
    """Fuzz one target in a process that libFuzzer ends, with or without a finding."""
    WORK.mkdir(parents=True, exist_ok=True)
    log = WORK / f"{name}.log"
    command = [sys.executable, __file__, name, "--seconds", str(seconds), "--inside"]
    with open(log, "wb") as out, tempfile.TemporaryDirectory(dir=memory_folder()) as scratch:
        environment = {**os.environ, "TMPDIR": scratch}
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    text = log.read_text(errors="replace")
    coverage = re.findall(r"cov: (\d+) ft: \d+ corp: (\d+)", text) or [("0", "0")]

    def stat(key: str) -> int:
        found = re.search(rf"stat::{key}:\s+(\d+)", text)
        return int(found[1]) if found else 0

    outcome = Outcome(
        name, code, stat("number_of_executed_units"), int(coverage[-1][0]), stat("peak_rss_mb"), int(coverage[-1][1])
    )
    print(
        f"{name:12} {outcome.executions:>10,} executions  {outcome.coverage:>5} branches  {outcome.inputs:>5} inputs  "
        f"{outcome.peak_mib:>5} MiB  {'no finding' if code == 0 else f'FINDING: see {log}'}",
        flush=True,
    )
    return outcome


def fuzz(name: str, seconds: int) -> int:
    """Pass a target to libFuzzer, which never returns."""
    import atheris

    target = TARGETS[name]
    with atheris.instrument_imports(include=["megatron_sft_idx", "fuzz"]):
        run = load(name)
    grown, findings = WORK / name, WORK / "findings"
    for folder in (grown, findings):
        folder.mkdir(parents=True, exist_ok=True)
    words = CORPUS / f"{name}.dict"
    options = [
        f"-max_total_time={seconds}",
        f"-max_len={target.max_nbytes}",
        f"-timeout={SECONDS_PER_INPUT}",
        f"-rss_limit_mb={MIB}",
        f"-artifact_prefix={findings}{os.sep}{name}-",
        "-print_final_stats=1",
        *([f"-dict={words}"] if words.exists() else []),
    ]
    atheris.Setup([sys.argv[0], *options, str(grown), str(CORPUS / name)], run)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
