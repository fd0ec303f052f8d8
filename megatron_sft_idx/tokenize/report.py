"""Counts of a job, for people and for programs: input rows, sequences, packs, seconds."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_sft_idx.chat.types import IGNORED_FIELD, LEFT_OUT_MESSAGE
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header
from megatron_sft_idx.layout.files import listed_columns
from megatron_sft_idx.lines import counted, found_unread, joined
from megatron_sft_idx.storage.local import read_beginning
from megatron_sft_idx.storage.outputs import check_output, write_file
from megatron_sft_idx.storage.publish import Kind, head_of

_SELECTED = (
    ("max_rows", "first", "used, the others left out by --max-rows"),
    ("duplicates", "duplicates", "left out by --dedup: same content as an earlier row"),
    ("not_sampled", "not sampled", "left out by --sample"),
    ("valid", "validation", "used for validation (--valid-fraction)"),
    ("weighted_out", "weighted out", "left out by --repeat"),
    ("repeats", "repeats", "additional copies of rows, by --repeat"),
    ("train", "to train on", "rows"),
    ("untrained_sequences", "untrained", "sequences, or pieces of sequences, left out because no token is trained on"),
)
# By name: what a note counts, in the singular, and what happened to it.
_NOTES = {
    "begins_with_assistant": ("row", "beginning with an assistant message, before any user message"),
    "ends_with_user": ("row", "ending with a user message, which no answer follows"),
    "content_empty": (
        "message",
        "that had no content, rendered with empty content, because the chat template fails otherwise",
    ),
    "content_left_out": ("message", "that had no content, rendered without it, as in transformers"),
    "content_none": (
        "message",
        "that had no content, rendered with null, because the chat template fails otherwise",
    ),
    "control_tokens_read_by_template": (
        "control token",
        "in the data that the chat template itself reads, left unchanged",
    ),
    "recordings_cut": ("recording", "cut off at the end by the processor, which limits the length"),
    "first_token_masks_dropped": ("mask", "on the first token of a sequence, dropped because nothing predicts it"),
    "literals": ("control token", "in the data kept as text"),
    "no_end_of_turn": (
        "answer",
        "without an end-of-turn token, because the chat template writes or marks none, so the model does not learn to"
        " stop: pass --append-eod to end each sequence with a token to stop at, or another template with"
        " --chat-template FILE",
    ),
    "nulls_in_arguments": ("null", "left out of tool call arguments, because table exports add them for missing keys"),
    "nulls_in_tools": ("null", "left out of tools, because table exports add them for missing keys"),
    "packed_rows": ("row", "with several concatenated sequences"),
    "reasoning_dropped": ("message", "whose reasoning the chat template leaves out"),
    "rows_with_seq_start_id": (
        "row",
        "with seq_start_id and loss_mask: if NeMo or Megatron-Bridge packed the input, the masks mark the token before"
        " (--mask-alignment label)",
    ),
    "split_at_system_messages": ("row", "with several conversations, each beginning with a system message"),
    "straddling": (
        "trained token",
        "also containing the end of the text before an answer (--span-by-span avoids that)",
    ),
    "straddling_header": (
        "trained token",
        "with characters of a header (--straddling exclude does not train on such tokens)",
    ),
    "straddling_left_out": ("token", "also containing the end of the text before an answer, not trained"),
    "ends_of_turn_alone": ("answer", "without text, of which only the end of the turn is trained"),
    "thinking_tags_kept": ("answer", "with a reasoning tag after the first one, trained on anyway"),
    "tool_arguments_converted": (
        "tool call",
        "with arguments converted to text or to an object, as the chat template expects",
    ),
}
# Texts for what is done with overlong sequences, and for how trained tokens are lost.
_OVERLONG = {
    "drop": ("dropped", "dropping"),
    "truncate": ("truncated", "truncation"),
    "split": ("split", "splitting"),
}
# The first key of the file, for recognizing it.
_MARK = {"written_by": "megatron-sft-idx"}
_BEGIN = json.dumps(_MARK, indent=2).removesuffix("\n}").encode()
_MAX_SUMMARY_NBYTES = 1 << 26
# Number of rows to name in one line.
MAX_NAMED = 3
_KIND = Kind("a summary", lambda path: head_of(path, len(_BEGIN)) == _BEGIN)


def _said_of(note: str, count: int) -> str:
    """Describe what a note counts."""
    if note.startswith(IGNORED_FIELD):
        unit, what = "field", f"{note.removeprefix(IGNORED_FIELD)!r} not read because of --ignore-field"
    elif note.startswith(LEFT_OUT_MESSAGE):
        unit = f"{note.removeprefix(LEFT_OUT_MESSAGE)} message"
        what = "left out by the chat template, so the model never sees the text (--chat-template FILE sets another one)"
    elif note in _NOTES:
        unit, what = _NOTES[note]
    else:
        return f"{count:,} {note.replace('_', ' ')}"
    return f"{counted(count, unit)} {what}"


def check_summary(path: str, prefix: str, *, overwrite: bool) -> None:
    """Raise FormatError if a summary cannot be written to this path. Call it before hours of work."""
    check_output(path, _KIND, overwrite=overwrite or _is_summary_of(path, prefix))


def _is_summary_of(path: str, prefix: str) -> bool:
    """Return whether there is a summary of this same shard, which a repeated command replaces."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if _KIND.recognize(path):
            content = json.loads(read_beginning(path, _MAX_SUMMARY_NBYTES))
            return isinstance(content, dict) and content.get("prefix") == prefix
    return False


@dataclass(slots=True)
class CorpusReport:
    """Counts of the input rows.

    Attributes:
        rows: number of rows read, including bad ones.
        skipped: number of unusable rows.
        bad_rows: messages of the first ten thousand of these.
        notes: counts by name: tokens that straddle a span's edge, control tokens kept as text, and so on.
        first_rows: file and number of the first row of each note, by name; missing if an earlier job counted it.
        reused: whether an earlier job had tokenised the whole input.
        straddling: text of a trained token that begins in a header; "" if there was none yet.
    """

    rows: int = 0
    skipped: int = 0
    bad_rows: list[str] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    first_rows: dict[str, str] = field(default_factory=dict)
    reused: bool = False
    straddling: str = ""

    @classmethod
    def of(cls, header: Header) -> CorpusReport:
        """Return the counts in the header of a corpus or packed shard."""
        sources = header.metadata["sources"]
        return cls(sources["rows"], sources["skipped"], notes=header.metadata["notes"], reused=True)

    def lines(self, *, found: bool = False) -> list[str]:
        """Return lines for people about the number of rows and of skipped rows; ``found`` as in ``Summary``."""
        reused = " (corpus reused: same input and options)" if self.reused and not found else ""
        lines = [f"rows            {self.rows:,}{reused}"]
        if self.skipped:
            lines.append(f"  skipped       {self.skipped:,}")
        return lines

    def note_lines(self) -> list[str]:
        """Return a line for people about each note."""
        lines = []
        for name, count in self.notes.items():
            first = f"; first in {self.first_rows[name]}" if name in self.first_rows else ""
            lines.append(f"note            {_said_of(name, count)}{first}")
        return lines

    def no_usable_row(self, name: str) -> FormatError:
        """Return the error about an input without a usable row, for the file or folder ``name``."""
        return FormatError(
            f"{name}: no row of the input can be used ({counted(self.rows, 'row')}, {self.skipped:,} skipped)"
        )


def named_rows(rows: Sequence[tuple[str, int]]) -> str:
    """Return the first of these rows, given as place and number of tokens, in one line for people."""
    return ", ".join(f"{place} ({counted(tokens, 'token')})" for place, tokens in rows[:MAX_NAMED])


@dataclass(slots=True)
class PackReport:
    """Counts of packs and their sequences.

    Attributes:
        masked_packs: number of packs without a trained token.
        fill: number of tokens divided by packs times capacity.
        lower_bound: no packing has fewer packs.
        longest: number of tokens of the longest pack.
        most_sequences: largest number of sequences in one pack.
        method: the method whose plan was used.
        overlong: number of sequences longer than the capacity.
        overlong_choice: what was done with them, ``drop``, ``truncate`` or ``split``; ``error`` if none are allowed.
        overlong_rows: place and number of tokens of the longest of these, longest first, at most a thousand; empty if
            an earlier job made the shard.
        dropped_tokens: number of tokens of dropped sequences, and of truncated ones after their cut.
        lost_trained_tokens: number of trained tokens lost to ``--overlong``: tokens of dropped sequences, tokens after
            a cut, and first tokens of cuts, which nothing predicts there.
        dropped_media_sequences: number of sequences dropped because a cut would divide an image or a recording.
        left_out: number of sequences excluded by ``--where``.
        selected: number of rows by result of the selection; sequences and tokens dropped because they train nothing.
        lost_columns: columns of the source that were dropped with permission.
        found: all shards already existed.
        pairs: number of preference pairs, of two sequences each.
        sequence_multiple: multiple that sequence lengths were rounded up to for packing.
    """

    sequences: int
    packs: int
    tokens: int
    trained_tokens: int
    masked_packs: int
    fill: float
    lower_bound: int
    longest: int
    most_sequences: int
    method: str
    overlong: int
    overlong_choice: str
    dropped_tokens: int
    lost_trained_tokens: int
    dropped_media_sequences: int = 0
    overlong_rows: list[tuple[str, int]] = field(default_factory=list)
    left_out: int = 0
    selected: dict[str, int] = field(default_factory=dict)
    lost_columns: list[str] = field(default_factory=list)
    found: bool = False
    pairs: int = 0
    sequence_multiple: int = 1

    @classmethod
    def of(cls, headers: Sequence[Header], overlong_rows: Sequence[tuple[str, int]] = ()) -> PackReport:
        """Return the counts in the headers of a job's shards, and the given ``overlong_rows``."""
        packing = headers[0].metadata["packing"]
        names = ("sequences", "packs", "tokens", "trained_tokens", "masked_packs")
        counts = {name: sum(getattr(header, f"num_{name}") for header in headers) for name in names}
        return cls(
            **counts,
            fill=counts["tokens"] / (counts["packs"] * headers[0].capacity),
            lower_bound=packing["lower_bound"],
            longest=max(header.longest_pack for header in headers),
            most_sequences=max(header.most_sequences for header in headers),
            method=packing["chosen"],
            overlong=packing["overlong_sequences"],
            overlong_choice=packing["overlong"],
            dropped_tokens=packing["dropped_tokens"],
            lost_trained_tokens=packing["lost_trained_tokens"],
            dropped_media_sequences=packing.get("dropped_media_sequences", 0),
            overlong_rows=[*overlong_rows],
            left_out=packing.get("left_out", 0),
            selected=packing.get("selected", {}),
            pairs=counts["sequences"] // 2 if "pair" in listed_columns(headers[0].metadata) else 0,
            sequence_multiple=headers[0].sequence_multiple,
        )

    def overlong_lines(self) -> list[str]:
        """Return lines for people about sequences longer than the capacity; none if there are none."""
        if not self.overlong:
            return []
        lines = [f"overlong        {self.describe_overlong()}"]
        if self.overlong_rows:
            lines.append(f"  longest       {named_rows(self.overlong_rows)}")
        return lines

    def describe_overlong(self) -> str:
        """Describe what was done with sequences longer than the capacity, and what was lost; "" if there are none."""
        if not self.overlong:
            return ""
        done, way = _OVERLONG[self.overlong_choice]
        parted = self.dropped_media_sequences
        dropped = f", {parted:,} dropped, because the cut would go through an image or recording" if parted else ""
        tokens, trained = counted(self.dropped_tokens, "token"), counted(self.lost_trained_tokens, "trained token")
        return (
            f"{counted(self.overlong - parted, 'sequence')} {done}{dropped}: {tokens} left out, {trained} lost to {way}"
        )


@dataclass(slots=True)
class Summary:
    """Counts of a job or of one ``pack`` command, and seconds by stage.

    Attributes:
        prefix: prefix of the packed shard.
        capacity: capacity of its packs.
        corpus: counts of the input; None if only packing was done.
        packing: counts of the training packs.
        seconds: seconds by stage.
        found: an earlier job had finished; nothing was written.
        shards: number of shards for the packs.
        options: options by name, including defaults.
        valid: counts of the validation packs; None if there are none.
    """

    prefix: str
    capacity: int
    corpus: CorpusReport | None
    packing: PackReport
    seconds: dict[str, float] = field(default_factory=dict)
    found: bool = False
    shards: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    valid: PackReport | None = None

    def __str__(self) -> str:
        return joined(self.lines())

    def to_dict(self) -> dict[str, Any]:
        """Return all attributes as JSON values."""
        return asdict(self)

    def write(self, path: str, *, overwrite: bool = False) -> None:
        """Write ``to_dict`` as JSON, replacing an older summary of the same shard. See ``check_summary`` for errors."""
        text = json.dumps({**_MARK, **self.to_dict()}, indent=2, ensure_ascii=False) + "\n"
        # Paths may have bytes that are not UTF-8, for which JSON has an escape.
        may_replace = overwrite or _is_summary_of(path, self.prefix)
        write_file(path, text.encode(errors="backslashreplace"), _KIND, overwrite=may_replace)

    def lines(self) -> list[str]:
        """Return the summary as lines for people."""
        packing = self.packing
        share = f"{100 * packing.trained_tokens / packing.tokens:.1f}%" if packing.tokens else "0%"
        which = f"-*-of-{self.shards:05d}" if self.shards > 1 else ""
        shards = [f"{self.prefix}{which}"] + [f"{self.prefix}.valid"] * (self.valid is not None)
        lines = [f"found {shards[0]}: {found_unread(*shards)}" if self.found else f"wrote {shards[0]}"]
        corpus = self.corpus
        if corpus is not None:
            lines += corpus.lines(found=self.found)
        selected = packing.selected
        lines += [f"  {name:<14}{selected[key]:,} {what}" for key, name, what in _SELECTED if selected.get(key)]
        in_pairs = f" in {counted(packing.pairs, 'pair')}" if packing.pairs else ""
        lines += [
            f"sequences       {packing.sequences:,}{in_pairs}",
            f"packs           {packing.packs:,} (no packing has fewer than {packing.lower_bound:,}; {packing.method})",
            f"tokens          {packing.tokens:,}",
            f"trained tokens  {packing.trained_tokens:,} ({share})",
            f"fill            {100 * packing.fill:.3f}% of {self.capacity:,} positions per pack",
            f"pack size       at most {counted(packing.longest, 'token')} and"
            f" {counted(packing.most_sequences, 'sequence')} per pack",
        ]
        if_any = {
            f"multiple        packed with each sequence rounded up to a multiple of {packing.sequence_multiple}": (
                packing.sequence_multiple > 1
            ),
            f"left out        {counted(packing.left_out, 'sequence')} left out by --where": packing.left_out,
            f"lost            columns {', '.join(packing.lost_columns)}: one row per pack of the source": (
                packing.lost_columns
            ),
            f"warning         {counted(packing.masked_packs, 'pack')} without a token to train on: inspect lists such"
            " packs, --drop-untrained leaves such sequences out": packing.masked_packs,
        }
        lines += packing.overlong_lines()
        lines += [line for line, count in if_any.items() if count]
        if (valid := self.valid) is not None:
            lines.append(
                f"validation      {counted(valid.sequences, 'sequence')}, {counted(valid.tokens, 'token')},"
                f" {valid.trained_tokens:,} trained, in {counted(valid.packs, 'pack')}: {self.prefix}.valid"
            )
            if valid.left_out:
                lines.append(f"  left out      {counted(valid.left_out, 'sequence')} left out by --where")
            lines += [f"  {line[:14].strip():<14}{line[16:]}" for line in valid.overlong_lines()]
        if corpus is not None:
            lines += corpus.note_lines()
        lines.append("seconds         " + ", ".join(f"{stage} {taken:.1f}" for stage, taken in self.seconds.items()))
        return lines
