"""Images and audio in batches: *media steps* turn them into model inputs.

A media step is a function that gets the images and recordings of a batch and returns entries to add to the batch. It
runs where the batch is made: in the thread of a ``BatchLoader``, or in a worker of a ``DataLoader``. There are two:

- ``MediaInputs`` decodes the files and runs the model's own processor, which returns tensors such as ``pixel_values``.
- ``keep_items`` adds the encoded files, for trainers that process them.

Models assign the features of images and of recordings to the placeholder tokens of each kind, from the first row to
the last. A media step therefore gets the items in the order of rows, and within a row by position.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import get_worker_info

from megatron_sft_idx.arguments import checked
from megatron_sft_idx.chat.media_files import MISSING, decoded_image, decoded_recording
from megatron_sft_idx.chat.media_processor import audio_part, load_from_folder, placeholders_of
from megatron_sft_idx.errors import FormatError, brief
from megatron_sft_idx.layout.media_layout import Kind, MediaItem
from megatron_sft_idx.lines import Shown, shown_by_fields

# The numbers with which processors of transformers mark the positions of images and audio (mm_token_type_ids).
_TYPE_IDS: Final[dict[Kind, int]] = {"image": 1, "audio": 3}
# Outputs of a processor for the text, which are already in the batch.
_TEXT_OUTPUTS: Final = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "mm_token_type_ids",
    "text_replacement_offsets",
)
_MOST_THREADS: Final = 8
# Kinds of layers in which position_ids keep attention from crossing sequences.
_ATTENTION: Final = {"full_attention", "sliding_attention", "chunked_attention"}


@shown_by_fields
@dataclass(frozen=True)
class BatchItem(MediaItem):
    """One image or recording in a batch.

    Attributes:
        kind: ``image`` or ``audio``.
        start: its first position in the row.
        length: number of positions of its placeholder tokens.
        data: the encoded file, as a read-only view; ``bytes`` if it came from another process.
        row: the row of the batch.
        sequence: the number of its sequence, counted from 0 over all rows of the batch.
    """

    row: int
    sequence: int


@shown_by_fields
class MediaBatch(NamedTuple):
    """The argument of a media step: the sequences of a batch, and its images and recordings.

    Attributes:
        tokens: token ids, int64 or int32 [rows, positions].
        position_ids: position of each token in its sequence, int64 [rows, positions].
        rows: the row of each sequence, int64 [sequences].
        starts: the first position of each sequence in its row, int64 [sequences].
        lengths: the number of tokens of each sequence, int64 [sequences].
        items: the images and recordings, ordered by row and position.

    Example:
        >>> from megatron_sft_idx import as_torch
        >>> def count_images(batch: MediaBatch) -> dict:
        ...     images = [item for item in batch.items if item.kind == "image"]
        ...     return {"num_images": torch.tensor(len(images))}
        >>> packs = as_torch("data/pictures", media=count_images)
        >>> packs.collate([packs[0]])["num_images"]
        tensor(1)
    """

    tokens: Tensor
    position_ids: Tensor
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    items: list[BatchItem]


# A function that returns the entries to add to a batch, by name.
MediaStep: TypeAlias = Callable[[MediaBatch], dict[str, Any]]


def check_media_options(media: Any, ignore_media: bool) -> None:
    """Raise FormatError unless ``media`` is None or a media step, and at most one of the two options is given."""
    if media is None:
        return
    if ignore_media:
        raise FormatError("media and ignore_media cannot be combined: batches either contain images and audio, or not")
    if isinstance(media, type) or not callable(media) or hasattr(media, "from_pretrained"):
        raise FormatError(f"media: {brief(media)}, expected MediaInputs(FOLDER), keep_items or another media step")


def run_step(step: MediaStep, batch: MediaBatch, taken: Iterable[str]) -> dict[str, Any]:
    """Run a media step. FormatError: it does not return a dictionary, or returns a name that the batch already has.

    ``taken`` are the names in the batch.
    """
    made = step(batch)
    if not isinstance(made, dict):
        raise FormatError(f"media: the step returned {brief(made)}, expected a dictionary")
    if replaced := sorted(made.keys() & {*taken}):
        raise FormatError(f"media: the step returned {replaced[0]!r}, which is already in the batch; rename it")
    return made


def keep_items(batch: MediaBatch) -> dict[str, Any]:
    """Media step that adds the encoded files to the batch: ``media``, a list of ``BatchItem``.

    Example:
        >>> from megatron_sft_idx import as_torch
        >>> packs = as_torch("data/pictures", media=keep_items)
        >>> packs.collate([packs[0]])["media"]
        [BatchItem(kind='image', start=1, length=2, data=23 bytes, row=0, sequence=0)]
    """
    return {"media": batch.items}


def text_positions(
    shape: Sequence[int], rows: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> Tensor:
    """Return ``MediaBatch.position_ids`` for a batch of this shape, [rows, positions]; 0 outside of sequences.

    Example:
        >>> text_positions((1, 6), np.array([0, 0]), np.array([0, 3]), np.array([3, 2])).tolist()
        [[0, 1, 2, 0, 1, 0]]
    """
    positions = torch.zeros(tuple(shape), dtype=torch.int64)
    for row, start, length in zip(rows.tolist(), starts.tolist(), lengths.tolist(), strict=True):
        positions[row, start : start + length] = torch.arange(length)
    return positions


class MediaInputs(Shown):
    """Media step that makes the inputs of a transformers model with the model's own processor.

    Images are decoded upright and in RGB, recordings as one channel at the sampling rate of the processor, like in
    transformers. The outputs of the processor are added to the batch under their own names, such as ``pixel_values``,
    ``image_grid_thw`` or ``input_features``. Batches without images and recordings do not have these entries.

    If the model counts positions in three dimensions (M-RoPE, as in Qwen-VL), batches also have
    ``mrope_position_ids`` int64 [3, rows, positions]. For a sequence with images or audio, they are the result of the
    model's ``get_rope_index`` for this sequence; everywhere else they are text positions. ``as_torch`` puts them into
    ``position_ids``.

    Args:
        processor: folder of the processor that the shard was made with (``--processor``), or the processor itself.
        model_config: folder or configuration of the model; None for the ``config.json`` in the processor's folder.
        threads: number of files to decode at once; decoding takes most of the time. None for the number of CPUs, at
            most 8, or 1 in workers of a ``DataLoader``.

    Raises:
        FormatError: transformers, pillow or soundfile is missing; the processor or configuration does not exist; or
            the model needs inputs per token that cannot be made here. Calling it for a batch raises FormatError if a
            file cannot be decoded, or if the processor expands an item to another number of positions than the shard
            has for it.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from megatron_sft_idx import as_torch
        >>> packs = as_torch("data/colours", media=MediaInputs("data/processor"))
        >>> batch = next(iter(DataLoader(packs, collate_fn=packs.collate)))
        >>> batch["pixel_values"].shape
        torch.Size([1, 3, 56, 56])
    """

    @checked
    def __init__(self, processor: Any, model_config: Any = None, *, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise FormatError(f"threads {threads}, expected 1 or more")
        self.processor, self.model_config, self.threads = processor, model_config, threads
        self._pool_of: tuple[int, ThreadPoolExecutor] | None = None
        _ = self._loaded  # raises its errors now

    def _shown(self) -> str:
        return f"{self._loaded.name}, {'three' if self._loaded.rope_index else 'one'}-dimensional positions"

    def __getstate__(self) -> dict[str, Any]:
        return {
            "processor": self.processor,
            "model_config": self.model_config,
            "threads": self.threads,
            "_pool_of": None,
        }

    @cached_property
    def _loaded(self) -> _Loaded:
        return _Loaded.of(self.processor, self.model_config)

    @property
    def _pool(self) -> ThreadPoolExecutor:
        """Return the thread pool of this process. A forked process does not inherit the threads of its parent."""
        if self._pool_of is None or self._pool_of[0] != os.getpid():
            threads = self.threads or (1 if get_worker_info() else min(os.cpu_count() or 1, _MOST_THREADS))
            self._pool_of = os.getpid(), ThreadPoolExecutor(threads, thread_name_prefix="media")
        return self._pool_of[1]

    def __call__(self, batch: MediaBatch) -> dict[str, Any]:
        """Return the tensors to add to a batch, by name. FormatError: see the class."""
        made: dict[str, Any] = self._tensors(batch) if batch.items else {}
        self._require_no_other_placeholders(batch)
        if self._loaded.rope_index is not None:
            made["mrope_position_ids"] = self._mrope(batch, made)
        return made

    def _tensors(self, batch: MediaBatch) -> dict[str, Any]:
        """Return the outputs of the processor for all images and recordings of a batch, by name."""
        loaded, given = self._loaded, dict[str, Any]()
        decoded = list(self._pool.map(self._decoded, batch.items))
        for kind, name in (("image", "images"), ("audio", "audio")):
            if of_kind := [one for item, one in zip(batch.items, decoded, strict=True) if item.kind == kind]:
                given[name] = of_kind
        if "audio" in given:
            given["sampling_rate"] = loaded.sampling_rate
        # With placeholders in the text, the processor also returns the number of positions of each item.
        text = "".join(loaded.placeholders[item.kind] for item in batch.items)
        try:
            made = loaded.processor(
                text=[text],
                return_text_replacement_offsets=True,
                return_tensors="pt",
                add_special_tokens=False,
                **given,
            )
            replaced, num_tokens = made["text_replacement_offsets"][0], len(made["input_ids"][0])
        except Exception as error:  # whatever its own code raises
            raise FormatError(f"{loaded.name} rejects the items of a batch: {brief(str(error))}") from error
        self._require_same_positions(batch, replaced)
        tensors = {name: values for name, values in made.items() if name not in _TEXT_OUTPUTS}
        for name, values in tensors.items():
            is_whole = isinstance(values, Tensor) and not values.is_floating_point()
            if is_whole and values.shape[:2] == (1, num_tokens):
                raise FormatError(
                    f"{loaded.name} returns {name} for each token of a text, which batches do not support"
                )
        return tensors

    def _decoded(self, item: BatchItem) -> Any:
        if item.kind not in self._loaded.placeholders:
            raise FormatError(
                f"{self._loaded.name} does not support {item.kind}; use the processor that the shard was made with"
            )
        try:
            if item.kind == "image":
                return decoded_image(item.data)
            return decoded_recording(item.data, self._loaded.sampling_rate)
        except ValueError as error:
            raise FormatError(
                f"{item.kind} at position {item.start} of row {item.row}: {error}; find files that were damaged since"
                " the shard was made with verify --full"
            ) from None

    def _require_no_other_placeholders(self, batch: MediaBatch) -> None:
        """Raise FormatError if a sequence has a placeholder token that belongs to no image or recording."""
        kinds = {
            number: kind
            for kind, placeholder in self._loaded.placeholders.items()
            for number, token in self._loaded.ids[kind].items()
            if token == placeholder
        }
        other = torch.isin(batch.tokens, torch.tensor([*kinds], dtype=batch.tokens.dtype))
        for item in batch.items:
            other[item.row, item.start : item.start + item.length] = False
        if not other.any():
            return
        for row, start, length in zip(batch.rows.tolist(), batch.starts.tolist(), batch.lengths.tolist(), strict=True):
            if (found := other[row, start : start + length].nonzero()).numel():
                position = start + int(found[0])
                kind = kinds[int(batch.tokens[row, position])]
                raise FormatError(
                    f"position {position} of row {row}: the placeholder {self._loaded.placeholders[kind]!r} has no"
                    f" {kind}, because the text contains it (possible with --allow-control-tokens); tokenize the row"
                    " without that option, or leave it out"
                )

    def _require_same_positions(self, batch: MediaBatch, replaced: Sequence[Mapping[str, Any]]) -> None:
        """Raise FormatError if the processor produces more or fewer positions for an item than the shard has."""
        if len(replaced) != len(batch.items):
            raise FormatError(f"{self._loaded.name} replaced only {len(replaced)} of {len(batch.items)} placeholders")
        for item, each in zip(batch.items, replaced, strict=True):
            ids = self._loaded.ids[item.kind]
            own = batch.tokens[item.row, item.start : item.start + item.length]
            found = sum(int((own == number).sum()) for number in ids)
            expected = sum(each["replacement"].count(token) for token in ids.values())
            if found != expected or not found:
                raise FormatError(
                    f"{item.kind} at position {item.start} of row {item.row}: {self._loaded.name} expands it to"
                    f" {expected} positions, but the shard has {found}; use the processor that the shard was made with"
                )

    def _mrope(self, batch: MediaBatch, made: Mapping[str, Any]) -> Tensor:
        """Return positions in three dimensions, int64 [3, rows, positions]."""
        positions = batch.position_ids.expand(3, *batch.position_ids.shape).clone()
        numbers = sorted({item.sequence for item in batch.items})
        places = [(int(batch.rows[n]), int(batch.starts[n]), int(batch.lengths[n])) for n in numbers]
        if not places:
            return positions
        ids = [batch.tokens[row, start : start + length].long() for row, start, length in places]
        types = [torch.zeros_like(each) for each in ids]
        for each, marked in zip(ids, types, strict=True):
            for kind, of_kind in self._loaded.ids.items():
                marked[torch.isin(each, torch.tensor([*of_kind]))] = _TYPE_IDS[kind]
        padded = {
            "input_ids": pad_sequence(ids, batch_first=True),
            "mm_token_type_ids": pad_sequence(types, batch_first=True),
            "attention_mask": pad_sequence([torch.ones_like(each) for each in ids], batch_first=True),
        }
        for (row, start, length), own in zip(places, self._loaded.positions({**made, **padded}), strict=True):
            positions[:, row, start : start + length] = own[:, :length]
        return positions


class _Loaded(NamedTuple):
    """A processor of transformers, and the needs of its model.

    Attributes:
        processor: the processor.
        placeholders: for each kind, the token that it replaces in texts.
        ids: for each kind, the tokens that stand for features of the model, by id.
        rope_index: ``get_rope_index`` of the model; None if positions have one dimension.
    """

    processor: Any
    placeholders: dict[Kind, str]
    ids: dict[Kind, dict[int, str]]
    rope_index: Callable[..., Any] | None

    @property
    def name(self) -> str:
        return type(self.processor).__name__

    @property
    def sampling_rate(self) -> int:
        """The sampling rate in Hz that the processor expects."""
        return int(audio_part(self.processor).sampling_rate)

    @classmethod
    def of(cls, processor: Any, config: Any) -> _Loaded:
        """Load a processor and the configuration of its model. Raises FormatError as described for ``MediaInputs``."""
        try:
            import transformers
        except ImportError as error:
            raise FormatError(f"MediaInputs needs transformers: {MISSING} ({error})") from None
        if config is None:
            if not isinstance(processor, (str, os.PathLike)) or not (Path(processor) / "config.json").is_file():
                raise FormatError(
                    f"{brief(processor)}: no config.json of the model in this folder, which is needed to count"
                    " positions; pass model_config=FOLDER of the model, or its configuration"
                )
            config = processor
        if isinstance(processor, (str, os.PathLike)):
            processor = load_from_folder("processor", transformers.AutoProcessor, os.fspath(processor))
        if isinstance(config, (str, os.PathLike)):
            config = load_from_folder("configuration", transformers.AutoConfig, os.fspath(config))
        placeholders = placeholders_of(processor)
        if not placeholders:
            raise FormatError(f"{type(processor).__name__}: supports neither images nor audio")
        ids = {kind: _feature_tokens(processor, kind, token) for kind, token in placeholders.items()}
        model = _model_class(transformers, config)
        _require_known_inputs(model)
        _require_own_model(processor, [*placeholders], model)
        _require_attention(config)
        return cls(processor, placeholders, ids, _rope_index(model, config))

    def positions(self, known: Mapping[str, Any]) -> Tensor:
        """Return the model's positions for sequences, int64 [sequences, 3, tokens].

        Args:
            known: arguments for ``get_rope_index``, by name. Arguments that it does not take are left out.
        """
        assert self.rope_index is not None
        wanted = inspect.signature(self.rope_index).parameters
        missing = [
            name
            for name, each in wanted.items()
            if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD and name not in known
        ]
        if missing:
            raise FormatError(f"get_rope_index of the model needs {missing[0]}, which is not supported")
        try:
            found = self.rope_index(**{name: known[name] for name in wanted if name in known})[0]
        except Exception as error:  # whatever its own code raises
            raise FormatError(
                f"get_rope_index of the model fails with {', '.join(name for name in wanted if name in known)}, which"
                f" are all supported arguments: {brief(str(error))}"
            ) from error
        if found.ndim != 3 or len(found) != 3:
            raise FormatError(
                f"get_rope_index of the model returned positions of shape {[*found.shape]}, expected [3, ...]"
            )
        by_sequence: Tensor = found.transpose(0, 1)
        return by_sequence


def _feature_tokens(processor: Any, kind: Kind, placeholder: str) -> dict[int, str]:
    """Return the tokens at which a model inserts features, by id. By default this is the placeholder."""
    tokenizer = processor.tokenizer
    numbers = [number for number in getattr(processor, f"{kind}_token_ids", None) or () if isinstance(number, int)]
    numbers = numbers or [int(tokenizer.convert_tokens_to_ids(placeholder))]
    return dict(zip(numbers, tokenizer.convert_ids_to_tokens(numbers), strict=True))


def _require_known_inputs(model: Any) -> None:
    """Raise FormatError if a model's attention depends on the type of each token (``mm_token_type_ids``).

    In transformers 5.24, sliding layers of such models look up these types at wrong positions of packed rows. Models
    with ``get_rope_index`` use ``mm_token_type_ids`` only in that function.
    """
    taken = inspect.signature(model.forward).parameters
    names = ["token_type_ids"] if hasattr(model, "get_rope_index") else ["token_type_ids", "mm_token_type_ids"]
    if found := [name for name in names if name in taken]:
        raise FormatError(
            f"{model.__name__}: its attention is not causal inside images (it needs {found[0]}), which packed rows"
            " cannot express; such models are not supported"
        )


def _require_attention(config: Any) -> None:
    """Raise FormatError if a model has layers other than attention, where transformers mixes the sequences of a row."""
    text = config.get_text_config()
    others = sorted({*(getattr(text, "layer_types", None) or ())} - _ATTENTION)
    others += [name for name in vars(text) if name.startswith("mamba")][:1]
    if others:
        raise FormatError(
            f"{type(config).__name__}: has layers of the type {others[0]}, in which the sequences of a packed row"
            " would see each other in transformers; such models are not supported"
        )


def _require_own_model(processor: Any, kinds: Sequence[Kind], model: Any) -> None:
    """Raise FormatError if a model takes none of the processor's tensors for images, or none for recordings.

    This happens if the language model inside a multimodal model was passed instead of the whole model. Its way of
    counting positions would be used without an error.
    """
    taken = inspect.signature(model.forward).parameters
    for kind in kinds:
        part = getattr(processor, "image_processor", None) if kind == "image" else audio_part(processor)
        names = getattr(part, "model_input_names", [])
        if names and not any(name in taken for name in names):
            raise FormatError(
                f"{model.__name__} does not accept {names[0]}, which {type(processor).__name__} returns; pass the"
                " configuration of the model that the processor belongs to (for Qwen-Omni, its thinker_config)"
            )


def _model_class(transformers: Any, config: Any) -> Any:
    """Return the class of a model. Raise FormatError if transformers has none for the configuration."""
    mappings = ("MODEL_MAPPING", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_MULTIMODAL_LM_MAPPING")
    found = [mapping[type(config)] for name in mappings if type(config) in (mapping := getattr(transformers, name, {}))]
    if not found:
        raise FormatError(f"{brief(type(config).__name__)}: transformers has no model with this configuration")
    return next((each for each in found if hasattr(each, "get_rope_index")), found[0])


def _rope_index(model: Any, config: Any) -> Callable[..., Any] | None:
    """Return ``get_rope_index`` of a model created without weights, or None if it has none."""
    if not hasattr(model, "get_rope_index"):
        return None
    with torch.device("meta"):
        function: Callable[..., Any] = model(config).get_rope_index
    return function
