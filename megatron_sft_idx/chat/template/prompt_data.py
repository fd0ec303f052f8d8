"""Whether the generation prompt of a template is the same for all conversations of one kind.

Of the kind of a conversation are its template variables, whether there are tools, and who speaks and calls functions
first, last, or at all. Words are not, nor counts, nor what a namespace keeps from one message for the next. What stands
where the template is asked for its prompt is followed back through the syntax tree, by names and by the tests and loops
around it, to what it reads of messages and tools.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from jinja2 import nodes

_PROMPT = "add_generation_prompt"
# What differs from conversation to conversation; and what of it does not, within one kind: ends of lists, of loops too.
_DATA = ("messages", "tools", "loop")
_KNOWN = ("role", "tool_calls", "first", "last", 0)
_ENDS = ("first", "last", "list", "reverse")
_BY_FIELD = ("selectattr", "rejectattr", "map")
_TYPES = ("defined", "undefined", "string", "mapping", "iterable", "sequence")


class _Tree:
    """A template's names: what each is made of, and where it is asked for a prompt.

    Attributes:
        made_of: for each name the nodes of all its values, and of the tests and loops that these stand in.
        kept: names that keep a value from one iteration of a loop to the next.
        prompts: the nodes that are written or done where it is asked for a prompt, and the tests and loops around them.
    """

    def __init__(self, tree: nodes.Template) -> None:
        self.made_of: defaultdict[str, list[nodes.Node]] = defaultdict(list)
        self.kept: set[str] = set()
        # For each name those whose values read it; and for each name, and each test's id(), what it decides about.
        self._users: defaultdict[str, set[str]] = defaultdict(set)
        self._deciding: defaultdict[str, set[str]] = defaultdict(set)
        self._statements: list[tuple[nodes.Node, set[str], Sequence[nodes.Node]]] = []
        self._walk(tree, [], looped=False)
        self._made_from = {name: _closure(name, self._users) for name in _DATA}
        asked = _closure(_PROMPT, self._users, self._deciding)
        self.prompts = [part for node, names, around in self._statements if names & asked for part in (node, *around)]

    def _walk(self, node: nodes.Node, around: Sequence[nodes.Node], looped: bool) -> None:
        """Note all statements at and below a node that stands in these tests and loops."""
        tests: list[nodes.Node] = [child for child in node.iter_child_nodes() if isinstance(child, nodes.Expr)]
        if tests:
            self._statements.append((node, set[str]().union(*map(_names, tests)), around))
        if isinstance(node, nodes.For):
            self._define(node.target, [node.iter], around, looped=False)
        elif isinstance(node, (nodes.Assign, nodes.AssignBlock)):
            values = [node.node] if isinstance(node, nodes.Assign) else node.body
            self._define(node.target, values, around, looped)
        elif isinstance(node, nodes.With):
            for target, value in zip(node.targets, node.values, strict=True):
                self._define(target, [value], around, looped)
        elif isinstance(node, (nodes.Macro, nodes.CallBlock)):
            name = node.name if isinstance(node, nodes.Macro) else "caller"
            self._define(nodes.Name(name, "store"), [*node.body, *node.defaults], around, looped=False)
            for argument in node.args:  # any call may hand over anything
                self._define(argument, [nodes.Name(name, "load") for name in _DATA], around, looped=False)
        inner = around
        if isinstance(node, (nodes.If, nodes.For)):
            # What leaves a loop, or an iteration, decides about all that is in it.
            leaves = node.find_all(nodes.If) if isinstance(node, nodes.For) else ()
            tests += [one.test for one in leaves if any(one.find_all((nodes.Break, nodes.Continue)))]
            inner = [*around, *tests]
            for test in tests:
                for used in _names(test):
                    self._deciding[used].add(str(id(test)))
        for child in node.iter_child_nodes():
            if not isinstance(child, nodes.Expr):
                self._walk(child, inner, looped or isinstance(node, nodes.For))

    def _define(
        self, target: nodes.Node, values: Sequence[nodes.Node], around: Sequence[nodes.Node], looped: bool
    ) -> None:
        if not isinstance(target, (nodes.Name, nodes.NSRef)):
            for item in target.iter_child_nodes():
                self._define(item, values, around, looped)
            return
        name = target.name if isinstance(target, nodes.Name) else f"{target.name}.{target.attr}"
        if looped and isinstance(target, nodes.NSRef):
            self.kept.add(name)
        self.made_of[name] += [*values, *around]
        for test in around:
            self._deciding[str(id(test))].add(name)
        for used in set[str]().union(*map(_names, values)):
            self._users[used].add(name)

    def sources(self, node: nodes.Node) -> set[str]:
        """Which of the data the value may come from that a node looks into."""
        while isinstance(node, (nodes.Getattr, nodes.Getitem, nodes.Filter, nodes.Call)) and node.node is not None:
            if _dotted(node) in self.made_of:
                break
            node = node.node
        names = {_dotted(node)} if isinstance(node, nodes.Getattr) else _names(node)
        return {data for data in _DATA if names & self._made_from[data]}


def prompt_varies(tree: nodes.Template) -> bool:
    """Whether the generation prompt may differ between conversations with the same variables, of the same kind.

    Of that kind are whether there are tools, and who speaks and calls functions first, last, or at all.
    """
    names = _Tree(tree)
    left, followed, seen = list(names.prompts), set[str](), set[int]()
    while left:
        node = left.pop()
        if id(node) in seen or (isinstance(node, nodes.Test) and node.name in _TYPES):
            continue  # the fields that a message has are of its kind
        seen.add(id(node))
        if isinstance(node, (nodes.Getattr, nodes.Getitem, nodes.Filter)):
            found = names.sources(node)
            if "tools" in found or (found and not _is_known(node)):
                return True
        for name in {node.name} if isinstance(node, nodes.Name) else {_dotted(node)}:
            if name in names.kept:
                return True
            if name not in followed:
                followed.add(name)
                left += names.made_of.get(name, ())
        left += node.iter_child_nodes()
    return False


def _is_known(node: nodes.Getattr | nodes.Getitem | nodes.Filter) -> bool:
    """Whether what a node takes from messages, one of them or a loop is of the kind of a conversation."""
    if isinstance(node, nodes.Filter):
        field = node.args[0] if node.args and node.name in _BY_FIELD else None
        return node.name in _ENDS or (isinstance(field, nodes.Const) and field.value in _KNOWN)
    if isinstance(node, nodes.Getattr):
        return node.attr in _KNOWN
    if isinstance(node.arg, nodes.Neg):
        return isinstance(node.arg.node, nodes.Const) and node.arg.node.value == 1
    return isinstance(node.arg, nodes.Slice) or (isinstance(node.arg, nodes.Const) and node.arg.value in _KNOWN)


def _closure(name: str, *users: Mapping[str, set[str]]) -> set[str]:
    """A name and all that get a value from it, by who uses what."""
    found, left = {name}, [name]
    while left:
        used = left.pop()
        more = set[str]().union(*(some.get(used, ()) for some in users)) - found
        found |= more
        left += more
    return found


def _dotted(node: nodes.Node) -> str:
    """``a.b`` of an attribute of a name, as namespaces have them; else an empty string."""
    simple = isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name)
    return f"{node.node.name}.{node.attr}" if simple else ""  # type: ignore[attr-defined]


def _names(node: nodes.Node) -> set[str]:
    """All names that a node reads; an attribute of a name is one too."""
    found = {node.name} if isinstance(node, nodes.Name) else {_dotted(node)} - {""}
    return found.union(*map(_names, node.iter_child_nodes()))
