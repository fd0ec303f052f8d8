"""Find which message wrote which characters of a text, with marks in the template's syntax tree instead of comparisons.

Every iteration of every ``for`` loop is put between an *enter* and a *leave* mark. *Enter* gets the loop variable. If
this object is one of the conversation's messages, or an index that the loop body uses to select one, the iteration
belongs to that message: it opens a *frame*, and its output belongs to the message. An iteration over anything else
(tool calls, content parts) opens no frame, so its text belongs to the current frame. ``{% generation %}`` blocks get a
pair of marks, too.

Marks in the template's own flow are statements that write nothing. They record how many chunks of text the rendering
has yielded so far, so the text is that of a plain rendering. Inside macros, call, filter and ``set`` blocks and
recursive loops, text is captured before it is yielded, and that number is meaningless. Marks there write sentinels from
Unicode's private use area, which are stripped afterwards. A template may measure, trim or compare captured text, so the
stripped text must equal that of a second, plain rendering, character for character.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, count
from traceback import walk_tb
from typing import Any, NamedTuple

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.visitor import NodeTransformer

from megatron_sft_idx.chat.template.compiler import GENERATION, nests
from megatron_sft_idx.chat.template.environment import MARK, TemplateEnvironment
from megatron_sft_idx.chat.template.messages import utterances_of
from megatron_sft_idx.errors import FormatError

_LEAVE, _BEGIN, _END, _STOP = -1, -2, -3, -4  # events; an event of 0 or above opens the frame of that number
_SENTINELS = tuple(chr(base) for base in range(0xF0000, 0xF0040, 2))
_WRITERS = (nodes.Output, nodes.CallBlock, nodes.FilterBlock, nodes.Block, nodes.Include)


class Untraceable(Exception):  # noqa: N818 - a result, so that the caller can use another method
    """Tracing cannot determine which message wrote which text in this conversation; the message says why."""


class Segment(NamedTuple):
    """Characters ``[start, stop)`` that one message wrote in one frame, which is one iteration of a loop."""

    start: int
    stop: int
    frame: int
    message: int


@dataclass(frozen=True, slots=True)
class Traced:
    """A rendered text, and which message wrote which part.

    Attributes:
        text: exactly what the unmarked template renders.
        segments: the parts written by messages, in the order of the text, without overlap.
        generated: ``(start, stop)`` of the template's ``{% generation %}`` blocks, ascending, disjoint.
        frames: the message of each frame; frames are numbered from 0 in the order of opening.
        outer: for each frame opened inside another one, that other frame.
    """

    text: str
    segments: list[Segment]
    generated: list[tuple[int, int]]
    frames: list[int]
    outer: dict[int, int]


class _Tracker:
    """Records the marks that a template passes during rendering; only one rendering may run at a time.

    Marks run in every loop iteration. For speed, they are closures over the lists that they fill.
    """

    def __init__(self) -> None:
        self.chunks: list[str] = []
        self.events: list[tuple[int, int]] = []  # (number of chunks yielded before it, event)
        self.frames: list[int] = []  # the message of each frame
        self._stack = [-1]  # for each open iteration the message whose text it writes, -1 for none
        self._positions: dict[int, int] = {}  # position of a message, by its id()
        self.sentinel = ""
        self.captured = False

    def reset(self, messages: Iterable[object], sentinel: str) -> None:
        """Begin a rendering of these messages, whose marks write ``sentinel`` into captured text."""
        self.chunks.clear()
        self.events.clear()
        self.frames.clear()
        self._stack[:] = [-1]
        self._positions.clear()
        self._positions.update(zip(map(id, messages), count()))
        self.sentinel = sentinel
        self.captured = False

    def marks(self) -> dict[str, Callable[..., Any]]:
        """The filters that ``_Marker`` inserts into templates, by name."""
        chunks, events, frames, stack = self.chunks, self.events, self.frames, self._stack
        position = self._positions.get

        def push(value: Any, lists: Sequence[Any]) -> int:
            """Open an iteration. Return the number of the frame that it opens, or -1."""
            # The loop variable may be the message, its index in one of the lists, or one of several values.
            candidates = [value]
            if type(value) is int:
                candidates = [some[value] for some in lists if type(some) is list and 0 <= value < len(some)]
            elif type(value) is tuple:
                candidates = [value, *value]
            positions = (position(id(candidate)) for candidate in candidates)
            message = next((one for one in positions if one is not None), None)
            writing = stack[-1]
            if message is None or message == writing:
                stack.append(writing)
                return -1
            stack.append(message)
            frames.append(message)
            return len(frames) - 1

        def enter(value: Any, *lists: Any) -> None:
            message = position(id(value))
            if message is not None and message != stack[-1]:  # push(), inlined for plain loops over messages
                events.append((len(chunks), len(frames)))
                frames.append(message)
                stack.append(message)
            elif (frame := push(value, lists)) >= 0:
                events.append((len(chunks), frame))

        def leave(_value: Any) -> None:
            if stack.pop() != stack[-1]:
                events.append((len(chunks), _LEAVE))

        def enter_captured(value: Any, *lists: Any) -> str:
            frame = push(value, lists)
            return self._written(frame) if frame >= 0 else ""

        def leave_captured(_value: Any) -> str:
            return self._written(_LEAVE) if stack.pop() != stack[-1] else ""

        return {
            f"{MARK}enter": enter,
            f"{MARK}leave": leave,
            f"{MARK}begin": lambda _value: events.append((len(chunks), _BEGIN)),
            f"{MARK}end": lambda _value: events.append((len(chunks), _END)),
            f"{MARK}enter_captured": enter_captured,
            f"{MARK}leave_captured": leave_captured,
            f"{MARK}begin_captured": lambda _value: self._written(_BEGIN),
            f"{MARK}end_captured": lambda _value: self._written(_END),
        }

    def _written(self, event: int) -> str:
        """Return the sentinel of an event, to write into captured text."""
        self.captured = True
        return f"{self.sentinel}{event}{chr(ord(self.sentinel) + 1)}"


class _Marker(NodeTransformer):
    """Inserts marks into a syntax tree. With ``marks=False`` it only turns generation blocks into plain scopes."""

    def __init__(self, environment: TemplateEnvironment, marks: bool) -> None:
        self.environment = environment
        self.marks = marks
        self.captured = False
        self.generations = 0
        self._leaves: list[nodes.Stmt] = []

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - Jinja's interface
        """Put the body between marks."""
        if not self.marks:
            return self.generic_visit(node)
        target: nodes.Expr | None = None  # an expression for the value of the loop's target
        if isinstance(node.target, nodes.Name):
            target = nodes.Name(node.target.name, "load")
        elif isinstance(node.target, nodes.Tuple):
            target = nodes.Tuple([nodes.Name(name.name, "load") for name in node.target.find_all(nodes.Name)], "load")
        writes = any(isinstance(item, _WRITERS) or any(item.find_all(_WRITERS)) for item in node.body)
        # A break in the ``else`` of a loop belongs to the outer loop.
        else_body, node.else_ = [child for item in node.else_ for child in self._listed(item)], []
        if target is None or not writes:
            leaves, self._leaves = self._leaves, []  # a break in this loop leaves no other one
            self.generic_visit(node)
            self._leaves, node.else_ = leaves, else_body
            return node
        outer_captured, node.else_ = self.captured, else_body
        self.captured = outer_captured or node.recursive
        lists: list[nodes.Expr] = []
        if isinstance(target, nodes.Name):
            lists = [nodes.Name(name, "load") for name in _indexed_by(node, target.name)]
        enter = self._mark("enter", target, lists, node.lineno)
        leave = self._mark("leave", target, [], node.lineno)
        self._leaves.append(leave)
        body = [child for item in node.body for child in self._listed(item)]
        self._leaves.pop()
        node.body = [enter, *body, leave]
        self.captured = outer_captured
        return node

    def visit_Break(self, node: nodes.Node) -> Any:  # noqa: N802
        """Put the leave mark of the loop before a ``break`` or ``continue``."""
        return [self._leaves[-1], node] if self.marks and self._leaves else node

    visit_Continue = visit_Break  # noqa: N815

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        """Turn a generation block into a plain scope between marks."""
        function = node.call.node
        if not (isinstance(function, nodes.ExtensionAttribute) and function.name == GENERATION):
            return self._visit_captured(node)
        # The body of a call block is a separate scope. So is this one, but it writes into the template's flow.
        self.generations += 1
        body = [child for item in node.body for child in self._listed(item)]
        if self.marks:
            anything = nodes.Name("messages", "load")
            begin = self._mark("begin", anything, [], node.lineno)
            body = [begin, *body, self._mark("end", anything, [], node.lineno)]
        return nodes.Scope(body).set_lineno(node.lineno).set_environment(self.environment)

    def _visit_captured(self, node: nodes.Node) -> nodes.Node:
        """Mark the content of a node whose text is captured, with marks that write sentinels."""
        outer_captured, self.captured = self.captured, True
        leaves = self._leaves
        if isinstance(node, (nodes.Macro, nodes.CallBlock)):
            self._leaves = []  # a separate function: no break leaves it
        self.generic_visit(node)
        self.captured, self._leaves = outer_captured, leaves
        return node

    visit_Macro = visit_FilterBlock = visit_AssignBlock = _visit_captured  # noqa: N815

    def _listed(self, node: nodes.Node) -> list[Any]:
        visited = self.visit(node)
        return visited if isinstance(visited, list) else [visited]

    def _mark(self, name: str, value: nodes.Expr, lists: list[nodes.Expr], line: int) -> nodes.Stmt:
        """Return a statement that calls the tracker through a filter, which the sandbox calls without a check."""
        call = nodes.Filter(value, f"{MARK}{name}{'_captured' if self.captured else ''}", lists, [], None, None)
        statement: nodes.Stmt = nodes.Output([call]) if self.captured else nodes.ExprStmt(call)
        return statement.set_lineno(line).set_environment(self.environment)  # type: ignore[return-value]


def _indexed_by(loop: nodes.For, index: str) -> list[str]:
    """Return the names that a loop's body indexes with the loop variable: ``messages`` in ``messages[i]``.

    Names that the body itself assigns are excluded: if a mark read them first, their scope would change.
    """
    stored = {name.name for name in loop.find_all(nodes.Name) if name.ctx != "load"}
    names: dict[str, None] = {}
    for item in loop.body:
        for subscript in item.find_all(nodes.Getitem):
            holder, argument = subscript.node, subscript.arg
            by_index = isinstance(argument, nodes.Name) and argument.name == index
            if by_index and isinstance(holder, nodes.Name) and holder.name not in stored:
                names[holder.name] = None
    return list(names)


class TracedTemplate:
    """A compiled template that records which message wrote which text.

    Args:
        source: the template's text.
        environment: environment in which marks are registered as filters; no other template may share it.
        name: name of the template in errors.

    Raises:
        FormatError: the template does not compile.
    """

    def __init__(self, source: str, environment: TemplateEnvironment, name: str) -> None:
        self._environment, self._name, self._source = environment, name, source
        self._tracker = _Tracker()
        self._compiled: dict[str, Template] = {}  # by the file name in tracebacks
        environment.filters.update(self._tracker.marks())
        self._marked, self.has_generation = self._compile(marks=True)

    @cached_property
    def _plain(self) -> Template:
        return self._compile(marks=False)[0]

    def plain(self, variables: dict[str, Any]) -> str:
        """Render without marks."""
        template = self._plain
        self._tracker.reset((), "")
        return self._text(template, variables)

    def render(self, messages: Sequence[object], variables: dict[str, Any]) -> Traced:
        """Render with marks.

        Args:
            messages: the conversation's messages, each a different object, as in ``variables``.
            variables: all template variables.

        Raises:
            Untraceable: marks inside captured text changed the behaviour of the template.
        """
        tracker = self._tracker
        tracker.reset(messages, _SENTINELS[0])
        text = self._text(self._marked, variables)
        events = self._events()
        if tracker.captured:
            text, events = self._without_sentinels(messages, variables)
        return _traced(text, events, tracker.frames.copy())

    def line_of(self, error: BaseException) -> str:
        """Return ``"line N: "`` for an error raised by a rendering of the template, else ""."""
        calls = [(frame.f_code.co_filename, at) for frame, at in walk_tb(error.__traceback__)]
        lines = [self._compiled[file].get_corresponding_lineno(at) for file, at in calls if file in self._compiled]
        return f"line {lines[-1]}: " if lines else ""

    def _text(self, template: Template, variables: dict[str, Any]) -> str:
        chunks = self._tracker.chunks
        append = chunks.append
        environment = self._environment
        environment.allowance.start(variables)
        context = environment.context_class(environment, {**template.globals, **variables}, self._name, template.blocks)
        for chunk in template.root_render_func(context):
            append(chunk)  # one at a time, because marks record how many there are so far
        return environment.allowance.joined(chunks)

    def _events(self) -> list[tuple[int, int]]:
        """Return the events of marks in the template's flow, each with its position in the text."""
        tracker = self._tracker
        ends = [0, *accumulate(map(len, tracker.chunks))]
        return [(ends[chunk], event) for chunk, event in tracker.events]

    def _without_sentinels(
        self, messages: Sequence[object], variables: dict[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render with sentinels that do not occur in the text, and strip them.

        Returns:
            The text, and the events of all marks, each with its position in that text.
        """
        plain = self.plain(variables)
        sentinel = next((one for one in _SENTINELS if one not in plain), None)
        if sentinel is None:
            raise Untraceable("the conversation contains all private-use characters that tracing needs")
        tracker = self._tracker
        tracker.reset(messages, sentinel)
        marked = self._text(self._marked, variables)
        found = list(re.finditer(f"{sentinel}(-?[0-9]+){chr(ord(sentinel) + 1)}", marked))
        # If two marks have the same position, the mark in the template's flow came first, before the captured text.
        events = [(position, 0, event) for position, event in self._events()]
        events += [(match.start(), 1, int(match[1])) for match in found]
        events.sort(key=lambda item: item[:2])
        starts = [match.start() for match in found]
        removed = [0, *accumulate(len(match[0]) for match in found)]
        text = marked
        if found:
            edges = [0, *(edge for match in found for edge in match.span()), len(marked)]
            text = "".join(marked[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True))
        if text != plain:
            raise Untraceable("the template inspects text that it captured from a loop over the messages")
        return text, [(at - removed[bisect_left(starts, at)], event) for at, _, event in events]

    def _compile(self, marks: bool) -> tuple[Template, bool]:
        environment, file = self._environment, f"{self._name}{'' if marks else ', without marks'}"
        try:
            marker = _Marker(environment, marks)
            tree = environment.parse(self._source)
            environment.allowance.compile(nests(tree))
            tree = marker.visit(tree)
            code = environment.compile(tree, name=self._name, filename=file)
        except (TemplateSyntaxError, SyntaxError) as error:
            said = error.msg if isinstance(error, SyntaxError) else error.message
            raise FormatError(f"{self._name}: line {error.lineno}: {said}") from None
        except RecursionError:
            raise FormatError(f"{self._name}: the chat template is nested too deeply") from None
        self._compiled[file] = template = Template.from_code(environment, code, dict(environment.globals))
        return template, marker.generations > 0


def _traced(text: str, events: list[tuple[int, int]], frames: list[int]) -> Traced:
    """Return the segments defined by marks: text between two marks belongs to the innermost open frame."""
    segments: list[Segment] = []
    generated: list[tuple[int, int]] = []
    outer: dict[int, int] = {}
    stack: list[int] = []
    depth = begun = at = 0
    for position, event in chain(events, [(len(text), _STOP)]):
        if event == _BEGIN:
            begun = position if depth == 0 else begun
            depth += 1
            continue
        if event == _END:
            depth -= 1
            if depth == 0 and position > begun:
                generated.append((begun, position))
            continue
        if stack and position > at:
            frame = stack[-1]
            if segments and segments[-1].stop == at and segments[-1].frame == frame:
                at = segments.pop().start  # the frames opened in between wrote nothing
            segments.append(Segment(at, position, frame, frames[frame]))
        at = position
        if event >= 0:
            if stack:
                outer[event] = stack[-1]
            stack.append(event)
        elif event == _LEAVE and stack:
            stack.pop()
        elif event == _LEAVE or stack or depth:
            raise Untraceable("the template splits marked text")
    return Traced(text, segments, generated, frames, outer)


def own_segments(traced: Traced, messages: Sequence[Mapping[str, Any]]) -> list[Segment]:
    """Return the segments of messages, where text from a mere *glance* at a message does not count as that message's.

    While a template writes one message, it may loop over the others only to look something up, such as the name of a
    call. That inner loop may also write another message in full, such as a tool result. A frame inside a frame is a
    glance unless it is its message's writer (``_writers``). Text written during a glance at an answer belongs to the
    message of the outer frame. Text written during a glance at any other message belongs to no message.
    """
    if not traced.outer or not any(segment.frame in traced.outer for segment in traced.segments):
        return traced.segments
    writers = _writers(traced, messages)
    result: list[Segment] = []
    for segment in traced.segments:
        start, owner, message = segment.start, segment.frame, segment.message
        while owner in traced.outer and writers.get(message) != owner:
            outer = traced.outer[owner]
            owner = outer if messages[message].get("role") == "assistant" else -1
            message = traced.frames[outer]
        if owner < 0:
            continue
        if result and result[-1].stop == start and result[-1].frame == owner:
            start = result.pop().start
        result.append(Segment(start, segment.stop, owner, message))
    return result


def _writers(traced: Traced, messages: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return the one frame that writes each message, by the message's position.

    A message may have several frames. Its writer is one that is not inside another message's frame, if there is one;
    among those, the one that has most of the message's utterances; among equals, the first one opened. A message
    without an utterance in any frame has no writer.
    """
    written: dict[int, str] = {}
    for segment in traced.segments:
        written[segment.frame] = written.get(segment.frame, "") + traced.text[segment.start : segment.stop]
    best: dict[int, tuple[bool, int, int]] = {}
    for frame, text in sorted(written.items()):  # in the order in which they opened
        message = traced.frames[frame]
        claim = (frame not in traced.outer, sum(piece.text in text for piece in utterances_of(messages[message])))
        if text.strip() and (message not in best or claim > best[message][:2]):
            best[message] = (*claim, frame)
    return {message: frame for message, (_, held, frame) in best.items() if held}
