"""Find the text of one row that the model must learn: in a stand-in of the row, then carried over to its own text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from megatron_sft_idx.chat.template.align import Alignment, Outline, by_marks, by_spelling
from megatron_sft_idx.chat.template.messages import short, unplaced, unusable, utterances_of
from megatron_sft_idx.chat.template.scaffold import Rules
from megatron_sft_idx.chat.template.spans import Judge, Judged, Renderer
from megatron_sft_idx.chat.template.stand_in import StandIn, as_it_is, make_stand_in, reduced
from megatron_sft_idx.chat.template.turn import Said, reworded
from megatron_sft_idx.errors import SequenceError

_FEW = 8  # number of messages that are cheap to render again for each answer among them


class MaskFinder:
    """Finds the generated text of messages in rows rendered by one template.

    Args:
        rules: the rules for every conversation.
        marked: whether the template has generation markers.
        source: the template.
    """

    def __init__(self, rules: Rules, marked: bool, source: str) -> None:
        self._rules, self._has_markers, self._source = rules, marked, source
        self._judge = Judge(rules, marked)
        # Strings that a generation prompt searches for in the messages must stay in them.
        self._stand_ins = (rules.tested,) if rules.prompt_varies else (None, rules.tested)

    def said(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        text: str,
        chosen: Sequence[int],
        renderer: Renderer,
    ) -> dict[int, Said]:
        """Find the generated text of the ``chosen`` messages in a stand-in, and carry it over to ``text``.

        Two stand-ins from ``make_stand_in`` are tried, the second one faithful; and two ways to show that the row
        agrees with one.

        Raises:
            SequenceError: the template omits words, their location is ambiguous, or no stand-in agrees.
        """
        rows: list[StandIn] = []
        failed: SequenceError | None = None
        judged: Judged | None = None
        for marks in (False, True):
            for number, tested in enumerate(self._stand_ins):
                if number == len(rows):
                    try:
                        rows.append(make_stand_in(messages, tools, self._rules.spelt, tested))
                    except ValueError as error:
                        raise unusable(str(error)) from None
                judged = self._judge.judge(rows[number], renderer)
                for whole in (False, True) if self._rules.prompt_varies else (False,):
                    found = None if judged is None else _all_said(judged, chosen, whole)
                    if isinstance(found, SequenceError):
                        failed = found
                    elif found is not None and judged is not None:
                        align = partial(_alignment, judged.outline, rows[number], messages, text, renderer, marks)
                        carried = _carried(found, not self._has_markers, align)
                        if carried is None:
                            break
                        if _is_prompted(found, messages, renderer):
                            return carried
        if failed is not None:
            raise _worded(failed, messages)
        own_text = self._source if judged is None else "\n".join(judged.outline.own)
        own = as_it_is(messages, tools, own_text, self._rules.loud)
        judged = None if own is None else self._judge.judge(own, renderer)
        if judged is not None and judged.outline.text == text:
            found = _all_said(judged, chosen, whole=True)
            if isinstance(found, SequenceError):
                raise _worded(found, messages)
            return found
        raise unplaced(
            f"the text of this row cannot be traced through the chat template {self._rules.name}; put {{% generation"
            " %} markers around the assistant's text, or train on all tokens",
        )


def _is_prompted(said: Mapping[int, Said], messages: Sequence[dict[str, Any]], renderer: Renderer) -> bool:
    """Return whether the row itself gets the prompts that its stand-in gets, if they may differ between rows.

    Most are compared in the answer's context. The last one, and further ones at half the distance each, are compared
    with all messages before the answer, to detect a prompt that depends on messages far away.
    """
    far = 2 * len(messages)
    for message in sorted(said, reverse=True):
        prompt = said[message].prompt
        if prompt is None:
            continue
        if 2 * message <= far or message < _FEW:
            far = message
            before = messages[:message]
        else:
            before = [messages[index] for index in prompt.before]
            before = [reduced(one) for one in before] if prompt.cut_down else before
        fed = renderer.plain(messages=before, add_generation_prompt=True)
        if (fed is None) != (prompt.text is None) or not (fed or "").endswith(prompt.text or ""):
            return False
    return True


def _alignment(
    outline: Outline,
    row: StandIn,
    messages: Sequence[dict[str, Any]],
    text: str,
    renderer: Renderer,
    marks: bool,
    needed: int,
) -> Alignment | None:
    """Return the counterparts in a row's text of positions in its stand-in's, by spelling or by marks."""
    if not marks:
        return by_spelling(outline, row, text, needed)
    return by_marks(outline, row, messages, text, needed, lambda altered: renderer.plain(messages=altered))


def _worded(error: SequenceError, messages: Sequence[Mapping[str, Any]]) -> SequenceError:
    """Convert the error of a stand-in to the words of a row."""

    def words(kind: str, message: int, call: int) -> str:
        said = [one.text for one in utterances_of(messages[message]) if one.kind == kind]
        return "a value" if call >= len(said) else said[call] if kind == "call" else short(said[call])

    return reworded(error, lambda message: str(message + 1), words)


def _all_said(judged: Judged, chosen: Sequence[int], whole: bool) -> dict[int, Said] | SequenceError:
    """Return the generated text of the chosen messages, or the first error among them."""
    found: dict[int, Said] = {}
    for message in chosen:
        said = judged.said(message, whole)
        if isinstance(said, SequenceError):
            return said
        found[message] = said
    return found


def _carried(
    said: Mapping[int, Said], trimmed: bool, align: Callable[[int], Alignment | None]
) -> dict[int, Said] | None:
    """Carry the generated text of a stand-in's messages over to the row's text; None if the row does not agree."""
    starts = [start for one in said.values() for start, _ in one.generated]
    if not starts:
        return dict(said)
    alignment = align(min(starts))
    if alignment is None:
        return None
    result: dict[int, Said] = {}
    for message, one in said.items():
        generated = alignment.ranges(one.generated, trimmed=trimmed)
        trained = generated if one.trained is one.generated else alignment.ranges(one.trained, trimmed=trimmed)
        if generated is None or trained is None:
            return None  # a cut inside a string
        result[message] = Said(generated, trained, one.notes)
    return result
