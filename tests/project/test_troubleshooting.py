"""Every message in the troubleshooting tables is printed in the situation that it describes."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chats import SUFFIXES, TOKENIZER, command, preprocess
from troubles import Scenes, chat, quoted, scene, some_shards


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Provide a folder with a shard of the demo's chats, in which the tests run."""
    with some_shards(tmp_path_factory.mktemp("world")) as here:
        yield here


def prepare(*options: object, rows: Any = None, template: str | None = None) -> str:
    """Run ``preprocess`` for x/shard and return its output."""
    shutil.rmtree("x", ignore_errors=True)
    Path("x").mkdir()
    if template is not None:
        Path("x/template.jinja").write_text(template)
        options = (*options, "--chat-template", "x/template.jinja")
    return preprocess(Path("x/shard"), *options, rows=[chat()] if rows is None else rows).err


def says(*arguments: object) -> str:
    outcome = command(*arguments)
    assert outcome.code
    return outcome.out + outcome.err


def with_only(file: str, content: bytes | None = None) -> str:
    """Run ``prepare`` with a tokenizer folder of only this file, which is a tokenizer.json or has this content."""
    shutil.rmtree("tok", ignore_errors=True)
    Path("tok").mkdir()
    Path(f"tok/{file}").write_bytes((TOKENIZER / "tokenizer.json").read_bytes() if content is None else content)
    return prepare("--tokenizer-model", "tok")


def again(*options: object) -> str:
    """Run ``prepare`` a second time for the same shard."""
    first = {"rows": [chat()]}
    assert preprocess(Path("again/shard"), "--overwrite", **first).code == 0
    return preprocess(Path("again/shard"), *options, **first).err


def damaged(change: Callable[[bytes], bytes], *arguments: object) -> str:
    """Return a command's output for a copy of the shard with changed tokens."""
    for suffix in SUFFIXES:
        shutil.copy(f"data/chats{suffix}", f"data/damaged{suffix}")
    path = Path("data/damaged.bin")
    path.write_bytes(change(path.read_bytes()))
    return says(*arguments, "data/damaged")


def cut_json() -> str:
    Path("cut.jsonl").write_text('{"messages": [\n')
    return prepare("--input", "cut.jsonl")


def interrupted(*options: object) -> str:
    """Run again after a run that left parts because packing failed, and return the output."""
    Path("killed").mkdir(exist_ok=True)
    assert preprocess(Path("killed/shard"), rows=[chat()], capacity=4).code == 1
    return preprocess(Path("killed/shard"), *options, rows=[chat()]).err


def thoughtful() -> dict[str, Any]:
    """Return a chat with reasoning in its first answer, which the bundled template keeps only in the last one."""
    row = chat()
    row["messages"] = [{**message, "reasoning_content": "hm"} for message in row["messages"]] + row["messages"]
    return row


def missing_package() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        Path("x.parquet").write_bytes(b"PAR1PAR1PAR1")
        return prepare("--input", "x.parquet")


OUT = ("--output-prefix", "x/out")
MEASURES = "{% set all %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ all }}{{ all | length }}"
COUNTS = "{% for m in messages %}[{{ m.role }} {{ m.content | length }}]{{ m.content }}{% endfor %}"
MARKS_ALL = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
PART = "{% for m in messages %}{{ m.content }}{% generation %}!{% endgeneration %}{% endfor %}"
NO_SYSTEM = "{% for m in messages %}{{ raise_exception('System role not supported') }}{% endfor %}"
NO_CONTENT = "{% for m in messages %}{{ m.role }}{% endfor %}"
DATE = "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"

PREPARING: Scenes = {
    "99 of 318 sequences are longer": lambda: says("pack", "data/chats.unpacked", "--seq-length", 128, *OUT),
    "the tokenizer has no chat template": lambda: with_only("tokenizer.json"),
    "cannot be traced, and it ends assistant message": lambda: prepare(template=MEASURES),
    "the text of this row cannot be traced through": lambda: prepare(template=COUNTS),
    "the generation markers enclose": lambda: prepare(template=MARKS_ALL),
    "writes outside its generation markers": lambda: prepare(template=PART),
    "drops the reasoning of": lambda: prepare("--earlier-reasoning", "error", rows=[thoughtful()]),
    "which may control what is trained on": lambda: prepare(rows=[chat() | {"turn_mask": [0, 1]}]),
    "has no text in content": lambda: prepare(rows=[{"messages": [{"role": "assistant", "content": "", "text": "a"}]}]),
    "the row has a preference pair": lambda: prepare(rows=[chat() | {"chosen": "a", "rejected": "b"}]),
    "drops the words 'b'": lambda: prepare(template=NO_CONTENT),
    "the row has no assistant message": lambda: prepare(rows=[{"messages": [{"role": "user", "content": "a"}]}]),
    "System role not supported": lambda: prepare(template=NO_SYSTEM),
    "the chat template uses today's date": lambda: prepare(template=DATE),
    "the template writes a method": lambda: prepare(template="{{ messages[0].items }}"),
    "it needs more loop iterations": lambda: prepare(template="{{ 'a'.center(10 ** 10) }}"),
    "chat templates cannot call": lambda: prepare(template="{{ messages[0].content.encode() }}"),
    "is of type 'image'": lambda: prepare(rows=[chat([{"type": "image", "image": "x.png"}])]),
    "expected messages or conversations": lambda: prepare(rows=[{"dialogue": "a"}]),
    "not valid JSON": cut_json,
    "not a local folder": lambda: prepare("--tokenizer-model", "Qwen/Qwen3-8B"),
    "a tokenizer without tokenizer.json": lambda: with_only("vocab.json"),
    "is in the code of its tokenizer, which is not run here": lambda: with_only("x.tiktoken", b"IQ== 0\n"),
    "a complete shard already exists": lambda: again("--seed", 1),
    "contains parts of an interrupted preprocess": lambda: interrupted("--append-eod"),
    "pip install 'megatron-sft-idx[parquet]'": missing_package,
}

READING: Scenes = {
    "no shard here": lambda: says("inspect", "x/nothing"),
    "it was cut short": lambda: damaged(lambda held: held[:-2], "inspect"),
    "restore it from a copy": lambda: damaged(lambda held: b"\7\7" + held[2:], "verify", "--full"),
    "expected 0 to 999, found id 1164": lambda: says("verify", "--full", "--vocab-size", 1000, "data/chats"),
    "a tokenizer of fingerprint": lambda: says("inspect", "data/chats", "--tokenizer", other_tokenizer()),
    "no known packed data": lambda: says("convert", str(TOKENIZER), "x/out", "--to", "sft-idx"),
    "a .pbin stores no loss masks": lambda: says("convert", "data/chats", "x/out.pbin", "--to", "pbin"),
}


def other_tokenizer() -> str:
    """Return the demo's tokenizer with another name for a token."""
    found = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))
    found["added_tokens"][0]["content"] = "<|another|>"
    Path("other.json").write_text(json.dumps(found), encoding="utf-8")
    return "other.json"


HEADINGS = {"Preparing": PREPARING, "Reading and checking": READING}


@pytest.mark.parametrize("message", quoted("docs/troubleshooting.md", "Preparing"))
def test_what_preparing_says(message: str, world: Path) -> None:
    assert message in scene(PREPARING, message)


@pytest.mark.parametrize("message", quoted("docs/troubleshooting.md", "Reading and checking"))
def test_what_reading_says(message: str, world: Path) -> None:
    assert message in scene(READING, message)


def test_the_short_list_is_of_messages_of_the_long_one() -> None:
    long = [message for heading in [*HEADINGS, "Training"] for message in quoted("docs/troubleshooting.md", heading)]
    short = quoted("README.md", "When it fails")
    assert len(short) >= 5
    assert not [message for message in short if not any(message in other for other in long)]


def test_no_scene_is_left_over() -> None:
    for heading, scenes in HEADINGS.items():
        assert len(quoted("docs/troubleshooting.md", heading)) == len(scenes)
