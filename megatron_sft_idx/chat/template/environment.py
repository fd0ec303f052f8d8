"""The sandbox that chat templates run in.

Templates come from model hubs and are untrusted code. They run in Jinja's immutable sandbox, set up as
transformers sets it up (``trim_blocks``, ``lstrip_blocks``, loop controls, ``raise_exception``,
``strftime_now``, a ``tojson`` that does not escape HTML), so that the same template gives the same text. What
differs is deliberate: nothing random, no clock, an allowance for what a rendering may do and write (``allowance``),
and short cuts for the attribute look-ups and calls that chat templates make thousands of times on plain dicts, strings
and lists.

Jinja writes a template as Python. What ``CountingGenerator`` writes differently is what can grow or go on: joining,
adding, slicing, comparing and searching go through the allowance; every loop pays for its iterations by the size of its
body, and every macro and block for its own when it is entered. Where a value is exactly a dict or a list and the answer
certain, the code takes it at once, as the sandbox would; all else still goes there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Cycler, Namespace
from markupsafe import Markup

from megatron_sft_idx.chat.template.allowance import ITEM, POINTER, Allowance, Overspent, numbers_in, text_bytes
from megatron_sft_idx.chat.template.prices import METHOD_FACTORS, SHORT_ARGUMENT, call_method, counted_filters
from megatron_sft_idx.errors import FormatError

GENERATION = "_generation"
"""The method name by which ``{% generation %}`` blocks are known in a syntax tree."""

MARK = "trace "
"""What the names of the filters begin with by which tracing marks a template."""

MAX_REPEATED = 1 << 24
"""The longest string or list that ``*`` may make, in items."""

MAX_MESSAGE = 2000
"""The longest message of ``raise_exception``, in characters."""

_MISSING = object()
_PLAIN = frozenset({str, int, bool, float, list, dict, type(None)})
_VIEWS = frozenset({"items", "keys", "values"})
_COMPARING = frozenset(
    ["==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">=", "<", "lt", "lessthan", "<=", "le"]
)
_OF_ALLOWANCE = (
    "added", "concatenated", "contains", "cut", "iterated", "key", "soft_text", "spend", "subtracted", "text",
    "weighed",
)  # fmt: skip

_NODE = 24
"""Units of a node of the syntax tree, each time that the body around it is gone through."""

_ENTERS = 2048
"""Further units of a macro, a block or a recursive loop, each time that it is entered."""

_LOOP_ATTRIBUTES = frozenset({"index", "index0", "first", "last", "length", "previtem", "nextitem"})
_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_NUMBERS = frozenset({"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"})
_NESTING_FILTERS = frozenset({"batch", "slice", "groupby", "dictsort", "map", "sum"})
_NESTING_NAMES = frozenset({"dict", "varargs", "kwargs", "cycler"})
_COMPARED = {"eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<=", "in": "in", "notin": "not in"}


class RaisedByTemplate(TemplateError):  # noqa: N818 - not an error of ours: the template's own words
    """What a template says through ``raise_exception``."""


class _Generation(Extension):
    """Parses ``{% generation %}`` into a call block, which ``trace`` turns into marks."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method(GENERATION), [], [], body).set_lineno(line)


class _TemplateNamespace(Namespace):
    """A namespace without underscore names, which could reach Python's internals.

    Its names are plain attributes, unlike its parent's, because templates read them in every loop.
    """

    __getattribute__ = object.__getattribute__

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # leaves the name `self` to templates
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name[:1] == "_":
            raise SecurityError(f"templates cannot store underscore names such as {name!r} on a namespace")
        self.__dict__[name] = value

    def __repr__(self) -> str:
        return f"<Namespace {self.__dict__!r}>"


class _TemplateDict:
    """``dict(...)`` for templates: makes dicts, and is not the class."""

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        if args and not isinstance(args[0], Mapping):
            pairs = self._allowance.listed(args[0])
            args = ([(self._allowance.key(key), value) for key, value in pairs], *args[1:])
        for some in (*args, kwargs):
            self._allowance.spend(4 * POINTER * len(some))
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(map(self._allowance.key, self._allowance.listed(keys)), value)


class CountingGenerator(CodeGenerator):
    """The generator for an environment that has the methods of ``Allowance``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prices: dict[int, int] = {}  # by the identity of what a loop goes through, or of a body that is entered

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Write a node; what a loop goes through with its price."""
        price = self._prices.pop(id(node), None)
        if price is None:
            return super().visit(node, *args, **kwargs)
        self.write("environment.iterated(")
        super().visit(node, *args, **kwargs)
        return self.write(f", {price})")

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        """Write statements, those of a body that pays when it is entered with their price."""
        price = self._prices.get(id(nodes))
        if price is not None:
            self.writeline(f"environment.spend({price})")
        super().blockvisit(nodes, frame)

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802 - Jinja's names
        """Find out first where a dict's missing item may be None as well as undefined."""
        self._asked = set(_asked(node))
        for block in node.find_all(nodes.Block):
            self._prices[id(block.body)] = _ENTERS + _price(block.body)
        super().visit_Template(node, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        """Write a loop, which pays for each iteration; a recursive one is entered anew from within."""
        price = _price([*node.body, *([node.test] if node.test else [])])
        self._prices[id(node.body if node.recursive else node.iter)] = price + (_ENTERS if node.recursive else 0)
        super().visit_For(node, frame)

    def macro_body(self, node: nodes.Macro | nodes.CallBlock, frame: Frame) -> tuple[Frame, Any]:
        """Write the body of a macro or of a call block."""
        self._prices[id(node.body)] = _ENTERS + _price([*node.body, *node.defaults])
        return super().macro_body(node, frame)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_pre(node, frame, finalize)
        else:
            self.write("(written if type(written := ")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_post(node, frame, finalize)
        else:
            self.write(") is str else environment.text(written))")

    def _put(self, frame: Frame, *parts: str | nodes.Node) -> None:
        """Write code, and expressions in between."""
        for part in parts:
            if isinstance(part, str):
                self.write(part)
            else:
                self.visit(part, frame)

    def _called(self, function: str, arguments: Sequence[nodes.Expr], frame: Frame) -> None:
        self._put(frame, f"environment.{function}(", *(part for one in arguments for part in (one, ", ")), ")")

    @optimizeconst
    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """Write ``a + b + c``."""
        parts: list[nodes.Expr] = [node.right]
        first = node.left
        while isinstance(first, nodes.Add):
            parts.append(first.right)
            first = first.left
        if len(parts) == 1 and (_is_number(first) or _is_number(node.right)):
            self._put(frame, "(", first, " + ", node.right, ")")
        else:
            self._called("added", [first, *reversed(parts)], frame)

    @optimizeconst
    def visit_Sub(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """Write ``a - b``."""
        if _is_number(node.left) or _is_number(node.right):
            self._put(frame, "(", node.left, " - ", node.right, ")")
        else:
            self._called("subtracted", [node.left, node.right], frame)

    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        """Write ``a ~ b``."""
        if not (frame.eval_ctx.volatile or frame.eval_ctx.autoescape):
            self._called("concatenated", node.nodes, frame)
            return
        self.write("(markup_join if context.eval_ctx.autoescape else str_join)((")
        for part in node.nodes:
            self._called("soft_text", [part], frame)
            self.write(", ")
        self.write("))")

    @optimizeconst
    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        """Write a comparison: as it is where one side is small, else paid for."""
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        operators = [operand.op for operand in node.ops]
        if operators in (["in"], ["notin"]) and not _is_listed(operands[1]):
            self.write("(not " if operators == ["notin"] else "(")
            self._called("contains", operands, frame)
            self.write(")")
            return
        free = len(operands) == 2 and (any(map(_is_small, operands)) or _is_listed(operands[1]))
        self.write("(")
        for operator, operand in zip(["", *operators], operands, strict=True):
            self.write(f" {_COMPARED[operator]} " if operator else "")
            if free:
                self.visit(operand, frame)
            else:
                self._called("weighed", [operand], frame)
        self.write(")")

    @optimizeconst
    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:  # noqa: N802
        """Take a dict's item, or what a loop says of itself."""
        name, attribute = self.temporary_identifier(), node.attr
        if isinstance(node.node, nodes.Name) and node.node.name == "loop" and attribute in _LOOP_ATTRIBUTES:
            taken, known = f"{name}.{attribute}", "LoopContext"
        elif attribute in _DICT_ATTRIBUTES:
            super().visit_Getattr(node, frame)
            return
        elif node in self._asked:
            taken, known = f"{name}.get({attribute!r})", "dict"
        else:
            taken, known = f"{name}[{attribute!r}]", f"dict and {attribute!r} in {name}"
        other = f" else environment.getattr({name}, {attribute!r}))"
        self._put(frame, f"({taken} if type({name} := ", node.node, f") is {known}{other}")

    @optimizeconst
    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        """Write ``a[b:c]``, paid for; take a dict's item by its name, or a list's by its number."""
        if isinstance(node.arg, nodes.Slice):
            self._put(frame, "environment.cut(", node.node, "[", node.arg, "])")
            return
        name, key = self.temporary_identifier(), self.temporary_identifier()
        if isinstance(node.arg, nodes.Const) and type(node.arg.value) is str:
            key = repr(node.arg.value)
            self._put(frame, f"({name}[{key}] if type({name} := ", node.node, f") is dict and {key} in {name}")
        else:
            inside = f") is int) and -len({name}) <= {key} < len({name})"
            taken = f"({name}[{key}] if (type({name} := "
            self._put(frame, taken, node.node, f") is list) & (type({key} := ", node.arg, inside)
        self.write(f" else environment.getitem({name}, {key}))")

    @optimizeconst
    def visit_Test(self, node: nodes.Test, frame: Frame) -> None:  # noqa: N802
        """Ask whether a value is a string, without a call."""
        if node.name == "string":
            self._put(frame, "isinstance(", node.node, ", str)")
        else:
            super().visit_Test(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        """Write a dict, whose keys are hashed."""
        self.write("{")
        for item in node.items:
            if isinstance(item.key, nodes.Const):
                self.visit(item.key, frame)
            else:
                self._called("key", [item.key], frame)
            self._put(frame, ": ", item.value, ", ")
        self.write("}")

    @optimizeconst
    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:  # noqa: N802
        """Write a call; that of a method without a look-up of its own."""
        if forward_caller or not isinstance(node.node, nodes.Getattr):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        scopes = f"{'_loop_vars' if frame.loop_frame else None}, {'_block_vars' if frame.block_frame else None}"
        self._put(frame, "environment.call_method(context, ", node.node.node, f", {node.node.attr!r}, {scopes}")
        self.signature(node, frame)
        self.write(")")


def _is_number(node: nodes.Node) -> bool:
    """Whether it is a number that is not large, whatever the data are."""
    if isinstance(node, nodes.Getattr):
        return isinstance(node.node, nodes.Name) and node.node.name == "loop" and node.attr in _LOOP_NUMBERS
    if isinstance(node, nodes.Filter):
        return node.name in ("length", "count")
    if isinstance(node, nodes.Sub):
        return _is_number(node.left) and _is_number(node.right)
    return isinstance(node, nodes.Const) and type(node.value) in (int, float)


def _is_listed(node: nodes.Node) -> bool:
    """Whether these are constants in a list, which is short."""
    return isinstance(node, (nodes.List, nodes.Tuple)) and all(isinstance(item, nodes.Const) for item in node.items)


def _is_small(node: nodes.Node) -> bool:
    """Whether comparing with it is one step, whatever it is compared with."""
    return isinstance(node, nodes.Const) or _is_number(node)


def nests(tree: nodes.Template) -> bool:
    """Whether a template may put lists or dicts into others: by a literal, a filter, or the arguments of a macro."""
    for node in tree.find_all((nodes.List, nodes.Tuple, nodes.Dict, nodes.Filter, nodes.Name, nodes.Call)):
        if isinstance(node, nodes.Filter):
            found = node.name in _NESTING_FILTERS
        elif isinstance(node, nodes.Name):
            found = node.name in _NESTING_NAMES
        elif isinstance(node, nodes.Dict):
            found = not all(isinstance(item.value, nodes.Const) for item in node.items)
        elif isinstance(node, nodes.Call):
            found = isinstance(node.node, nodes.Getattr) and node.node.attr == "fromkeys"
        else:
            assert isinstance(node, (nodes.List, nodes.Tuple))
            found = not _is_listed(node) and getattr(node, "ctx", "load") == "load"
        if found:
            return True
    return False


def _price(body: Sequence[nodes.Node]) -> int:
    """What it takes to go through statements once, and through what is in them."""
    return ITEM + _NODE * sum(1 + sum(1 for _ in node.find_all(nodes.Node)) for node in body)


def _asked(template: nodes.Template) -> Iterator[nodes.Node]:
    """Expressions of which only that counts whether they are true, a string, or the same as a constant string."""
    for node in template.find_all((nodes.If, nodes.CondExpr, nodes.Not, nodes.Or, nodes.Test, nodes.Compare)):
        if isinstance(node, (nodes.If, nodes.CondExpr)):
            yield from _tested(node.test)
        elif isinstance(node, nodes.Not):
            yield from _tested(node.node)
        elif isinstance(node, nodes.Or):
            yield from _tested(node.left)
        elif isinstance(node, nodes.Test) and node.name == "string":
            yield node.node
        elif isinstance(node, nodes.Compare) and all(
            operand.op in ("eq", "ne") and isinstance(operand.expr, nodes.Const) and isinstance(operand.expr.value, str)
            for operand in node.ops
        ):
            yield node.expr


def _tested(node: nodes.Node) -> Iterator[nodes.Node]:
    """The expressions that decide whether one is true, and of which nothing else counts then."""
    if isinstance(node, (nodes.And, nodes.Or)):
        yield from _tested(node.left)
        yield from _tested(node.right)
    else:
        yield node


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with the names and filters that chat templates expect.

    The overridden look-ups answer the common cases (exact dicts, strings, lists, ``loop`` and namespaces) as
    the sandbox would, and leave everything else to it. What compiled templates do is taken off ``allowance``; its
    methods are the environment's too, because compiled templates have the environment at hand.
    """

    code_generator_class = CountingGenerator
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, template_date: str | None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.allowance = allowance = Allowance()
        self.concat = allowance.joined  # type: ignore[method-assign]
        self.finalize: Callable[..., Any] = allowance.soft_text
        for name in _OF_ALLOWANCE:
            setattr(self, name, getattr(allowance, name))
        self.filters = counted_filters(allowance, self.filters)
        tests: dict[str, Any] = {**self.tests}
        for name in _COMPARING:
            self.tests[name] = _counted_test(tests[name], allowance.weighed)
        for name in ("lower", "upper"):
            self.tests[name] = _counted_test(tests[name], allowance.soft_text)
        self.tests["in"] = allowance.contains
        self.globals.pop("lipsum", None)
        self.globals["raise_exception"] = self._raise_exception
        self.globals["strftime_now"] = _clock(template_date, allowance)
        self.globals["dict"] = _TemplateDict(allowance)
        self.globals["namespace"] = _TemplateNamespace
        self._methods = {
            kind: frozenset(
                name
                for name in dir(kind)
                if name not in ("format", "format_map")
                and super(TemplateEnvironment, self).is_safe_attribute(kind(), name, None)
            )
            for kind in (str, list, dict)
        }

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Answer ``obj.attribute`` as the sandbox does."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            value = obj.get(attribute, _MISSING)
            return value if value is not _MISSING else self.undefined(obj=obj, name=attribute)
        if kind is LoopContext:
            if attribute in _LOOP_ATTRIBUTES:
                return getattr(obj, attribute)
        elif kind is _TemplateNamespace:
            value = obj.__dict__.get(attribute, _MISSING)
            if type(value) in _PLAIN:
                return value
        elif attribute in self._methods.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a filter that a template names in a string, as in ``map("trim")``.

        Raises:
            TemplateRuntimeError: there is no such filter; the marks of tracing are none that a template may call.
        """
        if isinstance(name, str) and name.startswith(MARK):
            raise TemplateRuntimeError(f"No filter named {name!r}.")
        return super().call_filter(name, *args, **kwargs)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Answer ``obj[argument]`` as the sandbox does."""
        if type(obj) is dict and type(argument) is str:
            value = obj.get(argument, _MISSING)
            if value is not _MISSING:
                return value
            if argument not in _DICT_ATTRIBUTES:
                return self.undefined(obj=obj, name=argument)
        elif type(obj) is list and type(argument) is int and -len(obj) <= argument < len(obj):
            return obj[argument]
        return super().getitem(obj, self.allowance.key(argument))

    def call(
        __self,  # noqa: N805 - templates may pass any keyword
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call from a template: methods of plain values as their prices allow, the rest through the sandbox.

        Methods that change their object never get here: the sandbox refuses to hand them out.
        """
        plain = type(__obj) is BuiltinMethodType or (type(__obj) is MethodType and type(__obj.__self__) is Markup)
        if plain or __obj is _TemplateNamespace:
            kwargs.pop("_loop_vars", None)  # compiled loops and blocks pass their scopes along, meant for the context
            kwargs.pop("_block_vars", None)
            if plain:
                return call_method(__self.allowance, __obj.__self__, __obj.__name__, args, kwargs)
            return _TemplateNamespace(*args, **kwargs)
        if args and type(__obj) is MethodType and type(__obj.__self__) in (LoopContext, Cycler):
            __self.allowance.weigh(args)
        return super().call(__context, __obj, *args, **kwargs)

    def call_method(
        self,
        context: Context,
        value: Any,
        name: str,
        loop_vars: dict[str, Any] | None,
        block_vars: dict[str, Any] | None,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call ``value.name(...)``; compiled loops and blocks pass their scopes along."""
        kind = type(value)
        if kind is dict:
            if name == "get" and args and type(args[0]) is str and not kwargs:
                return value.get(*args)
            if name in _VIEWS and not args and not kwargs:
                return getattr(value, name)()
        elif (
            kind is str
            and name in METHOD_FACTORS
            and (not args or (type(args[0]) is str and len(args[0]) < SHORT_ARGUMENT))
        ):  # `call_method` for most calls: what it takes off beside this are long arguments
            allowance = self.allowance
            allowance.left -= METHOD_FACTORS[name] * (len(value) if value.isascii() else 4 * len(value))
            if allowance.left < 0:
                allowance.overspent()
            return getattr(value, name)(*args, **kwargs)
        if loop_vars is not None:
            kwargs["_loop_vars"] = loop_vars
        if block_vars is not None:
            kwargs["_block_vars"] = block_vars
        return self.call(context, self.getattr(value, name), *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute ``left * right``, ``left ** right`` and ``left % right``, refusing what would not fit in memory."""
        allowance = self.allowance
        if operator == "**":
            if not all(type(side) in (int, float) and abs(side) <= 4096 for side in (left, right)):
                shown = [repr(side) if type(side) in (int, float) else type(side).__name__ for side in (left, right)]
                raise Overspent(f"{_cut(' ** '.join(shown))} is too large for a chat template")
        elif operator == "%":
            if isinstance(left, str):
                allowance.filled(left, right if isinstance(right, tuple) else (right,))
        else:
            for one, other in ((left, right), (right, left)):
                if isinstance(one, (str, list, tuple)) and isinstance(other, int):
                    if len(one) * other > MAX_REPEATED:
                        raise Overspent(f"repeating something {other} times is too much for a chat template")
                    each = text_bytes(one) if isinstance(one, str) else POINTER * len(one)
                    allowance.spend(each * max(0, other))
                    allowance.nests = True
            if isinstance(left, int) and isinstance(right, int):
                allowance.spend(left.bit_length() + right.bit_length() >> 3)
        return allowance.number(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` as the sandbox has it, each field paid for and refused if it has no text of its own."""
        if super().wrap_str_format(value) is None:
            return None
        text, by_map = value.__self__, value.__name__ == "format_map"
        formatter = _EscapeFormatter(self, escape=text.escape) if isinstance(text, Markup) else _MeteredFormatter(self)

        def formatted(*args: Any, **kwargs: Any) -> str:
            if by_map and (kwargs or len(args) != 1):
                raise TypeError("format_map() takes exactly one argument, a mapping")
            self.allowance.spend(text_bytes(text))
            written = formatter.vformat(text, () if by_map else args, args[0] if by_map else kwargs)
            return type(text)(written)  # type: ignore[no-any-return]

        return formatted

    def _raise_exception(self, message: Any) -> None:
        raise RaisedByTemplate(_cut(self.allowance.text(message)))

    def __reduce__(self) -> Any:
        raise TypeError("a template's environment stays in its process; pickle the ChatTemplate")


class _MeteredFormatter(SandboxedFormatter):
    """Formats fields as the sandbox does, each of them paid for."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        """Format one field."""
        allowance: Allowance = self._env.allowance  # type: ignore[attr-defined]
        allowance.weigh(value, 12, written=True)
        allowance.spend(4 * numbers_in(format_spec))
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """Apply ``!r``, ``!s`` and ``!a``."""
        if conversion:
            self._env.allowance.weigh(value, 12, written=True)  # type: ignore[attr-defined]
        return super().convert_field(value, conversion)


class _EscapeFormatter(_MeteredFormatter, SandboxedEscapeFormatter):
    """The same for Markup."""


def _counted_test(test: Callable[..., Any], pay: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *values: test(*map(pay, values))


def _cut(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."


def _clock(template_date: str | None, allowance: Allowance) -> Callable[[str], str]:
    day: datetime | None = None
    if template_date is not None:
        try:
            day = datetime.strptime(template_date, "%Y-%m-%d")
        except ValueError:
            raise FormatError(f"--template-date: {template_date!r} is not a date like 2025-01-31") from None

    def strftime_now(style: str) -> str:
        if day is None:
            raise FormatError(
                "the chat template asks for today's date, so its text would change from day to day; "
                "give the date it should see with --template-date YYYY-MM-DD"
            )
        if re.search(r"%[^a-zA-Z%]*[0-9]", style):  # as the C library pads fields, on some machines
            raise Overspent("a date with the width of a field is too much for a chat template")
        allowance.spend(256 * len(style))
        return day.strftime(style)

    return strftime_now
