"""Convert rows to sequences of token ids with masks and columns, one piece of input at a time."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from megatron_sft_idx.chat.chat_rows import to_sequence_source
from megatron_sft_idx.chat.media_files import LoadedMedia, MediaLimits
from megatron_sft_idx.chat.media_processor import MediaProcessor, PlacedItem, positions_of
from megatron_sft_idx.chat.packed_rows import conversations_of
from megatron_sft_idx.chat.preferences import read_judged
from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.chat.template import ChatTemplate, MaskOptions
from megatron_sft_idx.chat.tokenizer import Backend, DifferentIdsError, Tokenizer, append_eod, load_tokenizer
from megatron_sft_idx.chat.training_fields import training_names
from megatron_sft_idx.chat.turns import order_notes
from megatron_sft_idx.chat.types import (
    Conversation,
    Encoded,
    EncodedItem,
    InputRow,
    Piece,
    Rendered,
    RowError,
    Span,
    TextRow,
    TokenizedRow,
)
from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.layout import token_dtype_for_vocabulary
from megatron_sft_idx.layout.column import PAIR, ColumnSpec
from megatron_sft_idx.layout.media_layout import KINDS, Items
from megatron_sft_idx.packs.run_media import CollectedBlobs
from megatron_sft_idx.tokenize.kept_fields import arrays_of, dtype_of, values_of
from megatron_sft_idx.tokenize.piece_media import MediaSizes, PieceMedia
from megatron_sft_idx.tokenize.selection import row_hash

_BATCH_ROWS = 128
_TEXT_TEMPLATE = "{{ messages[0].content }}"
# The version of the conversion from rows to tokens and masks. It must be raised if the same row gives other results, so
# that older parts are not reused.
ENCODING_VERSION = 1
# Options that do not determine a part's content: a part with a bad row is made only if bad rows are skipped, and a part
# has the weights of one file.
_NOT_IN_PARTS = ("on_bad_row", "loss_weights")


@dataclass(frozen=True, slots=True)
class EncodingOptions:
    """Options for converting rows to sequences; picklable, the same in every worker.

    Attributes:
        tokenizer: folder or vocabulary file of the tokenizer.
        tokenizer_backend: ``tokenizers`` does not use gigatoken.
        chat_template: template text that replaces the tokenizer's own.
        template_name: name of the template in errors, such as its file.
        template_kwargs: extra variables for the template.
        masks: which tokens are trained on.
        rows: how input rows are read.
        append_eod: end every sequence with the tokenizer's end-of-sequence id, unless it already ends with that id. It
            is trained if the sequence ends in a trained answer.
        span_by_span: tokenise each trained span separately, so that no token straddles its edge.
        straddling: whether a token that begins before its span and ends in it is trained on.
        on_bad_row: ``error`` stops at the first unusable row, ``skip`` counts and lists it.
        source: make the column ``source``.
        loss_weights: by the number of the input file, the factor for its rows' masks; empty for 1 everywhere.
        content: make the column ``content``.
        keep_fields: dtypes of the row fields that become columns, by name, from ``read_keep_fields``.
        processor: folder of the processor that expands images and audio; None for rows of text only.
        media: limits and sources for images and audio.
    """

    tokenizer: str
    tokenizer_backend: Backend = "auto"
    chat_template: str | None = None
    template_name: str = "chat template"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    masks: MaskOptions = field(default_factory=MaskOptions)
    rows: RowOptions = field(default_factory=RowOptions)
    append_eod: bool = False
    span_by_span: bool = False
    straddling: Literal["include", "exclude"] = "include"
    on_bad_row: Literal["error", "skip"] = "error"
    source: bool = False
    loss_weights: tuple[float, ...] = ()
    content: bool = False
    keep_fields: Mapping[str, str] = field(default_factory=dict)
    processor: str | None = None
    media: MediaLimits = field(default_factory=MediaLimits)

    @property
    def columns(self) -> list[str]:
        """Names of the shards' columns, without ``content``, which only parts have."""
        return [*self.column_specs([])]

    def column_specs(self, files: Sequence[Mapping[str, str]]) -> dict[str, ColumnSpec]:
        """Return the shards' columns by name; ``files`` are the files of ``source``, one dict each."""
        specs: dict[str, ColumnSpec] = {}
        if self.source:
            specs["source"] = ColumnSpec("sequence", np.uint32, 2, metadata={"files": [*files]})
        if self.rows.kind == "preference":
            specs["pair"] = PAIR
        if self.rows.kind == "kto":
            specs["label"] = ColumnSpec("sequence", np.uint8)
        return specs | {name: ColumnSpec("sequence", dtype_of(dtype)) for name, dtype in self.keep_fields.items()}


@dataclass(slots=True)
class EncodedPiece:
    """The sequences of one piece of input, concatenated.

    Attributes:
        input_ids: uint16 or int32 [tokens].
        loss_mask: token-aligned, uint8 [tokens], or float32 where a weight is neither 0 nor 1.
        lengths: lengths of the sequences, int64 [sequences].
        rows: number of rows read, including bad ones.
        num_bytes: number of bytes of the input file that contain the piece, for progress.
        bad_rows: errors of the unusable rows, in order; with ``on_bad_row="error"`` only the first.
        notes: counts by name.
        first_rows: the number of the first row of each note (counted like bad rows), by name.
        straddling: text of a trained token that begins in a header; "" if there is none.
        columns: values of each sequence by name, [sequences] or [sequences, width]. ``source`` is uint32 [sequences,
            2]: 0, and the number of the row (for JSON lines, the line), counted from the first of the piece. ``label``
            is uint8, for KTO rows. ``content`` is uint32 [sequences, 5]: the hash of the row (``row_hash``), and the
            number of the sequence in the row. Kept fields have their names and dtypes.
        media: images and recordings of each sequence, if a processor expands them.
    """

    input_ids: NDArray[Any]
    loss_mask: NDArray[Any]
    lengths: NDArray[np.int64]
    rows: int
    num_bytes: int
    bad_rows: list[SequenceError]
    notes: Counter[str] = field(default_factory=Counter)
    first_rows: dict[str, int] = field(default_factory=dict)
    straddling: str = ""
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    media: Sequence[Sequence[EncodedItem]] = ()

    def count(self, notes: Mapping[str, int], row: int) -> None:
        """Add notes about a row."""
        self.notes.update(notes)
        for name in notes:
            self.first_rows.setdefault(name, row)


def items_of(media: Sequence[Sequence[EncodedItem]]) -> tuple[NDArray[np.int64], Items]:
    """Return the number of images and recordings of each sequence, int64 [sequences], and all of them, in order."""
    rows = [(item.start, item.length, KINDS[item.kind], item.blob) for of_sequence in media for item in of_sequence]
    starts, lengths, kinds, blobs = np.array(rows, np.uint32).reshape(-1, 4).T
    return np.array([*map(len, media)], np.int64), Items(starts, lengths, kinds.astype(np.uint8), blobs)


class _Row(NamedTuple):
    """A row during processing.

    Attributes:
        position: number of the row in its file.
        label: KTO label, or None.
        content: hash of its content, if the column ``content`` is made.
        conversations: its conversation, or several, or the two of a pair; empty for a tokenised row.
        template: the template that renders them.
        tokenized: the row if it was already tokenised, else None.
        rendered: its rendered texts: one, one per turn or conversation, or the two of a pair.
        notes: counts for the summary, by name, about reading the row.
        kept: values of the fields that become columns, in the order of ``EncodingOptions.keep_fields``.
        media: images and recordings of each conversation.
        items: their positions in each rendered text.
    """

    position: int
    label: int | None
    content: NDArray[np.uint32] | None
    conversations: Sequence[Conversation]
    template: ChatTemplate | None
    tokenized: TokenizedRow | None = None
    rendered: Sequence[Rendered] = ()
    notes: Mapping[str, int] = {}
    kept: Sequence[int | float] = ()
    media: Sequence[Sequence[LoadedMedia]] = ()
    items: Sequence[Sequence[PlacedItem]] = ()


def read_row(data: Any, options: RowOptions) -> tuple[Sequence[Conversation | TokenizedRow | TextRow], int | None]:
    """Return the sources of a row's sequences (conversations, ids or a text), and its KTO label.

    Raises:
        RowError: the row is unusable.
    """
    if options.kind in ("preference", "kto"):
        return read_judged(data, options)
    source = to_sequence_source(data, options)
    if not isinstance(source, Conversation):
        return [source], None
    return conversations_of(source, options.system_starts), None


class RowEncoder:
    """Converts pieces of input to token ids with masks.

    Attributes:
        options: as given, with the template that mistral-common makes for the tokenizer, which takes seconds.
        digest: hash of everything that determines the tokens and masks of a row, except for the weight of its file.

    Raises:
        FormatError: the tokenizer or the template is unusable.
    """

    def __init__(self, options: EncodingOptions) -> None:
        # One thread per process: workers share the cores, and the library's threads do not survive a fork.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.tokenizer: Tokenizer = load_tokenizer(options.tokenizer, backend=options.tokenizer_backend)
        if options.chat_template is None and (generated := self.tokenizer.generated_template) is not None:
            options = replace(options, chat_template=generated, template_name=options.tokenizer)
        self.options = options
        self._kept_flags = frozenset(training_names(options.keep_fields))
        self.token_dtype = token_dtype_for_vocabulary(self.tokenizer.vocab_size)
        self.processor: MediaProcessor | None = None
        self._sizes = MediaSizes()
        if options.processor is not None:
            self.processor = MediaProcessor(options.processor, self.tokenizer)
        if options.append_eod and self.tokenizer.eos_id is None:
            raise FormatError(
                f"{options.tokenizer}: the tokenizer defines no eos_token, which --append-eod needs; leave"
                " --append-eod out"
            )
        if options.rows.kind in ("preference", "kto") and options.masks.train_on in ("markers", "all"):
            raise FormatError(
                f"--row-kind {options.rows.kind} trains only on the answers; leave out --train-on"
                f" {options.masks.train_on}"
            )
        named = self.tokenizer.chat_templates
        if self.processor is not None and self.processor.chat_template is not None:
            named = {"default": self.processor.chat_template}
        if options.chat_template is not None:
            named = {"default": options.chat_template}
        self.template = self._template(named.get("default", self.tokenizer.chat_template))
        # Some tokenizers have a separate template for rows with tools; handled as in transformers.
        self.tools_template = self._template(named["tool_use"]) if "tool_use" in named else self.template
        # A text is its own rendering, so that it is trained on, and spells control tokens, like chats.
        self.text_template = self._template(_TEXT_TEMPLATE) if options.rows.train_on == "all" else None
        described = {**self.describe_parts(), "token_dtype": self.token_dtype.name, "version": ENCODING_VERSION}
        try:
            self.digest = xxhash.xxh3_128_hexdigest(orjson.dumps(described, option=orjson.OPT_SORT_KEYS))
        except TypeError as error:  # all other arguments are ours
            raise FormatError(f"chat_template_kwargs: cannot be written as JSON: {error}") from None

    def _template(self, source: str | None) -> ChatTemplate | None:
        if source is None:
            return None
        options = self.options
        return ChatTemplate(
            source,
            special_tokens=self.tokenizer.special_tokens,
            control_tokens=self.tokenizer.control_tokens,
            options=options.masks,
            template_kwargs=dict(options.template_kwargs),
            name=options.tokenizer if options.chat_template is None else options.template_name,
        )

    def describe_parts(self) -> dict[str, Any]:
        """Return the entries of ``describe`` that determine the content of a part, for any file."""
        described = self.describe()
        options = {name: value for name, value in described["options"].items() if name not in _NOT_IN_PARTS}
        return described | {"options": options}

    def weight_of(self, file: int) -> float:
        """Return the loss weight of the rows of a file, by its number."""
        return self.options.loss_weights[file] if self.options.loss_weights else 1.0

    def describe(self) -> dict[str, Any]:
        """Return everything that determines the tokens and masks of a row, for the shard's header."""
        options, rows = self.options, self.options.rows
        if_set = {
            "ignore_fields": [*rows.ignore_fields],
            "fields": dict(rows.mapping.fields),
            "turn_fields": dict(rows.mapping.turn_fields),
            "roles": dict(rows.mapping.roles),
            "system_starts": rows.system_starts if rows.system_starts != "error" else "",
            "source": options.source,
            "loss_weights": [*options.loss_weights],
            "content": options.content,
            "keep_fields": dict(options.keep_fields),
        }
        of_media = {"processor": {"fingerprint": self.processor.fingerprint}} if self.processor else {}
        return {
            "tokenizer": {"fingerprint": self.tokenizer.fingerprint, "vocab_size": self.tokenizer.vocab_size},
            "chat_template": {
                "fingerprint": self.template.fingerprint if self.template else None,
                "tools_fingerprint": self.tools_template.fingerprint if self.tools_template else None,
            },
            "options": {
                **asdict(options.masks),
                "append_eod": options.append_eod,
                "mask_alignment": rows.mask_alignment,
                "on_bad_row": options.on_bad_row,
                "row_kind": rows.kind,
                "span_by_span": options.span_by_span,
                "straddling": options.straddling,
                "template_kwargs": dict(options.template_kwargs),
                **{name: value for name, value in if_set.items() if value},
            },
            **of_media,
        }

    def encode(
        self, piece: Piece, file: int = 0, max_rows: int | None = None, media: PieceMedia | None = None
    ) -> EncodedPiece:
        """Encode the rows of one piece, in order.

        Args:
            piece: the rows.
            file: the number of its file.
            max_rows: maximum number of usable rows; None for all. Rows after them are not read.
            media: reads images and audio (``media_of``); None if their files need not be kept.

        Raises:
            DifferentIdsError: gigatoken and tokenizers give different ids for a row.
        """

        def next_batch() -> list[InputRow]:
            missing = _BATCH_ROWS if max_rows is None else min(max_rows - len(made), _BATCH_ROWS)
            return list(islice(waiting, missing))

        options, rows, waiting = self.options, 0, piece.rows()
        media = media or self.media_of(piece.path)
        made: list[tuple[_Row, list[Encoded]]] = []
        bad_rows: list[SequenceError] = []
        while batch := next_batch():
            read = [self._read_or_error(row, media) for row in batch]
            rows += len(read)
            made += self._encode_batch(piece, self._rendered(piece, read, bad_rows), bad_rows)
            if bad_rows and options.on_bad_row == "error":
                break
        bad_rows.sort(key=lambda error: error.position or 0)
        weight = self.weight_of(file)
        done = self._join([one for _, of_row in made for one in of_row], rows, piece.num_bytes, bad_rows, weight)
        for row, of_row in made:
            for notes in (row.notes, *(sequence.notes for sequence in of_row)):
                if notes:
                    done.count(notes, row.position)
        # Columns have one row for each sequence of a row.
        each = np.array([len(of_row) for _, of_row in made], np.int64)
        positions = np.repeat(np.array([row.position for row, _ in made], np.int64), each)
        # A shard's writer drops these mask values, because nothing predicts a first token.
        first_trained = np.flatnonzero(done.loss_mask[np.cumsum(done.lengths) - done.lengths])
        if len(first_trained):
            done.count({"first_token_masks_dropped": len(first_trained)}, int(positions[first_trained[0]]))
        if options.source:
            done.columns["source"] = source = np.zeros((len(positions), 2), np.uint32)
            source[:, 1] = positions - piece.first
        if options.rows.kind == "kto":
            done.columns["label"] = np.repeat(np.array([row.label for row, _ in made], np.uint8), each)
        done.columns |= arrays_of([row.kept for row, _ in made], options.keep_fields, each)
        if options.content:
            done.columns["content"] = content = np.zeros((int(each.sum()), 5), np.uint32)
            hashes = np.array([row.content for row, _ in made], np.uint32).reshape(-1, 4)
            content[:, :4] = np.repeat(hashes, each, axis=0)
            content[:, 4] = np.arange(len(content)) - np.repeat(np.cumsum(each) - each, each)
        return done

    def media_of(self, path: str, blobs: CollectedBlobs | None = None) -> PieceMedia:
        """Return the reader of images and audio for a piece of the file at ``path``; ``blobs`` collects their files."""
        return PieceMedia(path, self.options.media, CollectedBlobs() if blobs is None else blobs, self._sizes)

    def content_of_pieces(self, pieces: Iterable[Piece], num_rows: int, path: str | None = None) -> Iterator[str]:
        """Yield the entry of each piece in ``PartInfo.content`` after this many rows of all of them were encoded.

        ``path`` is the location of their file; None for that of each piece.
        """
        for piece in pieces:
            media = self.media_of(path or piece.path)
            for row in islice(piece.rows() if self.processor is not None else (), num_rows):
                num_rows -= 1
                with contextlib.suppress(ValueError):
                    media.note([each for each in self._sources(row)[0] if isinstance(each, Conversation)])
            yield piece.fingerprint() + media.digest

    def _read_or_error(self, row: InputRow, media: PieceMedia) -> tuple[int, _Row | ValueError]:
        """Return the position of a row, and the row or the error that makes it a bad row."""
        try:
            return row.position, self._read(row, media)
        except ValueError as error:
            return row.position, error

    def _sources(
        self, row: InputRow
    ) -> tuple[Sequence[Conversation | TokenizedRow | TextRow], int | None, Sequence[int | float]]:
        """Return the sources of a row's sequences, its KTO label, and its values of kept fields."""
        if isinstance(row.data, SequenceError):
            raise row.data
        data = row.data
        if self._kept_flags and isinstance(data, dict):
            # A kept field is read, even if its name refers to training.
            data = {name: value for name, value in data.items() if name not in self._kept_flags}
        return *read_row(data, self.options.rows), values_of(row.data, self.options.keep_fields)

    def _read(self, row: InputRow, reader: PieceMedia) -> _Row:
        options, position = self.options, row.position
        sources, label, kept = self._sources(row)
        content, notes = row_hash(sources, label) if options.content else None, sources[0].notes
        # Once per row, however many conversations it has.
        conversations = [source for source in sources if isinstance(source, Conversation)]
        order = dict.fromkeys([name for each in conversations for name in order_notes(each.messages)], 1)
        if row.notes or order:
            notes = Counter(notes) + Counter(row.notes) + Counter(order)
        if isinstance(sources[0], TokenizedRow):
            if self.processor is not None and np.isin(sources[0].input_ids, self.processor.token_ids).any():
                raise RowError(
                    "its input_ids contain image or audio tokens, but the row has no image or audio files; pass"
                    " messages instead of input_ids"
                )
            return _Row(position, label, content, [], None, sources[0], notes=notes, kept=kept)
        media: list[list[LoadedMedia]] = []
        if self.processor is not None:
            conversations, media = reader.load(conversations)
        if isinstance(sources[0], TextRow):
            conversations = [Conversation([{"role": "user", "content": sources[0].text}], [1.0])]
            template = self.text_template
        else:
            template = self.tools_template if conversations[0].tools else self.template
        if template is None:
            raise FormatError(
                f"{options.tokenizer}: the tokenizer has no chat template; pass one with --chat-template FILE"
            )
        return _Row(position, label, content, conversations, template, notes=notes, kept=kept, media=media)

    def _expanded(self, row: _Row, outcomes: Sequence[Sequence[Rendered]]) -> _Row:
        """Expand the placeholders in the rendered texts of a row. RowError: they do not match its media."""
        texts = [each for outcome in outcomes for each in outcome]
        if self.processor is None or not (any(row.media) or any(map(self.processor.is_in, texts))):
            return row._replace(rendered=texts)
        rendered: list[Rendered] = []
        items: list[list[PlacedItem]] = []
        for outcome, media in zip(outcomes, row.media or [()] * len(outcomes), strict=True):
            placed: list[PlacedItem] = []
            for each in outcome:
                expanded, placed = self.processor.expand(each, media)
                rendered.append(expanded)
                items.append(placed)
            if len(placed) < len(media):
                raise RowError(
                    f"the chat template writes {len(placed)} placeholders, but the row has {len(media)} images and"
                    " recordings; use another template with --chat-template FILE"
                )
        return row._replace(rendered=rendered, items=items)

    def _rendered(
        self, piece: Piece, read: Sequence[tuple[int, _Row | ValueError]], bad_rows: list[SequenceError]
    ) -> list[_Row]:
        """Render the good rows of a batch. Bad ones are added to ``bad_rows``; the first of them may be the end.

        All rows do one step before the next step begins, because the code of a step then stays in the CPU caches.
        """
        conversations: dict[ChatTemplate, list[Conversation]] = {}
        for _, row in read:
            if isinstance(row, _Row) and row.template is not None:
                conversations.setdefault(row.template, []).extend(row.conversations)
        texts = {template: template.render_each(those) for template, those in conversations.items()}
        good: list[_Row] = []
        for position, one in read:
            try:
                if isinstance(one, ValueError):
                    raise one
                outcomes: list[Sequence[Rendered]] = []
                # All texts of a row are processed first, because one bad text makes the row bad.
                for outcome in [next(texts[one.template]) for _ in one.conversations if one.template]:
                    if isinstance(outcome, ValueError):
                        raise outcome
                    outcomes.append(outcome)
                done = self._expanded(one, outcomes)
                if self.options.rows.kind == "preference" and len(done.rendered) != 2:
                    raise RowError(
                        "--earlier-reasoning split makes several sequences of an answer, but a preference pair needs"
                        " exactly one per answer; use --earlier-reasoning drop, or leave the row out"
                    )
            except ValueError as error:
                bad_rows.append(_at(error, piece.path, position))
                if self.options.on_bad_row == "error":
                    break
                continue
            good.append(done)
        return good

    def _encode_batch(
        self, piece: Piece, batch: Sequence[_Row], bad_rows: list[SequenceError]
    ) -> Iterator[tuple[_Row, list[Encoded]]]:
        """Yield the sequences of each row. All rows of a template are tokenised in one call; bad ones are collected."""
        texts: dict[ChatTemplate, list[Rendered]] = {}
        for row in batch:
            if row.template is not None:
                texts.setdefault(row.template, []).extend(row.rendered)
        try:
            encoded = {template: iter(self._tokenise(rendered)) for template, rendered in texts.items()}
        except DifferentIdsError as error:
            row = next(row for row in batch if any(error.text in rendered.text for rendered in row.rendered))
            place = f"{piece.path}:{row.position}: "
            raise DifferentIdsError(error.difference, error.text, place=place) from None
        for row in batch:
            try:
                if row.template is None:
                    assert row.tokenized is not None
                    made = _split(self.tokenizer.from_token_row(row.tokenized), row.tokenized.bounds)
                else:
                    # All turns of a row are processed first, because one bad turn makes the row bad.
                    made = []
                    for outcome in [next(encoded[row.template]) for _ in row.rendered]:
                        if isinstance(outcome, SequenceError):
                            raise outcome
                        if not len(outcome.input_ids):
                            raise ValueError("the row has no tokens; a sequence needs at least one")
                        made.append(outcome)
                    if row.items:
                        made = self._with_items(row, made)
            except ValueError as error:
                bad_rows.append(_at(error, piece.path, row.position))
                continue
            if self.options.append_eod:
                made = [append_eod(sequence, self.tokenizer) for sequence in made]
            # Data for columns is kept; the texts of a whole piece are not.
            yield row._replace(conversations=(), tokenized=None, rendered=(), media=(), items=()), made

    def _with_items(self, row: _Row, made: list[Encoded]) -> list[Encoded]:
        """Return the sequences of a row with their images and recordings, whose tokens are not trained on."""
        out = []
        for rendered, items, sequence in zip(row.rendered, row.items, made, strict=True):
            if not items:
                out.append(sequence)
                continue
            numbered = [Span(item.start, item.stop, number) for number, item in enumerate(items, 1)]
            unweighted = [span._replace(weight=0) for span in rendered.spans]
            (found,) = self._tokenise([rendered._replace(spans=sorted([*numbered, *unweighted]))])
            if isinstance(found, SequenceError):
                raise found
            places = positions_of(items, found.loss_mask).tolist()
            mask = sequence.loss_mask.copy()
            mask[found.loss_mask != 0] = 0
            placed = [
                EncodedItem(item.media.kind, start, length, item.media.blob)
                for item, (start, length) in zip(items, places, strict=True)
            ]
            out.append(sequence._replace(loss_mask=mask, media=placed))
        return out

    def _tokenise(self, rendered: Sequence[Rendered]) -> list[Encoded | SequenceError]:
        """Tokenise all rows in one call; if a row fails, one by one, so that the others succeed."""
        encode = partial(
            self.tokenizer.encode,
            span_by_span=self.options.span_by_span,
            straddling=self.options.straddling == "include",
        )
        try:
            return [*encode(rendered)]
        except SequenceError:
            outcomes: list[Encoded | SequenceError] = []
            for row in rendered:
                try:
                    outcomes += encode([row])
                except SequenceError as error:
                    outcomes.append(error)
            return outcomes

    def _join(
        self, sequences: Sequence[Encoded], rows: int, num_bytes: int, bad_rows: list[SequenceError], weight: float
    ) -> EncodedPiece:
        ids = np.concatenate([np.empty(0, np.int32), *(s.input_ids for s in sequences)]).astype(self.token_dtype)
        mask = np.concatenate([np.empty(0, np.float32), *(s.loss_mask for s in sequences)])
        if weight != 1:
            weighted = (mask * weight).astype(np.float32)
            if weight and not weighted[mask != 0].all():
                raise FormatError(
                    f"--loss-weight: a weight times {weight:g} becomes 0 in float32; use a larger weight, or 0"
                )
            mask = weighted
        if ((mask == 0) | (mask == 1)).all():
            mask = mask.astype(np.uint8)
        lengths = np.array([len(s.input_ids) for s in sequences], np.int64)
        straddling = next((sequence.straddling for sequence in sequences if sequence.straddling), "")
        media = [sequence.media for sequence in sequences] if self.processor is not None else []
        return EncodedPiece(ids, mask, lengths, rows, num_bytes, bad_rows, straddling=straddling, media=media)


def _split(row: Encoded, bounds: NDArray[np.int64] | None) -> list[Encoded]:
    """Split a tokenised row into its sequences. See ``TokenizedRow`` for ``bounds``."""
    if bounds is None or len(bounds) == 2:
        return [row]
    return [Encoded(row.input_ids[start:stop], row.loss_mask[start:stop]) for start, stop in pairwise(bounds.tolist())]


def _at(error: ValueError, path: str, position: int) -> SequenceError:
    """Add file and line to the error. An error about a template that can never work is not changed."""
    if isinstance(error, FormatError):
        raise error
    if isinstance(error, SequenceError):
        return SequenceError(path, position, error.reason)
    return SequenceError(path, position, str(error))
