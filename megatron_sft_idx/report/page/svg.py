"""Elements of inline SVG; every value is escaped."""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup

__all__ = ["element", "joined", "number"]


def element(name: str, content: str = "", **attributes: str | float) -> Markup:
    """``<name ...>content</name>``.

    Args:
        name: of the element.
        content: text, escaped unless it is markup.
        **attributes: ``_`` at the end of a name is dropped, any other becomes ``-``; numbers get one digit behind
            the point, which is a tenth of a pixel.
    """
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    written = joined(
        Markup(' {}="{}"').format(key, value if isinstance(value, str) else number(value)) for key, value in pairs
    )
    return Markup("<{}{}>{}</{}>").format(name, written, content, name)


def number(value: float) -> str:
    """With one digit behind the point where that is not 0."""
    return f"{value:.1f}".removesuffix(".0")


def joined(parts: Iterable[Markup]) -> Markup:
    """Markup end to end."""
    return Markup("").join(parts)
