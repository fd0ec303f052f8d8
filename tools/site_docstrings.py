"""An extension of griffe, which reads the docstrings for the documentation site (see ``mkdocs.yml``)."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):  # type: ignore[misc]
    """Spell the heading of examples in docstrings as griffe knows it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of a class, function or module before it is parsed."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
