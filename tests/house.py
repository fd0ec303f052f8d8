"""The project's own rules for source files, as functions that return complaints; test_house.py runs them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "megatron_sft_idx"
MAX_MODULE_LINES, MAX_FUNCTION_LINES = 700, 70

# From the bottom up. A module imports from its own layer and from earlier ones.
LAYERS = [
    {"_native"},
    {"layout", "arguments", "errors", "lines"},
    {"chat", "packing", "storage"},
    {"shard", "check", "packs"},
    {"formats"},
    {"dataset", "builder"},
    {"tokenize", "produce", "inspect", "live", "training"},
    {"cli", "__main__", "pretrain"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FACES, WORK, CLI = LEVEL["dataset"], LEVEL["tokenize"], LEVEL["cli"]
# The package's __init__ exports names of every layer, lazily. Modules of the package do not import from it.
ROOT = len(LAYERS)

MEGATRON = {"torch", "megatron"}
LIGHT_WORK = {"tokenize", "produce", "inspect"}
# Modules for producers and training: the documents of a live catalog, and waiting for them.
LIGHT_MODULES = {"live", "live.acks", "live.catalog", "live.documents", "live.live_order", "live.waiting"}
# Imported inside functions, never when one of our modules is imported.
CLOUD = {"boto3", "botocore", "multistorageclient", "obstore"}
HEAVY = (
    MEGATRON
    | CLOUD
    | {"transformers", "datasets", "ray", "pyarrow", "gigatoken", "zstandard", "sentencepiece", "tiktoken"}
)

TOP_LEVEL = {
    *("setup.py", "megatron_sft_idx", "csrc", "tests", "tools", "docs", "examples", "README.md"),
    *("pyproject.toml", "Makefile", "MANIFEST.in", "constraints.txt", "CHANGELOG.md", "LICENSE", "CONTRIBUTING.md"),
    "mkdocs.yml",
}
# File names are unique, so that a name in a traceback identifies the file. These names are allowed in several folders.
SHARED_NAMES = {"local": {"storage", "tokenize"}}
# Classes and public functions have unique names too, except for these names that every format has.
ASKED_FOR = {"Reader", "Writer", "recognise"}
# Written so that this file does not match its own pattern.
PRIVATE = re.compile(r"(?<![\w.\-/])/(?:wor[k]|tm[p]|hom[e]|roo[t])/[\w.]")


def is_light(module: str) -> bool:
    """Return whether importing this module of the package must not import torch or Megatron."""
    _, _, inner = module.partition(".")
    top = inner.partition(".")[0]
    return not top or LEVEL[top] < FACES or LEVEL[top] >= CLI or top in LIGHT_WORK or inner in LIGHT_MODULES


@dataclass(frozen=True)
class Import:
    """One imported name.

    Attributes:
        module: the full name; its last part may be a function or class instead of a module.
        base: the part that must be a module: ``base`` in ``from base import name``.
        line: line number.
        at_import: whether it is executed when the importing module is imported.
    """

    module: str
    base: str
    line: int
    at_import: bool


def imports(source: str, module: str, is_package: bool) -> Iterator[Import]:
    """Yield every import of a module, also inside functions and under ``if``. Relative imports are made absolute.

    ``from a import b`` counts as ``a.b``, which can be a module or a name in one. An import under ``if TYPE_CHECKING``
    counts as an edge, but is not executed at import.
    """

    def visit(node: ast.AST, at_import: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, alias.name, node.lineno, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parents = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parents, *([base] if base else [])])
            yield from (Import(f"{base}.{alias.name}", base, node.lineno, at_import) for alias in node.names)
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        inner = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import and not typing_only and not inner)

    yield from visit(ast.parse(source), True)


def import_complaints(source: str, module: str, is_package: bool = False) -> list[str]:
    """List the forbidden imports of a module of the package; ``module`` is its full dotted name."""
    own = module.split(".")[1:2]
    if not own:
        level, top = ROOT, ""
    elif (top := own[0]) in LEVEL:
        level = LEVEL[top]
    else:
        return [f"{module}: not in a layer; place {top} in LAYERS"]
    complaints = []
    for edge in imports(source, module, is_package):
        where = f"{module}:{edge.line}: imports {edge.module}"
        root = edge.module.split(".")[0]
        if root == PACKAGE:
            complaints += [f"{where}, {why}" for why in _inner_edge(top, level, edge)]
        elif root in MEGATRON and level < FACES:
            complaints.append(f"{where}, which only {', '.join(sorted(LAYERS[FACES]))} and above may")
        elif root in HEAVY and edge.at_import and (is_light(module) or root not in MEGATRON):
            complaints.append(f"{where} at import; import it where it is used")
    return complaints


def _inner_edge(top: str, level: int, edge: Import) -> Iterator[str]:
    name = [*edge.module.split("."), ""][1]
    if name == "__version__" or level == ROOT:
        return
    if name not in LEVEL:
        yield "a name of the package's __init__; import it from its module"
    elif LEVEL[name] > level:
        yield f"which is above {top}"
    elif level == WORK == LEVEL[name] and name != top and edge.base.count(".") > 1:
        yield f"the inside of {name}; the folders of commands use each other's public names only"


def size_complaints(source: str, name: str) -> list[str]:
    """Return complaints about a Python file, or functions in it, that are too long."""
    complaints = []
    if (lines := source.count("\n")) > MAX_MODULE_LINES:
        complaints.append(f"{name}: {lines} lines, at most {MAX_MODULE_LINES}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                complaints.append(f"{name}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    return complaints


def front_door_complaints(named: Iterable[tuple[str, bool, str]]) -> list[str]:
    """Return packages without a docstring of two to six lines in ``__init__`` that states what belongs there."""
    complaints = []
    for module, is_package, source in named:
        said = (ast.get_docstring(ast.parse(source)) or "").splitlines() if is_package else []
        if is_package and not 2 <= sum(bool(line.strip()) for line in said) <= 6:
            complaints.append(f"{module}: its docstring has {len(said)} lines; say in two to six lines what lives here")
    return complaints


def is_command(module: str, source: str) -> bool:
    """Return whether a module implements a command of the command line.

    Such a module is named like the function it calls.
    """
    return module.startswith(f"{PACKAGE}.cli.") and "\ndef add_parser(" in source


def name_complaints(named: Iterable[tuple[str, bool, str]], shared: Mapping[str, set[str]]) -> list[str]:
    """Find file names of the package, from ``modules``, that occur in several folders.

    Args:
        named: dotted name, whether it is a package, and source of each module.
        shared: the names that are allowed in several folders, and these folders.
    """
    folders: dict[str, set[str]] = {}
    for module, is_package, source in named:
        folder, _, name = module.rpartition(".")
        if not is_package and not is_command(module, source):
            folders.setdefault(name, set()).add(folder.partition(".")[2])
    several = {name: found for name, found in folders.items() if len(found) > 1}
    new = [
        f"{name}.py stands in {', '.join(sorted(found))}; file names are unique: rename one"
        for name, found in sorted(several.items())
        if not found <= shared.get(name, set())
    ]
    gone = [
        f"{name}.py stands in {', '.join(sorted(there)) or 'no folder'} only; set SHARED_NAMES right"
        for name, allowed in sorted(shared.items())
        if not allowed <= (there := folders.get(name, set()))
    ]
    return new + gone


def definition_complaints(named: Iterable[tuple[str, bool, str]]) -> list[str]:
    """Return classes, and public functions of modules other than commands, whose name is used twice."""
    places: dict[str, list[str]] = {}
    for module, _, source in named:
        tree = ast.parse(source)
        functions = [] if module.startswith(f"{PACKAGE}.cli.") else tree.body
        found = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        found |= {node.name for node in functions if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
        for name in found - ASKED_FOR:
            places.setdefault(name, []).append(module)
    return [
        f"{name} is defined in {', '.join(modules)}; one name is one thing: rename one"
        for name, modules in sorted(places.items())
        if len(modules) > 1
    ]


def private_path_complaints(text: str, name: str) -> list[str]:
    """Return absolute paths that exist on one machine only."""
    return [
        f"{name}:{number}: {line.strip()}" for number, line in enumerate(text.splitlines(), 1) if PRIVATE.search(line)
    ]


def modules(root: Path) -> Iterator[tuple[str, bool, str]]:
    """Yield dotted name, whether it is a package, and source of every Python module of the package."""
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        yield ".".join(parts[:-1] if is_package else parts), is_package, path.read_text(encoding="utf-8")
