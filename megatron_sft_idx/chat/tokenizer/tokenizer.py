"""Rendered text with spans to token ids with exact loss masks.

``load_tokenizer`` reads a local tokenizer, ``Tokenizer.encode`` tokenises. Every text is tokenised as one
string, as the model will see it, and the spans' characters are then followed to their tokens.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.tokenizer.originals import RankModel, SentencePieceModel, mistral_template
from megatron_sft_idx.chat.tokenizer.tokenizer_files import Backend, JsonModel, TokenizerFiles, read_tokenizer_files
from megatron_sft_idx.chat.tokenizer.tokens import Crossing, Ids, Model, Passage, weights_by_offsets
from megatron_sft_idx.chat.types import Encoded, Rendered, TokenizedRow
from megatron_sft_idx.errors import FormatError, SequenceError

__all__ = ["Backend", "Tokenizer", "append_eod", "load_tokenizer"]


def load_tokenizer(
    path: str | Path, *, backend: Backend = "auto", parallel: bool = False, proof: str = ""
) -> Tokenizer:
    """Loads a tokenizer from a local folder in Hugging Face's layout, or from the file with its vocabulary alone.

    That is a ``tokenizer.json``, a SentencePiece model, ranks of tiktoken's or a ``tekken.json``.

    Args:
        path: the folder or file; nothing is ever downloaded, and no code that came with it is run.
        backend: of a ``tokenizer.json``. ``auto`` takes gigatoken where it is installed and known to give the same
            ids, tokenizers otherwise; ``gigatoken`` fails where it cannot be taken.
        parallel: tokenise a batch on all cores. Off, this process keeps to one thread, which it asks of the
            tokenizers library through ``TOKENIZERS_PARALLELISM`` unless the environment already sets that.
        proof: that of the tokenizer as loaded before, perhaps in another process: what it proved is not proved again.

    Raises:
        FormatError: what is missing or broken, and what to do about it.
    """
    if backend not in ("auto", "tokenizers", "gigatoken"):
        raise FormatError(f"backend: {backend!r} is not one of auto, tokenizers, gigatoken")
    if not parallel:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return Tokenizer(read_tokenizer_files(path), backend=backend, parallel=parallel, proof=proof)


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
        proof: for ``load_tokenizer``, where the same tokenizer is loaded again.
        fingerprint: xxh3_128 of what decides the ids, the same for a folder and its tokenizer.json unless the
            folder's other files change the added tokens.
    """

    def __init__(self, files: TokenizerFiles, *, backend: Backend, parallel: bool, proof: str = "") -> None:
        self._model: Model
        self.proof = ""
        if files.kind == "json":
            self._model = model = JsonModel(files, backend=backend, parallel=parallel, proof=proof)
            self.proof = model.proof
        elif backend != "auto":
            raise FormatError(f"{files.path}: backend {backend} is for a tokenizer.json, this is {files.file.name}")
        else:
            self._model = SentencePieceModel(files) if files.kind == "sentencepiece" else RankModel(files)
        self._options = (files.path, backend, parallel, self.proof)
        self._file, self.chat_templates = files.file, files.templates
        self._added_texts = tuple(token.text for token in self._model.added if token.text)

        self.path = str(files.path)
        self.backend = self._model.name
        self.vocab_size = self._model.size
        # What the folder says of a token, be it that there is none, outweighs what the vocabulary does.
        named = {name: text for name, text in self._model.named.items() if name not in files.settings}
        self.special_tokens = named | files.special_tokens
        self.control_tokens = [token.text for token in self._model.added if token.special]
        self.eos_id = self._named_id("eos_token")
        self.pad_id = self._named_id("pad_token")
        self.fingerprint = self._model.fingerprint

    def __reduce__(self) -> tuple[Any, ...]:
        return _reload, self._options

    @cached_property
    def generated_template(self) -> str | None:
        """Of Mistral's files that came without a template, the one that mistral-common makes, which takes seconds."""
        return None if self.chat_templates else mistral_template(self._file)

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
        spellings = self._model.spellings
        if spellings is not None:
            plain = [i for i, row in enumerate(rendered) if not row.literals]
            for some in [plain, *([i] for i, row in enumerate(rendered) if row.literals)]:
                rows, texts = [rendered[i] for i in some], [utf8[i] for i in some]
                ids = self._ids(some, [Passage(row.text, row.literals) for row in rows])
                spans = [row.spans for row in rows]
                weights, crossed, spelled = spellings.weights(ids, texts, spans, whole_characters=whole_characters)
                flat, bounds = ids.flat.view(np.int32), ids.offsets.tolist()
                found: dict[int, list[Crossing]] = {}
                whole = all(spelled)
                if whole and any(crossed):
                    found = spellings.crossings(ids, texts, [row.text for row in rows], spans, crossed)
                for at, i in enumerate(some):
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
        return self._model.decode(ids)

    def token_text(self, index: int) -> str:
        """One token's text; where that is nothing on its own, the vocabulary's name for it."""
        return self.decode([index]) or self._model.token_name(index) or ""

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._model.token_id(text)

    def _ids(self, rows: Sequence[int], passages: Sequence[Passage]) -> Ids:
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

    def _encode_slowly(self, index: int, row: Rendered, whole_characters: bool, straddling: bool) -> Encoded:
        """By the library's own offsets: any tokenizer, any text."""
        try:
            ids, located, position = self._model.locate(Passage(row.text, row.literals))
        except ValueError as error:
            raise SequenceError("rendered", index, str(error)) from error
        weights, crossings = weights_by_offsets(
            located, row.text, row.spans, whole_characters=whole_characters, position=position
        )
        return _weighed(row, ids.view(np.int32), weights, crossings, straddling)

    def _encode_pieces(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        """Tokenises span by span: each piece of text is wholly trained on, or not at all."""
        pieces = [piece for i, row in enumerate(rendered) for piece in _cut_at_spans(i, row, self._added_texts)]
        ids = self._ids([piece.row for piece in pieces], [piece.passage for piece in pieces]).rows()
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


class _Piece(NamedTuple):
    """A part of the text of one row that is wholly trained on with ``weight``, or not at all (0)."""

    row: int
    passage: Passage
    weight: float


def _cut_at_spans(index: int, row: Rendered, added_tokens: tuple[str, ...]) -> list[_Piece]:
    """The pieces of one text, in order, cut at the edges of its spans; none is empty.

    After a control token a tokenizer that begins texts with a space does what it always does there; elsewhere the text
    runs on.

    Raises:
        ValueError: spans descend, overlap or end past the text.
    """
    cuts: list[tuple[int, int, float]] = []
    done = 0
    for span in row.spans:
        if not done <= span.start <= span.stop <= len(row.text):
            raise ValueError(f"row {index}: span [{span.start}, {span.stop}) descends, overlaps or ends past the text")
        cuts += [(done, span.start, 0.0), (span.start, span.stop, span.weight)]
        done = span.stop
    cuts.append((done, len(row.text), 0.0))
    pieces = []
    for start, stop, weight in cuts:
        if start < stop:
            inside = [(max(a, start) - start, min(b, stop) - start) for a, b in row.literals if a < stop and b > start]
            middle = start > 0 and not row.text.endswith(added_tokens, 0, start)
            pieces.append(_Piece(index, Passage(row.text[start:stop], inside, middle), weight))
    return pieces


def append_eod(encoded: Encoded, eod_id: int) -> Encoded:
    """The sequence with an end-of-document token, trained exactly when the token before it is."""
    weight = encoded.loss_mask[-1] if encoded.loss_mask.size else 0.0
    return replace(
        encoded,
        input_ids=np.append(encoded.input_ids, np.int32(eod_id)),
        loss_mask=np.append(encoded.loss_mask, np.float32(weight)),
    )


def _reload(path: Path, backend: Backend, parallel: bool, proof: str) -> Tokenizer:
    return load_tokenizer(path, backend=backend, parallel=parallel, proof=proof)


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
    if not (crossings or row.literals):
        return Encoded(ids, weights, row.notes)
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
