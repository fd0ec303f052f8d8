"""Images and audio of a row: their positions in its messages, and the sources of their encoded files.

All forms are converted to content parts ``{"type": "image"}`` and ``{"type": "audio"}``, as chat templates expect them:

- parts with their own file: OpenAI's ``image_url`` and ``input_audio``; and ``image`` and ``audio`` with the file under
  the same name, or under ``path``, ``url``, ``base64`` or ``source``;
- parts without a file, and tags ``<image>`` and ``<audio>`` in text (LLaVA, ms-swift, LLaMA-Factory). The files are in
  ``images`` and ``audios`` of the row, in order;
- files of the row without positions: they are put at the beginning of the first user message, like TRL.

A file is given as bytes, as ``{"bytes", "path"}`` (Hugging Face), as a ``data:`` URI, or as a path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from megatron_sft_idx.chat.field_names import AUDIOS, IMAGES
from megatron_sft_idx.chat.fields import is_filled, kind_of
from megatron_sft_idx.chat.types import RowError
from megatron_sft_idx.chat.values import Binary
from megatron_sft_idx.layout.media_layout import Kind

# Types of content parts.
_PARTS: Final[dict[str, Kind]] = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("audio", "input_audio", "audio_url"), "audio"),
}
_VIDEO_PARTS: Final = ("video", "video_url", "input_video")
# Keys of a part for its file, in addition to the names of part types.
_FILE_KEYS: Final = ("path", "url", "base64", "data", "bytes", "source")
_TAGS: Final = re.compile(r"<(image|audio)>")
_OF_ROW: Final[dict[Kind, tuple[str, ...]]] = {"image": IMAGES, "audio": AUDIOS}
NOT_READ: Final = "pass --processor FOLDER to read images and audio; without it, only text is supported"
NO_VIDEO: Final = "only images and audio are supported, not videos"
# Key under which a part keeps its file until the row is encoded; templates do not see it.
FILE: Final = "\0file"


@dataclass(frozen=True, slots=True)
class MediaFile:
    """An unread image or recording of a row. Two are equal if they are the same file, whatever their positions.

    Attributes:
        kind: ``image`` or ``audio``.
        given: bytes, or text with their location: a path or a ``data:`` URI.
        what: the field that contains it, for errors.
    """

    kind: Kind
    given: bytes | str
    what: str = field(compare=False)


def kind_of_part(part: Mapping[str, Any], what: str) -> Kind | None:
    """Return whether a content part is an image or audio; None for any other part. RowError: it is a video."""
    kind = part.get("type")
    if kind in _VIDEO_PARTS:
        raise RowError(f"{what} is a video; {NO_VIDEO}")
    return _PARTS.get(kind) if isinstance(kind, str) else None


def media_part(part: Mapping[str, Any], kind: Kind, what: str) -> dict[str, Any]:
    """Return an image or audio part in the form for templates, with its file, if any, under ``FILE``."""
    if is_filled(part.get("text")):
        raise RowError(f"{what} also has text; make the text a separate part")
    own_keys = [name for name, its_kind in _PARTS.items() if its_kind == kind]
    given = [key for key in (*own_keys, *_FILE_KEYS) if is_filled(part.get(key))]
    if len(given) > 1:
        raise RowError(f"{what} has a file in {' and in '.join(given)}; keep one")
    out: dict[str, Any] = {"type": kind}
    if given:
        out[FILE] = _file_of(part[given[0]], kind, f"{what}.{given[0]}", is_base64=given[0] in ("base64", "data"))
    return out


def _file_of(value: Any, kind: Kind, what: str, *, is_base64: bool = False) -> MediaFile:
    if isinstance(value, Mapping):
        keys = [key for key in ("bytes", "data", "base64", "url", "path") if is_filled(value.get(key))]
        if not keys:
            raise RowError(f"{what} has no bytes and no path, only {', '.join(map(str, value)) or 'nothing'}")
        # Hugging Face stores the name of a file next to its bytes.
        return _file_of(value[keys[0]], kind, f"{what}.{keys[0]}", is_base64=keys[0] in ("data", "base64"))
    if isinstance(value, Binary):
        return MediaFile(kind, value.read(), what)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return MediaFile(kind, bytes(value), what)
    if isinstance(value, str):
        return MediaFile(kind, f"data:;base64,{value}" if is_base64 and not value.startswith("data:") else value, what)
    raise RowError(f"{what} is {kind_of(value)}, expected bytes, a path, a data: URI, or an object with one of them")


def place_media(data: Mapping[str, Any], messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with a position and a file for every image and recording of the row.

    RowError: there are more files than positions, or fewer.
    """
    waiting = [_Waiting(data, kind) for kind in _OF_ROW]
    by_kind = {each.kind: each for each in waiting}
    placed = [_with_places(message, by_kind) for message in messages]
    for each in reversed(waiting):  # put the first item in front last
        placed = each.finished(placed)
    return placed


def place_media_of_pair(
    data: Mapping[str, Any], chosen: Sequence[dict[str, Any]], rejected: Sequence[dict[str, Any]], shared: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Do the same as ``place_media`` for two conversations; their ``shared`` first messages get the files.

    RowError: see there; or an answer has a position without a file, as it is not known which answer has a file of the
    row.
    """
    waiting = [_Waiting(data, kind) for kind in _OF_ROW]
    by_kind = {each.kind: each for each in waiting}
    prompt = [_with_places(message, by_kind) for message in chosen[:shared]]
    for each in waiting:
        prompt = each.finished(prompt)
    answers = [[_with_places(message, by_kind) for message in side[shared:]] for side in (chosen, rejected)]
    return prompt + answers[0], prompt + answers[1]


class _Waiting:
    """The files of one kind in a row that have no position yet, in order."""

    def __init__(self, data: Mapping[str, Any], kind: Kind) -> None:
        keys = [name for name in _OF_ROW[kind] if is_filled(data.get(name))]
        if len(keys) > 1:
            raise RowError(
                f"the row has {' and '.join(keys)}; keep one, or pass --ignore-field {keys[-1]} to ignore it"
            )
        self.kind, self.key = kind, keys[0] if keys else None
        self._files = _files_of_row(data[self.key], kind, self.key) if self.key else []
        self.num_places = 0

    def next(self) -> dict[str, Any]:
        """Return the part for the next file. RowError: there is none."""
        if self.num_places >= len(self._files):
            found = f"{self.key} has {len(self._files)}" if self.key else f"the row has no {_OF_ROW[self.kind][0]}"
            raise RowError(f"{self.kind} {self.num_places + 1} in the messages has no file: {found}")
        self.num_places += 1
        return {"type": self.kind, FILE: self._files[self.num_places - 1]}

    def finished(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages; if no file had a position, with all files at the first user message.

        RowError: some had none.
        """
        if self.num_places == len(self._files):
            return messages
        if self.num_places:
            raise RowError(
                f"{self.key} has {len(self._files)} files, but the messages have {self.num_places} placeholders"
            )
        at = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if at is None:
            raise RowError(
                f"{self.key}: the messages have no placeholder for it, and there is no user message to put it in"
            )
        first = [self.next() for _ in self._files]
        return [*messages[:at], {**messages[at], "content": first + _parts_of(messages[at])}, *messages[at + 1 :]]


def _files_of_row(value: Any, kind: Kind, key: str) -> list[MediaFile]:
    """Return the files in ``images`` or ``audios`` of a row: one, or a list."""
    if not isinstance(value, (list, tuple)):
        return [_file_of(value, kind, key)]
    return [_file_of(each, kind, f"{key}[{i}]") for i, each in enumerate(value)]


def _parts_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the content of a message as parts."""
    content = message.get("content")
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _with_places(message: dict[str, Any], waiting: Mapping[Kind, _Waiting]) -> dict[str, Any]:
    """Return a message whose parts and tags without a file got the next files of the row."""
    out: list[dict[str, Any]] = []
    for part in _parts_of(message):
        if part["type"] == "text":
            out += _split_at_tags(part["text"], waiting)
        else:
            out.append(part if FILE in part else waiting[part["type"]].next())
    is_text = isinstance(message.get("content"), str) and all(part["type"] == "text" for part in out)
    return message if is_text or not out else {**message, "content": out}


def _split_at_tags(text: str, waiting: Mapping[Kind, _Waiting]) -> Iterator[dict[str, Any]]:
    """Split a text at the tags of kinds for which the row has files; tags of other kinds are text."""
    begin = 0
    for match in _TAGS.finditer(text):
        files = next((each for kind, each in waiting.items() if kind == match[1]), None)
        if files is None or files.key is None:
            continue
        if begin < match.start():
            yield {"type": "text", "text": text[begin : match.start()]}
        yield files.next()
        begin = match.end()
    if begin < len(text):
        yield {"type": "text", "text": text[begin:]}


def taken_media(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[MediaFile]]:
    """Return messages in the form for templates, and the files of their parts in order."""
    files: list[MediaFile] = []
    out = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            files += [part[FILE] for part in content if FILE in part]
            plain = [{key: value for key, value in part.items() if key != FILE} for part in content]
            out.append({**message, "content": plain})
        else:
            out.append(message)
    return out, files
