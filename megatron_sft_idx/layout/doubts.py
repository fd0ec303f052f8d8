"""Entries of the JSON block that say that a shard's contents may not be what was written.

Every shard that is made from such a shard keeps them, because a copy must not look better than its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ACCEPTED = "accepted"
"""Key: a list of files whose contents were accepted although their checksums differ: {"file", "expected"}."""
RECOVERED = "recovered"
"""Key: numbers of packs of an interrupted build that was recovered."""

DOUBTS = {
    ACCEPTED: "contents that do not match their checksums were accepted",
    RECOVERED: "recovered from an interrupted build, so packs may be missing",
}


def doubts(metadata: Mapping[str, Any]) -> list[str]:
    """Return what these entries mean, for people; empty if there are none.

    >>> doubts({"recovered": {"packs": 3, "packs_noted": 3}})
    ['recovered from an interrupted build, so packs may be missing']
    """
    return [meaning for key, meaning in DOUBTS.items() if key in metadata]
