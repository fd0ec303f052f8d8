"""Worker processes: results in order, replacement of killed workers, errors in the parent, no leftover processes."""

from __future__ import annotations

import ctypes
import operator
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from interruptions import workers_of

from megatron_sft_idx.errors import SequenceError, SFTIndexError
from megatron_sft_idx.tokenize import local
from megatron_sft_idx.tokenize.local import NOT_YET, Local

start_worker = local._start
STOPPED = 4000, 5000


class UnpicklableError(OSError):
    """An error like in some libraries that pickle cannot restore, because it stores the base class's arguments."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")


class Deadly(NamedTuple):
    """An item that kills its worker until ``deaths`` workers have died. Files in ``folder`` count these."""

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
    if number in STOPPED:
        # The process does not react to a closed pipe, or one call blocks all of Python.
        os.kill(os.getpid(), signal.SIGSTOP) if number == 4000 else ctypes.PyDLL(None).sleep(600)
    if number == 3000:
        raise UnpicklableError(7, "a store said no")
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
    """The third item is available only after the results of the first two have been taken."""
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


def die_while_starting(pipe) -> None:
    """The first DEATHS workers (an environment variable) die, and leave a mark each."""
    folder, deaths = os.environ["DEATHS"].rsplit(":", 1)
    if len(marks := list(Path(folder).glob("start*"))) < int(deaths):
        (Path(folder) / f"start{len(marks)}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    start_worker(pipe)


@pytest.mark.parametrize("deaths", [2, 99])
def test_workers_that_die_while_they_start_died_over_no_item(tmp_path, monkeypatch, deaths):
    monkeypatch.setattr(local, "_start", die_while_starting)
    monkeypatch.setenv("DEATHS", f"{tmp_path}:{deaths}")
    (marks := tmp_path / "marks").mkdir()
    if deaths < 3:  # and two die with the first item
        assert squares(marks, range(3), workers=1, number=0, deaths=2) == [0, 1, 4]
        return
    with pytest.raises(SFTIndexError, match="number 0: worker processes died 3 times in a row before they reached"):
        squares(marks, range(3), workers=1)


def test_workers_killed_while_they_wait_died_over_no_item(tmp_path):
    """An idle worker is killed before each item, and one dies with the first."""

    before = workers_of(os.getpid())  # processes of earlier tests, such as Megatron's, which its checkpoints need

    def items():
        for number in range(3):
            for child in set(workers_of(os.getpid())).difference(before):
                os.kill(child, signal.SIGKILL)
                wait_until(lambda child=child: not is_running(child))
            yield number
            yield NOT_YET

    with squaring(tmp_path, items(), workers=1, number=0, deaths=2) as results:
        assert [result for result in results if result is not NOT_YET] == [0, 1, 4]


@pytest.mark.parametrize("workers", [0, 2])
def test_any_object_is_an_item(workers):
    with Local(workers) as pool:
        found = list(pool.map_in_order(operator.eq, None, [None, 1, None], name_of=str))
    assert found == [True, False, True]


def test_errors_come_at_their_turn_and_whole(tmp_path):
    with squaring(tmp_path, [1, 2, 1000, 3]) as numbers:
        assert [next(numbers), next(numbers)] == [1, 4]
        with pytest.raises(SequenceError) as caught:
            next(numbers)
    assert (caught.value.source, caught.value.position, caught.value.reason) == ("numbers", 1000, "too large")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_that_cannot_be_pickled_is_no_dead_worker(tmp_path, workers):
    with pytest.raises((OSError, RuntimeError), match="7: a store said no"):
        squares(tmp_path, [1, 3000], workers=workers)


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


def test_an_interrupt_while_workers_start_is_the_parents_alone(tmp_path):
    """Ctrl-C reaches the whole process group; workers that are still importing print no tracebacks."""
    script = (
        f"import os, signal, sys; sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]!r}\n"
        "import test_workers\n"
        "signal.signal(signal.SIGINT, lambda *_: None)\n"
        f"with test_workers.squaring({str(tmp_path)!r}, range(3)) as results:\n"
        "    os.killpg(0, signal.SIGINT)\n"
        "    print(list(results))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = [sys.executable, "-c", script]
    done = subprocess.run(run, capture_output=True, text=True, env=environment, start_new_session=True, check=False)
    assert (done.stdout, done.stderr) == ("[0, 1, 4]\n", "")


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(is_true) -> None:
    deadline = time.monotonic() + 300
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_true()


@pytest.mark.parametrize("number", STOPPED)
def test_workers_that_do_not_answer_are_killed(tmp_path, number):
    before = workers_of(os.getpid())
    with squaring(tmp_path, [1, number, number, 2]) as results:
        assert next(results) == 1
        assert len(workers_of(os.getpid())) == len(before) + 2
        time.sleep(0.3)  # the other workers have begun
        begin = time.monotonic()
    assert time.monotonic() - begin < 10
    assert workers_of(os.getpid()) == before


def test_workers_end_where_another_one_cannot_be_started(monkeypatch):
    before, start = workers_of(os.getpid()), local._Worker.__init__

    def start_once(worker, idle_deaths=0):
        if workers_of(os.getpid()) != before:
            raise KeyboardInterrupt
        start(worker, idle_deaths)

    monkeypatch.setattr(local._Worker, "__init__", start_once)
    with pytest.raises(KeyboardInterrupt):
        Local(9)
    assert workers_of(os.getpid()) == before


def test_workers_end_with_a_killed_parent(tmp_path):
    """The parent cannot clean up; its workers must not wait for it endlessly."""
    script = tmp_path / "parent.py"
    script.write_text(
        f"import sys; sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]!r}\n"
        "from test_workers import squaring\n"
        "if __name__ == '__main__':\n"
        f"    with squaring({str(tmp_path)!r}, range(10**6)) as results:\n"
        "        print(next(results), flush=True)\n"
        "        for _ in results: pass\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "0\n"
        workers = children_of(parent.pid)
        assert len(workers) >= 2
        parent.kill()
    wait_until(lambda: not any(map(is_running, workers)))
