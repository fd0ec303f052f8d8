"""Worker processes: results in order, killed ones replaced, errors passed on, nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_sft_idx.errors import SequenceError, SFTIndexError
from megatron_sft_idx.tokenize.local import NOT_YET, Local


class Deadly(NamedTuple):
    """A number to die at until one has died ``deaths`` times, which files in ``folder`` count."""

    folder: str
    number: int = -1
    deaths: int = 0


def square(deadly: Deadly, number: int) -> int:
    folder = Path(deadly.folder)
    if number == deadly.number and len(list(folder.iterdir())) < deadly.deaths:
        (folder / str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 1000:
        raise SequenceError("numbers", number, "too large")
    if number == 2000:
        raise ZeroDivisionError("a bug of the task")
    return number * number


@contextmanager
def squaring(folder: Path, numbers, *, workers: int = 2, **deadly):
    with Local(workers) as pool:
        yield pool.map_in_order(square, Deadly(str(folder), **deadly), numbers, name_of="number {}".format)


def squares(folder: Path, numbers, *, workers: int = 2, **deadly) -> list[int]:
    with squaring(folder, numbers, workers=workers, **deadly) as made:
        return list(made)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_results_come_in_order(tmp_path, workers):
    assert squares(tmp_path, range(40), workers=workers) == [n * n for n in range(40)]


@pytest.mark.parametrize("workers", [0, 1])
def test_results_do_not_wait_for_items_that_are_not_there_yet(tmp_path, workers):
    """The third item comes only once the results of the first two have been taken."""
    taken: list[int] = []

    def items():
        yield from (1, 2)
        while len(taken) < 2:
            yield NOT_YET
        yield 3
        yield NOT_YET

    with squaring(tmp_path, items(), workers=workers) as results:
        for result in results:
            if result is not NOT_YET:
                taken.append(result)
    assert taken == [1, 4, 9]


def test_work_of_killed_workers_is_done_again(tmp_path):
    assert squares(tmp_path, range(20), number=7, deaths=2) == [n * n for n in range(20)]
    assert len(list(tmp_path.iterdir())) == 2


def test_an_item_that_keeps_killing_its_worker_is_named(tmp_path):
    with pytest.raises(SFTIndexError, match="number 7: worker processes died 3 times"):
        squares(tmp_path, range(20), number=7, deaths=99)


def test_errors_come_at_their_turn_and_whole(tmp_path):
    with squaring(tmp_path, [1, 2, 1000, 3]) as numbers:
        assert [next(numbers), next(numbers)] == [1, 4]
        with pytest.raises(SequenceError) as caught:
            next(numbers)
    assert (caught.value.source, caught.value.position, caught.value.reason) == ("numbers", 1000, "too large")


@pytest.mark.parametrize("workers", [0, 2])
def test_bugs_show_where_they_are(tmp_path, workers):
    with pytest.raises((RuntimeError, ZeroDivisionError), match="a bug of the task") as caught:
        squares(tmp_path, [1, 2000], workers=workers)
    if workers:
        assert "test_workers.py" in str(caught.value)


def test_only_a_few_items_are_taken_ahead(tmp_path):
    taken = []

    def watched():
        for number in range(1000):
            taken.append(number)
            yield number

    with squaring(tmp_path, watched()) as results:
        assert next(results) == 0
        assert len(taken) <= 6


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_workers_end_with_a_killed_parent(tmp_path):
    """The parent gets no chance to clean up; its workers must not wait for it for ever."""
    script = tmp_path / "parent.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_workers import squaring\n"
        "if __name__ == '__main__':\n"
        f"    with squaring({str(tmp_path)!r}, range(10**6)) as results:\n"
        "        print(next(results), flush=True)\n"
        "        for _ in results: pass\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "0\n"
        workers = children_of(parent.pid)
        assert len(workers) >= 2
        parent.kill()
    deadline = time.monotonic() + 300
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))
