"""``python -m megatron_sft_idx.pretrain`` runs a Megatron-LM script with our data sets, and rejects other files."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_sft_idx.pretrain import build_parser, divide, main

ROOT = Path(__file__).parents[2]
# The part of a checkout that a script needs: its own megatron.training, whatever is installed.
CHECKOUT = {
    "megatron/training/__init__.py": "from .training import pretrain\n",
    "megatron/training/training.py": """
def pretrain(cfg_container, train_valid_test_dataset_provider, model_type, forward_step_func, store=None):
    given = train_valid_test_dataset_provider
    print("of", given.func.__module__, given.is_distributed, sorted(given.keywords.items()))
    print("besides", cfg_container, model_type, forward_step_func, store)
""",
    "builders.py": "kind = 'gpt'\n",
    "pretrain_gpt.py": """
import sys
import megatron.training
from builders import kind
from megatron.training import pretrain

def train_valid_test_datasets_provider(sizes):
    raise AssertionError

if __name__ == "__main__":
    print(megatron.training.__file__)
    print(*sys.argv)
    pretrain("config", train_valid_test_datasets_provider, kind, forward_step_func="step", store=7)
""",
    "other_name.py": """
from megatron.training.training import pretrain
pretrain("config", train_valid_test_dataset_provider=print, model_type=1, forward_step_func=2)
""",
    "idle.py": "# says pretrain, and does not\n",
    "leaving.py": "import sys\nsys.exit(0)  # before it would call pretrain\n",
    "failing.py": """
from megatron.training import pretrain
from megatron_sft_idx.errors import FormatError
raise FormatError("--sft is missing\\n--split is wrong")
""",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in CHECKOUT.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def ran(*words: object, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_sft_idx.pretrain", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_script_runs_with_its_own_megatron_and_our_data_sets(checkout: Path) -> None:
    script = checkout / "pretrain_gpt.py"
    run = ran(
        "--pad-id", 3, script, "--data-path", "0.3", "a", "-1", "b", "--index-only-packing", "--sft", "--columns=x,y"
    )
    assert run.returncode == 0, run.stderr
    file, argv, provider, others = run.stdout.splitlines()
    assert file == str(checkout / "megatron/training/__init__.py")
    assert argv == f"{script} --data-path 0.3 a -1 b --sft"
    options = "[('columns', ('x', 'y')), ('index_only_packing', True), ('pad_id', 3)]"
    assert provider == f"of megatron_sft_idx.training.provider True {options}"
    assert others == "besides config gpt step 7"


@pytest.mark.slow
def test_the_provider_is_replaced_whatever_its_name_and_place(checkout: Path) -> None:
    run = ran(checkout / "other_name.py")
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0] == "of megatron_sft_idx.training.provider True []"


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("none.py", 2, "none.py: no such script; pass the path of Megatron-LM's pretrain_gpt.py"),
        (".", 2, ": Is a directory; pass the path of a script"),
        ("builders.py", 2, "builders.py: the script never calls Megatron's pretrain(); use a script that calls it"),
        ("idle.py", 2, "idle.py: the script ended without calling Megatron's pretrain(), so nothing was trained"),
        ("leaving.py", 2, "leaving.py: the script ended without calling Megatron's pretrain(), so nothing was trained"),
        ("failing.py", 1, "pretrain: error: --sft is missing\npython -m megatron_sft_idx.pretrain: error: --split is"),
    ],
)
def test_what_cannot_be_run_is_said_without_a_traceback(checkout: Path, name: str, code: int, said: str) -> None:
    run = ran(checkout / name)
    assert run.returncode == code
    assert said in run.stderr
    assert "Traceback" not in run.stderr


def test_without_megatron_the_error_says_where_to_get_it(checkout: Path) -> None:
    if find_spec("megatron.training") is not None:
        pytest.skip("megatron.training is installed")
    (checkout / "alone").mkdir()
    (checkout / "pretrain_gpt.py").rename(checkout / "alone/pretrain_gpt.py")
    run = ran(checkout / "alone/pretrain_gpt.py")
    assert run.returncode == 2
    assert "No module named 'megatron.training'; use the script in a Megatron-LM checkout" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_call_without_a_script_says_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--index-only-packing"], ["--index-only"], ["--pad-id"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
    assert "SCRIPT" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "torchrun --nproc-per-node 8 -m megatron_sft_idx.pretrain" in capsys.readouterr().out


def test_every_option_of_the_provider_is_an_option_of_the_runner() -> None:
    from megatron_sft_idx.training.provider import _OPTIONS

    own = {action.dest for action in build_parser()._actions} - {"help", "script"}
    assert own == {*_OPTIONS, "ignore_media", "columns"}
    _, options, rest = divide(build_parser(), ["x.py", "--help", "--max-sequences-per-pack=4", "--sft"])
    assert options == {"max_sequences_per_pack": 4}
    assert rest == ["--help", "--sft"]


def test_megatron_has_no_option_of_the_runner() -> None:
    if find_spec("megatron.training") is None:
        pytest.skip("no megatron.training: it is in the wheel of megatron-core from 0.19 on, for Python 3.12 on")
    from megatron_habits import megatron_parser

    theirs = {option for action in megatron_parser()._actions for option in action.option_strings}
    ours = {option for action in build_parser()._actions for option in action.option_strings} - {"-h", "--help"}
    assert len(ours) == 8
    assert not ours & theirs
