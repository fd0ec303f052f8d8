"""Every message about training in the troubleshooting table is printed in its situation."""

from __future__ import annotations

import logging
import pickle
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chats import command, preprocess
from gpt_model import layer_spec
from media_samples import media_samples, write_media
from training_twin import lone_process, pretrain_script
from troubles import Scenes, chat, quoted, scene, some_shards

from megatron_sft_idx import open_dataset
from megatron_sft_idx.errors import SFTIndexError
from megatron_sft_idx.training.provider import build_datasets, train_valid_test_datasets_provider


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Provide a folder with shards that do not fit together and rows without trained tokens, and one process."""
    with some_shards(tmp_path_factory.mktemp("world")) as here, lone_process():
        assert command("pack", "data/chats.unpacked", "--seq-length", 2048, "--output-prefix", "data/long").code == 0
        silent = chat()
        silent["messages"][1]["train"] = False
        few = preprocess(Path("data/few"), "--packing", "none", rows=[chat(), silent], capacity=64)
        assert few.code == 0
        for ending in (".bin", ".idx"):
            shutil.copy(f"data/chats{ending}", f"data/stock{ending}")
        yield here


def built(*paths: str, split: str = "1,0,0", length: int = 1024, cache: str | None = None, **more: Any) -> str:
    """Return the error for Megatron's arguments with these data sets."""
    fields = {name: more.pop(name) for name in ("index_only_packing", "tokenizer_fingerprint") if name in more}
    args = Namespace(data_path=list(paths), split=split, seq_length=length, seed=1, data_cache_path=cache, **more)
    with pytest.raises(SFTIndexError) as error:
        build_datasets(args, [8, 8, 0], **fields)
    return str(error.value)


def evaluated(*paths: str, split: str = "1,0,0") -> str:
    """Return the provider's error if more rows are evaluated than exist."""
    args = Namespace(data_path=list(paths), split=split, seq_length=1024, seed=1, data_cache_path=None, eval_iters=2)
    with pytest.raises(SFTIndexError) as error:
        train_valid_test_datasets_provider([8, 1000, 0], args=args)
    return str(error.value)


def warned(caplog: pytest.LogCaptureFixture, path: str, length: int) -> str:
    args = Namespace(data_path=[path], split="1,0,0", seq_length=length, seed=1, data_cache_path=None)
    with caplog.at_level(logging.WARNING, "megatron_sft_idx"):
        build_datasets(args, [8, 0, 0])
    return caplog.text


def script_runs(*options: object) -> list[float]:
    """Run the training script and return its losses."""
    module = pretrain_script()
    given = ["--data-path", "data/chats", "--seq-length", 1024, "--hidden-size", 32, "--train-iters", 1, *options]
    losses: list[float] = module.pretrain(module.parse_arguments([str(option) for option in given]))
    return losses


def script(*options: object) -> str:
    """Run the training script and return its error."""
    with pytest.raises((SFTIndexError, ValueError, IndexError, ImportError)) as error:
        script_runs(*options)
    return str(error.value)


def refused_option(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    with pytest.raises(SystemExit):
        pretrain_script().parse_arguments(["--seq-length", "64", *options])
    return capsys.readouterr().err


def another_seed() -> str:
    assert script_runs("--save", "seeded", "--seed", 1234)
    return script("--save", "seeded", "--seed", 5)


def torn(capsys: pytest.CaptureFixture[str]) -> str:
    Path("torn/iter_0000002").mkdir(parents=True)
    return refused_option(capsys, "--data-path", "data/chats", "--save", "torn")


def cut_plan() -> str:
    args = Namespace(data_path=["data/chats.unpacked"], split="1,0,0", seq_length=1024, seed=1, data_cache_path="cache")
    build_datasets(args, [8, 0, 0], index_only_packing=True)
    (plan,) = (path for path in Path("cache").rglob("*") if path.is_file() and path.stat().st_size > 1000)
    plan.write_bytes(plan.read_bytes()[:-8])
    return built("data/chats.unpacked", cache="cache", index_only_packing=True)


def with_images() -> str:
    write_media("data/images", media_samples(0, 3), capacity=1024)
    return built("data/images")


def replaced() -> str:
    """Publish a shard over one that a pickled dataset uses, as in data loader workers."""
    again = Path("again/shard")
    assert preprocess(again, rows=[chat()]).code == 0
    known = pickle.dumps(open_dataset(str(again)))
    assert preprocess(again, "--overwrite", rows=[chat("c")]).code == 0
    with pytest.raises(SFTIndexError) as error:
        pickle.loads(known)[0]
    return str(error.value)


def no_engine() -> str:
    with pytest.raises(ImportError) as error:
        layer_spec("te")
    return str(error.value)


@pytest.mark.parametrize("message", quoted("docs/troubleshooting.md", "Training"))
def test_what_training_says(
    message: str, world: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    scenes: Scenes = {
        "packs of up to 1024 tokens": lambda: built("data/chats", length=512),
        "packed for sequence multiple 1": lambda: built("data/chats", context_parallel_size=2),
        "sequence_length 1022": lambda: built("data/chats", length=1022, context_parallel_size=2),
        "capacity is 2048": lambda: built("1", "data/chats", "1", "data/long", length=2048),
        "tokenized with": lambda: built("data/chats", tokenizer_fingerprint="another"),
        "the valid split is empty": lambda: built("data/chats", split="99,1,0"),
        "there is no validation data": lambda: evaluated("data/chats"),
        "only its .bin": lambda: built("data/stock"),
        "paths without weights": lambda: evaluated("data/chats", "data/chats", split="50,50,0"),
        "rows of 4096": lambda: warned(caplog, "data/chats", 4096),
        "1 of 2 ": lambda: warned(caplog, "data/few", 64),
        "global batch size 6": lambda: script("--global-batch-size", 6, "--micro-batch-size", 4),
        "--vocab-size 128": lambda: script("--vocab-size", 128),
        "contains images or audio": with_images,
        "remove the file, and it will be created again": cut_plan,
        "the content has changed": replaced,
        "attention te": no_engine,
        "the amount of live data is unknown": lambda: refused_option(capsys, "--data-path", "live:data/live"),
        "its run had --seed": another_seed,
        "metadata.json is missing": lambda: torn(capsys),
    }
    assert message in scene(scenes, message)
