"""README.md and docs/: every block runs unchanged and prints the shown output, and all links are valid."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import bench_read
import pytest
from doc_blocks import (
    ELSEWHERE,
    PAGES,
    ROOT,
    RUN,
    Block,
    Said,
    blocks_of,
    clone,
    complaint,
    fast_environment,
    outputs,
    paste,
)
from doc_checks import CHECKS
from training_twin import pretrain_script

from megatron_sft_idx import pretrain
from megatron_sft_idx.cli.main import build_parser
from megatron_sft_idx.training import megatron_arguments

BLOCKS = {page: blocks_of(page) for page in PAGES}
ALL = [block for blocks in BLOCKS.values() for block in blocks]
LINKED = [*PAGES, "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md"]
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in LINKED}


def program(folder: Path) -> Callable[[Block], Said]:
    """Return a function that runs Python blocks in this process, which has already imported torch and Megatron."""

    def run(block: Block) -> Said:
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            patch.chdir(folder)
            exec(compile(block.text, block.place, "exec"), {"__name__": "__main__"})
        return Said(out.getvalue(), err.getvalue())

    return run


@pytest.fixture(scope="module")
def after_the_readme(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return the folder after the README's blocks, which the pages in docs/ continue in, and the wrong outputs."""
    folder = clone(tmp_path_factory.mktemp("clone"))
    return folder, wrongly_shown("README.md", RUN, folder)


def test_the_readme_can_be_pasted_from_top_to_bottom(after_the_readme: tuple[Path, list[str]]) -> None:
    folder, wrong = after_the_readme
    assert not wrong, "\n\n".join(wrong)
    assert_ignored(folder)


@pytest.mark.sample(4)
@pytest.mark.parametrize("page", [page for page in PAGES[1:] if any(block.kind in RUN for block in BLOCKS[page])])
def test_a_page_can_be_pasted_from_top_to_bottom(page: str, after_the_readme: tuple[Path, list[str]]) -> None:
    folder, _ = after_the_readme
    wrong = wrongly_shown(page, RUN, folder)
    assert not wrong, "\n\n".join(wrong)
    assert_ignored(folder)


@pytest.mark.slow
def test_the_pages_with_their_long_blocks(tmp_path: Path) -> None:
    folder = clone(tmp_path)
    long = [page for page in PAGES[1:] if any(block.kind == "sh slow" for block in BLOCKS[page])]
    assert len(long) > 1
    wrong = wrongly_shown("README.md", RUN, folder)
    for page in long:
        wrong += wrongly_shown(page, {*RUN, "sh slow"}, folder)
    assert not wrong, "\n\n".join(wrong)
    assert_ignored(folder)


def wrongly_shown(page: str, kinds: set[str], folder: Path) -> list[str]:
    """Paste the blocks of these kinds and check their exit codes. Return outputs that differ from the page."""
    pasted = [block for block in BLOCKS[page] if block.kind in kinds]
    said = paste(pasted, folder, fast_environment(folder), 1800, program(folder))
    wrong = [complaint(shown, said[block]) for block, shown in outputs(BLOCKS[page]) if block in said]
    return [one for one in wrong if one]


def assert_ignored(folder: Path) -> None:
    """Check that git ignores all files that the blocks make."""
    made = {path.name + "/" * path.is_dir() for path in folder.iterdir()} - {
        "tools/",
        "megatron_sft_idx/",
        ".programs/",
    }
    git = ["git", "check-ignore", "--no-index", *made]
    ignored = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
    if ignored.returncode != 128:  # not a checkout
        assert set(ignored.stdout.split()) == made


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_blocks_that_need_more(kind: str) -> None:
    places = [block.place for block in ALL if block.kind == kind]
    assert places, f"no block is {kind}: take it out of ELSEWHERE"
    pytest.skip(f"{', '.join(places)}: {ELSEWHERE[kind]}")


@pytest.mark.parametrize("block", [block for block in ALL if block.kind in CHECKS], ids=lambda block: block.place)
def test_a_block_that_is_no_command(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CHECKS[block.kind](block, tmp_path, monkeypatch)


def test_no_block_is_left_out() -> None:
    unknown = [
        f"{block.place}: {block.kind!r}" for block in ALL if block.kind not in {*RUN, *ELSEWHERE, *CHECKS, "text"}
    ]
    assert not unknown, "\n".join(unknown)
    shown = {block for blocks in BLOCKS.values() for _, block in outputs(blocks)}
    stray = [block.place for block in ALL if block.kind == "text" and block not in shown]
    assert not stray, f"the output of nothing: {stray}"


def test_the_readme_is_short() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 220


def test_the_index_has_every_page() -> None:
    listed = set(re.findall(r"\]\(([^)#\s]+)", TEXTS["docs/README.md"]))
    there = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert there <= listed


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page: str) -> None:
    prose = re.sub(r"^ *```.*?^ *```$|`[^`\n]*`", "", TEXTS[page], flags=re.DOTALL | re.MULTILINE)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        found = (ROOT / page).parent / path if path else ROOT / page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    assert not broken, f"{page}: {broken}"


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_extras_exist() -> None:
    table = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[project.optional-dependencies]")[1]
    there = set(re.findall(r"^([a-z]+) = \[", table.split("\n[")[0], flags=re.MULTILINE))
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "megatron_sft_idx").rglob("*.py")]
    named = [
        extra
        for text in [*TEXTS.values(), *sources]
        for found in re.findall(r"(?:'\.|megatron-sft-idx)\[([a-z,]+)\]", text)
        for extra in found.split(",")
    ]
    assert len(named) > 10
    assert set(named) <= there


def named_in(module: str, names: Sequence[str]) -> bool:
    """Return whether ``names`` exist, starting at a module, through modules and classes."""
    found: Any = import_module(module)
    for name in names:
        if (path := getattr(found, "__path__", None)) and find_spec(f"{found.__name__}.{name}", path):
            found = import_module(f"{found.__name__}.{name}")
        elif hasattr(found, name):
            found = getattr(found, name)
        else:
            return False
    return True


def names_of_code(text: str) -> list[str]:
    """Return the names in backquotes that look like modules of the package, or names in modules."""
    quoted = re.findall(r"`([A-Za-z_][\w.]*)`", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE))
    return [name.removeprefix("megatron_sft_idx.") for name in quoted if "." in name and not name.endswith(".py")]


def test_the_code_has_the_names() -> None:
    named = [name for name in names_of_code(TEXTS["docs/development.md"]) if name != "PREFIX.parts"]
    assert len(named) > 60
    assert {name.split(".")[0] for name in named} >= {"chat", "tokenize", "shard", "training", "live", "formats", "cli"}
    missing = [name for name in named if not named_in("megatron_sft_idx", name.split("."))]
    assert not missing, f"docs/development.md names what is not there: {missing}"


def test_a_name_that_is_gone_is_seen() -> None:
    text = "`shard.writer` `megatron_sft_idx.shard.writer.ShardWriter.gone` `rows` `a.py`\n```\n`a.b`\n```\n"
    assert names_of_code(text) == ["shard.writer", "shard.writer.ShardWriter.gone"]
    for name in ("shard.writer", "shard.writer.ShardWriter.add_packs", "_native.PackStage"):
        assert named_in("megatron_sft_idx", name.split("."))
    for name in ("shard.scribe", "shard.writer.Scribe", "shard.writer.ShardWriter.gone", "room.writer"):
        assert not named_in("megatron_sft_idx", name.split("."))


def test_paths_of_the_developers_pages_exist() -> None:
    for page in ("docs/development.md", "CONTRIBUTING.md"):
        named = re.findall(r"`((?:[\w.]+/)+[\w.]*)`", TEXTS[page])
        assert named, page
        missing = [name for name in named if not name.startswith(("build/", "data/")) and not (ROOT / name).exists()]
        assert not missing, f"{page}: {missing}"


def test_make_has_the_targets() -> None:
    there = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = {name for text in TEXTS.values() for name in re.findall(r"(?:`|^)make ([a-z-]+)", text, flags=re.MULTILINE)}
    assert len(named) > 5
    assert named <= there


# Options of other programs that the pages mention, except Megatron-LM's about data.
OTHERS = {
    *("--constraint", "--editable", "--local-dir", "--nproc-per-node"),  # pip, hf, torchrun
    *("--calculate-per-token-loss", "--dynamic-context-parallel", "--moe-token-dispatcher-type", "--spec"),
    *("--hybrid-layer-pattern", "--position-embedding-type", "--dist-ckpt-optim-fully-reshardable", "--no-load-optim"),
    "--fim",  # with a star, for all options with this prefix; these are Megatron-LM's
    *("--n-samples-per-prompt", "--disable-compute-advantages-and-returns", "--rollout-top-p", "--data-source-path"),
    *("--debug-train-only", "--prompt-data", "--rollout-function-path", "--use-dynamic-batch-size", "--loss-type"),
    "--max-tokens-per-gpu",  # these are slime's
}


def flags_of_data() -> set[str]:
    """Return Megatron-LM's arguments about data, as written on the command line."""
    tables = (getattr(megatron_arguments, name) for name in ("FIELDS", "LOOKED_AT", "REFUSED", "ELSEWHERE"))
    names = {name.replace("_", "-") for table in tables for name in table}
    return {f"--{no}{name}" for name in names for no in ("", "no-")}


@pytest.mark.parametrize("page", PAGES)
def test_options_exist(page: str) -> None:
    ours = set(pretrain_script().build_parser()._option_string_actions)
    ours |= set(bench_read.build_parser()._option_string_actions)
    ours |= {*pretrain.build_parser()._option_string_actions, *flags_of_data()}
    (verbs,) = (action for action in build_parser()._actions if isinstance(action.choices, dict))
    for verb in verbs.choices.values():
        ours |= set(verb._option_string_actions)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", TEXTS[page]))
    assert named <= ours | OTHERS
