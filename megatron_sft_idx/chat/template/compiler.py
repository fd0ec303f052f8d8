"""Compile a chat template to Python code that pays for its work.

Jinja compiles a template to Python. ``CountingGenerator`` generates that code. An operation that can make a large value
or take long (joining, adding, slicing, comparing, searching) becomes a call that pays from the allowance. A loop pays
for every iteration according to the size of its body, a macro or block on every entry. Lookups that templates make
thousands of times become plain Python if the value is exactly a dict or the loop and the sandbox would give the same
result. The code requires that ``environment`` is a ``TemplateEnvironment``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.ext import Extension
from jinja2.parser import Parser

from megatron_sft_idx.chat.template.allowance import ITEM

GENERATION = "_generation"
"""The method name that marks a ``{% generation %}`` block in a syntax tree."""

LOOP_ATTRIBUTES = frozenset({"index", "index0", "first", "last", "length", "previtem", "nextitem"})
"""Attributes of ``loop`` that need no sandbox."""

DICT_ATTRIBUTES = frozenset(dir(dict))
"""Names that mean a method of a dict before they mean one of its items."""

_NODE_UNITS = 24
"""Units of each node of the syntax tree in a body, paid each time that the body is executed."""

_ENTRY_UNITS = 2048
"""Further units of a macro, a block or a recursive loop, each time that it is entered."""

_NESTING_FILTERS = frozenset({"batch", "slice", "groupby", "dictsort", "map", "sum"})
_NESTING_NAMES = frozenset({"dict", "varargs", "kwargs", "cycler"})
_PYTHON_OPERATORS = {
    "eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<=", "in": "in", "notin": "not in",
}  # fmt: skip


class GenerationBlocks(Extension):
    """Parses a ``{% generation %}`` block as a call of ``GENERATION``, which ``trace`` replaces by marks."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse one block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method(GENERATION), [], [], body).set_lineno(line)


class CountingGenerator(CodeGenerator):
    """Generates Python code from a template's syntax tree.

    Each ``visit_...`` (Jinja's interface) handles one node type.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Units by the id() of a node: of a loop's iterable, for each iteration, or of a body, for each entry.
        self._prices: dict[int, int] = {}

    # ---- bodies ----

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Write a node. If a loop iterates over its value, also write the payment for each iteration."""
        price = self._prices.pop(id(node), None)
        if price is None:
            return super().visit(node, *args, **kwargs)
        self.write("environment.iterated(")
        super().visit(node, *args, **kwargs)
        return self.write(f", {price})")

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        """Write the statements of a body, after the payment of a body that pays on entry."""
        price = self._prices.get(id(nodes))
        if price is not None:
            self.writeline(f"environment.allowance.spend({price})")
        super().blockvisit(nodes, frame)

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802 - Jinja's names
        """Write the template, whose blocks pay on entry."""
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

    # ---- output and operators ----

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if _escapes(frame):
            super()._output_child_pre(node, frame, finalize)
        else:
            self.write("(written if type(written := ")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if _escapes(frame):
            super()._output_child_post(node, frame, finalize)
        else:
            self.write(") is str else environment.allowance.text(written))")

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

    def _write_joined(self, method: str, operands: Sequence[nodes.Expr], frame: Frame) -> None:
        """Write the joining of operands: as an f-string if all are plain strings, else as a method call.

        An f-string is paid for after it is made, so it has at most two operands that can be large.
        """
        variable = [operand for operand in operands if _text_of(operand) is None]
        if not 1 <= len(variable) <= 2:
            self._write_call(method, operands, frame)
            return
        names = [self.temporary_identifier() for _ in variable]
        unused = iter(names)
        words = ""
        arguments = []
        for operand in operands:
            text = _text_of(operand)
            arguments.append(next(unused) if text is None else repr(text))
            words += f"{{{arguments[-1]}}}" if text is None else text.replace("{", "{{").replace("}", "}}")
        self.write(f"(environment.allowance.made(f{words!r}) if ")
        for at, (name, operand) in enumerate(zip(names, variable, strict=True)):
            self._write_code(frame, " & " if at else "", f"(type({name} := ", operand, ") is str)")
        self.write(f" else environment.{method}({', '.join(arguments)}))")

    @optimizeconst
    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """Write ``a + b + c``."""
        operands = [node.right]
        first = node.left
        while isinstance(first, nodes.Add):
            operands.insert(0, first.right)
            first = first.left
        operands.insert(0, first)
        if len(operands) == 2 and any(map(_is_number, operands)):
            self._write_code(frame, "(", first, " + ", node.right, ")")
        else:
            self._write_joined("add", operands, frame)

    @optimizeconst
    def visit_Sub(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """Write ``a - b``."""
        if _is_number(node.left) or _is_number(node.right):
            self._write_code(frame, "(", node.left, " - ", node.right, ")")
        else:
            self._write_call("subtract", [node.left, node.right], frame)

    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        """Write ``a ~ b``."""
        if not _escapes(frame):
            self._write_joined("concatenate", node.nodes, frame)
            return
        self.write("(markup_join if context.eval_ctx.autoescape else str_join)((")
        for operand in node.nodes:
            self._write_call("allowance.soft_text", [operand], frame)
            self.write(", ")
        self.write("))")

    @optimizeconst
    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        """Write a comparison. It takes no longer than the smaller of two operands, so the last one need not pay."""
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        operators = [operand.op for operand in node.ops]
        if operators in (["in"], ["notin"]) and not _is_constant_list(operands[1]):
            self.write("(not " if operators == ["notin"] else "(")
            self._write_call("contains", operands, frame)
            self.write(")")
            return
        small = any(isinstance(operand, nodes.Const) or _is_number(operand) for operand in operands)
        free = len(operands) == 2 and (small or _is_constant_list(operands[1]))
        self.write("(")
        for operator, operand in zip(["", *operators], operands, strict=True):
            self.write(f" {_PYTHON_OPERATORS[operator]} " if operator else "")
            if free or (operand is operands[-1] and operator not in ("in", "notin")):
                self.visit(operand, frame)
            else:
                self._write_call("compared", [operand], frame)
        self.write(")")

    # ---- look-ups and calls ----

    @optimizeconst
    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:  # noqa: N802
        """Write ``a.b``: directly for a dict's item or an attribute of ``loop``, otherwise through the sandbox."""
        name, attribute = self.temporary_identifier(), node.attr
        if isinstance(node.node, nodes.Name) and node.node.name == "loop" and attribute in LOOP_ATTRIBUTES:
            quick, condition = f"{name}.{attribute}", "LoopContext"
        elif attribute in DICT_ATTRIBUTES:
            super().visit_Getattr(node, frame)
            return
        else:
            quick, condition = f"{name}[{attribute!r}]", f"dict and {attribute!r} in {name}"
        safe = f" else environment.getattr({name}, {attribute!r}))"
        self._write_code(frame, f"({quick} if type({name} := ", node.node, f") is {condition}{safe}")

    @optimizeconst
    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        """Write ``a[b]`` or ``a[b:c]``; directly for a dict's item with a constant name."""
        if isinstance(node.arg, nodes.Slice):
            self._write_code(frame, "environment.allowance.made(", node.node, "[", node.arg, "])")
        elif (text := _text_of(node.arg)) is not None:
            name, key = self.temporary_identifier(), repr(text)
            self._write_code(frame, f"({name}[{key}] if type({name} := ", node.node, f") is dict and {key} in {name}")
            self.write(f" else environment.getitem({name}, {key}))")
        else:
            self._write_call("getitem", [node.node, node.arg], frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        """Write a dict, whose keys must not be slow to hash."""
        self.write("{")
        for item in node.items:
            if isinstance(item.key, nodes.Const):
                self.visit(item.key, frame)
            else:
                self._write_call("key", [item.key], frame)
            self._write_code(frame, ": ", item.value, ", ")
        self.write("}")

    @optimizeconst
    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:  # noqa: N802
        """Write a call. For a method, ``call_method`` is called, which does not need to look it up first."""
        if forward_caller or not isinstance(node.node, nodes.Getattr):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        scopes = f"{'_loop_vars' if frame.loop_frame else None}, {'_block_vars' if frame.block_frame else None}"
        self._write_code(frame, "environment.call_method(context, ", node.node.node, f", {node.node.attr!r}, {scopes}")
        self.signature(node, frame)
        self.write(")")


def _escapes(frame: Frame) -> bool:
    """Return whether output may be escaped here, as inside ``{% autoescape true %}``."""
    return bool(frame.eval_ctx.volatile or frame.eval_ctx.autoescape)


def _text_of(node: nodes.Node) -> str | None:
    """The value of a constant that is a plain string."""
    return node.value if isinstance(node, nodes.Const) and type(node.value) is str else None


def _is_number(node: nodes.Node) -> bool:
    """Return whether an expression is a small number for any conversation."""
    if isinstance(node, nodes.Filter):
        return node.name in ("length", "count")
    if isinstance(node, nodes.Sub):
        return _is_number(node.left) and _is_number(node.right)
    return isinstance(node, nodes.Const) and type(node.value) in (int, float)


def _is_constant_list(node: nodes.Node) -> bool:
    """Whether an expression is a list or tuple of constants, which is short."""
    return isinstance(node, (nodes.List, nodes.Tuple)) and all(isinstance(item, nodes.Const) for item in node.items)


def _body_units(body: Sequence[nodes.Node]) -> int:
    """Return the cost of executing these statements once, without the loops and macros that pay themselves."""
    return ITEM + _NODE_UNITS * sum(1 + sum(1 for _ in node.find_all(nodes.Node)) for node in body)


def nests(tree: nodes.Template) -> bool:
    """Return whether a template may put lists or dicts into others: by a literal, a filter, or arguments of a macro.

    Only then can a value be much larger than the conversation, because it can contain one list many times.
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
