"""What verification found: broken rules, with where, what, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Finding", "Findings", "Report"]

_INDEX = "restore it from a copy, or make it anew from the other files: megatron-sft-idx rebuild PREFIX"
_DATA = "restore it from a copy, or write the shard again: nothing else holds what it held"


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule.

    Attributes:
        path: the file.
        offset: where in it, in bytes.
        pack: which pack it belongs to; None where it is of the whole file, or where the offsets do not tell.
        rule: its number in FORMAT.md.
        found: what is there.
        expected: what should be.
        remedy: what to do.
    """

    path: str
    offset: int
    pack: int | None
    rule: str
    found: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        pack = "" if self.pack is None else f"pack {self.pack}: "
        return (
            f"{self.path}: byte {self.offset}: {pack}found {self.found}, expected {self.expected}"
            f" (rule {self.rule}); {self.remedy}"
        )


class Findings:
    """Collects findings, the first ``most`` of each rule and a count of all.

    Args:
        prefix: of the shard, which remedies name.
        most: findings kept of each rule.
    """

    def __init__(self, prefix: str, most: int) -> None:
        self._prefix = prefix
        self.most = most
        self.kept: list[Finding] = []
        self.notes: list[str] = []
        self.counts: Counter[str] = Counter()

    def add(
        self,
        rule: str,
        path: str,
        offset: int,
        found: object,
        expected: object,
        *,
        pack: int | None = None,
        remedy: str | None = None,
    ) -> None:
        """One more finding; the remedy, where none is given, is that of the kind of file."""
        self.counts[rule] += 1
        if self.counts[rule] <= self.most:
            remedy = (remedy or self.remedy(path)).replace("PREFIX", self._prefix)
            self.kept.append(Finding(path, offset, pack, rule, str(found), str(expected), remedy))

    def add_uncounted(self, rule: str, more: int) -> None:
        """``more`` findings of a rule of which nothing but their number is known."""
        self.counts[rule] += more

    @staticmethod
    def remedy(path: str) -> str:
        """What brings a file back."""
        return _INDEX if path.endswith(".idx") else _DATA

    def omitted(self) -> dict[str, int]:
        """Findings that were counted but not kept, by rule."""
        kept = Counter(finding.rule for finding in self.kept)
        return {rule: count - kept[rule] for rule, count in sorted(self.counts.items()) if count > kept[rule]}


@dataclass(frozen=True, slots=True)
class Report:
    """What one shard's verification found.

    Attributes:
        prefix: the path that the five files share.
        full: every byte was read, not only headers, sizes and ends.
        findings: broken rules, a bounded number of each.
        omitted: how many more there are, by rule.
        notes: what is no fault of the shard: remains of a build beside it, checks that could not be made.
        counts: packs, sequences, tokens and bytes as the header has them; empty where it cannot be read.
    """

    prefix: str
    full: bool
    findings: tuple[Finding, ...]
    omitted: dict[str, int]
    notes: tuple[str, ...]
    counts: dict[str, int]

    @property
    def ok(self) -> bool:
        """Whether no rule is broken as far as was looked."""
        return not self.findings

    @property
    def num_findings(self) -> int:
        """All of them, those omitted included."""
        return len(self.findings) + sum(self.omitted.values())

    def as_json(self) -> dict[str, Any]:
        """As an object of plain values."""
        return {**asdict(self), "ok": self.ok, "num_findings": self.num_findings}

    def lines(self) -> Iterable[str]:
        """As text for people: one line a finding, then a verdict."""
        yield from map(str, self.findings)
        for rule, count in self.omitted.items():
            yield f"{self.prefix}: {count:,} more like these (rule {rule})"
        for note in self.notes:
            yield f"{self.prefix}: note: {note}"
        depth = "every byte" if self.full else "headers, sizes and ends"
        if self.ok:
            sizes = ", ".join(f"{count:,} {what}" for what, count in self.counts.items())
            yield f"{self.prefix}: ok: {sizes}; checked: {depth}"
        else:
            findings = "1 finding" if self.num_findings == 1 else f"{self.num_findings:,} findings"
            yield f"{self.prefix}: NOT ok: {findings}; checked: {depth}"
