"""The documentation site: every page is in its navigation, the names of its reference exist, its links lead somewhere.

The build and the links of what it makes are tested where MkDocs is installed: after `make docs`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest
import yaml
from site_pages import navigation

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
NAMES = re.findall(r"^::: (\S+)$", REFERENCE, flags=re.MULTILINE)
# For classes with methods that are not for programs: the members that are shown.
MEMBERS = {
    name: members.split(", ")
    for name, members in re.findall(r"^::: (\S+)\n {4}options: \{members: \[(.+)\]\}$", REFERENCE, flags=re.MULTILINE)
}
needs_mkdocs = pytest.mark.skipif(not find_spec("mkdocstrings"), reason="MkDocs is not installed: make docs")


def test_the_reference_has_every_public_name() -> None:
    package = import_module("megatron_sft_idx")
    assert len(NAMES) == len(set(NAMES))
    assert {f"megatron_sft_idx.{name}" for name in package.__all__} <= set(NAMES)


def test_the_reference_has_every_name_that_pages_import() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    code = "\n".join(
        block for page in pages for block in re.findall(r"^```python.*?^```", page.read_text(), re.S | re.M)
    )
    imported = re.findall(r"^ *from (megatron_sft_idx[\w.]*) import (.+)$", code, flags=re.MULTILINE)
    assert len(imported) > 20
    homes = {
        getattr(import_module(module), name) for module, _, name in (name.rpartition(".") for name in importable())
    }
    missing = [
        f"{module}.{name}"
        for module, names in imported
        if not module.endswith("bridge_config")
        for name in names.split(", ")
        if getattr(import_module(module), name) not in homes
    ]
    assert not missing, missing


def importable() -> Iterator[str]:
    """Return the names of the reference whose modules can be imported without Megatron-Bridge."""
    pytest.importorskip("megatron.core")
    yield from (name for name in NAMES if ".bridge_config." not in name)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_reference_exists(name: str) -> None:
    module, _, last = name.rpartition(".")
    if ".bridge_config." in name:
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        assert f"\nclass {last}(" in source
    else:
        pytest.importorskip("megatron.core")
        assert getattr(import_module(module), last).__doc__


def test_members_of_the_reference_exist() -> None:
    pytest.importorskip("megatron.core")
    assert len(MEMBERS) == REFERENCE.count("options:") > 0
    for name, members in MEMBERS.items():
        module, _, last = name.rpartition(".")
        there = vars(getattr(import_module(module), last))
        assert not [member for member in members if member not in there or not there[member].__doc__], name


def test_the_configuration_needs_no_network() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert config["strict"]
    assert config["theme"]["font"] is False
    assert "://" not in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found: dict[str, Any] = dict(attrs)
        self.anchors |= {found[key] for key in ("id", "name") if found.get(key)}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif address := found.get("src") or (found.get("href") if tag == "link" else None):
            self.loaded.append(address)


def bad_links(site: Path) -> Iterator[str]:
    """Links of the site that lead nowhere, anchors included, and files of other hosts that pages load."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    for path, page in pages.items():
        yield from (f"{path.relative_to(site)} loads {address}" for address in page.loaded if "//" in address)
        for link in {*page.links, *page.loaded}:
            address, anchor = urldefrag(link)
            if "//" in address or path.name == "404.html":
                continue
            target = (path.parent / unquote(address)).resolve() if address else path
            if not target.is_file() or (anchor and target in pages and unquote(anchor) not in pages[target].anchors):
                yield f"{path.relative_to(site)} links to {link}"


@needs_mkdocs
@pytest.mark.slow
def test_the_site_is_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PATH": path}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert not list(bad_links(tmp_path / "site"))
    reference = (tmp_path / "site/docs/reference.html").read_text(encoding="utf-8")
    anchors = Page(reference).anchors
    assert set(NAMES) <= anchors
    for name, members in MEMBERS.items():
        assert {anchor for anchor in anchors if anchor.startswith(f"{name}.")} == {f"{name}.{each}" for each in members}
    assert "<blockquote" not in reference, "an example that is not under Example: in its docstring"


def test_a_bad_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text("<h1 id='there'>B</h1>")
    for link, count in (("b.html", 0), ("b.html#there", 0), ("#here", 0), ("c.html", 1), ("b.html#gone", 1), ("#x", 1)):
        (tmp_path / "a.html").write_text(f"<p id='here'><a href='{link}'>a</a>")
        assert len(list(bad_links(tmp_path))) == count, link
    (tmp_path / "a.html").write_text("<script src='https://example.org/a.js'></script>")
    assert len(list(bad_links(tmp_path))) == 1


def test_every_page_is_in_the_navigation() -> None:
    pages = navigation((ROOT / "docs/README.md").read_text(encoding="utf-8"))
    groups = [pages, *(value for page in pages for value in page.values() if isinstance(value, list))]
    named = [value for group in groups for page in group for value in page.values() if isinstance(value, str)]
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")} <= set(named)
    assert len(groups) > 5
