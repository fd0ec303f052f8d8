"""Rendered text with spans to token ids with exact loss masks.

``load_tokenizer`` reads a local tokenizer, ``Tokenizer.encode`` tokenises. Every text is tokenised as one
string, as the model will see it, and the spans' characters are then followed to their tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
import tokenizers
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.chat.tokenizer.engines import Engine, TokenizersEngine, build_tokenizer, middle_spec
from megatron_sft_idx.chat.tokenizer.fast_engine import load_fast_engine
from megatron_sft_idx.chat.tokenizer.shield import Shield
from megatron_sft_idx.chat.tokenizer.span_pieces import Piece, cut_at_spans
from megatron_sft_idx.chat.tokenizer.token_masks import Crossing, spelling_table, unknown_id, weights_by_offsets
from megatron_sft_idx.chat.tokenizer.tokenizer_files import AddedTokenSpec, TokenizerFiles, read_tokenizer_files
from megatron_sft_idx.chat.types import Encoded, Rendered, TokenizedRow
from megatron_sft_idx.errors import FormatError, SequenceError

__all__ = ["Backend", "Tokenizer", "append_eod", "load_tokenizer"]

Backend = Literal["auto", "tokenizers", "gigatoken"]


def load_tokenizer(path: str | Path, *, backend: Backend = "auto", parallel: bool = False) -> Tokenizer:
    """Loads a tokenizer from a local folder in Hugging Face's layout, or from a ``tokenizer.json`` alone.

    Args:
        path: the folder or file; nothing is ever downloaded.
        backend: ``auto`` takes gigatoken where it is installed and known to give the same ids, tokenizers
            otherwise; ``gigatoken`` fails where it cannot be taken.
        parallel: tokenise a batch on all cores. Off, this process keeps to one thread, which it asks of the
            tokenizers library through ``TOKENIZERS_PARALLELISM`` unless the environment already sets that.

    Raises:
        FormatError: what is missing or broken, and what to do about it.
    """
    if backend not in ("auto", "tokenizers", "gigatoken"):
        raise FormatError(f"backend: {backend!r} is not one of auto, tokenizers, gigatoken")
    if not parallel:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return Tokenizer(read_tokenizer_files(path), backend=backend, parallel=parallel)


class Tokenizer:
    """A loaded tokenizer. Pickles as its path and options, and is loaded again on the other side.

    Attributes:
        path: where it came from.
        backend: the library that tokenises, ``gigatoken`` or ``tokenizers``.
        vocab_size: the largest id + 1, added tokens included.
        special_tokens: template variables (``bos_token``, ``eos_token`` ...) as transformers passes them.
        control_tokens: texts of the added tokens that are special, by id.
        eos_id: id of ``eos_token``, None where the tokenizer names none.
        pad_id: id of ``pad_token``, None where the tokenizer names none.
        chat_templates: the templates that came with it, by name.
        fingerprint: xxh3_128 of what decides the ids, the same for a folder and its tokenizer.json unless the
            folder's other files change the added tokens.
    """

    def __init__(self, files: TokenizerFiles, *, backend: Backend, parallel: bool) -> None:
        self._options = (files.path, backend, parallel)
        self.path = str(files.path)
        try:
            self._tokenizer = build_tokenizer(files.spec)
        except Exception as error:
            raise FormatError(f"{files.path}: the tokenizers library cannot load it: {error}") from error
        before = _added_tokens(self._tokenizer)
        self._tokenizer.add_tokens([_added_token(token) for token in files.additions])
        after = _added_tokens(self._tokenizer)
        self._spec: dict[str, Any] = orjson.loads(self._tokenizer.to_str())
        self._spellings = spelling_table(self._tokenizer, self._spec.get("pre_tokenizer"))
        self._engine = self._choose_engine(backend, parallel)
        self._added_texts = tuple(text for _, text, _ in after if text)
        self._has_prefix = middle_spec(self._spec) != self._spec
        self._variants: dict[bool, tokenizers.Tokenizer] = {False: self._tokenizer}
        self._shields: dict[bool, Shield] = {}

        self.backend = self._engine.name
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.special_tokens = files.special_tokens
        self.control_tokens = [text for _, text, token in after if token["special"]]
        self.eos_id = self._named_id("eos_token")
        self.pad_id = self._named_id("pad_token")
        self.chat_templates = files.templates
        self.fingerprint = _fingerprint(files.spec, [] if after == before else after)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reload, self._options

    @property
    def chat_template(self) -> str | None:
        """The default template, or the only one; None where there is none, or several without a default."""
        if len(self.chat_templates) == 1:
            return next(iter(self.chat_templates.values()))
        return self.chat_templates.get("default")

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
        """
        utf8 = [_utf8(i, row.text) for i, row in enumerate(rendered)]
        if span_by_span:
            return self._encode_pieces(rendered)
        result: dict[int, Encoded] = {}
        if self._spellings is not None:
            plain = [i for i, row in enumerate(rendered) if not row.literals]
            ids = self._engine.ids([rendered[i].text for i in plain], [utf8[i] for i in plain])
            weights, crossed, spelled = self._spellings.weights(
                ids,
                [utf8[i] for i in plain],
                [rendered[i].spans for i in plain],
                whole_characters=whole_characters,
            )
            flat = ids.flat.view(np.int32)
            bounds = ids.offsets.tolist()
            found: dict[int, list[Crossing]] = {}
            whole = all(spelled)
            if whole and any(crossed):
                rows = [rendered[i] for i in plain]
                found = self._spellings.crossings(
                    ids, [utf8[i] for i in plain], [row.text for row in rows], [row.spans for row in rows]
                )
            for at, i in enumerate(plain):
                if spelled[at] and (whole or not crossed[at]):
                    here = slice(bounds[at], bounds[at + 1])
                    result[i] = _weighed(rendered[i], flat[here], weights[here], found.get(at, []), straddling)
        for i in [i for i in range(len(rendered)) if i not in result]:
            result[i] = self._encode_slowly(i, rendered[i], whole_characters, straddling)
        return [result[i] for i in range(len(rendered))]

    def from_token_row(self, row: TokenizedRow) -> Encoded:
        """A row that came tokenised, its ids checked against the vocabulary.

        Raises:
            ValueError: which id is outside, or that ids and mask do not match.
        """
        ids = np.asarray(row.input_ids)
        if ids.shape != row.loss_mask.shape or ids.ndim != 1:
            raise ValueError(f"input_ids of shape {ids.shape} beside a loss mask of shape {row.loss_mask.shape}")
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
        if self._spellings is not None:
            return self._spellings.spell(ids).decode("utf-8", "replace")
        return "".join(
            self._tokenizer.decode(some, skip_special_tokens=False) if known else "".join(map(unknown_id, some))
            for known, some in ((known, list(run)) for known, run in groupby(np.asarray(ids).tolist(), self._is_token))
        )

    def _is_token(self, index: int) -> bool:
        return 0 <= index < self.vocab_size and self._tokenizer.id_to_token(index) is not None

    def token_text(self, index: int) -> str:
        """One token's text; where that is nothing on its own, the vocabulary's name for it."""
        return self.decode([index]) or str(self._tokenizer.id_to_token(index) or "")

    def _choose_engine(self, backend: Backend, parallel: bool) -> Engine:
        if backend != "tokenizers":
            engine, reason = load_fast_engine(self._spec, self._tokenizer, parallel=parallel)
            if engine is not None:
                return engine
            if backend == "gigatoken":
                raise FormatError(f"{self.path}: {reason}")
        return TokenizersEngine(self._tokenizer)

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        index = None if text is None else self._tokenizer.token_to_id(text)
        return None if index is None else int(index)

    def _encode_slowly(self, index: int, row: Rendered, whole_characters: bool, straddling: bool) -> Encoded:
        """By the library's own offsets: any tokenizer, any text."""
        position: Callable[[int], int] = int
        if row.literals:
            try:
                shielded, encoding, ids = self._shield(False).encode(row.text, row.literals)
            except ValueError as error:
                raise SequenceError("rendered", index, str(error)) from error
            position = shielded.position
        else:
            encoding = self._tokenizer.encode(row.text, add_special_tokens=False)
            ids = np.array(encoding.ids, np.uint32)
        weights, crossings = weights_by_offsets(
            encoding, row.text, row.spans, whole_characters=whole_characters, position=position
        )
        return _weighed(row, ids.view(np.int32), weights, crossings, straddling)

    def _encode_pieces(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        """Tokenises span by span: each piece of text is wholly trained on, or not at all."""
        pieces = [piece for i, row in enumerate(rendered) for piece in cut_at_spans(i, row, self._added_texts)]
        ids = self._piece_ids(pieces)
        rows: list[list[int]] = [[] for _ in rendered]
        for at, piece in enumerate(pieces):
            rows[piece.row].append(at)
        empty = np.zeros(0, np.uint32)
        result = []
        for row, members in zip(rendered, rows, strict=True):
            weights = [np.full(len(ids[at]), pieces[at].weight, np.float32) for at in members]
            flat = np.concatenate([empty, *(ids[at] for at in members)])
            mask = np.concatenate([empty.astype(np.float32), *weights])
            result.append(_weighed(row, flat.view(np.int32), mask, [], True))
        return result

    def _piece_ids(self, pieces: Sequence[Piece]) -> list[NDArray[np.uint32]]:
        """Ids by piece; in the middle of a text no space is put in front, where the tokenizer does that."""
        result: dict[int, NDArray[np.uint32]] = {}
        plain = [at for at, p in enumerate(pieces) if not p.literals and not (p.middle and self._has_prefix)]
        texts = [pieces[at].text for at in plain]
        for at, ids in zip(plain, self._engine.ids(texts, [t.encode() for t in texts]).rows(), strict=True):
            result[at] = ids
        for at, piece in enumerate(pieces):
            middle = piece.middle and self._has_prefix
            if piece.literals:
                try:
                    result[at] = self._shield(middle).encode(piece.text, piece.literals)[2]
                except ValueError as error:
                    raise SequenceError("rendered", piece.row, str(error)) from error
            elif at not in result:
                encoding = self._variant(middle).encode(piece.text, add_special_tokens=False)
                result[at] = np.array(encoding.ids, np.uint32)
        return [result[at] for at in range(len(pieces))]

    def _variant(self, middle: bool) -> tokenizers.Tokenizer:
        if middle not in self._variants:
            self._variants[middle] = build_tokenizer(middle_spec(self._spec))
        return self._variants[middle]

    def _shield(self, middle: bool) -> Shield:
        if middle not in self._shields:
            self._shields[middle] = Shield(middle_spec(self._spec) if middle else self._spec)
        return self._shields[middle]


def append_eod(encoded: Encoded, eod_id: int) -> Encoded:
    """The sequence with an end-of-document token, trained exactly when the token before it is."""
    weight = encoded.loss_mask[-1] if encoded.loss_mask.size else 0.0
    return replace(
        encoded,
        input_ids=np.append(encoded.input_ids, np.int32(eod_id)),
        loss_mask=np.append(encoded.loss_mask, np.float32(weight)),
    )


def _reload(path: Path, backend: Backend, parallel: bool) -> Tokenizer:
    return load_tokenizer(path, backend=backend, parallel=parallel)


def _utf8(index: int, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        found = ascii(text[error.start])
        reason = f"character {error.start} is {found}, half of a surrogate pair, which no text can hold"
        raise SequenceError("rendered", index, reason) from error


def _weighed(
    row: Rendered,
    ids: NDArray[np.int32],
    weights: NDArray[np.float32],
    crossings: Sequence[Crossing],
    straddling: bool,
) -> Encoded:
    """One sequence; without ``straddling``, tokens that begin before their span do not count."""
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
    return Encoded(ids, weights, notes, headers[0].text if headers else "")


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
