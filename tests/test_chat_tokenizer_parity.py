"""Ids and masks equal transformers' ``apply_chat_template(return_assistant_tokens_mask=True)``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tokenizer_zoo as zoo
from packaging.version import Version

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


EDGES = ["\U0001f44d\U0001f3fd", "e\u0301", "\u4f60\u597d", "\U0001f468\u200d\U0001f469", "plain", " ", "\n", "\u00e9"]


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "llama3"])
def test_masks_of_markers_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """Every token that holds a part of a character of a span is trained, at both edges of the span."""
    zoo.write_folder(tmp_path, kind)
    tokenizer = load_tokenizer(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    words = random.Random(0)
    for _ in range(60):
        before, inside, behind = (
            "".join(words.choices([*EDGES, "a b", "<|im_end|>"], k=words.randint(1, 3))) for _ in "123"
        )
        rendered = Rendered(before + inside + behind, [Span(len(before), len(before + inside))])
        encoded = tokenizer.encode([rendered])[0]
        template = "{{ messages[0].content }}{% generation %}{{ messages[1].content }}{% endgeneration %}"
        template += "{{ messages[2].content }}"
        out = theirs.apply_chat_template(
            [{"role": "user", "content": text} for text in (before, inside, behind)],
            chat_template=template, return_assistant_tokens_mask=True, return_dict=True,
        )  # fmt: skip
        assert out["input_ids"] == encoded.input_ids.tolist()
        spans = [(len(before), len(before + inside))]
        offsets = theirs(rendered.text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        held = [int(any(begin < stop and end > start for start, stop in spans)) for begin, end in offsets]
        assert (encoded.loss_mask > 0).astype(int).tolist() == held
        if Version(transformers.__version__) >= Version("5.24"):  # older ones cut a span's last character apart
            assert out["assistant_masks"] == held
