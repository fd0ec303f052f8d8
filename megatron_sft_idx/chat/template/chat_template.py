"""``ChatTemplate`` renders conversations and finds the part of the text that is trained on.

``style`` converts messages to a form that the template accepts, ``row_masks`` finds the text that the model must learn.
All errors of a template become a ``SequenceError`` or ``FormatError`` here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from jinja2.exceptions import SecurityError

from megatron_sft_idx.chat.template.allowance import NotText, Overspent
from megatron_sft_idx.chat.template.controls import ControlTokens
from megatron_sft_idx.chat.template.cuts import cut
from megatron_sft_idx.chat.template.environment import TemplateEnvironment
from megatron_sft_idx.chat.template.functions import RaisedByTemplate
from megatron_sft_idx.chat.template.messages import (
    THINKING_TAG,
    Ranges,
    UnplacedError,
    in_text_parts,
    selected,
    short,
    strings_in,
    unusable,
    utterances_of,
)
from megatron_sft_idx.chat.template.row_masks import MaskFinder
from megatron_sft_idx.chat.template.scaffold import Rules
from megatron_sft_idx.chat.template.spans import Renderer
from megatron_sft_idx.chat.template.style import ABSENT, NULL_FORMS, PRINTED_PART, Style, learn_style, prepared
from megatron_sft_idx.chat.template.trace import Traced, TracedTemplate, Untraceable, own_segments
from megatron_sft_idx.chat.template.turn import Said
from megatron_sft_idx.chat.template.unwritten import unwritten_messages
from megatron_sft_idx.chat.types import LEFT_OUT_MESSAGE, Conversation, MaskOptions, Rendered, Span
from megatron_sft_idx.errors import FormatError, SequenceError

REVISION = 10
"""Raised whenever the same template and row would give other text or spans."""

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_RUNAWAY = (Overspent, OverflowError, MemoryError)
_Result = TypeVar("_Result")


class _Form(NamedTuple):
    """A conversation in one of the forms that a template may accept.

    Attributes:
        conversation: the conversation as it was given.
        messages: its messages, as given to the template.
        variables: all template variables, including ``messages``.
        notes: counts for the summary, by name; rendering adds to them.
        style: the form of contents and arguments.
        missing: the replacement for the missing content of an answer.
        text: the rendering, if it was already made, or its error.
    """

    conversation: Conversation
    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    notes: dict[str, int]
    style: Style
    missing: object
    text: str | ValueError | None = None


class _Runaway(SequenceError):  # noqa: N818 - what the template is, in its reason
    """A rendering needed more than its allowance. No other form of the conversation is tried after that."""


class _UnrenderedError(SequenceError):
    """The template rejected a conversation in this form. An error from another form is more useful to the user."""


class ChatTemplate:
    """A chat template that finds the part of its text that the model must learn.

    Threads can share it: a lock lets one of them render at a time. Unpickling compiles the template again.

    Args:
        source: the template.
        special_tokens: template variables such as ``bos_token`` and ``eos_token``.
        control_tokens: texts of the tokenizer's special tokens. Data that spells one must not become one.
        options: what is trained on.
        template_kwargs: further template variables; variables of a row take precedence.
        name: name of the template in errors, such as the file it came from.

    Attributes:
        has_generation_markers: whether the template itself marks the trained text with ``{% generation %}``.

    Raises:
        FormatError: the template does not compile, an option has an impossible value, or ``train_on="markers"`` is used
            for a template without generation markers.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        control_tokens: Sequence[str] = (),
        options: MaskOptions | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        name: str = "chat template",
    ) -> None:
        self.options = options or MaskOptions()
        self.name = name
        self._source = source
        self._special = dict(special_tokens or {})
        self._kwargs = dict(template_kwargs or {})
        self._controls = ControlTokens(control_tokens)
        self._refuse_reserved(self._kwargs, FormatError)
        environment = TemplateEnvironment(self.options.template_date)
        self._template = TracedTemplate(source, environment, name)
        self.has_generation_markers = self._template.has_generation
        tree = environment.parse(source)
        self._rules = Rules(name, self.options, self._special, self._controls.texts, source, tree)
        if self.options.train_on == "markers" and not self.has_generation_markers:
            raise FormatError(
                f"{name}: --train-on markers needs a template with {{% generation %}} markers, but this template"
                " has none"
            )
        self._masks = MaskFinder(self._rules, self.has_generation_markers, source)
        self._learns_everything = self.options.train_on == "all" and self._rules.keeps_all
        self._style: Style | None = None
        self._lock = Lock()

    @property
    def fingerprint(self) -> str:
        """A hash of everything that determines text and spans; the same on any machine."""
        options = self.options
        parts = [
            REVISION,
            self._source,
            self._special,
            sorted(self._controls.texts),
            self._kwargs,
            [options.train_on, options.train_on_thinking, options.train_on_tool_calls],
            [options.earlier_reasoning, options.partial_markers],
            [options.allow_control_tokens, options.template_date],
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:32]

    def __reduce__(self) -> tuple[Callable[..., ChatTemplate], tuple[Any, ...]]:
        constructor = partial(
            ChatTemplate,
            special_tokens=self._special,
            control_tokens=self._controls.texts,
            options=self.options,
            template_kwargs=self._kwargs,
            name=self.name,
        )
        return constructor, (self._source,)

    def render(self, conversation: Conversation) -> Rendered:
        """Render a conversation as one text, and find the trained part of it.

        Raises:
            SequenceError: the conversation cannot be used with this template: the template rejects it, fails, exceeds
                its allowance, writes a value without a defined text, or omits assistant words; or their location is
                ambiguous. ``source`` is only ``"conversation"``.
            FormatError: the template cannot be used: it needs a date, or uses something that is not allowed.
        """
        with self._lock:
            return self._in_some_form(self._forms(conversation), lambda form: [self._whole(form)])[0]

    def render_turns(self, conversation: Conversation) -> list[Rendered]:
        """Render a conversation as one text or, with ``earlier_reasoning="split"``, as one text per turn.

        The text of a turn has an assistant message that is trained on, and the messages before it but none after it, as
        the model would see them; only that message is trained on. A turn gets no text if the next turn's text begins
        with it, or if the template rejects it; the next text then trains both turns.

        Raises:
            SequenceError, FormatError: see ``render``.
        """
        (outcome,) = self.render_each([conversation])
        if isinstance(outcome, ValueError):
            raise outcome
        return outcome

    def render_each(self, conversations: Sequence[Conversation]) -> Iterator[list[Rendered] | ValueError]:
        """Render conversations like ``render_turns``; about a hundred at once is faster than one by one.

        All texts are made first and spans after, because the code of both steps together does not fit into CPU caches:
        for 64 short rows this saves a fifth of the time.

        Yields:
            For each conversation its texts, or the error that ``render_turns`` raises.
        """
        split = self.options.earlier_reasoning == "split"
        step = self._split if split else lambda form: [self._whole(form)]
        forms = [self._forms(conversation) for conversation in conversations]
        begun: list[_Form | ValueError] = []
        if not split:
            with self._lock:
                for one in forms:
                    begun.append(self._begun(one))
                    if isinstance(begun[-1], ValueError) or isinstance(begun[-1].text, ValueError):
                        break  # the caller may stop at the first conversation that fails
        for one, first in zip_longest(forms, begun):
            outcome: list[Rendered] | ValueError
            with self._lock:
                if isinstance(first, ValueError):
                    outcome = first
                else:
                    try:
                        outcome = self._in_some_form(one if first is None else chain([first], one), step)
                    except ValueError as error:
                        outcome = error
            yield outcome

    def _begun(self, forms: Iterator[_Form]) -> _Form | ValueError:
        """Return the first of several forms with its text, or the error of a conversation without any form."""
        try:
            form = next(forms)
        except ValueError as error:
            return error
        try:
            return form._replace(text=self._render_or_raise(self._template.plain, form.variables))
        except ValueError as error:
            return form._replace(text=error)

    def _forms(self, conversation: Conversation) -> Iterator[_Form]:
        """Yield the forms of a conversation to try in turn, first that of transformers in the template's style.

        The last forms have contents as strings if the style has content parts, or the other way round.

        Raises:
            SequenceError: the conversation cannot be used in any form.
        """
        self._refuse_reserved(conversation.kwargs, unusable)
        if len(conversation.weights) != len(conversation.messages):
            raise unusable(f"{len(conversation.weights)} weights for {len(conversation.messages)} messages")
        if self._style is None:
            self._style = learn_style(
                lambda made_up: self._render_or_none(self._variables(made_up, Conversation(made_up, [])))
            )
        lacking = len(_lacking(conversation))
        for other in (False, True):
            style = replace(self._style, in_parts=not self._style.in_parts) if other else self._style
            for note, missing in style.null_forms if lacking else NULL_FORMS[:1]:
                notes = {note: lacking} if lacking else {}
                messages = prepared(conversation.messages, style, notes, missing)
                yield _Form(conversation, messages, self._variables(messages, conversation), notes, style, missing)

    def _in_some_form(self, forms: Iterable[_Form], step: Callable[[_Form], list[Rendered]]) -> list[Rendered]:
        """Render the preferred form of the style; if the result is spoilt, use the form with the shortest rendering.

        A rendering is spoilt if it has content parts as Python prints them, or the word None for a missing content. A
        longer rendering may have an empty turn for that content.

        Raises:
            SequenceError: the template renders no form, or spoils all.
        """
        found: list[list[Rendered]] = []
        failed: SequenceError | None = None
        style: Style | None = None
        for form in forms:
            if found and form.style is not style:
                break
            style = form.style
            try:
                rendered = step(form)
            except _Runaway:
                raise
            except SequenceError as error:
                # Report the first failure, unless it only says that nothing was rendered.
                unsaid = isinstance(failed, _UnrenderedError) and not isinstance(error, _UnrenderedError)
                failed = error if failed is None or unsaid else failed
                continue
            self._note_unwritten(rendered, form)
            if style.in_parts and self._writes_more(rendered, form, PRINTED_PART):
                continue
            if form.missing is None and self._writes_more(rendered, form, "None"):
                continue
            if form.missing is style.null_forms[0][1]:
                return rendered
            if form.missing is not ABSENT or not found:
                found.append(rendered)
        if found:
            return min(found, key=lambda some: sum(len(one.text) for one in some))
        assert failed is not None
        lacking = _lacking(form.conversation)
        if not (lacking and isinstance(failed, _UnrenderedError)):
            raise failed
        what = ", ".join(f"messages[{index}].content" for index in lacking[:3])
        raise unusable(f'{failed.reason} ({what} is missing or null; "" and null were tried instead)')

    def _writes_more(self, rendered: Sequence[Rendered], form: _Form, what: str) -> bool:
        """Return whether the template wrote something more often than the row and the template's source spell it."""
        row = form.conversation
        strings = "\0".join(strings_in([row.messages, row.tools]))
        meant = strings.count(what) + self._source.count(what)
        return any(one.text.count(what) > meant for one in rendered)

    def _note_unwritten(self, rendered: Sequence[Rendered], form: _Form) -> None:
        """Count the messages that are in none of the texts, by role."""

        def render(messages: Sequence[dict[str, Any]]) -> str | None:
            if messages is form.messages and isinstance(form.text, str):
                return form.text
            try:
                return self._render_or_none({**form.variables, "messages": messages})
            except (FormatError, SequenceError):
                return None

        text = rendered[0].text if len(rendered) == 1 else "\0".join(one.text for one in rendered)
        for index in unwritten_messages(form.messages, text, render):
            note = f"{LEFT_OUT_MESSAGE}{form.messages[index].get('role')}"
            form.notes[note] = form.notes.get(note, 0) + 1

    def _whole(self, form: _Form, chosen: Sequence[int] | None = None) -> Rendered:
        """Render one text and find its spans, for the ``chosen`` messages or for those selected by the options."""
        if self.options.train_on == "markers":
            return self._enclosed(form)
        weights = form.conversation.weights
        speakers = selected(form.messages, [1.0] * len(weights), "assistant") if self.options.train_on == "all" else []
        text = form.text
        if text is None:
            text = self._render_or_raise(self._template.plain, form.variables)
        elif isinstance(text, ValueError):
            raise text
        if chosen is None:
            chosen = speakers or selected(form.messages, weights, self.options.train_on)
        everything = self._learns_everything and all(weights[index] == 1 for index in speakers)
        try:
            tools = form.conversation.tools
            said = self._masks.said(form.messages, tools, text, chosen, self._renderer(form)) if chosen else {}
        except UnplacedError:
            if not everything:
                raise
            said = {}
            self._require_words(form.messages, speakers, text)
        for one in said.values():
            for what, count in one.notes.items():
                form.notes[what] = form.notes.get(what, 0) + count
        silent = [index for index in said if not _has_words(form.messages[index].get("content"))]
        if alone := sum(bool(said[index].trained) for index in silent if not utterances_of(form.messages[index])):
            form.notes["ends_of_turn_alone"] = alone
        if not self.options.train_on_thinking:
            contents = (one for index in chosen for one in utterances_of(form.messages[index]) if one.kind == "content")
            if kept := sum(THINKING_TAG.search(one.text) is not None for one in contents):
                form.notes["thinking_tags_kept"] = kept
        spans = [Span(0, len(text))] if everything and text else self._spans(said, weights, len(text))
        literals = [] if self.options.allow_control_tokens else self._literals(text, form)
        return Rendered(text, spans, literals, form.notes)

    def _enclosed(self, form: _Form) -> Rendered:
        """Render one text whose spans are the text inside the generation markers, with the weights of the messages."""
        try:
            traced = self._render_or_raise(self._template.render, form.messages, form.variables)
        except Untraceable as error:
            raise unusable(
                f"{self.name}: the positions of the generation markers in the text cannot be determined, because"
                f" {error}; fix the template"
            ) from None
        weighed = [
            (one.start, one.stop, form.conversation.weights[one.message])
            for one in own_segments(traced, form.messages)
            if form.messages[one.message].get("role") == "assistant"
        ]
        spans: list[Span] = []
        for start, stop in traced.generated:
            own = [one for one in weighed if one[0] < stop and one[1] > start]
            spans += [Span(low, high) for low, high in cut([(start, stop)], [one[:2] for one in own])]
            spans += [Span(max(low, start), min(high, stop), weight) for low, high, weight in own if weight != 0]
        literals = [] if self.options.allow_control_tokens else self._literals(traced.text, form)
        return Rendered(traced.text, sorted(spans), literals, form.notes)

    def _require_words(self, messages: Sequence[Mapping[str, Any]], speakers: Sequence[int], text: str) -> None:
        """Reject the row unless all words of these messages are anywhere in the text."""
        whole = "".join(text.split())
        for index in speakers:
            for piece in utterances_of(messages[index]):
                if "".join(piece.text.split()) not in whole:
                    raise unusable(
                        f"the chat template {self.name} drops {short(piece.text)} from assistant message {index + 1};"
                        " use a template that keeps it, or set the weight of the message to 0"
                    )

    def _split(self, form: _Form) -> list[Rendered]:
        """Render one text per turn; see ``render_turns``."""
        chosen = selected(form.messages, form.conversation.weights, self.options.train_on)
        if not chosen:
            return [self._whole(form)]
        texts = [self._render_or_none({**form.variables, "messages": form.messages[: index + 1]}) for index in chosen]
        found: list[Rendered] = []
        group: list[int] = []
        for number, index in enumerate(chosen):
            group.append(index)
            text, more = texts[number], texts[number + 1 : number + 2]
            if more and (text is None or (more[0] is not None and more[0].startswith(text.rstrip()))):
                continue
            whole, messages = form.conversation, form.messages[: index + 1]
            cut = whole._replace(messages=whole.messages[: index + 1], weights=whole.weights[: index + 1])
            variables = {**form.variables, "messages": messages}
            found.append(
                self._whole(
                    _Form(cut, messages, variables, {} if found else form.notes, form.style, form.missing), group
                )
            )
            group = []
        return found

    def _variables(self, messages: list[dict[str, Any]], conversation: Conversation) -> dict[str, Any]:
        return {
            **self._special,
            **self._kwargs,
            **conversation.kwargs,
            "messages": messages,
            "tools": conversation.tools,
            "documents": None,
            "add_generation_prompt": False,
        }

    def _renderer(self, form: _Form) -> Renderer:
        def variables(messages: list[dict[str, Any]], altered: dict[str, Any]) -> dict[str, Any]:
            if form.style.in_parts:
                messages = [in_text_parts(message) for message in messages]
            return {**form.variables, "messages": messages, **altered}

        def plain(*, messages: list[dict[str, Any]], **altered: Any) -> str | None:
            return self._render_or_none(variables(messages, altered))

        def traced(*, messages: list[dict[str, Any]], **altered: Any) -> Traced | None:
            made = variables(messages, altered)
            try:
                return self._render_or_raise(self._template.render, made["messages"], made)
            except _Runaway:
                raise
            except (SequenceError, Untraceable):
                return None

        kwargs = form.conversation.kwargs
        key = json.dumps(kwargs, sort_keys=True, default=repr) if kwargs else ""
        return Renderer(plain, traced, key)

    def _spans(self, said: Mapping[int, Said], weights: Sequence[float], length: int) -> list[Span]:
        """Return the spans of messages with their weights, ascending.

        With ``train_on="all"``, the text outside the chosen messages also gets spans, of weight 1. The text has
        ``length`` characters.
        """
        trained = [(start, stop, message) for message, one in said.items() for start, stop in one.trained]
        spans: list[Span] = []
        at = 0
        for start, stop, message in sorted(trained):
            # Two spans can overlap, because the end of a turn can be in the next message's text.
            if stop > (first := start if start > at else at):
                spans.append(Span(first, stop, weights[message]))
                at = stop
        if self.options.train_on != "all":
            return spans
        at = 0
        for start, stop in sorted(span for one in said.values() for span in one.generated):
            spans.append(Span(at, start))
            at = max(at, stop)
        spans.append(Span(at, length))
        spans = [span for span in spans if span.start < span.stop and span.weight != 0]
        return sorted(spans, key=lambda span: span.start)

    def _render_or_none(self, variables: dict[str, Any]) -> str | None:
        """Render a modified or artificial conversation; None if the template rejects it or fails.

        Raises:
            SequenceError: it needs more than its allowance.
            FormatError: the template cannot be used at all.
        """
        try:
            return self._template.plain(variables)
        except FormatError:
            raise
        except _RUNAWAY as error:
            raise self._runaway(error) from None
        except Exception:
            return None

    def _literals(self, text: str, form: _Form) -> Ranges:
        """Return the positions in ``text`` of control tokens spelled by the data."""
        data = {"messages": form.messages, "tools": form.conversation.tools, **form.conversation.kwargs}
        ranges, read_by_template = self._controls.spelt(
            data, text, lambda altered: self._render_or_none({**form.variables, **altered})
        )
        if read_by_template:
            form.notes["control_tokens_read_by_template"] = len(read_by_template)
        return ranges

    def _render_or_raise(self, step: Callable[..., _Result], *arguments: Any) -> _Result:
        """Call a method that renders. Any error of the template becomes a SequenceError or FormatError."""
        try:
            return step(*arguments)
        except (FormatError, SequenceError, Untraceable):
            raise
        except RaisedByTemplate as error:
            raise _unrendered(f"the chat template {self.name} rejects it: {error}") from None
        except _RUNAWAY as error:
            raise self._runaway(error) from None
        except SecurityError as error:
            where = self._template.line_of(error)
            raise FormatError(f"{self.name}: {where}not allowed in a template: {error}") from None
        except Exception as error:
            where = self._template.line_of(error)
            said = unusable if isinstance(error, NotText) else _unrendered
            raise said(f"the chat template {self.name} fails on it: {where}{error}") from None

    def _runaway(self, error: Exception) -> _Runaway:
        where = self._template.line_of(error)
        what = str(error) or "it needs more memory than is available"
        return _Runaway("conversation", None, f"{self.name}: {where}not allowed in a template: {what}")

    def _refuse_reserved(self, kwargs: Mapping[str, Any], error: Callable[[str], Exception]) -> None:
        taken = _RESERVED.intersection(kwargs)
        if taken:
            raise error(f"{self.name}: {', '.join(sorted(taken))} cannot be given as a template variable")


def _has_words(content: object) -> bool:
    return type(content) is str and bool(content) and not content.isspace() and "</" not in content


def _lacking(conversation: Conversation) -> list[int]:
    """Positions of the assistant messages without a content."""
    return [
        index
        for index, message in enumerate(conversation.messages)
        if message.get("content") is None and message.get("role") == "assistant"
    ]


def _unrendered(reason: str) -> SequenceError:
    return _UnrenderedError("conversation", None, reason)
