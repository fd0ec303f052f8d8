"""Placeholders of images and audio, expanded as the model's own processor of transformers expands them.

A processor replaces each placeholder token in a text by others, as many as the model has positions for the image or
recording, and perhaps by tags around and between them. What it replaces depends on the size of an image or the length
of a recording alone, so it is asked once for each size, with an empty image or silence of that size.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.media_files import MISSING, LoadedMedia
from megatron_sft_idx.chat.types import Rendered, RowError, Span
from megatron_sft_idx.errors import FormatError, brief
from megatron_sft_idx.layout.media import Kind

# Files of a folder that decide what a processor does, beside those of its tokenizer.
_FILES: Final = ("processor_config.json", "preprocessor_config.json", "feature_extractor_config.json")
_OFFSETS: Final = "text_replacement_offsets"


class PlacedItem(NamedTuple):
    """Characters ``[start, stop)`` of a rendered text that stand for an image or a recording."""

    start: int
    stop: int
    media: LoadedMedia


class MediaProcessor:
    """A processor of transformers, as far as it decides what texts become.

    Args:
        folder: that holds the processor and its tokenizer.
        control_tokens: of the tokenizer that makes the ids.

    Raises:
        FormatError: transformers or pillow is not installed; the folder holds no processor; or it has no placeholders,
            or those are no control tokens of the tokenizer.
    """

    def __init__(self, folder: str, control_tokens: Sequence[str]) -> None:
        self.folder = folder
        try:
            import transformers
        except ImportError as error:
            raise FormatError(f"--processor needs transformers and pillow: {MISSING} ({error})") from None
        try:
            load: Any = transformers.AutoProcessor.from_pretrained
            self._processor: Any = load(folder, local_files_only=True)
        except Exception as error:  # whatever its own code raises
            raise FormatError(f"{folder}: transformers makes no processor of it: {brief(str(error))}") from None
        self.tokens: dict[Kind, str] = {}
        names: tuple[tuple[Kind, str], ...] = (("image", "image_token"), ("audio", "audio_token"))
        for kind, name in names:
            token = getattr(self._processor, name, None)
            if isinstance(token, str) and token:
                self.tokens[kind] = token
        if not self.tokens:
            raise FormatError(f"{folder}: a processor without placeholders, {type(self._processor).__name__}")
        for kind, token in self.tokens.items():
            if token not in control_tokens:
                raise FormatError(f"{folder}: its placeholder of {kind} {token!r} is no special token of the tokenizer")
        self._pattern = re.compile("|".join(re.escape(token) for token in self.tokens.values()))
        self._kinds = {token: kind for kind, token in self.tokens.items()}
        self._replacements: dict[tuple[Kind, tuple[int, int]], str] = {}

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the files that decide what it does, and of its class."""
        hashed = hashlib.sha256(type(self._processor).__name__.encode())
        for name in _FILES:
            if (path := Path(self.folder) / name).is_file():
                hashed.update(name.encode() + b"\0" + path.read_bytes())
        return hashed.hexdigest()[:32]

    def replacement(self, kind: Kind, size: tuple[int, int]) -> str:
        """What the placeholder of an image or recording of this size (``LoadedMedia.size``) becomes."""
        key = kind, size
        if key not in self._replacements:
            self._replacements[key] = self._asked(kind, size)
        return self._replacements[key]

    def _asked(self, kind: Kind, size: tuple[int, int]) -> str:
        token = self.tokens[kind]
        try:
            if kind == "image":
                from PIL import Image

                height, width = size
                out = self._processor(
                    text=[token], images=[Image.new("RGB", (width, height))], return_text_replacement_offsets=True
                )
            else:
                out = self._processor(
                    text=[token],
                    audio=[np.zeros(samples_at(size, self.sampling_rate), np.float32)],
                    sampling_rate=self.sampling_rate,
                    return_text_replacement_offsets=True,
                )
            (replaced,) = out[_OFFSETS][0]
        except Exception as error:  # whatever its own code raises
            what = f"an image of {size[1]} x {size[0]} pixels" if kind == "image" else f"{size[0]} samples of audio"
            raise RowError(f"the processor does not take {what}: {brief(str(error))}") from None
        return str(replaced["replacement"])

    @property
    def sampling_rate(self) -> int:
        """Samples a second of the recordings that it takes."""
        names = ("audio_processor", "feature_extractor")
        extractor = next(getattr(self._processor, name) for name in names if hasattr(self._processor, name))
        return int(extractor.sampling_rate)

    def expand(self, rendered: Rendered, media: Sequence[LoadedMedia]) -> tuple[Rendered, list[PlacedItem]]:
        """A rendered text with its placeholders replaced, and the characters that each image and recording takes.

        Spans that are trained on go around these characters.

        Args:
            rendered: what the template made of a conversation, or of its first turns.
            media: the images and recordings of the conversation, in order.

        RowError: the text has more placeholders of a kind than there are images or recordings.
        """
        text, parts = rendered.text, list[str]()
        items: list[PlacedItem] = []
        edges: list[
            tuple[int, int, int]
        ] = []  # of each placeholder: where it begins and ends, and by how much it grows
        waiting = {kind: iter([each for each in media if each.kind == kind]) for kind in self.tokens}
        done = length = 0
        for start, stop in self._placeholders(rendered):
            kind = self._kinds[text[start:stop]]
            if (own := next(waiting[kind], None)) is None:
                raise RowError(f"the chat template writes more placeholders of {kind} than the row has of that kind")
            new = self.replacement(kind, own.size)
            parts += [text[done:start], new]
            length += start - done
            items.append(PlacedItem(length, length + len(new), own))
            edges.append((start, stop, len(new) - (stop - start)))
            length, done = length + len(new), stop
        if not items:
            return rendered, items
        moved = _Moved(edges)
        spans = [piece for span in rendered.spans for piece in _around(moved.span(span), items)]
        literals = [(moved.at(start), moved.at(stop)) for start, stop in rendered.literals]
        return rendered._replace(text="".join([*parts, text[done:]]), spans=spans, literals=literals), items

    def _placeholders(self, rendered: Rendered) -> list[tuple[int, int]]:
        """The placeholders that the template wrote; one in the data's own words stays text."""
        found = [match.span() for match in self._pattern.finditer(rendered.text)]
        return [(a, b) for a, b in found if not any(a < stop and b > start for start, stop in rendered.literals)]


class _Moved:
    """Where characters of a text are once its placeholders have grown."""

    def __init__(self, edges: Sequence[tuple[int, int, int]]) -> None:
        self._stops = np.array([stop for _, stop, _ in edges])
        self._growth = np.append(0, np.cumsum([grown for *_, grown in edges]))

    def at(self, position: int) -> int:
        """Where a character is that is outside of all placeholders, or the first of one."""
        return position + int(self._growth[np.searchsorted(self._stops, position, "right")])

    def span(self, span: Span) -> Span:
        """A span, which begins and ends outside of all placeholders, or at the edge of one."""
        return span._replace(start=self.at(span.start), stop=self.at(span.stop))


def _around(span: Span, items: Sequence[PlacedItem]) -> list[Span]:
    """The pieces of a span that are outside of all items."""
    pieces, start = [], span.start
    for item in items:
        if item.stop <= start or item.start >= span.stop:
            continue
        if start < item.start:
            pieces.append(span._replace(start=start, stop=item.start))
        start = item.stop
    return [*pieces, span._replace(start=start)] if start < span.stop else pieces


def samples_at(size: tuple[int, int], rate: int) -> int:
    """How many samples a recording (samples, rate) has at another rate."""
    samples, given = size
    return samples if given == rate else -(-samples * rate // given)


def positions_of(items: Sequence[PlacedItem], numbers: NDArray[Any]) -> NDArray[np.int64]:
    """First position and length of each item, int64 [items, 2].

    ``numbers`` says of each token which item it is of, from 1; 0 for none. RowError: a token is of two items.
    """
    places = np.zeros((len(items), 2), np.int64)
    for at in range(len(items)):
        tokens = np.flatnonzero(numbers == at + 1)
        if not len(tokens) or tokens[-1] - tokens[0] + 1 != len(tokens):
            raise RowError(f"the tokens of {items[at].media.kind} {at + 1} run into those of another one")
        places[at] = tokens[0], len(tokens)
    return places
