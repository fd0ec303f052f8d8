"""tools/pretrain_sft.py after failures of its launcher, its output, its checkpoints, or changes of its data."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from chats import ROOT, preprocess
from pretrain_runs import run
from training_twin import lone_process

from megatron_sft_idx.errors import FormatError

SCRIPT = ROOT / "tools/pretrain_sft.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
ENVIRONMENT |= {"PYTHONWARNINGS": "ignore"}
LENGTH, PATIENCE = 544, 120
LATEST, LAST_FILE = "latest_checkpointed_iteration.txt", "metadata.json"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, seed in (("chats", 1), ("others", 7)):
        outcome = preprocess(folder / name, "--seed", seed, capacity=LENGTH)
        assert outcome.code == 0, outcome.err
    return folder


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with lone_process() as module:
        yield module


@pytest.fixture(scope="module")
def trained(script: ModuleType, data: Path) -> Path:
    """Provide checkpoints of 2 and of 4 steps."""
    run(script, options(data, "--save", data / "trained", "--save-interval", 2, steps=4))
    return data / "trained"


@pytest.fixture
def checkpoints(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "checkpoints")


def options(data: Path, *more: object, steps: int = 5) -> list[str]:
    size = ["--hidden-size", 32, "--seq-length", LENGTH, "--train-iters", steps, "--global-batch-size", 4]
    path = [] if "--data-path" in more else ["--data-path", data / "chats"]
    return [str(option) for option in (*path, *size, *more)]


def train(*given: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *given]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE, check=False)


# ---- the launcher ----


def is_running(pid: int) -> bool:
    """Return whether a process is running. Zombies do not count, because their parent may never wait for them."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def children_of(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


@pytest.mark.slow
def test_ranks_end_when_their_launcher_is_killed(data: Path, tmp_path: Path) -> None:
    """Processes that ranks started end too, such as Megatron's writers of checkpoints."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    metrics = tmp_path / "metrics.jsonl"
    saves = ["--save", tmp_path / "checkpoints", "--save-interval", 2]
    command = [sys.executable, *torchrun, str(SCRIPT), *options(data, "--metrics", metrics, *saves, steps=10**6)]
    ranks: list[int] = []
    started: list[int] = []
    with open(tmp_path / "said", "w") as said:
        launcher = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=said)
    try:
        end = time.monotonic() + PATIENCE
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            assert launcher.poll() is None, (tmp_path / "said").read_text()
            assert time.monotonic() < end, "no step was taken"
            time.sleep(0.05)
        ranks = children_of(launcher.pid)
        assert len(ranks) == 2
        started = [child for rank in ranks for child in children_of(rank)]
        assert started
        # The other rank then waits in a collective endlessly.
        os.kill(ranks[1], signal.SIGSTOP)
        launcher.kill()
        launcher.wait()
        os.kill(ranks[1], signal.SIGCONT)
        for process in (*ranks, *started):
            while is_running(process):
                assert time.monotonic() < end, "a rank goes on"
                time.sleep(0.05)
    finally:
        launcher.kill()
        launcher.wait()
        for process in filter(is_running, (*ranks, *started)):
            os.kill(process, signal.SIGKILL)
    words = f"pretrain_sft.py: error: torchrun (process {launcher.pid}) has ended, so this rank ends too"
    assert words in (tmp_path / "said").read_text().splitlines()


@pytest.mark.slow
def test_a_rank_that_ends_with_an_error_takes_what_it_started_along(data: Path, tmp_path: Path) -> None:
    """The processes that write its checkpoints would wait for work endlessly."""
    metrics = tmp_path / "metrics.jsonl"
    saves = ["--save", tmp_path / "checkpoints", "--save-interval", 2]
    command = [sys.executable, str(SCRIPT), *options(data, "--metrics", metrics, *saves, steps=10**6)]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meeting = {
            "TORCHELASTIC_RUN_ID": "none",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free.getsockname()[1]),
            "WORLD_SIZE": "2",
        }
    ranks: list[subprocess.Popen[bytes]] = []
    started: list[int] = []
    try:
        for number in ("0", "1"):
            places = ENVIRONMENT | meeting | {"RANK": number, "LOCAL_RANK": number}
            with open(tmp_path / number, "w") as said:
                ranks.append(subprocess.Popen(command, env=places, stdout=subprocess.DEVNULL, stderr=said))
        end = time.monotonic() + PATIENCE
        while not (metrics.exists() and (started := children_of(ranks[0].pid))):
            assert ranks[0].poll() is None
            assert time.monotonic() < end, "no process was started"
            time.sleep(0.05)
        ranks[1].kill()
        assert ranks[0].wait(PATIENCE) == 1
        assert "another process has failed; see its message" in (tmp_path / "0").read_text()
        for process in started:
            while is_running(process):
                assert time.monotonic() < end, "a process goes on"
                time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        for process in filter(is_running, started):
            os.kill(process, signal.SIGKILL)


# ---- output ----


@pytest.mark.slow
@pytest.mark.parametrize(
    "streams",
    ["2>&1 | head -1", ">&- 2>&-", ">/dev/full"],
)
def test_training_goes_on_and_saves_where_nobody_takes_its_output(streams: str, data: Path, tmp_path: Path) -> None:
    given = options(data, "--save", tmp_path / "checkpoints")
    command = f'"$@" {streams}; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", command, "bash", sys.executable, str(SCRIPT), *given],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == ("head" in streams)
    assert "Broken" not in done.stderr
    assert (tmp_path / "checkpoints" / LATEST).read_text() == "5"


# ---- checkpoints ----


def test_without_the_name_of_the_latest_checkpoint_the_newest_whole_one_is_continued(
    script: ModuleType, data: Path, checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoints / LATEST).unlink()
    (checkpoints / "iter_0000004" / LAST_FILE).unlink()
    assert len(run(script, options(data, "--save", checkpoints)).losses) == 3
    assert f"resuming from {checkpoints}/iter_0000002, after 2 steps\n" in capsys.readouterr().out
    assert (checkpoints / LATEST).read_text() == "5"


@pytest.mark.parametrize("option", ["--save", "--load"])
def test_checkpoints_of_which_none_is_whole_are_refused(
    option: str, script: ModuleType, data: Path, checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoints / LATEST).unlink()
    for path in checkpoints.glob(f"*/{LAST_FILE}"):
        path.unlink()
    with pytest.raises(SystemExit) as leaving:
        script.parse_arguments(options(data, option, checkpoints))
    assert leaving.value.code == 2
    said = capsys.readouterr().err
    found = (
        f"{checkpoints}/iter_0000004: metadata.json is missing, and no other checkpoint in {checkpoints} is complete"
    )
    assert said.partition(": ")[2].startswith(f"error: {found}; ")
    assert said.count("\n") == 1


def test_a_kill_during_a_save_leaves_no_checkpoint_that_is_not_whole(
    script: ModuleType, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At any time: the same command continues from the previous checkpoint, or reports that there is none."""
    checkpoints = tmp_path / "checkpoints"
    same = options(data, "--save", checkpoints, "--save-interval", 1, steps=10)
    command = [sys.executable, str(SCRIPT), *same]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + PATIENCE
    while not (checkpoints / "unfinished").exists():
        assert process.poll() is None, "no save was seen"
        assert time.monotonic() < end, "no save was begun"
        time.sleep(0.001)
    process.kill()
    process.wait()
    run(script, same)
    told = capsys.readouterr().out
    said = f"{checkpoints}/unfinished: a killed run did not finish this checkpoint, and saved none before it\n"
    assert said in told or f"resuming from {checkpoints}/iter_0" in told
    assert sorted(path.name for path in checkpoints.iterdir()) == [*(f"iter_{n:07d}" for n in range(1, 11)), LATEST]


# ---- the data of the checkpoint ----


@pytest.mark.slow
def test_another_seed_than_the_checkpoints_is_refused_in_one_line(data: Path, checkpoints: Path) -> None:
    done = train(*options(data, "--save", checkpoints, "--seed", "5"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"pretrain_sft.py: error: {checkpoints}/iter_0000004: its run had --seed 1234, this one has --seed 5: samples"
        " would be repeated or missing; use the old value, or start again with another --save, and with --finetune from"
        " these weights"
    )
    assert "Traceback" not in done.stderr
    assert (checkpoints / LATEST).read_text() == "4"


@pytest.mark.parametrize(
    ("more", "found"),
    [
        (["--seed", "5"], "its run had --seed 1234, this one has --seed 5: samples would be repeated or missing; use"),
        (["--split", "90,10,0"], "its run had --split 1,0,0, this one has --split 90,10,0: "),
        (["--repack"], "its run had --repack False, this one has --repack True: "),
        (["--data-path", "others"], "had the data path .*/chats, this one has others, with other shards or"),
        (["--data-path", "0.5", "chats", "0.5", "others"], "this one has 0.5 chats 0.5 others, with other"),
    ],
)
def test_other_data_than_the_checkpoints_is_refused(
    more: list[str],
    found: str,
    script: ModuleType,
    data: Path,
    checkpoints: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(data)
    with pytest.raises(FormatError, match=f"iter_0000004: .*{found}"):
        run(script, options(data, "--load", checkpoints, *more))


def test_weights_alone_are_taken_to_other_data(
    script: ModuleType, data: Path, checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = ["--data-path", data / "others", "--load", checkpoints, "--finetune", "--save", tmp_path / "second"]
    anew = run(script, options(data, "--data-path", data / "others", steps=2))
    tuned = run(script, options(data, *second, steps=2))
    assert f"starting with the weights of {checkpoints}/iter_0000004\n" in capsys.readouterr().out
    assert [row["tokens"].tolist() for row in tuned.rows] == [row["tokens"].tolist() for row in anew.rows]
    assert tuned.losses[0] < anew.losses[0]
    # The same command continues from its own checkpoint.
    assert len(run(script, options(data, *second, steps=3)).losses) == 1
    assert f"resuming from {tmp_path}/second/iter_0000002, after 2 steps\n" in capsys.readouterr().out


def test_weights_are_named(script: ModuleType, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        script.parse_arguments(options(data, "--finetune"))
    assert leaving.value.code == 2
    assert "--finetune needs weights; pass --load" in capsys.readouterr().err


def test_a_checkpoint_that_does_not_name_its_data_is_refused(script: ModuleType) -> None:
    with pytest.raises(FormatError, match="x: does not record which data its run used, perhaps because that was live"):
        script.require_same_data("x", None, {})


def test_other_shards_at_the_same_path_are_refused(
    script: ModuleType, data: Path, checkpoints: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in data.glob("chats.*"):
        shutil.copy(path, moved)
    # The same shards at another path, and an equivalent split, are the same data.
    same = ["--data-path", moved / "chats", "--split", "100,0,0", "--save", checkpoints]
    assert len(run(script, options(data, *same)).losses) == 1
    for path in data.glob("others.*"):
        shutil.copy(path, moved / path.name.replace("others", "chats"))
    with pytest.raises(FormatError, match=r"the shards at .*/chats have changed since its run began: "):
        run(script, options(data, *same, steps=6))
