"""Run the code cells of a notebook in this process, and compare or write what they show.

``python tests/notebooks.py examples/masks.ipynb`` runs a notebook and stores its outputs, without Jupyter: the cells
are plain Python, without magics.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def lines(text: str) -> list[str]:
    """Text as notebooks store it."""
    return text.splitlines(keepends=True)


def outputs_of(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Run a cell in a namespace; what it printed, and the value of its last expression."""
    body = ast.parse(source)
    last = None
    if body.body and isinstance(body.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        last = ast.Expression(body.body.pop().value)  # type: ignore[attr-defined]
    value, printed = None, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(body, f"cell {count}", "exec"), names)
        if last:
            value = eval(compile(last, f"cell {count}", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines(printed.getvalue())})
    if value is not None:
        data = {"text/plain": lines(repr(value))}
        if hasattr(value, "_repr_html_"):
            data = {"text/html": lines(value._repr_html_()), **data}
        outputs.append({"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"})
    return outputs


def executed(notebook: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The notebook with the outputs of a run in the current folder, and the names that its cells defined."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for cell in notebook["cells"]:
        made = dict(cell)
        if cell["cell_type"] == "code":
            count += 1
            made |= {"execution_count": count, "outputs": outputs_of("".join(cell["source"]), names, count)}
        cells.append(made)
    return {**notebook, "cells": cells}, names


def folder_like_a_clone(folder: Path) -> Path:
    """An empty folder ``examples`` next to the demo's files."""
    (folder / "tools").symlink_to(ROOT / "tools")
    (folder / "examples").mkdir()
    return folder / "examples"


def main(path: str) -> None:
    text = Path(path).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder_like_a_clone(Path(folder)))
        notebook, _ = executed(json.loads(text))
        os.chdir(ROOT)
    Path(path).write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]))
