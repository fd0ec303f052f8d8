"""Processors of transformers, built from their configuration with a small tokenizer; and images for them."""

from __future__ import annotations

import io
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_WORDS = "hello world the cat sat on the mat\n\nUser: Assistant: what is here? row col"

LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
IDEFICS = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers says of torchvision, which is not needed."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def tokenizer_with(*special: str) -> Any:
    """A small byte-level tokenizer of transformers with these special tokens beside its own."""
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    model.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<s>", "</s>", *special], initial_alphabet=alphabet)
    model.train_from_iterator([_WORDS] * 10, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        additional_special_tokens=[*special],
    )


def llava(folder: Path, *, crops: bool = True) -> Any:
    """LLaVA's: one size for all images, or with ``crops=False`` as many patches as each image has."""
    from transformers import CLIPImageProcessor, LlavaProcessor

    sizes: dict[str, Any] = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    with _quiet():
        images = CLIPImageProcessor(**sizes) if crops else CLIPImageProcessor(do_resize=False, do_center_crop=False)
        strategy, additional = ("default", 1) if crops else ("full", 0)
        processor = LlavaProcessor(
            images,
            tokenizer_with("<image>"),
            patch_size=14,
            vision_feature_select_strategy=strategy,
            num_additional_image_tokens=additional,
            chat_template=LLAVA,
        )
        processor.save_pretrained(folder)
    return processor


def llava_of_any_size(folder: Path) -> Any:
    """LLaVA's, with as many placeholders as each image has patches."""
    return llava(folder, crops=False)


def idefics3(folder: Path) -> Any:
    """That of Idefics3 and SmolVLM: rows and columns of tiles, with tags and line ends between them."""
    from transformers import Idefics3ImageProcessor, Idefics3Processor

    special = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|im_start|>")
    with _quiet():
        images = Idefics3ImageProcessor(size={"longest_edge": 256}, max_image_size={"longest_edge": 64})
        processor = Idefics3Processor(images, tokenizer_with(*special), image_seq_len=16, chat_template=IDEFICS)
        processor.save_pretrained(folder)
    return processor


PROCESSORS: dict[str, Callable[[Path], Any]] = {
    "llava": llava,
    "llava of any size": llava_of_any_size,
    "idefics3": idefics3,
}


def png(width: int, height: int, seed: int = 0) -> bytes:
    """An image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def conversation(rng: random.Random, images: list[bytes]) -> list[dict[str, Any]]:
    """A chat whose turns of the user have some of these images, at any place, and texts that look like their tags."""
    texts = ("what is ", "\n\n", "here? ", " the cat", "row", "\n", "<row_1_col_1>", "é", "  ")
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": [{"type": "text", "text": "hello"}]})
    for _ in range(rng.randint(1, 3)):
        parts: list[dict[str, Any]] = []
        for _ in range(rng.randint(0, 4)):
            if rng.random() < 0.5:
                parts.append({"type": "image", "image": {"bytes": rng.choice(images)}})
            else:
                parts.append({"type": "text", "text": rng.choice(texts)})
        parts.append({"type": "text", "text": "say"})
        messages += [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": rng.choice(["hi", "\nthe cat"])},
        ]
    return messages
