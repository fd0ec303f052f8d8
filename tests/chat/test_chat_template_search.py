"""Search for a generated chat template and conversation with wrong words trained on; none must be found."""

from __future__ import annotations

import pytest
from template_grammar import CHOICES, Design
from template_search import Talking, complaints, renderings, searched

PLAIN = Design(**{name: choices[0] for name, choices in CHOICES.items()})


def test_no_wrong_mask_is_found() -> None:
    seen = searched(0, templates=30, chats_each=6)
    assert seen.total() >= 180
    assert seen["handled"] > 0.8 * (seen["handled"] + seen["refused"])


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        (0, 0, None),
        (-1, 0, None),  # the newline of the header, not a word
        (1, 0, "does not train aq105x"),
        (-2, 0, "trains hq2x"),
        (0, -1, "does not train the end of the turn"),
        (0, 1, "trains the whitespace after"),
        (0, 3, "trains in the header"),
        (-30, 0, "trains uq104x"),
    ],
)
def test_the_judge_sees_what_is_wrong(before: int, after: int, complaint: str | None) -> None:
    talking = Talking()
    talking.step("ask")
    talking.step("ask")
    chat = talking.chat(tools=False)
    text = next(renderings(PLAIN, chat))
    spans = []
    for answer in ("aq105x aq106x.", "aq109x aq110x."):
        start = text.index(answer)
        spans.append((start, start + len(answer + "<|im_end|>")))
    spans[0] = spans[0][0] + before, spans[0][1] + after
    found = complaints(PLAIN, chat, text, spans)
    assert any(complaint in one for one in found) if complaint else found == []
