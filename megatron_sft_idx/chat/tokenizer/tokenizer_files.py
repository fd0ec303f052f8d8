"""What a tokenizer's folder says, read without any library that could go online.

A folder in Hugging Face's layout holds ``tokenizer.json`` (the tokenizer itself), ``tokenizer_config.json``
(which tokens play which part, tokens added later, perhaps the chat template), in older ones
``special_tokens_map.json`` and ``added_tokens.json``, and the chat template in a file of its own. How they
override each other follows transformers 5, so that both see the same vocabulary. Where there is no
``tokenizer.json``, the vocabulary is a SentencePiece model, ranks of tiktoken's, or Mistral's ``tekken.json``.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import orjson
import tokenizers
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.chat.tokenizer.tokens import (
    AddedToken,
    FastEngine,
    Ids,
    Located,
    Passage,
    build_tokenizer,
    exact_ids,
    library_versions,
    load_fast_engine,
    spelling_table,
    unknown_id,
)
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.storage import open_regular

__all__ = [
    "AddedTokenSpec",
    "Backend",
    "JsonModel",
    "Shield",
    "Shielded",
    "TokenizerFiles",
    "read_tokenizer_files",
    "refuse",
]


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
    kind: Literal["json", "tekken", "ranks", "sentencepiece"]
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
        return _read_folder(place)
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


def _read_folder(folder: Path) -> TokenizerFiles:
    file = _vocabulary_of(folder)
    kind, spec, content = _read_vocabulary(file)
    config = _read_object(folder / "tokenizer_config.json")
    settings, decoder = _merged_settings(folder, config, spec)
    special = _special_tokens(folder, settings)
    extra = settings.get("extra_special_tokens") or []
    if not isinstance(extra, list):
        raise FormatError(f"{folder}: extra_special_tokens must be a list or an object, found {extra!r:.80}")
    extra = [_token_text(folder, "extra_special_tokens", token) for token in extra]
    known = {token["content"] for token in spec["added_tokens"]} if kind == "json" else set()
    additions = _additions(decoder, known, list(special.values()), extra)
    templates = _read_templates(folder, config)
    return TokenizerFiles(folder, file, kind, spec, content, settings, special, additions, templates)


def _vocabulary_of(folder: Path) -> Path:
    if (folder / "tokenizer.json").is_file():
        return folder / "tokenizer.json"
    for pattern in VOCABULARIES:
        for file in sorted(folder.glob(pattern)):
            if file.is_file():
                return file
    for name in UNREADABLE:
        if (folder / name).is_file():
            refuse(folder / name, "a tokenizer without tokenizer.json")
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
    if not file.exists():
        return {}
    return _parse_object(file, _read_bytes(file))


def _parse_object(file: Path, data: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise FormatError(f"{file}: not JSON ({error}); download or save the tokenizer again") from error
    if not isinstance(value, dict):
        raise FormatError(f"{file}: a JSON object expected, found {type(value).__name__}")
    return value


def _read_vocabulary(
    file: Path,
) -> tuple[Literal["json", "tekken", "ranks", "sentencepiece"], dict[str, Any], bytes]:
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
    return "json", _checked_spec(file, spec), b""


def _checked_spec(file: Path, spec: dict[str, Any]) -> dict[str, Any]:
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


def _additions(
    decoder: list[AddedTokenSpec], known: set[str], named: list[str], extra: list[str]
) -> list[AddedTokenSpec]:
    """Tokens in the order transformers adds them; listed ones that play a named part are always special."""
    parts = set(named)
    result = [
        replace(token, flags={**token.flags, "special": True}) if token.content in parts else token for token in decoder
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


Backend = Literal["auto", "tokenizers", "gigatoken"]

# Code points that Unicode sets aside for private use inside programs, never for text.
NONCHARACTERS = [chr(c) for c in range(0xFDD0, 0xFDF0)]


class JsonModel:
    """See ``Model``.

    Args:
        files: the parsed ``tokenizer.json`` and what the folder adds to it.
        backend: as for ``load_tokenizer``.
        parallel: tokenise a batch on all cores.
        proof: ``proof`` of the same tokenizer loaded before, here or in another process.

    Attributes:
        proof: says for which tokenizer and libraries gigatoken was compared with tokenizers on a sample; empty where
            it was not or where it failed.

    Raises:
        FormatError: the tokenizers library cannot load it, or gigatoken cannot where that was asked for.
    """

    def __init__(self, files: TokenizerFiles, *, backend: Backend, parallel: bool, proof: str) -> None:
        try:
            self._tokenizer = build_tokenizer(files.spec)
        except Exception as error:
            raise FormatError(f"{files.path}: the tokenizers library cannot load it: {error}") from error
        before = _added_tokens(self._tokenizer)
        self._tokenizer.add_tokens([_added_token(token) for token in files.additions])
        after = _added_tokens(self._tokenizer)
        # As the library itself would write it, which for the vocabulary is long and what the file says.
        self._spec = {
            **files.spec,
            "normalizer": _written(self._tokenizer.normalizer),
            "pre_tokenizer": _written(self._tokenizer.pre_tokenizer),
            "model": {**files.spec["model"], "type": type(self._tokenizer.model).__name__},
            "added_tokens": [{"id": index, "content": text, **flags} for index, text, flags in after],
        }
        vocabulary = files.spec["model"]["vocab"]  # an object, but in Unigram models a list
        own: dict[str, int] = (
            vocabulary if isinstance(vocabulary, dict) else {str(i): i for i in range(len(vocabulary))}
        )
        self.fingerprint = _fingerprint(files.spec, [] if after == before else after)
        self.named: dict[str, str] = {}
        self.added = [AddedToken(index, text, flags["special"]) for index, text, flags in after]
        self.size = 1 + max([*own.values(), *(token.number for token in self.added)])
        self.spellings = spelling_table(own, self.added, self._spec["pre_tokenizer"])
        self.proof = ""
        self._fast: FastEngine | None = None
        if backend != "tokenizers":
            wanted = f"{self.fingerprint} {library_versions()}"
            self._fast, reason = load_fast_engine(
                self._spec, self._tokenizer, parallel=parallel, proven=proof == wanted
            )
            if self._fast is not None:
                self.proof = wanted
            elif backend == "gigatoken":
                raise FormatError(f"{files.path}: {reason}")
        self.name = "gigatoken" if self._fast is not None else "tokenizers"
        middle = middle_spec(self._spec)
        self._middle_spec = middle if middle != self._spec else None
        self._variants: dict[bool, tokenizers.Tokenizer] = {False: self._tokenizer}
        self._shields: dict[bool, Shield] = {}

    def ids(self, passages: Sequence[Passage]) -> Ids:
        """See ``Model.ids``."""
        plain = [i for i, p in enumerate(passages) if not p.literals and not self._is_middle(p)]
        texts = [passages[i].text for i in plain]
        ids = exact_ids(self._tokenizer, texts) if self._fast is None else self._fast.ids(texts)
        if len(plain) == len(passages):
            return ids
        rows = dict(zip(plain, ids.rows(), strict=True))
        return Ids.join([rows[i] if i in rows else self.locate(p)[0] for i, p in enumerate(passages)])

    def locate(self, passage: Passage) -> tuple[NDArray[np.uint32], Located, Callable[[int], int]]:
        """See ``Model.locate``."""
        middle = self._is_middle(passage)
        if passage.literals:
            shielded, encoding, ids = self.shield(middle).encode(passage.text, passage.literals)
            return ids, encoding, shielded.position
        if middle not in self._variants:
            self._variants[middle] = build_tokenizer(self._middle_spec or self._spec)
        encoding = self._variants[middle].encode(passage.text, add_special_tokens=False)
        return np.array(encoding.ids, np.uint32), encoding, int

    def shield(self, middle: bool) -> Shield:
        """What keeps control tokens in the data as text; made on first need, since few corpora have any."""
        if middle not in self._shields:
            self._shields[middle] = Shield(self._middle_spec or self._spec if middle else self._spec)
        return self._shields[middle]

    def token_id(self, text: str) -> int | None:
        """See ``Model.token_id``."""
        index = self._tokenizer.token_to_id(text)
        return None if index is None else int(index)

    def token_name(self, index: int) -> str | None:
        """See ``Model.token_name``."""
        return self._tokenizer.id_to_token(index) if 0 <= index < self.size else None

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """See ``Model.decode``."""
        if self.spellings is not None:
            return self.spellings.spell(ids).decode("utf-8", "replace")
        runs = groupby(np.asarray(ids).tolist(), lambda index: self.token_name(index) is not None)
        return "".join(
            self._tokenizer.decode(list(run), skip_special_tokens=False) if known else "".join(map(unknown_id, run))
            for known, run in runs
        )

    def _is_middle(self, passage: Passage) -> bool:
        return passage.middle and self._middle_spec is not None


def middle_spec(spec: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer for a text that goes on from another: it puts no space in front."""
    spec = dict(spec)
    spec["normalizer"] = _without_prefix(spec.get("normalizer"), "normalizers")
    spec["pre_tokenizer"] = _without_prefix(spec.get("pre_tokenizer"), "pretokenizers")
    return spec


def _without_prefix(step: dict[str, Any] | None, parts: str) -> dict[str, Any] | None:
    if step is None or step.get("type") == "Prepend":
        return None
    if step.get("type") == "Sequence":
        kept = [part for part in (_without_prefix(part, parts) for part in step[parts]) if part is not None]
        return {**step, parts: kept}
    if step.get("type") == "Metaspace":
        return {**step, "prepend_scheme": "never", "add_prefix_space": False}
    if "add_prefix_space" in step:
        return {**step, "add_prefix_space": False}
    return step


def _written(step: Any) -> dict[str, Any] | None:
    return None if step is None else orjson.loads(step.__getstate__())


def _added_token(token: AddedTokenSpec) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(token.content, **token.flags)


def _added_tokens(tokenizer: tokenizers.Tokenizer) -> list[tuple[int, str, dict[str, bool]]]:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    found = sorted(tokenizer.get_added_tokens_decoder().items())
    return [(i, token.content, {flag: getattr(token, flag) for flag in flags}) for i, token in found]


def _fingerprint(spec: dict[str, Any], added: list[tuple[int, str, dict[str, bool]]]) -> str:
    """Of the parts of tokenizer.json that decide ids, whatever their order or white space in the file."""
    decisive = {key: spec.get(key) for key in ("normalizer", "pre_tokenizer", "model", "added_tokens", "decoder")}
    content = orjson.dumps([decisive, added], option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return xxhash.xxh3_128_hexdigest(content)


@dataclass(frozen=True, slots=True)
class Shielded:
    """One text with its stand-ins.

    Attributes:
        text: what is tokenised.
        swaps: (start, stop, start in ``text``, stop in ``text``) of each control token replaced, ascending.
    """

    text: str
    swaps: list[tuple[int, int, int, int]]

    def position(self, character: int) -> int:
        """Where a character of the original text stands in ``text``."""
        at = bisect_right(self.swaps, character, key=lambda swap: swap[0]) - 1
        if at < 0:
            return character
        _, stop, new_start, new_stop = self.swaps[at]
        return new_start if character < stop else new_stop + character - stop


class Shield:
    """Tokenises texts with literals; built on first need, since few corpora have any.

    Args:
        spec: the tokenizer as ``tokenizers`` itself writes it.

    Raises:
        ValueError: the tokenizer treats stand-ins differently from the tokens they stand for.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        added = [token for token in spec["added_tokens"] if token["content"]]
        self._ids = {token["content"]: token["id"] for token in added}
        by_length = sorted(added, key=lambda token: len(token["content"]), reverse=True)
        self._pattern = re.compile("|".join(_pattern(token) for token in by_length) or r"(?!)")
        unknown = self._ids.get(str(spec["model"].get("unk_token")))
        self._added = np.array([i for i in self._ids.values() if i != unknown], np.uint32)
        self._spec = {**spec, "added_tokens": [{**token, "special": True} for token in added]}
        self._flags = {token["content"]: {flag: token[flag] for flag in ("lstrip", "rstrip")} for token in added}
        self._variants: dict[str, tuple[tokenizers.Tokenizer, NDArray[np.uint32]]] = {}
        self._check(build_tokenizer(spec))

    def encode(
        self, text: str, literals: Sequence[tuple[int, int]]
    ) -> tuple[Shielded, tokenizers.Encoding, NDArray[np.uint32]]:
        """The text with stand-ins, its encoding (with offsets into that text), and the true ids.

        Raises:
            ValueError: the tokenizer has no way to spell a literal without its control token.
        """
        mark = next((c for c in NONCHARACTERS if c not in text), None)
        if mark is None:
            raise ValueError("the text holds all of U+FDD0 to U+FDEF, which are not characters")
        shielded = self._replace(text, literals, mark)
        tokenizer, translation = self._variant(mark)
        encoding = tokenizer.encode(shielded.text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.uint32)
        if np.isin(ids, self._added).any():
            raise ValueError("control tokens in the data cannot be kept as text: this tokenizer always knows them")
        return shielded, encoding, translation[ids]

    def _replace(self, text: str, literals: Sequence[tuple[int, int]], mark: str) -> Shielded:
        parts: list[str] = []
        swaps: list[tuple[int, int, int, int]] = []
        done = length = begin = 0
        for literal_start, literal_stop in [*literals, (len(text), len(text))]:
            for match in self._pattern.finditer(text, begin, literal_start):
                stand_in = f"{mark}{self._ids[match.group()]}{mark}"
                length += match.start() - done
                parts += [text[done : match.start()], stand_in]
                swaps.append((match.start(), match.end(), length, length + len(stand_in)))
                length += len(stand_in)
                done = match.end()
            begin = literal_stop
        parts.append(text[done:])
        return Shielded("".join(parts), swaps)

    def _variant(self, mark: str) -> tuple[tokenizers.Tokenizer, NDArray[np.uint32]]:
        """The copy whose stand-ins are spelled with ``mark``, and its ids' true ones."""
        if mark not in self._variants:
            tokenizer = build_tokenizer(self._spec)
            tokenizer.encode_special_tokens = True
            names = {f"{mark}{index}{mark}": content for content, index in self._ids.items()}
            tokenizer.add_tokens(
                [
                    tokenizers.AddedToken(name, special=False, normalized=False, **self._flags[content])
                    for name, content in names.items()
                ]
            )
            vocabulary = tokenizer.get_vocab(with_added_tokens=True)
            translation = np.arange(max(vocabulary.values()) + 1, dtype=np.uint32)
            for name, content in names.items():
                translation[vocabulary[name]] = self._ids[content]
            self._variants[mark] = (tokenizer, translation)
        return self._variants[mark]

    def _check(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Without literals, stand-ins must change nothing."""
        for content in self._ids:
            text = f"word {content} word\n{content}{content}word {content} \n"
            if tokenizer.encode(text, add_special_tokens=False).ids != self.encode(text, [])[2].tolist():
                raise ValueError(f"control tokens in the data cannot be kept as text: {content!r} behaves oddly")


def _pattern(token: dict[str, Any]) -> str:
    text = re.escape(token["content"])
    return rf"(?<!\w){text}(?!\w)" if token.get("single_word") else text
