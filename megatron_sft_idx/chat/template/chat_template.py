"""Conversations to text, with the characters that are trained on.

``ChatTemplate`` puts the steps together: ``trace`` renders and says which message wrote what, ``probes``
learns the template's own scaffolding, ``spans`` decides what the model must learn, ``marking`` finds control
tokens that the data spells.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from jinja2.exceptions import SecurityError

from megatron_sft_idx.chat.template.environment import RaisedByTemplate, TemplateEnvironment
from megatron_sft_idx.chat.template.marking import ControlTokens, locate_pieces
from megatron_sft_idx.chat.template.prepare import Style, in_text_parts, prepared
from megatron_sft_idx.chat.template.probes import Scaffold, learn_scaffold, learn_style
from megatron_sft_idx.chat.template.spans import MaskOptions, Ranges, Rules, SpanFinder, selected, unusable
from megatron_sft_idx.chat.template.trace import Traced, TracedTemplate
from megatron_sft_idx.chat.types import Conversation, Rendered, Span
from megatron_sft_idx.errors import FormatError, SequenceError

__all__ = ["ChatTemplate", "MaskOptions"]

REVISION = 1
"""Raised whenever the same template and row would give other text or spans."""

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_MOST_SCAFFOLDS = 256
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "zqcalled",
        "description": "Made up.",
        "parameters": {
            "type": "object",
            "properties": {"zqkey": {"type": "string", "description": "Made up."}},
            "required": ["zqkey"],
        },
    },
}
_Result = TypeVar("_Result")


class _Row(NamedTuple):
    """One conversation on its way."""

    conversation: Conversation
    messages: list[dict[str, Any]]  # as the template sees them
    variables: dict[str, Any]
    notes: dict[str, int]


class ChatTemplate:
    """A chat template that knows which of its text the model must learn.

    Renders are serialised by a lock; pickling rebuilds the template in the other process.

    Args:
        source: the template.
        special_tokens: template variables such as ``bos_token`` and ``eos_token``.
        control_tokens: texts of the tokenizer's special tokens. Data that spells one must not become one.
        options: what counts as learnt.
        template_kwargs: further template variables; a row's own come after and win.
        name: what to call the template in errors, such as the file it came from.

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
        self._template = TracedTemplate(source, TemplateEnvironment(self.options.template_date), name)
        ends = {*self._controls.texts, *(text for text in self._special.values() if isinstance(text, str))}
        bos, eos = (self._special.get(key) or "" for key in ("bos_token", "eos_token"))
        ends -= {"", bos} - {eos}
        longest_first = tuple(sorted(ends, key=lambda text: (-len(text), text)))
        self._rules = Rules(name, self.options, longest_first, bos if bos != eos else "", eos)
        wants_all = self.options.train_on_thinking and self.options.train_on_tool_calls
        self._learns_everything = self.options.train_on == "all" and wants_all
        self._scaffolds: dict[str, Scaffold] = {}
        self._style: Style | None = None
        self._lock = Lock()

    @property
    def has_generation_markers(self) -> bool:
        """Whether the template says itself what is trained on, with ``{% generation %}``."""
        return self._template.has_generation

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
            [options.allow_control_tokens, options.template_date],
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:32]

    def __reduce__(self) -> tuple[Callable[..., ChatTemplate], tuple[Any, ...]]:
        keywords = {
            "special_tokens": self._special,
            "control_tokens": self._controls.texts,
            "options": self.options,
            "template_kwargs": self._kwargs,
            "name": self.name,
        }
        return _rebuilt, (self._source, keywords)

    def render(self, conversation: Conversation) -> Rendered:
        """Render a conversation and find what is trained on in it.

        Raises:
            SequenceError: the conversation cannot be used with this template: the template refuses it, fails
                on it, or leaves out what the assistant says. ``source`` is only ``"conversation"``.
            FormatError: the template cannot be used: it needs a date, runs away, or cannot be traced.
        """
        self._refuse_reserved(conversation.kwargs, unusable)
        weights = conversation.weights
        if len(weights) != len(conversation.messages):
            raise unusable(f"{len(weights)} weights for {len(conversation.messages)} messages")
        with self._lock:
            if self._style is None:
                self._style = learn_style(self._plain_probe)
            notes: dict[str, int] = {}
            messages = prepared(conversation.messages, self._style, notes)
            row = _Row(conversation, messages, self._variables(messages, conversation), notes)
            speakers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
            if self._learns_everything and all(weights[index] == 1 for index in speakers):
                text = self._guarded(self._template.plain, row.variables)
                finder = SpanFinder(self._rules, Traced(text, [], []), messages)
                finder.require_words(speakers)
                notes.update(finder.notes)
                spans = [Span(0, len(text))] if text else []
            else:
                traced = self._guarded(self._template.render, messages, row.variables)
                text, spans = traced.text, self._spans(traced, row, speakers)
            literals = [] if self.options.allow_control_tokens else self._literals(text, row)
            return Rendered(text, spans, literals, notes)

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

    def _spans(self, traced: Traced, row: _Row, speakers: list[int]) -> list[Span]:
        options, weights = self.options, row.conversation.weights
        everything = options.train_on == "all"
        marked = self._template.has_generation
        finder = SpanFinder(
            self._rules,
            traced,
            row.messages,
            None if marked else self._scaffold(row.conversation),
            lambda: self._located(row, traced.text),
        )
        chosen = speakers if everything else selected(row.messages, weights, options.train_on)
        found: list[tuple[int, Ranges, Ranges]] = []
        if marked:
            blocks = finder.blocks()
            for index in chosen:
                found.append((index, *finder.marked(index, blocks.get(index, []))))
        else:
            for index in chosen:
                found.append((index, *finder.traced(index)))
        spans = _weighted(found, weights)
        if everything:
            spans = _around(found, spans, len(traced.text))
        for what, count in finder.notes.items():
            row.notes[what] = row.notes.get(what, 0) + count
        return spans

    def _scaffold(self, conversation: Conversation) -> Scaffold:
        key = f"{bool(conversation.tools)}"
        if conversation.kwargs:
            key += json.dumps(conversation.kwargs, sort_keys=True, default=repr)
        scaffold = self._scaffolds.get(key)
        if scaffold is None:
            if len(self._scaffolds) >= _MOST_SCAFFOLDS:
                self._scaffolds.clear()
            render = self._prober(bool(conversation.tools), conversation.kwargs)
            assert self._style is not None  # known since the row's messages were prepared
            arguments = {"zqkey": "zqvalue"} if self._style.parsed_arguments else '{"zqkey": "zqvalue"}'
            scaffold = self._scaffolds[key] = learn_scaffold(render, arguments)
        return scaffold

    def _prober(self, tools: bool, kwargs: dict[str, Any]) -> Callable[..., Traced | None]:
        """Renders made-up conversations with this template."""

        def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> Traced | None:
            if self._style is not None and self._style.in_parts:
                messages = [in_text_parts(message) for message in messages]
            probe = Conversation(messages, [], [_PROBE_TOOL] if tools else None, kwargs)
            variables = {
                **self._variables(messages, probe),
                "add_generation_prompt": add_generation_prompt,
            }
            return self._tried(self._template.render, messages, variables)

        return render

    def _plain_probe(self, messages: list[dict[str, Any]]) -> str | None:
        """Render a made-up conversation without tracing; None where the template refuses it."""
        return self._tried(self._template.plain, self._variables(messages, Conversation(messages, [])))

    def _tried(self, step: Callable[..., _Result], *arguments: Any) -> _Result | None:
        """Run a render of a made-up conversation; None where the template finds it odd. Others may do."""
        try:
            return step(*arguments)
        except FormatError:
            raise
        except OverflowError as error:
            where = self._template.line_of(error)
            raise FormatError(f"{self.name}: {where}a template may not do this: {error}") from None
        except Exception:
            return None

    def _located(self, row: _Row, text: str) -> dict[tuple[int, int], int] | None:
        def render(altered: list[dict[str, Any]]) -> str:
            return self._template.plain({**row.variables, "messages": altered})

        try:
            return locate_pieces(row.messages, text, render)
        except Exception:  # the template refuses marked words; it had no trouble with the plain ones
            return None

    def _literals(self, text: str, row: _Row) -> Ranges:
        def render(altered: Mapping[str, Any]) -> str | None:
            try:
                return self._template.plain({**row.variables, **altered})
            except Exception:  # the template refuses renamed tokens; it had no trouble with the plain ones
                return None

        data = {"messages": row.messages, "tools": row.conversation.tools, **row.conversation.kwargs}
        ranges, meant = self._controls.spelt(data, text, render)
        if meant:
            row.notes["control_tokens_read_by_template"] = len(meant)
        return ranges

    def _guarded(self, step: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run a render, turning what goes wrong into our errors."""
        try:
            return step(*arguments)
        except (FormatError, SequenceError):
            raise
        except RaisedByTemplate as error:
            raise unusable(f"the chat template {self.name} refuses it: {error}") from None
        except (SecurityError, OverflowError, MemoryError) as error:
            where = self._template.line_of(error)
            raise FormatError(f"{self.name}: {where}a template may not do this: {error}") from None
        except Exception as error:
            where = self._template.line_of(error)
            raise unusable(f"the chat template {self.name} fails on it: {where}{error}") from None

    def _refuse_reserved(self, kwargs: Mapping[str, Any], error: Callable[[str], Exception]) -> None:
        taken = _RESERVED.intersection(kwargs)
        if taken:
            raise error(f"{self.name}: {', '.join(sorted(taken))} cannot be given as a template variable")


def _rebuilt(source: str, keywords: dict[str, Any]) -> ChatTemplate:
    return ChatTemplate(source, **keywords)


def _weighted(found: Sequence[tuple[int, Ranges, Ranges]], weights: Sequence[float]) -> list[Span]:
    """Trained ranges with their messages' weights: ascending, none overlapping the one before it."""
    spans: list[Span] = []
    at = 0
    ranges = [(start, stop, message) for message, _, kept in found for start, stop in kept]
    ranges.sort()
    for start, stop, message in ranges:
        # The end of a turn may stand in the next message's text.
        if stop > (first := max(start, at)):
            spans.append(Span(first, stop, weights[message]))
            at = stop
    return spans


def _around(found: Sequence[tuple[int, Ranges, Ranges]], spans: list[Span], length: int) -> list[Span]:
    """The spans, and the rest of a text of ``length`` characters but for what the options left out."""
    rest: list[Span] = []
    at = 0
    for start, stop in sorted(one for _, said, _ in found for one in said):
        rest.append(Span(at, start))
        at = max(at, stop)
    rest.append(Span(at, length))
    spans = [span for span in (*spans, *rest) if span.start < span.stop and span.weight != 0]
    return sorted(spans, key=lambda span: span.start)
