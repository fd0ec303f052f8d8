"""The bundled chats and tokenizer have the features of real ones, and work in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).parents[2] / "tools" / "demo"


def flattened(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    return message | {"content": content}


@pytest.fixture(scope="module")
def chats() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DEMO / "chats.jsonl").read_bytes().splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(DEMO / "tokenizer"), local_files_only=True)


def test_chats_hold_what_real_ones_hold(chats: list[dict[str, Any]]) -> None:
    messages = [message for chat in chats for message in chat["messages"]]
    assert len(chats) > 300
    assert {message["role"] for message in messages} == {"system", "user", "assistant", "tool"}
    assert sum("reasoning_content" in message for message in messages) > 50
    assert sum("tool_calls" in message for message in messages) > 50
    assert sum(isinstance(message["content"], list) for message in messages) > 10
    assert sum(message.get("train") is False for message in messages) > 1
    assert sum(message.get("weight") == 0 for message in messages) > 1
    assert any("<|im_end|>" in str(message["content"]) for message in messages)
    assert any("\u0301" in str(message["content"]) for message in messages)


def test_both_templates_render_the_same_text(chats: list[dict[str, Any]], tokenizer: Any) -> None:
    marked = (DEMO / "chat_template_generation.jinja").read_text(encoding="utf-8")
    assert "generation %}" in marked
    assert "generation %}" not in tokenizer.chat_template
    for chat in chats:
        messages = [flattened(message) for message in chat["messages"]]
        plain = tokenizer.apply_chat_template(messages, chat.get("tools"), tokenize=False)
        assert plain == tokenizer.apply_chat_template(messages, chat.get("tools"), chat_template=marked, tokenize=False)
        assert plain.count("<|im_start|>assistant\n") == sum(m["role"] == "assistant" for m in messages)


def test_every_chat_survives_the_tokenizer_and_fits_the_demo(chats: list[dict[str, Any]], tokenizer: Any) -> None:
    for chat in chats:
        messages = [flattened(message) for message in chat["messages"]]
        text = tokenizer.apply_chat_template(messages, chat.get("tools"), tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert len(ids) <= 1024


def test_generation_markers_hold_what_the_assistant_writes(chats: list[dict[str, Any]], tokenizer: Any) -> None:
    marked = (DEMO / "chat_template_generation.jinja").read_text(encoding="utf-8")
    for chat in chats:
        messages = [flattened(message) for message in chat["messages"]]
        encoded = tokenizer.apply_chat_template(
            messages, chat.get("tools"), chat_template=marked, return_assistant_tokens_mask=True, return_dict=True
        )
        pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        learned = tokenizer.decode([token for token, mask in pairs if mask])
        spoken = [m for m in messages if m["role"] == "assistant"]
        assert learned.endswith("<|im_end|>")
        assert learned.count("<tool_call>") == sum(len(m.get("tool_calls", [])) for m in spoken)
        position = 0
        for message in spoken:
            position = learned.index(message["content"] or "<tool_call>", position)
