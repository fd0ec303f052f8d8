"""The sandbox that chat templates run in, and the Python code that they are compiled to.

Templates come from model hubs and are untrusted code. They run in Jinja's immutable sandbox, set up as transformers
sets it up (``trim_blocks``, ``lstrip_blocks``, loop controls, ``raise_exception``, ``strftime_now``, a ``tojson`` that
does not escape HTML), so that the same template gives the same text. Three differences are deliberate. A template gets
nothing random and no clock. An allowance limits what one rendering may do and write (``allowance``). Look-ups and calls
that chat templates make thousands of times on plain dicts, strings and lists take short cuts.

Jinja compiles a template to Python. ``CountingGenerator`` writes that code: an operation that can make a large value or
take long (joining, adding, slicing, comparing, searching) becomes a call of a method that pays for it from the
allowance; a loop pays for every iteration by the size of its body, a macro or block whenever it is entered.
``TemplateEnvironment`` is the sandbox in which the code runs. A short cut may be taken only where the value is exactly
a dict, list or string and the sandbox would give the same answer.
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
from jinja2.idtracking import VAR_LOAD_PARAMETER
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Cycler, Namespace
from markupsafe import Markup

from megatron_sft_idx.chat.template.allowance import ITEM, POINTER, Allowance, Overspent, numbers_in, text_bytes
from megatron_sft_idx.chat.template.prices import METHOD_FACTORS, SHORT_ARGUMENT, call_method, counted_filters
from megatron_sft_idx.errors import FormatError

GENERATION = "_generation"
"""The method name that marks a ``{% generation %}`` block in a syntax tree."""

MARK = "trace "
"""The names of filters that tracing puts into a syntax tree begin with this. No template may call them."""

MAX_REPEATED = 1 << 24
"""The longest string or list that ``*`` may make, in items."""

MAX_MESSAGE = 2000
"""The longest message of ``raise_exception``, in characters."""

_MISSING = object()
_PLAIN = frozenset({str, int, bool, float, list, dict, type(None)})
_VIEWS = frozenset({"items", "keys", "values"})
_COMPARING_TESTS = frozenset(
    ["==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">=", "<", "lt", "lessthan", "<=", "le"]
)
_ALLOWANCE_METHODS = (
    "add", "checked_key", "concatenate", "contains", "paid_iterable", "paid_operand", "paid_slice", "soft_text",
    "spend", "subtract", "text",
)  # fmt: skip
"""Methods of ``Allowance`` that compiled templates call on the environment."""

_NODE_UNITS = 24
"""Units of each node of the syntax tree in a body, paid each time that the body is executed."""

_ENTRY_UNITS = 2048
"""Further units of a macro, a block or a recursive loop, each time that it is entered."""

_LOOP_ATTRIBUTES = frozenset({"index", "index0", "first", "last", "length", "previtem", "nextitem"})
_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_NUMBERS = frozenset({"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"})
_NESTING_FILTERS = frozenset({"batch", "slice", "groupby", "dictsort", "map", "sum"})
_NESTING_NAMES = frozenset({"dict", "varargs", "kwargs", "cycler"})
_PYTHON_OPERATORS = {
    "eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<=", "in": "in", "notin": "not in",
}  # fmt: skip


class RaisedByTemplate(TemplateError):  # noqa: N818 - not an error of ours: the template's own words
    """What a template says through ``raise_exception``."""


class _Generation(Extension):
    """Parses a ``{% generation %}`` block as a call of ``GENERATION``, which ``trace`` replaces by marks."""

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
            pairs = self._allowance.paid_list(args[0])
            args = ([(self._allowance.checked_key(key), value) for key, value in pairs], *args[1:])
        for items in (*args, kwargs):
            self._allowance.spend(4 * POINTER * len(items))
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(map(self._allowance.checked_key, self._allowance.paid_list(keys)), value)


# The Python code of a template


class CountingGenerator(CodeGenerator):
    """Writes a template's syntax tree as Python code that pays for what it does.

    The methods ``visit_...`` are Jinja's interface: each writes one kind of node. The code may rely on ``environment``
    being a ``TemplateEnvironment``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Units by the id() of a node that a loop iterates over, for each iteration, or of a body, for each entry.
        self._prices: dict[int, int] = {}

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Write a node; if a loop iterates over its value, write that each iteration is paid."""
        price = self._prices.pop(id(node), None)
        if price is None:
            return super().visit(node, *args, **kwargs)
        self.write("environment.paid_iterable(")
        super().visit(node, *args, **kwargs)
        return self.write(f", {price})")

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        """Write the statements of a body, behind the payment of a body that pays on entry."""
        price = self._prices.get(id(nodes))
        if price is not None:
            self.writeline(f"environment.spend({price})")
        super().blockvisit(nodes, frame)

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802 - Jinja's names
        """Write the template, after collecting what has to be known of all of it."""
        self._none_for_missing = set(_none_for_missing(node))
        self._rebinds_loop = any(name.name == "loop" and name.ctx != "load" for name in node.find_all(nodes.Name))
        for block in node.find_all(nodes.Block):
            self._prices[id(block.body)] = _ENTRY_UNITS + _body_units(block.body)
        super().visit_Template(node, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        """Write a loop, which pays for each iteration; the body of a recursive loop is a function, paid on entry."""
        price = _body_units([*node.body, *([node.test] if node.test else [])])
        self._prices[id(node.body if node.recursive else node.iter)] = price + (_ENTRY_UNITS if node.recursive else 0)
        super().visit_For(node, frame)

    def macro_body(self, node: nodes.Macro | nodes.CallBlock, frame: Frame) -> tuple[Frame, Any]:
        """Write the body of a macro or of a call block, which pays on entry."""
        self._prices[id(node.body)] = _ENTRY_UNITS + _body_units([*node.body, *node.defaults])
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

    def _write_code(self, frame: Frame, *code: str | nodes.Node) -> None:
        """Write Python code: strings as they are, nodes as code for their value."""
        for text_or_node in code:
            if isinstance(text_or_node, str):
                self.write(text_or_node)
            else:
                self.visit(text_or_node, frame)

    def _write_call(self, method: str, arguments: Sequence[nodes.Expr], frame: Frame) -> None:
        """Write a call of a method of the environment."""
        commas = (code for argument in arguments for code in (argument, ", "))
        self._write_code(frame, f"environment.{method}(", *commas, ")")

    def _is_number(self, node: nodes.Node, frame: Frame) -> bool:
        """Whether an expression is a small number, whatever the conversation holds."""
        if isinstance(node, nodes.Getattr):
            return node.attr in _LOOP_NUMBERS and self._is_loop(node.node, frame)
        if isinstance(node, nodes.Filter):
            return node.name in ("length", "count")
        if isinstance(node, nodes.Sub):
            return self._is_number(node.left, frame) and self._is_number(node.right, frame)
        return isinstance(node, nodes.Const) and type(node.value) in (int, float)

    def _is_loop(self, node: nodes.Node, frame: Frame) -> bool:
        """Whether an expression is certainly the ``loop`` of a ``for`` loop, and not a variable of that name."""
        if self._rebinds_loop or not isinstance(node, nodes.Name) or node.name != "loop":
            return False
        reference = frame.symbols.find_ref("loop")
        return reference is not None and frame.symbols.find_load(reference) == (VAR_LOAD_PARAMETER, None)

    @optimizeconst
    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """Write ``a + b + c``."""
        others: list[nodes.Expr] = [node.right]  # last operand first
        first = node.left
        while isinstance(first, nodes.Add):
            others.append(first.right)
            first = first.left
        if len(others) == 1 and (self._is_number(first, frame) or self._is_number(node.right, frame)):
            self._write_code(frame, "(", first, " + ", node.right, ")")
        else:
            self._write_call("add", [first, *reversed(others)], frame)

    @optimizeconst
    def visit_Sub(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """Write ``a - b``."""
        if self._is_number(node.left, frame) or self._is_number(node.right, frame):
            self._write_code(frame, "(", node.left, " - ", node.right, ")")
        else:
            self._write_call("subtract", [node.left, node.right], frame)

    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        """Write ``a ~ b``."""
        if not (frame.eval_ctx.volatile or frame.eval_ctx.autoescape):
            self._write_call("concatenate", node.nodes, frame)
            return
        self.write("(markup_join if context.eval_ctx.autoescape else str_join)((")
        for operand in node.nodes:
            self._write_call("soft_text", [operand], frame)
            self.write(", ")
        self.write("))")

    @optimizeconst
    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        """Write a comparison, which pays for its operands, unless there are two and one is small."""
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        operators = [operand.op for operand in node.ops]
        if operators in (["in"], ["notin"]) and not _is_constant_list(operands[1]):
            self.write("(not " if operators == ["notin"] else "(")
            self._write_call("contains", operands, frame)
            self.write(")")
            return
        small = any(isinstance(operand, nodes.Const) or self._is_number(operand, frame) for operand in operands)
        free = len(operands) == 2 and (small or _is_constant_list(operands[1]))
        self.write("(")
        for operator, operand in zip(["", *operators], operands, strict=True):
            self.write(f" {_PYTHON_OPERATORS[operator]} " if operator else "")
            if free:
                self.visit(operand, frame)
            else:
                self._write_call("paid_operand", [operand], frame)
        self.write(")")

    @optimizeconst
    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:  # noqa: N802
        """Write ``a.b``: a dict's item or an attribute of ``loop`` at once, all else through the sandbox."""
        name, attribute = self.temporary_identifier(), node.attr
        if isinstance(node.node, nodes.Name) and node.node.name == "loop" and attribute in _LOOP_ATTRIBUTES:
            quick, condition = f"{name}.{attribute}", "LoopContext"
        elif attribute in _DICT_ATTRIBUTES:
            super().visit_Getattr(node, frame)
            return
        elif node in self._none_for_missing:
            quick, condition = f"{name}.get({attribute!r})", "dict"
        else:
            quick, condition = f"{name}[{attribute!r}]", f"dict and {attribute!r} in {name}"
        safe = f" else environment.getattr({name}, {attribute!r}))"
        self._write_code(frame, f"({quick} if type({name} := ", node.node, f") is {condition}{safe}")

    @optimizeconst
    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        """Write ``a[b]`` or ``a[b:c]``; a dict's item by a constant name and a list's by a number are taken at once."""
        if isinstance(node.arg, nodes.Slice):
            self._write_code(frame, "environment.paid_slice(", node.node, "[", node.arg, "])")
            return
        name, key = self.temporary_identifier(), self.temporary_identifier()
        if isinstance(node.arg, nodes.Const) and type(node.arg.value) is str:
            key = repr(node.arg.value)
            self._write_code(frame, f"({name}[{key}] if type({name} := ", node.node, f") is dict and {key} in {name}")
        else:
            inside = f") is int) and -len({name}) <= {key} < len({name})"
            quick = f"({name}[{key}] if (type({name} := "
            self._write_code(frame, quick, node.node, f") is list) & (type({key} := ", node.arg, inside)
        self.write(f" else environment.getitem({name}, {key}))")

    @optimizeconst
    def visit_Test(self, node: nodes.Test, frame: Frame) -> None:  # noqa: N802
        """Write a test; ``is string`` needs no call."""
        if node.name == "string":
            self._write_code(frame, "isinstance(", node.node, ", str)")
        else:
            super().visit_Test(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        """Write a dict, whose keys must not be slow to hash."""
        self.write("{")
        for item in node.items:
            if isinstance(item.key, nodes.Const):
                self.visit(item.key, frame)
            else:
                self._write_call("checked_key", [item.key], frame)
            self._write_code(frame, ": ", item.value, ", ")
        self.write("}")

    @optimizeconst
    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:  # noqa: N802
        """Write a call; for one of a method ``call_method`` is called, which need not look the method up first."""
        if forward_caller or not isinstance(node.node, nodes.Getattr):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        scopes = f"{'_loop_vars' if frame.loop_frame else None}, {'_block_vars' if frame.block_frame else None}"
        self._write_code(frame, "environment.call_method(context, ", node.node.node, f", {node.node.attr!r}, {scopes}")
        self.signature(node, frame)
        self.write(")")


def _is_constant_list(node: nodes.Node) -> bool:
    """Whether an expression is a list or tuple of constants, which is short."""
    return isinstance(node, (nodes.List, nodes.Tuple)) and all(isinstance(item, nodes.Const) for item in node.items)


def nests(tree: nodes.Template) -> bool:
    """Whether a template may put lists or dicts into others: by a literal, a filter, or the arguments of a macro.

    Only then can a value be much larger than the conversation, by holding one list many times.
    """
    for node in tree.find_all((nodes.List, nodes.Tuple, nodes.Dict, nodes.Filter, nodes.Name, nodes.Call)):
        if isinstance(node, nodes.Filter):
            nesting = node.name in _NESTING_FILTERS
        elif isinstance(node, nodes.Name):
            nesting = node.name in _NESTING_NAMES
        elif isinstance(node, nodes.Dict):
            nesting = not all(isinstance(item.value, nodes.Const) for item in node.items)
        elif isinstance(node, nodes.Call):
            nesting = isinstance(node.node, nodes.Getattr) and node.node.attr == "fromkeys"
        else:
            assert isinstance(node, (nodes.List, nodes.Tuple))
            nesting = not _is_constant_list(node) and getattr(node, "ctx", "load") == "load"
        if nesting:
            return True
    return False


def _body_units(body: Sequence[nodes.Node]) -> int:
    """The units that one execution of these statements costs, without the loops and macros that pay for themselves."""
    return ITEM + _NODE_UNITS * sum(1 + sum(1 for _ in node.find_all(nodes.Node)) for node in body)


def _none_for_missing(template: nodes.Template) -> Iterator[nodes.Node]:
    """The expressions for which None does as well as Jinja's undefined, so that compiled code may use ``dict.get``.

    The template only asks whether they are true, a string, or equal to a constant, as in ``{% if message.name %}``.
    """
    for node in template.find_all((nodes.If, nodes.CondExpr, nodes.Not, nodes.Or, nodes.Test, nodes.Compare)):
        if isinstance(node, (nodes.If, nodes.CondExpr)):
            yield from _truth_operands(node.test)
        elif isinstance(node, nodes.Not):
            yield from _truth_operands(node.node)
        elif isinstance(node, nodes.Or):
            yield from _truth_operands(node.left)
        elif isinstance(node, nodes.Test) and node.name == "string":
            yield node.node
        elif isinstance(node, nodes.Compare) and all(
            operand.op in ("eq", "ne") and isinstance(operand.expr, nodes.Const) and isinstance(operand.expr.value, str)
            for operand in node.ops
        ):
            yield node.expr


def _truth_operands(node: nodes.Node) -> Iterator[nodes.Node]:
    """The parts of a condition that count as true or false only: ``a``, ``b`` and ``c`` of ``a and (b or c)``."""
    if isinstance(node, (nodes.And, nodes.Or)):
        yield from _truth_operands(node.left)
        yield from _truth_operands(node.right)
    else:
        yield node


# The sandbox in which that code runs


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with the names and filters that chat templates expect.

    The overridden look-ups answer the common cases (exact dicts, strings, lists, ``loop`` and namespaces) as
    the sandbox would, and leave everything else to it. It also has the methods of ``Allowance`` that compiled templates
    call, because the environment is the one object that their code can reach.

    Args:
        template_date: the day, ``YYYY-MM-DD``, that ``strftime_now`` tells; None refuses templates that ask for it.

    Attributes:
        allowance: what the rendering under way may still do. One environment serves one rendering at a time.

    Raises:
        FormatError: ``template_date`` is not a date.
    """

    code_generator_class = CountingGenerator
    intercepted_binops = frozenset({"*", "**", "%", "/", "//"})

    def __init__(self, template_date: str | None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.allowance = allowance = Allowance()
        self.concat = allowance.joined  # type: ignore[method-assign]
        self.finalize: Callable[..., Any] = allowance.soft_text
        for name in _ALLOWANCE_METHODS:
            setattr(self, name, getattr(allowance, name))
        self.filters = counted_filters(allowance, self.filters)
        tests: dict[str, Any] = {**self.tests}
        for name in _COMPARING_TESTS:
            self.tests[name] = _counted_test(tests[name], allowance.paid_operand)
        for name in ("lower", "upper"):
            self.tests[name] = _counted_test(tests[name], allowance.soft_text)
        self.tests["in"] = allowance.contains
        self.tests["divisibleby"] = lambda value, num: self.call_binop(self, "%", value, num) == 0  # type: ignore[arg-type]
        self.globals.pop("lipsum", None)
        self.globals["raise_exception"] = self._raise_exception
        self.globals["strftime_now"] = _strftime_now(template_date, allowance)
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
            TemplateRuntimeError: there is no such filter, or it is a mark of tracing, which no template may call.
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
        return super().getitem(obj, self.allowance.checked_key(argument))

    def call(
        __self,  # noqa: N805 - templates may pass any keyword
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call what a template calls: methods of plain values at their price, anything else as the sandbox does.

        Methods that change their object need no check here: the sandbox's look-ups never return them.
        """
        plain = type(__obj) is BuiltinMethodType or (type(__obj) is MethodType and type(__obj.__self__) is Markup)
        if plain or __obj is _TemplateNamespace:
            kwargs.pop("_loop_vars", None)  # compiled loops and blocks pass their scopes along, meant for the context
            kwargs.pop("_block_vars", None)
            if plain:
                return call_method(__self.allowance, __obj.__self__, __obj.__name__, args, kwargs)
            return _TemplateNamespace(*args, **kwargs)
        if len(args) > SHORT_ARGUMENT:
            __self.allowance.spend(ITEM * len(args))
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
        """Call ``value.name(...)`` for compiled code, which passes the scopes of its loop and block along."""
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
        ):  # as `prices.call_method` would, which would take off more only for longer arguments
            allowance = self.allowance
            allowance.remaining -= METHOD_FACTORS[name] * (len(value) if value.isascii() else 4 * len(value))
            if allowance.remaining < 0:
                allowance.extend_or_refuse()
            return getattr(value, name)(*args, **kwargs)
        if loop_vars is not None:
            kwargs["_loop_vars"] = loop_vars
        if block_vars is not None:
            kwargs["_block_vars"] = block_vars
        return self.call(context, self.getattr(value, name), *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute the product, power, quotient or remainder of two values, paid for, and refused if it is too large."""
        allowance = self.allowance
        if operator == "**":
            if not all(type(side) in (int, float) and abs(side) <= 4096 for side in (left, right)):
                shown = [repr(side) if type(side) in (int, float) else type(side).__name__ for side in (left, right)]
                raise Overspent(f"{_shortened(' ** '.join(shown))} is too large for a chat template")
            if isinstance(left, int) and isinstance(right, int):
                allowance.spend(left.bit_length() * max(0, right) >> 3)
        elif operator != "*":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() > 64:
                allowance.spend(left.bit_length() * right.bit_length() >> 12)  # a division takes quadratic time
            elif isinstance(left, str):
                allowance.pay_for_percent_format(left, right if isinstance(right, tuple) else (right,))
        else:
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, list, tuple)) and isinstance(times, int):
                    if len(value) * times > MAX_REPEATED:
                        raise Overspent(f"repeating something {times} times is too much for a chat template")
                    units = text_bytes(value) if isinstance(value, str) else POINTER * len(value)
                    allowance.spend(units * max(0, times))
                    allowance.nests = True
            if isinstance(left, int) and isinstance(right, int):
                allowance.spend(left.bit_length() + right.bit_length() >> 3)
        return allowance.checked_number(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """A template's ``str.format`` or ``str.format_map``; None where ``value`` is neither.

        It formats as the sandbox does, pays for each field, and refuses fields that have no text of their own.
        """
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
        raise RaisedByTemplate(_shortened(self.allowance.text(message)))

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
    """Formats the fields of Markup, which are escaped, each of them paid for."""


def _counted_test(test: Callable[..., Any], pay: Callable[[Any], Any]) -> Callable[..., Any]:
    """A Jinja test that first hands each of its operands to ``pay``, which pays for it and returns it."""
    return lambda *values: test(*map(pay, values))


def _shortened(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."


def _strftime_now(template_date: str | None, allowance: Allowance) -> Callable[[str], str]:
    """The function of that name for templates, whose day never changes."""
    day = None if template_date is None else datetime.strptime(template_date, "%Y-%m-%d")

    def strftime_now(style: str) -> str:
        if day is None:
            raise FormatError(
                "the chat template asks for today's date, so its text would change from day to day; "
                "give the date it should see with --template-date YYYY-MM-DD"
            )
        if re.search(r"%[^a-zA-Z%]*[0-9]", style):  # the C library of some machines pads a field to this width
            raise Overspent("a date with the width of a field is too much for a chat template")
        allowance.spend(256 * len(style))
        return day.strftime(style)

    return strftime_now
