"""Every Megatron argument about data is in a table, and commands that people use end as expected."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest
from megatron_habits import arguments_of, megatron_parser

from megatron_sft_idx.training.megatron_arguments import ELSEWHERE, FIELDS, LOOKED_AT, REFUSED
from megatron_sft_idx.training.sft_dataset import PackedSFTDatasetConfig

TABLES = (FIELDS, LOOKED_AT, REFUSED, ELSEWHERE)
PROGRAM = Path(__file__).parents[1] / "megatron_habits.py"
# Parts of commands: all commands that contain one of them are run.
SAMPLE = (
    *("--split 90,10,0 --eval-iters 2", "--split 100", "--full-validation", "others --train-iters 4000"),
    *(
        "{}/stock",
        "{}/jsonls",
        "--train-data-path {}/chats --eval",
        "--data-args-path",
        "--mock-data",
        "--train-samples",
    ),
    *("--fim-rate", "--dataloader-type", "--num-workers", "--dataloader-defer", "!--sft", "--chat-template"),
)


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    if find_spec("megatron.training") is None:
        pytest.skip("no megatron.training: it is in the wheel of megatron-core from 0.19 on, for Python 3.12 on")
    return megatron_parser()


def complaints(parser: argparse.ArgumentParser) -> list[str]:
    """Return arguments about data that are in no table or in two, and wrong defaults in the tables."""
    found = []
    for name, action in arguments_of(parser).items():
        if (tables := sum(name in table for table in TABLES)) != 1:
            found.append(f"{action.option_strings[0]} ({name}) is in {tables} tables of training/megatron_arguments.py")
        if name in REFUSED and action.default not in (REFUSED[name].default, None):
            found.append(f"{name}: Megatron's default is {action.default}, the table has {REFUSED[name].default}")
        if name in REFUSED and (REFUSED[name].flag or f"--{name.replace('_', '-')}") not in action.option_strings:
            found.append(f"{name} is written {action.option_strings[0]}; put that into the table")
    return found


def test_every_argument_about_data_is_in_one_table(parser: argparse.ArgumentParser) -> None:
    assert len(arguments_of(parser)) > 80
    assert complaints(parser) == []


def test_an_argument_that_is_added_is_noticed(parser: argparse.ArgumentParser) -> None:
    parser = megatron_parser()
    parser.add_argument("--shuffle-documents", action="store_true")
    (group,) = (group for group in parser._action_groups if group.title == "validation")
    group.add_argument("--weigh-rows", type=float, default=1.0)
    parser.set_defaults(fim_rate=0.75)
    (rate,) = (action for action in parser._actions if action.dest == "fim_rate")
    assert rate.default == 0.75
    first_words = sorted(complaint.partition(" ")[0] for complaint in complaints(parser))
    assert first_words == ["--shuffle-documents", "--weigh-rows", "fim_rate:"]


def test_what_arguments_set_are_fields() -> None:
    assert {*FIELDS.values()} <= {each.name for each in fields(PackedSFTDatasetConfig)}
    names = [name for table in TABLES for name in table]
    assert len(names) == len({*names})


def test_commands_that_people_give_end_as_they_should(parser: argparse.ArgumentParser) -> None:
    del parser
    paths = os.pathsep.join([str(PROGRAM.parents[1]), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, str(PROGRAM), *SAMPLE]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=560, check=False)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert ", 0 fails; 0 not as expected" in run.stdout
    assert run.stdout.count("| works |") > 10
    assert run.stdout.count("| refused |") > 15
