"""The files of a tokenizer, read from a local folder or file and checked against each other.

A folder in Hugging Face's layout has ``tokenizer.json`` (the tokenizer itself), ``tokenizer_config.json`` (special
tokens, tokens added later, perhaps the chat template), in older folders ``special_tokens_map.json`` and
``added_tokens.json``, and possibly the chat template in a separate file. They override each other as in transformers 5,
so that both have the same vocabulary. Without a ``tokenizer.json``, the vocabulary is a SentencePiece model, tiktoken
ranks, or Mistral's ``tekken.json``. Nothing is downloaded, and no code that came with a tokenizer is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import orjson

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage import open_regular

VocabularyKind = Literal["json", "tekken", "ranks", "sentencepiece"]
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class AddedToken(NamedTuple):
    """A token outside the model's own vocabulary; its text becomes its id wherever a chat template writes it.

    Attributes:
        number: its id; -1 if the files do not have it.
        text: its content.
        flags: the flags of ``tokenizers.AddedToken`` in the files, such as ``special``.
    """

    number: int
    text: str
    flags: Mapping[str, bool]

    @property
    def special(self) -> bool:
        """Whether it is a control token rather than a word."""
        return self.flags.get("special", False)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The parsed files of one tokenizer.

    Attributes:
        path: the folder or file given by the user.
        file: the file with the vocabulary.
        kind: the kind of that file; ``ranks`` are tiktoken's.
        spec: the parsed content of that file if it is JSON; else empty.
        content: the bytes of that file if it is not JSON; else empty.
        settings: the content of ``tokenizer_config.json``, with overrides from other files.
        special_tokens: template variables such as ``eos_token``, as in transformers.
        additions: tokens that the other files add to ``spec``, or whose flags they change, in the order of
            transformers.
        templates: chat templates by name; a folder's only template is named ``default``.
    """

    path: Path
    file: Path
    kind: VocabularyKind
    spec: dict[str, Any] = field(default_factory=dict)
    content: bytes = b""
    settings: dict[str, Any] = field(default_factory=dict)
    special_tokens: dict[str, str] = field(default_factory=dict)
    additions: list[AddedToken] = field(default_factory=list)
    templates: dict[str, str] = field(default_factory=dict)


_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_UNREADABLE = ("vocab.json", "vocab.txt")
# The first pattern that matches a file wins. A file that would have to be converted is rejected when it is read.
_VOCABULARIES = (
    *("tokenizer.json", "tekken*.json", "tiktoken.model", "*.tiktoken", "tokenizer.model", "spiece.model"),
    *("*.model", "*.model.v*", *_UNREADABLE),
)


def read_tokenizer_files(path: str | Path) -> TokenizerFiles:
    """Read a tokenizer's folder or, if a file is given, only this vocabulary file.

    Raises:
        FormatError: something is missing or broken; the message has a remedy.
    """
    named = Path(path)
    if named.is_dir():
        return _read_folder(named)
    if named.exists():
        return _read_vocabulary(named, named)
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(path)) and not str(path).startswith("."):
        raise FormatError(
            f"{path}: not a local folder; if it is a model on the Hugging Face hub, download its tokenizer "
            f"first: hf download {path} --include '*token*' 'chat_template*' --local-dir DIR, then give DIR;"
            " preprocess --download does it"
        )
    raise FormatError(f"{path}: no such file or folder; expected a tokenizer.json or a folder with one")


def _read_folder(folder: Path) -> TokenizerFiles:
    files = (file for pattern in _VOCABULARIES for file in sorted(folder.glob(pattern)) if file.is_file())
    if (file := next(files, None)) is None:
        raise FormatError(f"{folder}: contains no tokenizer.json, tekken.json, SentencePiece model or tiktoken file")
    vocabulary = _read_vocabulary(folder, file)
    spec = vocabulary.spec
    config = _read_object(folder / "tokenizer_config.json")
    settings, listed = _merged_settings(folder, config, spec)
    if settings.get("split_special_tokens"):
        raise FormatError(
            f"{folder / 'tokenizer_config.json'}: split_special_tokens is {settings['split_special_tokens']}, which"
            " would split the special tokens of a chat like ordinary text; set it to false"
        )
    special = _special_tokens(folder, settings)
    extra = settings.get("extra_special_tokens") or []
    if not isinstance(extra, list):
        raise FormatError(f"{folder}: extra_special_tokens must be a list or an object, found {extra!r:.80}")
    # In the order of transformers. A listed token that is also, for example, the eos_token is always special.
    named = {*special.values()}
    additions = [
        token._replace(flags={**token.flags, "special": True}) if token.text in named else token for token in listed
    ]
    present = {token.text for token in listed}
    present |= {token["content"] for token in spec["added_tokens"]} if vocabulary.kind == "json" else set()
    texts = [*special.values(), *(_token_text(folder, "extra_special_tokens", token) for token in extra)]
    for text in dict.fromkeys(texts):
        if text not in present:
            additions.append(AddedToken(-1, text, {"special": True, "normalized": False}))
    templates = _read_templates(folder, config)
    return replace(vocabulary, settings=settings, special_tokens=special, additions=additions, templates=templates)


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
    """Read a JSON object; empty if the file does not exist."""
    return _parse_object(file, _read_bytes(file)) if file.exists() else {}


def _parse_object(file: Path, data: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise FormatError(f"{file}: not JSON ({error}); download or save the tokenizer again") from error
    if not isinstance(value, dict):
        raise FormatError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def _read_vocabulary(path: Path, file: Path) -> TokenizerFiles:
    """Read only a vocabulary file. Its content determines its kind, not its name. ``path`` is the user's path."""
    if file.name in _UNREADABLE:
        refuse(file, "a tokenizer without tokenizer.json")
    content = _read_bytes(file)
    if file.suffix != ".json" and content[:1] not in (b"{", b"["):
        if re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", content):
            return TokenizerFiles(path, file, "ranks", content=content)
        # A SentencePiece model begins with its first piece, in protocol buffers' encoding.
        if content[:1] == b"\n":
            return TokenizerFiles(path, file, "sentencepiece", content=content)
        raise FormatError(f"{file}: not JSON, a tiktoken file or a SentencePiece model; download it again")
    spec = _parse_object(file, content)
    if isinstance(spec.get("vocab"), list) and isinstance(spec.get("config"), dict):
        return TokenizerFiles(path, file, "tekken", spec)
    model = spec.get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        raise FormatError(
            f"{file}: not a tokenizer: it has no model with a vocab (keys: {', '.join(spec) or 'none'}); expected the"
            " tokenizer.json that the tokenizers library writes"
        )
    if not model["vocab"]:
        raise FormatError(f"{file}: the vocabulary is empty")
    if dropout := model.get("dropout"):
        raise FormatError(f"{file}: model.dropout is {dropout}, which makes every encoding random; set it to null")
    spec["added_tokens"] = added = spec.get("added_tokens") or []
    if not isinstance(added, list) or not all(
        isinstance(token, dict) and isinstance(token.get("id"), int) and isinstance(token.get("content"), str)
        for token in added
    ):
        raise FormatError(f"{file}: added_tokens must be a list of objects with id and content")
    return TokenizerFiles(path, file, "json", spec)


def _token_text(file: Path, key: str, value: Any) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise FormatError(f"{file}: {key} must be a string or an object with content, found {value!r:.80}")
    return text


def _added_token(file: Path, key: str, value: Any, index: int) -> AddedToken:
    text = _token_text(file, key, value)
    flags = {flag: value[flag] for flag in TOKEN_FLAGS if isinstance(value, dict) and flag in value}
    for flag, setting in flags.items():
        if not isinstance(setting, bool):
            raise FormatError(f"{file}: {key}: {flag} must be true or false, found {setting!r:.80}")
    return AddedToken(index, text, flags)


def _merged_settings(
    folder: Path, config: dict[str, Any], spec: dict[str, Any]
) -> tuple[dict[str, Any], list[AddedToken]]:
    """Return the effective settings, and the added tokens in them in the order of their ids."""
    file, settings = folder / "tokenizer_config.json", dict[str, Any]()
    is_old = "added_tokens_decoder" not in config
    # In older folders, special_tokens_map.json has priority, and added_tokens.json has the tokens added later.
    for source in (config, _read_object(folder / "special_tokens_map.json") if is_old else {}):
        settings.update(source)
        if "additional_special_tokens" in settings and not settings.get("extra_special_tokens"):
            settings["extra_special_tokens"] = settings.pop("additional_special_tokens")
    decoder: dict[int, AddedToken] = {}
    if is_old:
        names = {_token_text(file, name, settings[name]) for name in _NAMED_TOKENS if settings.get(name)}
        file = folder / "added_tokens.json"
        for text, index in _read_object(file).items():
            if not isinstance(index, int):
                raise FormatError(f"{file}: the id of {text!r} must be a whole number, not {index!r}")
            decoder[index] = AddedToken(index, text, {"special": text in names, "normalized": text not in names})
        for token in spec.get("added_tokens", []):
            decoder[token["id"]] = _added_token(folder / "tokenizer.json", "added_tokens", token, token["id"])
    else:
        listed = config["added_tokens_decoder"]
        if not isinstance(listed, dict) or not all(str(key).isdecimal() for key in listed):
            raise FormatError(f"{file}: added_tokens_decoder must be an object from ids to tokens")
        for key, value in listed.items():
            decoder[int(key)] = _added_token(file, f"added_tokens_decoder[{key}]", value, int(key))
    return settings, [decoder[index] for index in sorted(decoder)]


def _special_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return the tokens that templates can use by name: first ``eos_token`` and similar, then others of the model."""
    found = {name: settings[name] for name in _NAMED_TOKENS if settings.get(name) is not None}
    for name, value in settings.items():
        is_token = isinstance(value, str) or (isinstance(value, dict) and value.get("__type") == "AddedToken")
        if name.endswith("_token") and name not in _NAMED_TOKENS and is_token:
            found[name] = value
    for key in ("model_specific_special_tokens", "extra_special_tokens"):
        if isinstance(settings.get(key), dict):
            found.update(settings.pop(key))
    return {name: _token_text(folder / "tokenizer_config.json", name, value) for name, value in found.items()}


def _read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Read templates by name: from .jinja files, else tokenizer_config.json, else chat_template.json (transformers)."""
    templates = {file.stem: file for file in sorted((folder / "chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = folder / "chat_template.jinja"
    found: dict[str, str] = {}
    for name, file in templates.items():
        try:
            found[name] = _read_bytes(file).decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{file}: not UTF-8 at byte {error.start}; save the template as UTF-8") from error
    if found:
        return found
    file, value = folder / "tokenizer_config.json", config.get("chat_template")
    if value is None:
        file = folder / "chat_template.json"
        if not file.exists():
            return {}
        if (value := _read_object(file).get("chat_template")) is None:
            raise FormatError(f"{file}: has no chat_template")
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}
    elif isinstance(value, str):
        value = {"default": value}
    if not isinstance(value, dict) or not all(isinstance(part, str) for pair in value.items() for part in pair):
        raise FormatError(f"{file}: chat_template must be a string or a list of {{name, template}} objects")
    return dict(value)


def refuse(file: Path, why: str, *, code: bool = False) -> NoReturn:
    """Reject a tokenizer that transformers can convert, and say how; with ``code``, only by running code with it.

    Raises:
        FormatError: always.
    """
    trust = ", trust_remote_code=True" if code else ""
    raise FormatError(
        f'{file}: {why}; convert it once with transformers: python -c "from transformers import AutoTokenizer as T; '
        f"T.from_pretrained('{file.parent}'{trust}).save_pretrained('{file.parent}')\""
    )
