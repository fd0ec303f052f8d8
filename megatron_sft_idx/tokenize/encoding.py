"""Rows become sequences of token ids with masks and columns, a piece of input at a time."""

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
from megatron_sft_idx.chat.packed_rows import UndecidedError, conversations_of
from megatron_sft_idx.chat.preferences import read_judged
from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.chat.template import ChatTemplate, MaskOptions
from megatron_sft_idx.chat.tokenizer import Backend, DifferentIdsError, Tokenizer, append_eod, load_tokenizer
from megatron_sft_idx.chat.training_fields import training_names
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
# The version of the way from rows to tokens and masks. It must be raised when the same row gives others, so that parts
# which were made before are not used.
ENCODING_VERSION = 1
# Options that do not decide what a part holds: a part with a bad row is made only if these are skipped, and weights
# are those of one file.
_NOT_IN_PARTS = ("on_bad_row", "loss_weights")


@dataclass(frozen=True, slots=True)
class EncodingOptions:
    """How rows become sequences; picklable, the same in every worker.

    Attributes:
        tokenizer: folder or vocabulary file of the tokenizer.
        tokenizer_backend: ``tokenizers`` leaves gigatoken out.
        chat_template: template text that replaces the tokenizer's own.
        template_name: what errors call the template, such as its file.
        template_kwargs: extra variables for the template.
        masks: which tokens are trained on.
        rows: how input rows are read.
        append_eod: end every sequence with the tokenizer's end-of-sequence id, trained where the sequence ends in a
            trained answer, unless it ends with that id already.
        span_by_span: tokenise each trained span by itself, so that no token straddles its edge.
        straddling: whether a token that begins before its span and ends in it is trained on.
        on_bad_row: ``error`` stops at the first row that cannot be used, ``skip`` counts and lists it.
        source: make the column ``source``.
        loss_weights: by the number of the input file, the factor of its rows' masks; empty for 1 everywhere.
        content: make the column ``content``.
        keep_fields: dtypes of the fields of rows that become columns, by name, as of ``read_keep_fields``.
        processor: folder of the processor that expands images and audio; None where rows are text alone.
        media: what is read of images and audio.
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
        """Names of the columns that shards have; not ``content``, which only parts have."""
        return [*self.column_specs([])]

    def column_specs(self, files: Sequence[Mapping[str, str]]) -> dict[str, ColumnSpec]:
        """The columns that shards have, by name; ``files`` are those that ``source`` names, a dict each."""
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
    """The sequences of one piece of input, end to end.

    Attributes:
        input_ids: uint16 or int32 [tokens].
        loss_mask: token-aligned, uint8 [tokens], or float32 where a weight is neither 0 nor 1.
        lengths: of the sequences, int64 [sequences].
        rows: rows read, bad ones included.
        num_bytes: bytes of the input file that hold the piece, for progress.
        bad_rows: errors of the rows that could not be used, in order; with ``on_bad_row="error"`` only the first.
        notes: counts by name.
        straddling: text of a token that is trained on and begins in a header; "" where there is none.
        undecided: number of the row, like those of bad rows, at which encoding stopped because a system message comes
            after an answer in it and the options do not say what that means; 0 where there is none.
        columns: values of each sequence by name, [sequences] or [sequences, width]. ``source`` is uint32 [sequences,
            2]: 0, and the number of the row (of JSON lines, the line), counted from the first of the piece. ``label``
            is uint8, where rows are of KTO. ``content`` is uint32 [sequences, 5]: the hash of the row (``row_hash``),
            and the number of the sequence in the row. Fields that are kept have their names and dtypes.
        media: images and recordings of each sequence, where a processor expands them.
    """

    input_ids: NDArray[Any]
    loss_mask: NDArray[Any]
    lengths: NDArray[np.int64]
    rows: int
    num_bytes: int
    bad_rows: list[SequenceError]
    notes: Counter[str]
    straddling: str = ""
    undecided: int = 0
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    media: Sequence[Sequence[EncodedItem]] = ()


def items_of(media: Sequence[Sequence[EncodedItem]]) -> tuple[NDArray[np.int64], Items]:
    """How many images and recordings each sequence has, int64 [sequences], and all of them, in order."""
    rows = [(item.start, item.length, KINDS[item.kind], item.blob) for of_sequence in media for item in of_sequence]
    starts, lengths, kinds, blobs = np.array(rows, np.uint32).reshape(-1, 4).T
    return np.array([*map(len, media)], np.int64), Items(starts, lengths, kinds.astype(np.uint8), blobs)


class _Row(NamedTuple):
    """A row on its way.

    Attributes:
        position: number of the row in its file.
        label: of KTO, else None.
        content: hash of its content, where the column ``content`` is made.
        conversations: its one conversation, several, or the two of a pair; none in a row that came tokenised.
        template: the template that renders them.
        tokenized: the row that came tokenised, else None.
        rendered: its rendered texts: one, one for each turn or conversation, or the two of a pair.
        notes: counts for the summary by name, of how the row was read.
        kept: values of the fields that become columns, in the order of ``EncodingOptions.keep_fields``.
        media: of each conversation, its images and recordings.
        items: of each rendered text, where these stand in it.
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
    """What a row makes sequences of: conversations, ids or a text; and its label of KTO.

    Raises:
        UndecidedError: a system message comes after an answer, and the options do not say what that means.
        RowError: the row cannot be used.
    """
    if options.kind in ("preference", "kto"):
        return read_judged(data, options)
    source = to_sequence_source(data, options)
    if not isinstance(source, Conversation):
        return [source], None
    return conversations_of(source, options.system_starts), None


class RowEncoder:
    """Turns pieces of input into token ids with their masks.

    Attributes:
        options: as given, with the template that mistral-common makes for the tokenizer, which takes seconds.
        digest: hash of all that decides which tokens and masks a row becomes, but for the weight of its file.

    Raises:
        FormatError: the tokenizer or the template cannot be used.
    """

    def __init__(self, options: EncodingOptions) -> None:
        # One thread a process: workers share the cores, and the library's threads do not survive a fork.
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
            raise FormatError(f"{options.tokenizer}: --append-eod, but the tokenizer names no eos_token; leave it out")
        if options.rows.kind in ("preference", "kto") and options.masks.train_on in ("markers", "all"):
            raise FormatError(
                f"--row-kind {options.rows.kind} judges answers; leave out --train-on {options.masks.train_on}"
            )
        named = self.tokenizer.chat_templates
        if self.processor is not None and self.processor.chat_template is not None:
            named = {"default": self.processor.chat_template}
        if options.chat_template is not None:
            named = {"default": options.chat_template}
        self.template = self._template(named.get("default", self.tokenizer.chat_template))
        # Some tokenizers bring a template of its own for rows with tools; transformers takes it the same way.
        self.tools_template = self._template(named["tool_use"]) if "tool_use" in named else self.template
        # A text is all that its rendering holds, so that it is trained on, and spells control tokens, as chats do.
        self.text_template = self._template(_TEXT_TEMPLATE) if options.rows.train_on == "all" else None
        described = {**self.describe_parts(), "token_dtype": self.token_dtype.name, "version": ENCODING_VERSION}
        try:
            self.digest = xxhash.xxh3_128_hexdigest(orjson.dumps(described, option=orjson.OPT_SORT_KEYS))
        except TypeError as error:  # all else in it is ours
            raise FormatError(f"chat_template_kwargs: not what JSON can hold: {error}") from None

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
        """Of ``describe``, all that decides what a part of tokenization holds, for any file."""
        described = self.describe()
        options = {name: value for name, value in described["options"].items() if name not in _NOT_IN_PARTS}
        return described | {"options": options}

    def weight_of(self, file: int) -> float:
        """What the loss of the rows of a file, by its number, is multiplied by."""
        return self.options.loss_weights[file] if self.options.loss_weights else 1.0

    def describe(self) -> dict[str, Any]:
        """All that decides which tokens and masks a row becomes, for the shard's header."""
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
            max_rows: how many usable rows are taken; None for all. Rows behind them are not read.
            media: reads images and audio (``media_of``); None where their files need not be kept.

        Raises:
            DifferentIdsError: gigatoken and tokenizers give different ids for a row.
        """

        def next_batch() -> list[InputRow]:
            missing = _BATCH_ROWS if max_rows is None else min(max_rows - len(made), _BATCH_ROWS)
            return list(islice(waiting, missing))

        options, rows, undecided, waiting = self.options, 0, 0, piece.rows()
        media = media or self.media_of(piece.path)
        made: list[tuple[_Row, list[Encoded]]] = []
        bad_rows: list[SequenceError] = []
        while batch := next_batch():
            read, undecided = self._read_batch(batch, media)
            rows += len(read)
            made += self._encode_batch(piece, self._rendered(piece, read, bad_rows), bad_rows)
            if undecided or (bad_rows and options.on_bad_row == "error"):
                break
        bad_rows.sort(key=lambda error: error.position or 0)
        weight = self.weight_of(file)
        done = self._join([one for _, of_row in made for one in of_row], rows, piece.num_bytes, bad_rows, weight)
        done.undecided = undecided
        for row, _ in made:
            if row.notes:
                done.notes.update(row.notes)
        # Columns have a row for each of a row's sequences.
        each = np.array([len(of_row) for _, of_row in made], np.int64)
        if options.source:
            positions = np.array([row.position for row, _ in made], np.int64)
            done.columns["source"] = source = np.zeros((int(each.sum()), 2), np.uint32)
            source[:, 1] = np.repeat(positions - piece.first, each)
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
        """What reads images and audio of a piece of the file with this path; ``blobs`` takes their files."""
        return PieceMedia(path, self.options.media, CollectedBlobs() if blobs is None else blobs, self._sizes)

    def content_of_pieces(self, pieces: Iterable[Piece], num_rows: int, path: str | None = None) -> Iterator[str]:
        """What ``PartInfo.content`` has of each piece once so many rows of all of them were encoded.

        ``path`` is where their file lies; None for that of each piece.
        """
        for piece in pieces:
            media = self.media_of(path or piece.path)
            for row in islice(piece.rows() if self.processor is not None else (), num_rows):
                num_rows -= 1
                with contextlib.suppress(ValueError):
                    media.note([each for each in self._sources(row)[0] if isinstance(each, Conversation)])
            yield piece.fingerprint() + media.digest

    def _read_batch(
        self, batch: Sequence[InputRow], media: PieceMedia
    ) -> tuple[list[tuple[int, _Row | ValueError]], int]:
        """The rows with their positions, and in place of bad rows the errors; up to the first one that is undecided.

        The second value is the position of that row, which is not among the rows; 0 where there is none.
        """
        read: list[tuple[int, _Row | ValueError]] = []
        for row in batch:
            try:
                read.append((row.position, self._read(row, media)))
            except UndecidedError:
                return read, row.position
            except ValueError as error:
                read.append((row.position, error))
        return read, 0

    def _sources(
        self, row: InputRow
    ) -> tuple[Sequence[Conversation | TokenizedRow | TextRow], int | None, Sequence[int | float]]:
        """What a row makes sequences of, its label of KTO, and its values of fields that are kept."""
        if isinstance(row.data, SequenceError):
            raise row.data
        data = row.data
        if self._kept_flags and isinstance(data, dict):
            # A field that is kept is read, also where its name speaks of what is trained on.
            data = {name: value for name, value in data.items() if name not in self._kept_flags}
        return *read_row(data, self.options.rows), values_of(row.data, self.options.keep_fields)

    def _read(self, row: InputRow, reader: PieceMedia) -> _Row:
        options, position = self.options, row.position
        sources, label, kept = self._sources(row)
        content, notes = row_hash(sources, label) if options.content else None, sources[0].notes
        if row.notes:
            notes = Counter(notes) + Counter(row.notes)
        if isinstance(sources[0], TokenizedRow):
            if self.processor is not None and np.isin(sources[0].input_ids, self.processor.token_ids).any():
                raise RowError(
                    "its input_ids have tokens of images or audio, whose files it has not: give its messages"
                )
            return _Row(position, label, content, [], None, sources[0], notes=notes, kept=kept)
        conversations = [source for source in sources if isinstance(source, Conversation)]
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
                f"{options.tokenizer}: the tokenizer has no chat template; name one with --chat-template FILE"
            )
        return _Row(position, label, content, conversations, template, notes=notes, kept=kept, media=media)

    def _expanded(self, row: _Row, outcomes: Sequence[Sequence[Rendered]]) -> _Row:
        """A row with its rendered texts, in which placeholders are expanded. RowError: they do not fit its media."""
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
                    f"the chat template writes {len(placed)} placeholders for {len(media)} images and recordings of the"
                    " row; --chat-template FILE names another template"
                )
        return row._replace(rendered=rendered, items=items)

    def _rendered(
        self, piece: Piece, read: Sequence[tuple[int, _Row | ValueError]], bad_rows: list[SequenceError]
    ) -> list[_Row]:
        """The good rows of a batch, rendered; bad ones are added to those, of which the first may be the end.

        Every row takes a step before the next step begins, whose code then stays in the processor's caches.
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
                # All of a row are taken, and only then looked at: a bad one spoils the row.
                for outcome in [next(texts[one.template]) for _ in one.conversations if one.template]:
                    if isinstance(outcome, ValueError):
                        raise outcome
                    outcomes.append(outcome)
                done = self._expanded(one, outcomes)
                if self.options.rows.kind == "preference" and len(done.rendered) != 2:
                    raise RowError(
                        "an answer makes several sequences with --earlier-reasoning split; a pair is one of each"
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
        """The sequences of each row; all rows of a template are tokenised in one call, and bad ones added to those."""
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
                    # All turns of a row are taken, and only then looked at: a bad one spoils the row.
                    made = []
                    for outcome in [next(encoded[row.template]) for _ in row.rendered]:
                        if isinstance(outcome, SequenceError):
                            raise outcome
                        if not len(outcome.input_ids):
                            raise ValueError("the row has no tokens; a sequence holds at least one")
                        made.append(outcome)
                    if row.items:
                        made = self._with_items(row, made)
            except ValueError as error:
                bad_rows.append(_at(error, piece.path, row.position))
                continue
            if self.options.append_eod:
                made = [append_eod(sequence, self.tokenizer) for sequence in made]
            # What columns need is kept; the texts of a whole piece are not.
            yield row._replace(conversations=(), tokenized=None, rendered=(), media=(), items=()), made

    def _with_items(self, row: _Row, made: list[Encoded]) -> list[Encoded]:
        """The sequences of a row with their images and recordings, whose tokens are not trained on."""
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
        """All rows in one call; one by one where a row cannot be tokenised, so that the others are."""
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
        notes: Counter[str] = Counter()
        for sequence in sequences:
            if sequence.notes:
                notes.update(sequence.notes)
        ids = np.concatenate([np.empty(0, np.int32), *(s.input_ids for s in sequences)]).astype(self.token_dtype)
        mask = np.concatenate([np.empty(0, np.float32), *(s.loss_mask for s in sequences)])
        if weight != 1:
            weighted = (mask * weight).astype(np.float32)
            if weight and not weighted[mask != 0].all():
                raise FormatError(
                    f"--loss-weight: float32 rounds a weight times {weight:g} to 0; give a larger one, or 0"
                )
            mask = weighted
        if ((mask == 0) | (mask == 1)).all():
            mask = mask.astype(np.uint8)
        lengths = np.array([len(s.input_ids) for s in sequences], np.int64)
        straddling = next((sequence.straddling for sequence in sequences if sequence.straddling), "")
        media = [sequence.media for sequence in sequences] if self.processor is not None else []
        return EncodedPiece(ids, mask, lengths, rows, num_bytes, bad_rows, notes, straddling, media=media)


def _split(row: Encoded, bounds: NDArray[np.int64] | None) -> list[Encoded]:
    """The sequences of a row that came tokenised; ``bounds`` as of ``TokenizedRow``."""
    if bounds is None or len(bounds) == 2:
        return [row]
    return [Encoded(row.input_ids[start:stop], row.loss_mask[start:stop]) for start, stop in pairwise(bounds.tolist())]


def _at(error: ValueError, path: str, position: int) -> SequenceError:
    """The error with the file and line it belongs to; a template that can never work stays what it is."""
    if isinstance(error, FormatError):
        raise error
    if isinstance(error, SequenceError):
        return SequenceError(path, position, error.reason)
    return SequenceError(path, position, str(error))
