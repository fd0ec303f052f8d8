"""Convert text with spans to token ids with exact loss masks, using the tokenizer of a local folder or file.

A mask that is off by one token would be trained on unnoticed. So ``Tokenizer.encode`` tokenises every text as one
string, as the model will see it, and then finds the tokens that contain the characters of each span.
``tokenizer_files`` reads files, and one of three models (``JsonModel``, ``SentencePieceModel``, ``RankModel``) returns
ids.
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
    """Load a tokenizer from a local folder in Hugging Face's layout, or only from its vocabulary file.

    Such a file is a ``tokenizer.json``, a SentencePiece model, a file of tiktoken ranks or a ``tekken.json``.

    Args:
        path: the folder or file; nothing is ever downloaded, and no code in it is run.
        backend: the library for a ``tokenizer.json``. ``auto`` uses gigatoken if it is installed and known to give the
            same ids, otherwise tokenizers.

    Raises:
        FormatError: something is missing or broken; the message has a remedy.
    """
    return Tokenizer(read_tokenizer_files(path), backend)


class Tokenizer:
    """A loaded tokenizer. Its pickle has only path and options; unpickling loads it again.

    Attributes:
        path: the folder or file from which it was loaded.
        backend: the library that tokenises: ``gigatoken``, ``tokenizers``, ``sentencepiece`` or ``tiktoken``.
        vocab_size: the largest id + 1, including added tokens.
        special_tokens: template variables (``bos_token``, ``eos_token`` ...) as in transformers.
        control_tokens: texts of the special added tokens, in order of their ids.
        eos_id: id of ``eos_token``; None if the tokenizer has none.
        pad_id: id of ``pad_token``; None if the tokenizer has none.
        chat_templates: the templates that came with it, by name.
        chat_template: the default template, or the only one; None if there is none, or several without a default.
        fingerprint: xxh3_128 of everything that determines the ids; the same for a folder and its tokenizer.json unless
            the folder's other files change the added tokens.
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
        # The folder's settings override the vocabulary's names. A null there means that the token does not exist.
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
        """The chat template that mistral-common generates for a file of Mistral without a template.

        Generating it takes seconds. None for all other tokenizers, and if mistral-common cannot generate one.
        """
        return None if self.chat_templates else mistral_template(self._file)

    def encode(
        self,
        rendered: Sequence[Rendered],
        *,
        span_by_span: bool = False,
        straddling: bool = True,
    ) -> list[Encoded]:
        """Tokenise texts, and set the weights of their tokens from the spans; no special tokens are added.

        A token is trained if it contains part of a character of a span, as in transformers from 5.24 on. ``notes`` of
        each result gets three counts: ``straddling``, the spans whose first token begins before them;
        ``straddling_header``, the spans whose first token contains more than white space of the text before them; and
        ``literals``, the control tokens in the data that were kept as text.

        Args:
            rendered: any number of texts; about a hundred at once is faster than one by one.
            span_by_span: tokenise the text between the edges of the spans separately, so that no token straddles an
                edge. The ids may then differ from those of the whole text.
            straddling: whether a token that begins before its span is trained on, as in transformers.

        Raises:
            SequenceError: a text cannot be tokenised; ``position`` is its index in ``rendered``.
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
        # Texts that their tokens do not spell use the library's offsets, which work for every tokenizer and every text.
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
        """Return the ids and weights of a tokenised row, with its ids checked against the vocabulary.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        ids = row.input_ids
        outside = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        if outside.size:
            at = int(outside[0])
            raise ValueError(
                f"input_ids[{at}] is {ids[at]}, outside the tokenizer's vocabulary of {self.vocab_size}; was the row"
                " tokenized with another tokenizer?"
            )
        return Encoded(ids.astype(np.int32), row.loss_mask.astype(np.float32))

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Return the text of ids for people, including control tokens.

        Byte-level tokenizers give the exact text. An incomplete character is shown as U+FFFD, an id that is not a token
        as its number in angle brackets.
        """
        return self._model.decode(ids)

    def _ids(self, rows: Sequence[int], passages: Sequence[Passage]) -> list[NDArray[np.uint32]]:
        """Return ids of passages. ``rows`` has the rendered row of each passage, for errors about it."""
        try:
            return self._model.ids(passages)
        except FormatError:
            raise  # an error of the tokenizer, not of a row
        except ValueError as error:
            for row, passage in zip(rows, passages, strict=True):
                try:
                    self._model.ids([passage])
                except ValueError as reason:
                    raise SequenceError("rendered", row, str(reason)) from reason
            raise AssertionError("passages that can be tokenised one by one") from error

    def _encode_pieces(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        """Tokenise span by span: each piece of text is completely trained or not at all.

        A tokenizer that puts a space before texts does so after a control token, as always, and before no other piece
        except the first.
        """
        passages: list[Passage] = []
        origins: list[tuple[int, float]] = []  # row and weight of each passage
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
        reason = f"character {error.start} is {found}, half of a surrogate pair, which is not valid in text"
        raise SequenceError("rendered", index, reason) from error
