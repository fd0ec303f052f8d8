"""Text with spans to token ids with exact loss masks, by the tokenizer of a local folder or file.

``load_tokenizer`` reads it without any library that could go online. A folder in Hugging Face's layout holds
``tokenizer.json`` (the tokenizer itself), ``tokenizer_config.json`` (which tokens play which part, tokens added later,
perhaps the chat template), in older ones ``special_tokens_map.json`` and ``added_tokens.json``, and the chat template
in a file of its own. How they override each other follows transformers 5, so that both see the same vocabulary. Where
there is no ``tokenizer.json``, the vocabulary is a SentencePiece model, ranks of tiktoken's, or Mistral's
``tekken.json``.

``Tokenizer.encode`` tokenises every text as one string, as the model will see it, and then follows the spans'
characters to their tokens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from megatron_sft_idx.chat.tokenizer.originals import RankModel, SentencePieceModel, mistral_template, refuse
from megatron_sft_idx.chat.tokenizer.tokens import (
    TOKEN_FLAGS,
    AddedToken,
    Backend,
    JsonModel,
    Kind,
    Located,
    Passage,
    TokenizerFiles,
)
from megatron_sft_idx.chat.types import Encoded, Rendered, Span, TokenizedRow
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.storage import open_regular


def load_tokenizer(
    path: str | Path, *, backend: Backend = "auto", parallel: bool = False, proof: str = ""
) -> Tokenizer:
    """Loads a tokenizer from a local folder in Hugging Face's layout, or from the file with its vocabulary alone.

    That is a ``tokenizer.json``, a SentencePiece model, ranks of tiktoken's or a ``tekken.json``.

    Args:
        path: the folder or file; nothing is ever downloaded, and no code that came with it is run.
        backend: of a ``tokenizer.json``. ``auto`` takes gigatoken where it is installed and known to give the same
            ids, tokenizers otherwise; ``gigatoken`` fails where it cannot be taken.
        parallel: leave it to the tokenizers library whether to take all cores. Off, this process keeps to one thread,
            which it asks of the library through ``TOKENIZERS_PARALLELISM`` unless the environment already sets that.
        proof: that of the tokenizer as loaded before, perhaps in another process: what it proved is not proved again.

    Raises:
        FormatError: what is missing or broken, and what to do about it.
    """
    if not parallel:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return Tokenizer(_read_files(path), backend=backend, proof=proof)


class Tokenizer:
    """A loaded tokenizer. Pickles as its path and options, and is loaded again on the other side.

    Attributes:
        path: where it came from.
        backend: the library that tokenises: ``gigatoken``, ``tokenizers``, ``sentencepiece`` or ``tiktoken``.
        vocab_size: the largest id + 1, added tokens included.
        special_tokens: template variables (``bos_token``, ``eos_token`` ...) as transformers passes them.
        control_tokens: texts of the added tokens that are special, by id.
        eos_id: id of ``eos_token``, None where the tokenizer names none.
        pad_id: id of ``pad_token``, None where the tokenizer names none.
        chat_templates: the templates that came with it, by name.
        chat_template: the default template, or the only one; None where there is none, or several without a default.
        proof: for ``load_tokenizer``, where the same tokenizer is loaded again.
        fingerprint: xxh3_128 of what decides the ids, the same for a folder and its tokenizer.json unless the
            folder's other files change the added tokens.
    """

    def __init__(self, files: TokenizerFiles, *, backend: Backend, proof: str = "") -> None:
        model: JsonModel | SentencePieceModel | RankModel
        if files.kind == "json":
            model = JsonModel(files, backend=backend, proof=proof)
        elif backend != "auto":
            raise FormatError(f"{files.path}: backend {backend} is for a tokenizer.json, this is {files.file.name}")
        else:
            model = SentencePieceModel(files) if files.kind == "sentencepiece" else RankModel(files)
        self._model, self._file = model, files.file
        self._added_texts = tuple(token.text for token in model.added if token.text)
        self.path, self.proof = str(files.path), model.proof
        self._again = partial(load_tokenizer, files.path, backend=backend, proof=model.proof)
        self.backend, self.vocab_size, self.fingerprint = model.name, model.size, model.fingerprint
        # What the folder says of a token, be it that there is none, outweighs what the vocabulary does.
        named = {name: text for name, text in model.named.items() if name not in files.settings}
        self.special_tokens = named | files.special_tokens
        self.control_tokens = [token.text for token in model.added if token.special]
        self.eos_id, self.pad_id = (
            None if text is None else model.token_id(text)
            for text in map(self.special_tokens.get, ("eos_token", "pad_token"))
        )
        self.chat_templates = templates = files.templates
        self.chat_template = next(iter(templates.values())) if len(templates) == 1 else templates.get("default")

    def __reduce__(self) -> tuple[Any, ...]:
        return self._again, ()

    @property
    def generated_template(self) -> str | None:
        """Of Mistral's files that came without a template, the one that mistral-common makes, which takes seconds."""
        return None if self.chat_templates else mistral_template(self._file)

    def encode(
        self,
        rendered: Sequence[Rendered],
        *,
        span_by_span: bool = False,
        whole_characters: bool = False,
        straddling: bool = True,
    ) -> list[Encoded]:
        """Tokenises texts and weighs their tokens by the spans; no special tokens are added.

        A token counts where it overlaps a span. ``notes`` gains ``straddling``, the spans whose first token
        began before them, ``straddling_header``, those of them that bring more than whitespace in, and ``literals``,
        the control tokens from the data that were kept as text.

        Args:
            rendered: any number of texts; a hundred or so at once is quicker than one by one.
            span_by_span: tokenise the text between the edges of the spans piece by piece, so that no token
                straddles an edge. The ids may then differ from those of the whole text.
            whole_characters: where a span's last character is spelled by several tokens, count all of them.
                transformers counts only the first, and so does this by default.
            straddling: whether a token that begins before its span counts, as it does in transformers.

        Raises:
            SequenceError: a text that cannot be tokenised; ``position`` is its place in ``rendered``.
            ValueError: spans descend, overlap or end past their text.
        """
        utf8 = [_utf8(i, row.text) for i, row in enumerate(rendered)]
        if span_by_span:
            return self._encode_pieces(rendered)
        result: dict[int, Encoded] = {}
        if (spellings := self._model.spellings) is not None:
            plain = [i for i, row in enumerate(rendered) if not row.literals]
            for some in [plain, *([i] for i, row in enumerate(rendered) if row.literals)]:
                rows = [rendered[i] for i in some]
                ids = self._ids(some, [Passage(row.text, row.literals) for row in rows])
                weights, crossed, spelled = spellings.weights(
                    ids, [utf8[i] for i in some], [row.spans for row in rows], whole_characters=whole_characters
                )
                for at, (i, row) in enumerate(zip(some, rows, strict=True)):
                    if spelled[at]:
                        crossings = _crossings(spellings.nbytes[ids[at]], utf8[i], row) if crossed[at] else []
                        result[i] = _weighed(row, ids[at], weights[at], crossings, straddling)
        for i in [i for i in range(len(rendered)) if i not in result]:  # any tokenizer, any text
            row = rendered[i]
            try:
                known, located = self._model.locate(Passage(row.text, row.literals))
            except ValueError as error:
                raise SequenceError("rendered", i, str(error)) from error
            mask, crossings = _weights_by_offsets(located, len(known), row, whole_characters=whole_characters)
            result[i] = _weighed(row, known, mask, crossings, straddling)
        return [result[i] for i in range(len(rendered))]

    def from_token_row(self, row: TokenizedRow) -> Encoded:
        """A row that came tokenised, its ids checked against the vocabulary.

        Raises:
            ValueError: which id is outside.
        """
        ids = row.input_ids
        outside = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        if outside.size:
            at = int(outside[0])
            raise ValueError(
                f"input_ids[{at}] is {ids[at]}, outside the tokenizer's vocabulary of {self.vocab_size}; "
                "was the row made with another tokenizer?"
            )
        return Encoded(ids.astype(np.int32), row.loss_mask.astype(np.float32))

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """The text that ids stand for, control tokens included, for people to read.

        Byte-level tokenizers give the exact text; half a character shows as U+FFFD, an id that is no token as its
        number in angle brackets.
        """
        return self._model.decode(ids)

    def _ids(self, rows: Sequence[int], passages: Sequence[Passage]) -> list[NDArray[np.uint32]]:
        """Ids of passages, of which row each is from."""
        try:
            return self._model.ids(passages)
        except ValueError as error:
            for row, passage in zip(rows, passages, strict=True):
                try:
                    self._model.ids([passage])
                except ValueError as reason:
                    raise SequenceError("rendered", row, str(reason)) from reason
            raise AssertionError("passages that can be tokenised one by one") from error

    def _encode_pieces(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        """Tokenises span by span: each piece of text is wholly trained on, or not at all.

        After a control token a tokenizer that begins texts with a space does what it always does there; elsewhere the
        text runs on.
        """
        passages: list[Passage] = []
        places: list[tuple[int, float]] = []  # of each passage: its row and weight
        for index, row in enumerate(rendered):
            weights = [0.0, *(weight for span in row.spans for weight in (span.weight, 0.0))]
            for (start, stop), weight in zip(pairwise(_edges(row)), weights, strict=True):
                if start < stop:
                    inside = [(max(a, start), min(b, stop)) for a, b in row.literals if a < stop and b > start]
                    middle = start > 0 and not row.text.endswith(self._added_texts, 0, start)
                    literals = [(a - start, b - start) for a, b in inside]
                    passages.append(Passage(row.text[start:stop], literals, middle))
                    places.append((index, weight))
        ids = [[np.zeros(0, np.uint32)] for _ in rendered]
        masks = [[np.zeros(0, np.float32)] for _ in rendered]
        found = self._ids([index for index, _ in places], passages)
        for (index, weight), some in zip(places, found, strict=True):
            ids[index].append(some)
            masks[index].append(np.full(len(some), weight, np.float32))
        return [
            _weighed(row, np.concatenate(ids[i]), np.concatenate(masks[i]), [], True) for i, row in enumerate(rendered)
        ]


def append_eod(encoded: Encoded, eod_id: int) -> Encoded:
    """The sequence with an end-of-document token, trained exactly when the token before it is."""
    weight = encoded.loss_mask[-1] if encoded.loss_mask.size else 0.0
    return replace(
        encoded,
        input_ids=np.append(encoded.input_ids, np.int32(eod_id)),
        loss_mask=np.append(encoded.loss_mask, np.float32(weight)),
    )


# ---- spans to weights ----


class _Crossing(NamedTuple):
    """A token that is trained on and begins before its span."""

    token: int  # its number in the text
    before: str  # what of it lies before the span
    text: str  # all that it spells
    held: bool  # whether a span that is trained on holds its beginning too


def _crossings(nbytes: NDArray[np.int64], utf8: bytes, row: Rendered) -> list[_Crossing]:
    """The tokens that begin before a span that they are trained for, where tokens of ``nbytes`` each spell the text."""
    text, ends = row.text, np.cumsum(nbytes)
    found = []
    for before, span in pairwise([Span(0, 0), *row.spans]):
        if not (span.weight and span.start < span.stop):
            continue
        begin = span.start if len(utf8) == len(text) else len(text[: span.start].encode())
        token = int(np.searchsorted(ends, begin, "right"))
        first = int(ends[token - 1]) if token else 0
        if first < begin:
            held = bool(before.weight) and first < len(text[: before.stop].encode())
            begun, spelt = (utf8[first:stop].decode("utf-8", "replace") for stop in (begin, int(ends[token])))
            found.append(_Crossing(token, begun, spelt, held))
    return found


def _weights_by_offsets(
    located: Located, count: int, row: Rendered, *, whole_characters: bool
) -> tuple[NDArray[np.float32], list[_Crossing]]:
    """Weights of a text's ``count`` tokens by the library's own offsets, and those that begin before their span."""
    _edges(row)

    def first_token(characters: range) -> int | None:
        """The token that holds the first of the characters that any token holds."""
        return next((token for token in map(located.char_to_token, characters) if token is not None), None)

    def begin_of(token: int) -> int:
        return (located.token_to_chars(token) or (0, 0))[0]

    weights = np.zeros(count, np.float32)
    crossings, done = [], 0
    for span in row.spans:
        first = first_token(range(span.start, span.stop))
        last = first_token(range(span.stop - 1, span.start - 1, -1))
        if first is None or last is None:
            continue
        while whole_characters and last + 1 < count and begin_of(last + 1) < span.stop:
            last += 1
        weights[first : last + 1] = np.maximum(weights[first : last + 1], np.float32(span.weight))
        begin = begin_of(first)
        if span.weight and begin < span.start:
            before, spelt = row.text[begin : span.start], row.text[begin : span.start + 1]
            crossings.append(_Crossing(first, before, spelt, begin < done))
        done = span.stop if span.weight else done
    return weights, crossings


def _edges(row: Rendered) -> list[int]:
    """Where spans begin and end, and the text; ValueError where they descend, overlap or end past the text."""
    edges = [0, *(edge for span in row.spans for edge in (span.start, span.stop)), len(row.text)]
    if edges != sorted(edges):
        text = f"the text of {len(row.text)} characters"
        raise ValueError(f"spans descend, overlap or end past {text}: {row.spans!r:.200}")
    return edges


def _utf8(index: int, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        found = ascii(text[error.start])
        reason = f"character {error.start} is {found}, half of a surrogate pair, which no text can hold"
        raise SequenceError("rendered", index, reason) from error


def _weighed(
    row: Rendered,
    ids: NDArray[np.uint32],
    weights: NDArray[np.float32],
    crossings: Sequence[_Crossing],
    straddling: bool,
) -> Encoded:
    """One sequence; without ``straddling``, tokens that begin before their span do not count."""
    known = ids.view(np.int32)
    if not (crossings or row.literals):
        return Encoded(known, weights, row.notes)
    notes = dict(row.notes)
    headers = [crossing for crossing in crossings if crossing.before.strip() and not crossing.held]
    if crossings:
        notes["straddling" if straddling else "straddling_left_out"] = len(crossings)
    if headers and straddling:
        notes["straddling_header"] = len(headers)
    if row.literals:
        notes["literals"] = len(row.literals)
    if not straddling:
        weights[[crossing.token for crossing in crossings if not crossing.held]] = 0
    return Encoded(known, weights, notes, headers[0].text if headers else "")


# ---- a tokenizer's folder ----

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_UNREADABLE = ("vocab.json", "vocab.txt")
# The first one found is taken; those that would have to be converted are refused as they are read.
_VOCABULARIES = (
    *("tokenizer.json", "tekken*.json", "tiktoken.model", "*.tiktoken", "tokenizer.model", "spiece.model"),
    *("*.model", "*.model.v*", *_UNREADABLE),
)


def _read_files(path: str | Path) -> TokenizerFiles:
    """Reads a tokenizer's folder, or the file with its vocabulary alone (beside which nothing else is read)."""
    place = Path(path)
    if place.is_dir():
        files = (file for pattern in _VOCABULARIES for file in sorted(place.glob(pattern)) if file.is_file())
        if (file := next(files, None)) is None:
            raise FormatError(f"{place}: holds no tokenizer.json, tekken.json, SentencePiece model or file of ranks")
        kind, spec, content = _read_vocabulary(file)
        config = _read_object(place / "tokenizer_config.json")
        settings, listed = _merged_settings(place, config, spec)
        special = _special_tokens(place, settings)
        extra = settings.get("extra_special_tokens") or []
        if not isinstance(extra, list):
            raise FormatError(f"{place}: extra_special_tokens must be a list or an object, found {extra!r:.80}")
        # In the order in which transformers adds them; listed ones that play a named part are always special.
        named = {*special.values()}
        additions = [
            token._replace(flags={**token.flags, "special": True}) if token.text in named else token for token in listed
        ]
        known = {token.text for token in listed}
        known |= {token["content"] for token in spec["added_tokens"]} if kind == "json" else set()
        texts = [*special.values(), *(_token_text(place, "extra_special_tokens", token) for token in extra)]
        for text in dict.fromkeys(texts):
            if text not in known:
                additions.append(AddedToken(-1, text, {"special": True, "normalized": False}))
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
    if file.name in _UNREADABLE:
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
    if dropout := model.get("dropout"):
        raise FormatError(f"{file}: model.dropout is {dropout}, so that every encoding is random; set it to null")
    spec["added_tokens"] = added = spec.get("added_tokens") or []
    if not isinstance(added, list) or not all(
        isinstance(token, dict) and isinstance(token.get("id"), int) and isinstance(token.get("content"), str)
        for token in added
    ):
        raise FormatError(f"{file}: added_tokens must be a list of objects with id and content")
    return "json", spec, b""


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
    """The settings that hold, and the added tokens they name in the order of their ids."""
    file, settings = folder / "tokenizer_config.json", dict[str, Any]()
    is_old = "added_tokens_decoder" not in config
    # In older folders the map has the last word, and tokens added later stand in a file of their own.
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
                raise FormatError(f"{file}: {text!r} must have a whole number, not {index!r}")
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
    """Named tokens first, then the model's own (``image_token`` ...): what templates may ask for."""
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
    """Files of their own win over the config's key, as in transformers; chat_template.json comes last."""
    templates = {file.stem: file for file in sorted((folder / "chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = folder / "chat_template.jinja"
    found: dict[str, str] = {}
    for name, file in templates.items():
        try:
            found[name] = _read_bytes(file).decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{file}: not UTF-8 at byte {error.start}; a template is UTF-8 text") from error
    if found:
        return found
    file, value = folder / "tokenizer_config.json", config.get("chat_template")
    if value is None:
        file = folder / "chat_template.json"
        if not file.exists():
            return {}
        if (value := _read_object(file).get("chat_template")) is None:
            raise FormatError(f"{file}: has no chat_template in it")
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}
    elif isinstance(value, str):
        value = {"default": value}
    if not isinstance(value, dict) or not all(isinstance(part, str) for pair in value.items() for part in pair):
        raise FormatError(f"{file}: chat_template must be a string or a list of {{name, template}} objects")
    return dict(value)
