"""Tokenizers without a tokenizer.json: SentencePiece models, tiktoken ranks, and Mistral's tekken.json.

Nothing is converted to a tokenizer.json, because a converter can change ids unnoticed. The library for which a file was
made also tokenises here, so its ids are right by definition. Missing information is taken from
``tokenizer_config.json``, or known from the name of the tokenizer. Code that came with a tokenizer is never run. The
control tokens written by a template are found first, and the stretches of text between them are tokenised.
"""

from __future__ import annotations

import re
from binascii import a2b_base64
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.chat.tokenizer.passages import AddedTokens, Located, Passage
from megatron_sft_idx.chat.tokenizer.spellings import TokenSpellings
from megatron_sft_idx.chat.tokenizer.tokenizer_files import AddedToken, TokenizerFiles, refuse
from megatron_sft_idx.errors import FormatError

# Tokenizer classes of transformers that keep a SentencePiece model's ids, and whether each stretch of text between
# control tokens gets the space that such models put before a text (True), or only the first stretch of the text.
# ``legacy`` in tokenizer_config.json overrides this. Other classes renumber the pieces, or do more in code.
SPACE_BEFORE_EVERY_STRETCH = {
    "LlamaTokenizer": False,
    "CodeLlamaTokenizer": False,
    "GemmaTokenizer": False,
    "T5Tokenizer": True,
}

# Moonshot's Kimi and Moonlight have a file of ranks and a class TikTokenTokenizer. The class splits text like this,
# reserves 256 ids for control tokens, and divides long texts and long runs of white space or of anything else.
KIMI_CODE = ("tokenization_kimi", "tokenization_moonshot")
KIMI_SPLIT = (
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
KIMI_RESERVED, KIMI_LONGEST_TEXT, KIMI_LONGEST_RUN = 256, 400_000, 25_000

# The first control tokens of a tekken.json that does not list them; later ones are named <SPECIAL_20> and so on.
TEKKEN_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
TEKKEN_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
TEKKEN_VERSIONS_WITHOUT_LIST = ("v1", "v2", "v3", "v7")


class SentencePieceModel:
    """A SentencePiece model, tokenised by the sentencepiece library, with the methods and attributes of ``JsonModel``.

    Raises:
        FormatError: the library is missing, the file is damaged, or the folder requires more than the model does.
    """

    name = "sentencepiece"
    spellings = None  # a model may normalize text or not know a character, so tokens need not spell the text

    def __init__(self, files: TokenizerFiles) -> None:
        library = _library("sentencepiece", files.file)
        settings = files.settings
        name = str(settings.get("tokenizer_class") or "").removesuffix("Fast")
        if "auto_map" in settings or (name and name not in SPACE_BEFORE_EVERY_STRETCH):
            why = "its code, which is not run here, defines how pieces become ids"
            refuse(files.file, f"tokenizer_class {name or None}: {why}", code="auto_map" in settings)
        try:
            self._spacing = whole = library.SentencePieceProcessor(model_proto=files.content)
        except Exception as error:
            raise FormatError(f"{files.file}: sentencepiece cannot load it: {error}; download it again") from error
        if not hasattr(whole, "encode_as_offset_mapping"):
            raise FormatError(f"{files.file}: needs sentencepiece 0.2.2 or later: pip install -U sentencepiece")
        # In protocol buffers, the last of repeated parts counts: this one sets add_dummy_prefix to false.
        self._spaceless = library.SentencePieceProcessor(model_proto=files.content + b"\x1a\x02\x18\x00")
        self._spaces_every_stretch = bool(settings.get("legacy", SPACE_BEFORE_EVERY_STRETCH.get(name, False)))
        if settings.get("add_prefix_space") is False:
            self._spacing, self._spaces_every_stretch = self._spaceless, False
        pieces = [whole.id_to_piece(i) for i in range(whole.get_piece_size())]
        self._ids = {piece: i for i, piece in enumerate(pieces)}
        own = [
            AddedToken(i, pieces[i], {"special": True})
            for i in self._ids.values()
            if whole.is_control(i) or whole.is_unknown(i)
        ]
        self.added = _added(files, own, self._ids, len(pieces))
        self._ids |= {token.text: token.number for token in self.added}
        self.named = {
            f"{role}_token": pieces[index]
            for role in ("bos", "eos", "unk", "pad")
            if 0 <= (index := getattr(whole, f"{role}_id")()) < len(pieces)
        }
        self._control = AddedTokens(self.added)
        # Ids that text of the data must not become. The unknown token is allowed: any unknown character becomes it.
        self._forbidden_in_data = {token.number for token in self.added} - {whole.unk_id()}
        # Pieces that are bytes are named <0x41>.
        spelled = {token.number: token.text.replace("\u2581", " ").encode() for token in self.added}
        for i, piece in enumerate(pieces):
            spelled[i] = bytes([int(piece[3:5], 16)]) if whole.is_byte(i) else piece.replace("\u2581", " ").encode()
        self._spelled = TokenSpellings(spelled)
        self.size = max(spelled) + 1
        self._begins_with_space = self._spacing.encode("x")[:1] != self._spaceless.encode("x")[:1]
        options = [self._spaces_every_stretch, self._begins_with_space]
        self.fingerprint = _fingerprint("sentencepiece", files.content, options, self.added)

    def ids(self, passages: Sequence[Passage]) -> list[NDArray[np.uint32]]:
        """See ``JsonModel.ids``."""
        return [self.locate(passage)[0] for passage in passages]

    def locate(self, passage: Passage) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """See ``JsonModel.locate``."""

        def encode_text(text: str, start: int) -> Located:
            spaced = self._spaces_every_stretch if start else not passage.middle
            found = (self._spacing if spaced else self._spaceless).encode_as_offset_mapping(text)
            # The model itself finds user-defined pieces in any text, so control tokens among them cannot be prevented.
            if passage.literals and not self._forbidden_in_data.isdisjoint(found["ids"]):
                raise ValueError(
                    "control tokens in the data cannot be kept as text: this tokenizer always recognizes them"
                )
            return found["ids"], found["offsets"]

        ids, edges = self._control.encode(passage, encode_text)
        # If several pieces spell one character, the library assigns it only to the last one; here all of them have it.
        # The space that the model put before a text has no character of the text; it gets the characters of the next
        # piece.
        for i in range(len(ids) - 2, -1, -1):
            begin, end = edges[i]
            if begin == end == edges[i + 1][0]:
                edges[i] = edges[i + 1]
        return np.array(ids, np.uint32), np.array(edges, np.int64).reshape(len(ids), 2)

    def token_id(self, text: str) -> int | None:
        """See ``JsonModel.token_id``."""
        return self._ids.get(text)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """See ``JsonModel.decode``. The space that the model put before a text is removed."""
        text = self._spelled.spell(ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._begins_with_space else text


class RankModel:
    """A file of ranks or a tekken.json, tokenised by tiktoken, with the methods and attributes of ``JsonModel``.

    Raises:
        FormatError: the library is missing, the file is damaged, or the way the tokenizer splits text is unknown.
    """

    name = "tiktoken"

    def __init__(self, files: TokenizerFiles) -> None:
        library = _library("tiktoken", files.file)
        self.named: dict[str, str] = {}
        if files.kind == "tekken":
            ranks, pattern, self._id_of_rank_0, own = _read_tekken(files)
            reserved = 0
            texts = {token.text for token in own}
            self.named = {name: text for name, text in TEKKEN_NAMED.items() if text in texts}
        else:
            pattern, reserved = _split_of(files)
            ranks, self._id_of_rank_0 = _read_ranks(files), 0
            taken = {token.number for token in files.additions}
            free = (index for index in range(len(ranks), len(ranks) + reserved) if index not in taken)
            own = [AddedToken(index, f"<|reserved_token_{index}|>", {"special": True}) for index in free]
        self._cut = bool(reserved)
        spellings = {rank + self._id_of_rank_0: token for token, rank in ranks.items()}
        for token in files.additions:
            if token.number in spellings:
                where = f"{files.path}: {token.text!r} has the id {token.number}"
                raise FormatError(f"{where}, which is a token of the model")
        self.added = _added(files, own, {}, 1 + max([*spellings, *(token.number for token in own)]))
        spellings.update((token.number, token.text.encode()) for token in self.added)
        try:
            self._library = library.Encoding(files.file.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        except Exception as error:
            raise FormatError(f"{files.file}: tiktoken cannot load it: {error}") from error
        self._added_ids = {token.text: token.number for token in self.added}
        self._control = AddedTokens(self.added)
        self.spellings = TokenSpellings(spellings)
        self.size = max(spellings) + 1
        content = np.array([(rank, len(token)) for token, rank in ranks.items()], np.int64).tobytes() + b"".join(ranks)
        self.fingerprint = _fingerprint("tiktoken", content, [pattern, self._id_of_rank_0, self._cut], self.added)

    def ids(self, passages: Sequence[Passage]) -> list[NDArray[np.uint32]]:
        """See ``JsonModel.ids``."""
        return [self._ids_of(passage) for passage in passages]

    def locate(self, passage: Passage) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """See ``JsonModel.locate``."""
        ids = self._ids_of(passage)
        return ids, self.spellings.edges(ids, passage.text.encode())

    def token_id(self, text: str) -> int | None:
        """See ``JsonModel.token_id``."""
        return self._added_ids.get(text)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """See ``JsonModel.decode``."""
        return self.spellings.spell(ids).decode("utf-8", "replace")

    def _ids_of(self, passage: Passage) -> NDArray[np.uint32]:
        cuts = [0, *(_kimi_cuts(passage.text) if self._cut else ()), len(passage.text)]
        pieces = [passage.stretch(start, stop, middle=False) for start, stop in pairwise(cuts)]
        ids = [index for piece in pieces for index in self._control.encode(piece, self._encode_text)[0]]
        return np.array(ids, np.uint32)

    def _encode_text(self, text: str, start: int) -> Located:
        try:
            ranks = self._library.encode_to_numpy(text, disallowed_special=())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is a BaseException
            raise ValueError(f"tiktoken cannot tokenize {text!r:.40}, of {len(text)} characters: {error}") from error
        ids = ranks + np.uint32(self._id_of_rank_0)
        if self.spellings.nbytes[ids].sum() != len(text.encode()):
            raise ValueError(
                f"tiktoken drops a part of {text!r:.80}, because the tokenizer's pattern does not match it"
            )
        return ids.tolist(), ()


def mistral_template(file: Path) -> str | None:
    """Return the chat template that mistral-common generates for a file of Mistral; None if it cannot.

    It depends on the version of the file, which is in the file (``tekken.json``) or its name (``tokenizer.model.v3``).
    """
    if file.suffix != ".json" and not re.search(r"\.model\.v\d+(m\d+)?$", file.name):
        return None
    try:
        generator = import_module("mistral_common.integrations.chat_templates.chat_templates")
        return str(generator.convert_tokenizer_to_chat_template(file))
    except Exception:  # not installed, too old, or no template for this version: the user is asked for one
        return None


def _library(name: str, file: Path) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise FormatError(
            f"{file}: reading it needs {name}, which is not installed: pip install 'megatron-sft-idx[tokenizers]'"
        ) from error


def _added(
    files: TokenizerFiles, own: Sequence[AddedToken], pieces: Mapping[str, int], next_index: int
) -> list[AddedToken]:
    """Return the control tokens of the vocabulary and of the other files, in order of ids."""
    tokens = {token.text: token for token in own}
    names = {index: text for text, index in pieces.items()} | {token.number: token.text for token in own}
    for number, text, flags in files.additions:
        for flag in ("lstrip", "rstrip", "single_word"):
            if flags.get(flag):
                refuse(files.file, f"{text!r} has {flag} set, which is only supported in a tokenizer.json")
        index = tokens[text].number if text in tokens else pieces.get(text, number)
        index = next_index if index < 0 else index
        found = names.get(index, text)
        if number not in (-1, index) or found != text:
            where = f"{files.path}: {text!r} has the id {number}"
            raise FormatError(
                f"{where}, but in {files.file.name}, {index} is {found!r}; do the files belong to the same tokenizer?"
            )
        names[index] = text
        tokens[text] = AddedToken(index, text, flags)
        next_index = max(next_index, index + 1)
    return sorted((token for token in tokens.values() if token.text), key=lambda token: token.number)


def _fingerprint(kind: str, content: bytes, options: list[Any], added: Sequence[AddedToken]) -> str:
    tokens = [[token.number, token.text, token.special] for token in added]
    return xxhash.xxh3_128_hexdigest(orjson.dumps([kind, xxhash.xxh3_128_hexdigest(content), options, tokens]))


def _read_ranks(files: TokenizerFiles) -> dict[bytes, int]:
    """Read the ranks from a file whose lines have a token in base64 and its rank."""
    line = rb"([A-Za-z0-9+/]+=*) (\d+)\r?"
    pairs = re.findall(rb"(?m)^" + line + rb"$", files.content)
    lines = files.content.splitlines()
    try:
        if len(pairs) != len(lines):
            at = next(at for at, text in enumerate(lines) if not re.fullmatch(line, text))
            raise ValueError(f"line {at + 1} is not a token with its rank: {lines[at]!r:.60}")
        ranks = {a2b_base64(token): int(rank) for token, rank in pairs}
    except ValueError as error:
        raise FormatError(f"{files.file}: {error}; download it again") from error
    return _checked_ranks(files, ranks, len(lines))


def _checked_ranks(files: TokenizerFiles, ranks: dict[bytes, int], count: int) -> dict[bytes, int]:
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise FormatError(f"{files.file}: no token for the single byte {missing:#04x}; is the file truncated?")
    if not count == len(ranks) == len(set(ranks.values())):
        raise FormatError(f"{files.file}: a token or a rank occurs twice; download it again")
    return ranks


def _split_of(files: TokenizerFiles) -> tuple[str, int]:
    """Return how text is split, which is not in a file of ranks, and how many ids are reserved after the ranks.

    Returns:
        The pattern, and the minimum number of ids after the ranks that are control tokens.
    """
    pattern = files.settings.get("pat_str")
    if isinstance(pattern, str):
        return pattern, 0
    auto_map = files.settings.get("auto_map")
    code = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else None
    code = next((str(part) for part in code if part), None) if isinstance(code, list) else code
    module = str(code).split("--")[-1].split(".")[0] if code else KIMI_CODE[0]
    name = files.settings.get("tokenizer_class")
    if name == "TikTokenTokenizer" and module in KIMI_CODE:
        # The code, if present, must match the known version. It is read, and never run.
        file = files.path / f"{module}.py"
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None
        numbers = map(str, (KIMI_RESERVED, KIMI_LONGEST_TEXT, KIMI_LONGEST_RUN))
        if text is None or (
            all(part in text for part in KIMI_SPLIT) and all(one in text.replace("_", "") for one in numbers)
        ):
            return "|".join(KIMI_SPLIT), KIMI_RESERVED
    where = f"{module}.py" if code else "the code of its tokenizer"
    raise FormatError(
        f"{files.file}: a tiktoken file, tokenizer_class {name}: the pattern that splits text is in {where}, which is"
        ' not run here; put the pattern as "pat_str" and the control tokens as "added_tokens_decoder" into a'
        " tokenizer_config.json next to the file, and pass the folder as the tokenizer"
    )


def _kimi_cuts(text: str) -> list[int]:
    """Return where Kimi's tokenizer divides long texts, and long runs of white space or others, before it splits."""
    cuts = []
    for start in range(0, len(text), KIMI_LONGEST_TEXT):
        stop = min(start + KIMI_LONGEST_TEXT, len(text))
        cuts += [start] if start else []
        if stop - start > KIMI_LONGEST_RUN:
            for run in re.compile(r"\s+|\S+").finditer(text, start, stop):
                cuts += range(run.start() + KIMI_LONGEST_RUN, run.end(), KIMI_LONGEST_RUN)
    return cuts


def _read_tekken(files: TokenizerFiles) -> tuple[dict[bytes, int], str, int, list[AddedToken]]:
    """Return ranks, split pattern, number of control tokens (which have the first ids), and the control tokens."""
    try:
        config = files.spec["config"]
        pattern, size, count = config["pattern"], config["default_vocab_size"], config["default_num_special_tokens"]
        listed: Any = files.spec.get("special_tokens")
        if listed is None and config.get("version") in TEKKEN_VERSIONS_WITHOUT_LIST:
            listed = [{"rank": rank, "token_str": text} for rank, text in enumerate(TEKKEN_TOKENS[:count])]
        vocabulary = files.spec["vocab"][: size - count]
        ranks = {a2b_base64(token["token_bytes"]): int(token["rank"]) for token in vocabulary}
        texts = {int(token["rank"]): str(token["token_str"]) for token in listed}
        is_whole = isinstance(pattern, str) and [*ranks.values()] == [*range(len(ranks))] and len(ranks) == size - count
        is_whole &= 0 < len(set(texts.values())) == len(listed) and all(0 <= rank < count for rank in texts)
    except (TypeError, KeyError, ValueError):
        is_whole = False
    if not is_whole:
        raise FormatError(
            f"{files.file}: expected a config with pattern, default_vocab_size and default_num_special_tokens, and"
            " each rank from 0 exactly once in vocab and special_tokens; download it again, or convert it if it is"
            " newer"
        )
    own = [AddedToken(rank, texts.get(rank, f"<SPECIAL_{rank}>"), {"special": True}) for rank in range(count)]
    return _checked_ranks(files, ranks, len(ranks)), pattern, count, own
