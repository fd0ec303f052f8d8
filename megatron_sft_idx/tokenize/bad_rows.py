"""``--max-bad-rows``: the number of rows that may be skipped before a job stops."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.lines import counted
from megatron_sft_idx.tokenize.report import CorpusReport

_NUMBER = re.compile(r"(\d{1,15})(\.\d{1,15})?(%?)")
# Number of bad rows to list in the error.
_MAX_NAMED = 3


class TooManyBadRowsError(SequenceError):
    """More rows are unusable than ``--max-bad-rows`` allows. A later job may reuse what is already tokenised."""


@dataclass(frozen=True)
class BadRowLimit:
    """The limit on skipped rows: a count or a fraction of all rows.

    Attributes:
        given: the limit as it was given, for messages.
        count: number of rows; None if the limit is a fraction.
        share: fraction of all rows, from 0 to 1.
    """

    given: str
    count: int | None = None
    share: Fraction = Fraction(1)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> BadRowLimit | None:
        """Return the limit set by the arguments ``max_bad_rows`` and ``on_bad_row`` of ``preprocess``, or None.

        Raises:
            FormatError: it is neither an integer nor a fraction, or bad rows are not skipped.
        """
        value = given["max_bad_rows"]
        if value is None:
            return None
        match = None if isinstance(value, bool) else _NUMBER.fullmatch(str(value).strip())
        share = Fraction(match[1] + (match[2] or "")) / (100 if match[3] else 1) if match else None
        is_count = match is not None and not match[2] and not match[3]
        if share is None or (share > 1 and not is_count):
            raise FormatError(
                f"--max-bad-rows {value!r}: expected a number of rows, such as 10, or a share of all rows, such as"
                " 0.01 or 1%"
            )
        if given["on_bad_row"] != "skip":
            raise FormatError(
                "--max-bad-rows needs --on-bad-row skip: without it, the run stops at the first bad row anyway"
            )
        return cls(str(value), int(share)) if is_count else cls(str(value), None, share)

    def allows(self, skipped: int, rows: int | None) -> bool:
        """Return whether this many rows may be skipped out of at most ``rows``; None if the total is not known yet."""
        if self.count is not None:
            return skipped <= self.count
        return skipped <= self.share * rows if rows is not None else self.share > 0 or not skipped

    def require(self, report: CorpusReport, rows: int | None, source: str) -> None:
        """Raise TooManyBadRowsError unless ``allows``; ``source``, such as the input file, begins the message."""
        if self.allows(report.skipped, rows):
            return
        named = report.bad_rows[:_MAX_NAMED]
        if named and report.skipped > len(named):
            named.append(f"and {report.skipped - len(named):,} more")
        raise TooManyBadRowsError(
            source,
            None,
            f"{report.skipped:,} of {counted(report.rows, 'row')} cannot be used, more than --max-bad-rows {self.given}"
            f" allows{': ' if named else ''}{'; '.join(named)}; correct the rows, or raise --max-bad-rows",
        )
