"""Ids and masks equal transformers' ``apply_chat_template(return_assistant_tokens_mask=True)``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tokenizer_zoo as zoo
from tokenizers import Tokenizer as Library

from megatron_sft_idx.chat.tokenizer import load_tokenizer
from megatron_sft_idx.chat.types import Encoded, Rendered, Span

# Older versions leave out the last tokens of a span's last character.
transformers = pytest.importorskip("transformers", minversion="5.24")
from transformers.utils.chat_template_utils import render_jinja_template  # noqa: E402

HEAD = "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
TAIL = "{% endif %}{% endfor %}"
TEMPLATES = {
    "end of turn inside": HEAD
    + "<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    + "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    + TAIL,
    "newline inside": HEAD
    + "<|im_start|>assistant{% generation %}\n{{ m.content }}<|im_end|>\n{% endgeneration %}"
    + "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    + TAIL,
    "words only": HEAD
    + "<|im_start|>assistant\n<think>{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n"
    + "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    + TAIL,
    "no control tokens": HEAD
    + "ASSISTANT:{% generation %} {{ m.content }}{% endgeneration %}{{ eos_token }}"
    + "{% else %}{{ m.role | upper }}: {{ m.content }} "
    + TAIL,
}


def chats(seed: int, count: int) -> list[list[dict[str, str]]]:
    rng = random.Random(seed)
    result = []
    for _ in range(count):
        chat = [{"role": "system", "content": zoo.random_text(rng, 5)}] if rng.random() < 0.3 else []
        for _ in range(rng.randrange(1, 5)):
            chat.append({"role": "user", "content": zoo.random_text(rng, rng.randrange(1, 30))})
            end = rng.choice(["", "😀", "👨‍👩‍👧", "好", ".", "e\u0301", " ", "\n"])
            chat.append({"role": "assistant", "content": zoo.random_text(rng, rng.randrange(0, 40)) + end})
        result.append(chat)
    return result


def both(folder: Path, kind: str, template: str, conversations: list[Any], backend: str) -> tuple[Any, Any, Any]:
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    out = theirs.apply_chat_template(
        conversations, chat_template=template, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
    )
    ours = load_tokenizer(folder, backend=backend)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    rendered, ranges = render_jinja_template(
        conversations=conversations, chat_template=template, return_assistant_tokens_mask=True, **ours.special_tokens
    )
    rows = [Rendered(text, [Span(*span) for span in spans]) for text, spans in zip(rendered, ranges, strict=True)]
    return out, rows, ours.encode(rows)


def check_all(out: Any, rows: list[Rendered], encoded: list[Encoded]) -> None:
    """Check that ids and masks of all rows equal transformers'."""
    for i, ours in enumerate(encoded):
        assert ours.input_ids.tolist() == out["input_ids"][i], rows[i]
        assert ours.loss_mask.tolist() == out["assistant_masks"][i], rows[i]
    trained = sum(int(e.loss_mask.sum()) for e in encoded)
    assert 0 < trained < sum(len(e.input_ids) for e in encoded)


@pytest.mark.sample(7)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", zoo.KINDS)
def test_every_kind_agrees(tmp_path: Path, kind: str, template: str) -> None:
    zoo.write_folder(tmp_path, kind)
    check_all(*both(tmp_path, kind, TEMPLATES[template], chats(1, 120), "auto"))


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_without_gigatoken_nothing_changes(tmp_path: Path, kind: str) -> None:
    zoo.write_folder(tmp_path, kind)
    check_all(*both(tmp_path, kind, TEMPLATES["end of turn inside"], chats(3, 200), "tokenizers"))


# Characters of several bytes and tokens, letters that a normalizer joins or splits, and halves of both.
EDGES = [
    *("\U0001f44d\U0001f3fd", "\U0001f44d", "\U0001f3fd", "e\u0301", "e", "\u0301\u0323", "\u00e9"),
    *("\u4f60\u597d", "\U00020000", "\U0001f468\u200d\U0001f469", "\u200d", "\u0e01\u0e34", "\u1112\u1161\u11ab"),
    *("plain", " ", "\n", "\u3000", "a b", "<|im_end|>"),
]


def random_edges(seed: int, count: int, pieces: list[str]) -> list[Any]:
    rng = random.Random(seed)
    return [
        [{"role": "x", "content": "".join(rng.choices(pieces, k=rng.randint(1, 3)))} for _ in range(rng.randint(3, 8))]
        for _ in range(count)
    ]


TWO_OF_THREE = (
    "{% for m in messages %}{% if loop.index is divisibleby 3 %}{{ m.content }}{% else %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
)


@pytest.mark.sample(8)
@pytest.mark.parametrize("backend", ["auto", "tokenizers"])
@pytest.mark.parametrize("kind", zoo.KINDS)
def test_every_token_with_a_part_of_a_character_of_a_span_is_trained(tmp_path: Path, kind: str, backend: str) -> None:
    """This is tested at both edges of spans: next to each other, inside a word, inside a letter with two marks."""
    zoo.write_folder(tmp_path, kind)
    check_all(*both(tmp_path, kind, TWO_OF_THREE, random_edges(0, 150, EDGES), backend))


@pytest.mark.parametrize("kind", ["gpt2", "llama3"])
def test_trimmed_offsets_leave_out_only_spaces(tmp_path: Path, kind: str) -> None:
    """Some tokenizers report offsets without spaces; transformers then leaves out spaces at a span's edges."""
    trimmed = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    zoo.write_folder(tmp_path, kind, post_processor=trimmed)
    check_all(*both(tmp_path, kind, TEMPLATES["end of turn inside"], chats(4, 200), "auto"))
    out, rows, encoded = both(tmp_path, kind, TWO_OF_THREE, random_edges(1, 300, [*EDGES, "  ", " brown"]), "auto")
    whole = Library.from_str((zoo.write_folder(tmp_path / "whole", kind) / "tokenizer.json").read_text("utf-8"))
    others = []
    for row, ours, theirs in zip(rows, encoded, out["assistant_masks"], strict=True):
        for (begin, end), mine, other in zip(
            whole.encode(row.text, add_special_tokens=False).offsets, ours.loss_mask.tolist(), theirs, strict=True
        ):
            if mine != other:
                held = [row.text[max(begin, span.start) : min(end, span.stop)] for span in row.spans]
                others.append((mine, "".join(held).strip()))
    assert set(others) == {(1.0, "")}
