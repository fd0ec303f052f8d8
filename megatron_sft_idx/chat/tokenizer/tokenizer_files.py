"""What a tokenizer's folder says, read without any library that could go online.

A folder in Hugging Face's layout holds ``tokenizer.json`` (the tokenizer itself), ``tokenizer_config.json``
(which tokens play which part, tokens added later, perhaps the chat template), in older ones
``special_tokens_map.json`` and ``added_tokens.json``, and the chat template in a file of its own. How they
override each other follows transformers 5, so that both see the same vocabulary.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage import open_regular

__all__ = ["AddedTokenSpec", "TokenizerFiles", "read_tokenizer_files"]

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SLOW_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tiktoken.model", "tekken.json")
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class AddedTokenSpec:
    """A token that stands outside the model's own vocabulary, with ``tokenizers.AddedToken``'s flags."""

    content: str
    flags: dict[str, bool]


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The parsed files of one tokenizer.

    Attributes:
        path: the folder or file that was asked for.
        spec: ``tokenizer.json``, parsed.
        special_tokens: template variables such as ``eos_token``, as transformers passes them.
        additions: tokens that the other files add to ``spec``, or whose flags they change, in the order in
            which transformers adds them.
        templates: chat templates by name; a folder's only template is called ``default``.
    """

    path: Path
    spec: dict[str, Any]
    special_tokens: dict[str, str]
    additions: list[AddedTokenSpec]
    templates: dict[str, str]


def read_tokenizer_files(path: str | Path) -> TokenizerFiles:
    """Reads a tokenizer's folder, or a ``tokenizer.json`` alone (which knows no template and no eos token).

    Raises:
        FormatError: what is missing or broken, and what to do about it.
    """
    place = Path(path)
    if place.is_dir():
        return _read_folder(place)
    if place.exists():
        return TokenizerFiles(place, _read_spec(place), {}, [], {})
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(path)) and not str(path).startswith("."):
        raise FormatError(
            f"{path}: not a local folder; if it is a model on the Hugging Face hub, download its tokenizer "
            f"first: hf download {path} --include '*token*' 'chat_template*' --local-dir DIR, then give DIR"
        )
    raise FormatError(f"{path}: no such file or folder; expected a tokenizer.json or the folder that holds one")


def _read_folder(folder: Path) -> TokenizerFiles:
    file = folder / "tokenizer.json"
    if not file.is_file():
        slow = next((name for name in SLOW_FILES if (folder / name).is_file()), None)
        raise FormatError(_slow_only(folder / slow, folder) if slow else f"{folder}: holds no tokenizer.json")
    spec = _read_spec(file)
    config = _read_object(folder / "tokenizer_config.json")
    settings, decoder = _merged_settings(folder, config, spec)
    special = _special_tokens(folder, settings)
    extra = settings.get("extra_special_tokens") or []
    if not isinstance(extra, list):
        raise FormatError(f"{folder}: extra_special_tokens must be a list or an object, found {extra!r:.80}")
    extra = [_token_text(folder, "extra_special_tokens", token) for token in extra]
    known = {token["content"] for token in spec["added_tokens"]}
    additions = _additions(decoder, known, list(special.values()), extra)
    return TokenizerFiles(folder, spec, special, additions, _read_templates(folder, config))


def _slow_only(file: Path, folder: Path) -> str:
    return (
        f'{file}: a tokenizer without tokenizer.json; convert it once with transformers: python -c "from '
        f"transformers import AutoTokenizer as T; T.from_pretrained('{folder}').save_pretrained('{folder}')\""
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
    if not file.exists():
        return {}
    data = _read_bytes(file)
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise FormatError(f"{file}: not JSON ({error}); download or save the tokenizer again") from error
    if not isinstance(value, dict):
        raise FormatError(f"{file}: a JSON object expected, found {type(value).__name__}")
    return value


def _read_spec(file: Path) -> dict[str, Any]:
    if file.name in SLOW_FILES or file.suffix == ".model":
        raise FormatError(_slow_only(file, file.parent))
    spec = _read_object(file)
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
    return spec


def _token_text(file: Path, key: str, value: Any) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise FormatError(f"{file}: {key} must be a string or an object with content, found {value!r:.80}")
    return text


def _token_spec(file: Path, key: str, value: Any) -> AddedTokenSpec:
    content = _token_text(file, key, value)
    flags = {flag: value[flag] for flag in TOKEN_FLAGS if isinstance(value, dict) and flag in value}
    wrong = next((flag for flag, setting in flags.items() if not isinstance(setting, bool)), None)
    if wrong is not None:
        raise FormatError(f"{file}: {key}: {wrong} must be true or false, found {flags[wrong]!r:.80}")
    return AddedTokenSpec(content, flags)


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
            decoder[int(key)] = _token_spec(file, f"added_tokens_decoder[{key}]", value)
        return settings, [decoder[key] for key in sorted(decoder)]
    # Older folders: the map has the last word, and tokens added later stand in a file of their own.
    settings.update(_read_object(folder / "special_tokens_map.json"))
    if "additional_special_tokens" in settings and not settings.get("extra_special_tokens"):
        settings["extra_special_tokens"] = settings.pop("additional_special_tokens")
    names = {_token_text(file, name, settings[name]) for name in NAMED_TOKENS if settings.get(name)}
    for content, index in _read_object(folder / "added_tokens.json").items():
        if not isinstance(index, int):
            raise FormatError(f"{folder / 'added_tokens.json'}: {content!r} must have a whole number, not {index!r}")
        decoder[index] = AddedTokenSpec(content, {"special": content in names, "normalized": content not in names})
    for token in spec["added_tokens"]:
        decoder[token["id"]] = _token_spec(folder / "tokenizer.json", "added_tokens", token)
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


def _additions(
    decoder: list[AddedTokenSpec], known: set[str], named: list[str], extra: list[str]
) -> list[AddedTokenSpec]:
    """Tokens in the order transformers adds them; listed ones that play a named part are always special."""
    parts = set(named)
    result = [
        AddedTokenSpec(token.content, {**token.flags, "special": True}) if token.content in parts else token
        for token in decoder
    ]
    known = known | {token.content for token in decoder}
    for content in [*named, *extra]:
        if content not in known:
            known.add(content)
            result.append(AddedTokenSpec(content, {"special": True, "normalized": False}))
    return result


def _read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Files of their own win over the config's key, as in transformers; chat_template.json comes last."""
    templates = {file.stem: file for file in sorted((folder / "chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = folder / "chat_template.jinja"
    if templates:
        return {name: _template_text(file, _read_bytes(file)) for name, file in templates.items()}
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


def _template_text(file: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{file}: not UTF-8 at byte {error.start}; a template is UTF-8 text") from error
