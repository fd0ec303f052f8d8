"""Computed masks equal the masks from generation markers in the same template, for any words in a row."""

# ruff: noqa: E501 - templates and words, one per line

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from template_styles import call, learnt, make, said, talk, user

from megatron_sft_idx.chat.template import ChatTemplate
from megatron_sft_idx.chat.types import Conversation
from megatron_sft_idx.errors import SequenceError

IM = "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}(({{ m.content }}<|im_end|>)){% else %}{{ m.content }}<|im_end|>{% endif %}\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
EACH, END = "{% for m in messages %}", "{% endfor %}"
# Templates; the text that the model generates is between double parentheses.
TEMPLATES = {
    "prompted": EACH + IM + END + PROMPT,
    "no prompt": EACH + IM + END,
    "trimmed": (EACH + IM + END + PROMPT).replace("m.content", "(m.content | trim)"),
    "instructions": EACH
    + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST] {% else %}(({{ m.content }}</s>)){% endif %}"
    + END,
    "headers in words": EACH
    + "{% if m.role == 'user' %}USER: {{ m.content }} {% else %}ASSISTANT: (({{ m.content }}</s>)){% endif %}"
    + END
    + "{% if add_generation_prompt %}ASSISTANT: {% endif %}",
    "numbered": EACH
    + "{% if m.role == 'user' %}\nQ{{ loop.index }}: {{ m.content }}{% else %}\nA{{ loop.index }}:(( {{ m.content }}</s>)){% endif %}"
    + END
    + "{% if add_generation_prompt %}\nA{{ messages | length + 1 }}:{% endif %}",
    "macro": "{% macro write(m) %}" + IM + "{% endmacro %}" + EACH + "{{ write(m) }}" + END + PROMPT,
    "collected": "{% set all %}" + EACH + IM + END + "{% endset %}{{ all }}" + PROMPT,
}
WORDS = st.sampled_from([
    "Hello there", "yes", "a", "I", "assistant", "user", "\n\nleading", "    return x\n", "trailing \n ", "  both  ", " ",
    "<|im_end|>", "text <|im_end|> more", "<|im_start|>assistant\n", "ASSISTANT:", "[INST] x [/INST]", "</s>", "A2:",
    "\u00a0nb\u00a0", "\u2028x", "e\u0301", "{{ messages }}", "{% raw %}", "'q\"", "\\n", ".", ":", "\n", "1", "The model",
])  # fmt: skip


HERE = {
    # A call is in a separate turn.
    "calls apart": EACH
    + "{% if m.role == 'assistant' %}<|im_start|>assistant((: {{ m.content }}<|im_end|>"
    "{% for c in m.tool_calls or [] %}<|im_start|>assistant to={{ c.function.name }}\n"
    "{{ c.function.arguments | tojson }}<|im_end|>{% endfor %})){% else %}" + IM + "{% endif %}" + END
    + "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}",
    # Calls come before the words, and the template does not show what a server feeds.
    "calls before": EACH
    + "{% if m.role == 'assistant' %}A: (({% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }};{% endfor %}{{ m.content }}</s>)){% else %}Q: {{ m.content }} {% endif %}" + END,
    # The tag of the next question ends an answer, and that question has no tag; answers have a tag instead of a name.
    "asking tag": EACH
    + "{% if m.role == 'assistant' %}<|assistant|>(({{ m.content }}<|user|>))"
    "{% else %}{% if loop.first %}<|user|>{% endif %}{{ m.content }}{% endif %}" + END
    + "{% if add_generation_prompt %}<|assistant|>{% endif %}",
}  # fmt: skip


@cache
def twins(name: str, **options: Any) -> tuple[ChatTemplate, ChatTemplate]:
    """Return the template with markers, and the same without."""
    source = (TEMPLATES | HERE)[name]
    marked = source.replace("((", "{% generation %}").replace("))", "{% endgeneration %}")
    plain = source.replace("((", "").replace("))", "")
    return make(marked, partial_markers="keep", **options), make(plain, **options)


def outcome(template: ChatTemplate, row: Conversation) -> tuple[str, set[int]]:
    """Return the text and the positions of trained characters."""
    rendered = template.render(row)
    return rendered.text, {at for span in rendered.spans for at in range(span.start, span.stop)}


@pytest.mark.parametrize("name", TEMPLATES)
@given(turns=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4))
def test_what_is_learnt_is_what_markers_say(name: str, turns: list[tuple[str, str]]) -> None:
    row = talk(*(one for asked, answer in turns for one in (user(asked), said(answer))))
    marked, plain = twins(name)
    assert outcome(plain, row) == outcome(marked, row)


@pytest.mark.parametrize("name", TEMPLATES)
@given(
    turns=st.lists(
        st.tuples(WORDS, WORDS.flatmap(lambda words: st.tuples(st.just(words), st.one_of(st.just(words), WORDS)))),
        min_size=1,
        max_size=3,
    )
)
def test_reasoning_that_is_not_written_changes_no_mask(name: str, turns: list[tuple[str, tuple[str, str]]]) -> None:
    silent = [one for asked, (answer, _) in turns for one in (user(asked), said("so " + answer))]
    thoughts = [thought for _, (_, reasoning) in turns for thought in (None, reasoning)]
    reasoned = [
        one if thought is None else {**one, "reasoning_content": thought}
        for one, thought in zip(silent, thoughts, strict=True)
    ]
    for template in twins(name, train_on_thinking=False):
        assert outcome(template, talk(*reasoned)) == outcome(template, talk(*silent))


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        *((name, [said("so", tool_calls=[call("look", {"n": 1})])]) for name in ("calls apart", "calls before")),
        ("calls apart", [said("so", tool_calls=[call("look", {}), call("look", {"at": "me"}), call("go", {})])]),
        ("asking tag", [said("a"), said("yes")]),
        *(("prompted", [said(words, reasoning_content="a")]) for words in ("", "hat", "yes")),
        ("prompted", [said(" ", reasoning_content="<|im_start|>assistant")]),
    ],
)
def test_letters_that_stand_elsewhere_by_chance_are_no_edges(name: str, answers: list[dict[str, Any]]) -> None:
    row = talk(user("why"), *answers, user("what"), said("done"))
    marked, plain = twins(name, earlier_reasoning="drop")
    assert outcome(plain, row) == outcome(marked, row)


def test_reasoning_is_not_there_because_its_letters_are() -> None:
    template = twins("prompted")[1]
    with pytest.raises(SequenceError, match="drops the reasoning"):
        template.render(talk(user("why"), said("hat", reasoning_content="a")))


def test_a_header_behind_the_end_of_the_question_is_not_trained_on() -> None:
    source = (
        "{% for m in messages %}{% if not loop.first %}</a>{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}</a>"
    )
    assert learnt(source, talk(user("why"), said("so"), user("what"), said("done"))) == ["so</a>", "done</a>"]
