"""The examples in docstrings print what they show, and every name of the API reference has an example.

The examples of each docstring run in a new folder. Paths of DATA that the docstring mentions are created there.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from bridge_modules import MISSING, bridge_folder, forget, make_bare
from house import is_light
from pbins import pbin_of
from sample_packs import demo_samples, write_samples

import megatron_sft_idx
from megatron_sft_idx.layout.column import PAIR
from megatron_sft_idx.layout.media_layout import MediaItem
from megatron_sft_idx.shard import ShardWriter
from megatron_sft_idx.tokenize import preprocess

ROOT = Path(__file__).parents[2]
PACKAGE = "megatron_sft_idx"


# ---- what examples read ----


def write_tools() -> None:
    """The tokenizer and the chats of the demo, where they are in a clone."""
    Path("tools").symlink_to(ROOT / "tools")


def write_pairs() -> None:
    """One pack with two preference pairs: two prompts of two tokens, with answers of one or two."""
    columns = {"pair": PAIR}
    with ShardWriter("data/pairs", columns=columns, durable=False) as writer:
        tokens, mask = [1, 2, 7, 1, 2, 8, 3, 4, 7, 9, 3, 4, 8], [0, 1, 0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0]
        pairs = [[0, 0], [0, 1], [1, 0], [1, 1]]
        writer.add_pack(tokens, mask, [0, 3, 6, 10], columns={"pair": pairs})


def write_colours() -> None:
    """The folder of a LLaVA model with its processor, and a shard of one pack with one image."""
    transformers = pytest.importorskip("transformers")
    media_processors = pytest.importorskip("media_processors", reason="the extra media is not installed")
    processor = media_processors.llava(Path("data/processor"))
    transformers.LlavaConfig().save_pretrained("data/processor")
    with ShardWriter("data/colours", media=True, durable=False) as writer:
        tokens = [5, *[processor.image_token_id] * 16, 7]
        writer.add_pack(tokens, [0] * 16 + [1, 0], [0], media=[MediaItem("image", 1, 16, media_processors.png(30, 40))])


def write_pictures() -> None:
    """A shard with one image whose file is no picture, for examples that do not look into it."""
    with ShardWriter("data/pictures", media=True, durable=False) as writer:
        item = MediaItem("image", 1, 2, b"the bytes of a PNG file")
        writer.add_pack([5, 90, 90, 7], [0, 0, 1, 0], [0], media=[item])


def write_pbin() -> None:
    """A file of Modalities with three documents."""
    Path("data/text.pbin").write_bytes(pbin_of([[1, 2, 3], [4, 5, 6], [7, 8, 9, 10]]))


def write_catalog() -> None:
    """A finished catalog of two shards, with three and two packs."""
    live_catalogs = pytest.importorskip("live_catalogs", reason="torch is not installed")
    live_catalogs.make_catalog(Path("data/catalog"), [3, 2])


def write_sums() -> None:
    """A shard with the tokens of the demo's tokenizer: one chat."""
    messages = [{"role": "user", "content": "What is 12 x 12?"}, {"role": "assistant", "content": "144."}]
    options = {"tokenizer": ROOT / "tools/demo/tokenizer", "output_prefix": "data/sums", "seq_length": 1024}
    preprocess([{"messages": messages}], **options, workers=0)


DATA: dict[str, Callable[[], Any]] = {
    "data/chats": lambda: write_samples("data/chats", demo_samples()),
    "data/pairs": write_pairs,
    "data/sums": write_sums,
    "data/pictures": write_pictures,
    "data/colours": write_colours,
    "data/text.pbin": write_pbin,
    "data/catalog": write_catalog,
    "tools/demo/": write_tools,
}


# ---- the examples ----


class Documented(NamedTuple):
    """A docstring: its module, the name of what it is about in there, the text, and its first line in the file."""

    module: str
    name: str
    text: str
    line: int

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}".removesuffix(".")


def docstrings_of(tree: ast.Module, module: str) -> Iterator[Documented]:
    """Yield the docstrings of a module and of all classes and functions in it, also of private ones."""

    def visit(node: Any, name: str) -> Iterator[Documented]:
        if (text := ast.get_docstring(node, clean=False)) is not None:
            yield Documented(module, name, text, node.body[0].lineno)
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                yield from visit(child, f"{name}.{child.name}".lstrip("."))

    return visit(tree, "")


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Yield the name and the syntax tree of each module, which is not imported: that may need torch or Bridge."""
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts).removesuffix(".__init__"), ast.parse(path.read_text(encoding="utf-8"))


TREES = dict(sources())
DOCUMENTED = {each.path: each for module, tree in TREES.items() for each in docstrings_of(tree, module)}
EXAMPLES = [each for each in DOCUMENTED.values() if re.search(r"^\s*>>> ", each.text, re.MULTILINE)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run an example in, with a folder ``data``; and no credentials for an object store."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return tmp_path


def needs_bridge(module: str) -> bool:
    """Whether a module imports Megatron-Bridge, by an import statement or by ``import_module``."""
    nodes = list(ast.walk(TREES[module]))
    named = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    named += [node.value for node in nodes if isinstance(node, ast.Constant)]
    return any(isinstance(name, str) and name.startswith("megatron.bridge.") for name in named)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.path.removeprefix(f"{PACKAGE}."))
def test_examples(example: Documented, folder: Path) -> None:
    before = set(sys.modules)
    if not is_light(example.module):
        pytest.importorskip("torch")
        pytest.importorskip("megatron.core")
    if uses_bridge := needs_bridge(example.module):
        if bridge_folder() is None:
            pytest.skip(MISSING)
        make_bare()
    for path, write in DATA.items():
        if path in example.text:
            write()
    names = vars(importlib.import_module(example.module))
    if any(f"{example.path}.".startswith(f"{home}.") for home in REFERENCE.values()):
        # The reader of the reference sees one docstring, so its example must import what it uses. It may use the
        # documented name, np and torch without an import.
        names = {name: names[name] for name in (example.name.split(".")[0], "np", "torch") if name in names}
    test = doctest.DocTestParser().get_doctest(example.text, {**names}, example.path, example.module, example.line)
    try:
        doctest.DebugRunner().run(test)
    except doctest.DocTestFailure as failure:
        difference = doctest.OutputChecker().output_difference(failure.example, failure.got, 0)
        pytest.fail(f"{example.path}: {failure.example.source}{difference}", pytrace=False)
    except doctest.UnexpectedException as failure:
        raise failure.exc_info[1] from None
    finally:
        if uses_bridge:
            forget(before)


# ---- the API reference ----


def home_of(name: str) -> str:
    """Follow imports and aliases from a public name to the definition: ``training.BatchAssembler`` to ``batch``."""
    module, _, own = name.rpartition(".")
    if module == PACKAGE and own in megatron_sft_idx._HOMES:
        return home_of(f"{PACKAGE}.{megatron_sft_idx._HOMES[own]}.{own}")
    if module not in TREES:  # a method
        return f"{home_of(module)}.{own}" if module else name
    for node in TREES[module].body:
        if isinstance(node, ast.ImportFrom) and own in [each.name for each in node.names]:
            return home_of(f"{node.module}.{own}")
        is_alias = isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
        if is_alias and own in [ast.unparse(target) for target in node.targets]:
            return home_of(f"{module}.{ast.unparse(node.value)}")
    return name


def reference() -> list[str]:
    """Return the names that docs/reference.md lists."""
    return re.findall(r"^::: ([\w.]+)$", (ROOT / "docs/reference.md").read_text(encoding="utf-8"), re.MULTILINE)


# The module and name of the definition of each name.
REFERENCE = {name: home_of(name) for name in reference()}


def test_every_name_of_the_reference_has_an_example() -> None:
    unknown = [f"{name}: no docstring in {home}" for name, home in REFERENCE.items() if home not in DOCUMENTED]
    assert not unknown
    having = {example.path for example in EXAMPLES}
    without = [f"{name}: no example in the docstring" for name, home in REFERENCE.items() if home not in having]
    assert not without, "\n".join(without)
