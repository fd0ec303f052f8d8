"""Arguments of wrong types to public functions: always one of our errors, in one line."""

# ruff: noqa: E501 - a table of calls

from __future__ import annotations

import datetime
import decimal
import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import TOKENIZER, command, write_rows
from sample_packs import demo_samples, write_samples

import megatron_sft_idx as package
from megatron_sft_idx.errors import FormatError, SequenceError, SFTIndexError
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.shard import Shard, ShardWriter

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
losses = pytest.importorskip("megatron_sft_idx.training.losses")
_DTYPES = (torch.int64, torch.float32, torch.bool, torch.complex64)

_PACK: dict[str, Any] = {"tokens": [1, 2, 3], "loss_mask": [1, 1, 0], "seq_starts": [0]}
_ROWS = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
WRONG: list[Any] = [
    *(None, True, 0, -1, 1.5, float("nan"), float("inf"), 2**70, 10**400, 1 + 2j, "", "a\0b", "\ud800", b"", b"x"),
    *([], (), {}, set(), [None], ["x"], [[1], [2, 3]], {1: 2}, {"a": float("nan")}, {"a": object()}, object(), int),
    *(np.array([]), np.array(3), np.array([1.5, np.nan]), np.array(["a"]), np.array([object()])),
    *(np.ma.array([1, 2], mask=[0, 1]), np.datetime64("2024-01-01"), decimal.Decimal("1.5")),
    *(datetime.date(2024, 1, 1), range(3), iter([1]), lambda: 1),
]
# Errors and plans have no arguments to check. Megatron's data sets and their configuration belong to Megatron.
_NOT_CALLED = {name for name in package.__all__ if name.endswith("Error")}
_NOT_CALLED |= {"PackPlan", "PackedSFTDataset", "PackedSFTDatasetConfig", "MMapIndexedDataset"}


def calls(folder: Path) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Return each public function, wrapped so that its result is used, with valid arguments."""
    prefix, number = folder / "a", iter(range(10**6))

    def fresh() -> str:
        return str(folder / f"made {next(number)}")

    def reads(opening: Callable[..., Any]) -> Callable[..., Any]:
        return lambda **given: opening(**given)[0]

    def abandons(making: Callable[..., Any], name: str, end: str = "") -> Callable[..., Any]:
        def made(**given: Any) -> None:
            writer = making(**({name: fresh() + end} | given))
            getattr(writer, "writer", writer).abandon()

        return made

    def adds(**given: Any) -> None:
        with ShardWriter(fresh(), mask_dtype="f4", columns={"c": ColumnSpec("pack", "u1")}) as writer:
            writer.add_pack(**given)

    def adds_item(**given: Any) -> None:
        with ShardWriter(fresh(), media=True) as writer:
            repr(item := package.MediaItem(**given))
            writer.add_pack([1, 2, 3], [0, 0, 0], [0], media=[item])

    def writes_column(**given: Any) -> None:
        values = np.zeros(len(Shard(prefix)), np.uint8)
        right = {"prefix": prefix, "name": f"c{next(number)}", "values": values, "per": "pack"}
        package.write_column(**(right | given))

    def preprocesses(**given: Any) -> None:
        right = {"inputs": _ROWS, "tokenizer": TOKENIZER, "output_prefix": fresh(), "seq_length": 64, "workers": 0}
        package.preprocess(**(right | given))

    def defaults(function: Callable[..., Any], *names: str) -> dict[str, Any]:
        parameters = inspect.signature(function).parameters
        return {name: None if name in names else each.default for name, each in parameters.items()}

    logits = torch.zeros(2, 2, 4)
    ids, weights = torch.tensor([[1, 2], [1, 3]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    pairs = {"batch": {"input_ids": ids, "loss_weights": weights, "pair": torch.tensor([[0, 0], [0, 1]])}}

    return {
        "ColumnSpec": (package.ColumnSpec, {"per": "token", "dtype": "u1", "width": 1, "alignment": "token", "metadata": {}}),
        "MediaItem": (adds_item, {"kind": "image", "start": 0, "length": 1, "data": b"a"}),
        "ShardWriter": (abandons(ShardWriter, "prefix"), defaults(ShardWriter, "prefix")),
        "ShardWriter.add_pack": (adds, {**_PACK, "columns": {"c": [1]}, "mask_alignment": "label", "media": []}),
        "SFTIndexedDatasetBuilder": (
            abandons(package.SFTIndexedDatasetBuilder, "bin_path", ".bin"),
            defaults(package.SFTIndexedDatasetBuilder, "bin_path"),
        ),
        "write_column": (writes_column, defaults(package.write_column, "prefix", "name", "values", "per")),
        "Shard": (reads(Shard), {**defaults(Shard), "prefix": prefix}),
        "SFTIndexedDataset": (
            reads(package.SFTIndexedDataset),
            {"path_prefix": str(prefix), "backend": None, "columns": (), "copy": False, "advice": "normal", "mmap": True},
        ),
        "open_dataset": (
            reads(package.open_dataset),
            {"source": prefix, "format": None, "mask_alignment": "label", "max_open": 4, "columns": (), "copy": False},
        ),
        "PackedDataset": (reads(package.PackedDataset), {"files": None}),
        "as_torch": (reads(package.as_torch), defaults(package.as_torch) | {"source": prefix}),
        "dpo_loss": (package.dpo_loss, {**pairs, "policy_logits": logits, "reference_logits": logits, "beta": 0.1}),
        "weighted_loss": (losses.weighted_loss, {**pairs, "logits": logits, "divisor": 2.0}),
        "model_inputs": (losses.model_inputs, pairs),
        "a blend": (lambda weight: package.as_torch([0.5, prefix, weight, prefix])[0], {"weight": 0.5}),
        "pack_sequences": (package.pack_sequences, {**defaults(package.pack_sequences), "lengths": [1, 2], "capacity": 8}),
        "verify_shard": (package.verify_shard, {"prefix": prefix, "full": False, "vocab_size": None}),
        "show_pack": (package.show_pack, {"pack": Shard(prefix)[0], "tokenizer": None}),
        "MemmapShardWriter": (
            abandons(package.MemmapShardWriter, "output_dir"),
            {**defaults(package.MemmapShardWriter, "output_dir"), "num_bins": 1, "pack_size": 8, "total_seq_starts": 1},
        ),
        "LegacyPickleWriter": (abandons(package.LegacyPickleWriter, "path", ".npy"), defaults(package.LegacyPickleWriter, "path")),
        "LiveConfig": (package.LiveConfig, {**defaults(package.LiveConfig), "rank": 0, "size": 1, "seq_length": 8}),
        "LiveLoader": (
            package.LiveLoader,
            {"catalog": str(folder / "none"), "config": package.LiveConfig(rank=0, size=1, seq_length=8)},
        ),
        "preprocess": (preprocesses, {**defaults(package.preprocess), "workers": 0, "inputs": _ROWS}),
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("types")
    write_samples(made / "a", demo_samples())
    return made


def test_no_public_function_is_left_out(folder: Path) -> None:
    assert {*package.__all__} - _NOT_CALLED <= {*calls(folder)}


_TESTED = [
    *sorted({*package.__all__} - _NOT_CALLED),
    "ShardWriter.add_pack",
    "weighted_loss",
    "model_inputs",
    "a blend",
]
# Exceptions that these functions document for numbers and lists.
_DOCUMENTED: dict[str, tuple[type[Exception], ...]] = {
    "pack_sequences": (TypeError, ValueError),
}


@pytest.mark.parametrize("name", _TESTED)
def test_wrong_types_end_in_errors_of_ours(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    function, right = calls(folder)[name]
    chance = random.Random(name)
    unset = (inspect.Parameter.empty, None)
    plain = {key: each for key, each in right.items() if not any(each is one for one in unset)}
    # A few wrong values per argument; fewer for preprocess, which takes longer.
    few = 6 if name == "preprocess" else 20
    for argument in sorted(right.keys() - {"workers", "download"}):
        for value in chance.sample(WRONG, few):
            message = error_of(function, plain | {argument: value}, _DOCUMENTED.get(name, ()))
            assert "\n" not in message, (argument, value)


def error_of(function: Callable[..., Any], given: dict[str, Any], documented: tuple[type[Exception], ...]) -> str:
    try:
        function(**given)
    except (SFTIndexError, *documented) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["dpo_loss", "weighted_loss"])
@pytest.mark.parametrize("key", ["input_ids", "loss_weights", "pair", "position_ids"])
def test_wrong_values_in_a_batch_end_in_errors_of_ours(name: str, key: str, folder: Path) -> None:
    function, right = calls(folder)[name]
    function(**right)
    tensors = [
        torch.zeros(shape, dtype=dtype) for shape in ((), (0,), (2,), (2, 2), (2, 0), (2, 2, 2)) for dtype in _DTYPES
    ]
    for value in [*WRONG, *tensors, torch.full((2, 2), 99), torch.full((2, 2), -1)]:
        message = error_of(function, right | {"batch": {**right["batch"], key: value}}, ())
        assert "\n" not in message, value
    for argument in sorted(right.keys() - {"batch"}):
        for value in [*tensors, torch.zeros(2, 2, 2), torch.zeros(2, 2, 4, dtype=torch.complex64)]:
            assert "\n" not in error_of(function, right | {argument: value}, ()), (argument, value)


# ---- single examples ----


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"metadata": [1]}, "metadata: a list, expected a dict"),
        ({"metadata": {1: 2}}, "metadata: a dict, expected a dict by name"),
        ({"metadata": {"a": float("nan")}}, "metadata: Out of range float"),
        ({"metadata": {"a": object()}}, "metadata: Object of type object"),
        ({"columns": [1]}, "columns: a list, expected a dict"),
        ({"columns": {"a": 1}}, "columns: a dict, expected a dict by name of a ColumnSpec each"),
        ({"columns": {1: ColumnSpec("pack", "u1")}}, "columns: a dict, expected a dict by name"),
    ],
)
def test_metadata_and_columns_of_a_writer(given: dict[str, Any], reason: str, tmp_path: Path) -> None:
    for make, path in ((ShardWriter, "x"), (package.SFTIndexedDatasetBuilder, "x.bin")):
        with pytest.raises(FormatError, match=reason):
            make(str(tmp_path / path), **given)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["x.loss", "x.seq", "x.bin.bin", "x.idx.bin", "x.seq.idx.idx", "x.foo.col.bin"])
def test_a_prefix_that_ends_like_a_file_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="must not end like one of a shard's files"):
        ShardWriter(tmp_path / name)
    with pytest.raises(FormatError, match="must not end like one of a shard's files"):
        package.preprocess(_ROWS, tokenizer=str(TOKENIZER), output_prefix=tmp_path / name, seq_length=64, workers=0)
    assert not [*tmp_path.iterdir()]


def test_masked_arrays_are_refused(tmp_path: Path) -> None:
    def masked(values: list[int]) -> Any:
        return np.ma.array(values, mask=[0] * (len(values) - 1) + [1])

    spec = ColumnSpec("token", "u1")
    with ShardWriter(tmp_path / "x", columns={"c": spec}) as writer:
        right = {**_PACK, "columns": {"c": [1, 2, 3]}}
        wrong = [{name: masked(_PACK[name])} for name in _PACK] + [{"columns": {"c": masked([1, 2, 3])}}]
        for each in wrong:
            with pytest.raises(SequenceError, match="is a masked array"):
                writer.add_pack(**{**right, **each})
        writer.add_pack(**right)
    with pytest.raises(FormatError, match="is a masked array"):
        package.write_column(tmp_path / "x", "d", masked([1, 2, 3]), per="token")
    with pytest.raises(ValueError, match="is a masked array"):
        package.pack_sequences(masked([1, 2]), 8)


@pytest.mark.parametrize("weight", [1e-46, 5e-324, 2.0**-150])
def test_a_weight_that_would_become_0_is_refused(weight: float, tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x", mask_dtype="f4") as writer:
        with pytest.raises(SequenceError, match="rounded to 0"):
            writer.add_pack([1, 2], [weight, 0], [0])
        writer.add_pack([1, 2], [2.0**-149, 0], [0])
    assert Shard(tmp_path / "x")[0]["loss_mask"][0] > 0
    message = {"role": "assistant", "content": "b", "weight": weight}
    for row in ({"input_ids": [1, 2], "loss_weights": [0, weight]}, {"messages": [_ROWS[0]["messages"][0], message]}):
        with pytest.raises(SequenceError, match="weight"):
            package.preprocess([row], tokenizer=str(TOKENIZER), output_prefix=tmp_path / "y", seq_length=64, workers=0)


def test_weights_whose_product_would_become_0_are_refused(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "tokenizer": str(TOKENIZER),
        "output_prefix": tmp_path / "y",
        "seq_length": 64,
        "workers": 0,
    }
    tiny = {"input_ids": [1, 2], "loss_weights": [0, 1e-30], "loss_scale": [0, 1e-30]}
    with pytest.raises(SequenceError, match="weights is rounded to 0 in float32"):
        package.preprocess([tiny], **given)
    source = write_rows(tmp_path / "a.jsonl", [{"input_ids": [1, 2], "loss_weights": [0, 1e-30]}])
    with pytest.raises(FormatError, match="--loss-weight: a weight times"):
        package.preprocess(source, loss_weight={"a.jsonl": 1e-30}, **given)


@pytest.mark.parametrize("verb", ["verify", "inspect", "preprocess", "convert"])
def test_a_nul_byte_in_an_argument(verb: str) -> None:
    refused = command(verb, "a\0b")
    assert refused.code == 2
    assert "a NUL byte" in refused.err
    assert "Traceback" not in refused.err


class NoRows:
    """A class like an empty dataset of Hugging Face."""

    def __len__(self) -> int:
        return 0

    def save_to_disk(self, _path: str) -> None:
        raise IndexError("list index out of range")


@pytest.mark.parametrize("inputs", [NoRows(), [], iter(()), [""]])
def test_inputs_without_rows(inputs: Any, tmp_path: Path) -> None:
    with pytest.raises(SFTIndexError):
        package.preprocess(inputs, tokenizer=str(TOKENIZER), output_prefix=tmp_path / "x", seq_length=64, workers=0)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("source", [None, 3, {}, [None], "a\0b", b"x"])
def test_sources_that_are_no_paths(source: Any) -> None:
    with pytest.raises(SFTIndexError):
        package.open_dataset(source)
