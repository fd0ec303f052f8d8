"""The check of the project's English finds what its word list names, and nothing in code."""

from __future__ import annotations

import pytest
from prose import (
    CPP_COMMENT,
    WORDS,
    matches,
    prose_of_comments,
    prose_of_markdown,
    prose_of_python,
    read_rules,
)

RULES = read_rules(WORDS.read_text(encoding="utf-8"))


def found(text: str, kind: str = "docs") -> list[tuple[int, str]]:
    prose = prose_of_markdown(text) if kind == "docs" else prose_of_python(text)
    return [(line, words) for line, words, _ in matches(prose, kind, RULES)]


@pytest.mark.parametrize(
    "sentence",
    [
        "What a file is, its content says.",
        "Of a shard it is a view.",
        "Where a text ends, the next one begins.",
        "one value a token",
        "Rows lie beside the shard.",
        "a file of which nothing is known",
        "The header says it.",
        "rows that are none",
        "Whoever waits, waits.",
        "It is\nmade anew.",
    ],
)
def test_a_hard_sentence_is_found(sentence: str) -> None:
    assert found(sentence)


@pytest.mark.parametrize(
    "sentence",
    [
        "What is in my shard?",
        "one value per token",
        "a lot of rows",
        "What to know",
        "**What is trained.** All answers.",
        "The results equal those of the other run, with its own order of rows.",
        "`beside` and [a page](beside.md)",
        "```sh\nls beside\n```",
        "<!-- beside -->",
        "A pack has at most 12 sequences.",
    ],
)
def test_a_plain_sentence_is_not(sentence: str) -> None:
    assert not found(sentence)


def test_docstrings_and_comments_are_checked_and_strings_are_not() -> None:
    source = '''"""Made anew."""


def f(x):
    """Return ``anew``.

    >>> f("anew")
    anew
    """
    text = "anew"  # it's anew: "anew"
    return """anew""" + 'anew # anew'
'''
    assert [line for line, _ in found(source, "code")] == [1, 10, 10]


def test_comments_of_cpp_are_checked() -> None:
    prose = prose_of_comments("int anew;  // made anew\n/* and\n anew */\n", CPP_COMMENT)
    assert [line for line, _, _ in matches(prose, "code", RULES)] == [1, 3]


def test_a_line_that_is_no_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="not a rule: all :: beside"):
        read_rules("all :: beside")
