"""The sources follow the rules in ``house.py``, and the checks find violations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from house import (
    HEAVY,
    MAX_MODULE_LINES,
    PACKAGE,
    SHARED_NAMES,
    TOP_LEVEL,
    definition_complaints,
    front_door_complaints,
    import_complaints,
    is_light,
    modules,
    name_complaints,
    private_path_complaints,
    size_complaints,
)

ROOT = Path(__file__).parents[2]
CODE = ("megatron_sft_idx", "tools", "tests", "csrc")


def tracked_files() -> list[Path]:
    """Return the files that git has or would add, without build outputs; skip if this is not a checkout."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout, so what belongs to the project is not known")
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def test_imports_point_down() -> None:
    found = list(modules(ROOT))
    assert len(found) > 3
    complaints = [c for module, is_package, source in found for c in import_complaints(source, module, is_package)]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(
    ("module", "source", "word"),
    [
        ("shard", "from megatron_sft_idx.dataset import SFTIndexedDataset", "above shard"),
        ("shard", "def f():\n    import megatron_sft_idx.builder", "above shard"),
        ("shard.reader", "from ..tokenize import run", "above shard"),
        ("layout", "from . import chat", "above layout"),
        ("chat.chat_rows", "import torch", "only builder, dataset"),
        ("chat.chat_rows", "def f():\n    from torch import Tensor", "only builder, dataset"),
        ("packing", "from megatron.core import parallel_state", "only builder, dataset"),
        ("packing", "class A:\n    if True:\n        import megatron", "only builder, dataset"),
        ("chat.chat_rows", "import pyarrow.parquet", "where it is used"),
        ("inspect", "import transformers", "where it is used"),
        ("cli.main", "import torch", "where it is used"),
        ("", "import torch", "where it is used"),
        ("shard", "from megatron_sft_idx import SFTIndexedDataset", "package's __init__"),
        ("tokenize.run", "from megatron_sft_idx.inspect.text import mark_pack", "inside of inspect"),
        ("tokenize.run", "import megatron_sft_idx.inspect.text", "inside of inspect"),
        ("inspect", "import torch", "where it is used"),
        ("novelty", "", "not in a layer"),
    ],
)
def test_the_walker_sees_a_bad_import(module: str, source: str, word: str) -> None:
    name = f"{PACKAGE}.{module}".rstrip(".")
    complaints = import_complaints(source, name, is_package="." not in name)
    assert len(complaints) == 1
    assert word in complaints[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("shard.reader", "from ..errors import FormatError\nfrom . import writer\nimport numpy as np"),
        ("chat.chat_rows", "def f():\n    import pyarrow.parquet"),
        ("chat.chat_rows", "if TYPE_CHECKING:\n    import transformers"),
        ("dataset", "import torch\nfrom megatron_sft_idx.shard.reader import Shard"),
        ("cli.main", "def f():\n    import torch"),
        ("tokenize.run", "from megatron_sft_idx.inspect import text\nfrom megatron_sft_idx import __version__"),
        ("", "def __getattr__(name):\n    from megatron_sft_idx.dataset import SFTIndexedDataset"),
    ],
)
def test_the_walker_lets_a_good_import_pass(module: str, source: str) -> None:
    assert not import_complaints(source, f"{PACKAGE}.{module}".rstrip("."))


def test_importing_the_light_layers_imports_nothing_heavy() -> None:
    light = [module for module, _, _ in modules(ROOT) if is_light(module) and not module.endswith("__main__")]
    program = f"import sys, {', '.join(light)}\nprint(*sorted(set(sys.modules) & {HEAVY!r}))"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


def test_long_files_and_functions_are_reported() -> None:
    """This is only a report, which pytest shows with -rP: modules are split by subject, never to meet a number."""
    complaints = []
    for path in tracked_files():
        name = path.relative_to(ROOT)
        if name.parts[0] not in CODE:
            continue
        if path.suffix == ".py":
            complaints += size_complaints(path.read_text(encoding="utf-8"), str(name))
        elif path.suffix in (".cc", ".h") and (lines := path.read_bytes().count(b"\n")) > MAX_MODULE_LINES:
            complaints.append(f"{name}: {lines} lines, at most {MAX_MODULE_LINES}")
    print("\n".join(complaints))


def test_long_files_and_functions_are_seen() -> None:
    body = "def short():\n    pass\n\n\nasync def long():\n" + "    x = 1\n" * 70
    assert size_complaints(body, "a.py") == ["a.py:5: long has 71 lines, at most 70"]
    assert size_complaints("x = 1\n" * 701, "a.py") == ["a.py: 701 lines, at most 700"]
    assert size_complaints("x = 1\n" * 400, "a.py") == []


def test_every_folder_says_what_it_is_for() -> None:
    complaints = front_door_complaints(modules(ROOT))
    assert not complaints, "\n".join(complaints)
    short, plain, long = '"""A room."""', '"""A room.\n\nFor guests.\n"""', '"""A room.\n\n' + "More.\n" * 6 + '"""'
    assert front_door_complaints([("a.b", True, plain), ("a.b.c", False, short)]) == []
    assert [len(front_door_complaints([("a.b", True, source)])) for source in ("", short, long)] == [1, 1, 1]


def test_file_names_are_unique() -> None:
    complaints = name_complaints(modules(ROOT), SHARED_NAMES)
    assert not complaints, "\n".join(complaints)


def test_a_second_file_of_a_name_is_seen() -> None:
    verb, reader = "import x\n\n\ndef add_parser():\n    pass\n", "def read():\n    pass\n"
    one, other = (f"{PACKAGE}.shard.reader", False, reader), (f"{PACKAGE}.formats.reader", False, reader)
    assert name_complaints([one, (f"{PACKAGE}.cli.reader", False, verb), (f"{PACKAGE}.a.reader", True, "")], {}) == []
    assert name_complaints([one, other], {"reader": {"shard", "formats"}}) == []
    for complaints in (
        name_complaints([one, other], {}),
        name_complaints([one, other, (f"{PACKAGE}.a.reader", False, "")], {"reader": {"shard", "formats"}}),
        name_complaints([one, (f"{PACKAGE}.cli.reader", False, reader)], {}),
        name_complaints([one], {"reader": {"shard", "formats"}}),
    ):
        assert len(complaints) == 1
        assert complaints[0].startswith("reader.py stands in ")


def test_a_name_is_one_thing() -> None:
    complaints = definition_complaints(modules(ROOT))
    assert not complaints, "\n".join(complaints)


def test_a_second_class_or_function_of_a_name_is_seen() -> None:
    one = (f"{PACKAGE}.a.b", False, "class _Run:\n    def read(self): pass\ndef _cut(): pass\ndef read(): pass\n")
    assert definition_complaints([one, (f"{PACKAGE}.c.d", False, "def _cut(): pass\nclass Reader: pass\n")]) == []
    assert definition_complaints([one, (f"{PACKAGE}.cli.read", False, "def read(): pass\n")]) == []
    for source in ("class _Run: pass", "def read(): pass", "def f():\n    class _Run: pass"):
        (complaint,) = definition_complaints([one, (f"{PACKAGE}.c.d", False, source)])
        assert f"is defined in {PACKAGE}.a.b, {PACKAGE}.c.d" in complaint


def test_the_top_level_holds_what_it_should() -> None:
    entries = {path.relative_to(ROOT).parts[0] for path in tracked_files()}
    assert {entry for entry in entries if not entry.startswith(".")} <= TOP_LEVEL


def test_no_file_names_a_private_path() -> None:
    complaints = []
    for path in tracked_files():
        if b"\0" not in (content := path.read_bytes()):
            text = content.decode("utf-8", "replace")
            complaints += private_path_complaints(text, str(path.relative_to(ROOT)))
    assert not complaints, "\n".join(complaints)


def test_private_paths_are_seen() -> None:
    # In two strings, so that this file passes its own check.
    assert private_path_complaints("x\nopen('/tm" + "p/a.bin')\n", "a.py") == ["a.py:2: open('/tm" + "p/a.bin')"]
    assert private_path_complaints("see /wor" + "k/shared", "a.md")
    assert not private_path_complaints("https://example.org/wor" + "k/a and ./tm" + "p/x", "a.md")
