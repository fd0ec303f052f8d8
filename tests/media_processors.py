"""Build processors of transformers from their configurations, with a small tokenizer, and images for them."""

from __future__ import annotations

import io
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
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
QWEN2_AUDIO = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}{{ '<|audio_bos|><|AUDIO|><|audio_eos|>\n' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'audio') %}{{ 'PLACEHOLDER' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ENDS = ("<|im_start|>", "<|im_end|>")


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress transformers' warnings about torchvision, which is not needed."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def tokenizer_with(*special: str) -> Any:
    """Return a small byte-level tokenizer of transformers with these additional special tokens."""
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
    """Save LLaVA's processor: one size for all images or, with ``crops=False``, as many patches as each image has."""
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
    """Save LLaVA's processor with as many placeholders as each image has patches."""
    return llava(folder, crops=False)


def idefics3(folder: Path, *, longest_edge: int = 256) -> Any:
    """Save the processor of Idefics3 and SmolVLM: rows and columns of tiles, with tags and line ends between them."""
    from transformers import Idefics3ImageProcessor, Idefics3Processor

    special = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|im_start|>")
    with _quiet():
        images = Idefics3ImageProcessor(size={"longest_edge": longest_edge}, max_image_size={"longest_edge": 64})
        processor = Idefics3Processor(images, tokenizer_with(*special), image_seq_len=16, chat_template=IDEFICS)
        processor.save_pretrained(folder)
    return processor


def qwen2_audio(folder: Path) -> Any:
    """Save Qwen2-Audio's processor with Whisper's feature extractor: as many placeholders as a recording has frames."""
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    special = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|im_start|>", "<|im_end|>")
    with _quiet():
        extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=4, sampling_rate=16_000)
        processor = Qwen2AudioProcessor(extractor, tokenizer_with(*special), chat_template=QWEN2_AUDIO)
        processor.save_pretrained(folder)
    return processor


def llava_next(folder: Path) -> Any:
    """Save LLaVA-NeXT's processor, which divides an image into tiles according to its shape."""
    from transformers import LlavaNextImageProcessor, LlavaNextProcessor

    side, shapes = {"height": 56, "width": 56}, [[56, 112], [112, 56], [112, 112]]
    with _quiet():
        images = LlavaNextImageProcessor(size={"shortest_edge": 56}, crop_size=side, image_grid_pinpoints=shapes)
        processor = LlavaNextProcessor(
            images,
            tokenizer_with("<image>", *_ENDS),
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=PARTS.replace("PLACEHOLDER", "<image>\\n"),
        )
        processor.save_pretrained(folder)
    return processor


def gemma3(folder: Path) -> Any:
    """Save Gemma 3's processor. Line ends around each image merge with line ends of the text into one token."""
    from transformers import Gemma3ImageProcessor, Gemma3Processor, PreTrainedTokenizerFast

    named = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
    with _quiet():
        plain = tokenizer_with(*named.values(), *_ENDS)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=plain.backend_tokenizer,
            bos_token="<s>",
            eos_token="</s>",
            pad_token="</s>",
            additional_special_tokens=[*_ENDS],
            extra_special_tokens=named,
        )
        images = Gemma3ImageProcessor(size={"height": 56, "width": 56})
        template = PARTS.replace("PLACEHOLDER", "<start_of_image>")
        processor = Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)
        processor.save_pretrained(folder)
    return processor


def _qwen_vl(folder: Path, name: str, video: str, patch_size: int) -> Any:
    import transformers

    special = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>", *_ENDS)
    side = 2 * patch_size  # side of the square that becomes one position
    sizes = {"patch_size": patch_size, "size": {"shortest_edge": side**2, "longest_edge": 12 * side**2}}
    with _quiet():
        processor = getattr(transformers, name)(
            transformers.Qwen2VLImageProcessor(**sizes),
            tokenizer_with(*special),
            getattr(transformers, video)(patch_size=patch_size),
            chat_template=PARTS.replace("PLACEHOLDER", "<|vision_start|><|image_pad|><|vision_end|>"),
        )
        processor.save_pretrained(folder)
    return processor


def qwen2_vl(folder: Path) -> Any:
    """Save Qwen2-VL's processor, with up to 12 positions per image. It needs torchvision, like the next two."""
    return _qwen_vl(folder, "Qwen2VLProcessor", "Qwen2VLVideoProcessor", 14)


def qwen2_5_vl(folder: Path) -> Any:
    """Save Qwen2.5-VL's processor, with up to 12 positions per image."""
    return _qwen_vl(folder, "Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor", 14)


def qwen3_vl(folder: Path) -> Any:
    """Save Qwen3-VL's processor, with up to 12 positions per image."""
    return _qwen_vl(folder, "Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16)


def qwen2_5_omni(folder: Path) -> Any:
    """Save Qwen2.5-Omni's processor, which takes images and audio in one text. It needs torchvision."""
    import transformers

    kinds = ("IMAGE", "VIDEO", "AUDIO")
    ends = ("vision_bos", "vision_eos", "audio_bos", "audio_eos")
    named = {f"{kind.lower()}_token": f"<|{kind}|>" for kind in kinds} | {f"{end}_token": f"<|{end}|>" for end in ends}
    with _quiet():
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer_with(*named.values(), *_ENDS).backend_tokenizer,
            bos_token="<s>",
            eos_token="</s>",
            pad_token="</s>",
            additional_special_tokens=[*_ENDS],
            extra_special_tokens=named,
        )
        processor = transformers.Qwen2_5OmniProcessor(
            transformers.Qwen2VLImageProcessor(size={"shortest_edge": 28**2, "longest_edge": 12 * 28**2}),
            transformers.Qwen2VLVideoProcessor(),
            transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=4),
            tokenizer,
            chat_template=PARTS,
        )
        processor.save_pretrained(folder)
    return processor


def paligemma(folder: Path) -> Any:
    """Save PaliGemma's processor, which inserts a token and a line end into each text."""
    from transformers import PaliGemmaProcessor, SiglipImageProcessor

    with _quiet():
        images = SiglipImageProcessor(size={"height": 28, "width": 28})
        images.image_seq_length = 4
        template = PARTS.replace("PLACEHOLDER", "<image>")
        processor = PaliGemmaProcessor(images, tokenizer_with("<image>", *_ENDS), chat_template=template)
        processor.save_pretrained(folder)
    return processor


def audio_flamingo(folder: Path) -> Any:
    """Save Audio Flamingo 3's processor, which takes one recording per text."""
    from transformers import AudioFlamingo3Processor, WhisperFeatureExtractor

    with _quiet():
        extractor = WhisperFeatureExtractor(feature_size=16)
        template = PARTS.replace("PLACEHOLDER", "<sound>")
        processor = AudioFlamingo3Processor(extractor, tokenizer_with("<sound>", *_ENDS), chat_template=template)
        processor.save_pretrained(folder)
    return processor


# Processors that this package supports, for any row.
PROCESSORS: dict[str, Callable[[Path], Any]] = {
    "llava": llava,
    "llava of any size": llava_of_any_size,
    "idefics3": idefics3,
    "qwen2-audio": qwen2_audio,
    "llava-next": llava_next,
    "gemma3": gemma3,
}


def png(width: int, height: int, seed: int = 0) -> bytes:
    """Return an image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def wav(samples: int, rate: int = 16_000, seed: int = 0, form: str = "WAV", channels: int = 1) -> bytes:
    """Return a recording of noise."""
    sound = np.random.default_rng(seed).standard_normal((samples, channels)).astype(np.float32) / 8
    stream = io.BytesIO()
    soundfile.write(stream, sound, rate, format=form)
    return stream.getvalue()


def kind_of(name: str) -> str:
    """Return whether a processor takes images or audio."""
    return "audio" if name == "qwen2-audio" else "image"


def conversation(rng: random.Random, kind: str, files: list[bytes]) -> list[dict[str, Any]]:
    """Return a chat with some of these files at random places, and with texts that look like their tags.

    Some chats have a system turn, and some have a tool result.
    """
    texts = ("what is ", "\n\n", "here? ", " the cat", "row", "\n", "<row_1_col_1>", "<image>", "<|AUDIO|>", "é", "  ")
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": [{"type": "text", "text": "hello"}]})
    for _ in range(rng.randint(1, 3)):
        parts: list[dict[str, Any]] = []
        for _ in range(rng.randint(0, 4)):
            if rng.random() < 0.5:
                parts.append({"type": kind, kind: {"bytes": rng.choice(files)}})
            else:
                parts.append({"type": "text", "text": rng.choice(texts)})
        parts.append({"type": "text", "text": "say"})
        messages += [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": [{"type": "text", "text": rng.choice(["hi", "\nthe cat"])}]},
        ]
        if rng.random() < 0.2:
            messages += [
                {"role": "tool", "content": [{"type": "text", "text": "row\n"}]},
                {"role": "assistant", "content": [{"type": "text", "text": " mat"}]},
            ]
    return messages
