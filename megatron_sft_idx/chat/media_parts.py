"""Images and audio of a row: where in its messages they stand, and where their encoded files come from.

Every form becomes content parts ``{"type": "image"}`` and ``{"type": "audio"}``, as chat templates expect them:

- parts that bring their own file: OpenAI's ``image_url`` and ``input_audio``, and ``image`` and ``audio`` with the file
  under the same name, under ``path``, ``url``, ``base64`` or ``source``;
- parts without a file, and tags ``<image>`` and ``<audio>`` in texts (LLaVA, ms-swift, LLaMA-Factory), with the files
  in ``images`` and ``audios`` of the row, in order;
- files of the row and no place for them: they come first in what the user says first, as TRL has it.

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
# Keys of a part under which its file stands, next to those that are called as a type of part.
_FILE_KEYS: Final = ("path", "url", "base64", "data", "bytes", "source")
_TAGS: Final = re.compile(r"<(image|audio)>")
_OF_ROW: Final[dict[Kind, tuple[str, ...]]] = {"image": IMAGES, "audio": AUDIOS}
NOT_READ: Final = "--processor FOLDER reads images and audio; without it only text can be trained on"
NO_VIDEO: Final = "images and audio can be trained on here, videos cannot"
# Where a part keeps its file until the row is encoded; templates do not see it.
FILE: Final = "\0file"


@dataclass(frozen=True, slots=True)
class MediaFile:
    """An image or a recording of a row, not read yet. Two are equal if they are the same file, wherever they stand.

    Attributes:
        kind: ``image`` or ``audio``.
        given: bytes, or the text that tells where they are: a path, or a ``data:`` URI.
        what: the field that it stands in, for errors.
    """

    kind: Kind
    given: bytes | str
    what: str = field(compare=False)


def kind_of_part(part: Mapping[str, Any], what: str) -> Kind | None:
    """Whether a content part is an image or audio; None for any other part. RowError: it is a video."""
    kind = part.get("type")
    if kind in _VIDEO_PARTS:
        raise RowError(f"{what} is a video; {NO_VIDEO}")
    return _PARTS.get(kind) if isinstance(kind, str) else None


def media_part(part: Mapping[str, Any], kind: Kind, what: str) -> dict[str, Any]:
    """A content part of an image or audio as templates have it, which keeps its file under ``FILE``, if it has one."""
    if is_filled(part.get("text")):
        raise RowError(f"{what} has text too; give it as another part")
    own_keys = [name for name, its_kind in _PARTS.items() if its_kind == kind]
    given = [key for key in (*own_keys, *_FILE_KEYS) if is_filled(part.get(key))]
    if len(given) > 1:
        raise RowError(f"{what} has its file in {' and in '.join(given)}; keep one")
    out: dict[str, Any] = {"type": kind}
    if given:
        out[FILE] = _file_of(part[given[0]], kind, f"{what}.{given[0]}", is_base64=given[0] in ("base64", "data"))
    return out


def _file_of(value: Any, kind: Kind, what: str, *, is_base64: bool = False) -> MediaFile:
    if isinstance(value, Mapping):
        keys = [key for key in ("bytes", "data", "base64", "url", "path") if is_filled(value.get(key))]
        if not keys:
            raise RowError(f"{what} has neither bytes nor a path: it has {', '.join(map(str, value)) or 'nothing'}")
        # Hugging Face gives the name of a file beside its bytes.
        return _file_of(value[keys[0]], kind, f"{what}.{keys[0]}", is_base64=keys[0] in ("data", "base64"))
    if isinstance(value, Binary):
        return MediaFile(kind, value.read(), what)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return MediaFile(kind, bytes(value), what)
    if isinstance(value, str):
        return MediaFile(kind, f"data:;base64,{value}" if is_base64 and not value.startswith("data:") else value, what)
    raise RowError(f"{what} is {kind_of(value)}, expected bytes, a path, a data: URI, or an object with one of them")


def place_media(data: Mapping[str, Any], messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, in which every image and recording of the row has its place and its file.

    RowError: there are more files than places, or fewer.
    """
    waiting = [_Waiting(data, kind) for kind in _OF_ROW]
    by_kind = {each.kind: each for each in waiting}
    placed = [_with_places(message, by_kind) for message in messages]
    for each in reversed(waiting):  # what comes first is put in front last
        placed = each.finished(placed)
    return placed


def place_media_of_pair(
    data: Mapping[str, Any], chosen: Sequence[dict[str, Any]], rejected: Sequence[dict[str, Any]], shared: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """As ``place_media``, for two conversations that begin with the same ``shared`` messages, which get the files.

    RowError: as of it; or an answer has a place without a file, as it is not known which answer has a file of the row.
    """
    waiting = [_Waiting(data, kind) for kind in _OF_ROW]
    by_kind = {each.kind: each for each in waiting}
    prompt = [_with_places(message, by_kind) for message in chosen[:shared]]
    for each in waiting:
        prompt = each.finished(prompt)
    answers = [[_with_places(message, by_kind) for message in side[shared:]] for side in (chosen, rejected)]
    return prompt + answers[0], prompt + answers[1]


class _Waiting:
    """The files of one kind in a row that wait for their places, in order."""

    def __init__(self, data: Mapping[str, Any], kind: Kind) -> None:
        keys = [name for name in _OF_ROW[kind] if is_filled(data.get(name))]
        if len(keys) > 1:
            raise RowError(
                f"the row has {' and '.join(keys)}; keep one, or --ignore-field {keys[-1]} reads rows without it"
            )
        self.kind, self.key = kind, keys[0] if keys else None
        self._files = _files_of_row(data[self.key], kind, self.key) if self.key else []
        self.num_places = 0

    def next(self) -> dict[str, Any]:
        """The part of the next file. RowError: there is none."""
        if self.num_places >= len(self._files):
            found = f"{self.key} has {len(self._files)}" if self.key else f"the row has no {_OF_ROW[self.kind][0]}"
            raise RowError(f"{self.kind} {self.num_places + 1} of its messages has no file: {found}")
        self.num_places += 1
        return {"type": self.kind, FILE: self._files[self.num_places - 1]}

    def finished(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages; with all files before what the user says first if none had a place. RowError: some had none."""
        if self.num_places == len(self._files):
            return messages
        if self.num_places:
            raise RowError(f"{self.key} has {len(self._files)} files, and the messages have {self.num_places} places")
        at = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if at is None:
            raise RowError(f"{self.key}: the messages have no place for it, and none is the user's")
        first = [self.next() for _ in self._files]
        return [*messages[:at], {**messages[at], "content": first + _parts_of(messages[at])}, *messages[at + 1 :]]


def _files_of_row(value: Any, kind: Kind, key: str) -> list[MediaFile]:
    """The files in ``images`` or ``audios`` of a row: one, or a list."""
    if not isinstance(value, (list, tuple)):
        return [_file_of(value, kind, key)]
    return [_file_of(each, kind, f"{key}[{i}]") for i, each in enumerate(value)]


def _parts_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The content of a message as parts."""
    content = message.get("content")
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _with_places(message: dict[str, Any], waiting: Mapping[Kind, _Waiting]) -> dict[str, Any]:
    """A message whose parts and tags without a file have taken the next ones of the row."""
    out: list[dict[str, Any]] = []
    for part in _parts_of(message):
        if part["type"] == "text":
            out += _split_at_tags(part["text"], waiting)
        else:
            out.append(part if FILE in part else waiting[part["type"]].next())
    is_text = isinstance(message.get("content"), str) and all(part["type"] == "text" for part in out)
    return message if is_text or not out else {**message, "content": out}


def _split_at_tags(text: str, waiting: Mapping[Kind, _Waiting]) -> Iterator[dict[str, Any]]:
    """A text cut at the tags of those kinds of which the row has files; tags of other kinds are text."""
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
    """Messages as templates get them, and the files of their parts in order."""
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
