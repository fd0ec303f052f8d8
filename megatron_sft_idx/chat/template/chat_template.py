"""``ChatTemplate``, by which the rest of the package renders conversations and knows what of the text is trained on.

``words`` brings messages into a form that the template takes, ``trace`` renders them and tells which wrote what,
``scaffold`` finds the edges of turns by rendering beginnings of the conversation, ``spans`` decides what the model must
learn. Whatever a template does wrong becomes a ``SequenceError`` or ``FormatError`` here.
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
from megatron_sft_idx.chat.template.environment import RaisedByTemplate, TemplateEnvironment
from megatron_sft_idx.chat.template.scaffold import Rules
from megatron_sft_idx.chat.template.spans import Ranges, SpanFinder
from megatron_sft_idx.chat.template.trace import Traced, TracedTemplate, Untraceable
from megatron_sft_idx.chat.template.words import (
    ABSENT,
    NULL_FORMS,
    ControlTokens,
    Style,
    in_text_parts,
    learn_style,
    prepared,
    prints_parts,
    selected,
    unusable,
)
from megatron_sft_idx.chat.types import Conversation, MaskOptions, Rendered, Span
from megatron_sft_idx.errors import FormatError, SequenceError

REVISION = 8
"""Raised whenever the same template and row would give other text or spans."""

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_RUNAWAY = (Overspent, OverflowError, MemoryError)
_Result = TypeVar("_Result")


class _Form(NamedTuple):
    """One conversation in one of the forms that a template may take.

    Attributes:
        conversation: the conversation as it was given.
        messages: its messages as the template sees them.
        variables: all template variables, ``messages`` among them.
        notes: counts for the summary by name; rendering adds to them.
        style: the form of contents and arguments.
        missing: what stands for the missing content of an answer.
        traced: the result of rendering this form with marks, if that was done already, or the error it raised.
    """

    conversation: Conversation
    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    notes: dict[str, int]
    style: Style
    missing: object
    traced: Traced | Exception | None = None


class _Runaway(SequenceError):  # noqa: N818 - what the template is, in its reason
    """A rendering asked for more than its allowance. No other form of the conversation is tried after that."""


class _UnrenderedError(SequenceError):
    """The template refused a conversation in this form. An error that another form gave says more to the user."""


class ChatTemplate:
    """A chat template that knows which of its text the model must learn.

    Threads may share it: a lock lets one of them render at a time. Unpickling compiles the template anew.

    Args:
        source: the template.
        special_tokens: template variables such as ``bos_token`` and ``eos_token``.
        control_tokens: texts of the tokenizer's special tokens. Data that spells one must not become one.
        options: what is trained on.
        template_kwargs: further template variables; a row's own take precedence.
        name: what errors call the template, such as the file it came from.

    Attributes:
        has_generation_markers: whether the template itself marks what is trained on, with ``{% generation %}``.

    Raises:
        FormatError: the template does not compile, or an option has an impossible value.
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
        wants_all = self.options.train_on_thinking and self.options.train_on_tool_calls
        self._learns_everything = self.options.train_on == "all" and wants_all
        self._style: Style | None = None
        self._lock = Lock()

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides text and spans, the same on any machine."""
        options = self.options
        parts = [
            REVISION,
            self._source,
            self._special,
            sorted(self._controls.texts),
            self._kwargs,
            [options.train_on, options.train_on_thinking, options.train_on_tool_calls],
            [options.turns, options.partial_markers],
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
        """Render a conversation as one text and find what is trained on in it.

        Raises:
            SequenceError: the conversation cannot be used with this template: the template refuses it, fails
                on it, runs away, writes what has no text, or leaves out what the assistant says; or nothing tells
                where that is. ``source`` is only ``"conversation"``.
            FormatError: the template cannot be used: it needs a date, or reaches for what it may not.
        """
        with self._lock:
            return self._in_some_form(self._forms(conversation), lambda form: [self._whole(form)])[0]

    def render_turns(self, conversation: Conversation) -> list[Rendered]:
        """Render a conversation as one text or, with ``turns="split"``, as a text for each turn.

        The text of a turn has an assistant message that is trained on, and the messages before it but none behind it,
        as the model would see them; only that message is trained on. No text is made of a turn if the next turn's text
        begins with it, or if the template refuses to render it: the next text then trains on both turns.

        Raises:
            SequenceError, FormatError: as ``render``.
        """
        (outcome,) = self.render_each([conversation])
        if isinstance(outcome, ValueError):
            raise outcome
        return outcome

    def render_each(self, conversations: Sequence[Conversation]) -> Iterator[list[Rendered] | ValueError]:
        """Render conversations as ``render_turns`` does; a hundred or so at once are quicker than one by one.

        Texts come first and spans after, since the code of the two steps does not fit into a processor's caches
        together: for 64 short rows that saves a fifth of the time.

        Yields:
            For each conversation its texts, or the error that ``render_turns`` raises.
        """
        split = self.options.turns == "split"
        step = self._split if split else lambda form: [self._whole(form)]
        forms = [self._forms(conversation) for conversation in conversations]
        begun: list[_Form | ValueError] = []
        if not (split or self._learns_everything):
            with self._lock:
                for one in forms:
                    begun.append(self._begun(one))
                    if isinstance(begun[-1], ValueError) or isinstance(begun[-1].traced, ValueError):
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
        """The first of some forms, rendered with marks; or the error of a conversation that has no form."""
        try:
            form = next(forms)
        except ValueError as error:
            return error
        return form._replace(traced=self._traced(form))

    def _traced(self, form: _Form) -> Traced | Exception:
        """A form rendered with marks, or the ValueError or Untraceable that says why it cannot be."""
        try:
            return self._render_or_raise(self._template.render, form.messages, form.variables)
        except (ValueError, Untraceable) as error:
            return error

    def _forms(self, conversation: Conversation) -> Iterator[_Form]:
        """The forms of a conversation, to be tried in turn: first that of transformers, changed only as the style says.

        The last forms have contents as strings where the style has content parts, or the other way round.

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
        """Render the preferred form of the style; if the template spoils it, the form with the shortest rendering.

        Spoilt is one with content parts as Python prints them, or with the word None for a missing content. A longer
        rendering may have an empty turn for that content.

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
                # The first failure is told, unless it says only that nothing was rendered.
                unsaid = isinstance(failed, _UnrenderedError) and not isinstance(error, _UnrenderedError)
                failed = error if failed is None or unsaid else failed
                continue
            if style.in_parts and any(prints_parts(one.text) for one in rendered):
                continue
            if form.missing is None and self._writes_none(rendered, form.conversation):
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
        raise unusable(f'{failed.reason} ({what} is missing or null; "" and null were tried in its place)')

    def _writes_none(self, rendered: Sequence[Rendered], conversation: Conversation) -> bool:
        """Whether the template wrote the word None for a missing content, in a form that has None in its place."""
        meant = json.dumps([conversation.messages, conversation.tools], default=repr, ensure_ascii=False).count("None")
        return any(one.text.count("None") > meant + self._source.count("None") for one in rendered)

    def _whole(self, form: _Form, chosen: Sequence[int] | None = None) -> Rendered:
        """Render one text and find its spans; ``chosen`` messages are trained on, or those that the options select."""
        weights = form.conversation.weights
        speakers = selected(form.messages, [1.0] * len(weights), "assistant") if self.options.train_on == "all" else []
        if self._learns_everything and all(weights[index] == 1 for index in speakers):
            text = self._render_or_raise(self._template.plain, form.variables)
            finder = self._finder(form, text, None)
            finder.require_words(speakers)
            spans = [Span(0, len(text))] if text else []
        else:
            outcome, traced = form.traced or self._traced(form), None
            if isinstance(outcome, Traced):
                traced, text = outcome, outcome.text
            elif isinstance(outcome, Untraceable):
                if self.has_generation_markers:
                    raise unusable(
                        f"{self.name}: cannot tell which message wrote what between generation markers, because"
                        f" {outcome}; train on all tokens, or mend the template"
                    ) from None
                text = self._render_or_raise(self._template.plain, form.variables)
            else:
                raise outcome
            finder = self._finder(form, text, traced)
            if chosen is None:
                chosen = speakers or selected(form.messages, weights, self.options.train_on)
            spans = self._spans(finder, form, chosen, len(text))
        for what, count in finder.notes.items():
            form.notes[what] = form.notes.get(what, 0) + count
        literals = [] if self.options.allow_control_tokens else self._literals(text, form)
        return Rendered(text, spans, literals, form.notes)

    def _split(self, form: _Form) -> list[Rendered]:
        """Render one text for each turn, as ``render_turns`` says."""
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

    def _finder(self, form: _Form, text: str, traced: Traced | None) -> SpanFinder:
        def render(*, messages: list[dict[str, Any]], **altered: Any) -> str | None:
            if form.style.in_parts:
                messages = [in_text_parts(message) for message in messages]
            return self._render_or_none({**form.variables, "messages": messages, **altered})

        tools, kwargs = form.conversation.tools, form.conversation.kwargs
        key = f"{bool(tools)}" + (json.dumps(kwargs, sort_keys=True, default=repr) if kwargs else "")
        return SpanFinder(self._rules, text, form.messages, tools, traced, render, key, form.style.writes_arguments)

    def _spans(self, finder: SpanFinder, form: _Form, chosen: Sequence[int], length: int) -> list[Span]:
        """The spans of the ``chosen`` messages with their weights, ascending.

        With ``train_on="all"`` the text that no chosen message generated has spans too, of weight 1. The text has
        ``length`` characters.
        """
        blocks = finder.blocks() if self.has_generation_markers else {}
        trained: list[tuple[int, int, int]] = []
        said: Ranges = []
        for index in chosen:
            marked = self.has_generation_markers
            whole, kept = finder.marked(index, blocks.get(index, [])) if marked else finder.turn(index)
            trained += [(start, stop, index) for start, stop in kept]
            said += whole
        spans: list[Span] = []
        at = 0
        for start, stop, message in sorted(trained):
            # Two spans may overlap, since the end of a turn may stand in the next message's text.
            if stop > (first := start if start > at else at):
                spans.append(Span(first, stop, form.conversation.weights[message]))
                at = stop
        if self.options.train_on != "all":
            return spans
        at = 0
        for start, stop in sorted(said):
            spans.append(Span(at, start))
            at = max(at, stop)
        spans.append(Span(at, length))
        spans = [span for span in spans if span.start < span.stop and span.weight != 0]
        return sorted(spans, key=lambda span: span.start)

    def _render_or_none(self, variables: dict[str, Any]) -> str | None:
        """Render an altered or made-up conversation; None where the template refuses it or fails on it.

        Raises:
            SequenceError: it asks for more than its allowance.
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
        """Where in ``text`` control tokens stand that the data spells."""
        data = {"messages": form.messages, "tools": form.conversation.tools, **form.conversation.kwargs}
        ranges, read_by_template = self._controls.spelt(
            data, text, lambda altered: self._render_or_none({**form.variables, **altered})
        )
        if read_by_template:
            form.notes["control_tokens_read_by_template"] = len(read_by_template)
        return ranges

    def _render_or_raise(self, step: Callable[..., _Result], *arguments: Any) -> _Result:
        """Call a method that renders; whatever the template does wrong becomes a SequenceError or FormatError."""
        try:
            return step(*arguments)
        except (FormatError, SequenceError, Untraceable):
            raise
        except RaisedByTemplate as error:
            raise _unrendered(f"the chat template {self.name} refuses it: {error}") from None
        except _RUNAWAY as error:
            raise self._runaway(error) from None
        except SecurityError as error:
            where = self._template.line_of(error)
            raise FormatError(f"{self.name}: {where}a template may not do this: {error}") from None
        except Exception as error:
            where = self._template.line_of(error)
            said = unusable if isinstance(error, NotText) else _unrendered
            raise said(f"the chat template {self.name} fails on it: {where}{error}") from None

    def _runaway(self, error: Exception) -> _Runaway:
        where = self._template.line_of(error)
        what = str(error) or "it needs more memory than there is"
        return _Runaway("conversation", None, f"{self.name}: {where}a template may not do this: {what}")

    def _refuse_reserved(self, kwargs: Mapping[str, Any], error: Callable[[str], Exception]) -> None:
        taken = _RESERVED.intersection(kwargs)
        if taken:
            raise error(f"{self.name}: {', '.join(sorted(taken))} cannot be given as a template variable")


def _lacking(conversation: Conversation) -> list[int]:
    """Positions of the assistant messages without a content."""
    return [
        index
        for index, message in enumerate(conversation.messages)
        if message.get("content") is None and message.get("role") == "assistant"
    ]


def _unrendered(reason: str) -> SequenceError:
    return _UnrenderedError("conversation", None, reason)
