"""Preference pairs and verdicts in thousands of random spellings, compared with an oracle."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from megatron_sft_idx.chat.preferences import read_judged
from megatron_sft_idx.chat.row_options import RowOptions
from megatron_sft_idx.chat.types import Conversation, RowError

PAIRS, VERDICTS = RowOptions(kind="preference"), RowOptions(kind="kto")
SHAREGPT = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}
TEXTS = ("Q", "P", "A", "B", "A ", "Seven.", "[1, 2]", "{}")

# A conversation in the oracle: role, text and, if given, weight of each message.
Turn = tuple[str, str]
Talk = list[Turn]
# Both conversations, or the judged one, and the number of first messages that are not trained on.
Pair = tuple[list[Talk], int]


def plain(talk: Talk) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in talk]


# ---- spelling ----


def message(draw: Random, turn: Turn) -> dict[str, Any]:
    role, text = turn
    half = len(text) // 2
    content: Any = draw.choice(
        [text] * 3 + [[{"type": "text", "text": text[:half]}, {"type": "text", "text": text[half:]}]]
    )
    extra = draw.choice([{}] * 4 + [{"tool_calls": None}, {"name": None, "weight": None}, {"loss": True}])
    return {"role": role, "content": content, **extra}


def spelled(draw: Random, talk: Talk) -> Any:
    """Return a list of messages in one of the forms that rows use."""
    if draw.random() < 0.3:
        turns = [{"from": SHAREGPT[role], "value": text} for role, text in talk]
    else:
        turns = [message(draw, turn) for turn in talk]
    return json.dumps(turns) if draw.random() < 0.15 else turns


def answer(draw: Random, talk: Talk) -> Any:
    """Return the answer to a prompt: a string or one turn if it is a single assistant message, otherwise a list."""
    if len(talk) == 1 and talk[0][0] == "assistant" and draw.random() < 0.6:
        text = talk[0][1]
        return draw.choice([text, message(draw, talk[0]), {"from": "gpt", "value": text}])
    return spelled(draw, talk)


def transcript(talk: Talk) -> str:
    heads = {"user": "\n\nHuman: ", "assistant": "\n\nAssistant: "}
    return "".join(heads[role] + text for role, text in talk)


# ---- drawing ----


def drawn_prompt(draw: Random) -> Talk:
    talk = [("system", "S")] * (draw.random() < 0.3)
    for _ in range(draw.choice([0, 0, 1, 2])):
        talk += [("user", draw.choice(TEXTS)), ("assistant", draw.choice(TEXTS))]
    talk.append(("user", draw.choice(TEXTS)))
    return talk + [("assistant", "call"), ("tool", "result")] * (draw.random() < 0.1)


def drawn_answer(draw: Random) -> Talk:
    if (kind := draw.random()) < 0.75:
        return [("assistant", draw.choice(TEXTS))]
    between = ("tool", draw.choice(TEXTS)) if kind < 0.9 else ("user", draw.choice(TEXTS))
    return [("assistant", draw.choice(TEXTS)), between, ("assistant", draw.choice(TEXTS))]


def damaged(draw: Random, talk: Talk) -> Talk:
    """Return a changed conversation: a message with another text or role, one less, or one more."""
    at = draw.randrange(len(talk))
    changed = draw.choice([[(talk[at][0], "OTHER")], [("user", talk[at][1])], [], [talk[at], ("user", "more")]])
    return talk[:at] + changed + talk[at + 1 :]


def expected_pair(prompt: Talk, chosen: Talk, rejected: Talk) -> Pair | None:
    """Return both conversations and their number of common messages; None if they are no two answers to the prompt."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared in (0, len(chosen), len(rejected)):
        return None
    if not {chosen[shared][0], rejected[shared][0]} <= {"assistant", "tool"}:
        return None
    if not any(chosen[start : start + len(prompt)] == prompt for start in range(shared - len(prompt) + 1)):
        return None
    if not all(any(role == "assistant" and text for role, text in talk[shared:]) for talk in (chosen, rejected)):
        return None
    return [chosen, rejected], shared


def in_its_place(chosen: Talk, answer: Talk) -> Talk:
    """Return the chosen conversation with its last assistant message, or everything after the prompt, replaced."""
    stops = ("user", "system", "tool") if len(answer) == 1 else ("user", "system")
    return chosen[: max((i + 1 for i, (role, _) in enumerate(chosen) if role in stops), default=0)] + answer


def damaged_or_not(draw: Random, talk: Talk, share: float = 0.3) -> Talk:
    """Return the conversation, damaged with probability ``share``."""
    return damaged(draw, talk) if draw.random() < share else talk


def drawn_prompted(draw: Random, names: tuple[str, str]) -> tuple[dict[str, Any], Pair | None]:
    """Draw a row with a prompt and two answers, each of them bare or a whole conversation."""
    prompt, row, system = drawn_prompt(draw), dict[str, Any](), None
    if draw.random() < 0.5:
        row[draw.choice(["prompt", "messages", "conversations", "conversation"])] = spelled(draw, prompt)
    else:
        history = [[draw.choice(TEXTS), draw.choice(TEXTS)] for _ in range(draw.choice([0, 0, 1, 2]))]
        system, asked = draw.choice([None, "S"]), draw.choice(TEXTS)
        row = {draw.choice(["prompt", "instruction", "question", "query"]): asked, "system": system, "input": ""}
        row["history"] = history or None
        prompt = [each for one, other in history for each in (("user", one), ("assistant", other))] + [("user", asked)]
    # Whole conversations may begin with the system prompt from the other column.
    ahead = [("system", "S")] * (system is not None and draw.random() < 0.5)
    talks = []
    for name in names:
        said, whole = drawn_answer(draw), draw.random() < 0.5
        if whole:
            said = damaged_or_not(draw, ahead + prompt + said)
        row[name] = spelled(draw, said) if whole else answer(draw, said)
        # A list that begins with an answer continues the prompt, even if it is a conversation that lost its beginning.
        talks.append(said if said[0][0] in ("system", "user") else prompt + said)
    pair = expected_pair(prompt, *talks)
    if pair is None or system is None or talks[0][0] == ("system", system):
        return row, pair
    return row, None if talks[0][0][0] == "system" else ([[("system", system), *talk] for talk in talks], pair[1] + 1)


def drawn_whole(draw: Random, names: tuple[str, str]) -> tuple[dict[str, Any], Pair | None]:
    """Draw a row of two whole conversations, or of one conversation and another answer to it."""
    prompt, good, bad = drawn_prompt(draw), drawn_answer(draw), drawn_answer(draw)
    kind = draw.choice(["TRL", "UltraFeedback", "ms-swift", "ms-swift, messages", "Anthropic"])
    if kind == "ms-swift":
        row = {"messages": spelled(draw, prompt + good), "rejected_response": answer(draw, bad)}
        return row, expected_pair([], prompt + good, in_its_place(prompt + good, bad))
    chosen, rejected = damaged_or_not(draw, prompt + good), damaged_or_not(draw, prompt + bad)
    if kind == "ms-swift, messages":
        row = {"messages": spelled(draw, chosen), "rejected_messages": spelled(draw, rejected)}
    elif kind == "Anthropic":
        chosen, rejected = (
            [("user", "first"), *[(role, text.strip()) for role, text in talk if role in ("user", "assistant")]]
            for talk in (chosen, rejected)
        )
        row = dict(zip(names, map(transcript, (chosen, rejected)), strict=True))
    else:
        row = dict(zip(names, [spelled(draw, chosen), spelled(draw, rejected)], strict=True))
        if kind == "UltraFeedback":
            row |= {"messages": spelled(draw, chosen), "prompt": prompt[-1][1]}
            if rejected[0][0] == "assistant":
                rejected = in_its_place(chosen, rejected)
    # Messages that do not end with an answer are a prompt, not a chosen conversation.
    is_prompt = "messages" in row and chosen[-1][0] != "assistant"
    return row, expected_pair(chosen if is_prompt else [], chosen, rejected)


def drawn_pair(draw: Random) -> tuple[dict[str, Any], Pair | None]:
    """Draw a row and the expected result."""
    names = draw.choice([("chosen", "rejected"), ("chosen_response", "rejected_response")])
    row, pair = draw.choice([drawn_prompted, drawn_whole])(draw, names)
    return {"id": 7, "label": draw.choice([None, 0, 1]), "score_chosen": 8.5, **row}, pair


def drawn_verdict(draw: Random) -> tuple[dict[str, Any], Pair | None, int]:
    """Draw a row, its conversation with the number of messages that are not judged, and its label."""
    prompt, said, label = drawn_prompt(draw), drawn_answer(draw), draw.randrange(2)
    if draw.random() < 0.3:
        said = damaged(draw, said)
    verdict = {draw.choice(["label", "kto_tag"]): draw.choice([label, bool(label)])}
    verdict |= draw.choice(
        [{}, {}, {"label": label, "kto_tag": bool(label)}, {"label": bool(label), "kto_tag": not label}]
    )
    talk = prompt + said
    if len({*map(int, verdict.values())}) > 1:
        return verdict | {"messages": spelled(draw, talk)}, None, label
    kind = draw.choice(["messages", "messages", "lists", "texts"])
    if kind == "texts" and said and said[-1][0] == "assistant":
        asked, told = prompt[-1][1], said[-1][1]
        keys = draw.choice([("prompt", "completion"), ("instruction", "completion"), ("question", "response")])
        row = verdict | dict(zip(keys, (asked, told), strict=True)) | {"system": draw.choice([None, "S"])}
        talk = [("system", "S")] * (row["system"] == "S") + [("user", asked), ("assistant", told)]
        return row, (([talk], len(talk) - 1) if asked and told else None), label
    if kind == "lists" and said:
        is_said = any(role == "assistant" and text for role, text in said)
        row = verdict | {"prompt": spelled(draw, prompt), "completion": spelled(draw, said)}
        return row, (([talk], len(prompt)) if is_said else None), label
    before = max(i + 1 for i, (role, _) in enumerate(talk) if role == "user")
    is_said = any(role == "assistant" and text for role, text in talk[before:])
    return verdict | {"messages": spelled(draw, talk)}, (([talk], before) if is_said else None), label


def check(row: dict[str, Any], options: RowOptions, expected: Pair | None, label: int | None) -> None:
    if expected is None:
        with pytest.raises(RowError):
            read_judged(row, options)
        return
    before, (talks, shared) = repr(row), expected
    sources, found = read_judged(row, options)
    assert [source.messages for source in sources if isinstance(source, Conversation)] == [
        plain(one) for one in talks
    ], row
    for source in sources:
        assert isinstance(source, Conversation)
        judged = [
            weight for weight, turn in zip(source.weights, source.messages, strict=True) if turn["role"] == "assistant"
        ]
        said = [i >= shared for i, turn in enumerate(source.messages) if turn["role"] == "assistant"]
        assert judged == said, row
    assert (found, repr(row)) == (label, before)


@pytest.mark.parametrize("seed", range(4))
def test_pairs_in_drawn_spellings_are_those_that_were_spelled(seed: int) -> None:
    draw, made = Random(seed), 0
    for _ in range(1000):
        row, expected = drawn_pair(draw)
        check(row, PAIRS, expected, None)
        made += expected is not None
    assert 400 < made < 900


@pytest.mark.parametrize("seed", range(2))
def test_verdicts_in_drawn_spellings_are_on_what_was_said_last(seed: int) -> None:
    draw, made = Random(seed), 0
    for _ in range(1000):
        row, expected, label = drawn_verdict(draw)
        check(row, VERDICTS, expected, label)
        made += expected is not None
    assert 400 < made < 900
