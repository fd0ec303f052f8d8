"""Ids and masks equal transformers' ``apply_chat_template(return_assistant_tokens_mask=True)``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tokenizer_zoo as zoo

from megatron_sft_idx.chat.tokenizer import load_tokenizer
from megatron_sft_idx.chat.types import Encoded, Rendered, Span

transformers = pytest.importorskip("transformers")
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


def their_lookup_fails(encoding: Any, row: Rendered) -> bool:
    """Where it finds no token for an edge, or token 0 for an end, transformers trains or drops the rest."""
    edges = [(encoding.char_to_token(s.start), encoding.char_to_token(s.stop - 1)) for s in row.spans]
    return any(start is None or not end for start, end in edges)


def agreeing_rows(out: Any, rows: list[Rendered], encoded: list[Encoded]) -> int:
    """Checks all ids, and the masks of the rows where their look-up works; says how many those were."""
    compared = 0
    for i, ours in enumerate(encoded):
        assert ours.input_ids.tolist() == out["input_ids"][i], rows[i]
        if not their_lookup_fails(out.encodings[i], rows[i]):
            assert ours.loss_mask.tolist() == out["assistant_masks"][i], rows[i]
            compared += 1
    trained = sum(int(e.loss_mask.sum()) for e in encoded)
    assert 0 < trained < sum(len(e.input_ids) for e in encoded)
    return compared


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", zoo.BYTE_LEVEL)
def test_byte_level_tokenizers_agree(tmp_path: Path, kind: str, template: str) -> None:
    zoo.write_folder(tmp_path, kind)
    out, rows, encoded = both(tmp_path, kind, TEMPLATES[template], chats(1, 120), "auto")
    # NFC leaves the second part of a decomposed letter without a token, and such a letter may end a span.
    expected = 60 if kind in ("qwen2", "qwen3.5") and template in ("words only", "no control tokens") else 120
    assert agreeing_rows(out, rows, encoded) >= expected


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", zoo.OTHERS)
def test_other_tokenizers_agree(tmp_path: Path, kind: str, template: str) -> None:
    zoo.write_folder(tmp_path, kind)
    out, rows, encoded = both(tmp_path, kind, TEMPLATES[template], chats(2, 120), "auto")
    # WordPiece drops white space, and two of the templates begin or end every span on it.
    spaced = kind == "wordpiece" and template in ("newline inside", "no control tokens")
    assert agreeing_rows(out, rows, encoded) >= (0 if spaced else 20 if kind == "wordpiece" else 120)


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_without_gigatoken_nothing_changes(tmp_path: Path, kind: str) -> None:
    zoo.write_folder(tmp_path, kind)
    out, rows, encoded = both(tmp_path, kind, TEMPLATES["end of turn inside"], chats(3, 200), "tokenizers")
    assert agreeing_rows(out, rows, encoded) == 200


def test_trimmed_offsets_agree(tmp_path: Path) -> None:
    trimmed = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    zoo.write_folder(tmp_path, "gpt2", post_processor=trimmed)
    out, rows, encoded = both(tmp_path, "gpt2", TEMPLATES["end of turn inside"], chats(4, 200), "auto")
    assert agreeing_rows(out, rows, encoded) >= 100


@pytest.mark.parametrize(
    ("text", "span", "theirs", "ours"),
    [
        ("the<|im_end|>you", (0, 3), "the<|im_end|>you", "the"),
        ("<s>a e\u0301<|im_end|>you", (3, 7), "a \u00e9<|im_end|>you", "a \u00e9"),
    ],
)
def test_where_their_lookup_fails_ours_stays_inside_the_span(
    tmp_path: Path, text: str, span: tuple[int, int], theirs: str, ours: str
) -> None:
    """They train everything after a span that ends in the first token, or on a character without a token."""
    zoo.write_folder(tmp_path, "qwen2")
    tokenizer = load_tokenizer(tmp_path)
    encoded = tokenizer.encode([Rendered(text, [Span(*span)])])[0]
    trained = tokenizer.decode(encoded.input_ids[encoded.loss_mask > 0])
    assert trained == ours
    template = text[: span[0]] + "{% generation %}" + text[slice(*span)] + "{% endgeneration %}" + text[span[1] :]
    out = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path).apply_chat_template(
        [{"role": "user", "content": "x"}], chat_template=template, return_assistant_tokens_mask=True, return_dict=True
    )
    mask = out["assistant_masks"]
    assert out["input_ids"] == encoded.input_ids.tolist()
    assert tokenizer.decode([i for i, m in zip(out["input_ids"], mask, strict=True) if m]) == theirs
