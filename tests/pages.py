"""Pages of the inspector for tests: a hostile shard, and a parser of a page's markup."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from sample_packs import sample_of, write_samples

HOSTILE = [
    "</div></details><script>window.hacked = 1</script>",
    "<img src=https://example.invalid/x.png onerror='window.hacked = 1'>",
    "\"><svg onload=window.hacked=1> ' --> ]]> </style> </title> {{ 7 * 7 }} {% raw %}",
    "\x1b[31m\x00\u202e reversed \u2066 \ufeff",
    "<a href='javascript:window.hacked=1'>here</a> &lt;b&gt; &amp;",
]


def decode_hostile(ids: Any) -> str:
    return " ".join(HOSTILE[int(i) % len(HOSTILE)] for i in ids)


def write_hostile(prefix: Path) -> None:
    """Write a shard with ids for ``decode_hostile``, and with metadata that looks like markup."""
    packs = [sample_of([6, 1, 5], lambda p: int(p % 3 > 0), lambda p, i=i: p + i) for i in range(9)]
    bad = HOSTILE[0]
    metadata = {
        "tokenizer": {"fingerprint": bad},
        "packing": {bad: bad * 100, "dropped_tokens": 3},
        "options": {"x": "y" * 100_000},
    }
    write_samples(prefix, packs, capacity=16, metadata=metadata)


@dataclass
class Markup(HTMLParser):
    """The elements, attributes and texts of a page."""

    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    text: dict[str, str] = field(default_factory=dict)
    stack: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br", "img", "input"):
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        tag = self.stack[-1] if self.stack else ""
        self.text[tag] = self.text.get(tag, "") + data


def markup_of(page: bytes) -> Markup:
    found = Markup()
    found.feed(page.decode())
    found.close()
    assert found.stack == []
    return found


def colours(css: str) -> list[dict[str, str]]:
    """Return the custom properties of each ``:root`` block, in order: light, dark, print."""
    blocks = re.findall(r":root \{([^}]*)\}", css)
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6})", block)) for block in blocks]
