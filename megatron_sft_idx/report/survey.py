"""What a shard holds, counted in one pass: distributions, attention cost, odd packs, repeated sequences.

Everything that the indexes tell is counted in full. Ids and masks are read in full up to a limit, and of larger
shards in evenly spread windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megatron_sft_idx import _native
from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header
from megatron_sft_idx.report.odd import First, Odd, Place, Top, counted
from megatron_sft_idx.report.repeats import HashSample
from megatron_sft_idx.report.tally import Profile, Tally
from megatron_sft_idx.report.windows import Window, locate_sequence, windows
from megatron_sft_idx.shard import Shard

__all__ = ["CONTENT_TOKENS", "Survey", "survey_shard"]

# Tokens whose ids and masks are read: a few seconds' worth.
CONTENT_TOKENS = 1 << 29
PERMILLE = 1000
_COLUMNS = 240
_PLACES = 4

Tell = Callable[[int, int], None]


@dataclass(slots=True)
class Survey:
    """The counts.

    Attributes:
        header: the shard's own.
        sequence_lengths: tokens of every sequence.
        pack_lengths: tokens of every pack.
        sequences: of every pack.
        cost: attention pairs of every pack, by its place in the shard.
        trained: of every pack that was read, the trained share of its tokens, in thousandths, rounded.
        read_packs: packs whose ids and masks were read.
        odd: kinds of odd packs.
    """

    header: Header
    sequence_lengths: Tally = field(init=False)
    pack_lengths: Tally = field(init=False)
    sequences: Tally = field(init=False)
    cost: Profile = field(init=False)
    trained: Tally = field(init=False)
    read_packs: int = 0
    odd: list[Odd] = field(default_factory=list)

    def __post_init__(self) -> None:
        header = self.header
        self.sequence_lengths = Tally(header.longest_pack)
        self.pack_lengths = Tally(header.longest_pack)
        self.sequences = Tally(header.most_sequences)
        most = header.longest_pack
        self.cost = Profile(header.num_packs, _COLUMNS, most * (most + 1) // 2)
        self.trained = Tally(PERMILLE)

    @property
    def complete(self) -> bool:
        """Whether ids and masks of all packs were read."""
        return self.read_packs == self.header.num_packs

    @property
    def fill(self) -> float:
        """Tokens a position of all packs."""
        positions = self.header.num_packs * self.header.capacity
        return self.header.num_tokens / positions if positions else 0.0

    @property
    def cost_spread(self) -> float:
        """Attention pairs of the costliest pack, in means of all packs."""
        mean = self.cost.sums.sum() / max(1, self.header.num_packs)
        return float(self.cost.largest.max() / mean) if mean else 0.0


class _Counter:
    """What becomes a survey, window by window."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.survey = Survey(shard.header)
        self._repeats = HashSample()
        self._masked, self._single = First(_PLACES), First(_PLACES)
        self._costliest, self._most_sequences = Top(_PLACES), Top(_PLACES)
        self._longest, self._emptiest = Top(_PLACES), Top(_PLACES)
        self._single_sequences = 0

    def add_structure(self, window: Window) -> None:
        """What the indexes tell of a window."""
        survey, first = self.survey, window.first
        pack_lengths, counts = np.diff(window.pack_bounds), np.diff(window.sequence_offsets)
        lengths = np.diff(window.bounds)
        self._hold_to_header(pack_lengths, counts)
        cost = window.by_pack(lengths * (lengths + 1) // 2)
        survey.sequence_lengths.add(lengths)
        survey.pack_lengths.add(pack_lengths)
        survey.sequences.add(counts)
        survey.cost.add(first, cost)
        single = lengths == 1
        self._single_sequences += int(np.count_nonzero(single))
        self._single.add(first, window.by_pack(single.astype(np.int64)) > 0)
        self._costliest.add(first, cost)
        self._most_sequences.add(first, counts)
        self._longest.add(window.sequence, lengths)
        self._emptiest.add(first, -pack_lengths)

    def _hold_to_header(self, pack_lengths: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """FormatError where packs are larger than the header says; distributions have room for no others."""
        header = self.survey.header
        for name, found, said in (
            ("longest_pack", pack_lengths, header.longest_pack),
            ("most_sequences", counts, header.most_sequences),
        ):
            if (most := int(found.max())) > said:
                raise FormatError(
                    f"{self._shard.prefix}: {name} {said} in the header, {most} by the data (rule H9);"
                    " megatron-sft-idx rebuild derives the header anew"
                )

    def add_content(self, window: Window) -> None:
        """What the ids and masks of a window tell."""
        survey, files = self.survey, self._shard.files
        trained = _native.count_positive(files.loss[window.tokens], window.pack_bounds)
        self._masked.add(window.first, trained == 0)
        lengths = np.diff(window.pack_bounds)
        survey.trained.add((2 * trained * PERMILLE + lengths) // (2 * lengths))
        self._repeats.add(_native.hash_runs(files.tokens[window.tokens], window.bounds), window.sequence)
        survey.read_packs += len(window)

    def finish(self) -> Survey:
        """The survey, with its odd packs named."""
        survey, header = self.survey, self.survey.header
        masked = [Place(pack, None, "no token is trained on") for pack in self._masked.found]
        single = [Place(pack, None, "has a sequence of one token") for pack in self._single.found]
        extra, places = self._repeated()
        exact = survey.complete
        # A pack that is as full as can be is nowhere the odd one, though it be among the least filled.
        below = [(-length, pack) for length, pack in self._emptiest.found if -length < header.longest_pack]
        emptiest = [Place(pack, None, counted(length, "token")) for length, pack in below]
        survey.odd = [
            Odd("All masked", header.num_masked_packs, "pack", masked),
            Odd("One-token sequences", self._single_sequences, "sequence", single),
            Odd("Repeated sequences", extra, "copy", places, exact and not self._repeats.bits),
            *self._largest(),
            Odd("Least filled", None, "", emptiest),
        ]
        return survey

    def _largest(self) -> Iterator[Odd]:
        """The largest of their kind; nothing is, where all are alike."""
        survey = self.survey
        longest = [self._sequence_place(*pair) for pair in self._longest.found]
        most = [Place(pack, None, counted(value, "sequence")) for value, pack in self._most_sequences.found]
        costliest = [
            Place(pack, None, counted(value, "pair of tokens", "pairs of tokens"))
            for value, pack in self._costliest.found
        ]
        for kind, places, alike in (
            ("Longest sequences", longest, survey.sequence_lengths.alike),
            ("Most sequences", most, survey.sequences.alike),
            ("Costliest attention", costliest, survey.cost_spread == 1),
        ):
            yield Odd(kind, None, "", [] if alike else places)

    def _repeated(self) -> tuple[int, list[Place]]:
        extra, groups = self._repeats.repeated(_PLACES)
        places = []
        for group in groups:
            for number in group.sequences[:2]:
                pack, sequence, length = locate_sequence(self._shard, number)
                places.append(Place(pack, sequence, f"{counted(length, 'token')}, {group.times:,} times"))
        return extra, places

    def _sequence_place(self, value: int, number: int) -> Place:
        pack, sequence, _ = locate_sequence(self._shard, number)
        return Place(pack, sequence, counted(value, "token"))


def survey_shard(shard: Shard, *, content_tokens: int = CONTENT_TOKENS, tell: Tell | None = None) -> Survey:
    """Counts a shard in bounded memory, best opened with the backend ``pread``: maps would count as memory.

    Args:
        shard: the shard.
        content_tokens: most tokens whose ids and masks are read, or a window where that is less.
        tell: is given, now and again, how many tokens and packs more are done.

    Raises:
        FormatError: the indexes do not divide the tokens into packs and sequences, or not as the header says.
    """
    counter = _Counter(shard)
    header = shard.header
    # Every stride-th window is read; the first always is.
    stride = max(1, -(-header.num_tokens // max(1, content_tokens)))
    for number, window in enumerate(windows(shard)):
        counter.add_structure(window)
        if number % stride == 0:
            counter.add_content(window)
        if tell:
            tell(int(window.pack_bounds[-1]), len(window))
    return counter.finish()
