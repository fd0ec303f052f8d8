"""A tokenizer loaded by transformers can replace its folder, as long as it is unchanged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chats import TOKENIZER, files_of

from megatron_sft_idx import FormatError, preprocess
from megatron_sft_idx.chat.tokenizer.loaded import folder_of_loaded

transformers = pytest.importorskip("transformers")

ROWS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}]} for n in range(9)
]


def loaded(**options: Any) -> Any:
    return transformers.AutoTokenizer.from_pretrained(TOKENIZER, **options)


def run(tokenizer: Any, prefix: Path) -> dict[str, bytes]:
    preprocess(ROWS, tokenizer=tokenizer, output_prefix=prefix, seq_length=64, workers=0, log_interval=0)
    return files_of(prefix)


def test_a_loaded_tokenizer_makes_the_bytes_of_its_folder(tmp_path: Path) -> None:
    tokenizer = loaded()
    # A call stores its truncation and padding in the tokenizer; this does not change our ids.
    tokenizer(["a", "b c d"], truncation=True, max_length=2, padding="max_length")
    assert folder_of_loaded(tokenizer) == str(TOKENIZER)
    assert run(tokenizer, tmp_path / "a") == run(TOKENIZER, tmp_path / "b")


def lower(tokenizer: Any) -> None:
    from tokenizers import normalizers

    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()


def drop_template(tokenizer: Any) -> None:
    tokenizer.chat_template = None


def other_template(tokenizer: Any) -> None:
    tokenizer.chat_template += " "


def other_end(tokenizer: Any) -> None:
    tokenizer.eos_token = tokenizer.pad_token


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda tokenizer: tokenizer.add_tokens(["zq"]), "backend"),
        (lambda tokenizer: tokenizer.add_special_tokens({"additional_special_tokens": ["<q>"]}), "backend and special"),
        (lower, "backend"),
        (other_end, "special tokens"),
        (other_template, "chat template"),
        (drop_template, "chat template"),
    ],
)
def test_one_that_was_changed_is_never_its_folder(change: Callable[[Any], None], part: str, tmp_path: Path) -> None:
    tokenizer = loaded()
    change(tokenizer)
    with pytest.raises(
        FormatError, match=rf"^tokenizer: differs from {TOKENIZER} in its {part}.*save_pretrained\(FOLD"
    ):
        run(tokenizer, tmp_path / "x")
    assert not list(tmp_path.iterdir())
    # The remedy of the message.
    tokenizer.save_pretrained(tmp_path / "saved")
    if tokenizer.chat_template:
        run(tmp_path / "saved", tmp_path / "x")
        assert run(transformers.AutoTokenizer.from_pretrained(tmp_path / "saved"), tmp_path / "y") == files_of(
            tmp_path / "x"
        )


def test_one_that_was_loaded_with_other_options_is_refused() -> None:
    with pytest.raises(FormatError, match=r"in its special tokens, .* loaded with other options"):
        folder_of_loaded(loaded(eos_token="<|endoftext|>"))


def split_in_calls(tokenizer: Any) -> None:
    tokenizer.split_special_tokens = True


def split_in_the_backend(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.encode_special_tokens = True


@pytest.mark.parametrize("change", [None, split_in_calls, split_in_the_backend])
def test_one_that_splits_special_tokens_is_refused(change: Callable[[Any], None] | None, tmp_path: Path) -> None:
    tokenizer = loaded(split_special_tokens=change is None)
    if change is not None:
        change(tokenizer)
    with pytest.raises(
        FormatError, match=r"^tokenizer: it splits special tokens, which preprocess does not support; set its.*$"
    ):
        run(tokenizer, tmp_path / "x")
    # A folder saved from it has the same setting, unless only the backend has it.
    tokenizer.save_pretrained(saved := tmp_path / "saved")
    if change is None:
        for given in (saved, str(saved), transformers.AutoTokenizer.from_pretrained(saved)):
            with pytest.raises(FormatError, match=r"split_special_tokens is True, .*; set it to false$|splits special"):
                run(given, tmp_path / "x")
    # The remedy of the message.
    tokenizer.split_special_tokens = tokenizer.backend_tokenizer.encode_special_tokens = False
    assert run(tokenizer, tmp_path / "x") == run(TOKENIZER, tmp_path / "y")


def other_chat(*_given: Any, **_options: Any) -> list[int]:
    return [1, 2, 3]


def on_the_object(tokenizer: Any, name: str) -> Any:
    setattr(tokenizer, name, other_chat)
    return tokenizer


def in_a_subclass(tokenizer: Any, name: str) -> Any:
    kind = type("Mine", (type(tokenizer),), {name: other_chat, "__module__": __name__})
    return kind.from_pretrained(TOKENIZER)


def below_a_subclass(tokenizer: Any, name: str) -> Any:
    kind = type("Lower", (type(in_a_subclass(tokenizer, name)),), {"__module__": __name__})
    return kind.from_pretrained(TOKENIZER)


@pytest.mark.parametrize("name", ["apply_chat_template", "_encode_plus", "tokenize"])
@pytest.mark.parametrize("override", [on_the_object, in_a_subclass, below_a_subclass])
def test_one_with_a_method_that_is_not_called_is_refused(
    override: Callable[[Any, str], Any], name: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match=rf"^tokenizer: it overrides {name} of transformers, .*pass {TOKENIZER} .*$"):
        run(override(loaded(), name), tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_method_that_was_replaced_in_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = loaded()
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", other_chat)
    with pytest.raises(FormatError, match="it overrides apply_chat_template of transformers"):
        folder_of_loaded(tokenizer)


def test_a_subclass_that_overrides_no_such_method_is_its_folder(tmp_path: Path) -> None:
    kind = type("Mine", (type(loaded()),), {"shown": other_chat, "__module__": __name__})
    assert run(kind.from_pretrained(TOKENIZER), tmp_path / "a") == run(TOKENIZER, tmp_path / "b")


@pytest.mark.parametrize("name", ["owner/nowhere", "no such folder", ""])
def test_one_without_a_folder_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer = loaded()
    tokenizer.name_or_path = name
    with pytest.raises(FormatError, match=rf"from '{name}', which is not a local folder; call its save_pretr"):
        folder_of_loaded(tokenizer)


def test_a_folder_that_is_gone_or_broken_is_refused(tmp_path: Path) -> None:
    shutil.copytree(TOKENIZER, folder := tmp_path / "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(FormatError, match=r"cannot be compared with .*save_pretrained|differs from .*save_pretrained"):
        folder_of_loaded(tokenizer)
    shutil.rmtree(folder)
    with pytest.raises(FormatError, match="which is not a local folder"):
        folder_of_loaded(tokenizer)


def test_what_is_no_tokenizer_is_not_loaded_again(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=1)
    with pytest.raises(FormatError, match=r"this LlamaForCausalLM has no backend_tokenizer.*; pass its folder"):
        run(transformers.LlamaForCausalLM(config), tmp_path / "x")


def test_one_from_the_cache_of_the_hub_is_found_offline(tmp_path: Path) -> None:
    repository = tmp_path / "hub/models--owner--name"
    shutil.copytree(TOKENIZER, repository / "snapshots/0123456789")
    (repository / "snapshots/0123456789/config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0123456789")
    script = (
        "import sys; from transformers import AutoTokenizer; from megatron_sft_idx import preprocess\n"
        "tokenizer = AutoTokenizer.from_pretrained('owner/name')\n"
        "row = {'messages': [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]}\n"
        "preprocess([row], tokenizer=tokenizer, output_prefix=sys.argv[1], seq_length=64, workers=0)\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, tmp_path / "x"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.seq.idx").exists()
