"""``--max-bad-rows``: how many rows may be skipped before a job stops."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from megatron_sft_idx.errors import FormatError, SequenceError
from megatron_sft_idx.tokenize.report import CorpusReport

_NUMBER = re.compile(r"(\d{1,15})(\.\d{1,15})?(%?)")
# Bad rows that the error names.
_MAX_NAMED = 3


class TooManyBadRowsError(SequenceError):
    """More rows cannot be used than ``--max-bad-rows`` allows; a later job may go on with what is tokenised."""


@dataclass(frozen=True)
class BadRowLimit:
    """How many rows may be skipped, a count or a share of all rows.

    Attributes:
        given: the limit as it was given, for messages.
        count: rows; None where the limit is a share.
        share: of all rows, from 0 to 1.
    """

    given: str
    count: int | None = None
    share: Fraction = Fraction(1)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> BadRowLimit | None:
        """The limit that the arguments ``max_bad_rows`` and ``on_bad_row`` of ``preprocess`` set; None if none does.

        Raises:
            FormatError: it is neither a whole number nor a share, or bad rows are not skipped.
        """
        value = given["max_bad_rows"]
        if value is None:
            return None
        match = None if isinstance(value, bool) else _NUMBER.fullmatch(str(value).strip())
        share = Fraction(match[1] + (match[2] or "")) / (100 if match[3] else 1) if match else None
        is_count = match is not None and not match[2] and not match[3]
        if share is None or (share > 1 and not is_count):
            raise FormatError(
                f"--max-bad-rows: {value!r}, expected a number of rows such as 10, or a share such as 0.01 or 1%"
            )
        if given["on_bad_row"] != "skip":
            raise FormatError(
                "--max-bad-rows goes with --on-bad-row skip: without it the first bad row stops the run anyway"
            )
        return cls(str(value), int(share)) if is_count else cls(str(value), None, share)

    def allows(self, skipped: int, rows: int | None) -> bool:
        """Whether so many rows may be skipped, of ``rows`` in all at most; None where that is not known yet."""
        if self.count is not None:
            return skipped <= self.count
        return skipped <= self.share * rows if rows is not None else self.share > 0 or not skipped

    def require(self, report: CorpusReport, rows: int | None, source: str) -> None:
        """TooManyBadRowsError unless ``allows``; ``source`` is what the message begins with, such as the input file."""
        if self.allows(report.skipped, rows):
            return
        named = report.bad_rows[:_MAX_NAMED]
        if named and report.skipped > len(named):
            named.append(f"and {report.skipped - len(named):,} more")
        raise TooManyBadRowsError(
            source,
            None,
            f"{report.skipped:,} of {report.rows:,} rows cannot be used, more than --max-bad-rows {self.given} allows"
            f"{': ' if named else ''}{'; '.join(named)}; pass a larger --max-bad-rows to go on, or correct the rows",
        )
