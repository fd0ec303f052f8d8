"""The Python code of a template, with the look-ups written out that chat templates make thousands of times.

Jinja's code calls the sandbox for every attribute, item and method. Where the value is exactly a dict, list or string
and the answer certain, this code takes it at once, as the sandbox would; all else still goes there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst

__all__ = ["LOOP_ATTRIBUTES", "LookUps"]

LOOP_ATTRIBUTES = frozenset({"index", "index0", "first", "last", "length", "previtem", "nextitem"})

_DICT_ATTRIBUTES = frozenset(dir(dict))
# What they return is no longer than the string that they are called on.
_STRING_METHODS = frozenset({"startswith", "endswith", "strip", "lstrip", "rstrip", "split", "rsplit"})


class LookUps(CodeGenerator):
    """Generates code that answers common look-ups itself."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802 - Jinja's interface
        """Find out first where a dict's missing item may be None as well as undefined."""
        self._asked = set(_asked(node))
        super().visit_Template(node, frame)

    @optimizeconst
    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:  # noqa: N802
        """Take a dict's item, or what a loop says of itself."""
        name, attribute = self.temporary_identifier(), node.attr
        of_loop = isinstance(node.node, nodes.Name) and node.node.name == "loop" and attribute in LOOP_ATTRIBUTES
        if of_loop:
            self._written(f"({name}.{attribute} if type({name} := ", node.node, ") is LoopContext", frame)
        elif attribute not in _DICT_ATTRIBUTES and node in self._asked:
            self._written(f"({name}.get({attribute!r}) if type({name} := ", node.node, ") is dict", frame)
        elif attribute not in _DICT_ATTRIBUTES:
            known = f") is dict and {attribute!r} in {name}"
            self._written(f"({name}[{attribute!r}] if type({name} := ", node.node, known, frame)
        else:
            super().visit_Getattr(node, frame)
            return
        self.write(f" else environment.getattr({name}, {attribute!r}))")

    @optimizeconst
    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        """Take a dict's item by its name, or a list's by its number."""
        if isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
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
    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:  # noqa: N802
        """Call a string's own method."""
        method = node.node
        simple = all(isinstance(argument, nodes.Const) for argument in node.args)
        if not (isinstance(method, nodes.Getattr) and method.attr in _STRING_METHODS and simple) or (
            node.kwargs or node.dyn_args or node.dyn_kwargs
        ):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        name = self.temporary_identifier()
        self._written(f"({name}.{method.attr}(", None, "", frame)
        self.write(", ".join(repr(argument.value) for argument in node.args if isinstance(argument, nodes.Const)))
        self._written(f") if type({name} := ", method.node, ") is str else environment.call(context, ", frame)
        scopes: dict[str, Any] = {"_loop_vars": "_loop_vars"} if frame.loop_frame else {}
        self.write(f"environment.getattr({name}, {method.attr!r})")
        self.signature(node, frame, scopes | ({"_block_vars": "_block_vars"} if frame.block_frame else {}))
        self.write("))")

    @optimizeconst
    def visit_Test(self, node: nodes.Test, frame: Frame) -> None:  # noqa: N802
        """Ask whether a value is a string, without a call."""
        if node.name != "string":
            super().visit_Test(node, frame)
            return
        self._written("isinstance(", node.node, ", str)", frame)

    def _written(self, before: str, node: nodes.Expr | None, behind: str, frame: Frame) -> None:
        self.write(before)
        if node is not None:
            self.visit(node, frame)
        self.write(behind)


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
