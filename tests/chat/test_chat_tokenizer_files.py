"""Loading tokenizers: settings in a folder, and errors for broken folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizer_zoo as zoo

from megatron_sft_idx.chat.tokenizer import fast_engine, load_tokenizer
from megatron_sft_idx.chat.types import Rendered
from megatron_sft_idx.errors import FormatError

transformers = pytest.importorskip("transformers")


def edit(**changes: Any) -> Callable[[Path], None]:
    """Return a function that changes keys of a folder's tokenizer.json."""

    def make(folder: Path) -> None:
        zoo.write_folder(folder, "gpt2", **changes)

    return make


def config(**changes: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        zoo.write_folder(folder, "gpt2", changes)

    return make


def file(name: str, content: str | bytes) -> Callable[[Path], None]:
    """Return a function that replaces one file of a valid folder."""

    def make(folder: Path) -> None:
        zoo.write_folder(folder, "gpt2")
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return make


def only(*names: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir()
        for name in names:
            (folder / name).write_text("{}")

    return make


def model(**changes: Any) -> dict[str, Any]:
    return {**zoo.spec_of("gpt2")["model"], **changes}


TOKEN = {"id": 0, "content": "<x>", "special": True}
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty folder": (only(), "contains no tokenizer.json, tekken.json, SentencePiece model or tiktoken file"),
    "vocab and merges only": (
        only("vocab.json", "merges.txt"),
        r"vocab.json: a tokenizer without tokenizer.json; convert it once with transformers: python -c .*AutoTokenizer",
    ),
    "empty file": (file("tokenizer.json", ""), "not JSON"),
    "cut short": (file("tokenizer.json", zoo.train("gpt2")[:5000]), "not JSON"),
    "not UTF-8": (file("tokenizer.json", b'{"model": "\xff"}'), "not JSON"),
    "a list": (file("tokenizer.json", "[]"), "expected a JSON object, found list"),
    "another JSON file": (file("tokenizer.json", '{"hidden_size": 8}'), r"not a tokenizer: .*keys: hidden_size"),
    "LFS pointer": (file("tokenizer.json", LFS), "Git LFS pointer.*git lfs pull"),
    "model without vocab": (edit(model={"type": "BPE"}), "not a tokenizer: it has no model with a vocab"),
    "empty vocab": (edit(model=model(vocab={}, merges=[])), "the vocabulary is empty"),
    "unknown model": (edit(model=model(type="Quantum")), "the tokenizers library cannot load it"),
    "merges of unknown tokens": (edit(model=model(merges=["zq zq"])), "cannot load it"),
    "unknown pre-tokenizer": (edit(pre_tokenizer={"type": "Nope"}), "cannot load it"),
    "bad regex": (
        edit(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}),
        "cannot load it",
    ),
    "dropout": (edit(model=model(dropout=0.1)), "model.dropout is 0.1.*set it to null"),
    "added tokens not a list": (edit(added_tokens={"a": 1}), "added_tokens must be a list"),
    "added token without id": (edit(added_tokens=[{"content": "<x>"}]), "added_tokens must be a list"),
    "added token without flags": (edit(added_tokens=[TOKEN]), "cannot load it"),
    "config not JSON": (file("tokenizer_config.json", "{"), "tokenizer_config.json: not JSON"),
    "config a string": (file("tokenizer_config.json", '"x"'), "expected a JSON object, found str"),
    "eos a number": (config(eos_token=7), "eos_token must be a string or an object with content, found 7"),
    "decoder a list": (config(added_tokens_decoder=[1]), "added_tokens_decoder must be an object"),
    "decoder id": (config(added_tokens_decoder={"x": TOKEN}), "added_tokens_decoder must be an object"),
    "decoder token": (config(added_tokens_decoder={"7": 7}), r"added_tokens_decoder\[7\] must be a string"),
    "decoder flag": (config(added_tokens_decoder={"7": {**TOKEN, "lstrip": "no"}}), "lstrip must be true or false"),
    "extra tokens": (config(extra_special_tokens="<x>"), "extra_special_tokens must be a list"),
    "extra token": (config(extra_special_tokens=[["<x>"]]), "extra_special_tokens must be a string"),
    "map not JSON": (file("special_tokens_map.json", "no"), "special_tokens_map.json: not JSON"),
    "added tokens file": (file("added_tokens.json", '{"<x>": "7"}'), "the id of '<x>' must be a whole number"),
    "template a number": (config(chat_template=3), "chat_template must be a string or a list"),
    "templates unnamed": (config(chat_template=[{"template": "x"}]), "chat_template must be a string or a list"),
    "template file empty": (file("chat_template.json", "{}"), "has no chat_template"),
    "template not UTF-8": (file("chat_template.jinja", b"\xff"), "chat_template.jinja: not UTF-8 at byte 0"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tokenizers_are_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    make, message = BROKEN[name]
    make(tmp_path / "tok")
    with pytest.raises(FormatError, match=message) as caught:
        load_tokenizer(tmp_path / "tok")
    assert str(caught.value).startswith(str(tmp_path))


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "gpt2"])
def test_hub_names_are_not_downloaded(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FormatError, match=f"{name}: not a local folder; .*download its tokenizer first: hf download"):
        load_tokenizer(name)


def test_other_wrong_paths_and_options(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such file or folder"):
        load_tokenizer(tmp_path / "gone" / "tokenizer.json")
    (tmp_path / "vocab.txt").write_bytes(b"the\n")
    with pytest.raises(FormatError, match=r"without tokenizer\.json; convert it once"):
        load_tokenizer(tmp_path / "vocab.txt")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    zoo.write_folder(tmp_path, "gpt2")
    (tmp_path / "special_tokens_map.json").mkdir()
    with pytest.raises(FormatError, match=r"special_tokens_map.json: cannot be read: Is a directory"):
        load_tokenizer(tmp_path)


def test_truncation_padding_and_post_processors_are_not_applied(tmp_path: Path) -> None:
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {"direction": "Right", "pad_id": 0, "pad_token": "<unk>", "pad_type_id": 0, "strategy": {"Fixed": 64}}
    plain = load_tokenizer(zoo.write_folder(tmp_path / "a", "gpt2"))
    folder = zoo.write_folder(
        tmp_path / "b",
        "gpt2",
        post_processor=template,
        truncation=truncation,
        padding={**padding, "pad_to_multiple_of": None},
    )
    rows = [Rendered("the quick brown fox jumps over", []), Rendered("the", [])]
    for backend in ("tokenizers", "auto"):
        tokenizer = load_tokenizer(folder, backend=backend)
        for ours, theirs in zip(tokenizer.encode(rows), plain.encode(rows), strict=True):
            assert ours.input_ids.tolist() == theirs.input_ids.tolist()
        assert tokenizer.fingerprint == plain.fingerprint


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    folder = zoo.write_folder(tmp_path / "a", "gpt2")
    whole = load_tokenizer(folder)
    assert len(whole.fingerprint) == 32
    assert load_tokenizer(folder / "tokenizer.json").fingerprint == whole.fingerprint
    spec = json.loads((folder / "tokenizer.json").read_text())
    shuffled = tmp_path / "other.json"
    shuffled.write_text(json.dumps(dict(reversed(spec.items())), indent=3, ensure_ascii=False), encoding="utf-8")
    assert load_tokenizer(shuffled).fingerprint == whole.fingerprint
    with_template = zoo.write_folder(tmp_path / "b", "gpt2", {"chat_template": "x", "eos_token": "</s>"})
    assert load_tokenizer(with_template).fingerprint == whole.fingerprint
    more_tokens = zoo.write_folder(tmp_path / "c", "gpt2", {"extra_special_tokens": ["<|tool|>"]})
    assert load_tokenizer(more_tokens).fingerprint != whole.fingerprint
    assert load_tokenizer(zoo.write_folder(tmp_path / "d", "llama3")).fingerprint != whole.fingerprint


def test_templates_of_every_layout(tmp_path: Path) -> None:
    def templates(folder: Path) -> dict[str, str]:
        return load_tokenizer(folder).chat_templates

    folder = zoo.write_folder(tmp_path, "gpt2")
    assert load_tokenizer(folder).chat_template is None
    (folder / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert templates(folder) == {"default": "from json"}
    zoo.write_folder(tmp_path, "gpt2", {"chat_template": "from config"})
    assert load_tokenizer(folder).chat_template == "from config"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    zoo.write_folder(tmp_path, "gpt2", {"chat_template": named})
    assert templates(folder) == {"tool_use": "T", "default": "D"}
    assert load_tokenizer(folder).chat_template == "D"
    zoo.write_folder(tmp_path, "gpt2", {"chat_template": [{**named[0], "name": n} for n in ("a", "b")]})
    assert load_tokenizer(folder).chat_template is None
    (folder / "chat_template.jinja").write_text("from file\n")
    assert templates(folder) == {"default": "from file\n"}
    (folder / "chat_templates").mkdir()
    (folder / "chat_templates" / "rag.jinja").write_text("R")
    assert templates(folder) == {"default": "from file\n", "rag": "R"}
    assert load_tokenizer(folder / "tokenizer.json").chat_templates == {}


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tokens of its own": {"image_token": "<think>", "audio_token": zoo.flags("<s>", __type="AddedToken")},
    "an object that is not a token": {"audio_token": {"content": "<s>"}},
    "an eos nobody knew": {"eos_token": "<|new|>"},
    "a listed token is not in the vocabulary": {
        "added_tokens_decoder": {"1": zoo.flags("<s>"), "5000": zoo.flags("<|later|>", special=False)}
    },
    "a listed token has other flags": {"added_tokens_decoder": {"4": zoo.flags("<|im_end|>", rstrip=True)}},
    "a named token is listed as ordinary": {"added_tokens_decoder": {"4": zoo.flags("<|im_end|>", special=False)}},
    "extra tokens": {"additional_special_tokens": ["<|a|>", "<think>"]},
    "extra named tokens": {"extra_special_tokens": {"tool_token": "<|tool|>"}},
    "no eos": {"eos_token": None},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_mean_what_they_mean_to_transformers(tmp_path: Path, name: str) -> None:
    zoo.write_folder(tmp_path, "gpt2", CONFIGS[name])
    compare_with_transformers(tmp_path)


def test_older_folders_mean_what_they_mean_to_transformers(tmp_path: Path) -> None:
    zoo.write_folder(tmp_path, "gpt2")
    token = zoo.flags("</s>")
    token.pop("special")
    special = {"eos_token": token, "cls_token": "<|cls|>", "additional_special_tokens": ["<|x|>"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    (tmp_path / "added_tokens.json").write_text('{"<|cls|>": 905, "<|y|>": 904}')
    compare_with_transformers(tmp_path)


def compare_with_transformers(folder: Path) -> None:
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours = load_tokenizer(folder)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    assert (ours.eos_id, ours.pad_id) == (theirs.eos_token_id, theirs.pad_token_id)
    added = theirs.added_tokens_decoder
    assert ours.control_tokens == [str(token) for _, token in sorted(added.items()) if token.special]
    text = "".join(f"a {token} b\n{token}" for token in [*added.values(), "<|new|>", "<|x|>", "<|y|>", "<think>"])
    assert (
        ours.encode([Rendered(text, [])])[0].input_ids.tolist() == theirs(text, add_special_tokens=False)["input_ids"]
    )


def test_gigatoken_is_taken_where_it_is_known_and_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = zoo.write_folder(tmp_path / "a", "gpt2")
    assert load_tokenizer(folder).backend == "gigatoken"
    assert load_tokenizer(folder, backend="tokenizers").backend == "tokenizers"
    assert load_tokenizer(zoo.write_folder(tmp_path / "b", "metaspace")).backend == "tokenizers"
    monkeypatch.setattr(fast_engine, "find_spec", lambda name: None)
    assert load_tokenizer(folder).backend == "tokenizers"
