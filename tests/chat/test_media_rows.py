"""All forms of rows with images and audio give the same parts, with the same files in the same places."""

from __future__ import annotations

import base64
import copy
import random
from collections.abc import Callable
from typing import Any

import pytest

from megatron_sft_idx.chat.chat_rows import to_sequence_source
from megatron_sft_idx.chat.media_parts import MediaFile, taken_media
from megatron_sft_idx.chat.row_mapping import RowMapping
from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.chat.types import Conversation, RowError

Row = dict[str, Any]
# A row in a plain form: for each message its role and its parts, each a text or a file.
Plain = list[tuple[str, list[str | tuple[str, bytes]]]]


def drawn(rng: random.Random, kinds: tuple[str, ...]) -> Plain:
    """Draw a conversation. Two texts are never adjacent, because tags cannot separate them."""
    messages: Plain = []
    for _ in range(rng.randint(1, 3)):
        parts: list[str | tuple[str, bytes]] = []
        for _ in range(rng.randint(1, 4)):
            if rng.random() < 0.5:
                parts.append((rng.choice(kinds), bytes(rng.choices(range(256), k=rng.randint(1, 9)))))
            elif not parts or not isinstance(parts[-1], str):
                parts.append(rng.choice(["what is this?", "\n", " <b> ", "é"]))
        messages += [("user", parts), ("assistant", ["yes"])]
    return messages


def files_of(plain: Plain, kind: str) -> list[bytes]:
    return [part[1] for _, parts in plain for part in parts if not isinstance(part, str) and part[0] == kind]


def uri(data: bytes, kind: str = "image") -> str:
    return f"data:{kind}/any;base64," + base64.b64encode(data).decode()


def with_parts(plain: Plain, part_of: Callable[[str, bytes], Any]) -> Row:
    """Return messages of parts. ``part_of`` makes the part for a file."""
    return {
        "messages": [
            {
                "role": role,
                "content": [
                    {"type": "text", "text": each} if isinstance(each, str) else part_of(*each) for each in parts
                ],
            }
            for role, parts in plain
        ]
    }


def with_lists(row: Row, plain: Plain, file_of: Callable[[bytes], Any]) -> Row:
    """Return the row with all files in columns."""
    return row | {
        name: [file_of(data) for data in found]
        for name, kind in (("images", "image"), ("audios", "audio"))
        if (found := files_of(plain, kind))
    }


def tagged(plain: Plain, roles: tuple[str, str], keys: tuple[str, str]) -> list[Row]:
    names = dict(zip(("user", "assistant"), roles, strict=True))
    return [
        {keys[0]: names[role], keys[1]: "".join(each if isinstance(each, str) else f"<{each[0]}>" for each in parts)}
        for role, parts in plain
    ]


def openai_part(kind: str, data: bytes) -> Any:
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": uri(data), "detail": "high"}}
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


FORMS: dict[str, Callable[[Plain], Row]] = {
    "OpenAI": lambda plain: with_parts(plain, openai_part),
    "OpenAI's Responses": lambda plain: with_parts(
        plain,
        lambda kind, data: (
            {"type": "input_image", "image_url": uri(data)} if kind == "image" else openai_part(kind, data)
        ),
    ),
    "parts with data URIs": lambda plain: with_parts(plain, lambda kind, data: {"type": kind, kind: uri(data, kind)}),
    "parts with structs": lambda plain: with_parts(
        plain, lambda kind, data: {"type": kind, kind: {"bytes": data, "path": "a.png"}}
    ),
    "parts with base64": lambda plain: with_parts(
        plain, lambda kind, data: {"type": kind, "base64": base64.b64encode(data).decode()}
    ),
    "parts with a URL of their own": lambda plain: with_parts(
        plain, lambda kind, data: {"type": kind, "url": uri(data)}
    ),
    "parts of a table, with nulls": lambda plain: with_parts(
        plain, lambda kind, data: {"type": kind, "text": None, kind: {"bytes": data, "path": None}}
    ),
    "parts and columns of structs": lambda plain: with_lists(
        with_parts(plain, lambda kind, data: {"type": kind}), plain, lambda data: {"bytes": data, "path": None}
    ),
    "parts and columns of bytes": lambda plain: with_lists(
        with_parts(plain, lambda kind, data: {"type": kind}), plain, bytes
    ),
    "tags in messages": lambda plain: with_lists(
        {"messages": tagged(plain, ("user", "assistant"), ("role", "content"))}, plain, uri
    ),
    "tags in LLaVA's conversations": lambda plain: with_lists(
        {"id": "1", "conversations": tagged(plain, ("human", "gpt"), ("from", "value"))}, plain, uri
    ),
}


def read(row: Row, **options: Any) -> tuple[list[Row], list[MediaFile]]:
    source = to_sequence_source(copy.deepcopy(row), RowOptions(media=True, **options))
    assert isinstance(source, Conversation)
    return taken_media(source.messages)


def bytes_of(file: MediaFile) -> bytes:
    if isinstance(file.given, bytes):
        return file.given
    return base64.b64decode(file.given.partition(",")[2])


def as_parts(content: Any) -> list[Row]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_are_the_same_row(form: str) -> None:
    rng = random.Random(form)
    for _ in range(100):
        plain = drawn(rng, ("image", "audio"))
        messages, files = read(FORMS[form](plain))
        expected = [
            (role, [{"type": "text", "text": each} if isinstance(each, str) else {"type": each[0]} for each in parts])
            for role, parts in plain
        ]
        assert [(each["role"], as_parts(each["content"])) for each in messages] == expected
        shown = [each for _, parts in plain for each in parts if not isinstance(each, str)]
        assert [(file.kind, bytes_of(file)) for file in files] == shown


@pytest.mark.parametrize(
    ("kind", "column"), [("image", "image"), ("image", "images"), ("audio", "audio"), ("audio", "audios")]
)
@pytest.mark.parametrize(
    "row",
    [
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a"},
            ]
        },
        {"prompt": "q", "completion": "a"},
        {"instruction": "q", "output": "a"},
        {"query": "q", "response": "a"},
    ],
)
def test_files_without_a_place_come_first_in_what_the_user_says(row: Row, kind: str, column: str) -> None:
    for value in (b"x", [b"x"], [{"bytes": b"x", "path": None}]):
        messages, files = read(row | {column: value})
        (user,) = (each for each in messages if each["role"] == "user")
        assert user["content"] == [{"type": kind}, {"type": "text", "text": "q"}]
        assert [(each.kind, bytes_of(each)) for each in files] == [(kind, b"x")]


def test_mapped_columns_are_read_and_those_of_the_usual_name_are_not() -> None:
    mapping = RowMapping.of({"images": "pics", "audios": "data.sounds"})
    row = {"prompt": "q", "completion": "a", "pics": [b"x"], "data": {"sounds": [b"y"]}, "images": [b"z"]}
    _, files = read(row, mapping=mapping)
    assert [(each.kind, bytes_of(each)) for each in files] == [("image", b"x"), ("audio", b"y")]


REFUSED: dict[str, tuple[Row, str]] = {
    "fewer files than tags": (
        {"prompt": "<image><image>", "completion": "a", "images": [b"x"]},
        "image 2 in the messages has no file: images has 1",
    ),
    "more files than tags": ({"prompt": "<image>", "completion": "a", "images": [b"x", b"y"]}, "images has 2 files"),
    "a part without a file": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "a"}]},
        "has no file: the row has no images",
    ),
    "two files in a part": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": b"x", "path": "a.png"}]},
                {"role": "assistant", "content": "a"},
            ]
        },
        "keep one",
    ),
    "a number as a file": ({"prompt": "q", "completion": "a", "images": [3]}, "images[0] is a number"),
    "an object without a file": ({"prompt": "q", "completion": "a", "images": [{"id": 3}]}, "no bytes and no path"),
    "a video": ({"prompt": "q", "completion": "a", "videos": ["a.mp4"]}, "not videos"),
    "a part of video": (
        {"messages": [{"role": "user", "content": [{"type": "video"}]}, {"role": "assistant", "content": "a"}]},
        "not videos",
    ),
    "a part of another kind": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": b"x"}, {"type": "file"}]},
                {"role": "assistant", "content": "a"},
            ]
        },
        "content[1] is of type 'file'; only text, images and audio are supported",
    ),
    "two columns of images": (
        {"prompt": "<image>", "completion": "a", "images": [b"x"], "image": b"y"},
        "the row has images and image; keep one",
    ),
    "an image in a part of text": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "q", "image": b"x"}]},
                {"role": "assistant", "content": "a"},
            ]
        },
        "and has image; make it a separate part",
    ),
    "text in the part of an image": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": b"x", "text": "q"}]},
                {"role": "assistant", "content": "a"},
            ]
        },
        "also has text",
    ),
    "an image next to ids": ({"input_ids": [1, 2], "loss_mask": [0, 1], "images": [b"x"]}, "cannot contain media"),
    "an image next to text": ({"text": "q", "images": [b"x"]}, "cannot contain media"),
    "no place, and no user": (
        {"messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}], "images": [b"x"]},
        "no placeholder for it",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_clear_meaning_is_refused(case: str) -> None:
    row, expected = REFUSED[case]
    with pytest.raises(RowError) as caught:
        read(row)
    assert expected in str(caught.value)


def test_tags_are_words_where_the_row_has_no_files_of_their_kind() -> None:
    row = {"prompt": "what does <image> mean, and <audio>?", "completion": "a", "audios": [b"x"]}
    messages, files = read(row)
    assert messages[0]["content"] == [
        {"type": "text", "text": "what does <image> mean, and "},
        {"type": "audio"},
        {"type": "text", "text": "?"},
    ]
    assert [each.kind for each in files] == ["audio"]


@pytest.mark.parametrize("form", FORMS)
def test_without_a_processor_a_row_with_files_is_refused(form: str) -> None:
    rng = random.Random(form)
    for _ in range(20):
        plain = drawn(rng, ("image", "audio"))
        if files_of(plain, "image") or files_of(plain, "audio"):
            with pytest.raises(RowError, match="--processor"):
                to_sequence_source(FORMS[form](plain), RowOptions())
