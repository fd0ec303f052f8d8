"""Text with spans to token ids with exact loss masks, by the tokenizer of a local folder or file.

``load_tokenizer`` loads it: ``tokenizer_files`` reads what the files say, and one of three models (``JsonModel``,
``SentencePieceModel``, ``RankModel``) gives ids. ``Tokenizer.encode`` tokenises every text as one string, as the model
will see it in training, and then finds the tokens that hold the characters of each span.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.tokenizer.originals import RankModel, SentencePieceModel, mistral_template
from megatron_sft_idx.chat.tokenizer.tokenizer_files import TokenizerFiles, read_tokenizer_files
from megatron_sft_idx.chat.tokenizer.tokens import Backend, JsonModel, Passage, TokenOffsets
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
        proof: ``Tokenizer.proof`` of the same tokenizer when it was loaded before, perhaps in another process. The
            comparison of gigatoken with tokenizers that it stands for is then not made again.

    Raises:
        FormatError: what is missing or broken, and what to do about it.
    """
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
        chat_template: the default template, or the only one; None where there is none, or several without a default.
        proof: to be given to ``load_tokenizer`` where the same tokenizer is loaded again.
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
        # The folder's settings override the vocabulary's own, also where they say that there is no such token.
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
        """The chat template that mistral-common makes for a file of Mistral's that came without one.

        Making it takes seconds. None for all other tokenizers, and where mistral-common makes none.
        """
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

        A token is trained on where it overlaps a span. ``notes`` of each result gains three counts:
        ``straddling``, the spans whose first token begins before them; ``straddling_header``, those of them whose
        first token brings more than white space in; and ``literals``, the control tokens in the data that were kept
        as text.

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
            for numbers in [plain, *([i] for i, row in enumerate(rendered) if row.literals)]:
                rows = [rendered[i] for i in numbers]
                ids = self._ids(numbers, [Passage(row.text, row.literals) for row in rows])
                weights, crossed, spelled = spellings.weights(
                    ids, [utf8[i] for i in numbers], [row.spans for row in rows], whole_characters=whole_characters
                )
                for at, (i, row) in enumerate(zip(numbers, rows, strict=True)):
                    if spelled[at]:
                        crossings = _crossings(spellings.nbytes[ids[at]], utf8[i], row) if crossed[at] else []
                        result[i] = _weighed(row, ids[at], weights[at], crossings, straddling)
        # The rest goes by the library's own offsets, which serve every tokenizer and every text.
        for i in [i for i in range(len(rendered)) if i not in result]:
            row = rendered[i]
            try:
                row_ids, offsets = self._model.locate(Passage(row.text, row.literals))
            except ValueError as error:
                raise SequenceError("rendered", i, str(error)) from error
            mask, crossings = _weights_by_offsets(offsets, len(row_ids), row, whole_characters=whole_characters)
            result[i] = _weighed(row, row_ids, mask, crossings, straddling)
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
        """Ids of passages. ``rows`` says which rendered row each passage is of, for the error about it."""
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
        origins: list[tuple[int, float]] = []  # of each passage: its row and weight
        for index, row in enumerate(rendered):
            weights = [0.0, *(weight for span in row.spans for weight in (span.weight, 0.0))]
            for (start, stop), weight in zip(pairwise(_edges(row)), weights, strict=True):
                if start < stop:
                    inside = [(max(a, start), min(b, stop)) for a, b in row.literals if a < stop and b > start]
                    middle = start > 0 and not row.text.endswith(self._added_texts, 0, start)
                    literals = [(a - start, b - start) for a, b in inside]
                    passages.append(Passage(row.text[start:stop], literals, middle))
                    origins.append((index, weight))
        ids = [[np.zeros(0, np.uint32)] for _ in rendered]
        masks = [[np.zeros(0, np.float32)] for _ in rendered]
        encoded = self._ids([index for index, _ in origins], passages)
        for (index, weight), passage_ids in zip(origins, encoded, strict=True):
            ids[index].append(passage_ids)
            masks[index].append(np.full(len(passage_ids), weight, np.float32))
        return [
            _weighed(row, np.concatenate(ids[i]), np.concatenate(masks[i]), [], True) for i, row in enumerate(rendered)
        ]


def append_eod(encoded: Encoded, eod_id: int) -> Encoded:
    """The sequence with an end-of-document token, trained exactly when the token before it is."""
    weight = encoded.loss_mask[-1] if encoded.loss_mask.size else 0.0
    return encoded._replace(
        input_ids=np.append(encoded.input_ids, np.int32(eod_id)),
        loss_mask=np.append(encoded.loss_mask, np.float32(weight)),
    )


# ---- spans to weights ----


class _Crossing(NamedTuple):
    """A token that is trained on and begins before its span."""

    token: int  # its number in the text
    before: str  # those of its characters that lie before the span
    text: str  # all of its characters
    begins_in_span: bool  # whether its first character lies in an earlier span that is trained on too


def _crossings(nbytes: NDArray[np.int64], utf8: bytes, row: Rendered) -> list[_Crossing]:
    """The tokens of a text that begin before the span that they are trained on for.

    Args:
        nbytes: how many bytes of the text each of its tokens spells, in order.
        utf8: the text, encoded.
        row: the text and its spans.
    """
    text, ends = row.text, np.cumsum(nbytes)
    crossings = []
    for before, span in pairwise([Span(0, 0), *row.spans]):
        if not (span.weight and span.start < span.stop):
            continue
        begin = span.start if len(utf8) == len(text) else len(text[: span.start].encode())
        token = int(np.searchsorted(ends, begin, "right"))
        first = int(ends[token - 1]) if token else 0
        if first < begin:
            begins_in_span = bool(before.weight) and first < len(text[: before.stop].encode())
            outside, spelt = (utf8[first:stop].decode("utf-8", "replace") for stop in (begin, int(ends[token])))
            crossings.append(_Crossing(token, outside, spelt, begins_in_span))
    return crossings


def _weights_by_offsets(
    offsets: TokenOffsets, count: int, row: Rendered, *, whole_characters: bool
) -> tuple[NDArray[np.float32], list[_Crossing]]:
    """The weights of a text's ``count`` tokens, by the characters that the library says each stands for.

    Returns:
        The weights, float32 [count], and the tokens that begin before the span that they are trained on for.
    """
    _edges(row)

    def first_token(characters: range) -> int | None:
        """The token of the first of these characters that a token holds; None where tokens hold none of them."""
        return next((token for token in map(offsets.char_to_token, characters) if token is not None), None)

    def begin_of(token: int) -> int:
        return (offsets.token_to_chars(token) or (0, 0))[0]

    weights = np.zeros(count, np.float32)
    crossings, trained_up_to = [], 0
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
            crossings.append(_Crossing(first, before, spelt, begin < trained_up_to))
        trained_up_to = span.stop if span.weight else trained_up_to
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
    """One sequence; without ``straddling``, tokens that begin before their span are not trained on."""
    input_ids = ids.view(np.int32)
    if not (crossings or row.literals):
        return Encoded(input_ids, weights, row.notes)
    notes = dict(row.notes)
    headers = [crossing for crossing in crossings if crossing.before.strip() and not crossing.begins_in_span]
    if crossings:
        notes["straddling" if straddling else "straddling_left_out"] = len(crossings)
    if headers and straddling:
        notes["straddling_header"] = len(headers)
    if row.literals:
        notes["literals"] = len(row.literals)
    if not straddling:
        weights[[crossing.token for crossing in crossings if not crossing.begins_in_span]] = 0
    return Encoded(input_ids, weights, notes, headers[0].text if headers else "")
