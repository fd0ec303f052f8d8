"""Which message wrote which characters: a template's syntax tree, marked.

Every iteration of every ``for`` loop is put between an *enter* and a *leave* mark. *Enter* is told the loop
variable; if that very object is one of the conversation's messages (or is an index by which the loop body picks
one), what the iteration writes is that message's. Nested loops over anything else (tool calls, content parts)
stay with the message around them. ``{% generation %}`` blocks get a pair of marks too.

Marks in the template's own flow are statements that write nothing: they note how many characters the render
has yielded so far, so the text is the plain render's by construction. Inside macros, call, filter and ``set``
blocks and recursive loops text is captured before it is yielded, and that count means nothing. There the marks
write sentinels from Unicode's private use area, which are stripped afterwards; a template may measure, trim or
compare what it captured, so what is left is required to equal a second, unmarked render.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.visitor import NodeTransformer

from megatron_sft_idx.chat.environment import GENERATION, TemplateEnvironment
from megatron_sft_idx.errors import FormatError

__all__ = ["Segment", "Traced", "TracedTemplate"]

MAX_CHARACTERS = 1 << 27
"""More text than this from one conversation is a runaway template."""

MAX_ITERATIONS = 1 << 22
"""More loop iterations than this for one conversation is a runaway template."""

_LEAVE, _BEGIN, _END = -1, -2, -3  # events; 0 and up enter that frame
_SENTINELS = tuple(chr(base) for base in range(0xF0000, 0xF0040, 2))


@dataclass(frozen=True, slots=True)
class Segment:
    """Characters ``[start, stop)`` written by one message in one iteration (``frame``) of a loop."""

    start: int
    stop: int
    frame: int
    message: int


@dataclass(frozen=True, slots=True)
class Traced:
    """A rendered text with its origins.

    Attributes:
        text: exactly what the unmarked template renders.
        segments: what the messages wrote, in the order of the text, not overlapping.
        generated: ``(start, stop)`` of the template's ``{% generation %}`` blocks, ascending, disjoint.
    """

    text: str
    segments: list[Segment]
    generated: list[tuple[int, int]]


class _Tracker:
    """Notes marks while a template renders. One render at a time."""

    def __init__(self) -> None:
        self.reset((), "")

    def reset(self, messages: Iterable[object], sentinel: str) -> None:
        self.position = 0
        self.iterations = 0
        self.events: list[tuple[int, int]] = []
        self.frames: list[int] = []
        self.stack = [-1]  # the message each open loop iteration belongs to
        self.places = {id(message): index for index, message in enumerate(messages)}
        self.sentinel = sentinel
        self.captured = False

    def enter(self, value: Any, *lists: Any) -> None:
        frame = self._push(value, lists)
        if frame >= 0:
            self.events.append((self.position, frame))

    def leave(self, _value: Any) -> None:
        if self.stack.pop() != self.stack[-1]:
            self.events.append((self.position, _LEAVE))

    def begin(self, _value: Any) -> None:
        self.events.append((self.position, _BEGIN))

    def end(self, _value: Any) -> None:
        self.events.append((self.position, _END))

    def enter_captured(self, value: Any, *lists: Any) -> str:
        frame = self._push(value, lists)
        return self._written(frame) if frame >= 0 else ""

    def leave_captured(self, _value: Any) -> str:
        return self._written(_LEAVE) if self.stack.pop() != self.stack[-1] else ""

    def begin_captured(self, _value: Any) -> str:
        return self._written(_BEGIN)

    def end_captured(self, _value: Any) -> str:
        return self._written(_END)

    def _written(self, event: int) -> str:
        self.captured = True
        return f"{self.sentinel}{event}{chr(ord(self.sentinel) + 1)}"

    def _push(self, value: Any, lists: Sequence[Any]) -> int:
        """Open an iteration; return its new frame, or -1 where it stays with the message around it."""
        self.iterations += 1
        if self.iterations > MAX_ITERATIONS:
            raise OverflowError(f"more than {MAX_ITERATIONS} loop iterations for one conversation")
        message = self.places.get(id(value))
        if message is None:
            message = self._indexed(value, lists)
        around = self.stack[-1]
        if message is None or message == around:
            self.stack.append(around)
            return -1
        self.stack.append(message)
        self.frames.append(message)
        return len(self.frames) - 1

    def _indexed(self, value: Any, lists: Sequence[Any]) -> int | None:
        if type(value) is int:
            for candidate in lists:
                if type(candidate) is list and 0 <= value < len(candidate):
                    message = self.places.get(id(candidate[value]))
                    if message is not None:
                        return message
        elif type(value) is tuple:
            for item in value:
                if id(item) in self.places:
                    return self.places[id(item)]
        return None


class _Marker(NodeTransformer):
    """Puts the marks into a syntax tree, or with ``marks=False`` only unwraps generation blocks."""

    def __init__(self, environment: TemplateEnvironment, marks: bool) -> None:
        self.environment = environment
        self.marks = marks
        self.captured = False
        self.generations = 0
        self._leaves: list[nodes.Stmt] = []

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - Jinja's interface
        if not self.marks:
            return self.generic_visit(node)
        target = _loaded(node.target)
        if target is None:
            return self.generic_visit(node)
        around = self.captured
        node.else_ = [child for item in node.else_ for child in self._listed(item)]
        self.captured = around or node.recursive
        lists: list[nodes.Expr] = []
        if isinstance(target, nodes.Name):
            lists = [nodes.Name(name, "load") for name in _indexed_by(node, target.name)]
        enter = self._mark("enter", target, lists, node.lineno)
        leave = self._mark("leave", target, [], node.lineno)
        self._leaves.append(leave)
        body = [child for item in node.body for child in self._listed(item)]
        self._leaves.pop()
        node.body = [enter, *body, leave]
        self.captured = around
        return node

    def visit_Break(self, node: nodes.Node) -> Any:  # noqa: N802
        return [self._leaves[-1], node] if self.marks and self._leaves else node

    visit_Continue = visit_Break  # noqa: N815

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        function = node.call.node
        if not (isinstance(function, nodes.ExtensionAttribute) and function.name == GENERATION):
            return self._visit_captured(node)
        # A call block's body is a scope of its own; so is this, and it writes into the template's flow.
        self.generations += 1
        body = [child for item in node.body for child in self._listed(item)]
        if self.marks:
            anything = nodes.Name("messages", "load")
            begin = self._mark("begin", anything, [], node.lineno)
            body = [begin, *body, self._mark("end", anything, [], node.lineno)]
        return nodes.Scope(body).set_lineno(node.lineno).set_environment(self.environment)

    def _visit_captured(self, node: nodes.Node) -> nodes.Node:
        around, self.captured = self.captured, True
        leaves = self._leaves
        if isinstance(node, (nodes.Macro, nodes.CallBlock)):
            self._leaves = []  # a function of its own: no break crosses out of it
        self.generic_visit(node)
        self.captured, self._leaves = around, leaves
        return node

    visit_Macro = visit_FilterBlock = visit_AssignBlock = _visit_captured  # noqa: N815

    def _listed(self, node: nodes.Node) -> list[Any]:
        visited = self.visit(node)
        return visited if isinstance(visited, list) else [visited]

    def _mark(self, name: str, value: nodes.Expr, lists: list[nodes.Expr], line: int) -> nodes.Stmt:
        """A statement that calls the tracker: as a filter, which the sandbox calls without ceremony."""
        suffix = "_captured" if self.captured else ""
        call = nodes.Filter(value, f"trace {name}{suffix}", lists, [], None, None)
        statement: nodes.Stmt = nodes.Output([call]) if self.captured else nodes.ExprStmt(call)
        return statement.set_lineno(line).set_environment(self.environment)  # type: ignore[return-value]


def _loaded(target: nodes.Node) -> nodes.Expr | None:
    """An expression for the value of a loop's target."""
    if isinstance(target, nodes.Name):
        return nodes.Name(target.name, "load")
    if isinstance(target, nodes.Tuple):
        return nodes.Tuple([nodes.Name(name.name, "load") for name in target.find_all(nodes.Name)], "load")
    return None


def _indexed_by(loop: nodes.For, index: str) -> list[str]:
    """Names that a loop's body subscripts with its own variable: ``messages`` in ``messages[i]``.

    Names that the body itself assigns are left out, so that looking at them early changes no scoping.
    """
    stored = {name.name for name in loop.find_all(nodes.Name) if name.ctx != "load"}
    found: dict[str, None] = {}
    for item in loop.body:
        for subscript in (
            *item.find_all(nodes.Getitem),
            *([item] if isinstance(item, nodes.Getitem) else []),
        ):
            holder, argument = subscript.node, subscript.arg
            if isinstance(argument, nodes.Name) and argument.name == index and isinstance(holder, nodes.Name):
                if holder.name not in stored:
                    found[holder.name] = None
    return list(found)


class TracedTemplate:
    """A compiled template that tells which message wrote what.

    Args:
        source: the template's text.
        environment: its own environment; marks are registered there.
        name: what to call the template in errors.

    Raises:
        FormatError: the template does not compile.
    """

    def __init__(self, source: str, environment: TemplateEnvironment, name: str) -> None:
        self._environment, self._name, self._source = environment, name, source
        self._tracker = _Tracker()
        for mark in ("enter", "leave", "begin", "end"):
            for suffix in ("", "_captured"):
                environment.filters[f"trace {mark}{suffix}"] = getattr(self._tracker, mark + suffix)
        self._marked, self.has_generation = self._compile(marks=True)
        self._plain: Template | None = None

    def plain(self, variables: dict[str, Any]) -> str:
        """Render without marks."""
        if self._plain is None:
            self._plain, _ = self._compile(marks=False)
        return self._text(self._plain, variables)

    def render(self, messages: Sequence[object], variables: dict[str, Any]) -> Traced:
        """Render with marks.

        Args:
            messages: the conversation's messages, each a different object, as ``variables`` holds them.
            variables: all template variables.

        Raises:
            FormatError: marks inside captured text changed what the template does.
        """
        tracker = self._tracker
        tracker.reset(messages, _SENTINELS[0])
        text = self._text(self._marked, variables)
        events = tracker.events
        if tracker.captured:
            text, events = self._without_sentinels(messages, variables)
        segments, generated = _segments(events, tracker.frames, len(text), self._name)
        return Traced(text, segments, generated)

    def line_of(self, error: BaseException) -> str:
        """``"line N: "`` for an error that came out of the template, else nothing."""
        line = None
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self._name:
                line = self._marked.get_corresponding_lineno(trace.tb_lineno)
            trace = trace.tb_next
        return f"line {line}: " if line else ""

    def _text(self, template: Template, variables: dict[str, Any]) -> str:
        tracker = self._tracker
        position = 0
        chunks: list[str] = []
        for chunk in template.root_render_func(template.new_context(variables)):
            chunks.append(chunk)
            position += len(chunk)
            tracker.position = position
            if position > MAX_CHARACTERS:
                raise OverflowError(f"more than {MAX_CHARACTERS} characters for one conversation")
        return "".join(chunks)

    def _without_sentinels(
        self, messages: Sequence[object], variables: dict[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render with sentinels that this text does not hold; strip them, keeping where they were."""
        plain = self.plain(variables)
        sentinel = next((one for one in _SENTINELS if one not in plain), None)
        if sentinel is None:
            raise FormatError(
                f"{self._name}: the conversation holds every private character that tracing uses"
            )
        tracker = self._tracker
        tracker.reset(messages, sentinel)
        marked = self._text(self._marked, variables)
        found = list(re.finditer(f"{sentinel}(-?[0-9]+){chr(ord(sentinel) + 1)}", marked))
        # At one place, a mark in the template's flow came before the text that starts there.
        events = [(position, 0, event) for position, event in tracker.events]
        events += [(match.start(), 1, int(match[1])) for match in found]
        events.sort(key=lambda item: item[:2])
        starts = [match.start() for match in found]
        removed = [0, *accumulate(len(match[0]) for match in found)]
        text = marked
        if found:
            edges = [0, *(edge for match in found for edge in match.span()), len(marked)]
            text = "".join(marked[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True))
        if text != plain:
            raise FormatError(
                f"{self._name}: cannot tell which message wrote what, because the template inspects text that it "
                "captured from a loop over the messages; put {% generation %} markers around what the assistant "
                "says, or train on all tokens"
            )
        return text, [(at - removed[bisect_left(starts, at)], event) for at, _, event in events]

    def _compile(self, marks: bool) -> tuple[Template, bool]:
        environment = self._environment
        try:
            marker = _Marker(environment, marks)
            tree = marker.visit(environment.parse(self._source))
            code = environment.compile(tree, name=self._name, filename=self._name)
        except TemplateSyntaxError as error:
            raise FormatError(f"{self._name}: line {error.lineno}: {error.message}") from None
        except SyntaxError as error:
            raise FormatError(f"{self._name}: line {error.lineno}: {error.msg}") from None
        except RecursionError:
            raise FormatError(f"{self._name}: the chat template is nested too deeply") from None
        return Template.from_code(environment, code, environment.make_globals(None)), marker.generations > 0


def _segments(
    events: list[tuple[int, int]], frames: list[int], length: int, name: str
) -> tuple[list[Segment], list[tuple[int, int]]]:
    segments: list[Segment] = []
    generated: list[tuple[int, int]] = []
    stack: list[int] = []
    depth = begun = at = 0

    def write(stop: int) -> None:
        if stop > at and stack:
            last = segments[-1] if segments else None
            frame = stack[-1]
            if last is not None and last.stop == at and last.frame == frame:
                segments[-1] = Segment(last.start, stop, frame, last.message)
            else:
                segments.append(Segment(at, stop, frame, frames[frame]))

    for position, event in events:
        if event == _BEGIN:
            begun = position if depth == 0 else begun
            depth += 1
        elif event == _END:
            depth -= 1
            if depth == 0 and position > begun:
                generated.append((begun, position))
        else:
            write(position)
            at = position
            if event >= 0:
                stack.append(event)
            elif stack:
                stack.pop()
            else:
                raise FormatError(f"{name}: the template cut marked text apart; tracing cannot follow it")
    write(length)
    if stack or depth:
        raise FormatError(f"{name}: the template cut marked text apart; tracing cannot follow it")
    return segments, generated
