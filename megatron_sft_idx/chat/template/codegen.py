"""Templates compiled so that what they spend is counted, and what they look up most is looked up at once.

Jinja writes a template as Python. What this generator writes differently is what can grow or go on: joining, adding,
slicing, comparing and searching go through the allowance; every loop pays for its iterations by the size of its body,
and every macro and block for its own when it is entered. What is written and is text already is written as it is.

Jinja's code also calls the sandbox for every attribute, item and method. Where the value is exactly a dict or a list
and the answer certain, this code takes it at once, as the sandbox would; all else still goes there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst

from megatron_sft_idx.chat.template.allowance import ITEM

__all__ = ["DICT_ATTRIBUTES", "LOOP_ATTRIBUTES", "CountingGenerator", "nests"]

_STEP = 8
"""Units of a node of the syntax tree, each time that it is evaluated."""

_MAKES = 56
"""Further units of a node that may make an object."""

_ENTERS = 2048
"""Further units of a macro, a block or a recursive loop, each time that it is entered."""

_MAKERS = (
    nodes.Call, nodes.Filter, nodes.Test, nodes.Concat, nodes.BinExpr, nodes.Output, nodes.Getattr, nodes.Getitem,
    nodes.List, nodes.Tuple, nodes.Dict, nodes.Macro, nodes.AssignBlock, nodes.FilterBlock, nodes.For,
)  # fmt: skip
LOOP_ATTRIBUTES = frozenset({"index", "index0", "first", "last", "length", "previtem", "nextitem"})
DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_NUMBERS = frozenset({"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"})
_NESTING_FILTERS = frozenset({"batch", "slice", "groupby", "dictsort", "map", "sum"})
_NESTING_NAMES = frozenset({"dict", "varargs", "kwargs", "cycler"})
_COMPARED = {"eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<=", "in": "in", "notin": "not in"}


class CountingGenerator(CodeGenerator):
    """The generator for an environment that has the methods of ``Allowance``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._iterated: dict[int, int] = {}  # identity of what a loop goes through: the price of an iteration
        self._entered: dict[int, int] = {}  # identity of a list of statements: its price

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Write a node; what a loop goes through with its price."""
        price = self._iterated.pop(id(node), None)
        if price is None:
            return super().visit(node, *args, **kwargs)
        self.write("environment.iterated(")
        super().visit(node, *args, **kwargs)
        return self.write(f", {price})")

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        """Write statements, those of a body that pays when it is entered with their price."""
        price = self._entered.get(id(nodes))
        if price is not None:
            self.writeline(f"environment.spend({price})")
        super().blockvisit(nodes, frame)

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802 - Jinja's names
        """Find out first where a dict's missing item may be None as well as undefined."""
        self._asked = set(_asked(node))
        for block in node.find_all(nodes.Block):
            self._entered[id(block.body)] = _ENTERS + _price(block.body)
        super().visit_Template(node, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        """Write a loop."""
        price = _price([*node.body, *([node.test] if node.test else [])])
        if node.recursive:  # it is entered anew from within
            self._entered[id(node.body)] = _ENTERS + price
        else:
            self._iterated[id(node.iter)] = price
        super().visit_For(node, frame)

    def visit_Macro(self, node: nodes.Macro, frame: Frame) -> None:  # noqa: N802
        """Write a macro."""
        self._entered[id(node.body)] = _ENTERS + _price([*node.body, *node.defaults])
        super().visit_Macro(node, frame)

    def visit_CallBlock(self, node: nodes.CallBlock, frame: Frame) -> None:  # noqa: N802
        """Write a call block, whose body is a macro."""
        self._entered[id(node.body)] = _ENTERS + _price([*node.body, *node.defaults])
        super().visit_CallBlock(node, frame)

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

    def _called(self, function: str, arguments: Sequence[nodes.Expr], frame: Frame) -> None:
        self.write(f"environment.{function}(")
        for argument in arguments:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")

    @optimizeconst
    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """Write ``a + b + c``: what two of them make, constants apart, is paid for before a third is added."""
        parts: list[nodes.Expr] = []
        first: nodes.Expr = node
        while isinstance(first, nodes.Add):
            parts.append(first.right)
            first = first.left
        parts = [first, *reversed(parts)]
        opening: list[str] = []
        values = 0 if _is_small(first) else 1
        paid = False
        for number, part in enumerate(parts[1:], start=2):
            values += not _is_small(part)
            pays = values == 2 or (number == len(parts) and values == 1 and not paid and not _is_number(part))
            opening.append("environment.made(" if pays else "(")
            values, paid = (1, True) if pays else (values, paid)
        self.write("".join(reversed(opening)))
        self.visit(first, frame)
        for part in parts[1:]:
            self.write(" + ")
            self.visit(part, frame)
            self.write(")")

    @optimizeconst
    def visit_Sub(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """Write ``a - b``."""
        if _is_number(node.left) or _is_number(node.right):
            self._written("(", node.left, " - ", frame)
            self._written("", node.right, ")", frame)
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
        of_loop = isinstance(node.node, nodes.Name) and node.node.name == "loop" and attribute in LOOP_ATTRIBUTES
        if of_loop:
            self._written(f"({name}.{attribute} if type({name} := ", node.node, ") is LoopContext", frame)
        elif attribute not in DICT_ATTRIBUTES and node in self._asked:
            self._written(f"({name}.get({attribute!r}) if type({name} := ", node.node, ") is dict", frame)
        elif attribute not in DICT_ATTRIBUTES:
            known = f") is dict and {attribute!r} in {name}"
            self._written(f"({name}[{attribute!r}] if type({name} := ", node.node, known, frame)
        else:
            super().visit_Getattr(node, frame)
            return
        self.write(f" else environment.getattr({name}, {attribute!r}))")

    @optimizeconst
    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        """Write ``a[b:c]``, paid for; take a dict's item by its name, or a list's by its number."""
        if isinstance(node.arg, nodes.Slice):
            self._written("environment.cut(", node.node, "[", frame)
            self._written("", node.arg, "])", frame)
            return
        name, key = self.temporary_identifier(), self.temporary_identifier()
        if isinstance(node.arg, nodes.Const) and type(node.arg.value) is str:
            key = repr(node.arg.value)
            self._written(f"({name}[{key}] if type({name} := ", node.node, f") is dict and {key} in {name}", frame)
        else:
            self._written(f"({name}[{key}] if (type({name} := ", node.node, ") is list)", frame)
            inside = f") is int) and -len({name}) <= {key} < len({name})"
            self._written(f" & (type({key} := ", node.arg, inside, frame)
        self.write(f" else environment.getitem({name}, {key}))")

    @optimizeconst
    def visit_Test(self, node: nodes.Test, frame: Frame) -> None:  # noqa: N802
        """Ask whether a value is a string, without a call."""
        if node.name != "string":
            super().visit_Test(node, frame)
            return
        self._written("isinstance(", node.node, ", str)", frame)

    def _written(self, before: str, node: nodes.Expr, behind: str, frame: Frame) -> None:
        self.write(before)
        self.visit(node, frame)
        self.write(behind)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        """Write a dict, whose keys are hashed."""
        self.write("{")
        for item in node.items:
            if isinstance(item.key, nodes.Const):
                self.visit(item.key, frame)
            else:
                self._called("key", [item.key], frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    @optimizeconst
    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:  # noqa: N802
        """Write a call; that of a method without a look-up of its own."""
        if forward_caller or not isinstance(node.node, nodes.Getattr):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        self.write("environment.call_method(context, ")
        self.visit(node.node.node, frame)
        self.write(f", {node.node.attr!r}, {'_loop_vars' if frame.loop_frame else None}")
        self.write(f", {'_block_vars' if frame.block_frame else None}")
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
    """What it takes to go through statements once, but for the bodies in them that pay for themselves."""
    units = ITEM
    waiting = [*body]
    while waiting:
        node = waiting.pop()
        units += _STEP + (_MAKES if isinstance(node, _MAKERS) else 0)
        if isinstance(node, nodes.Const) and isinstance(node.value, str):
            units += len(node.value) >> 3
        own = ("body", "test") if isinstance(node, nodes.For) else ("body", "defaults")
        paid = isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))
        waiting.extend(node.iter_child_nodes(exclude=own if paid else None))
    return units


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
