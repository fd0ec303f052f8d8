"""Rendered text with spans to token ids with exact loss masks.

``load_tokenizer`` reads a local tokenizer, ``Tokenizer.encode`` tokenises. Every text is tokenised as one
string, as the model will see it, and the spans' characters are then followed to their tokens.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.tokenizer.originals import RankModel, SentencePieceModel, mistral_template
from megatron_sft_idx.chat.tokenizer.tokenizer_files import Backend, TokenizerFiles, read_tokenizer_files
from megatron_sft_idx.chat.tokenizer.tokens import Ids, JsonModel, Located, Passage
from megatron_sft_idx.chat.types import Encoded, Rendered, Span, TokenizedRow
from megatron_sft_idx.errors import FormatError, SequenceError


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
    if backend not in ("auto", "tokenizers", "gigatoken"):
        raise FormatError(f"backend: {backend!r} is not one of auto, tokenizers, gigatoken")
    if not parallel:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return Tokenizer(read_tokenizer_files(path), backend=backend, proof=proof)


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

    def __init__(self, files: TokenizerFiles, *, backend: Backend, proof: str = "") -> None:
        self._model: JsonModel | SentencePieceModel | RankModel
        self.proof = ""
        if files.kind == "json":
            self._model = model = JsonModel(files, backend=backend, proof=proof)
            self.proof = model.proof
        elif backend != "auto":
            raise FormatError(f"{files.path}: backend {backend} is for a tokenizer.json, this is {files.file.name}")
        else:
            self._model = SentencePieceModel(files) if files.kind == "sentencepiece" else RankModel(files)
        self._again = partial(load_tokenizer, files.path, backend=backend, proof=self.proof)
        self._file, self.chat_templates = files.file, files.templates
        self._added_texts = tuple(token.text for token in self._model.added if token.text)

        self.path = str(files.path)
        self.backend = self._model.name
        self.vocab_size = self._model.size
        # What the folder says of a token, be it that there is none, outweighs what the vocabulary does.
        named = {name: text for name, text in self._model.named.items() if name not in files.settings}
        self.special_tokens = named | files.special_tokens
        self.control_tokens = [token.text for token in self._model.added if token.special]
        self.eos_id, self.pad_id = (
            None if text is None else self._model.token_id(text)
            for text in map(self.special_tokens.get, ("eos_token", "pad_token"))
        )
        self.fingerprint = self._model.fingerprint

    def __reduce__(self) -> tuple[Any, ...]:
        return self._again, ()

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
                    found = _crossings(spellings.nbytes, ids, texts, [row.text for row in rows], spans, crossed)
                for at, i in enumerate(some):
                    if spelled[at] and (whole or not crossed[at]):
                        here = slice(bounds[at], bounds[at + 1])
                        result[i] = _weighed(rendered[i], flat[here], weights[here], found.get(at, []), straddling)
        for i in [i for i in range(len(rendered)) if i not in result]:  # any tokenizer, any text
            row = rendered[i]
            try:
                known, located = self._model.locate(Passage(row.text, row.literals))
            except ValueError as error:
                raise SequenceError("rendered", i, str(error)) from error
            mask, crossings = _weights_by_offsets(
                located, len(known), row.text, row.spans, whole_characters=whole_characters
            )
            result[i] = _weighed(row, known.view(np.int32), mask, crossings, straddling)
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

    def _encode_pieces(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        """Tokenises span by span: each piece of text is wholly trained on, or not at all.

        After a control token a tokenizer that begins texts with a space does what it always does there; elsewhere the
        text runs on.

        Raises:
            ValueError: spans descend, overlap or end past the text.
        """
        passages: list[Passage] = []
        places: list[tuple[int, float]] = []  # of each passage: its row and weight
        for index, row in enumerate(rendered):
            cuts: list[tuple[int, int, float]] = []
            done = 0
            for span in row.spans:
                if not done <= span.start <= span.stop <= len(row.text):
                    where = f"span [{span.start}, {span.stop}) descends, overlaps or ends past the text"
                    raise ValueError(f"row {index}: {where}")
                cuts += [(done, span.start, 0.0), (span.start, span.stop, span.weight)]
                done = span.stop
            for start, stop, weight in [*cuts, (done, len(row.text), 0.0)]:
                if start < stop:
                    inside = [
                        (max(a, start) - start, min(b, stop) - start) for a, b in row.literals if a < stop and b > start
                    ]
                    middle = start > 0 and not row.text.endswith(self._added_texts, 0, start)
                    passages.append(Passage(row.text[start:stop], inside, middle))
                    places.append((index, weight))
        ids = [[np.zeros(0, np.uint32)] for _ in rendered]
        masks = [[np.zeros(0, np.float32)] for _ in rendered]
        found = self._ids([index for index, _ in places], passages).rows()
        for (index, weight), some in zip(places, found, strict=True):
            ids[index].append(some)
            masks[index].append(np.full(len(some), weight, np.float32))
        return [
            _weighed(row, np.concatenate(ids[i]).view(np.int32), np.concatenate(masks[i]), [], True)
            for i, row in enumerate(rendered)
        ]


class Crossing(NamedTuple):
    """A token that is trained on and begins before its span.

    Attributes:
        token: its number in the text.
        before: what of it lies before the span.
        text: all that it spells.
        held: whether a span that is trained on holds its beginning too.
    """

    token: int
    before: str
    text: str
    held: bool


def _crossings(
    nbytes: NDArray[np.int64],
    ids: Ids,
    utf8: list[bytes],
    texts: Sequence[str],
    spans: list[list[Span]],
    straddling: list[int],
) -> dict[int, list[Crossing]]:
    """By text, the tokens that begin before a span that they are trained for; of texts that the tokens spell.

    Where ``straddling`` counts none, as ``weights`` found, none are looked for.
    """
    ends = np.cumsum(nbytes[ids.flat])
    bounds, base = ids.offsets.tolist(), 0
    wanted: list[tuple[int, Span, Span, int]] = []  # text, the span before, the span, its first byte
    bases = []
    for row, (data, text) in enumerate(zip(utf8, texts, strict=True)):
        bases.append(base)
        for before, span in pairwise([Span(0, 0), *spans[row]]) if straddling[row] else ():
            if span.weight and span.start < span.stop:
                at = span.start if len(data) == len(text) else len(text[: span.start].encode())
                wanted.append((row, before, span, base + at))
        base += len(data)
    begins = np.array([begin for *_, begin in wanted], np.int64)
    tokens = np.searchsorted(ends, begins, "right")
    firsts = np.where(tokens > 0, ends[np.maximum(tokens - 1, 0)], 0) if len(ends) else tokens
    found: dict[int, list[Crossing]] = {}
    for which in np.flatnonzero(firsts < begins).tolist():
        row, before, _, begin = wanted[which]
        token, first = int(tokens[which]), int(firsts[which]) - bases[row]
        held = bool(before.weight) and first < len(texts[row][: before.stop].encode())
        spelt = utf8[row][first : int(ends[token]) - bases[row]].decode("utf-8", "replace")
        begun = utf8[row][first : begin - bases[row]].decode("utf-8", "replace")
        found.setdefault(row, []).append(Crossing(token - bounds[row], begun, spelt, held))
    return found


def _weights_by_offsets(
    located: Located, count: int, text: str, spans: Sequence[Span], *, whole_characters: bool
) -> tuple[NDArray[np.float32], list[Crossing]]:
    """Weights of a text's ``count`` tokens by the library's own offsets, and the tokens that begin before their span.

    Raises:
        ValueError: spans descend, overlap or end past the text.
    """
    edges = [0, *(edge for span in spans for edge in (span.start, span.stop)), len(text)]
    if edges != sorted(edges):
        raise ValueError(f"spans descend, overlap or end past the text of {len(text)} characters: {spans!r:.200}")

    def first_token(characters: range) -> int | None:
        """The token that holds the first of the characters that any token holds."""
        return next((token for token in map(located.char_to_token, characters) if token is not None), None)

    def begin_of(token: int) -> int:
        return (located.token_to_chars(token) or (0, 0))[0]

    weights = np.zeros(count, np.float32)
    crossings = []
    done = 0
    for span in spans:
        first = first_token(range(span.start, span.stop))
        last = first_token(range(span.stop - 1, span.start - 1, -1))
        if first is None or last is None:
            continue
        while whole_characters and last + 1 < count and begin_of(last + 1) < span.stop:
            last += 1
        weights[first : last + 1] = np.maximum(weights[first : last + 1], np.float32(span.weight))
        begin = begin_of(first)
        if span.weight and begin < span.start:
            held = begin < done
            crossings.append(Crossing(first, text[begin : span.start], text[begin : span.start + 1], held))
        done = span.stop if span.weight else done
    return weights, crossings


def append_eod(encoded: Encoded, eod_id: int) -> Encoded:
    """The sequence with an end-of-document token, trained exactly when the token before it is."""
    weight = encoded.loss_mask[-1] if encoded.loss_mask.size else 0.0
    return replace(
        encoded,
        input_ids=np.append(encoded.input_ids, np.int32(eod_id)),
        loss_mask=np.append(encoded.loss_mask, np.float32(weight)),
    )


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
