"""Mistral's own files and templates, compared with mistral-common."""

from __future__ import annotations

import json
import re
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizer_probe import probe

from megatron_sft_idx.chat.tokenizer import Tokenizer, load_tokenizer
from megatron_sft_idx.chat.types import InputRow, Rendered
from megatron_sft_idx.tokenize import EncodingOptions, RowEncoder

mistral_common = pytest.importorskip("mistral_common")
pytest.importorskip("sentencepiece")
from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template  # noqa: E402
from mistral_common.protocol.instruct.request import ChatCompletionRequest  # noqa: E402
from mistral_common.protocol.instruct.validator import ValidationMode  # noqa: E402
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer  # noqa: E402

DATA = Path(mistral_common.__file__).parent / "data"
FAST = ["tekken_240911.json", "tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"]
SLOW = [
    "tekken_240718.json",
    "mistral_instruct_tokenizer_240216.model.v2",
    "mistral_instruct_tokenizer_241114.model.v7",
]
FILES = [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@lru_cache
def theirs(name: str) -> MistralTokenizer:
    return MistralTokenizer.from_file(str(DATA / name), mode=ValidationMode.finetuning)


@lru_cache
def ours(name: str) -> Tokenizer:
    return load_tokenizer(DATA / name)


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Any:
    """Drop the tokenizers after the tests; each holds 100 MB."""
    yield
    theirs.cache_clear()
    ours.cache_clear()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("count", [100, pytest.param(100_000, marks=pytest.mark.slow)])
def test_ids_are_those_of_mistral_common(name: str, count: int) -> None:
    library = theirs(name).instruct_tokenizer.tokenizer
    tokenizer = ours(name)
    assert tokenizer.vocab_size == library.n_words
    assert (tokenizer.eos_id, tokenizer.special_tokens["bos_token"]) == (library.eos_id, "<s>")
    ids = {text: library.get_special_token(text) for text in tokenizer.control_tokens}
    assert {*ids.values()} | {tokenizer._model.token_id("<unk>")} == {*library.special_ids, library.unk_id}
    control = re.compile("|".join(map(re.escape, sorted(ids, key=len, reverse=True))))
    texts = list(probe(count, seed=3))
    for start in range(0, count, 250):
        some = texts[start : start + 250]
        for text, found in zip(some, tokenizer.encode([Rendered(text, []) for text in some]), strict=True):
            if not control.search(text):
                assert found.input_ids.tolist() == library.encode(text, bos=False, eos=False), text


TOOL = {"name": "get_weather", "description": "Weather now.", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "call12345", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
CHATS: dict[str, dict[str, Any]] = {
    "turns": {
        "messages": [
            {"role": "user", "content": "Hi, 你好!"},
            {"role": "assistant", "content": "Hello  there.\n\n😀"},
            {"role": "user", "content": "  1234 apples?"},
            {"role": "assistant", "content": "Yes."},
        ]
    },
    "tools": {
        "tools": [{"type": "function", "function": TOOL}],
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "get_weather", "tool_call_id": "call12345", "content": "22"},
            {"role": "assistant", "content": "It is 22."},
        ],
    },
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("chat", CHATS)
def test_a_rendered_chat_has_the_ids_of_their_own_encoding(name: str, chat: str) -> None:
    if chat == "tools" and name.endswith("v1"):
        return  # version 1 has no tools
    template = ours(name).generated_template
    assert template == convert_tokenizer_to_chat_template(DATA / name)
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False)
    text = environment.from_string(template or "").render(**CHATS[chat], **ours(name).special_tokens)
    found = ours(name).encode([Rendered(text, [])])[0].input_ids.tolist()
    assert found == theirs(name).encode_chat_completion(ChatCompletionRequest.model_validate(CHATS[chat])).tokens


def test_a_template_is_generated_once_a_run_and_not_where_one_is_given(tmp_path: Path) -> None:
    path = str(DATA / "tokenizer.model.v1")
    encoder = RowEncoder(EncodingOptions(path))
    assert encoder.options.chat_template == ours("tokenizer.model.v1").generated_template
    assert (encoder.options.template_name, encoder.describe()) == (path, RowEncoder(encoder.options).describe())
    assert RowEncoder(EncodingOptions(path, chat_template="{{ bos_token }}")).options.chat_template == "{{ bos_token }}"
    (tmp_path / "tokenizer.model").write_bytes((DATA / "tokenizer.model.v1").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("x")
    assert load_tokenizer(tmp_path).generated_template is None
    assert load_tokenizer(tmp_path / "tokenizer.model").generated_template is None, "may be anybody's"


def test_without_mistral_common_a_template_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [module for module in sys.modules if module.startswith("mistral_common")]:
        monkeypatch.setitem(sys.modules, module, None)
    encoder = RowEncoder(EncodingOptions(str(DATA / "tekken_240911.json")))
    assert encoder.template is None
    with pytest.raises(ValueError, match=r"no chat template; pass one with --chat-template FILE"):
        encoder._read(
            InputRow(1, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}),
            encoder.media_of("rows.jsonl"),
        )
