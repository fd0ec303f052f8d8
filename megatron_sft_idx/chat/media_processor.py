"""Expand the placeholders of images and audio like the model's own transformers processor.

A processor replaces each placeholder token in a text by others: one for each position that the model uses for the image
or recording, and perhaps tags around and between them. The result depends only on the size of an image or the length of
a recording. So the processor is called once per size, with an empty image or silence of that size. Some texts with
several items are passed to it as a whole, and must give the same result.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.chat.media_files import MISSING, LoadedMedia, samples_at
from megatron_sft_idx.chat.tokenizer import Tokenizer
from megatron_sft_idx.chat.types import Rendered, RowError, Span
from megatron_sft_idx.errors import FormatError, brief
from megatron_sft_idx.layout.media_layout import KINDS, Kind

# Files of a folder that determine the behaviour of a processor, in addition to those of its tokenizer.
_FILES: Final = ("processor_config.json", "preprocessor_config.json", "feature_extractor_config.json")
_OFFSETS: Final = "text_replacement_offsets"
# Number of sizes for which the expansion of a placeholder is cached: a few kilobytes each.
_MOST_SIZES: Final = 4096
# Texts with several images or recordings that are checked: the first ones, and then one out of this many.
_FIRST_CHECKED: Final = 64
_EVERY: Final = 64
_MOST_CHECKED: Final = 1 << 16
# Image pixels, and recording samples and rate, for the first calls of a processor, and words around them.
_PROBED: Final[dict[Kind, tuple[tuple[int, int], ...]]] = {
    "image": ((336, 336), (101, 203)),
    "audio": ((16_001, 16_000), (48_123, 16_000)),
}
_WORDS: Final = "what is here?"


class PlacedItem(NamedTuple):
    """Characters ``[start, stop)`` of a rendered text that represent an image or a recording."""

    start: int
    stop: int
    media: LoadedMedia


class MediaProcessor:
    """A transformers processor, as far as it determines the text.

    Args:
        folder: folder of the processor and its tokenizer.
        tokenizer: the tokenizer that produces the ids.

    Raises:
        FormatError: transformers or pillow is not installed; the folder has no processor; the processor has no
            placeholders, or they are not control tokens of the tokenizer; or its ids for a text differ from the
            tokenizer's ids for the text with replaced placeholders.

    Attributes:
        folder: as given.
        tokens: the placeholder for each supported kind.
        chat_template: its own chat template; None to use that of the tokenizer.
    """

    def __init__(self, folder: str, tokenizer: Tokenizer) -> None:
        self.folder, self._tokenizer = folder, tokenizer
        try:
            import transformers
        except ImportError as error:
            raise FormatError(f"--processor needs transformers and pillow: {MISSING} ({error})") from None
        self._processor: Any = load_from_folder("processor", transformers.AutoProcessor, folder)
        template = getattr(self._processor, "chat_template", None)
        self.chat_template: str | None = template if isinstance(template, str) else None
        self.tokens = placeholders_of(self._processor)
        if not self.tokens:
            raise FormatError(
                f"{folder}: {self._name} has no placeholder tokens for images or audio; choose another processor"
            )
        for kind, token in self.tokens.items():
            if token not in tokenizer.control_tokens:
                raise FormatError(
                    f"{folder}: its placeholder {token!r} for {kind} is not a special token of the tokenizer; use"
                    " the tokenizer of the same model"
                )
        self._pattern = re.compile("|".join(re.escape(token) for token in self.tokens.values()))
        self._kinds = {token: kind for kind, token in self.tokens.items()}
        self._known: dict[tuple[Kind, tuple[int, int]], str] = {}
        self._checked: set[int] = set()
        self._orders: set[tuple[Kind, ...]] = set()
        try:
            for kind, token in self.tokens.items():
                # Separately, and between words with white space, which a processor may trim.
                for text in (token, f" {_WORDS} {token}\n{_WORDS}\n"):
                    self._asked([(kind, _PROBED[kind][0])], text)
        except RowError as error:
            raise FormatError(
                f"{folder}: {self._name} of transformers {transformers.__version__} does not report how it expands its"
                f" placeholders ({error}); try a newer version of transformers"
            ) from None
        self._dependent = {kind for kind in self.tokens if self._depends_on_others(kind)}

    def _depends_on_others(self, kind: Kind) -> bool:
        """Return whether the expansion of an item depends on other items of the text (if they are numbered)."""
        sizes = [(kind, size) for size in _PROBED[kind]]
        try:
            return self._asked(sizes) != [made for each in sizes for made in self._asked([each])]
        except RowError:
            return False  # rows with several items in a text are rejected

    @property
    def _name(self) -> str:
        return type(self._processor).__name__

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of the files that determine its behaviour, and of its class."""
        hashed = hashlib.sha256(self._name.encode())
        for name in _FILES:
            if (path := Path(self.folder) / name).is_file():
                hashed.update(name.encode() + b"\0" + path.read_bytes())
        return hashed.hexdigest()[:32]

    def replacements(self, media: Sequence[LoadedMedia], text: str | None = None) -> list[str]:
        """Return the replacements for the placeholders of a text with these images and recordings, in order.

        Args:
            media: the images and recordings.
            text: the text that contains them; None for a text of only placeholders.

        Raises:
            RowError: the processor rejects one of them, or all of them in one text.
            FormatError: the expansion of one depends on the others, or the processor changes other parts of the text.
        """
        sizes = [(each.kind, each.size) for each in media]
        if len(self._known) > _MOST_SIZES:
            self._known.clear()
        for each in sizes:
            if each not in self._known:
                (self._known[each],) = self._asked([each])
            if not self._known[each]:
                raise RowError(
                    f"the processor makes no tokens from {_shown(*each)}, because it is too small; leave it out"
                )
        for kind in self._dependent:
            if sum(each.kind == kind for each in media) > 1:
                raise RowError(
                    f"the tokens that {self._name} makes for one {kind} depend on the others in the text; it can only"
                    f" be used for rows with one {kind}"
                )
        known = [self._known[each] for each in sizes]
        order, number = tuple(kind for kind, _ in sizes), xxhash.xxh3_64_intdigest(repr(sizes).encode())
        if self._is_to_be_checked(order, number):
            if self._asked(sizes, text) != known:
                raise FormatError(
                    f"{self.folder}: the tokens that {self._name} makes for an image or recording depend on the others"
                    " in the same text; such processors are not supported"
                )
            # Only now: another row with the same sizes must not pass if this one did not.
            self._orders.add(order)
            if len(self._checked) < _MOST_CHECKED:
                self._checked.add(number)
        return known

    def _is_to_be_checked(self, order: tuple[Kind, ...], number: int) -> bool:
        """Return whether to check a text: it is the first with this order of kinds, an early one, or one of many.

        ``number`` is a hash of the sizes in the text. No text is checked again with sizes that were checked before.
        """
        if order not in self._orders:
            return True
        return number not in self._checked and (len(self._checked) < _FIRST_CHECKED or number % _EVERY == 0)

    def _asked(self, sizes: Sequence[tuple[Kind, tuple[int, int]]], text: str | None = None) -> list[str]:
        """Return the processor's replacements for the placeholders in a text; by default a text of only placeholders.

        Raises:
            RowError: the processor rejects them.
            FormatError: its ids differ from the ids of the text with these replacements.
        """
        from PIL import Image

        images = [Image.new("RGB", (width, height)) for kind, (height, width) in sizes if kind == "image"]
        recordings = [size for kind, size in sizes if kind == "audio"]
        given: dict[str, Any] = {"images": images} if images else {}
        if text is None:
            text = "".join(self.tokens[kind] for kind, _ in sizes)
        try:
            if recordings:
                rate = self.sampling_rate
                given["audio"] = [np.zeros(samples_at(size, rate), np.float32) for size in recordings]
                given["sampling_rate"] = rate
            made = self._processor(text=[text], return_text_replacement_offsets=True, add_special_tokens=False, **given)
            replaced, ids = made[_OFFSETS][0], [*map(int, made["input_ids"][0])]
        except Exception as error:  # from the code of the processor
            shown = ", ".join(_shown(*each) for each in sizes)
            raise RowError(f"the processor rejects {shown}: {brief(str(error))}") from None
        if len(replaced) != len(sizes):
            raise RowError(f"the processor replaced only {len(replaced)} of {len(sizes)} placeholders")
        replacements = [str(each["replacement"]) for each in replaced]
        between = self._pattern.split(text)
        expanded = "".join(chain.from_iterable(zip_longest(between, replacements, fillvalue="")))
        if ids != self._tokenizer.encode([Rendered(expanded, [])])[0].input_ids.tolist():
            raise FormatError(
                f"{self.folder}: for {brief(repr(text))}, {self._name} returns other ids than --tokenizer does for the"
                " same text with expanded placeholders: the processor changes the text, or contains a different"
                " tokenizer; such processors are not supported"
            )
        return replacements

    @property
    def sampling_rate(self) -> int:
        """The sampling rate of the recordings that it accepts."""
        return int(audio_part(self._processor).sampling_rate)

    def expand(self, rendered: Rendered, media: Sequence[LoadedMedia]) -> tuple[Rendered, list[PlacedItem]]:
        """Replace the placeholders in a rendered text. Return it with the characters of each image and recording.

        Trained spans exclude these characters.

        Args:
            rendered: the template's output for a conversation, or for its first turns.
            media: the images and recordings of the conversation, in order.

        RowError: the text has more placeholders of a kind than there are images or recordings.
        """
        text, parts = rendered.text, list[str]()
        items: list[PlacedItem] = []
        # For each placeholder: its start, its end, and its growth.
        edges: list[tuple[int, int, int]] = []
        waiting = {kind: iter([each for each in media if each.kind == kind]) for kind in self.tokens}
        found = self._placeholders(rendered)
        shown: list[LoadedMedia] = []
        for start, stop in found:
            kind = self._kinds[text[start:stop]]
            if (next_one := next(waiting[kind], None)) is None:
                raise RowError(
                    f"the text has more placeholders {text[start:stop]!r} than the row has files of {kind}: either the"
                    " chat template writes too many, or the text of the row contains one (possible with"
                    " --allow-control-tokens)"
                )
            shown.append(next_one)
        done = length = 0
        # The processor would also replace placeholders in the words of the data.
        whole = None if rendered.literals else text
        for (start, stop), own, new in zip(found, shown, self.replacements(shown, whole), strict=True):
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
        expanded = rendered._replace(text="".join([*parts, text[done:]]), spans=spans, literals=literals)
        if num_cut := sum(each.kind == "audio" and self._cuts(each.size) for each in shown):
            expanded = expanded._replace(notes=Counter(rendered.notes) + Counter(recordings_cut=num_cut))
        return expanded, items

    def _cuts(self, size: tuple[int, int]) -> bool:
        """Return whether the processor truncates a recording, like Whisper's after 30 seconds."""
        most = getattr(audio_part(self._processor), "n_samples", None)
        return most is not None and samples_at(size, self.sampling_rate) > most

    def is_in(self, rendered: Rendered) -> bool:
        """Return whether a text has a placeholder, which only an image or a recording may have."""
        return bool(self._placeholders(rendered))

    @cached_property
    def token_ids(self) -> NDArray[np.int32]:
        """Ids of the placeholders, and of the control tokens in their replacements."""
        texts = [*self.tokens.values(), *self._known.values()]
        spelt = {token for token in self._tokenizer.control_tokens if token and any(token in text for text in texts)}
        return np.concatenate([made.input_ids for made in self._tokenizer.encode([Rendered(one, []) for one in spelt])])

    def _placeholders(self, rendered: Rendered) -> list[tuple[int, int]]:
        """Return the placeholders written by the template. One in the words of the data stays text."""
        found = [match.span() for match in self._pattern.finditer(rendered.text)]
        return [(a, b) for a, b in found if not any(a < stop and b > start for start, stop in rendered.literals)]


def load_from_folder(what: str, loader: Any, folder: str) -> Any:
    """Load a processor or a configuration with transformers.

    Args:
        what: its kind, for the error.
        loader: a class of transformers with ``from_pretrained``.
        folder: the local folder to load it from.

    FormatError: transformers cannot load it.
    """
    try:
        return loader.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # from the code of the processor
        raise FormatError(f"{folder}: transformers cannot load a {what} from it: {brief(str(error))}") from None


def placeholders_of(processor: Any) -> dict[Kind, str]:
    """Return the placeholder token of each kind of media that a processor replaces in texts."""
    tokens = {kind: getattr(processor, f"{kind}_token", None) for kind in KINDS}
    return {kind: token for kind, token in tokens.items() if isinstance(token, str) and token}


def audio_part(processor: Any) -> Any:
    """Return the part of a processor that reads recordings."""
    names = ("audio_processor", "feature_extractor")
    return next(getattr(processor, name) for name in names if hasattr(processor, name))


def _shown(kind: Kind, size: tuple[int, int]) -> str:
    """Describe an image or recording of this size."""
    if kind == "image":
        return f"an image of {size[1]} x {size[0]} pixels"
    return f"a recording of {size[0]} samples at {size[1]} Hz"


class _Moved:
    """Maps positions in a text to positions after its placeholders have grown."""

    def __init__(self, edges: Sequence[tuple[int, int, int]]) -> None:
        self._stops = np.array([stop for _, stop, _ in edges])
        self._growth = np.append(0, np.cumsum([grown for *_, grown in edges]))

    def at(self, position: int) -> int:
        """Return the new position of a character outside all placeholders, or at the start of one."""
        return position + int(self._growth[np.searchsorted(self._stops, position, "right")])

    def span(self, span: Span) -> Span:
        """Return the new position of a span that begins and ends outside all placeholders, or at the edge of one."""
        return span._replace(start=self.at(span.start), stop=self.at(span.stop))


def _around(span: Span, items: Sequence[PlacedItem]) -> list[Span]:
    """Return the parts of a span outside all items."""
    pieces, start = [], span.start
    for item in items:
        if item.stop <= start or item.start >= span.stop:
            continue
        if start < item.start:
            pieces.append(span._replace(start=start, stop=item.start))
        start = item.stop
    return [*pieces, span._replace(start=start)] if start < span.stop else pieces


def positions_of(items: Sequence[PlacedItem], numbers: NDArray[Any]) -> NDArray[np.int64]:
    """Return first position and length of each item, int64 [items, 2].

    ``numbers`` has for each token the number of its item, from 1, or 0. RowError: a token belongs to two items.
    """
    places = np.zeros((len(items), 2), np.int64)
    for at in range(len(items)):
        tokens = np.flatnonzero(numbers == at + 1)
        if not len(tokens) or tokens[-1] - tokens[0] + 1 != len(tokens):
            raise RowError(f"the tokens of {items[at].media.kind} {at + 1} overlap the tokens of the next one")
        places[at] = tokens[0], len(tokens)
    return places
