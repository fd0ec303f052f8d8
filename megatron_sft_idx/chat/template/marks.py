"""A template's syntax tree, marked so that its render can be traced.

Every iteration of every ``for`` loop that can write is put between an *enter* and a *leave* mark, and so is
every ``{% generation %}`` block. ``trace`` explains what the marks do.
"""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from megatron_sft_idx.chat.template.environment import GENERATION, TemplateEnvironment

__all__ = ["Marker"]

_WRITERS = (nodes.Output, nodes.CallBlock, nodes.FilterBlock, nodes.Block, nodes.Include)


class Marker(NodeTransformer):
    """Puts the marks into a syntax tree; with ``marks=False`` only generation blocks become scopes."""

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
        target = _loaded(node.target)
        if target is None or not _matters(node):
            return self._visit_unmarked(node)
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

    def _visit_unmarked(self, node: nodes.For) -> nodes.Node:
        leaves, self._leaves = self._leaves, []  # its breaks are its own
        self.generic_visit(node)
        self._leaves = leaves
        return node

    def visit_Break(self, node: nodes.Node) -> Any:  # noqa: N802
        """Leave before jumping, for ``continue`` too."""
        return [self._leaves[-1], node] if self.marks and self._leaves else node

    visit_Continue = visit_Break  # noqa: N815

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        """Turn a generation block into a plain scope between marks."""
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
        call = nodes.Filter(value, f"trace {name}{'_captured' if self.captured else ''}", lists, [], None, None)
        statement: nodes.Stmt = nodes.Output([call]) if self.captured else nodes.ExprStmt(call)
        return statement.set_lineno(line).set_environment(self.environment)  # type: ignore[return-value]


def _matters(loop: nodes.For) -> bool:
    """Whether a loop can write anything."""
    return any(_holds(item, kind) for item in loop.body for kind in _WRITERS)


def _holds(node: nodes.Node, kind: type[nodes.Node]) -> bool:
    return isinstance(node, kind) or node.find(kind) is not None


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
        for subscript in item.find_all(nodes.Getitem):
            holder, argument = subscript.node, subscript.arg
            by_index = isinstance(argument, nodes.Name) and argument.name == index
            if by_index and isinstance(holder, nodes.Name) and holder.name not in stored:
                found[holder.name] = None
    return list(found)
