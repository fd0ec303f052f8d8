"""Text with spans to token ids with exact loss masks, by the tokenizer of a local folder or file.

A mask that is off by one token would be trained on and never seen. So ``Tokenizer.encode`` tokenises every text as one
string, as the model will see it, and then finds the tokens that hold the characters of each span. ``tokenizer_files``
reads files, and one of three models (``JsonModel``, ``SentencePieceModel``, ``RankModel``) gives ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx.chat.tokenizer.json_model import Backend, JsonModel
from megatron_sft_idx.chat.tokenizer.originals import RankModel, SentencePieceModel, mistral_template
from megatron_sft_idx.chat.tokenizer.passages import Passage
from megatron_sft_idx.chat.tokenizer.tokenizer_files import TokenizerFiles, read_tokenizer_files
from megatron_sft_idx.chat.tokenizer.weights import as_encoded, span_edges, weigh_held
from megatron_sft_idx.chat.types import Encoded, Rendered, TokenizedRow
from megatron_sft_idx.errors import FormatError, SequenceError


def load_tokenizer(path: str | Path, *, backend: Backend = "auto") -> Tokenizer:
    """Loads a tokenizer from a local folder in Hugging Face's layout, or from the file with its vocabulary alone.

    Such a file is a ``tokenizer.json``, a SentencePiece model, a file of tiktoken's ranks or a ``tekken.json``.

    Args:
        path: the folder or file; nothing is ever downloaded, and no code that came with it is run.
        backend: what reads a ``tokenizer.json``. ``auto`` takes gigatoken where it is installed and known to give the
            same ids, tokenizers otherwise.

    Raises:
        FormatError: what is missing or broken, and what to do about it.
    """
    return Tokenizer(read_tokenizer_files(path), backend)


class Tokenizer:
    """A loaded tokenizer. Pickling it keeps only path and options, by which unpickling loads it again.

    Attributes:
        path: the folder or file that it was loaded from.
        backend: the library that tokenises: ``gigatoken``, ``tokenizers``, ``sentencepiece`` or ``tiktoken``.
        vocab_size: the largest id + 1, added tokens included.
        special_tokens: template variables (``bos_token``, ``eos_token`` ...) as transformers passes them.
        control_tokens: texts of the added tokens that are special, in order of their ids.
        eos_id: id of ``eos_token``, None where the tokenizer names none.
        pad_id: id of ``pad_token``, None where the tokenizer names none.
        chat_templates: the templates that came with it, by name.
        chat_template: the default template, or the only one; None where there is none, or several without a default.
        fingerprint: xxh3_128 of what decides the ids, the same for a folder and its tokenizer.json unless the
            folder's other files change the added tokens.
    """

    def __init__(self, files: TokenizerFiles, backend: Backend) -> None:
        model: JsonModel | SentencePieceModel | RankModel
        if files.kind == "json":
            model = JsonModel(files, backend)
        else:
            model = SentencePieceModel(files) if files.kind == "sentencepiece" else RankModel(files)
        self._model = model
        self._file = files.file
        self._added_texts = tuple(token.text for token in model.added if token.text)
        self.path = str(files.path)
        self._again = partial(load_tokenizer, files.path, backend=backend)
        self.backend = model.name
        self.vocab_size = model.size
        self.fingerprint = model.fingerprint
        # The folder's settings override what the vocabulary names, even by saying null, that there is no such token.
        named = {name: text for name, text in model.named.items() if name not in files.settings}
        self.special_tokens = named | files.special_tokens
        self.control_tokens = [token.text for token in model.added if token.special]
        eos, pad = self.special_tokens.get("eos_token"), self.special_tokens.get("pad_token")
        self.eos_id = None if eos is None else model.token_id(eos)
        self.pad_id = None if pad is None else model.token_id(pad)
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
        straddling: bool = True,
    ) -> list[Encoded]:
        """Tokenises texts and weighs their tokens by the spans; no special tokens are added.

        A token is trained on where it holds a part of a character of a span, as in transformers from 5.24 on.
        ``notes`` of each result gains three counts:
        ``straddling``, the spans whose first token begins before them; ``straddling_header``, the spans whose first
        token holds more than white space of the text before them; and ``literals``, the control tokens in the data
        that were kept as text.

        Args:
            rendered: any number of texts; a hundred or so at once is quicker than one by one.
            span_by_span: tokenise the text between the edges of the spans piece by piece, so that no token
                straddles an edge. The ids may then differ from those of the whole text.
            straddling: whether a token that begins before its span is trained on, as it is by transformers.

        Raises:
            SequenceError: a text that cannot be tokenised; ``position`` is its place in ``rendered``.
            ValueError: spans descend, overlap or end past their text.
        """
        utf8 = [_utf8(i, row.text) for i, row in enumerate(rendered)]
        if span_by_span:
            return self._encode_pieces(rendered)
        passages = [Passage(row.text, row.literals) for row in rendered]
        result: dict[int, Encoded] = {}
        if (spellings := self._model.spellings) is not None:
            ids = self._ids(range(len(rendered)), passages)
            spans = [row.spans for row in rendered]
            weights, crossed, spelled = spellings.weights(ids, utf8, spans)
            for i in np.flatnonzero(spelled).tolist():
                edges = spellings.edges(ids[i], utf8[i]) if crossed[i] else None
                crossings = [] if edges is None else weigh_held(edges, rendered[i])[1]
                result[i] = as_encoded(rendered[i], ids[i], weights[i], crossings, straddling)
        # Texts that their tokens do not spell go by the library's offsets, which serve every tokenizer and every text.
        for i in [i for i in range(len(rendered)) if i not in result]:
            row = rendered[i]
            try:
                row_ids, edges = self._model.locate(passages[i])
            except ValueError as error:
                raise SequenceError("rendered", i, str(error)) from error
            mask, crossings = weigh_held(edges, row)
            result[i] = as_encoded(row, row_ids, mask, crossings, straddling)
        return [result[i] for i in range(len(rendered))]

    def from_token_row(self, row: TokenizedRow) -> Encoded:
        """The ids and weights of a row that came tokenised, its ids checked against the vocabulary.

        Raises:
            ValueError: an id is outside the vocabulary.
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
        except FormatError:
            raise  # it is the tokenizer's fault, and no row's
        except ValueError as error:
            for row, passage in zip(rows, passages, strict=True):
                try:
                    self._model.ids([passage])
                except ValueError as reason:
                    raise SequenceError("rendered", row, str(reason)) from reason
            raise AssertionError("passages that can be tokenised one by one") from error

    def _encode_pieces(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        """Tokenises span by span: each piece of text is wholly trained on, or not at all.

        A tokenizer that puts a space before a text does so behind a control token, as it always does there, and before
        no other piece but the first.
        """
        passages: list[Passage] = []
        origins: list[tuple[int, float]] = []  # of each passage: its row and weight
        for index, row in enumerate(rendered):
            whole = Passage(row.text, row.literals)
            weights = [0.0, *(weight for span in row.spans for weight in (span.weight, 0.0))]
            for (start, stop), weight in zip(pairwise(span_edges(row)), weights, strict=True):
                if start < stop:
                    middle = start > 0 and not row.text.endswith(self._added_texts, 0, start)
                    passages.append(whole.stretch(start, stop, middle=middle))
                    origins.append((index, weight))
        ids = [[np.zeros(0, np.uint32)] for _ in rendered]
        masks = [[np.zeros(0, np.float32)] for _ in rendered]
        encoded = self._ids([index for index, _ in origins], passages)
        for (index, weight), passage_ids in zip(origins, encoded, strict=True):
            ids[index].append(passage_ids)
            masks[index].append(np.full(len(passage_ids), weight, np.float32))
        return [
            as_encoded(row, np.concatenate(ids[i]), np.concatenate(masks[i]), [], True)
            for i, row in enumerate(rendered)
        ]


def _utf8(index: int, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        found = ascii(text[error.start])
        reason = f"character {error.start} is {found}, half of a surrogate pair, which no text can hold"
        raise SequenceError("rendered", index, reason) from error
