"""Tiny transformers models with random weights that take images or audio, and their loss on single chats.

Each model is built from its configuration, and belongs to one of the processors of ``media_processors``. Training on a
shard is compared with the loss on single chats. For that loss, the processor of transformers gets one chat at a time,
with its images and recordings. The model gets the result of the processor, and computes positions and boundaries
itself.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import media_processors
import numpy as np
import soundfile
import torch
from media_processors import png
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader

from megatron_sft_idx import as_torch
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.tokenize import preprocess
from megatron_sft_idx.training.batch import BatchAssembler
from megatron_sft_idx.training.media import MediaBatch, MediaInputs, MediaStep
from megatron_sft_idx.training.sources import StoredPacks

# Image sizes that give different numbers of tiles and patches; the first two give the same number.
SIZES = [(64, 48), (64, 48), (100, 30), (17, 90), (120, 120)]
# Lengths of recordings; the first two have the same number of positions.
SAMPLES = [8_000, 8_000, 20_000, 31_111, 1_500]
# Number of images or recordings per chat.
COUNTS = [2, 0, 1, 3, 1, 0, 2, 1, 0, 4]
_ANSWERS = ["the cat sat", "hello", "on the mat here", "what?"]


class Family(NamedTuple):
    """A processor and its model.

    Attributes:
        kind: ``image`` or ``audio``.
        processor: function that saves a processor in a folder and returns it.
        model: function that builds the model for a processor.
        seq_length: capacity of a pack.
    """

    kind: str
    processor: Callable[[Path], Any]
    model: Callable[[Any], Any]
    seq_length: int = 256


class Trained(NamedTuple):
    """The mean loss over trained tokens, and the gradient of each parameter by name, float64."""

    loss: float
    gradients: dict[str, Tensor]


# ---- models ----


def _text(processor: Any, **options: Any) -> dict[str, Any]:
    """Return the configuration of a small decoder."""
    return {
        "vocab_size": len(processor.tokenizer) + 8,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 8192,
        "pad_token_id": None,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **options,
    }


def _vision(**options: Any) -> dict[str, Any]:
    """Return the configuration of a small encoder."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {**sizes, **options}


def _random(model: Any) -> Any:
    """Return the model in float64, with weights so large that every attended token and every image changes the loss."""
    generator = torch.Generator().manual_seed(1)
    model = model.double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.2
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    return model


def _llava(processor: Any) -> Any:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14, **_vision()},
        text_config={"model_type": "llama", **_text(processor)},
        image_token_index=processor.image_token_id,
        image_seq_length=16,
    )
    return _random(LlavaForConditionalGeneration(config))


def _llava_next(processor: Any) -> Any:
    from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration

    config = LlavaNextConfig(
        vision_config={"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14, **_vision()},
        text_config={"model_type": "llama", **_text(processor)},
        image_token_index=processor.image_token_id,
        image_grid_pinpoints=processor.image_processor.image_grid_pinpoints,
        image_seq_length=16,
    )
    return _random(LlavaNextForConditionalGeneration(config))


def _idefics3(processor: Any) -> Any:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    config = Idefics3Config(
        vision_config={"model_type": "idefics3_vision", "image_size": 64, "patch_size": 8, **_vision()},
        text_config={"model_type": "llama", **_text(processor)},
        image_token_id=processor.image_token_id,
    )
    return _random(Idefics3ForConditionalGeneration(config))


def _smolvlm(processor: Any) -> Any:
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    config = SmolVLMConfig(
        vision_config={"model_type": "smolvlm_vision", "image_size": 64, "patch_size": 8, **_vision()},
        text_config={"model_type": "llama", **_text(processor)},
        image_token_id=processor.image_token_id,
    )
    return _random(SmolVLMForConditionalGeneration(config))


def _gemma3(processor: Any) -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    config = Gemma3Config(
        vision_config={"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14, **_vision()},
        text_config={"model_type": "gemma3_text", **_text(processor, head_dim=16, sliding_window=24)},
        image_token_index=processor.tokenizer.image_token_id,
        mm_tokens_per_image=4,
    )
    return _random(Gemma3ForConditionalGeneration(config))


def _qwen2_audio(processor: Any) -> Any:
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    extractor = processor.feature_extractor
    encoder = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "d_model": 16}
    config = Qwen2AudioConfig(
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": extractor.feature_size,
            "max_source_positions": extractor.nb_max_frames // 2,
            **encoder,
        },
        text_config={"model_type": "qwen2", **_text(processor)},
        audio_token_index=processor.audio_token_id,
    )
    return _random(Qwen2AudioForConditionalGeneration(config))


def _qwen_vl_ids(processor: Any) -> dict[str, int]:
    """Return the ids of the tokens around images, by their names in configurations of Qwen-VL models."""
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    return {name: processor.tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}


def _qwen2_vl(processor: Any) -> Any:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1000.0}
    config = Qwen2VLConfig(
        vision_config={"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
        text_config=_text(processor, rope_parameters=rope),
        **_qwen_vl_ids(processor),
    )
    return _random(Qwen2VLForConditionalGeneration(config))


def _qwen2_5_vl(processor: Any) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1000.0}
    sizes = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen2_5_VLConfig(
        vision_config={**sizes, "window_size": 56, "fullatt_block_indexes": [1]},
        text_config=_text(processor, rope_parameters=rope),
        **_qwen_vl_ids(processor),
    )
    return _random(Qwen2_5_VLForConditionalGeneration(config))


def _qwen3_vl(processor: Any) -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1000.0, "mrope_interleaved": True}
    sizes = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3VLConfig(
        vision_config={**sizes, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        text_config=_text(processor, head_dim=16, rope_parameters=rope),
        **_qwen_vl_ids(processor),
    )
    return _random(Qwen3VLForConditionalGeneration(config))


FAMILIES = {
    "llava": Family("image", media_processors.llava, _llava),
    "llava-next": Family("image", media_processors.llava_next, _llava_next),
    "idefics3": Family("image", partial(media_processors.idefics3, longest_edge=128), _idefics3, 768),
    "smolvlm": Family("image", partial(media_processors.idefics3, longest_edge=128), _smolvlm, 768),
    "gemma3": Family("image", media_processors.gemma3, _gemma3),
    "qwen2-audio": Family("audio", media_processors.qwen2_audio, _qwen2_audio),
    "qwen2-vl": Family("image", media_processors.qwen2_vl, _qwen2_vl),
    "qwen2.5-vl": Family("image", media_processors.qwen2_5_vl, _qwen2_5_vl),
    "qwen3-vl": Family("image", media_processors.qwen3_vl, _qwen3_vl),
}


# ---- chats and shards ----


def tone(samples: int, pitch: float) -> bytes:
    """Return a recording of a tone of ``pitch`` Hz, at 16 kHz."""
    stream = io.BytesIO()
    soundfile.write(stream, np.sin(2 * np.pi * pitch / 16_000 * np.arange(samples)), 16_000, format="WAV")
    return stream.getvalue()


def chats(kind: str) -> list[list[dict[str, Any]]]:
    """Return chats with several images or recordings in one turn or in several turns, with one, and without any."""
    files = [png(*size, seed) for seed, size in enumerate(SIZES)]
    if kind == "audio":
        files = [tone(samples, 300.0 * (1 + number)) for number, samples in enumerate(SAMPLES)]
    shown = 0
    made = []
    for number, count in enumerate(COUNTS):
        messages = []
        turns = [count - count // 2, count // 2] if number % 2 else [count]
        for turn, items in enumerate(turns):
            parts: list[dict[str, Any]] = [{"type": "text", "text": f"what {number} "}]
            for _ in range(items):
                parts.append({"type": kind, kind: {"bytes": files[shown % len(files)]}})
                shown += 1
            parts.append({"type": "text", "text": "is here?"})
            answer = _ANSWERS[(number + turn) % len(_ANSWERS)]
            messages += [
                {"role": "user", "content": parts},
                {"role": "assistant", "content": [{"type": "text", "text": answer}]},
            ]
        made.append(messages)
    return made


def shard_of(rows: list[list[dict[str, Any]]], folder: Path, processor: Path, seq_length: int) -> Shard:
    """Make a shard of chats with ``preprocess --processor``, with the column ``source``."""
    preprocess(
        [{"messages": messages} for messages in rows],
        tokenizer=processor,
        processor=processor,
        output_prefix=folder / "x",
        seq_length=seq_length,
        workers=0,
    )
    return Shard(str(folder / "x"), columns=("source",))


def sequences(shard: Shard) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield for each sequence the number of its chat, its ids int64, and its label-aligned mask float64."""
    for pack in shard:
        bounds = pairwise(pack["seq_boundaries"].tolist())
        for (start, stop), source in zip(bounds, pack["source"].tolist(), strict=True):
            ids, mask = (pack[name][start:stop] for name in ("input_ids", "loss_mask"))
            yield source[1], torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(mask.astype(np.float64))


# ---- single chats ----


def _opened(part: dict[str, Any]) -> Any:
    stream = io.BytesIO(part[part["type"]]["bytes"])
    if part["type"] == "image":
        return Image.open(stream).convert("RGB")
    return soundfile.read(stream, dtype="float32")[0]


def inputs_alone(processor: Any, messages: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the output of transformers' processor for one chat."""
    parts = [part for message in messages for part in message["content"] if part["type"] != "text"]
    options: dict[str, Any] = {}
    if parts and parts[0]["type"] == "image":
        options["images"] = [[_opened(part) for part in parts]]
    elif parts:
        options |= {"audio": [_opened(part) for part in parts], "sampling_rate": 16_000}
    text = processor.apply_chat_template(messages, tokenize=False)
    return dict(processor(text=[text], return_tensors="pt", add_special_tokens=False, **options))


def alone(model: Any, processor: Any, rows: list[list[dict[str, Any]]], shard: Shard) -> Trained:
    """Compute loss and gradients of single chats, with the shard's masks."""
    model.zero_grad()
    total = weight = 0.0
    for number, ids, mask in sequences(shard):
        inputs = inputs_alone(processor, rows[number])
        assert inputs["input_ids"][0].tolist() == ids.tolist()
        losses = cross_entropy(model(**inputs, use_cache=False).logits[0, :-1], ids[1:], reduction="none")
        loss = (losses * mask[:-1]).sum()
        loss.backward()
        total, weight = total + loss.item(), weight + mask.sum().item()
    return trained_by(model, total, weight)


# ---- packed ----


@dataclass(frozen=True)
class Case:
    """A model, the chats that it is trained on, and the shard made from them.

    Attributes:
        kind: ``image`` or ``audio``.
        folder: folder with the processor and the configuration of the model.
        processor: the processor.
        model: the model, float64.
        rows: the chats.
        shard: the shard, with the column ``source``.
        wanted: loss and gradients of single chats.
    """

    kind: str
    folder: Path
    processor: Any
    model: Any
    rows: list[list[dict[str, Any]]]
    shard: Shard
    wanted: Trained

    @classmethod
    def of(cls, name: str, folder: Path) -> Case:
        """Return the case for one of ``FAMILIES``."""
        family = FAMILIES[name]
        processor = family.processor(folder / "processor")
        model = family.model(processor)
        model.config.save_pretrained(folder / "processor")
        rows = chats(family.kind)
        shard = shard_of(rows, folder, folder / "processor", family.seq_length)
        assert len(shard) > 1
        wanted = alone(model, processor, rows, shard)
        return cls(family.kind, folder / "processor", processor, model, rows, shard, wanted)

    def of_text(self, folder: Path) -> Case:
        """Return the same case with only the chats without images or recordings."""
        kinds = [{part["type"] for message in messages for part in message["content"]} for messages in self.rows]
        rows = [messages for messages, found in zip(self.rows, kinds, strict=True) if found == {"text"}]
        shard = shard_of(rows, folder, self.folder, 256)
        return replace(self, rows=rows, shard=shard, wanted=alone(self.model, self.processor, rows, shard))

    def inputs(self) -> MediaInputs:
        """Return the media step for this model."""
        return MediaInputs(self.folder)

    def batches(
        self, layout: Any, media: MediaStep | None = None, *, batch_size: int = 2, multiple: int = 1
    ) -> Iterator[dict[str, Any]]:
        """Yield the batches of ``as_torch``, padded to a multiple."""
        packs = as_torch(self.shard, layout, media=media or self.inputs(), pad_to_multiple_of=multiple)
        return iter(DataLoader(packs, batch_size=batch_size, collate_fn=packs.collate))

    def difference(self, batches: Iterable[dict[str, Any]]) -> float:
        """Return the difference between the model's loss and gradients for these batches and the wanted ones."""
        self.model.zero_grad()
        total = weight = 0.0
        for batch in batches:
            trained = (batch["labels"] != -100).sum().item()
            loss = self.model(**batch).loss * trained
            loss.backward()
            total, weight = total + loss.item(), weight + trained
        return difference(trained_by(self.model, total, weight), self.wanted)

    def difference_of_rows(self) -> float:
        """Return the same for batches of two rows from ``BatchAssembler``, with a loss computed here."""
        source = StoredPacks(ShardSet([self.shard.prefix]))
        assembler = BatchAssembler(source, self.shard.header.capacity + 8, media=self.inputs())
        names = set(self.processor.model_input_names) - {"input_ids", "attention_mask"}
        self.model.zero_grad()
        total = weight = 0.0
        for first in range(0, len(self.shard), 2):
            batch = assembler.assemble(range(first, min(first + 2, len(self.shard))))
            positions = batch["position_ids"]
            if "mrope_position_ids" in batch:
                positions = torch.cat([positions[None], batch["mrope_position_ids"]])
            media = {name: batch[name] for name in names if name in batch}
            outputs = self.model(input_ids=batch["tokens"], position_ids=positions, use_cache=False, **media)
            losses = cross_entropy(outputs.logits.transpose(1, 2), batch["labels"], reduction="none")
            loss = (losses * batch["loss_mask"]).sum()
            loss.backward()
            total, weight = total + loss.item(), weight + batch["loss_mask"].sum().item()
        return difference(trained_by(self.model, total, weight), self.wanted)


def trained_by(model: Any, total: float, weight: float) -> Trained:
    """Return mean loss and gradients, from a total loss of this total weight and the model's gradients of it."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradients[name] = torch.zeros(()) if parameter.grad is None else parameter.grad / weight
    return Trained(total / weight, gradients)


def difference(got: Trained, wanted: Trained) -> float:
    """Return the largest relative difference of the loss, and of each gradient compared to its largest entry."""
    differences = [abs(got.loss - wanted.loss) / abs(wanted.loss)]
    largest = {name: float(gradient.abs().max()) for name, gradient in wanted.gradients.items()}
    # The gradient for the bias of attention keys is 0, except for rounding.
    least = 1e-6 * max(largest.values())
    for name, gradient in wanted.gradients.items():
        differences.append(float((got.gradients[name] - gradient).abs().max()) / max(largest[name], least))
    return max(differences)


def as_trained(case: Case) -> dict[str, float]:
    """Return the differences between single chats and each way of training on packs."""
    return {
        "flattened": case.difference(case.batches("flattened")),
        "flattened, filled up": case.difference(case.batches("flattened", multiple=64)),
        "padded": case.difference(case.batches("padded")),
        "rows of S positions": case.difference_of_rows(),
    }


# ---- deliberate errors that the comparison must detect ----


def wrongly_trained(case: Case) -> dict[str, float]:
    """Return the differences between single chats and training with one deliberate error each."""
    step = case.inputs()
    ignored = [boundaries_ignored(case.model, batch) for batch in case.batches("flattened")]
    wrong = {
        "two items swapped": case.difference(case.batches("flattened", Swapped(step))),
        "boundaries ignored": case.difference(ignored),
    }
    if hasattr(case.model.model, "get_rope_index"):
        wrong["positions of the text only"] = case.difference(case.batches("flattened", TextPositions(step)))
    return wrong


def boundaries_ignored(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch with positions as in one long sequence; the model computes them."""
    ids = batch["input_ids"]
    positions = torch.arange(ids.shape[1])[None]
    if hasattr(model.model, "get_rope_index"):
        types = (ids == model.config.image_token_id).long()
        positions, _ = model.model.get_rope_index(ids, types, batch.get("image_grid_thw"))
    return {**batch, "position_ids": positions}


@dataclass(frozen=True)
class Swapped:
    """A media step that swaps the files of two items with equally many positions, and then calls another step."""

    step: MediaStep

    def __call__(self, batch: MediaBatch) -> dict[str, Any]:
        items = list(batch.items)
        pairs = ((first, second) for second in range(len(items)) for first in range(second))
        for first, second in pairs:
            one, other = items[first], items[second]
            if one.length == other.length and bytes(one.data) != bytes(other.data):
                items[first], items[second] = replace(one, data=other.data), replace(other, data=one.data)
                break
        return self.step(batch._replace(items=items))


@dataclass(frozen=True)
class TextPositions:
    """A media step that returns the result of another one, but with text positions inside images."""

    step: MediaStep

    def __call__(self, batch: MediaBatch) -> dict[str, Any]:
        made = self.step(batch)
        return {**made, "mrope_position_ids": batch.position_ids.expand_as(made["mrope_position_ids"])}


# ---- flash attention ----


def use_flash_attention(model: Any) -> None:
    """Make a model use a replacement for flash attention, which needs a GPU. It is written with torch's own attention.

    It takes only the padding mask. As in transformers, the sequences of a row are found by ``cu_seq_lens_q``, or else
    by the places where positions do not increase by one.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("flash_by_torch", _flash_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("flash_by_torch", flash_attention_mask)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "flash_by_torch"


def _flash_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Take states [rows, heads, positions, width] and return [rows, positions, heads, width], as in transformers."""
    rows, heads, length, _width = query.shape
    heads_of_keys = key.shape[1]
    key, value = (states.repeat_interleave(heads // heads_of_keys, 1) for states in (key, value))
    flat = [states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)]
    taken = torch.arange(rows * length)
    if attention_mask is not None:
        taken = attention_mask.bool().flatten().nonzero()[:, 0]
        bounds = [0, *attention_mask.sum(-1).cumsum(0).tolist()]
    elif cu_seq_lens_q is not None:
        bounds = cu_seq_lens_q.tolist()
    elif rows == 1 and position_ids is not None:
        bounds = [*(position_ids[0] == 0).nonzero()[:, 0].tolist(), length]
    else:
        bounds = list(range(0, rows * length + 1, length))
    attended = torch.zeros_like(flat[0])
    for begin, end in pairwise(bounds):
        inside = taken[begin:end]
        if len(inside):
            states = (each[inside].transpose(0, 1) for each in flat)
            causal = module.is_causal if is_causal is None else is_causal
            found = scaled_dot_product_attention(*states, is_causal=causal, scale=scaling)
            attended = attended.index_copy(0, inside, found.transpose(0, 1))
    return attended.unflatten(0, (rows, length)), None
