"""The functions of the package for programs: ``preprocess`` gives the same bytes as the command."""

from __future__ import annotations

import argparse
import html
import inspect
import io
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from chats import CHATS, TOKENIZER, files_of, remains, write_rows
from chats import preprocess as run_command

from megatron_sft_idx import FormatError, SequenceError, as_torch, open_dataset, preprocess, show_pack
from megatron_sft_idx.check import rebuild
from megatron_sft_idx.cli.main import build_parser
from megatron_sft_idx.formats.convert import convert
from megatron_sft_idx.layout.column import PAIR, ColumnSpec
from megatron_sft_idx.packs.merge import merge
from megatron_sft_idx.shard import Pack, Shard, ShardWriter
from megatron_sft_idx.tokenize import Summary, available_cpus

ROWS: list[dict[str, Any]] = [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()]
USUAL: dict[str, Any] = {
    "tokenizer": TOKENIZER,
    "seq_length": 1024,
    "earlier_reasoning": "drop",
    "workers": 0,
    "log_interval": 0,
}


# Rows of one form, as needed for tables.
PLAIN = [
    {"messages": row["messages"]}
    for row in ROWS
    if all(message.keys() == {"role", "content"} and isinstance(message["content"], str) for message in row["messages"])
]


# ---- preprocess ----


@pytest.fixture(scope="module")
def by_command(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the command's result for a file of this name. The name matters because shards record their source."""
    folder = tmp_path_factory.mktemp("command")
    rows = write_rows(folder / request.param, ROWS)
    assert run_command(folder / "made/x", "--input", rows).code == 0
    return all_in(folder / "made")


def all_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("given", "by_command"),
    [
        ("path", "rows.jsonl"),
        ("paths", "rows.jsonl"),
        ("list", "rows.jsonl"),
        ("rows", "rows.jsonl"),
        ("array", "rows.jsonl"),
        ("pipe", "stdin"),
        ("pipe's path", "stdin"),
    ],
    indirect=["by_command"],
)
def test_files_and_rows_make_the_bytes_of_the_command(
    given: str, tmp_path: Path, by_command: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    piped = io.TextIOWrapper(io.BytesIO(path.read_bytes()))
    monkeypatch.setattr(sys, "stdin", piped)
    rows: Any = {"path": path, "paths": [str(path)], "list": ROWS, "rows": iter(ROWS), "pipe": "-"}
    rows |= {"array": np.array(ROWS), "pipe's path": [Path("-")]}
    made = preprocess(rows[given], output_prefix=tmp_path / "new/x", **USUAL)
    assert all_in(tmp_path / "new") == by_command
    assert str(made).startswith(f"wrote {tmp_path}/new/x\nrows            318")
    assert made.packing.tokens == made.to_dict()["packing"]["tokens"] > 0


def test_a_set_has_no_order(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="inputs: expected paths, an iterable of rows"):
        preprocess({"a.jsonl", "b.jsonl"}, output_prefix=tmp_path / "x", **USUAL)


def test_a_dataset_makes_the_bytes_of_the_command_on_its_saved_file(tmp_path: Path) -> None:
    import datasets

    saved = datasets.Dataset.from_list(PLAIN).select(range(0, 90, 2))
    saved.save_to_disk(tmp_path / "saved")
    (data,) = (tmp_path / "saved").glob("*.arrow")
    data.rename(tmp_path / "dataset-0")
    assert run_command(tmp_path / "there/x", "--input", tmp_path / "dataset-0").code == 0
    preprocess(saved, output_prefix=tmp_path / "here/x", **USUAL)
    assert all_in(tmp_path / "here") == all_in(tmp_path / "there")
    with pytest.raises(FormatError, match=r"inputs: expected .* one split of a dataset, .* found DatasetDict"):
        preprocess(datasets.DatasetDict(train=saved), output_prefix=tmp_path / "other", **USUAL)
    streamed = saved.to_iterable_dataset()
    assert streamed_names(preprocess_to(tmp_path / "stream", [streamed, {"more": streamed}])) == ["dataset-0", "more"]


def preprocess_to(prefix: Path, inputs: Any, **options: Any) -> Path:
    preprocess(inputs, output_prefix=prefix, **{**USUAL, **options})
    return prefix


def streamed_names(prefix: Path) -> list[str]:
    """Return the names of the input files in the column ``source``."""
    return [file["name"] for file in Shard(prefix).columns["source"].spec.metadata["files"]]


def write_table(path: Path, rows: list[dict[str, Any]]) -> Any:
    pa = pytest.importorskip("pyarrow")
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(path, table.schema) as file:
        file.write_table(table)
    return table


@pytest.mark.parametrize("workers", [0, 2])
def test_a_list_that_mixes_inputs_makes_the_bytes_of_their_files(workers: int, tmp_path: Path) -> None:
    first, second, third = PLAIN[:40], PLAIN[40:90], PLAIN[90:130]
    (tmp_path / "files").mkdir()
    path = write_rows(tmp_path / "files/a.jsonl", first)
    table = write_table(tmp_path / "files/dataset-0", second)
    write_rows(tmp_path / "files/dataset-1", third)
    write_rows(tmp_path / "files/math", second[:7])
    options = {"workers": workers, "seed": 3, "repeat": {"dataset-0": 2, "math": 0.5}, "loss_weight": {"a.jsonl": 0.25}}
    on_disk = [path, *(tmp_path / "files" / name for name in ("dataset-0", "dataset-1", "math"))]
    wanted = preprocess_to(tmp_path / "there/x", on_disk, **options)
    mixed = [str(path), table, iter(third), {"math": iter(second[:7])}]
    found = preprocess_to(tmp_path / "here/x", mixed, **options)
    assert all_in(tmp_path / "here") == all_in(tmp_path / "there")
    assert streamed_names(found) == ["a.jsonl", "dataset-0", "dataset-1", "math"]
    by_command = run_command(
        tmp_path / "command/x", "--input", *on_disk, "--seed", 3, "--repeat", "dataset-0=2", "math=0.5",
        "--loss-weight", "a.jsonl=0.25",
    )  # fmt: skip
    assert by_command.code == 0
    assert all_in(tmp_path / "command") == all_in(tmp_path / "there")
    assert Shard(wanted).header.mask_dtype == np.float32


def test_several_named_tables_are_told_apart(tmp_path: Path) -> None:
    one, other = write_table(tmp_path / "one", PLAIN[:5]), write_table(tmp_path / "other", PLAIN[5:9])
    assert streamed_names(preprocess_to(tmp_path / "x", {"one": one, "other": other})) == ["one", "other"]
    assert streamed_names(preprocess_to(tmp_path / "y", [one, other])) == ["dataset-0", "dataset-1"]
    for inputs, reason in (
        ([{"one": one}, {"one": other}], "two data sets have the name 'one'"),
        ([one, {"dataset-0": other}], "two data sets have the name 'dataset-0'"),
        *(({name: one}, "expected a name for a data set") for name in ("", "a/b", "..", 7, "a\nb", "x" * 201)),
        ({"one": one, "messages": []}, "put a single row into a list"),
        ([one, PLAIN[0]], "tables or lists of rows, found dict"),
        ([one, "-"], "reads all input from the pipe"),
    ):
        with pytest.raises(FormatError, match=reason):
            preprocess(inputs, output_prefix=tmp_path / "z", **USUAL)
    with pytest.raises(SequenceError, match=r"^dataset-1:2: messages is empty"):
        preprocess([one, [PLAIN[0], {"messages": []}]], output_prefix=tmp_path / "z", **USUAL)
    assert not list(tmp_path.glob("z*"))


def test_rows_are_written_one_by_one(tmp_path: Path) -> None:
    """Only a few rows of a generator are in memory, for any number of rows."""
    alive, most = [0], [0]

    class Row(dict[str, Any]):
        def __init__(self) -> None:
            super().__init__(PLAIN[0])
            alive[0] += 1
            most[0] = max(most[0], alive[0])

        def __del__(self) -> None:
            alive[0] -= 1

    preprocess_to(tmp_path / "x", [(Row() for _ in range(500)), {"more": (Row() for _ in range(500))}], max_rows=1)
    assert most[0] <= 3


@pytest.mark.parametrize("by_command", ["stdin"], indirect=True)
def test_the_command_reads_a_pipe(
    tmp_path: Path, by_command: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", ROWS).read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert run_command(tmp_path / "new/x", "--input", "-").code == 0
    assert all_in(tmp_path / "new") == by_command
    refused = run_command(tmp_path / "y", "--input", "-", CHATS)
    assert (refused.code, "--input - reads all input from the pipe" in refused.err) == (1, True)


def test_a_plain_script_with_worker_processes_and_no_guard(tmp_path: Path) -> None:
    """Spawned processes run the main module again, which would start the work again, endlessly."""
    path = write_rows(tmp_path / "rows.jsonl", ROWS * 12)  # two pieces, so that there is work for other processes
    script = tmp_path / "script.py"
    script.write_text(
        "from megatron_sft_idx import preprocess\n"
        f"print(preprocess({str(path)!r}, tokenizer={str(TOKENIZER)!r}, output_prefix='x', seq_length=1024,"
        " earlier_reasoning='drop', workers=2))\n"
    )
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.partition("\n")[0]) == (0, "wrote x"), done.stderr
    assert "Traceback" not in done.stderr


class Splits(dict[str, Any]):
    """A class like DatasetDict of ``datasets``."""

    def save_to_disk(self, path: str) -> None:
        """Never called."""


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (
            {"messages": []},
            FormatError,
            "inputs: expected paths, an iterable of rows.*found dict; put a single row into a list",
        ),
        (7, FormatError, "inputs: expected paths, .* found int"),
        (Splits(), FormatError, "inputs: expected .* one split of a dataset, .* found Splits"),
        ([ROWS[0], "chats.jsonl"], SequenceError, "rows:2: expected a dict, found str"),
        ([{"messages": [{"role": "user", "content": "x", "weight": float("nan")}]}], SequenceError, "rows:1: .*float"),
        ([{"messages": object()}], SequenceError, "rows:1: .* a value of type object"),
        (np.zeros((2, 3)), SequenceError, "rows:1: expected a dict, found ndarray"),
        ([], FormatError, "no input"),
        (
            ["chats.jsonl", ROWS[0]],
            FormatError,
            "inputs: expected paths, data sets, tables or lists of rows, found dict",
        ),
    ],
)
def test_what_are_no_rows_is_said(rows: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        preprocess(rows, output_prefix=tmp_path / "x", **USUAL)
    assert remains(tmp_path) == []


def test_rows_with_arrays_are_read(tmp_path: Path) -> None:
    ids, mask = [5, 6, 7, 8], [0, 0, 1, 1]
    for name, kind in (("lists", list), ("arrays", np.array)):
        preprocess([{"input_ids": kind(ids), "loss_mask": kind(mask)}], output_prefix=tmp_path / name, **USUAL)
    assert files_of(tmp_path / "lists") == files_of(tmp_path / "arrays")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_on": "user"}, "train_on: 'user', choose one of assistant, last-turn, markers, all"),
        ({"straddling": "exlude"}, "straddling: 'exlude', choose one of include, exclude"),
        ({"seq_length": 0}, "seq_length: 0, expected a whole number from 1"),
        ({"seq_length": True}, "seq_length: True, expected a whole number from 1"),
        ({"seq_length": "1024"}, "seq_length: '1024', expected a whole number"),
        ({"overwrite": "no"}, "overwrite: 'no', expected True or False"),
        ({"tokenizer": object()}, "tokenizer: a object, expected a path, or a tokenizer that transformers has loaded"),
        ({"chat_template": 123}, "chat_template: 123, expected a path$"),
        ({"summary": 5}, "summary: 5, expected a path$"),
        ({"staging": 5}, "staging: 5, expected a path$"),
        ({"template_date": 5}, "template_date: 5, expected a string"),
        ({"fields": 5}, "fields: 5, expected a dict of strings"),
        ({"chat_template_kwargs": "a"}, "chat_template_kwargs: 'a', expected a dict"),
        ({"repeat": ["rows=2"]}, "repeat: a list, expected a dict from file to weight"),
        ({"loss_weight": {"rows.jsonl": "2x"}}, "--loss-weight 'rows.jsonl=2x': expected FILE=WEIGHT"),
        ({"repeat": {"other": 2}}, "--repeat other=2: no input file matches"),
        ({"repeat": {5: 2}}, "--repeat '5=2': expected FILE=WEIGHT"),
        ({"workers": -1}, "workers: -1, expected a whole number from 0"),
        ({"packing": "best"}, "packing: 'best', choose one of auto, "),
        ({"engine": "ray", "workers": 0}, "--workers 1"),
        ({"chat_template": "nowhere.jinja"}, "--chat-template nowhere.jinja: No such file"),
    ],
)
def test_a_value_that_is_none_of_the_choices(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=message):
        preprocess(ROWS, output_prefix=tmp_path / "x", **{**USUAL, **options})
    assert remains(tmp_path) == []


def test_every_option_of_the_command_is_one_of_the_function() -> None:
    (verbs,) = (action for action in build_parser()._actions if isinstance(action.choices, dict))
    parser: argparse.ArgumentParser = verbs.choices["preprocess"]
    options = {action.dest: action for action in parser._actions if action.help is not argparse.SUPPRESS}
    for name, option in (("inputs", "input"), ("tokenizer", "tokenizer_model")):
        options[name] = options.pop(option)
    for name in ("help", "config", "print_config", "dry_run", "full"):
        del options[name]
    parameters = inspect.signature(preprocess).parameters
    hints = get_type_hints(preprocess)
    assert options.keys() == parameters.keys()
    for name, action in options.items():
        default = parameters[name].default
        # The command checks for the prefix itself, because --dry-run needs none.
        is_required = action.required or name == "output_prefix"
        assert is_required == (default is inspect.Parameter.empty), name
        assert is_required or action.default == default or (action.default, default) == ({}, None), name
        choices = get_args(hints[name]) if get_origin(hints[name]) is Literal else None
        assert choices == (tuple(action.choices) if action.choices else None), name


def test_the_summary_says_what_the_run_went_by(tmp_path: Path) -> None:
    summary = tmp_path / "s.json"
    preprocess(
        [str(CHATS)], output_prefix=tmp_path / "x", summary=summary, **{**USUAL, "workers": None}, train_on="last-turn"
    )
    options = json.loads(summary.read_text())["options"]
    assert (
        options.items()
        >= {
            "inputs": [str(CHATS)],
            "tokenizer": str(TOKENIZER),
            "train_on": "last-turn",
            "earlier_reasoning": "drop",
            "overlong": "error",
            "capacity": 1024,
            "workers": available_cpus(),
        }.items()
    )


def test_both_names_of_the_tokenizer_are_taken_and_one_is_shown(tmp_path: Path) -> None:
    shown = build_parser("preprocess").parse_args
    usual = ["preprocess", "--input", "x", "--seq-length", "8", "--output-prefix", "x"]
    found = [shown([*usual, option, "tok"]).tokenizer_model for option in ("--tokenizer", "--tokenizer-model")]
    assert found == ["tok", "tok"]
    (verbs,) = (action for action in build_parser("preprocess")._actions if isinstance(action.choices, dict))
    text = verbs.choices["preprocess"].format_help().partition("examples:")[0]
    assert "--tokenizer PATH" in text
    assert "--tokenizer-model" not in text


# ---- contents of the package ----


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = tmp_path_factory.mktemp("demo") / "chats"
    preprocess(ROWS, output_prefix=prefix, **USUAL)
    return str(prefix)


def test_a_shard_says_what_it_holds(demo: str) -> None:
    header = Shard(demo).header
    share = 100 * header.num_trained_tokens / header.num_tokens
    assert repr(Shard(demo)) == (
        f"<Shard {demo}: {header.num_packs} packs of up to 1,024 tokens, 318 sequences, {header.num_tokens:,} tokens,"
        f" {share:.1f}% trained; backend mmap>"
    )


def test_whoever_reads_pays_for_reading_alone(demo: str) -> None:
    """Reading takes a quarter of a second, prints no warning, and imports none of the slow libraries."""
    script = "import sys; from megatron_sft_idx import open_dataset; open_dataset(sys.argv[1])[0]; print(*sys.modules)"
    run = [sys.executable, "-W", "error", "-c", script, demo]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not {"torch", "megatron", "transformers", "pyarrow", "tokenizers", "jinja2"} & set(done.stdout.split())


def test_a_pack_in_a_notebook_has_its_trained_tokens_marked(demo: str) -> None:
    from megatron_sft_idx.chat.tokenizer import load_tokenizer

    tokenizer, pack = load_tokenizer(str(TOKENIZER)), open_dataset(demo)[0]
    shown = show_pack(pack, TOKENIZER)
    page = shown._repr_html_()
    (ids, mask) = Shard(demo).sequences(0)[0]
    said = tokenizer.decode(ids[1:][mask[:-1] > 0].tolist())
    assert said in html.unescape("".join(re.findall(r"<mark[^>]*>(.*?)</mark>", page, re.DOTALL)))
    assert page.count("<pre") == len(pack["seq_boundaries"]) - 1
    assert html.unescape(re.sub(r"<[^>]+>", "", page)).startswith("── sequence 0, positions 0 to ")
    assert "[[" in repr(shown)
    assert repr(show_pack(pack, tokenizer)) == repr(shown)
    assert str(pack["input_ids"][0]) in show_pack(pack)._repr_html_()
    script: Pack = {
        "input_ids": np.array([1, 2], np.uint16),
        "loss_mask": np.array([1, 0], np.uint8),
        "seq_boundaries": np.array([0, 2], np.int32),
    }

    class Hostile:
        def decode(self, ids: list[int]) -> str:
            return "<script>"

    assert "<script>" not in show_pack(script, Hostile())._repr_html_()


# ---- your own training loop ----


def loss_by_hand(model: Any, packs: list[Pack]) -> float:
    """Return the mean loss over trained predictions, with each sequence passed to the model by itself."""
    torch = pytest.importorskip("torch")
    losses = []
    for pack in packs:
        for start, stop in itertools.pairwise(pack["seq_boundaries"].tolist()):
            ids, mask = pack["input_ids"][start:stop].astype(np.int64), pack["loss_mask"][start:stop]
            logits = model(torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
            losses += [-logits[j, ids[j + 1]].item() for j in np.flatnonzero(mask).tolist()]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("layout", ["padded", "flattened", "flash"])
def test_a_model_of_transformers_has_the_loss_of_our_masks(demo: str, layout: Any, attention: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=Shard(demo).header.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.5,  # so that attended tokens change the loss
        attn_implementation=attention,
    )
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config).eval()
    ds, packs = as_torch(demo, layout), open_dataset(demo)[3:6]
    batch = ds.collate([ds[i] for i in (3, 4, 5)])
    assert {tensor.dtype for key, tensor in batch.items() if key in ("input_ids", "labels", "position_ids")} == {
        torch.int64
    }
    with torch.no_grad():
        expected = loss_by_hand(model, packs)
        assert model(**batch).loss.item() == pytest.approx(expected, rel=1e-5)
        # Errors would be detected: shifted labels, and attention across sequences.
        moved = batch | {"labels": batch["labels"].roll(1, -1)}
        assert model(**moved).loss.item() != pytest.approx(expected, rel=1e-3)
        if layout != "padded":
            seeing = {key: batch[key] for key in ("input_ids", "labels")}
            assert model(**seeing).loss.item() != pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_loader_serves_every_pack_once(demo: str, workers: int) -> None:
    data = pytest.importorskip("torch.utils.data")
    ds = as_torch(open_dataset(demo))
    loader = data.DataLoader(ds, batch_size=4, shuffle=True, collate_fn=ds.collate, num_workers=workers)
    found = sorted(ids for batch in loader for ids in batch["input_ids"][0].tolist())
    assert found == sorted(ids for pack in Shard(demo) for ids in pack["input_ids"].tolist())


def test_flash_attention_is_told_where_sequences_are(demo: str) -> None:
    pytest.importorskip("torch")
    ds = as_torch(Shard(demo), "flash")
    batch = ds.collate([ds[0], ds[1]])
    lengths = [len(ids) for i in (0, 1) for ids, _ in Shard(demo).sequences(i)]
    assert batch["cu_seq_lens_q"].tolist() == [0, *itertools.accumulate(lengths)]
    assert batch["max_length_k"] == max(lengths)
    assert batch["position_ids"][0].tolist() == [place for length in lengths for place in range(length)]


def test_weights_have_no_place_in_labels(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for number, weight in enumerate((1.0, 0.5)):
        with ShardWriter(str(tmp_path / str(number)), mask_dtype=np.float32) as writer:
            writer.add_pack(np.array([7, 8, 9], np.int32), np.array([0, weight, 0], np.float32), [0])
    assert as_torch(str(tmp_path / "0"))[0]["labels"].tolist() == [-100, -100, 9]
    with pytest.raises(FormatError, match=r"pack 0: its loss mask has weights.*loss_weights=True"):
        as_torch(str(tmp_path / "1"))[0]
    with pytest.raises(FormatError, match="unknown layout 'packed'; choose one of padded, flattened, flash"):
        as_torch(str(tmp_path / "0"), "packed")  # type: ignore[arg-type]


@pytest.mark.parametrize("opened", [str, open_dataset, Shard])
def test_judged_answers_have_no_place_in_labels(tmp_path: Path, opened: Callable[[str], Any]) -> None:
    pytest.importorskip("torch")
    prefix = str(tmp_path / "x")
    with ShardWriter(prefix, columns={"pair": PAIR}) as writer:
        writer.add_pack([1, 2, 3, 4], [1, 0, 1, 0], [0, 2], columns={"pair": [[0, 0], [0, 1]]})
    with pytest.raises(FormatError, match=r"x: holds preference pairs .*; pass preferences=True and use dpo_loss"):
        as_torch(opened(prefix))


def test_answers_are_judged_still_where_nothing_says_of_which_kind_the_rows_were(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from megatron_sft_idx.live.catalog import Limits
    from megatron_sft_idx.live.chunks import LiveChunks

    for number in range(2):
        metadata = {"options": {"row_kind": "kto", "append_eod": bool(number)}}
        label = {"label": ColumnSpec("sequence", np.uint8)}
        with ShardWriter(tmp_path / f"x{number}", metadata=metadata, columns=label, capacity=8) as writer:
            writer.add_pack([1, 2, 3, 4], [1, 0, 1, 0], [0, 2], columns={"label": [0, 1]})
    merge([tmp_path / "x0", tmp_path / "x1"], tmp_path / "merged")
    convert(tmp_path / "merged", tmp_path / "chunks", "jsonl-chunks")
    convert(tmp_path / "x0", tmp_path / "rows", "memmap")
    refused = "holds KTO labels"
    for name in ("merged", "chunks", "rows"):
        with pytest.raises(FormatError, match=refused):
            as_torch(str(tmp_path / name))
    with pytest.raises(FormatError, match=refused):
        LiveChunks(str(tmp_path / "chunks"), Limits(8, 2), num_chunks=1).open(0)


@pytest.mark.parametrize(
    "spec", [ColumnSpec("token", "f4"), ColumnSpec("sequence", "i4"), ColumnSpec("sequence", "u1", 2)]
)
def test_a_column_of_ones_own_that_is_called_label_judges_nothing(tmp_path: Path, spec: ColumnSpec) -> None:
    pytest.importorskip("torch")
    from megatron_sft_idx.live.catalog import Limits
    from megatron_sft_idx.live.chunks import LiveChunks

    rows = 4 if spec.per == "token" else 2
    with ShardWriter(tmp_path / "x", columns={"label": spec}, capacity=8) as writer:
        writer.add_pack([1, 2, 3, 4], [1, 0, 1, 0], [0, 2], columns={"label": np.zeros(spec.shape(rows), spec.dtype)})
    convert(tmp_path / "x", tmp_path / "rows", "memmap")
    for name in ("x", "rows"):
        assert as_torch(str(tmp_path / name))[0]["labels"].tolist() == [-100, 2, -100, 4]
    convert(tmp_path / "x", tmp_path / "chunks", "jsonl-chunks")
    assert LiveChunks(str(tmp_path / "chunks"), Limits(8, 2), num_chunks=1).open(0).num_packs == 1


@pytest.mark.parametrize("column", ["pair", "label"])
def test_answers_are_judged_still_where_the_header_was_made_anew(tmp_path: Path, column: str) -> None:
    pytest.importorskip("torch")
    spec, values = {"pair": (PAIR, [[0, 0], [0, 1]]), "label": (ColumnSpec("sequence", "u1"), [1, 0])}[column]
    with ShardWriter(tmp_path / "x", columns={column: spec}) as writer:
        writer.add_pack([1, 2, 3, 4], [1, 0, 1, 0], [0, 2], columns={column: values})
    (tmp_path / "x.seq.idx").unlink()
    rebuild(tmp_path / "x")
    with pytest.raises(FormatError, match=f"x: holds .* .column '{column}'"):
        as_torch(str(tmp_path / "x"))


@pytest.mark.parametrize("given", ["rows", "pipe"])
def test_a_bad_row_is_named_by_what_was_given_and_not_by_a_file_that_is_gone(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Any] = [{"messages": []}, ROWS[0]]
    name = "rows" if given == "rows" else "standard input"

    def run(on_bad_row: Literal["error", "skip"]) -> Summary:
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
        return preprocess(
            rows if given == "rows" else "-", output_prefix=tmp_path / "x", on_bad_row=on_bad_row, **USUAL
        )

    with pytest.raises(SequenceError, match=f"^{name}:1: messages is empty"):
        run("error")
    assert not list(tmp_path.glob("x.rows*"))
    assert run("skip").to_dict()["corpus"]["bad_rows"] == [f"{name}:1: messages is empty"]
    assert capsys.readouterr().err == f"skipped {name}:1: messages is empty\n"
