"""The pages of the documentation site: hooks that MkDocs calls (``mkdocs.yml``).

The site has the same folders as the repository, so that the links between pages work in both without being rewritten.
docs/README.md, the index of the documentation, is the navigation too.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parent.parent
INDEX = "docs/README.md"
PATTERNS = [
    "*.md",
    "LICENSE",
    "docs/*.md",
    "docs/*.png",
    "docs/*.svg",
    "docs/site.css",
    "examples/*",
    "megatron_sft_idx/FORMAT.md",
    "tests/prose_words.txt",
    "tools/bench/RESULTS.md",
    "tools/bench/results/*.svg",
]


def github_anchor(heading: str, separator: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def navigation(index: str) -> list[dict[str, Any]]:
    """Read the navigation from the table of docs/README.md: rows of pages, and rows that name a group in bold."""
    pages: list[dict[str, Any]] = [{"Home": "README.md"}, {"Overview": INDEX}]
    group = pages
    for line in index.splitlines():
        if bold := re.match(r"\| \*\*(.+)\*\* \|", line):
            group = []
            pages.append({bold[1]: group})
        elif row := re.match(r"\| .+ \| \[(.+)\]\(([^#]+\.md)\) \|", line):
            group.append({row[1]: str((ROOT / "docs" / row[2]).resolve().relative_to(ROOT))})
    return pages


def on_config(config: MkDocsConfig) -> None:
    """Set what depends on other files or is a function."""
    config.nav = navigation((ROOT / INDEX).read_text(encoding="utf-8"))
    config.mdx_configs["toc"]["slugify"] = github_anchor


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by all files of the site, under their paths in the repository."""
    from mkdocs.structure.files import File, Files

    paths = [path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))]
    names = [path.relative_to(ROOT).as_posix() for path in paths]
    named = [File(name, str(ROOT), config.site_dir, config.use_directory_urls) for name in names]
    return Files([*(file for file in files if file.src_dir != config.docs_dir), *named])


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Keep only the language after a fence: the words after it are for the tests."""
    return re.sub(r"^( *```\w+) .+$", r"\1", markdown, flags=re.MULTILINE)


def on_page_content(html: str, **_: Any) -> str:
    """Keep options in running text on one line: browsers would break it between the two hyphens."""
    return re.sub(
        r"<code>[^<]*--[^<]*</code>",
        lambda code: re.sub(r"--[\w-]+", r'<span class="option">\g<0></span>', code[0]),
        html,
    )
