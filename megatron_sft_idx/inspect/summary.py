"""Count the contents of a shard in one pass, and point out packs to check before training on them."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.inspect.origin import SourceCounts, cut_length
from megatron_sft_idx.inspect.shown_media import count_media
from megatron_sft_idx.inspect.tally import HashSample, LargestValues, Tally
from megatron_sft_idx.layout import Header
from megatron_sft_idx.layout.column import ColumnSpec
from megatron_sft_idx.layout.doubts import doubts
from megatron_sft_idx.layout.files import DATA_SUFFIXES, listed_columns
from megatron_sft_idx.lines import counted, shortened
from megatron_sft_idx.packs.run import Window, windows
from megatron_sft_idx.packs.source_names import SOURCE, origin_name, source_names
from megatron_sft_idx.shard import Shard
from megatron_sft_idx.storage.progress import Update

PERMILLE = 1000
_MAX_REMARKS = 4
_LOSSES = {
    "overlong_sequences": "overlong sequences",
    "dropped_tokens": "dropped tokens",
    "lost_trained_tokens": "trained tokens lost",
}


class Remark(NamedTuple):
    """A note on a pack, or on a sequence of it; both are counted from 0."""

    pack: int
    sequence: int | None
    note: str

    @property
    def name(self) -> str:
        """``pack 3, sequence 1``."""
        return f"pack {self.pack}" + ("" if self.sequence is None else f", sequence {self.sequence}")


# Kinds of packs and sequences that are rarely intended: what is counted, and the remark on each.
_FLAGS = {
    "All masked": ("pack", "no token is trained on"),
    "All trained": ("pack", "every token is trained on"),
    "Cut mid-turn": ("sequence", "ends in a trained token"),
    "One-token sequences": ("sequence", "{tokens}"),
}
# Rankings of packs, and the unit of the ranked value.
_LARGEST = {"Most sequences": "sequence", "Costliest attention": "pair of tokens", "Least filled": "token"}
_PLURALS = {"pair of tokens": "pairs of tokens"}


@dataclass(frozen=True, slots=True)
class Oddity:
    """One kind of packs or sequences to check: the largest ones, or a rarely intended kind.

    Attributes:
        kind: its name, in a few words.
        count: number of packs or sequences of this kind; None for a list of the largest.
        unit: what is counted, in the singular.
        remarks: the first few of the kind, or the largest.
        exact: whether ``count`` is for the whole shard, not for a sample of its hashes.
    """

    kind: str
    count: int | None
    unit: str
    remarks: Sequence[Remark]
    exact: bool = True

    @property
    def counted(self) -> str:
        """Return ``3 packs``, ``none``, or "" if ``count`` is None."""
        if not self.count:
            return "" if self.count is None else "none"
        return counted(self.count, self.unit)


class Survey:
    """The counts of a shard. Each of its windows is added once.

    Attributes:
        shard: the shard.
        header: its header.
        nbytes: size of each file, by suffix.
        sequence_lengths: number of tokens of every sequence.
        pack_lengths: number of tokens of every pack.
        sequences: number of sequences of every pack.
        cost: number of pairs of tokens that attend to each other in every pack.
        trained, sequence_trained: trained fraction of every pack, and of every sequence, in thousandths.
        sources: counts by input file; None if the shard does not have the origin of its sequences.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard, self.header = shard, shard.header
        digests = zip(DATA_SUFFIXES, self.header.digests, strict=True)
        self.nbytes = {suffix: digest.nbytes for suffix, digest in digests} | {".seq.idx": self.header.seq_idx_nbytes}
        self.nbytes |= {f".{name}.col": column.header.nbytes for name, column in shard.columns.items()}
        if (media := shard.media) is not None:
            self.nbytes |= {".media.data": media.header.data_nbytes, ".media.items": media.header.nbytes}
        longest = self.header.longest_pack
        self.sequence_lengths, self.pack_lengths = Tally(longest), Tally(longest)
        self.sequences, self.cost = Tally(self.header.most_sequences), Tally(longest * (longest + 1) // 2)
        self.trained, self.sequence_trained = Tally(PERMILLE), Tally(PERMILLE)
        self._cut_length = cut_length(self.header)
        self._counts: Counter[str] = Counter()  # by kind in ``_FLAGS``
        self._largest = {kind: LargestValues(_MAX_REMARKS) for kind in (*_FLAGS, "Longest sequences", *_LARGEST)}
        self._repeats = HashSample()
        self.names = source_names(shard.columns)
        self.sources = None if self.names is None else SourceCounts(self.names, shard.header)

    @property
    def fill(self) -> float:
        """Number of tokens of all packs divided by the number of their positions."""
        positions = self.header.num_packs * self.header.capacity
        return self.header.num_tokens / positions if positions else 0.0

    @property
    def cost_spread(self) -> float:
        """Number of attention pairs of the costliest pack divided by the mean over all packs."""
        return self.cost.largest / self.cost.mean if self.cost.total else 0.0

    def add(self, window: Window) -> None:
        """Add the contents of a window. FormatError: packs are larger than the header's maximum (rule H9)."""
        ids, loss = window.content()
        lengths, pack_lengths = np.diff(window.bounds), np.diff(window.pack_bounds)
        begins, counts = window.sequence_offsets[:-1], np.diff(window.sequence_offsets)
        # ``Tally`` has no space for values above its maximum.
        self._require_at_most("longest_pack", pack_lengths, self.header.longest_pack)
        self._require_at_most("most_sequences", counts, self.header.most_sequences)
        cost = np.add.reduceat(lengths * (lengths + 1) // 2, begins)
        trained = _native.count_positive(loss, window.bounds)
        of_packs = np.add.reduceat(trained, begins)
        self.sequence_lengths.add(lengths)
        self.pack_lengths.add(pack_lengths)
        self.sequences.add(counts)
        self.cost.add(cost)
        self.sequence_trained.add(_permille(trained, lengths))
        self.trained.add(_permille(of_packs, pack_lengths))
        # Entry j of a mask is about token j + 1, so the entry before the last one says whether the last token is
        # trained on.
        is_cut = (lengths == (self._cut_length or 0)) & (loss[np.maximum(window.bounds[1:] - 2, 0)] > 0)
        # The first token of a sequence is never trained on, because nothing predicts it.
        is_whole = (of_packs > 0) & (of_packs == pack_lengths - counts)
        values = {"All masked": of_packs == 0, "All trained": is_whole}
        values |= {"Most sequences": counts, "Costliest attention": cost, "Least filled": -pack_lengths}
        for kind, of_each in values.items():
            self._add_values(kind, window.first_pack, of_each)
        values = {"Cut mid-turn": is_cut, "One-token sequences": lengths == 1, "Longest sequences": lengths}
        for kind, of_each in values.items():
            self._add_values(kind, window.first_sequence, of_each)
        hashes = _native.hash_runs(ids, window.bounds)
        self._repeats.add(hashes, window.first_sequence)
        if self.sources is not None:
            self.sources.add(window, trained, hashes)

    def _add_values(self, kind: str, first: int, values: NDArray[Any]) -> None:
        self._largest[kind].add(first, values)
        if kind in _FLAGS:
            self._counts[kind] += int(np.count_nonzero(values))

    def _require_at_most(self, name: str, values: NDArray[np.int64], stated: int) -> None:
        if (largest := int(values.max())) > stated:
            raise FormatError(
                f"{self.shard.prefix}: {name} is {stated} in the header, but {largest} in the data (rule H9); run"
                " megatron-sft-idx rebuild to derive the header from the data"
            )

    @cached_property
    def odd(self) -> list[Oddity]:
        """Return all kinds of oddities, some of them without remarks. Every window must have been added.

        A ranking has no remarks if all packs, or all sequences, have the same value.
        """
        odd = []
        for kind, (unit, note) in _FLAGS.items():
            numbers = [number for is_so, number in self._largest[kind].pairs if is_so]
            remarks = [
                Remark(number, None, note) if unit == "pack" else self._sequence(number, note) for number in numbers
            ]
            is_known = kind != "Cut mid-turn" or self._cut_length is not None
            odd.append(Oddity(kind, self._counts[kind] if is_known else None, unit, remarks))
        times = self._repeats.merged().times
        repeated = [
            self._sequence(number, f"{{tokens}}, {count:,} times")
            for count, number in self._repeats.most_repeated(_MAX_REMARKS)
        ]
        num_copies = int(times.sum()) - len(times)
        odd.append(Oddity("Repeated sequences", num_copies, "copy", repeated, not self._repeats.bits))
        longest = [self._sequence(number, "{tokens}") for _, number in self._largest["Longest sequences"].pairs]
        odd.append(Oddity("Longest sequences", None, "", [] if self.sequence_lengths.is_constant else longest))
        tallies = {
            "Most sequences": self.sequences,
            "Costliest attention": self.cost,
            "Least filled": self.pack_lengths,
        }
        for kind, unit in _LARGEST.items():
            pairs = [] if tallies[kind].is_constant else self._largest[kind].pairs
            if kind == "Least filled":
                # A pack as long as the longest is not odd, even if it is among the four shortest.
                pairs = [(-length, pack) for length, pack in pairs if -length < self.header.longest_pack]
            remarks = [Remark(pack, None, counted(value, unit, _PLURALS.get(unit))) for value, pack in pairs]
            odd.append(Oddity(kind, None, "", remarks))
        return odd

    def _sequence(self, number: int, note: str) -> Remark:
        """Return a remark on sequence ``number`` of the shard, with its length for ``{tokens}`` and its origin."""
        pack, sequence, length = locate_sequence(self.shard, number)
        note = note.format(tokens=counted(length, "token"))
        if self.names is not None:
            origin = self.shard.columns[SOURCE].values[number : number + 1][0].tolist()
            note = f"{note}, {origin_name(self.names, origin)}"
        return Remark(pack, sequence, note)


def _permille(part: NDArray[np.int64], whole: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``part / whole`` in thousandths, rounded, int64."""
    shares: NDArray[np.int64] = (2 * part * PERMILLE + whole) // (2 * whole)
    return shares


def locate_sequence(shard: Shard, number: int) -> tuple[int, int, int]:
    """Return the position of sequence ``number`` of a shard: its pack, its number in the pack, its length in tokens."""
    offsets = shard.files.sequence_offsets
    pack = bisect_right(range(len(shard)), number, key=lambda i: int(offsets[i : i + 1][0])) - 1
    sequence = number - int(offsets[pack : pack + 1][0])
    start, stop = shard[pack]["seq_boundaries"][sequence : sequence + 2].tolist()
    return pack, sequence, stop - start


def survey_shard(shard: Shard, *, on_progress: Update | None = None) -> Survey:
    """Count the contents of a shard in bounded memory.

    Open it with ``pread``: mapped pages count as memory of a process.

    Args:
        shard: the shard.
        on_progress: called after each window with its tokens and packs.

    Raises:
        FormatError: the indexes do not divide the tokens into packs and sequences, or contradict the header.
    """
    survey = Survey(shard)
    for window in windows(shard.files, columns={} if survey.sources is None else {SOURCE: shard.columns.open(SOURCE)}):
        survey.add(window)
        if on_progress:
            on_progress(window.num_tokens, len(window))
    return survey


# ---- information in the header ----


def fingerprints(header: Header) -> dict[str, str]:
    """Return fingerprints of a shard's sources, by name; missing ones are omitted."""
    texts = {
        "shard": header.shard_id.hex(),
        "tokenizer": header.tokenizer,
        "chat template": header.template,
        "source": header.source,
    }
    return {name: value for name, value in texts.items() if value is not None}


def losses(header: Header) -> dict[str, int]:
    """Return the counts of lost data in the metadata: rows skipped, sequences too long, tokens dropped."""
    counts: dict[str, Any] = {}
    sources, packing = header.metadata.get("sources"), header.metadata.get("packing")
    if isinstance(sources, dict):
        counts["rows skipped"] = sources.get("skipped")
    if isinstance(packing, dict):
        counts |= {name: packing.get(key) for key, name in _LOSSES.items()}
    # The metadata is untrusted.
    return {name: value for name, value in counts.items() if type(value) is int and 0 <= value < 2**63}


# ---- the summary for people and for programs ----


def column_kind(spec: ColumnSpec) -> str:
    """``float32 x 1 a pack``."""
    labels = ", aligned with labels" if spec.alignment == "label" else ""
    return f"{spec.dtype.name} x {spec.width} per {spec.per}{labels}"


def column_lines(shard: Shard) -> Iterator[tuple[str, str]]:
    """Yield a heading and a short description for each column."""
    listed = listed_columns(shard.header.metadata)
    for name, column in shard.columns.items():
        origin = "written with the shard" if name in listed else "attached"
        yield f"column {name}", f"{column_kind(column.spec)}, {column.header.nbytes:,} bytes, {origin}"


def media_lines(shard: Shard) -> Iterator[tuple[str, str]]:
    """Yield a heading and a line about the images and audio of a shard, if it has some."""
    if (media := shard.media) is not None:
        yield "images and audio", count_media(media).line


def _columns_dict(shard: Shard) -> dict[str, dict[str, Any]]:
    """Return kind and size of each column, by name, and whether the shard was written with it (``listed``)."""
    listed = listed_columns(shard.header.metadata)
    columns = {}
    for name, column in shard.columns.items():
        spec = column.spec
        kind = {"per": spec.per, "dtype": spec.dtype.name, "width": spec.width, "alignment": spec.alignment}
        columns[name] = {**kind, "nbytes": column.header.nbytes, "listed": name in listed}
    return columns


def summary_lines(prefix: str, survey: Survey) -> list[str]:
    """Return the lines of the summary, for people."""
    header = survey.header
    if not header.num_packs:
        return [f"{prefix}: an empty shard, without packs", *_table(_facts(survey)), "", *_table(provenance(header))]
    return [
        f"{prefix}",
        *_table(_facts(survey)),
        "",
        f"{'':22}{'min':>10}{'5%':>10}{'median':>10}{'95%':>10}{'max':>10}{'mean':>12}",
        _row("sequence length", survey.sequence_lengths),
        _row("pack length", survey.pack_lengths),
        _row("sequences per pack", survey.sequences),
        _row("trained %", survey.trained, 0.1),
        "",
        *_source_lines(survey),
        *_odd_lines(survey),
        *_table(provenance(header)),
    ]


def _facts(survey: Survey) -> Iterator[tuple[str, str]]:
    header, sizes = survey.header, survey.nbytes
    if header.num_packs:
        masked = f" ({header.num_masked_packs:,} all masked)" if header.num_masked_packs else ""
        share = 100 * header.num_trained_tokens / header.num_tokens
        yield "packs", f"{header.num_packs:,}{masked}"
        yield "sequences", f"{header.num_sequences:,}"
        yield "tokens", f"{header.num_tokens:,} ({header.token_dtype.name})"
        yield "trained tokens", f"{header.num_trained_tokens:,} ({share:.1f}%; masks {header.mask_dtype.name})"
        yield "fill", f"{100 * survey.fill:.2f}%"
        yield "attention", f"the costliest pack costs {survey.cost_spread:.2f} times the mean"
    yield "capacity", f"{header.capacity:,}, sequence multiple {header.sequence_multiple}"
    for name, count in losses(header).items():
        yield name, f"{count:,}"
    yield "on disk", f"{sum(sizes.values()):,} bytes: " + ", ".join(f"{k} {v:,}" for k, v in sizes.items())
    yield from column_lines(survey.shard)
    yield from media_lines(survey.shard)


def provenance(header: Header) -> Iterator[tuple[str, str]]:
    """Yield the sources of a shard, as fingerprints, and why its contents may differ from what was written."""
    for name, value in fingerprints(header).items():
        yield f"{name} id" if name == "shard" else name, shortened(value, 200)
    yield from (("note", doubt) for doubt in doubts(header.metadata))
    if header.rebuilt:
        yield "rebuilt", "the header was derived from the data; values that only the header contained are lost"


def _table(rows: Iterator[tuple[str, str]]) -> list[str]:
    return [f"{name:21} {value}" for name, value in rows]


def _row(name: str, tally: Tally, scale: float = 1) -> str:
    digits = 0 if scale == 1 else 1
    values = [tally.least, *(tally.quantile(share) for share in (0.05, 0.5, 0.95)), tally.largest]
    return (
        f"{name:22}" + "".join(f"{value * scale:>10,.{digits}f}" for value in values) + f"{tally.mean * scale:>12,.1f}"
    )


_MAX_FILES_SHOWN = 20


def _source_lines(survey: Survey) -> Iterator[str]:
    """Yield a table of the input files with the most tokens."""
    if survey.sources is None:
        return
    files = sorted(survey.sources.table(), key=lambda file: -file.tokens)
    about = "" if survey.sources.exact else "; rows, copies and elsewhere are estimated from a sample"
    yield f"{counted(len(files), 'input file')}{about}"
    yield f"{'rows':>10}{'sequences':>11}{'tokens':>14}{'trained %':>11}{'cut':>8}{'copies':>8}{'elsewhere':>11}"
    for file in files[:_MAX_FILES_SHOWN]:
        counts = f"{file.rows:>10,}{file.sequences:>11,}{file.tokens:>14,}{100 * file.trained:>11.1f}"
        yield f"{counts}{file.cut:>8,}{file.copies:>8,}{file.elsewhere:>11,}  {shortened(file.name, 60)}"
    if len(files) > _MAX_FILES_SHOWN:
        yield f"and {len(files) - _MAX_FILES_SHOWN:,} more; --json lists all of them"
    yield ""


def _odd_lines(survey: Survey) -> Iterator[str]:
    for odd in survey.odd:
        sampled = "" if odd.exact else " in the sample"
        remarks = [f"{remark.name} ({remark.note})" for remark in odd.remarks]
        if shown := [*([odd.counted + sampled] if odd.count else []), *remarks]:
            yield f"{odd.kind.lower():22}{shown[0]}"
            yield from (f"{'':22}{line}" for line in shown[1:])
    yield ""


def summary_dict(prefix: str, survey: Survey) -> dict[str, Any]:
    """Return the summary as plain values, for programs."""
    header = survey.header
    return {
        "prefix": prefix,
        "packs": header.num_packs,
        "sequences": header.num_sequences,
        "tokens": header.num_tokens,
        "trained_tokens": header.num_trained_tokens,
        "masked_packs": header.num_masked_packs,
        "capacity": header.capacity,
        "sequence_multiple": header.sequence_multiple,
        "fill": round(survey.fill, 6),
        "token_dtype": header.token_dtype.name,
        "mask_dtype": header.mask_dtype.name,
        "sequence_length": survey.sequence_lengths.describe(),
        "pack_length": survey.pack_lengths.describe(),
        "sequences_per_pack": survey.sequences.describe(),
        "trained_permille_of_a_pack": survey.trained.describe(),
        "costliest_pack_over_mean": round(survey.cost_spread, 4),
        "losses": losses(header),
        "sources": None if survey.sources is None else [file._asdict() for file in survey.sources.table()],
        "odd": [
            {"kind": odd.kind, "count": odd.count, "exact": odd.exact, "places": [one._asdict() for one in odd.remarks]}
            for odd in survey.odd
        ],
        "fingerprints": fingerprints(header),
        "rebuilt": header.rebuilt,
        "nbytes": survey.nbytes,
        "columns": _columns_dict(survey.shard),
        "media": None if survey.shard.media is None else count_media(survey.shard.media)._asdict(),
        "metadata": header.metadata,
    }
