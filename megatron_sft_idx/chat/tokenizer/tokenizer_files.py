"""What a tokenizer's folder says, read without any library that could go online.

A folder in Hugging Face's layout holds ``tokenizer.json`` (the tokenizer itself), ``tokenizer_config.json``
(which tokens play which part, tokens added later, perhaps the chat template), in older ones
``special_tokens_map.json`` and ``added_tokens.json``, and the chat template in a file of its own. How they
override each other follows transformers 5, so that both see the same vocabulary. Where there is no
``tokenizer.json``, the vocabulary is a SentencePiece model, ranks of tiktoken's, or Mistral's ``tekken.json``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import orjson

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage import open_regular

Backend = Literal["auto", "tokenizers", "gigatoken"]
Kind = Literal["json", "tekken", "ranks", "sentencepiece"]

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Vocabularies that stand for a tokenizer.json, the first one found taken; and those that would have to be converted.
VOCABULARIES = (
    "tekken*.json",
    "tiktoken.model",
    "*.tiktoken",
    "tokenizer.model",
    "spiece.model",
    "*.model",
    "*.model.v*",
)
UNREADABLE = ("vocab.json", "vocab.txt")
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class AddedTokenSpec:
    """A token that stands outside the model's own vocabulary.

    Attributes:
        content: its text.
        flags: those of ``tokenizers.AddedToken`` that were given.
        number: its id, where the files give one.
    """

    content: str
    flags: dict[str, bool]
    number: int | None = None


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The parsed files of one tokenizer.

    Attributes:
        path: the folder or file that was asked for.
        file: what holds the vocabulary.
        kind: of that file; ``ranks`` are tiktoken's.
        spec: the file, parsed, where it is JSON.
        content: its bytes, where it is not.
        settings: ``tokenizer_config.json`` and what overrides it.
        special_tokens: template variables such as ``eos_token``, as transformers passes them.
        additions: tokens that the other files add to ``spec``, or whose flags they change, in the order in
            which transformers adds them.
        templates: chat templates by name; a folder's only template is called ``default``.
    """

    path: Path
    file: Path
    kind: Kind
    spec: dict[str, Any]
    content: bytes
    settings: dict[str, Any]
    special_tokens: dict[str, str]
    additions: list[AddedTokenSpec]
    templates: dict[str, str]


def read_tokenizer_files(path: str | Path) -> TokenizerFiles:
    """Reads a tokenizer's folder, or the file with its vocabulary alone (beside which nothing else is read).

    Raises:
        FormatError: what is missing or broken, and what to do about it.
    """
    place = Path(path)
    if place.is_dir():
        file = _vocabulary_of(place)
        kind, spec, content = _read_vocabulary(file)
        config = _read_object(place / "tokenizer_config.json")
        settings, listed = _merged_settings(place, config, spec)
        special = _special_tokens(place, settings)
        extra = settings.get("extra_special_tokens") or []
        if not isinstance(extra, list):
            raise FormatError(f"{place}: extra_special_tokens must be a list or an object, found {extra!r:.80}")
        extra = [_token_text(place, "extra_special_tokens", token) for token in extra]
        # In the order in which transformers adds them; listed ones that play a named part are always special.
        named = [*special.values()]
        additions = [
            replace(token, flags={**token.flags, "special": True}) if token.content in named else token
            for token in listed
        ]
        known = {token.content for token in listed}
        known |= {token["content"] for token in spec["added_tokens"]} if kind == "json" else set()
        for text in dict.fromkeys([*named, *extra]):
            if text not in known:
                additions.append(AddedTokenSpec(text, {"special": True, "normalized": False}))
        templates = _read_templates(place, config)
        return TokenizerFiles(place, file, kind, spec, content, settings, special, additions, templates)
    if place.exists():
        kind, spec, content = _read_vocabulary(place)
        return TokenizerFiles(place, place, kind, spec, content, {}, {}, [], {})
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(path)) and not str(path).startswith("."):
        raise FormatError(
            f"{path}: not a local folder; if it is a model on the Hugging Face hub, download its tokenizer "
            f"first: hf download {path} --include '*token*' 'chat_template*' --local-dir DIR, then give DIR;"
            " preprocess --download does it"
        )
    raise FormatError(f"{path}: no such file or folder; expected a tokenizer.json or the folder that holds one")


def _vocabulary_of(folder: Path) -> Path:
    """The file with the vocabulary; each of ``UNREADABLE`` is refused as it is read."""
    for pattern in ("tokenizer.json", *VOCABULARIES, *UNREADABLE):
        for file in sorted(folder.glob(pattern)):
            if file.is_file():
                return file
    raise FormatError(f"{folder}: holds no tokenizer.json, tekken.json, SentencePiece model or file of ranks")


def refuse(file: Path, why: str, *, code: bool = False) -> NoReturn:
    """Of a tokenizer that transformers can convert; ``code`` where only by running what came with it.

    Raises:
        FormatError: always.
    """
    trust = ", trust_remote_code=True" if code else ""
    raise FormatError(
        f'{file}: {why}; convert it once with transformers: python -c "from transformers import AutoTokenizer as T; '
        f"T.from_pretrained('{file.parent}'{trust}).save_pretrained('{file.parent}')\""
    )


def _read_bytes(file: Path) -> bytes:
    try:
        with open_regular(file) as opened:
            data = opened.read()
    except OSError as error:
        raise FormatError(f"{file}: cannot be read: {error.strerror}") from error
    if data.startswith(b"version https://git-lfs"):
        raise FormatError(f"{file}: a Git LFS pointer, not the file itself; run git lfs pull in its repository")
    return data


def _read_object(file: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is no such file."""
    return _parse_object(file, _read_bytes(file)) if file.exists() else {}


def _parse_object(file: Path, data: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise FormatError(f"{file}: not JSON ({error}); download or save the tokenizer again") from error
    if not isinstance(value, dict):
        raise FormatError(f"{file}: a JSON object expected, found {type(value).__name__}")
    return value


def _read_vocabulary(file: Path) -> tuple[Kind, dict[str, Any], bytes]:
    """The kind of a vocabulary, which its content decides and not its name, and that content, parsed if it is JSON."""
    if file.name in UNREADABLE:
        refuse(file, "a tokenizer without tokenizer.json")
    content = _read_bytes(file)
    if file.suffix != ".json" and content[:1] not in (b"{", b"["):
        if re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", content):
            return "ranks", {}, content
        # A SentencePiece model begins with its first piece, in protocol buffers' spelling.
        if content[:1] == b"\n":
            return "sentencepiece", {}, content
        raise FormatError(
            f"{file}: neither JSON, nor ranks of tiktoken's, nor a SentencePiece model; download it again"
        )
    spec = _parse_object(file, content)
    if isinstance(spec.get("vocab"), list) and isinstance(spec.get("config"), dict):
        return "tekken", spec, b""
    model = spec.get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        raise FormatError(
            f"{file}: not a tokenizer: no model with a vocab in it (keys: {', '.join(spec) or 'none'}); "
            "expected the tokenizer.json that the tokenizers library writes"
        )
    if not model["vocab"]:
        raise FormatError(f"{file}: the vocabulary is empty")
    if model.get("dropout"):
        raise FormatError(
            f"{file}: model.dropout is {model['dropout']}, so that every encoding is random; set it to null"
        )
    added = spec.setdefault("added_tokens", None) or []
    if not isinstance(added, list) or not all(
        isinstance(token, dict) and isinstance(token.get("id"), int) and isinstance(token.get("content"), str)
        for token in added
    ):
        raise FormatError(f"{file}: added_tokens must be a list of objects with id and content")
    spec["added_tokens"] = added
    return "json", spec, b""


def _token_text(file: Path, key: str, value: Any) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise FormatError(f"{file}: {key} must be a string or an object with content, found {value!r:.80}")
    return text


def _token_spec(file: Path, key: str, value: Any, index: int) -> AddedTokenSpec:
    content = _token_text(file, key, value)
    flags = {flag: value[flag] for flag in TOKEN_FLAGS if isinstance(value, dict) and flag in value}
    wrong = next((flag for flag, setting in flags.items() if not isinstance(setting, bool)), None)
    if wrong is not None:
        raise FormatError(f"{file}: {key}: {wrong} must be true or false, found {flags[wrong]!r:.80}")
    return AddedTokenSpec(content, flags, index)


def _merged_settings(
    folder: Path, config: dict[str, Any], spec: dict[str, Any]
) -> tuple[dict[str, Any], list[AddedTokenSpec]]:
    """The settings that hold, and the added tokens they name in the order of their ids."""
    settings = dict(config)
    if "additional_special_tokens" in settings and not settings.get("extra_special_tokens"):
        settings["extra_special_tokens"] = settings.pop("additional_special_tokens")
    file = folder / "tokenizer_config.json"
    decoder: dict[int, AddedTokenSpec] = {}
    if "added_tokens_decoder" in config:
        listed = config["added_tokens_decoder"]
        if not isinstance(listed, dict) or not all(str(key).isdecimal() for key in listed):
            raise FormatError(f"{file}: added_tokens_decoder must be an object from ids to tokens")
        for key, value in listed.items():
            decoder[int(key)] = _token_spec(file, f"added_tokens_decoder[{key}]", value, int(key))
        return settings, [decoder[key] for key in sorted(decoder)]
    # Older folders: the map has the last word, and tokens added later stand in a file of their own.
    settings.update(_read_object(folder / "special_tokens_map.json"))
    if "additional_special_tokens" in settings and not settings.get("extra_special_tokens"):
        settings["extra_special_tokens"] = settings.pop("additional_special_tokens")
    names = {_token_text(file, name, settings[name]) for name in NAMED_TOKENS if settings.get(name)}
    for content, index in _read_object(folder / "added_tokens.json").items():
        if not isinstance(index, int):
            raise FormatError(f"{folder / 'added_tokens.json'}: {content!r} must have a whole number, not {index!r}")
        flags = {"special": content in names, "normalized": content not in names}
        decoder[index] = AddedTokenSpec(content, flags, index)
    for token in spec.get("added_tokens", []):
        decoder[token["id"]] = _token_spec(folder / "tokenizer.json", "added_tokens", token, token["id"])
    return settings, [decoder[key] for key in sorted(decoder)]


def _special_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Named tokens first, then the model's own (``image_token`` ...): what templates may ask for."""
    file = folder / "tokenizer_config.json"
    found = {name: settings[name] for name in NAMED_TOKENS if settings.get(name) is not None}
    for name, value in settings.items():
        is_token = isinstance(value, str) or (isinstance(value, dict) and value.get("__type") == "AddedToken")
        if name.endswith("_token") and name not in NAMED_TOKENS and is_token:
            found[name] = value
    for key in ("model_specific_special_tokens", "extra_special_tokens"):
        value = settings.get(key)
        if isinstance(value, dict):
            found.update(value)
            settings.pop(key)
    return {name: _token_text(file, name, value) for name, value in found.items()}


def _read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Files of their own win over the config's key, as in transformers; chat_template.json comes last."""
    found: dict[str, str] = {}
    templates = {file.stem: file for file in sorted((folder / "chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = folder / "chat_template.jinja"
    for name, file in templates.items():
        try:
            found[name] = _read_bytes(file).decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{file}: not UTF-8 at byte {error.start}; a template is UTF-8 text") from error
    if found:
        return found
    file = folder / "tokenizer_config.json"
    value = config.get("chat_template")
    if value is None:
        file = folder / "chat_template.json"
        value = _read_object(file).get("chat_template") if file.exists() else None
        if value is None and file.exists():
            raise FormatError(f"{file}: has no chat_template in it")
    if value is None:
        return {}
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}
    elif isinstance(value, str):
        value = {"default": value}
    if not isinstance(value, dict) or not all(isinstance(part, str) for pair in value.items() for part in pair):
        raise FormatError(f"{file}: chat_template must be a string or a list of {{name, template}} objects")
    return dict(value)
